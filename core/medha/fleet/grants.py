"""Grants: the queued requests of all routers that a replica pulls next.

Routers publish the heads of their queues. A replica grants heads in the order of one queue of them
all. A promised head is granted at once, since the promise counts on this replica. Others wait while
the work before them fills the dispatch window, and stay in the routers, where the fleet can still
place them elsewhere:

    may be in time    ahead_s           + such work that is granted  <  dispatch_budgets × max_batch
    late              relegated_ahead_s + such work that is granted  <  dispatch_budgets × max_batch

A late request, without a promise and without time enough or beyond the share of its tenant, so
waits for late work alone. The replica gives that work its guaranteed share of time.

A grant is a lease. If no Submit arrives in time it expires, and the head may be granted again. If
the Submit came with its head, the replica begins the request instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from medha.config import QueueOrder
from medha.fleet.request_queue import QueuedRequest, RequestQueue
from medha.messages import Grant, Head, Load, Submit
from medha.scheduling.interface import Ahead

MAX_GRANTS = 256


class _Lease(msgspec.Struct, frozen=True):
    """A grant without a Submit so far."""

    router: str
    ends_s: float
    work_s: float
    late: bool


class GrantQueue:
    """Heads of all routers, and the leases that have not expired."""

    def __init__(
        self,
        window_s: float,
        order: QueueOrder = QueueOrder(),  # noqa: B008
        lease_s: float = 0.2,
    ) -> None:
        self._window_s, self._order, self.lease_s = window_s, order, lease_s
        self._promises = order.keeps_promises
        self._heads = RequestQueue(order)  # placed on the router that published them
        self._leases: dict[str, _Lease] = {}
        self._early: dict[str, tuple[Submit, float]] = {}  # of heads; with its time of arrival

    @property
    def outstanding(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> bool:
        """True if a router has a queued head."""
        return bool(len(self._heads))

    def heads(
        self, router: str, heads: tuple[Head, ...], now: float, submits: Sequence[Submit] = ()
    ) -> None:
        """Replace the heads of one router; `submits`: early ones of some of them."""
        promised = {head.id: head.promised for head in heads}
        for queued in self._heads.placed_on(router):
            if queued.id not in promised:
                self._heads.remove(queued.id)
            if promised.get(queued.id) is not queued.promised:
                self._early.pop(queued.id, None)
        self._early.update((early.id, (early, now)) for early in submits if early.id in promised)
        for head in heads:
            self._heads.note_elsewhere(router, head.tenant, head.elsewhere_s, now)
            self._heads.add(
                QueuedRequest(
                    id=head.id,
                    arrival_s=now - head.age_s,
                    due_s=now + head.due_in_s,
                    work_s=head.work_s,
                    promised=head.promised,
                    replica=router,
                    weight=head.weight,
                    tenant=head.tenant,
                    charge_s=head.charge_s,
                    beyond_share=head.beyond_share,
                )
            )

    def begin(self, load: Ahead | Load, now: float) -> list[tuple[str, Submit]]:
        """Return the requests to begin now, with their routers, most urgent first.

        They are those that came with a head that the replica has room for.
        """
        if not self._early:
            return []
        begun: list[tuple[str, Submit]] = []
        for queued in self.grantable(load, now):
            early, received_s = self._early.get(queued.id, (None, now))
            if early is not None:
                self.submitted(queued.id, now)
                aged = msgspec.structs.replace(early, age_s=early.age_s + now - received_s)
                begun.append((queued.replica, aged))
        return begun

    def submitted(self, id: str, now: float) -> None:
        """Remove the lease and the head of a submitted request."""
        self._leases.pop(id, None)
        self._early.pop(id, None)
        self._heads.serve(id, now)

    def forget(self, router: str) -> None:
        for queued in self._heads.placed_on(router):
            self._heads.remove(queued.id)
            self._early.pop(queued.id, None)
        self._heads.forget(router)
        self._leases = {key: lease for key, lease in self._leases.items() if lease.router != router}

    def grant(self, load: Ahead | Load, now: float) -> dict[str, Grant]:
        """Grants to send now, by router. Their leases start at `now`."""
        granted: dict[str, list[str]] = {}
        for queued in self.grantable(load, now):
            work_s, late = self._work_s(queued), self._late(queued, now)
            self._leases[queued.id] = _Lease(queued.replica, now + self.lease_s, work_s, late)
            granted.setdefault(queued.replica, []).append(queued.id)
        return {router: Grant(tuple(ids), self.lease_s) for router, ids in granted.items()}

    def grantable(self, load: Ahead | Load, now: float) -> list[QueuedRequest]:
        """The heads that a replica with this load has room for, most urgent first."""
        self._leases = {key: lease for key, lease in self._leases.items() if lease.ends_s > now}
        before_s = {False: load.ahead_s, True: load.relegated_ahead_s}  # by lateness
        for lease in self._leases.values():
            before_s[lease.late] += lease.work_s
        chosen: list[QueuedRequest] = []
        for queued in map(self._heads.get, self._heads.order(now)):
            if len(self._leases) + len(chosen) >= MAX_GRANTS:
                break
            if queued is None or queued.id in self._leases:
                continue
            late = self._late(queued, now)
            if before_s[late] < self._window_s or (self._promises and queued.promised):
                before_s[late] += self._work_s(queued)
                chosen.append(queued)
        return chosen

    def _work_s(self, queued: QueuedRequest) -> float:
        return max(queued.work_s, self._order.work_floor_s)

    def _late(self, queued: QueuedRequest, now: float) -> bool:
        """Return True if no replica would keep the request."""
        late = queued.beyond_share or queued.due_s - now < queued.work_s
        return self._promises and late and not queued.promised
