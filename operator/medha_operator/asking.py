"""Which controllers are asked for their report, and when: no clock and no network here."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from medha_operator.observed import PodView
from medha_operator.projections import Key

LONGEST_PAUSE_S = 30.0
Place = tuple[Key, int]
"""A MedhaReplica and the ordinal of one of its replicas."""


class _Asked(msgspec.Struct):
    """A leader: when it is asked next, how often in a row it did not answer, and whether its pod
    was ready when it was looked at."""

    uid: str
    due_s: float
    silent: int = 0
    ready: bool = False


class Asking:
    """Every running leader is asked each `every_s` seconds; one that does not answer after pauses
    twice as long each time, and at once when its pod becomes ready."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._asked: dict[Place, _Asked] = {}

    def due(
        self, pods: Iterable[tuple[Key, PodView]], now_s: float
    ) -> tuple[list[tuple[Key, PodView]], list[Place]]:
        """Leaders that are to be asked now; places whose leader is gone, or is another one."""
        due, living, gone = [], set(), []
        for key, view in pods:
            if view.group or view.stage or not view.ip or view.phase != "Running":
                continue
            place = key, view.ordinal
            living.add(place)
            asked = self._asked.get(place)
            if asked is None or asked.uid != view.uid:
                asked = self._asked[place] = _Asked(view.uid, now_s)
                gone.append(place)
            if view.ready and not asked.ready:
                asked.due_s = now_s  # it may have been silent for long, while it started
            asked.ready = view.ready
            if asked.due_s <= now_s:
                asked.due_s = now_s + LONGEST_PAUSE_S  # until this answer is in
                due.append((key, view))
        for place in self._asked.keys() - living:
            del self._asked[place]
            gone.append(place)
        return due, gone

    def answered(self, place: Place, uid: str, heard: bool, now_s: float, spread: float) -> bool:
        """Whether that is still the leader. `spread`: factor of the pause to the next time."""
        asked = self._asked.get(place)
        if asked is None or asked.uid != uid:
            return False
        asked.silent = 0 if heard else asked.silent + 1
        pause_s = min(LONGEST_PAUSE_S, self._every_s * 2 ** min(asked.silent, 10))
        asked.due_s = now_s + pause_s * spread
        return True

    def soon(self, place: Place) -> None:
        """Something was told to it: ask what it makes of that."""
        if place in self._asked:
            self._asked[place].due_s = 0.0
