"""Failures of KVP groups, their restarts, and the number of groups of a replica.

A group lives and dies as a whole: if one of its pods fails, vanishes or finds no node in time, all
of them are deleted and created again as the next attempt. The rest of the replica goes on. Failures
within the window delay the next attempt with doubling back-off; if the budget is spent, the group
waits until the oldest of them leaves the window.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medha.restart_policy import RestartPolicy
from medha.spec import MedhaReplica
from medha_operator.resources.objects import rfc3339, unix_s
from medha_operator.resources.views import (
    GroupView,
    NodeView,
    PersistedStatus,
    PodView,
    ReplicaView,
    RestartRecord,
)

POLICY = RestartPolicy(first_backoff_s=1.0, longest_backoff_s=60.0, budget=5, window_s=600.0)
BIND_S = 60.0
"""A pod that the scheduler may bind but has not bound for this time is planned again."""
HUNG_S = 120.0
"""A group that its controller gave up on may recover by itself for this time; then it restarts."""
GRACE_S = 5
"""Termination grace of a failed group: it holds nothing any more."""


class GroupFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a group's attempt, and why. `lost` is a node that does not answer; then the
    attempt ends only if there is another node for it."""

    ordinal: int
    group: int
    attempt: int
    why: str
    lost: str = ""


def failure_of(
    replica: ReplicaView, group: GroupView, nodes: Mapping[str, NodeView], now_s: float
) -> GroupFailure | None:
    """Find the failure of a group that should run; None while it may recover by itself."""
    present = group.present
    if not present:
        return None
    lost = ""
    why = _pod_failure(group, now_s)
    if not why:
        lost = next((pod.node for pod in present if is_lost(pod, nodes)), "")
        why = f"node {lost} does not answer" if lost else ""
    if not why:
        stray = next((pod for pod in present if _has_no_target(pod, nodes)), None)
        if stray is not None:
            why = f"node {stray.target} went away before pod {stray.name} was bound to it"
    hung_s = hung_at_s(replica, group)
    if not why and hung_s is not None and now_s >= hung_s:
        why = "its controller gave up on it and it did not recover"
    if not why:
        return None
    return GroupFailure(
        ordinal=replica.ordinal,
        group=group.index,
        attempt=group.attempt,
        why=why[:300],
        lost=lost,
    )


def hung_at_s(replica: ReplicaView, group: GroupView) -> float | None:
    """Return when a group that its controller gave up on counts as failed; None if it did not."""
    if replica.report is None or group.index not in replica.report.restart_groups:
        return None
    since_s = [pod.unready_since_s for pod in group.present if pod.unready_since_s is not None]
    return max(since_s) + HUNG_S if since_s else None


def _pod_failure(group: GroupView, now_s: float) -> str:
    present = group.present
    for pod in present:
        if pod.phase in ("Failed", "Succeeded"):
            cause = ": ".join(text for text in (pod.why, pod.message) if text)
            return f"pod {pod.name} ended ({cause or pod.phase})"
    for pod in group.pods:
        if pod.deleting and pod.attempt == group.attempt:
            return f"pod {pod.name} is being deleted"
    if not group.complete and not group.gated:
        return f"the pod of stage {group.missing[0] if group.missing else 0} is gone"
    for pod in present:
        if pod.open_since_s is not None and now_s - pod.open_since_s > BIND_S:
            return f"pod {pod.name} found no node within {BIND_S:.0f} s ({pod.message or pod.why})"
    return ""


def is_lost(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """Return whether the pod's node is gone or silent, as far as the informers know: before a pod
    is deleted for it, the API server confirms (`if_lost`). False while no node is known."""
    if not pod.node or not nodes:
        return False
    node = nodes.get(pod.node)
    return node is None or node.silent


def _has_no_target(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """Return whether an ungated, unbound pod is bound to a target that accepts no pods any more."""
    if pod.node or pod.gated or not nodes:
        return False
    node = nodes.get(pod.target)
    return node is None or node.silent or not node.schedulable


def is_recorded(failure: GroupFailure, persisted: PersistedStatus) -> bool:
    """Return whether the failure stands in the status, so that its pods may be deleted."""
    record = persisted.restart(failure.ordinal, failure.group)
    return record is not None and record.attempt >= failure.attempt


def add_failure(record: RestartRecord | None, failure: GroupFailure, now_s: float) -> RestartRecord:
    """Add a failure to the group's record and drop those that left the window."""
    if record is not None and record.attempt >= failure.attempt:
        return record
    texts, times_s = (record.failed_at, _failed_s(record)) if record is not None else ((), ())
    recent = tuple(
        text for text, at_s in zip(texts, times_s, strict=True) if now_s - at_s < POLICY.window_s
    )
    return RestartRecord(
        replica=failure.ordinal,
        group=failure.group,
        attempt=failure.attempt,
        failed_at=(*recent[-POLICY.budget :], rfc3339(now_s)),
        reason=failure.why,
    )


def next_attempt(record: RestartRecord | None) -> int:
    return record.attempt + 1 if record is not None else 1


def not_before_s(record: RestartRecord | None, now_s: float) -> float:
    """Return when the group may start again."""
    return POLICY.next_start_s(_failed_s(record) if record is not None else (), now_s)


def is_recent(record: RestartRecord, now_s: float) -> bool:
    """Return whether the group failed within the window; older failures explain nothing."""
    return bool(POLICY.recent(_failed_s(record), now_s))


def exhausted(record: RestartRecord, now_s: float) -> bool:
    """Return whether the group failed more often within the window than its budget allows."""
    return POLICY.exhausted(_failed_s(record), now_s)


def _failed_s(record: RestartRecord) -> tuple[float, ...]:
    return tuple(unix_s(text) for text in record.failed_at)


# --- how many groups a replica should have --------------------------------------------------------
#
# The controller's target is absolute: groups 0 .. wanted-1. A group that the controller released
# is absent from its report and not wanted: the operator deletes its pods after a cool-down and does
# not recreate them. Fewer groups than wanted is a failure to repair, never a reason to shrink.
# Without a fresh report nothing is deleted and the last target stands.


def wanted_groups(resource: MedhaReplica, replica: ReplicaView, persisted: PersistedStatus) -> int:
    """Return the number of groups that the replica should have now."""
    kvp = resource.spec.parallelism.kvp
    if replica.report is not None:
        target = replica.report.wanted_groups
    else:
        target = persisted.groups_of(replica.ordinal).wanted
    return min(max(target, kvp.min), kvp.max)


def released(
    replica: ReplicaView, group: GroupView, cooldown_s: float, now_s: float
) -> bool | float:
    """Return whether the group was released for good; during its cool-down, the end of that."""
    if group.index < replica.min_groups or not group.present:
        return False
    if all(pod.phase == "Succeeded" for pod in group.present):
        return True
    report = replica.report
    if report is None or group.index < report.wanted_groups:
        return False
    states = [status.state for status in report.groups if status.group == group.index]
    if any(state != "absent" for state in states):
        return False
    if not group.complete and not group.gated:
        return True  # some of its pods are deleted already
    # A new pod is absent from the report, too: if demand returns soon, the group is still there.
    over_s = max(pod.seen_since_s for pod in group.present) + cooldown_s
    return True if now_s >= over_s else over_s


def missing_groups(replica: ReplicaView, wanted: int) -> tuple[int, ...]:
    """List the wanted groups that have no pod."""
    return tuple(index for index in range(wanted) if index not in replica.groups)
