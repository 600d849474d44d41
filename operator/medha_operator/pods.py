"""One pod of a replica as the API gets it: a (KVP group, stage) with `tp` ranks inside.

Pure. What a pod is told beyond the file that all pods of its replica share stands in its
environment. It keeps to the Pod Security standard "restricted" unless the model is a `hostPath`,
which that standard forbids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from medha.config import CONTROLLER_OPS_PORT, POD_OPS_PORT, RANK_PORT, STORE_PORT
from medha.spec import MedhaReplica
from medha.topology import Coordinate
from medha_operator import names
from medha_operator.manifests import (
    CONFIG_FILE,
    CONFIG_FOLDER,
    KEYS_FOLDER,
    MODELS_FOLDER,
    RUN_FOLDER,
    Manifest,
    digest,
    metadata,
    worker_json,
)
from medha_operator.quantities import integer
from medha_operator.settings import Settings

USER = 65532
"""No user of the image's own, and not root."""
GRACE_S = 60
"""How long a leader that is told to end may finish what runs."""
_SHARED_MEMORY_GIB_PER_RANK = 2
_CPU_PER_RANK, _MEMORY_PER_RANK = 100, 256  # millicores, MiB: what a rank needs at the very least
_PROGRAM = ["python", "-m", "medha.cli"]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Which pod, made from which state of the spec, for which node, for the which time."""

    ordinal: int
    at: Coordinate
    node: str
    spec_hash: str
    attempt: int = 1
    gated: bool = False


def spec_hash(resource: MedhaReplica, settings: Settings) -> str:
    """Hash of all that a pod is made from, but for its own place: another one is an update."""
    start = Start(ordinal=0, at=Coordinate(0, 0, 0), node="", spec_hash="")
    return digest(
        [worker_json(resource, 0, settings), _spec(resource, start, settings), _marks(resource)]
    )


def pod(resource: MedhaReplica, start: Start, settings: Settings) -> Manifest:
    """The pod's whole manifest."""
    at = start.at
    leader = at.group == at.stage == 0
    labels = {
        **resource.spec.template.labels,
        names.ORDINAL: str(start.ordinal),
        names.GROUP: str(at.group),
        names.STAGE: str(at.stage),
        names.ROLE: names.LEADER if leader else names.WORKER,
        names.ATTEMPT: str(start.attempt),
        names.SPEC_HASH: start.spec_hash,
    }
    annotations = {
        **(_scraped(leader) if settings.scrape else {}),
        **resource.spec.template.annotations,
        names.TARGET: start.node,
    }
    name = names.pod_name(resource.name, start.ordinal, at)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(resource, name, labels, annotations),
        "spec": _spec(resource, start, settings),
    }


def _scraped(leader: bool) -> dict[str, str]:
    """For a Prometheus that goes by annotations, which have room for one port: the controller's
    where there is one, as it tells the most. No part of the spec's hash: nothing starts anew."""
    port = CONTROLLER_OPS_PORT if leader else POD_OPS_PORT
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/path": "/metrics",
        "prometheus.io/port": str(port),
    }


def pod_requests(resource: MedhaReplica) -> dict[str, int]:
    """What one pod takes of a node, in the units of NodeView."""
    asked = {**_resources(resource)["limits"], **_resources(resource)["requests"]}
    return {"pods": 1} | {name: integer(name, asked[name]) for name in asked}


def _marks(resource: MedhaReplica) -> list[object]:
    """What is not in the pod's spec: its marks, and where it may stand."""
    template, placement = resource.spec.template, resource.spec.placement
    return [
        template.labels, template.annotations, placement.node_selector, placement.pack_level,
    ]  # fmt: skip


def _spec(resource: MedhaReplica, start: Start, settings: Settings) -> Manifest:
    template, at = resource.spec.template, start.at
    spec: Manifest = {
        "hostname": names.pod_name(resource.name, start.ordinal, at),
        "subdomain": names.workers_service(resource.name),
        # A container that gives up fails its pod, and the operator starts the whole group anew.
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [dict(each) for each in resource.spec.placement.tolerations],
        "affinity": _affinity(start.node),
        "containers": [_worker(resource, start, settings)],
        "volumes": _volumes(resource, start),
    }
    if resource.spec.model.source.uri is not None:
        spec["initContainers"] = [_fetch(resource, settings)]
    if start.gated:
        spec["schedulingGates"] = [{"name": names.GANG_GATE}]
    if template.scheduler_name is not None:
        spec["schedulerName"] = template.scheduler_name
    if template.priority_class_name is not None:
        spec["priorityClassName"] = template.priority_class_name
    return spec


def _affinity(node: str) -> Manifest:
    """To the planned node and no other; by its name, so that it needs no label."""
    only = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [only]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _worker(resource: MedhaReplica, start: Start, settings: Settings) -> Manifest:
    template, leader = resource.spec.template, start.at.group == start.at.stage == 0
    ports = {"ops": POD_OPS_PORT}
    if leader:
        ports |= {"controller": CONTROLLER_OPS_PORT, "ranks": RANK_PORT}
        ports |= {"store": STORE_PORT}
    return {
        **_confined(resource, settings),
        "name": "worker",
        "command": [*_PROGRAM, "pod"],
        "env": _environment(resource, start),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": _resources(resource),
        "startupProbe": _probe("/livez", every_s=1, failures=120),
        "readinessProbe": _probe("/readyz", every_s=2, failures=2),
        "livenessProbe": _probe("/livez", every_s=10, failures=3),
        "volumeMounts": [
            {"name": "config", "mountPath": f"{CONFIG_FOLDER}/{CONFIG_FILE}",
             "subPath": CONFIG_FILE, "readOnly": True},
            {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True},
            {"name": "model", "mountPath": MODELS_FOLDER, "readOnly": True},
            {"name": "run", "mountPath": RUN_FOLDER},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *(dict(each) for each in template.volume_mounts),
        ],
    }  # fmt: skip


def _confined(resource: MedhaReplica, settings: Settings) -> Manifest:
    """What every container of ours has: its image, and no rights."""
    return {
        "image": resource.spec.template.image or settings.worker_image,
        "imagePullPolicy": settings.pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }


def _fetch(resource: MedhaReplica, settings: Settings) -> Manifest:
    """Brings the checkpoint from its address into the pod before the ranks start."""
    return {
        **_confined(resource, settings),
        "name": "fetch-model",
        "command": [*_PROGRAM, "fetch", str(resource.spec.model.source.uri), MODELS_FOLDER],
        "env": [dict(each) for each in resource.spec.template.env],
        "volumeMounts": [
            {"name": "model", "mountPath": MODELS_FOLDER},
            {"name": "run", "mountPath": RUN_FOLDER},
        ],
    }


def _environment(resource: MedhaReplica, start: Start) -> list[Manifest]:
    at = start.at
    own = {
        "MEDHA_REPLICA": names.replica_name(resource.name, start.ordinal),
        "MEDHA_KVP_GROUP": str(at.group),
        "MEDHA_SPP_STAGE": str(at.stage),
        "MEDHA_TP": str(resource.spec.parallelism.tp),
        "MEDHA_GENERATION": str(start.attempt),
        "MEDHA_LEADER_ADDRESS": names.leader_address(
            resource.name, resource.namespace, start.ordinal
        ),
    }
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        *({"name": name, "value": value} for name, value in own.items()),
        {"name": "MEDHA_POD_IP", "valueFrom": address},
        *(dict(each) for each in resource.spec.template.env),
    ]


def _resources(resource: MedhaReplica) -> dict[str, dict[str, Any]]:
    """Devices by the spec; of processor and memory little, unless the template says more."""
    tp, device = resource.spec.parallelism.tp, resource.spec.device.resource_name
    devices = {device: tp} if device else {}
    given: Mapping[str, Any] = resource.spec.template.resources
    least = {"cpu": f"{_CPU_PER_RANK * tp}m", "memory": f"{_MEMORY_PER_RANK * tp}Mi"}
    return {
        "requests": {**least, **devices, **given.get("requests", {})},
        "limits": {**devices, **given.get("limits", {})},
    }


def _probe(path: str, *, every_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "ops"},
        "periodSeconds": every_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(resource: MedhaReplica, start: Start) -> list[Manifest]:
    config = names.config_name(resource.name, start.ordinal, start.spec_hash)
    shared = _SHARED_MEMORY_GIB_PER_RANK * resource.spec.parallelism.tp
    return [
        {"name": "config", "configMap": {"name": config}},
        {"name": "keys", "secret": {"secretName": names.WORKER_KEYS, "defaultMode": 0o440}},
        {"name": "model", **_model_volume(resource)},
        {"name": "run", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared}Gi"}},
        *(dict(each) for each in resource.spec.template.volumes),
    ]


def _model_volume(resource: MedhaReplica) -> Manifest:
    """Where the checkpoint comes from; see `checkpoint` for the folder inside."""
    source = resource.spec.model.source
    if source.host_path is not None:
        return {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return {"persistentVolumeClaim": claim}
    if source.image is not None:
        return {"image": {"reference": source.image.reference, "pullPolicy": "IfNotPresent"}}
    return {"emptyDir": {}}
