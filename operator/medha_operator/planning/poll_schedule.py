"""The schedule by which the operator polls controllers. Pure: no clock and no network."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from medha_operator.resources.objects import Key
from medha_operator.resources.views import PodView

LONGEST_PAUSE_S = 30.0
ReplicaKey = tuple[Key, int]
"""A MedhaReplica and the ordinal of one of its replicas."""


class _Leader(msgspec.Struct):
    """A leader pod: its next poll, unanswered polls in a row, and its last readiness."""

    uid: str
    due_s: float
    silent: int = 0
    ready: bool = False


class PollSchedule:
    """Polls every running leader each `every_s` seconds. One that does not answer is polled after
    doubling pauses, and at once when its pod becomes ready."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._leaders: dict[ReplicaKey, _Leader] = {}

    def due(
        self, pods: Iterable[tuple[Key, PodView]], now_s: float
    ) -> tuple[list[tuple[Key, PodView]], list[ReplicaKey]]:
        """Return the leaders to poll now, and the replicas whose leader is gone or replaced."""
        due, living, gone = [], set(), []
        for key, pod in pods:
            if pod.group or pod.stage or not pod.ip or pod.phase != "Running":
                continue
            place = key, pod.ordinal
            living.add(place)
            leader = self._leaders.get(place)
            if leader is None or leader.uid != pod.uid:
                leader = self._leaders[place] = _Leader(pod.uid, now_s)
                gone.append(place)
            if pod.ready and not leader.ready:
                leader.due_s = now_s  # its pause may be long, as it was silent while it started
            leader.ready = pod.ready
            if leader.due_s <= now_s:
                leader.due_s = now_s + LONGEST_PAUSE_S  # until this answer has arrived
                due.append((key, pod))
        for place in self._leaders.keys() - living:
            del self._leaders[place]
            gone.append(place)
        return due, gone

    def answered(
        self, place: ReplicaKey, uid: str, answered: bool, now_s: float, spread: float
    ) -> bool:
        """Schedule the next poll, its pause times `spread`; False if the leader was replaced."""
        leader = self._leaders.get(place)
        if leader is None or leader.uid != uid:
            return False
        leader.silent = 0 if answered else leader.silent + 1
        pause_s = min(LONGEST_PAUSE_S, self._every_s * 2 ** min(leader.silent, 10))
        leader.due_s = now_s + pause_s * spread
        return True

    def soon(self, place: ReplicaKey) -> None:
        """Poll a controller at once: the operator has just sent it a command."""
        if place in self._leaders:
            self._leaders[place].due_s = 0.0
