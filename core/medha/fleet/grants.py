"""Grants: the queued requests of all routers that a replica pulls next.

Routers publish the heads of their queues. A replica grants heads while the work that would run
before a most urgent request is within the dispatch window. Other requests stay queued in the
routers, where the fleet can still reorder them:

    may be in time    ahead_s           + such grants that are out   <  dispatch_budgets × max_batch_s
    is late           relegated_ahead_s + all grants that are out    <  dispatch_budgets × max_batch_s

A request without a promise that may still be in time is not held back: a replica keeps it as soon
as it fits.

Order: promised first, then the smallest relative slack (D − age − W) / W, ties by (age, id). A
grant is a lease. If no Submit arrives in time it expires, and the head may be granted again.
"""

from __future__ import annotations

import msgspec

from medha.messages import Grant, Head, Load

MAX_GRANTS = 256


class _QueuedHead(msgspec.Struct, frozen=True):
    """A published head and the time of its arrival."""

    router: str
    head: Head
    received_s: float

    def age_s(self, now: float) -> float:
        return self.head.age_s + now - self.received_s

    def late(self, now: float) -> bool:
        """Return True if the request has no promise and would be late if it started now."""
        due_in_s = self.head.ttft_deadline_s - self.age_s(now)
        return not self.head.promised and due_in_s < self.head.work_s


class _Lease(msgspec.Struct, frozen=True):
    """A grant without a Submit so far."""

    ends_s: float
    work_s: float
    late: bool


class GrantQueue:
    """Heads of all routers, and the leases that have not expired."""

    def __init__(self, window_s: float, work_floor_s: float, lease_s: float = 0.2) -> None:
        self._window_s, self._floor_s, self.lease_s = window_s, work_floor_s, lease_s
        self._heads: dict[str, tuple[_QueuedHead, ...]] = {}
        self._leases: dict[tuple[str, str], _Lease] = {}  # by router and id

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

    def grant(self, load: Load, now: float) -> dict[str, Grant]:
        """Grants to send now, by router. Their leases start at `now`."""
        self._leases = {key: lease for key, lease in self._leases.items() if lease.ends_s > now}
        leases = self._leases.values()
        ahead_s = load.ahead_s + sum(lease.work_s for lease in leases if not lease.late)
        late_ahead_s = load.relegated_ahead_s + sum(lease.work_s for lease in leases)
        granted: dict[str, list[str]] = {}
        for queued in sorted(self._ungranted(), key=lambda item: self._urgency(item, now)):
            if len(self._leases) >= MAX_GRANTS:
                break
            head, late = queued.head, queued.late(now)
            if (late_ahead_s if late else ahead_s) >= self._window_s:
                continue
            own_s = max(head.work_s, self._floor_s)
            self._leases[queued.router, head.id] = _Lease(now + self.lease_s, own_s, late)
            ahead_s += 0.0 if late else own_s
            late_ahead_s += own_s
            granted.setdefault(queued.router, []).append(head.id)
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
