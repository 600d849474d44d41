"""How many KVP groups a replica should have, and which of them are done.

The controller's target is absolute: groups 0 .. wanted-1. A group that it lets go ends by itself
with success; its pods are removed and not made again. Fewer groups than wanted is a fault to repair
and never a reason to shrink; without a fresh report the last target stands.
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


def released(replica: Replica, group: Group) -> bool:
    """Its controller let it go and all its processes ended well."""
    return (
        group.index >= replica.least
        and bool(group.present)
        and all(pod.phase == "Succeeded" for pod in group.present)
    )


def missing_groups(replica: Replica, wanted: int) -> tuple[int, ...]:
    """Groups to make so that as many as wanted are there: the lowest free numbers."""
    there = [index for index, group in replica.groups.items() if not released(replica, group)]
    short = wanted - len(there)
    free = (index for index in range(wanted) if index not in replica.groups)
    return tuple(index for index, _ in zip(free, range(max(0, short)), strict=False))
