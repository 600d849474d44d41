"""How many KVP groups a replica should have, and which of them are done.

The controller's target is absolute: groups 0 .. wanted-1. A group that it let go has told its ranks
to leave: it is absent from the controller's sight, and not wanted. Its pods are removed then, after
a cool-down, and not made again. Fewer groups than wanted is a fault to repair and never a reason to
shrink; without a fresh report nothing is removed and the last target stands.
"""

from __future__ import annotations

from medha.spec import MedhaReplica
from medha_operator.memory import Memory
from medha_operator.replicas import Group, Replica


def wanted_groups(resource: MedhaReplica, replica: Replica, memory: Memory) -> int:
    """How many groups the replica should have now."""
    kvp = resource.spec.parallelism.kvp
    if replica.report is not None:
        asked = replica.report.wanted_groups
    else:
        asked = memory.line(replica.ordinal).wanted
    return min(max(asked, kvp.min), kvp.max)


def released(replica: Replica, group: Group, cooldown_s: float, now_s: float) -> bool | float:
    """Whether the group is done; while its cool-down runs, when that is over."""
    if group.index < replica.least or not group.present:
        return False
    if all(pod.phase == "Succeeded" for pod in group.present):
        return True
    report = replica.report
    if report is None or group.index < report.wanted_groups:
        return False
    if any(each.group == group.index and each.state != "absent" for each in report.groups):
        return False
    if not group.complete and not group.gated:
        return True  # a part of it went already
    # A pod that was just made is absent, too: pressure that comes back soon finds it there.
    over_s = max(pod.seen_since_s for pod in group.present) + cooldown_s
    return True if now_s >= over_s else over_s


def missing_groups(replica: Replica, wanted: int) -> tuple[int, ...]:
    """Groups to make so that those that are wanted are there."""
    return tuple(index for index in range(wanted) if index not in replica.groups)
