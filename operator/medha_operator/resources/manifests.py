"""The manifests of a MedhaReplica's pods and of the objects around them: functions of the resource.

    Pod <mr>-<ordinal>-g<k>-s<j>      a (KVP group, stage) with `tp` ranks
    Service <mr>-workers              gives every pod a DNS name, ready or not
    Service <mr>-leaders              the ready controllers, for metrics and for people
    ConfigMap <mr>-<ordinal>-<hash>   worker.json of one replica; immutable, and kept as long as
                                      one of its pods mounts it
    NetworkPolicy <mr>-<ordinal>      a replica's pods reach each other; all else by the settings
    PodDisruptionBudget <mr>-<ordinal>  no pod of a replica is evicted before it is drained

Each object but the pods carries the hash of its content, so that an unchanged one is not written
again. The checks of a spec beyond the API's own are at the end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from medha.config import (
    CONTROLLER_OPS_PORT,
    POD_OPS_PORT,
    RANK_PORT,
    STORE_PORT,
    AdapterFolder,
    Curve,
    render,
)
from medha.errors import SpecError
from medha.rendering import Site, worker_config
from medha.spec import KIND, MedhaReplica
from medha.spec.values import AdapterSpec, CheckpointSource, PlacementSpec, TemplateSpec
from medha.topology import Coordinate
from medha_operator.resources import labels as names
from medha_operator.resources.objects import integer
from medha_operator.settings import Flows, Settings

Manifest = dict[str, Any]
T = TypeVar("T")

CONFIG_FILE = "worker.json"
CONFIG_FOLDER = "/etc/medha"
KEYS_FOLDER = "/etc/medha/keys"
MODELS_FOLDER, ADAPTERS_FOLDER = "/models", "/adapters"
RUN_FOLDER = "/tmp"


def replica_name(resource: str, ordinal: int) -> str:
    """Name a replica in messages, metrics and logs, e.g. `llama-70b-0`."""
    return f"{resource}-{ordinal}"


def pod_name(resource: str, ordinal: int, at: Coordinate) -> str:
    """Name the pod of a (group, stage), which holds `tp` ranks. The shard is ignored."""
    return f"{resource}-{ordinal}-g{at.group}-s{at.stage}"


def leader_address(resource: str, namespace: str, ordinal: int) -> str:
    """Return the DNS name of the pod with the replica's controller."""
    leader = pod_name(resource, ordinal, Coordinate(0, 0, 0))
    return f"{leader}.{workers_service(resource)}.{namespace}.svc"


def workers_service(resource: str) -> str:
    return f"{resource}-workers"


def leaders_service(resource: str) -> str:
    return f"{resource}-leaders"


def policy_name(resource: str, ordinal: int) -> str:
    """Name the NetworkPolicy of one replica."""
    return replica_name(resource, ordinal)


def config_name(resource: MedhaReplica, ordinal: int, settings: Settings) -> str:
    """Name the ConfigMap of one replica: one name per content and worker image."""
    content = [worker_json(resource, ordinal, settings), worker_image(resource, settings)]
    return f"{replica_name(resource.name, ordinal)}-{digest(content)}"


def worker_image(resource: MedhaReplica, settings: Settings) -> str:
    return resource.spec.template.image or settings.worker_image


def digest(content: object) -> str:
    """Hash `content` to ten hexadecimal digits."""
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:10]


def owner(resource: MedhaReplica) -> Manifest:
    """Build the owner reference by which the cluster deletes objects with their resource."""
    return {
        "apiVersion": resource.api_version,
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
    """Build name, namespace, labels and owner of an object."""
    body: Manifest = {
        "name": name,
        "namespace": resource.namespace,
        "labels": {
            **names.OBJECT,
            **labels,
            names.RESOURCE: resource.name,
        },
        "ownerReferences": [owner(resource)],
    }
    if annotations:
        body["annotations"] = dict(annotations)
    return body


def checkpoint(resource: MedhaReplica) -> str:
    """Return the model's folder inside the pods."""
    return _folder(resource.spec.model.source, MODELS_FOLDER)


def adapters(resource: MedhaReplica) -> tuple[AdapterFolder, ...]:
    """Return the adapters with their folders inside the pods."""
    return tuple(
        AdapterFolder(name=adapter.name, folder=_folder(adapter.source, _mount(adapter)))
        for adapter in resource.spec.adapters
    )


def _mount(adapter: AdapterSpec) -> str:
    """Return where an adapter's volume is mounted."""
    return f"{ADAPTERS_FOLDER}/{adapter.name}"


def _folder(source: CheckpointSource, mount: str) -> str:
    """Return the folder of a source whose volume is mounted at `mount`."""
    for part in (source.pvc, source.image):
        if part is not None and part.path.strip("/"):
            return f"{mount}/{part.path.strip('/')}"
    return mount


def worker_json(resource: MedhaReplica, ordinal: int, settings: Settings) -> str:
    """Render the file that every process of one replica decodes."""
    site = Site(
        checkpoint=checkpoint(resource),
        adapters=adapters(resource),
        routers=(settings.router,),
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
    return render(worker_config(resource, replica_name(resource.name, ordinal), site)).decode()


def config_map(resource: MedhaReplica, ordinal: int, settings: Settings) -> Manifest:
    return _hashed(
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(
                resource,
                config_name(resource, ordinal, settings),
                {names.ORDINAL: str(ordinal)},
            ),
            "immutable": True,
            "data": {CONFIG_FILE: worker_json(resource, ordinal, settings)},
        }
    )


def shared_objects(resource: MedhaReplica) -> tuple[Manifest, ...]:
    """Build the objects that all replicas of the resource share."""
    return (_workers_service(resource), _leaders_service(resource))


def follows_readiness(resource: MedhaReplica, manifest: Mapping[str, Any]) -> bool:
    """Return whether the object concerns ready pods alone.

    Before there are any, it would only make the cluster's controllers follow every pod's start.
    """
    return not needed_by_pods(resource, key(manifest))


def needed_by_pods(resource: MedhaReplica, place: tuple[str, str]) -> bool:
    """Return whether pods cannot run without the object of this kind and name."""
    leaders = "Service", leaders_service(resource.name)
    return place != leaders and place[0] != "PodDisruptionBudget"


def objects(
    resource: MedhaReplica,
    ordinals: Iterable[int],
    settings: Settings,
    configured: Container[int] = (),
) -> tuple[Manifest, ...]:
    """Build all objects that the pods of these replicas need before they are created. `configured`
    replicas keep the ConfigMap that they have."""
    ordinals = tuple(ordinals)
    configs = (
        config_map(resource, ordinal, settings) for ordinal in ordinals if ordinal not in configured
    )
    return (*shared_objects(resource), *configs, *network_policies(resource, ordinals, settings))


def network_policies(
    resource: MedhaReplica, ordinals: Iterable[int], settings: Settings
) -> tuple[Manifest, ...]:
    """Build one policy for each of these replicas, if the settings ask for policies.

    Collectives and page transfers choose their ports when they start and are not encrypted: all
    ports are open, but only to the pods of the same replica.
    """
    flows = settings.worker_flows
    if flows is None:
        return ()
    return tuple(_network_policy(resource, ordinal, flows) for ordinal in ordinals)


def _network_policy(resource: MedhaReplica, ordinal: int, flows: Flows) -> Manifest:
    own = {"matchLabels": {names.RESOURCE: resource.name, names.ORDINAL: str(ordinal)}}
    return _hashed(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(
                resource,
                policy_name(resource.name, ordinal),
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
    value: str = manifest["metadata"]["annotations"][names.CONTENT_HASH]
    return value


def _hashed(manifest: Manifest) -> Manifest:
    manifest["metadata"].setdefault("annotations", {})[names.CONTENT_HASH] = digest(manifest)
    return manifest


def _workers_service(resource: MedhaReplica) -> Manifest:
    return _headless(
        resource,
        workers_service(resource.name),
        {names.RESOURCE: resource.name},
        {"ops": POD_OPS_PORT},
        ready_only=False,
    )


def _leaders_service(resource: MedhaReplica) -> Manifest:
    return _headless(
        resource,
        leaders_service(resource.name),
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
                    {"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"}
                    for port_name, port in ports.items()
                ],
            },
        }
    )


def disruption_budget(resource: MedhaReplica, ordinal: int, pods: int) -> Manifest:
    """Block evictions of a replica with this many pods: a cordoned node makes the operator move its
    replicas, and a pod that is not ready may still finish its requests.

    A number, as a percentage would be taken of /scale, which counts replicas instead of pods.
    """
    own = {names.RESOURCE: resource.name, names.ORDINAL: str(ordinal)}
    return _hashed(
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(
                resource, replica_name(resource.name, ordinal), {names.ORDINAL: str(ordinal)}
            ),
            "spec": {
                "minAvailable": pods,
                "selector": {"matchLabels": own},
                "unhealthyPodEvictionPolicy": "IfHealthyBudget",
            },
        }
    )


# --- pods -----------------------------------------------------------------------------------------
#
# All pods of a replica share one configuration file; what differs between them stands in their
# environment. Pods keep to the Pod Security standard "restricted" unless a source is a `hostPath`,
# which that standard forbids.


USER = 65532
"""A user that no image defines, and not root."""
GRACE_S = 60
"""Time for a leader to finish running requests after SIGTERM."""
_SHARED_MEMORY_GIB_PER_RANK = 2
_CPU_PER_RANK, _MEMORY_PER_RANK = 100, 256  # millicores, MiB: the least that a rank needs
_UNPRIVILEGED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
_PROGRAM = ["python", "-m", "medha.cli"]


HOSTNAME = "kubernetes.io/hostname"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A pod's place, as far as its plan goes; the scheduler chooses the node.

    `domain`: labels that the node must have. `node` is the node that the plan prefers, and
    `preferred` its labels, from the widest level to the host name. Without a node the place is
    open: the pod stands near the others of its replica, in one domain of each of `shared`, and
    not on nodes that have one of the values of a label in `avoided`.
    """

    node: str = ""
    domain: Mapping[str, str] = {}
    preferred: Mapping[str, str] = {}
    shared: tuple[str, ...] = ()
    avoided: Mapping[str, tuple[str, ...]] = {}


class PodAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A pod to create: its rank in the replica, place, hash of the spec, and attempt. Pods of one
    replica share `image` and `config`, the name of its ConfigMap; "" stands for those of the
    current settings."""

    ordinal: int
    at: Coordinate
    spec_hash: str
    place: Place = Place()
    attempt: int = 1
    gated: bool = False
    image: str = ""
    config: str = ""


def spec_hash(resource: MedhaReplica) -> str:
    """Hash the fields of the resource that its pods are made from: a change is a rolling update.

    Neither the operator's settings nor its version counts. Fields at their defaults are left out,
    so that a field that a later version adds changes no hash.
    """
    fields = _changed_fields(resource.spec)
    for name in ("replicas", "autoscaling", "drainTimeout"):
        fields.pop(name, None)
    fields.get("placement", {}).pop("topologyLevels", None)
    fields |= {label: value for label, value in resource.labels.items() if _is_kueue(label)}
    return names.HASH_RULE + digest({name: value for name, value in fields.items() if value != {}})


def _changed_fields(section: msgspec.Struct) -> dict[str, Any]:
    """Collect the fields that differ from their defaults, by the name in YAML."""
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        value, default = getattr(section, field.name), field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if default is msgspec.NODEFAULT or value != default:
            fields[field.encode_name] = _plain(value)
    return fields


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return _changed_fields(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def pod_manifest(resource: MedhaReplica, start: PodAssignment, settings: Settings) -> Manifest:
    """Build the pod's whole manifest."""
    at = start.at
    leader = at.group == at.stage == 0
    labels = {
        **resource.spec.template.labels,
        **names.OBJECT,
        names.ORDINAL: str(start.ordinal),
        names.GROUP: str(at.group),
        names.STAGE: str(at.stage),
        names.ROLE: names.LEADER if leader else names.WORKER,
        names.ATTEMPT: str(start.attempt),
        names.SPEC_HASH: start.spec_hash,
    }
    queued_labels, queued_annotations = _queued(resource, start)
    labels |= queued_labels
    annotations = {
        **(_scraped(leader) if settings.scrape else {}),
        **_attached(resource),
        **resource.spec.template.annotations,
        **queued_annotations,
        **({names.TARGET: start.place.node} if start.place.node else {}),
    }
    name = pod_name(resource.name, start.ordinal, at)
    spec = _spec(resource, start, settings)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata(resource, name, labels, annotations),
        "spec": spec | _scheduling(resource, start),
    }


def queue_of(resource: MedhaReplica) -> str:
    """Return the name of the queue that admits the pods; "" if none does."""
    return {**resource.spec.template.labels, **resource.labels}.get(names.QUEUE, "")


def _queued(resource: MedhaReplica, start: PodAssignment) -> tuple[dict[str, str], dict[str, str]]:
    """Build the labels and annotations by which Kueue admits a gang as one group of plain pods.

    A pod that is created again takes the place of the former one in its group.
    """
    if not queue_of(resource):
        return {}, {}
    kvp, name = resource.spec.parallelism.kvp, replica_name(resource.name, start.ordinal)
    groups = kvp.min
    if start.at.group >= kvp.min:
        groups, name = 1, f"{name}-g{start.at.group}"
    labels = {label: value for label, value in resource.labels.items() if _is_kueue(label)}
    count = groups * resource.spec.parallelism.spp
    return (
        {**labels, names.QUEUE_GROUP: f"{name}-{start.spec_hash}"},
        {names.QUEUE_COUNT: str(count), names.QUEUE_SERVING: "true"},
    )


def _is_kueue(label: str) -> bool:
    return label.startswith(names.KUEUE)


def _attached(resource: MedhaReplica) -> dict[str, str]:
    """Annotate for Multus, which attaches the pod to further networks."""
    attachments = resource.spec.network.attachments
    return {names.NETWORKS: ",".join(attachments)} if attachments else {}


def _scraped(leader: bool) -> dict[str, str]:
    """Annotate for a Prometheus that discovers pods by annotations, which name one port: the
    controller's in a leader, as it exports the most. Not in the spec's hash: nothing restarts."""
    port = CONTROLLER_OPS_PORT if leader else POD_OPS_PORT
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/path": "/metrics",
        "prometheus.io/port": str(port),
    }


def pod_requests(resource: MedhaReplica) -> dict[str, int]:
    """Sum up the requests of one pod, in the units of NodeView."""
    amounts = {**_resources(resource)["limits"], **_resources(resource)["requests"]}
    return {"pods": 1} | {name: integer(name, amounts[name]) for name in amounts}


def _spec(resource: MedhaReplica, start: PodAssignment, settings: Settings) -> Manifest:
    template, at = resource.spec.template, start.at
    spec: Manifest = {
        "hostname": pod_name(resource.name, start.ordinal, at),
        "subdomain": workers_service(resource.name),
        # A container that ends fails its pod, and the operator restarts the whole group.
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
        "tolerations": [dict(toleration) for toleration in resource.spec.placement.tolerations],
        "containers": [_worker(resource, start, settings)],
        "volumes": _volumes(resource, start, settings),
    }
    if fetches := _fetches(resource, start, settings):
        spec["initContainers"] = fetches
    if template.resource_claims:
        spec["resourceClaims"] = [dict(claim) for claim in template.resource_claims]
    if template.scheduler_name is not None:
        spec["schedulerName"] = template.scheduler_name
    if template.priority_class_name is not None:
        spec["priorityClassName"] = template.priority_class_name
    return spec


def _worker(resource: MedhaReplica, start: PodAssignment, settings: Settings) -> Manifest:
    template, leader = resource.spec.template, start.at.group == start.at.stage == 0
    ports = {"ops": POD_OPS_PORT}
    if leader:
        ports |= {"controller": CONTROLLER_OPS_PORT, "ranks": RANK_PORT}
    if start.at.stage == 0:
        ports |= {"store": STORE_PORT}
    return {
        **_confined(resource, start, settings),
        **_locking(resource),
        "name": names.WORKER_CONTAINER,
        "command": [*_PROGRAM, "pod"],
        "env": _environment(resource, start),
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "resources": _resources(resource),
        "startupProbe": _probe("/livez", every_s=1, failures=120),
        "readinessProbe": _probe("/readyz", every_s=2, failures=2),
        "livenessProbe": _probe("/livez", every_s=10, failures=3),
        "volumeMounts": [
            {
                "name": names.CONFIG_VOLUME,
                "mountPath": f"{CONFIG_FOLDER}/{CONFIG_FILE}",
                "subPath": CONFIG_FILE,
                "readOnly": True,
            },
            {"name": "keys", "mountPath": KEYS_FOLDER, "readOnly": True},
            {"name": "model", "mountPath": MODELS_FOLDER, "readOnly": True},
            *(
                {"name": adapter_volume(number), "mountPath": _mount(adapter), "readOnly": True}
                for number, adapter in enumerate(resource.spec.adapters)
            ),
            {"name": "run", "mountPath": RUN_FOLDER},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *(dict(mount) for mount in template.volume_mounts),
        ],
    }


def _confined(resource: MedhaReplica, start: PodAssignment, settings: Settings) -> Manifest:
    """Build what all containers share: the image, and no privileges."""
    return {
        "image": start.image or worker_image(resource, settings),
        "imagePullPolicy": settings.pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {**_UNPRIVILEGED, "capabilities": {"drop": ["ALL"]}},
    }


def _locking(resource: MedhaReplica) -> Manifest:
    """Build the security context of ranks that may lock any amount of memory.

    Kubernetes gives a capability to root only; for another user it has no effect.
    """
    if resource.spec.network.ipc_lock == "Disabled":
        return {}
    return {
        "securityContext": {
            **_UNPRIVILEGED,
            "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            "runAsNonRoot": False,
            "runAsUser": 0,
        }
    }


def _fetches(resource: MedhaReplica, start: PodAssignment, settings: Settings) -> list[Manifest]:
    """Build the init containers that fetch checkpoint and adapters before the ranks start."""
    parts: list[tuple[str, str | None, str, list[str]]] = [
        ("model", resource.spec.model.source.uri, MODELS_FOLDER, []),
        *(
            (adapter_volume(number), adapter.source.uri, _mount(adapter), ["--adapter"])
            for number, adapter in enumerate(resource.spec.adapters)
        ),
    ]
    return [
        {
            **_confined(resource, start, settings),
            "name": f"fetch-{volume}",
            "command": [*_PROGRAM, "fetch", *options, uri, folder],
            "env": [dict(variable) for variable in resource.spec.template.env],
            "volumeMounts": [
                {"name": volume, "mountPath": folder},
                {"name": "run", "mountPath": RUN_FOLDER},
            ],
        }
        for volume, uri, folder, options in parts
        if uri is not None
    ]


def _environment(resource: MedhaReplica, start: PodAssignment) -> list[Manifest]:
    at = start.at
    own = {
        "MEDHA_REPLICA": replica_name(resource.name, start.ordinal),
        "MEDHA_KVP_GROUP": str(at.group),
        "MEDHA_SPP_STAGE": str(at.stage),
        "MEDHA_TP": str(resource.spec.parallelism.tp),
        "MEDHA_GENERATION": str(start.attempt),
        "MEDHA_LEADER_ADDRESS": leader_address(resource.name, resource.namespace, start.ordinal),
    }
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    return [
        *({"name": name, "value": value} for name, value in own.items()),
        {"name": "MEDHA_POD_IP", "valueFrom": address},
        *(dict(variable) for variable in resource.spec.template.env),
    ]


def _resources(resource: MedhaReplica) -> dict[str, Any]:
    """Request devices as in the spec, or as claims instead; little cpu and memory unless the
    template has more."""
    tp, device = resource.spec.parallelism.tp, resource.spec.device
    given: Mapping[str, Any] = resource.spec.template.resources
    claims = {"claims": given["claims"]} if given.get("claims") else {}
    name = device.resource if claims else device.resource_name
    devices = {**({name: tp} if name else {}), **resource.spec.network.resources}
    least = {"cpu": f"{_CPU_PER_RANK * tp}m", "memory": f"{_MEMORY_PER_RANK * tp}Mi"}
    return {
        "requests": {**least, **devices, **given.get("requests", {})},
        "limits": {**devices, **given.get("limits", {})},
        **claims,
    }


def _probe(path: str, *, every_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "ops"},
        "periodSeconds": every_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _volumes(resource: MedhaReplica, start: PodAssignment, settings: Settings) -> list[Manifest]:
    config = start.config or config_name(resource, start.ordinal, settings)
    shared = _SHARED_MEMORY_GIB_PER_RANK * resource.spec.parallelism.tp
    return [
        {"name": names.CONFIG_VOLUME, "configMap": {"name": config}},
        {"name": "keys", "secret": {"secretName": names.WORKER_KEYS, "defaultMode": 0o440}},
        *source_volumes(resource),
        {"name": "run", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": f"{shared}Gi"}},
        *(dict(volume) for volume in resource.spec.template.volumes),
    ]


def adapter_volume(number: int) -> str:
    """Return the name of the volume of adapter `number`."""
    return f"adapter-{number}"


def source_volumes(resource: MedhaReplica) -> list[Manifest]:
    """Build the volumes of checkpoint and adapters; see `checkpoint` for the folder inside."""
    sources = {"model": resource.spec.model.source}
    for number, adapter in enumerate(resource.spec.adapters):
        sources[adapter_volume(number)] = adapter.source
    return [{"name": name, **_source_volume(source)} for name, source in sources.items()]


def _source_volume(source: CheckpointSource) -> Manifest:
    if source.host_path is not None:
        return {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claim_name, "readOnly": True}
        return {"persistentVolumeClaim": claim}
    if source.image is not None:
        return {"image": {"reference": source.image.reference, "pullPolicy": "IfNotPresent"}}
    return {"emptyDir": {}}


# --- where pods go --------------------------------------------------------------------------------
#
#              planned, with room                        open
#     domain   required by label                         the domain of the replica's other pods
#     node     preferred, its closest parts less         near the replica's other pods, preferred
#     siblings break ties (the plan kept apart from      fewest on the node
#              them)
#
# An autoscaler can make a node for either: no requirement names a node, and the first pod of an
# open replica may begin a new domain.


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_TIES_ONLY = 100
"""A large skew makes counts nearly equal: all nodes score within 2 points of each other. Without
any constraint the scheduler would add its own defaults, which pull a replica's pods apart."""


def _scheduling(resource: MedhaReplica, start: PodAssignment) -> Manifest:
    """Build what the scheduler reads about the pod's place."""
    placement, place = resource.spec.placement, start.place
    siblings = {
        "matchLabels": {names.RESOURCE: resource.name},
        "matchExpressions": [
            {"key": names.ORDINAL, "operator": "NotIn", "values": [str(start.ordinal)]}
        ],
    }
    spread = {
        "topologyKey": HOSTNAME,
        "maxSkew": _TIES_ONLY if place.node else 1,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": siblings,
    }
    spec: Manifest = {
        "affinity": _affinity(resource, start),
        "topologySpreadConstraints": [spread],
    }
    if placement.node_selector:
        spec["nodeSelector"] = dict(placement.node_selector)
    if start.gated:
        spec["schedulingGates"] = [{"name": names.GANG_GATE}]
    return spec


def _affinity(resource: MedhaReplica, start: PodAssignment) -> Manifest:
    place = start.place
    affinity: Manifest = {}
    node: Manifest = {}
    if place.domain:
        node[_REQUIRED] = {"nodeSelectorTerms": [_with_labels(place.domain)]}
    elif place.avoided:
        node[_REQUIRED] = {"nodeSelectorTerms": [_without_labels(place.avoided)]}
    if place.preferred:
        node[_PREFERRED] = [
            {"weight": weight, "preference": _with_labels({label: value})}
            for weight, (label, value) in _weighed(place.preferred.items())
        ]
    if node:
        affinity["nodeAffinity"] = node
    if not place.node:
        affinity["podAffinity"] = _near_own(resource, start)
    return affinity


def _near_own(resource: MedhaReplica, start: PodAssignment) -> Manifest:
    """Keep an open pod with those of its replica: inside one domain, and as close as possible."""
    own = {"matchLabels": {names.RESOURCE: resource.name, names.ORDINAL: str(start.ordinal)}}
    _, inner = topology_levels(resource.spec.placement)
    near: Manifest = {
        _PREFERRED: [
            {"weight": weight, "podAffinityTerm": {"topologyKey": level, "labelSelector": own}}
            for weight, level in _weighed((*inner, HOSTNAME))
        ]
    }
    if start.place.shared:
        near[_REQUIRED] = [
            {"topologyKey": level, "labelSelector": own} for level in start.place.shared
        ]
    return near


def topology_levels(placement: PlacementSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split the levels above the node: those that name a packing domain, widest first, and those
    inside it."""
    levels, cut = placement.topology_levels, 0
    if placement.pack_level is not None:
        cut = levels.index(placement.pack_level) + 1
    return levels[:cut], tuple(level for level in levels[cut:] if level != HOSTNAME)


def _with_labels(labels: Mapping[str, str]) -> Manifest:
    return {
        "matchExpressions": [
            {"key": label, "operator": "In", "values": [value]} for label, value in labels.items()
        ]
    }


def _without_labels(labels: Mapping[str, tuple[str, ...]]) -> Manifest:
    return {
        "matchExpressions": [
            {"key": label, "operator": "NotIn", "values": [*values]}
            for label, values in labels.items()
        ]
    }


def _weighed(levels: Iterable[T]) -> list[tuple[int, T]]:
    """Weigh levels, widest first: the closest gets 100, each wider one a quarter of that."""
    narrowest_first = [*levels][::-1]
    return [(max(1, 100 >> 2 * rank), level) for rank, level in enumerate(narrowest_first)]


# --- checks of a spec beyond the API's own --------------------------------------------------------


VOLUMES = (names.CONFIG_VOLUME, "keys", "model", "run", "shared-memory")
"""Names of a pod's volumes that the operator defines."""

MAX_AMOUNT = 1 << 50
"""The most of a resource that a pod may ask for, far below 2^63, where sums of bytes overflow."""

SETTINGS = ("MEDHA_DECISION_LOG", "MEDHA_INTERFACE")
"""MEDHA_ variables of a pod that a person may set."""


def check(resource: MedhaReplica) -> None:
    """Raise SpecError for the first field that cannot work in a cluster."""
    _check_source("spec.model.source", resource.spec.model.source)
    for number, adapter in enumerate(resource.spec.adapters):
        _check_source(f"spec.adapters[{number}].source", adapter.source)
    _check_network(resource)
    _check_template(resource)


def _check_source(path: str, source: CheckpointSource) -> None:
    if source.host_path is not None and not source.host_path.path.startswith("/"):
        raise SpecError(
            f"{path}.hostPath.path",
            source.host_path.path,
            "must be absolute in a cluster, where it is a folder of every node",
            "start it with /, or use pvc",
        )
    for kind, part in (("pvc", source.pvc), ("image", source.image)):
        if part is not None and ".." in part.path.split("/"):
            raise SpecError(
                f"{path}.{kind}.path",
                part.path,
                "must stay inside the volume",
                "remove the ..",
            )


def _check_network(resource: MedhaReplica) -> None:
    network, template = resource.spec.network, resource.spec.template
    if network.attachments and names.NETWORKS in template.annotations:
        raise SpecError(
            "spec.network.attachments",
            ", ".join(network.attachments),
            f"must be absent with the annotation {names.NETWORKS} in spec.template",
            "remove one of the two",
        )
    device = resource.spec.device.resource_name
    if device in network.resources:
        raise SpecError(
            "spec.network.resources",
            device,
            "must not be the resource of spec.device",
            "remove it",
        )


def _check_template(resource: MedhaReplica) -> None:
    template = resource.spec.template
    if b"\\u0000" in msgspec.json.encode(template):
        raise SpecError(
            "spec.template",
            "text with a NUL",
            "must hold none, as no process takes it",
            "remove it",
        )
    for field, keys in (("labels", template.labels), ("annotations", template.annotations)):
        for key in keys:
            if key.startswith(names.PREFIX):
                raise SpecError(
                    f"spec.template.{field}",
                    key,
                    f"must not begin with {names.PREFIX}, which is the operator's",
                    "choose another prefix",
                )
            if key in names.OBJECT:
                raise SpecError(
                    f"spec.template.{field}",
                    key,
                    "must not be a label by which the operator finds its pods",
                    "choose another key",
                )
    _check_names("env", template.env, prefix="MEDHA_", free=SETTINGS)
    adapter_volumes = map(adapter_volume, range(len(resource.spec.adapters)))
    _check_names("volumes", template.volumes, taken=(*VOLUMES, *adapter_volumes))
    _check_names("resourceClaims", template.resource_claims)
    for field in template.resources:
        if field == "claims":
            _check_claims(template)
            continue
        if field not in ("requests", "limits"):
            raise SpecError(
                "spec.template.resources", field, "must be requests, limits or claims", "remove it"
            )
        amounts = template.resources[field]
        if not isinstance(amounts, Mapping):
            raise SpecError(
                f"spec.template.resources.{field}",
                amounts,
                "must be a mapping of resources to quantities",
                "write it as `cpu: 500m` lines",
            )
        for name, amount in amounts.items():
            try:
                too_large = integer(name, amount) > MAX_AMOUNT
            except SpecError:
                raise SpecError(
                    f"spec.template.resources.{field}.{name}",
                    amount,
                    "must be a quantity",
                    "use one such as 500m, 8 or 16Gi",
                ) from None
            if too_large:
                raise SpecError(
                    f"spec.template.resources.{field}.{name}",
                    amount,
                    "must be at most 1Pi",
                    "lower it",
                )


def _check_claims(template: TemplateSpec) -> None:
    """Check that the container's claims are among the pod's."""
    claims, path = template.resources["claims"], "spec.template.resources.claims"
    if not isinstance(claims, list | tuple) or not all(
        isinstance(claim, Mapping) for claim in claims
    ):
        raise SpecError(path, claims, "must be a list of mappings", "write it as `- name: gpu`")
    known = [claim.get("name") for claim in template.resource_claims]
    for index, claim in enumerate(claims):
        if claim.get("name") not in known:
            raise SpecError(
                f"{path}[{index}].name",
                claim.get("name", "missing"),
                "must be a name in spec.template.resourceClaims",
                "add it there, with resourceClaimTemplateName",
            )


def _check_names(
    field: str,
    items: Iterable[Mapping[str, Any]],
    prefix: str = "",
    free: tuple[str, ...] = (),
    taken: tuple[str, ...] = (),
) -> None:
    """Check that items of a list have names, none of them the operator's."""
    for index, item in enumerate(items):
        name, path = item.get("name"), f"spec.template.{field}[{index}].name"
        if not isinstance(name, str) or not name:
            raise SpecError(path, name or "missing", "must be text", "name it")
        if name in taken or (prefix and name.startswith(prefix) and name not in free):
            raise SpecError(path, name, "must differ from the operator's own", "rename it")
