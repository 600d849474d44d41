"""One step each: what `plan` asks for and `apply` carries out. Nothing is done by making one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Manifest = Mapping[str, Any]


class ApplyObject(msgspec.Struct, frozen=True):
    """Server-side apply of a Service, ConfigMap, Secret, NetworkPolicy or PodDisruptionBudget."""

    manifest: Manifest


class CreatePod(msgspec.Struct, frozen=True):
    """POST, never an upsert: a stale view must not bring a pod back."""

    manifest: Manifest


class LiftGate(msgspec.Struct, frozen=True):
    """Let the scheduler bind this pod; it cannot be taken back."""

    pod: str
    uid: str


class DeletePod(msgspec.Struct, frozen=True):
    """With the UID as precondition; `grace_s` None leaves the pod's own. `if_lost` names a node:
    unless the API server says at that moment that it is gone or silent, the pod stays."""

    pod: str
    uid: str
    why: str
    grace_s: int | None = None
    if_lost: str = ""


class DeleteObject(msgspec.Struct, frozen=True):
    """An object of ours that nothing needs any more (a former replica's ConfigMap or policy)."""

    kind: str
    name: str


class Drain(msgspec.Struct, frozen=True):
    """POST /drain on the controller at `address` (ip:port): take nothing new, finish the rest."""

    ordinal: int
    address: str


class Tell(msgspec.Struct, frozen=True):
    """A Kubernetes Event on the MedhaReplica; `warning` makes it one of type Warning."""

    reason: str
    message: str
    warning: bool = False


class LookAgain(msgspec.Struct, frozen=True):
    """Nothing to do before `at_s` (Unix seconds), whatever happens or not: plan again then."""

    at_s: float


Action = ApplyObject | CreatePod | LiftGate | DeletePod | DeleteObject | Drain | Tell | LookAgain
