"""Names, labels and annotations that the operator gives what it makes, and reads them back by."""

from __future__ import annotations

from medha.topology import Coordinate

PREFIX = "medha.dev/"
RESOURCE = PREFIX + "replica"
"""Label: the MedhaReplica that a thing belongs to."""
ORDINAL = PREFIX + "ordinal"
"""Label: which copy of it (0, 1, …; a surge copy takes the next free number)."""
GROUP = PREFIX + "kvp-group"
STAGE = PREFIX + "spp-stage"
ROLE = PREFIX + "role"
"""Label: `leader` (group 0, stage 0: it holds the controller) or `worker`."""
ATTEMPT = PREFIX + "attempt"
"""Label: how often the group was started, from 1; pods of one group carry the same."""
SPEC_HASH = PREFIX + "spec-hash"
"""Label: hash of what of the spec the pods are made from; another one means a rolling update."""
TARGET = PREFIX + "node"
"""Annotation of a pod: the node that it was planned for."""
CONTENT_HASH = PREFIX + "content-hash"
"""Annotation of every other object of ours: hash of what we want it to be."""
GANG_GATE = PREFIX + "gang"
"""Scheduling gate: lifted when the whole base group has its pods and fits."""
FIELD_MANAGER = "medha-operator"
OWNED_BY = {"app.kubernetes.io/managed-by": "medha-operator"}
LEADER, WORKER = "leader", "worker"
WORKER_KEYS = "medha-worker-keys"
"""Secret with the CURVE keys of controllers and ranks, one in each namespace with pods."""


def replica_name(resource: str, ordinal: int) -> str:
    """The replica's name in messages, metrics and logs, e.g. `llama-70b-0`."""
    return f"{resource}-{ordinal}"


def pod_name(resource: str, ordinal: int, at: Coordinate) -> str:
    """One pod per (group, stage); its `tp` ranks are inside. The shard is ignored."""
    return f"{resource}-{ordinal}-g{at.group}-s{at.stage}"


def leader_address(resource: str, namespace: str, ordinal: int) -> str:
    """DNS name of the pod with the replica's controller."""
    leader = pod_name(resource, ordinal, Coordinate(0, 0, 0))
    return f"{leader}.{workers_service(resource)}.{namespace}.svc"


def workers_service(resource: str) -> str:
    return f"{resource}-workers"


def leaders_service(resource: str) -> str:
    return f"{resource}-leaders"


def policy_name(resource: str, ordinal: int) -> str:
    """NetworkPolicy of one replica."""
    return replica_name(resource, ordinal)


def config_name(resource: str, ordinal: int, spec_hash: str) -> str:
    """ConfigMap of one replica made from one state of the spec."""
    return f"{resource}-{ordinal}-{spec_hash}"
