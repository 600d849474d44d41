"""What people are told of when a status changes: groups that joined, a resource that serves or not.

Pure. Steps that are taken tell of themselves (`plan`); this tells of what came about.
"""

from __future__ import annotations

from collections.abc import Mapping

from medha_operator import names
from medha_operator.actions import Tell
from medha_operator.memory import Memory, recall


def changes(
    resource: str, before: Mapping[str, object], after: Mapping[str, object]
) -> tuple[Tell, ...]:
    """Events between two statuses of the resource of that name."""
    old, new = recall(before), recall(after)
    return (*_groups(resource, old, new), *_ready(old, new))


def _groups(resource: str, old: Memory, new: Memory) -> list[Tell]:
    told = []
    for line in new.groups:
        was = old.line(line.replica)
        if was.generation and line.kvp_groups > was.kvp_groups:
            name = names.replica_name(resource, line.replica)
            told.append(
                Tell(
                    "GroupJoined",
                    f"{name} runs {line.kvp_groups} KVP groups, as generation {line.generation}",
                )
            )
    return told


def _ready(old: Memory, new: Memory) -> list[Tell]:
    was = next((each.status for each in old.conditions if each.type == "Ready"), "False")
    now = next((each for each in new.conditions if each.type == "Ready"), None)
    if now is None or now.status == was:
        return []
    if now.status == "True":
        return [Tell("Serving", "every replica that is asked for serves")]
    return [Tell("NotServing", now.message or now.reason, warning=True)]
