"""Pulling work: which queued request, over all routers, this replica takes next.

Routers publish the heads of their queues. A head is granted while the work that would run before
a most urgent newcomer is under the dispatch window, so that order stays a decision of the fleet:

    ahead_s + work of grants that are still out  <  dispatch_budgets × max_batch_s

Among heads, promised ones go first, then the smallest relative slack (D − age − W) / W, ties by
(age, id). A grant is a lease: it lapses when no Submit comes in time, and the head may be granted
again. Decides from numbers only; sends nothing itself.
"""

from __future__ import annotations

import msgspec

from medha.messages import Grant, Head

MAX_GRANTS = 256


class _Queued(msgspec.Struct, frozen=True):
    """A head as one router published it, and when that was heard."""

    router: str
    head: Head
    heard_s: float

    def age_s(self, now: float) -> float:
        return self.head.age_s + now - self.heard_s


class Grants:
    """Heads by router, and the leases that are out."""

    def __init__(self, window_s: float, work_floor_s: float, lease_s: float = 0.2) -> None:
        self._window_s, self._floor_s, self.lease_s = window_s, work_floor_s, lease_s
        self._heads: dict[str, tuple[_Queued, ...]] = {}
        # (router, id) -> (lease ends, seconds of work)
        self._leases: dict[tuple[str, str], tuple[float, float]] = {}

    @property
    def outstanding(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> bool:
        """Some router has a queued head."""
        return any(self._heads.values())

    def heads(self, router: str, heads: tuple[Head, ...], now: float) -> None:
        """The router's newest heads; replaces its last."""
        self._heads[router] = tuple(_Queued(router, head, now) for head in heads)

    def submitted(self, router: str, id: str) -> None:
        """A Submit came: the lease is used, and its head is no longer queued."""
        self._leases.pop((router, id), None)
        queued = self._heads.get(router, ())
        self._heads[router] = tuple(each for each in queued if each.head.id != id)

    def forget(self, router: str) -> None:
        self._heads.pop(router, None)
        for key in [key for key in self._leases if key[0] == router]:
            del self._leases[key]

    def grant(self, ahead_s: float, now: float) -> dict[str, Grant]:
        """Grants to send now, by router; their leases start at `now`."""
        for key in [key for key, (ends, _) in self._leases.items() if ends <= now]:
            del self._leases[key]
        work_s = ahead_s + sum(work for _, work in self._leases.values())
        if work_s >= self._window_s or not self.waiting:
            return {}
        granted: dict[str, list[str]] = {}
        for queued in sorted(self._ungranted(), key=lambda each: self._urgency(each, now)):
            if work_s >= self._window_s or len(self._leases) >= MAX_GRANTS:
                break
            own_s = max(queued.head.work_s, self._floor_s)
            self._leases[queued.router, queued.head.id] = (now + self.lease_s, own_s)
            work_s += own_s
            granted.setdefault(queued.router, []).append(queued.head.id)
        return {router: Grant(tuple(ids), self.lease_s) for router, ids in granted.items()}

    def _ungranted(self) -> list[_Queued]:
        return [
            queued
            for heads in self._heads.values()
            for queued in heads
            if (queued.router, queued.head.id) not in self._leases
        ]

    def _urgency(self, queued: _Queued, now: float) -> tuple[bool, float, float, str]:
        head, age_s = queued.head, queued.age_s(now)
        work_s = max(head.work_s, self._floor_s)
        ratio = (head.ttft_deadline_s - age_s - head.work_s) / work_s
        return (not head.promised, ratio, -age_s, head.id)
