"""Actions: the planner returns them, the executor carries them out, one call each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Manifest = Mapping[str, Any]


class ApplyObject(msgspec.Struct, frozen=True):
    """Server-side apply of a Service, ConfigMap, Secret, NetworkPolicy or PodDisruptionBudget."""

    manifest: Manifest


class CreatePod(msgspec.Struct, frozen=True):
    """POST, never an upsert: a stale view must not recreate a pod."""

    manifest: Manifest


class RemoveSchedulingGate(msgspec.Struct, frozen=True):
    """Let the scheduler bind this pod; a gate cannot be put back."""

    pod: str
    uid: str


class ReleasePod(msgspec.Struct, frozen=True):
    """Remove the queue's finalizer from a pod that has ended, so that its name becomes free."""

    pod: str
    uid: str


class DeletePod(msgspec.Struct, frozen=True):
    """DELETE with the UID as precondition; `grace_s` None leaves the pod's own. `if_lost` names a
    node: the pod stays unless the API server confirms that this node is gone or silent."""

    pod: str
    uid: str
    why: str
    grace_s: int | None = None
    if_lost: str = ""


class DeleteObject(msgspec.Struct, frozen=True):
    """DELETE of an object that is not needed: a former replica's ConfigMap or policy."""

    kind: str
    name: str


class Drain(msgspec.Struct, frozen=True):
    """POST /drain to the controller at `address` (ip:port): no new requests, finish the rest."""

    ordinal: int
    address: str


class EmitEvent(msgspec.Struct, frozen=True):
    """A Kubernetes Event on the MedhaReplica; `warning` makes it one of type Warning."""

    reason: str
    message: str
    warning: bool = False


class RequeueAt(msgspec.Struct, frozen=True):
    """Reconcile again at `at_s` (Unix seconds), even if nothing happens until then."""

    at_s: float


Action = (
    ApplyObject
    | CreatePod
    | RemoveSchedulingGate
    | ReleasePod
    | DeletePod
    | DeleteObject
    | Drain
    | EmitEvent
    | RequeueAt
)
