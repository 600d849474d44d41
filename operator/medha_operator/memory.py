"""What must be known across a restart of the operator, kept in the resource's status.

A group's failures are written there before its pods are deleted, and a replica's retirement in the
same step that begins it; the status then tells the next look at the cluster, whoever takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from medha_operator.moments import unix_s


class _Line(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A part of the status, in camel case outside."""


class Condition(_Line, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str = ""
    observed_generation: int = 0


class GroupsLine(_Line, frozen=True):
    """One replica: its groups that run, those its controller wants, and its membership's count."""

    replica: int
    kvp_groups: int = 0
    wanted: int = 0
    generation: int = 0


class RestartLine(_Line, frozen=True):
    """A KVP group that failed: the last attempt that did, and when it did lately."""

    replica: int
    group: int
    attempt: int
    failed_at: tuple[str, ...] = ()
    reason: str = ""

    @property
    def failed_s(self) -> tuple[float, ...]:
        return tuple(unix_s(each) for each in self.failed_at)


class RetiringLine(_Line, frozen=True):
    """A replica that is to go once it has finished its work, or its time to do so is over."""

    replica: int
    since: str = ""
    reason: str = ""


class ScalingLine(_Line, frozen=True):
    """Who scales, and to how many it last did; whose word was heard instead, and since when."""

    mode: str
    replicas: int
    outside_by: str = ""
    outside_since: str = ""
    scaled_object: Literal["Absent", "Expected"] = "Absent"
    """Expected: one of ours exists, or may."""

    @property
    def has_object(self) -> bool:
        return self.scaled_object == "Expected"


class Memory(_Line, frozen=True):
    groups: tuple[GroupsLine, ...] = ()
    restarts: tuple[RestartLine, ...] = ()
    retiring: tuple[RetiringLine, ...] = ()
    conditions: tuple[Condition, ...] = ()
    scaling: ScalingLine | None = None

    def restart(self, replica: int, group: int) -> RestartLine | None:
        return next(
            (each for each in self.restarts if (each.replica, each.group) == (replica, group)), None
        )

    def line(self, replica: int) -> GroupsLine:
        return next(
            (each for each in self.groups if each.replica == replica), GroupsLine(replica=replica)
        )

    def retirement(self, replica: int) -> RetiringLine | None:
        return next((each for each in self.retiring if each.replica == replica), None)


def recall(previous: Mapping[str, object]) -> Memory:
    """The memory in a status; one that does not hold any (a person wrote it) is empty."""
    try:
        return msgspec.convert(previous, Memory)
    except msgspec.ValidationError:
        return Memory()
