"""Failures of KVP groups, their restarts, and the number of groups of a replica.

A group lives and dies as a whole: if one of its pods fails or vanishes, all of them are deleted and
created again as the next attempt. The rest of the replica goes on. Failures within the window delay
the next attempt with doubling back-off; if the budget is spent, the group waits until the oldest of
them leaves the window.

A gang that the cluster does not let run (no room, a quota, a preemption) is given back whole and
created again; that is no failure and spends no budget.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

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
    WaitRecord,
)

POLICY = RestartPolicy(first_backoff_s=1.0, longest_backoff_s=60.0, budget=5, window_s=600.0)
REFUSED_S, HOLDING_S, LONGEST_HOLDING_S = 10.0, 60.0, 300.0
"""A planned gang is given back when the scheduler has refused all of it for the first time; a gang
that holds some nodes after the second, which doubles each time up to the third."""
NO_NODE, QUOTA, PREEMPTED = "Unschedulable", "QuotaExceeded", "Preempted"
"""Reasons for which a gang is given back."""
MAX_DOMAINS = 16
"""Domains that a record holds."""
LONGEST_PAUSE_S = 16.0
"""Longest pause after a gang was given back: an autoscaler must not miss its pods for longer."""
HUNG_S = 120.0
"""A group that its controller gave up on may recover by itself for this time; then it restarts."""
GRACE_S = 5
"""Termination grace of a failed group: it holds nothing any more."""


class GroupFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a group's attempt, and why. `lost` is a node that does not answer; then the
    attempt ends only if there is another node for it. With a `reason` the group is given back and
    has not failed."""

    ordinal: int
    group: int
    attempt: int
    why: str
    lost: str = ""
    reason: str = ""
    domain: str | None = None
    """The `packLevel` domain in which a gang was given back because it found no nodes."""


def ended(
    replica: ReplicaView,
    group: GroupView,
    why: str,
    *,
    lost: str = "",
    reason: str = "",
    domain: str | None = None,
) -> GroupFailure:
    """State that the group's attempt ended; `why` is cut to 300 characters."""
    return GroupFailure(
        ordinal=replica.ordinal,
        group=group.index,
        attempt=group.attempt,
        why=why[:300],
        lost=lost,
        reason=reason,
        domain=domain,
    )


def failure_of(
    replica: ReplicaView, group: GroupView, nodes: Mapping[str, NodeView], now_s: float
) -> GroupFailure | None:
    """Find the failure of a group that should run; None while it may recover by itself."""
    present, lost = group.present, ""
    disrupted = next((pod for pod in group.pods if pod.deleting and pod.disrupted), None)
    if disrupted is not None and disrupted.attempt == group.attempt:
        why = f"pod {disrupted.name} was preempted: {disrupted.disrupted}"
        return ended(replica, group, why, reason=PREEMPTED)
    if not present:
        return None
    why = _pod_failure(group)
    if not why:
        lost = next((pod.node for pod in present if is_lost(pod, nodes)), "")
        why = f"node {lost} does not answer" if lost else ""
    hung_s = hung_at_s(replica, group)
    if not why and hung_s is not None and now_s >= hung_s:
        why = "its controller gave up on it and it did not recover"
    if not why:
        return None
    return ended(replica, group, why, lost=lost)


def hung_at_s(replica: ReplicaView, group: GroupView) -> float | None:
    """Return when a group that its controller gave up on counts as failed; None if it did not."""
    if replica.report is None or group.index not in replica.report.restart_groups:
        return None
    since_s = [pod.unready_since_s for pod in group.present if pod.unready_since_s is not None]
    return max(since_s) + HUNG_S if since_s else None


def _pod_failure(group: GroupView) -> str:
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
    return ""


def is_lost(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """Return whether the pod's node is gone or silent, as far as the informers know: before a pod
    is deleted for it, the API server confirms (`if_lost`). False while no node is known."""
    if not pod.node or not nodes:
        return False
    node = nodes.get(pod.node)
    return node is None or node.silent


def is_recorded(failure: GroupFailure, persisted: PersistedStatus) -> bool:
    """Return whether the failure stands in the status, so that its pods may be deleted."""
    record = persisted.wait if failure.reason else persisted.restart
    written = record(failure.ordinal, failure.group)
    return written is not None and written.attempt >= failure.attempt


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


def next_attempt(record: RestartRecord | None, wait: WaitRecord | None) -> int:
    return 1 + max([ended.attempt for ended in (record, wait) if ended is not None], default=0)


def not_before_s(record: RestartRecord | None, wait: WaitRecord | None, now_s: float) -> float:
    """Return when the group may start again."""
    start_s = POLICY.next_start_s(_failed_s(record) if record is not None else (), now_s)
    return start_s if wait is None else max(start_s, unix_s(wait.at) + _pause_s(wait))


def is_recent(record: RestartRecord, now_s: float) -> bool:
    """Return whether the group failed within the window; older failures explain nothing."""
    return bool(POLICY.recent(_failed_s(record), now_s))


def exhausted(record: RestartRecord, now_s: float) -> bool:
    """Return whether the group failed more often within the window than its budget allows."""
    return POLICY.exhausted(_failed_s(record), now_s)


def _failed_s(record: RestartRecord) -> tuple[float, ...]:
    return tuple(unix_s(text) for text in record.failed_at)


# --- gangs that do not get their nodes ------------------------------------------------------------
#
# The scheduler decides on each pod by itself, so a gang may get some of its nodes and not the rest.
#
#     the scheduler has not answered     wait
#     holds nothing, left open           wait: an autoscaler sees it
#     holds nothing, was planned         give it back soon
#     holds some nodes                   give it back whole: another gang may need them
#     kept outside, holds nothing        give it back as if it held some; soon if a domain has room
#
# The next attempt goes to another domain, or is left open. If no domain has room for all of it, the
# gang would always get a part of one, and no autoscaler would make another domain: every second
# attempt is kept outside of the domains that have room for a part.
#
# Gangs that hold what each other needs must not act at the same time: a hash stretches the times by
# up to a half.


def give_back_s(
    gang: Sequence[GroupView], times: int, salt: str, outside: bool, outdated: bool
) -> float | None:
    """Return when a gang without all of its nodes is given back; None if it may wait. `times`: how
    often in a row that was done; `outside`: the gang may be kept outside of domains; `outdated`:
    of these, one has room by now."""
    pods = [pod for group in gang for pod in group.present]
    unbound = [pod for pod in pods if not pod.node]
    if not unbound or not all(pod.refused and pod.open_since_s is not None for pod in unbound):
        return None
    since_s = max(pod.open_since_s or 0.0 for pod in unbound)
    holds = len(unbound) < len(pods)
    if not holds and (outdated or any(pod.target for pod in unbound)):
        return since_s + REFUSED_S
    if holds or outside:
        bound_s = max(pod.unready_since_s or 0.0 for pod in pods)
        hold_s = min(LONGEST_HOLDING_S, HOLDING_S * 2.0 ** min(times, 10))
        return max(since_s, bound_s) + hold_s * (1.0 + 0.5 * _fraction(f"{salt} {times}"))
    return None


def add_wait(record: WaitRecord | None, failure: GroupFailure, now_s: float) -> WaitRecord:
    """Count a gang that is given back."""
    if record is not None and record.attempt >= failure.attempt:
        return record
    domains = record.domains if record is not None else ()
    if failure.domain is not None:
        domains = (*(domain for domain in domains if domain != failure.domain), failure.domain)
    return WaitRecord(
        replica=failure.ordinal,
        group=failure.group,
        attempt=failure.attempt,
        times=record.times + 1 if record is not None else 1,
        at=rfc3339(now_s),
        reason=failure.reason,
        message=failure.why,
        domains=domains[-MAX_DOMAINS:],
    )


def is_waiting(record: WaitRecord, now_s: float) -> bool:
    """Return whether the record still says something about the group's next attempt."""
    return now_s - unix_s(record.at) < POLICY.window_s


def is_open(record: WaitRecord) -> bool:
    """Return whether the next attempt is left open: after every second plan that was refused."""
    return record.times % 3 == 2


def is_outside(record: WaitRecord) -> bool:
    """Return whether the next attempt, if no domain has room, is kept outside of those that have
    room for a part."""
    return any(record.domains) and record.times % 2 == 1


def _pause_s(record: WaitRecord) -> float:
    longest_s = min(LONGEST_PAUSE_S, 2.0 ** min(record.times, 10))
    salt = f"{record.replica} {record.group} {record.at} {record.message}"
    return max(1.0, longest_s * (0.5 + 0.5 * _fraction(salt)))


def _fraction(text: str) -> float:
    """Hash a text to a number from 0 to 1."""
    return zlib.crc32(text.encode()) / 2.0**32


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
