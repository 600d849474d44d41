"""Queue of waiting requests, ordered by urgency: a model's in a router, heads in a controller.

Orders snapshots of a few numbers per request. A replica is only the name on which a request is
placed, and `now` is an argument.

    lars    promised and nearly out of slack  by deadline      } then relegated ones, by their
            promised and short                by deadline      } remaining work, and AGEING for
            promised and long                 by relative slack} each second of their arrival

The relegated ones of several tenants are merged so that served work is shared by weight. A tenant's
own are in the order above, and the k-th of them counts as

    seconds served to the tenant in the last minutes / weight + Σ work / weight of its first k − 1

A controller serves one replica, and adds what each router had served elsewhere: else a router would
place a tenant's requests where the tenant has had most, and they would stay there.

Other policies order all alike: `edf`, `lrs` (absolute slack), `srpf`, `fcfs`, `lars-paper`. Ties go
by (arrival, id), so that queues merge to the order that one queue of all their requests has.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from medha.config import QueueOrder
from medha.tenants import ServedWork

FIELDS = 6  # arrival, due, work, normaliser, promised, weight: columns of the table
ARRIVAL, DUE, WORK, NORM, PROMISED, WEIGHT = range(FIELDS)

AGEING = 0.05
"""Seconds of work that a relegated request gains on those that arrive a second later: by work alone
a long one would wait as long as shorter ones keep coming."""

FEW = 8
"""Rows up to which a loop is faster than numpy."""

Rows = npt.NDArray[np.intp]


class QueuedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting request. `replica`: the name of the replica it is placed on, or "".

    `due_s` and `arrival_s` are on the caller's clock. `work_s` is after prefix hits. Relegated work
    counts divided by `weight`, of the class and the tenant. `charge_s`: what the tenant is charged
    with when it is served, W. `beyond_share`: see `Request`.
    """

    id: str
    arrival_s: float
    due_s: float
    work_s: float
    promised: bool
    replica: str = ""
    weight: float = 1.0
    tenant: str = ""
    charge_s: float = 0.0
    beyond_share: bool = False


class _Urgency(msgspec.Struct, frozen=True):
    """Sort keys of all rows at one moment; smaller is more urgent."""

    tier: npt.NDArray[np.int8]
    key: npt.NDArray[np.float64]
    arrival: npt.NDArray[np.float64]


class RequestQueue:
    """Waiting requests. Orders 10,000 in under 2 ms, and the first of each replica sooner."""

    def __init__(self, order: QueueOrder = QueueOrder()) -> None:  # noqa: B008
        self._order = order.checked()
        self._items: dict[str, QueuedRequest] = {}
        # Rows 0 to len - 1 are in use.
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []
        self._table: npt.NDArray[np.float64] = np.empty((64, FIELDS))
        self._placed: npt.NDArray[np.int32] = np.empty(64, np.int32)
        self._replicas = {"": 0}  # number of each name in `_placed`
        self._sender: npt.NDArray[np.int32] = np.empty(64, np.int32)
        self._tenants: dict[str, int] = {}  # number of each name in `_sender`
        self._served = ServedWork()
        self._served_on: dict[str, ServedWork] = {}  # by replica
        self._elsewhere: dict[str, ServedWork] = {}  # by router

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, id: object) -> bool:
        return id in self._items

    def get(self, id: str) -> QueuedRequest | None:
        return self._items.get(id)

    @property
    def keeps_promises(self) -> bool:
        return self._order.keeps_promises

    def set_order(self, order: QueueOrder) -> None:
        """Order the waiting requests by other settings; raises SpecError."""
        if order == self._order:
            return
        self._order = order.checked()
        for item in self._items.values():
            self._table[self._rows[item.id], NORM] = self._norm_s(item)

    def add(self, item: QueuedRequest) -> None:
        """Enqueue a request, replacing the entry with the same id."""
        row = self._rows.get(item.id)
        if row is None:
            row = self._rows[item.id] = len(self._ids)
            self._ids.append(item.id)
            if row == len(self._table):
                self._table = np.concatenate([self._table, np.empty_like(self._table)])
                self._placed = np.concatenate([self._placed, np.empty_like(self._placed)])
                self._sender = np.concatenate([self._sender, np.empty_like(self._sender)])
        self._items[item.id] = item
        self._placed[row] = self._replicas.setdefault(item.replica, len(self._replicas))
        if len(self._tenants) > 2 * len(self._items) + 64:
            self._number_tenants()
        self._sender[row] = self._tenants.setdefault(item.tenant, len(self._tenants))
        self._table[row] = (
            item.arrival_s,
            item.due_s,
            item.work_s,
            self._norm_s(item),
            item.promised,
            item.weight,
        )

    def remove(self, id: str) -> QueuedRequest | None:
        """Remove a request (granted, aborted, timed out); None if it is not queued."""
        item = self._items.pop(id, None)
        if item is None:
            return None
        row, last = self._rows.pop(id), self._ids.pop()
        if last != id:  # the last row fills the hole
            self._ids[row], self._rows[last] = last, row
            self._table[row] = self._table[len(self._ids)]
            self._placed[row] = self._placed[len(self._ids)]
            self._sender[row] = self._sender[len(self._ids)]
        return item

    def serve(self, id: str, now: float) -> None:
        """Remove a request that goes to its replica, and charge its tenant."""
        item = self.remove(id)
        if item is not None:
            seconds = item.charge_s / item.weight
            self._served.charge(item.tenant, seconds, now)
            self._served_on.setdefault(item.replica, ServedWork()).charge(item.tenant, seconds, now)

    def elsewhere_s(self, tenant: str, replica: str, now: float) -> float:
        """Seconds per unit of weight that a tenant was served on other replicas than this one."""
        on = self._served_on.get(replica)
        here_s = 0.0 if on is None else on.of(tenant, now)
        return max(0.0, self._served.of(tenant, now) - here_s)

    def note_elsewhere(self, router: str, tenant: str, seconds: float, now: float) -> None:
        """Take over what a router had served on other replicas."""
        self._elsewhere.setdefault(router, ServedWork()).replace(tenant, seconds, now)

    def forget(self, name: str) -> None:
        """Forget what was served on a replica, or what a router had served, that is gone."""
        self._served_on.pop(name, None)
        self._elsewhere.pop(name, None)

    def order(self, now: float) -> list[str]:
        """Ids, most urgent first; ties by arrival, then by id."""
        ranked = self._ranked(np.arange(len(self._ids)), self._urgency(now))
        return [self._ids[row] for row in ranked]

    def heads(self, now: float, limit: int = 256) -> dict[str, tuple[QueuedRequest, ...]]:
        """The most urgent requests placed on each replica, most urgent first.

        At most `limit` with a promise and as many without: a replica has room for either kind.
        """
        if len(self._ids) == 1 and limit:
            only = self._item(0)
            return {only.replica: (only,)} if only.replica else {}
        urgency, count = self._urgency(now), len(self._ids)
        kind = 2 * self._placed[:count] + (self._table[:count, PROMISED] > 0)
        near = kind > 1  # placed
        for number in np.flatnonzero(np.bincount(kind)[2:] > limit) + 2:
            rows = np.flatnonzero(kind == number)
            near[rows] = False
            near[_least(rows, urgency, limit)] = True
        heads: dict[str, list[QueuedRequest]] = {}
        counts: collections.Counter[tuple[str, bool]] = collections.Counter()
        for queued in map(self._item, self._ranked(np.flatnonzero(near), urgency)):
            counts[queued.replica, queued.promised] += 1
            if counts[queued.replica, queued.promised] <= limit:
                heads.setdefault(queued.replica, []).append(queued)
        return {replica: tuple(first) for replica, first in heads.items()}

    def unplaced(self, now: float, promised: bool) -> Iterator[QueuedRequest]:
        """Unplaced requests with or without a promise, most urgent first.

        Requests may be replaced during the iteration, but not removed.
        """
        count = len(self._ids)
        kind = (self._table[:count, PROMISED] > 0) == promised
        rows = np.flatnonzero((self._placed[:count] == 0) & kind)
        return map(self._item, self._ranked(rows, self._urgency(now)))

    def placed_on(self, replica: str) -> tuple[QueuedRequest, ...]:
        """Requests placed on one replica, in no order."""
        number = self._replicas.get(replica)
        placed = self._placed[: len(self._ids)] == number
        return tuple(map(self._item, np.flatnonzero(placed).tolist()))

    def late(self, now: float) -> tuple[str, ...]:
        """Promised requests that would miss their deadline even if they started now."""
        if len(self._ids) <= FEW:
            items = map(self._item, range(len(self._ids)))
            return tuple(
                item.id for item in items if item.promised and item.due_s - now < item.work_s
            )
        table = self._table[: len(self._ids)]
        missed = (table[:, PROMISED] > 0) & (table[:, DUE] - now < table[:, WORK])
        return tuple(self._ids[row] for row in np.flatnonzero(missed).tolist())

    def _item(self, row: int) -> QueuedRequest:
        return self._items[self._ids[row]]

    def _norm_s(self, item: QueuedRequest) -> float:
        by_work = self._order.normaliser == "work"
        norm_s = item.work_s if by_work else item.due_s - item.arrival_s
        return max(norm_s, self._order.work_floor_s)

    def _urgency(self, now: float) -> _Urgency:
        table, policy = self._table[: len(self._ids)], self._order.policy
        arrival, due, work = table[:, ARRIVAL], table[:, DUE], table[:, WORK]
        slack = due - now - work
        tier = np.zeros(len(table), dtype=np.int8)
        if policy == "fcfs":
            return _Urgency(tier, arrival, arrival)
        if policy == "edf":
            return _Urgency(tier, due, arrival)
        if policy == "srpf":
            return _Urgency(tier, work, arrival)
        if policy == "lrs":
            return _Urgency(tier, slack, arrival)
        rho = slack / table[:, NORM]
        if policy != "lars":
            return _Urgency(tier, rho, arrival)
        promised = table[:, PROMISED] > 0
        tier[:] = np.where(work > self._order.short_s, 2, 1)
        tier[slack < self._order.guard_s] = 0
        tier[~promised] = 3
        cost_s = work / table[:, WEIGHT]
        key = np.where(promised, np.where(tier == 2, rho, due), cost_s + AGEING * arrival)
        relegated = np.flatnonzero(~promised)
        senders = self._sender[relegated]
        if len(relegated) > 1 and senders.min() != senders.max():
            by = np.lexsort((arrival[relegated], key[relegated], senders))
            key[relegated] = self._shared(cost_s[relegated], senders, by, now)
        return _Urgency(tier, key, arrival)

    def _shared(
        self,
        cost_s: npt.NDArray[np.float64],
        senders: npt.NDArray[np.int32],
        by: Rows,
        now: float,
    ) -> npt.NDArray[np.float64]:
        """Keys that share served work among tenants.

        `cost_s`: work / weight of each row; `by`: the rows by tenant, a tenant's in their order.
        """
        served_s = np.zeros(len(self._tenants))
        names = list(self._tenants)
        present = np.flatnonzero(np.bincount(senders))
        waiting = [names[number] for number in present.tolist()]
        elsewhere_s = np.zeros(len(waiting))
        for work in self._elsewhere.values():
            elsewhere_s += work.of_all(waiting, now)
        served_s[present] = self._served.of_all(waiting, now) + elsewhere_s
        before_s = np.cumsum(cost_s[by]) - cost_s[by]
        senders = senders[by]
        first = np.searchsorted(senders, senders)
        shared = np.empty_like(cost_s)
        shared[by] = served_s[senders] + before_s - before_s[first]
        return shared

    def _number_tenants(self) -> None:
        """Forget the names of tenants that do not wait."""
        self._tenants = {}
        for row, name in enumerate(self._ids):
            number = self._tenants.setdefault(self._items[name].tenant, len(self._tenants))
            self._sender[row] = number

    def _ranked(self, rows: Rows, urgency: _Urgency) -> list[int]:
        """The rows, most urgent first."""
        tier, key, arrival = urgency.tier[rows], urgency.key[rows], urgency.arrival[rows]
        by = np.lexsort((arrival, key, tier))
        ranked: list[int] = rows[by].tolist()
        tied = np.ones(max(0, len(by) - 1), dtype=np.bool_)
        for column in (tier[by], key[by], arrival[by]):
            tied &= column[1:] == column[:-1]
        ends = 0
        for start in np.flatnonzero(tied).tolist():
            if start < ends:
                continue
            ends = start + 1
            while ends < len(tied) and tied[ends]:
                ends += 1
            ranked[start : ends + 1] = sorted(
                ranked[start : ends + 1], key=lambda row: self._ids[row]
            )
        return ranked


def _least(rows: Rows, urgency: _Urgency, limit: int) -> Rows:
    """The `limit` most urgent rows, and those that tie with the last of them, in no order."""
    least = []
    for column in (urgency.tier, urgency.key, urgency.arrival):
        if len(rows) <= limit:
            break
        values = column[rows]
        last = np.partition(values, limit - 1)[limit - 1]
        least.append(rows[values < last])
        limit -= len(least[-1])
        rows = rows[values == last]
    return np.concatenate([*least, rows])
