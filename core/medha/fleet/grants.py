"""Grants: the queued requests of all routers that a replica pulls next.

Routers publish the heads of their queues. A replica grants heads while the work that would run
before a most urgent request is within the dispatch window. Other requests stay queued in the
routers, where the fleet can still reorder them:

    ahead_s + work of grants that are still out  <  dispatch_budgets × max_batch_s

Order: promised first, then the smallest relative slack (D − age − W) / W, ties by (age, id). A
grant is a lease. If no Submit arrives in time it expires, and the head may be granted again.
"""

from __future__ import annotations

import msgspec

from medha.messages import Grant, Head

MAX_GRANTS = 256


class _QueuedHead(msgspec.Struct, frozen=True):
    """A published head and the time of its arrival."""

    router: str
    head: Head
    received_s: float

    def age_s(self, now: float) -> float:
        return self.head.age_s + now - self.received_s


class GrantQueue:
    """Heads of all routers, and the leases that have not expired."""

    def __init__(self, window_s: float, work_floor_s: float, lease_s: float = 0.2) -> None:
        self._window_s, self._floor_s, self.lease_s = window_s, work_floor_s, lease_s
        self._heads: dict[str, tuple[_QueuedHead, ...]] = {}
        # (router, id) -> (lease ends, seconds of work)
        self._leases: dict[tuple[str, str], tuple[float, float]] = {}

    @property
    def outstanding(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> bool:
        """True if a router has a queued head."""
        return any(self._heads.values())

    def heads(self, router: str, heads: tuple[Head, ...], now: float) -> None:
        """Replace the heads of one router."""
        self._heads[router] = tuple(_QueuedHead(router, head, now) for head in heads)

    def submitted(self, router: str, id: str) -> None:
        """Remove the lease and the head of a submitted request."""
        self._leases.pop((router, id), None)
        queued = self._heads.get(router, ())
        self._heads[router] = tuple(item for item in queued if item.head.id != id)

    def forget(self, router: str) -> None:
        self._heads.pop(router, None)
        for key in [key for key in self._leases if key[0] == router]:
            del self._leases[key]

    def grant(self, ahead_s: float, now: float) -> dict[str, Grant]:
        """Grants to send now, by router. Their leases start at `now`."""
        for key in [key for key, (ends, _) in self._leases.items() if ends <= now]:
            del self._leases[key]
        work_s = ahead_s + sum(work for _, work in self._leases.values())
        if work_s >= self._window_s or not self.waiting:
            return {}
        granted: dict[str, list[str]] = {}
        for queued in sorted(self._ungranted(), key=lambda item: self._urgency(item, now)):
            if work_s >= self._window_s or len(self._leases) >= MAX_GRANTS:
                break
            own_s = max(queued.head.work_s, self._floor_s)
            self._leases[queued.router, queued.head.id] = (now + self.lease_s, own_s)
            work_s += own_s
            granted.setdefault(queued.router, []).append(queued.head.id)
        return {router: Grant(tuple(ids), self.lease_s) for router, ids in granted.items()}

    def _ungranted(self) -> list[_QueuedHead]:
        return [
            queued
            for heads in self._heads.values()
            for queued in heads
            if (queued.router, queued.head.id) not in self._leases
        ]

    def _urgency(self, queued: _QueuedHead, now: float) -> tuple[bool, float, float, str]:
        head, age_s = queued.head, queued.age_s(now)
        work_s = max(head.work_s, self._floor_s)
        ratio = (head.ttft_deadline_s - age_s - head.work_s) / work_s
        return (not head.promised, ratio, -age_s, head.id)
