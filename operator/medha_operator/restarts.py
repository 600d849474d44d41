"""When a KVP group has failed, and when it is started anew.

A group lives and dies as a whole: when one of its pods fails, vanishes or finds no node in time,
all of them are deleted and made again as the next attempt. The rest of the replica goes on.
Failures of the last ten minutes put off the next attempt, each twice as long as the one before;
when the budget is spent the group waits until the oldest of them is that long ago.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medha_operator.memory import Memory, RestartLine
from medha_operator.moments import rfc3339
from medha_operator.observed import NodeView, PodView
from medha_operator.replicas import Group, Replica

BUDGET, WINDOW_S = 5, 600.0
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
BIND_S = 60.0
"""A pod that the scheduler may bind but has not for so long is planned again."""
HUNG_S = 120.0
"""A group that its controller gave up comes back by itself; so long after, it is made anew."""
GRACE_S = 5
"""What a group that failed may take to end: it holds nothing any more."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A group's attempt is over, and why. `lost`: the node that does not answer; then it is over
    only if there is another place for it."""

    ordinal: int
    group: int
    attempt: int
    why: str
    lost: str = ""


def fault_of(
    replica: Replica, group: Group, nodes: Mapping[str, NodeView], now_s: float
) -> Fault | None:
    """What is wrong with a group that should run; None while it may become well by itself."""
    present = group.present
    if not present:
        return None
    lost = ""
    why = _pod_fault(group, now_s)
    if not why:
        lost = next((pod.node for pod in present if is_lost(pod, nodes)), "")
        why = f"node {lost} does not answer" if lost else ""
    if not why:
        stray = next((pod for pod in present if _has_no_home(pod, nodes)), None)
        if stray is not None:
            why = f"node {stray.target} went away before pod {stray.name} was bound to it"
    due_s = hung_s(replica, group)
    if not why and due_s is not None and now_s >= due_s:
        why = "its controller gave it up and it did not come back"
    if not why:
        return None
    return Fault(
        ordinal=replica.ordinal,
        group=group.index,
        attempt=group.attempt,
        why=why[:300],
        lost=lost,
    )


def hung_s(replica: Replica, group: Group) -> float | None:
    """When a group that its controller gave up counts as failed, if it is not back by then."""
    if replica.report is None or group.index not in replica.report.restart_groups:
        return None
    since_s = [pod.unready_since_s for pod in group.present if pod.unready_since_s is not None]
    return max(since_s) + HUNG_S if since_s else None


def _pod_fault(group: Group, now_s: float) -> str:
    present = group.present
    for pod in present:
        if pod.phase in ("Failed", "Succeeded"):
            told = ": ".join(each for each in (pod.why, pod.message) if each)
            return f"pod {pod.name} ended ({told or pod.phase})"
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
    """Its node is dead or cut off, or gone, as far as we know: whoever deletes for it has the API
    server asked again (`if_lost`). No nodes at all: they are not known yet."""
    if not pod.node or not nodes:
        return False
    node = nodes.get(pod.node)
    return node is None or node.silent


def _has_no_home(pod: PodView, nodes: Mapping[str, NodeView]) -> bool:
    """It may be bound, but the only node that it may go to takes no pods any more."""
    if pod.node or pod.gated or not nodes:
        return False
    node = nodes.get(pod.target)
    return node is None or node.silent or not node.schedulable


def noted(fault: Fault, memory: Memory) -> bool:
    """The failure stands in the status, so that its pods may go."""
    line = memory.restart(fault.ordinal, fault.group)
    return line is not None and line.attempt >= fault.attempt


def note(line: RestartLine | None, fault: Fault, now_s: float) -> RestartLine:
    """The group's line with one more failure, those long ago forgotten."""
    if line is not None and line.attempt >= fault.attempt:
        return line
    past = line.failed_at if line is not None else ()
    lately = tuple(
        text
        for text, at_s in zip(past, line.failed_s if line is not None else (), strict=True)
        if now_s - at_s < WINDOW_S
    )
    return RestartLine(
        replica=fault.ordinal,
        group=fault.group,
        attempt=fault.attempt,
        failed_at=(*lately[-BUDGET:], rfc3339(now_s)),
        reason=fault.why,
    )


def next_attempt(line: RestartLine | None) -> int:
    return line.attempt + 1 if line is not None else 1


def not_before_s(line: RestartLine | None, now_s: float) -> float:
    """When the group may be started again."""
    failed = [at_s for at_s in (line.failed_s if line else ()) if now_s - at_s < WINDOW_S]
    if not failed:
        return 0.0
    backoff = min(FIRST_BACKOFF_S * (1 << len(failed) - 1), LONGEST_BACKOFF_S)
    if len(failed) > BUDGET:
        return max(failed[-1] + backoff, failed[-1 - BUDGET] + WINDOW_S)
    return failed[-1] + backoff


def is_recent(line: RestartLine, now_s: float) -> bool:
    """It failed within the window; older failures explain nothing any more."""
    return any(now_s - at_s < WINDOW_S for at_s in line.failed_s)


def exhausted(line: RestartLine, now_s: float) -> bool:
    """Its budget is spent: it failed more often than a group may within the window."""
    return len([at_s for at_s in line.failed_s if now_s - at_s < WINDOW_S]) > BUDGET
