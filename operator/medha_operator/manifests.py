"""The objects around a MedhaReplica's pods, as the API gets them: pure functions of the resource.

    Service <mr>-workers              gives every pod a DNS name, ready or not
    Service <mr>-leaders              the ready controllers, for metrics and for people
    ConfigMap <mr>-<ordinal>-<hash>   worker.json of one replica; never changed, only replaced
    NetworkPolicy <mr>-<ordinal>      a replica's pods talk to each other, and else as settings say
    PodDisruptionBudget <mr>          nobody evicts a pod: the operator moves its work first

Each carries the hash of its content, so that what stands as wanted is not written again. Pods are
in `pods`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from medha.config import CONTROLLER_OPS_PORT, POD_OPS_PORT, RANK_PORT, STORE_PORT, Curve, render
from medha.rendering import Site, worker_config
from medha.spec import API_VERSION, KIND, MedhaReplica
from medha_operator import names
from medha_operator.settings import Flows, Settings

Manifest = dict[str, Any]

CONFIG_FILE = "worker.json"
CONFIG_FOLDER = "/etc/medha"
KEYS_FOLDER = "/etc/medha/keys"
MODELS_FOLDER = "/models"
RUN_FOLDER = "/tmp"
# More than any replica has pods. A share of them would be counted from /scale, which counts
# replicas and not pods.
_EVERY_POD = 1_000_000


def digest(content: object) -> str:
    """Ten hexadecimal digits that differ where `content` does."""
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:10]


def owner(resource: MedhaReplica) -> Manifest:
    """The reference by which the cluster removes what is ours with the resource."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": resource.name,
        "uid": resource.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(
    resource: MedhaReplica,
    name: str,
    labels: Mapping[str, str] = {},
    annotations: Mapping[str, str] = {},
) -> Manifest:
    """Name, place, labels and owner of an object of ours."""
    found: Manifest = {
        "name": name,
        "namespace": resource.namespace,
        "labels": {
            **names.OWNED_BY,
            "app.kubernetes.io/name": "medha-worker",
            **labels,
            names.RESOURCE: resource.name,
        },
        "ownerReferences": [owner(resource)],
    }
    if annotations:
        found["annotations"] = dict(annotations)
    return found


def checkpoint(resource: MedhaReplica) -> str:
    """The model's folder as the pods see it."""
    source = resource.spec.model.source
    for part in (source.pvc, source.image):
        if part is not None and part.path.strip("/"):
            return f"{MODELS_FOLDER}/{part.path.strip('/')}"
    return MODELS_FOLDER


def worker_json(resource: MedhaReplica, ordinal: int, settings: Settings) -> str:
    """The file that every process of one replica decodes."""
    site = Site(
        checkpoint=checkpoint(resource),
        routers=(settings.fleet_address,),
        curve=Curve(
            secret=f"{KEYS_FOLDER}/controller.secret",
            server_public=f"{KEYS_FOLDER}/router.public",
        ),
        rank_bind=f"tcp://*:{RANK_PORT}",
        rank_curve=Curve(
            secret=f"{KEYS_FOLDER}/rank.secret",
            server_public=f"{KEYS_FOLDER}/controller.public",
            allowed=f"{KEYS_FOLDER}/rank.public",
        ),
        store_bind=f"0.0.0.0:{STORE_PORT}",
        interface="eth0",
        ops_host="0.0.0.0",
        ops_port=CONTROLLER_OPS_PORT,
        run_dir=RUN_FOLDER,
        log_level=settings.log_level,
    )
    return render(
        worker_config(resource, names.replica_name(resource.name, ordinal), site)
    ).decode()


def config_map(
    resource: MedhaReplica, ordinal: int, spec_hash: str, settings: Settings
) -> Manifest:
    return _hashed(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(
                resource,
                names.config_name(resource.name, ordinal, spec_hash),
                {names.ORDINAL: str(ordinal), names.SPEC_HASH: spec_hash},
            ),
            "immutable": True,
            "data": {CONFIG_FILE: worker_json(resource, ordinal, settings)},
        }
    )


def shared_objects(resource: MedhaReplica) -> tuple[Manifest, ...]:
    """What all replicas of the resource share."""
    return (_workers_service(resource), _leaders_service(resource), _disruption_budget(resource))


def follows_readiness(resource: MedhaReplica, manifest: Mapping[str, Any]) -> bool:
    """Whether it is about ready pods alone. Made before there are any, it would only keep the
    cluster's controllers busy with every step of every pod's start.
    """
    leaders = "Service", names.leaders_service(resource.name)
    return key(manifest) in (leaders, ("PodDisruptionBudget", resource.name))


def objects(
    resource: MedhaReplica, ordinals: Iterable[int], spec_hash: str, settings: Settings
) -> tuple[Manifest, ...]:
    """Everything that must stand before the pods of these replicas are made from this spec."""
    ordinals = tuple(ordinals)
    configs = (config_map(resource, each, spec_hash, settings) for each in ordinals)
    return (*shared_objects(resource), *configs, *network_policies(resource, ordinals, settings))


def network_policies(
    resource: MedhaReplica, ordinals: Iterable[int], settings: Settings
) -> tuple[Manifest, ...]:
    """One for each of these replicas, where they are wanted.

    Collectives and page transfers choose their ports when they start and are not encrypted: all
    ports are open, to the pods of the same replica alone.
    """
    flows = settings.worker_flows
    if flows is None:
        return ()
    return tuple(_network_policy(resource, each, flows) for each in ordinals)


def _network_policy(resource: MedhaReplica, ordinal: int, flows: Flows) -> Manifest:
    own = {"matchLabels": {names.RESOURCE: resource.name, names.ORDINAL: str(ordinal)}}
    return _hashed(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(
                resource,
                names.policy_name(resource.name, ordinal),
                {names.ORDINAL: str(ordinal)},
            ),
            "spec": {
                "podSelector": own,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [{"podSelector": own}]}, *flows.ingress],
                "egress": [{"to": [{"podSelector": own}]}, *flows.egress],
            },
        }
    )


def key(manifest: Mapping[str, Any]) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def content_hash(manifest: Mapping[str, Any]) -> str:
    found: str = manifest["metadata"]["annotations"][names.CONTENT_HASH]
    return found


def _hashed(manifest: Manifest) -> Manifest:
    manifest["metadata"].setdefault("annotations", {})[names.CONTENT_HASH] = digest(manifest)
    return manifest


def _workers_service(resource: MedhaReplica) -> Manifest:
    return _headless(
        resource,
        names.workers_service(resource.name),
        {names.RESOURCE: resource.name},
        {"ops": POD_OPS_PORT},
        ready_only=False,
    )


def _leaders_service(resource: MedhaReplica) -> Manifest:
    return _headless(
        resource,
        names.leaders_service(resource.name),
        {names.RESOURCE: resource.name, names.ROLE: names.LEADER},
        {"ops": CONTROLLER_OPS_PORT},
        ready_only=True,
    )


def _headless(
    resource: MedhaReplica,
    name: str,
    selector: Mapping[str, str],
    ports: Mapping[str, int],
    *,
    ready_only: bool,
) -> Manifest:
    return _hashed(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(resource, name),
            "spec": {
                "clusterIP": "None",
                "selector": dict(selector),
                "publishNotReadyAddresses": not ready_only,
                "ports": [
                    {"name": each, "port": port, "targetPort": port, "protocol": "TCP"}
                    for each, port in ports.items()
                ],
            },
        }
    )


def _disruption_budget(resource: MedhaReplica) -> Manifest:
    """Evictions are put off: a cordoned node makes the operator move its work, and a pod that is
    not ready may be one that finishes its requests."""
    return _hashed(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(resource, resource.name),
            "spec": {
                "minAvailable": _EVERY_POD,
                "selector": {"matchLabels": {names.RESOURCE: resource.name}},
                "unhealthyPodEvictionPolicy": "IfHealthyBudget",
            },
        }
    )
