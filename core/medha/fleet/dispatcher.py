"""Dispatcher: one model's queue over the replicas that serve it.

Combines admission, request queue, placement and prefix index; router and simulator drive it.

    admit ──promised────► placed at once: the estimate of that replica counts the promise
          └─relegated───► unplaced ──place_waiting──► placed, when it comes near the front
    placed ──heads, grant, take──► sent to the replica       replica closed or gone ──► unplaced

`now` is an argument. The dispatcher sends nothing.
"""

from __future__ import annotations

import collections
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from medha.config import QueueOrder
from medha.errors import Refusal
from medha.fleet.admission import AdmissionDecision, TenantUsage, admit, retry_after_s
from medha.fleet.offers import PendingRequest
from medha.fleet.placement import place
from medha.fleet.prefix_index import PageNames, PrefixIndex
from medha.fleet.replica_estimate import ReplicaEstimate, forecast_steps
from medha.fleet.request_queue import QueuedRequest, RequestQueue
from medha.fleet.shared_room import SharedRoom
from medha.messages import Head, KvEvents, Load
from medha.model import KeptPages
from medha.predictor import Predictor
from medha.request import Request, SloClass

MAX_HEADS = 64
"""Heads with a promise that are published to one replica, and heads without one."""
MAX_RELEGATED_PLACED = 16
"""Requests without a promise that are placed on one replica at a time. The others stay unplaced, so
that a request that fits nowhere waits for the whole fleet."""
MAX_RELEASED = 256
"""Requests that become unplaced when a replica opens. Placing each again takes a moment."""


class Dispatchable(Protocol):
    """A request that a dispatcher holds."""

    @property
    def request(self) -> Request: ...

    @property
    def version(self) -> str:
        """Version of the model that its tokens are encoded for."""
        ...

    @property
    def hashes(self) -> bytes:
        """Names of the prompt's full pages, joined."""
        ...

    @property
    def output_tokens(self) -> int:
        """Tokens that earlier replicas generated."""
        ...

    @property
    def moves(self) -> int:
        """Number of replicas that have lost the request."""
        ...


class DispatchReplica(Protocol):
    """A replica that a dispatcher places requests on."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """Version of the model that the replica serves."""
        ...

    @property
    def predictor(self) -> Predictor: ...

    @property
    def max_context_tokens(self) -> int: ...

    @property
    def min_batch_s(self) -> float: ...

    @property
    def max_batch_s(self) -> float: ...

    @property
    def max_running(self) -> int:
        """Sequences that may run at once."""
        ...

    @property
    def load(self) -> Load | None:
        """The last reported load; None before the first report."""
        ...

    @property
    def open(self) -> bool:
        """True if the replica takes new requests."""
        ...


Item = TypeVar("Item", bound=Dispatchable)


class Dispatcher(Generic[Item]):
    """The waiting requests of one model, at most `max_waiting`, and an estimate of each replica."""

    def __init__(
        self,
        classes: Sequence[SloClass],
        order: QueueOrder = QueueOrder(),  # noqa: B008
        max_waiting: int = sys.maxsize,
    ) -> None:
        self._queue = RequestQueue(order)
        self._usage = TenantUsage(classes)
        self._class_tpot_s = _tightest_s(classes)
        self._index = PrefixIndex()
        self._estimates: dict[str, ReplicaEstimate] = {}
        self._versions: dict[str, str] = {}  # by replica
        self._by_version: dict[str, list[ReplicaEstimate]] = {}
        self._items: dict[str, Item] = {}
        self._count_by_version: collections.Counter[str] = collections.Counter()
        self._room = SharedRoom(max_waiting)
        self._reported_s: dict[str, float] = {}
        self._relegated: dict[str, set[str]] = {}  # placed without a promise, by replica
        self._unplaced_promised: set[str] = set()
        self._unplaced_relegated: set[str] = set()
        self._resumed: dict[str, None] = {}  # whose work is not computed yet
        self._round: Iterator[str] | None = None  # ids that are left to place
        self._unpromised: dict[str, QueuedRequest] = {}
        self._unpromised_s: dict[str, float] = {}  # work by tenant

    def __len__(self) -> int:
        return len(self._queue)

    # --- replicas ---------------------------------------------------------------------------------

    @property
    def estimates(self) -> list[ReplicaEstimate]:
        return list(self._estimates.values())

    @property
    def cached_pages(self) -> int:
        """Number of page names in the prefix index."""
        return len(self._index)

    def add_replica(self, replica: DispatchReplica) -> None:
        """Create the estimate of a replica."""
        self._versions[replica.name] = replica.version
        self._estimates[replica.name] = ReplicaEstimate(
            replica.name,
            replica.predictor,
            replica.max_context_tokens,
            replica.min_batch_s,
            replica.max_batch_s,
            replica.max_running,
        )
        self._group()

    def _group(self) -> None:
        """Group the estimates by version."""
        self._by_version = {version: [] for version in self._versions.values()}
        for name, estimate in self._estimates.items():
            self._by_version[self._versions[name]].append(estimate)

    def remove_replica(self, name: str) -> None:
        """Forget a replica. Requests placed there become unplaced."""
        self._estimates.pop(name, None)
        self._versions.pop(name, None)
        self._group()
        self._reported_s.pop(name, None)
        self._index.forget(name)
        self._queue.forget(name)
        for queued in self._queue.placed_on(name):
            self._put(_placed(queued, ""))
        self._relegated.pop(name, None)

    def update_replica(self, replica: DispatchReplica, now: float) -> None:
        """Take over the load of a replica.

        When the replica opens, requests placed on other replicas may move to it. When it closes, or
        has no load any more, requests placed on it become unplaced.
        """
        if replica.load is None:
            if (known := self._estimates.get(replica.name)) is not None:
                known.closed = True
                self._unplace(known, now)
            return
        if replica.name not in self._estimates:
            self.add_replica(replica)
        estimate = self._estimates[replica.name]
        opens = replica.open and (estimate.closed or not estimate.known)
        estimate.closed = not replica.open
        estimate.update(replica.load, now)
        self._usage.report(replica.load, now)
        self._reported_s[replica.name] = now
        if opens:
            self._release_to(replica.name, now)
        if not replica.open:
            self._unplace(estimate, now)

    def _unplace(self, estimate: ReplicaEstimate, now: float) -> None:
        for queued in self._queue.placed_on(estimate.name):
            estimate.release(queued.id, now)
            self._put(_placed(queued, ""))

    def _release_to(self, opened: str, now: float) -> None:
        """Unplace requests of other replicas, so that the opened one can take some.

        Of more than MAX_RELEASED, those with the latest deadlines: they would wait longest.
        """
        movable = [
            queued
            for name in self._estimates
            if name != opened and self._versions[name] == self._versions[opened]
            for queued in self._queue.placed_on(name)
        ]
        movable.sort(key=lambda queued: (queued.due_s, queued.id))
        for queued in movable[-MAX_RELEASED:]:
            self._estimates[queued.replica].release(queued.id, now)
            self._put(_placed(queued, ""))

    def apply_kv_events(self, name: str, events: KvEvents) -> bool:
        """Apply prefix-cache changes of a replica; False if a snapshot is needed."""
        return self._index.apply(name, events)

    def cached_tokens(self, page_names: Sequence[bytes], prompt_tokens: int) -> dict[str, int]:
        """Prompt tokens cached by each replica. The last token is always computed."""
        if not self._index:
            return {}
        whole, sliding = self._index.match(page_names), dict[KeptPages, dict[str, int]]()
        cached: dict[str, int] = {}
        for name, estimate in self._estimates.items():
            rule, pages_by_replica = estimate.kept, whole
            if rule.window_tokens:
                if rule not in sliding:
                    usable = page_names[: (prompt_tokens - 1) // rule.page_tokens]
                    sliding[rule] = self._index.match_sliding(usable, rule)
                pages_by_replica = sliding[rule]
            if pages := pages_by_replica.get(name):
                cached[name] = min(pages * rule.page_tokens, prompt_tokens - 1)
        return cached

    def idle_work_s(self, prompt_tokens: int, hashes: bytes, version: str, tpot_s: float) -> float:
        """W: prefill seconds of the uncached tokens on the best replica, if it were idle.

        `tpot_s`: that of the request's class, which limits the batches.
        """
        cached = self.cached_tokens(PageNames(hashes), prompt_tokens)
        return min(
            estimate.reference_work_s(prompt_tokens, cached.get(estimate.name, 0), tpot_s)
            for estimate in self._serving(version)
        )

    def least_tpot_s(self, prompt_tokens: int, version: str) -> float:
        """Smallest TPOT target that the best replica can accept."""
        serving, least_s = self._serving(version), math.inf
        floor_s = min(estimate.floor_tpot_s for estimate in serving)
        for estimate in serving:
            least_s = min(least_s, estimate.least_tpot_s(prompt_tokens))
            if least_s <= floor_s:
                break  # mostly the first: decodes take less than the shortest batch
        return least_s

    def match_ahead(self, hashes: bytes) -> Iterator[None]:
        """Match the pages of a long prompt, in steps of about a millisecond.

        Without this, the first match of a million tokens takes up to 40 ms.
        """
        return self._index.matching(PageNames(hashes))

    def extend_forecasts(
        self, prompt_tokens: int, version: str, class_tpot_s: float | None, tpot_s: float
    ) -> Iterator[None]:
        """Prepare the forecasts for a prompt, in steps of about a millisecond.

        `class_tpot_s`: as `idle_work_s` needs it, or None; `tpot_s`: that of the request.

        Nothing is left to do until a prompt is longer, or a replica has batches of a new budget.
        Without this, the first forecast for a million tokens takes up to 20 ms a replica.
        """
        tpot_s = min(tpot_s, self._class_tpot_s)
        for estimate in self._serving(version):
            most = min(prompt_tokens, estimate.max_context_tokens)
            if estimate.is_extended(most, class_tpot_s, tpot_s):
                continue
            for tokens in forecast_steps(most):
                if not estimate.is_extended(tokens, class_tpot_s, tpot_s):
                    estimate.extend(tokens, class_tpot_s, tpot_s)
                    yield

    # --- requests ---------------------------------------------------------------------------------

    def set_classes(self, classes: Sequence[SloClass]) -> None:
        """Replace the model's classes; waiting requests keep theirs."""
        self._usage.set_classes(classes)
        self._class_tpot_s = _tightest_s(classes)

    def set_order(self, order: QueueOrder) -> None:
        """Order the waiting requests by other settings; raises SpecError."""
        self._queue.set_order(order)

    @property
    def keeps_promises(self) -> bool:
        """False if a request that fits in time is placed at once, but not promised anything."""
        return self._queue.keeps_promises

    def check_room(self, tenant: str, count: int) -> None:
        """Raise Refusal if there is no room for `count` requests of a tenant."""
        waiting, most = self._room.held, self._room.most
        if waiting and not self._room.fits(tenant, count):
            raise Refusal(
                "overloaded",
                f"{waiting} requests wait, at most {most} may, and of one tenant a quarter once "
                "half of them do: retry later",
                retry_after_s=self.retry_after_s(),
            )

    def most_together(self, item: Item) -> int:
        """Return how many requests like this the open replicas hold together if they are empty."""
        pending = _pending(item, self._class_tpot_s)
        return sum(
            estimate.most_together(pending)
            for estimate in self._serving(item.version)
            if not estimate.closed and estimate.can_ever(pending)
        )

    def admit(self, item: Item, slo_class: SloClass, now: float) -> AdmissionDecision:
        """Enqueue a request with or without a promise; raises Refusal."""
        request, pending = item.request, _pending(item, self._class_tpot_s)
        cached = self.cached_tokens(PageNames(item.hashes), request.prompt_tokens)
        age_s = now - request.arrival_s
        estimates = self._serving(item.version)
        waiting_s = self._unpromised_s.get(request.tenant, 0.0)
        others_wait = len(self._unpromised_s) > (request.tenant in self._unpromised_s)
        decision = admit(
            pending, estimates, cached, slo_class, self._usage, now, age_s, waiting_s, others_wait
        )
        self._remember(item)
        option = decision.option
        if decision.promised:
            self._estimates[option.replica].hold(pending, option, now, True)
        self._usage.add(request.slo_class, option.work_s, now)
        self._put(
            QueuedRequest(
                id=request.id,
                arrival_s=request.arrival_s,
                due_s=request.due_s,
                work_s=option.work_s,
                promised=decision.promised,
                replica=option.replica if decision.promised else "",
                weight=request.weight,
                tenant=request.tenant,
                charge_s=request.work_s,
                beyond_share=decision.beyond_share,
            )
        )
        return decision

    def resume(self, item: Item, now: float) -> None:
        """Enqueue a request that lost its replica: promised, unplaced and due at once.

        The next placing computes its work: thousands may be lost at one time.
        """
        request = item.request
        self._remember(item)
        self._resumed[request.id] = None
        self._put(
            QueuedRequest(
                id=request.id,
                arrival_s=request.arrival_s,
                due_s=min(now, request.due_s),
                work_s=request.work_s,
                promised=True,
                weight=request.weight,
                tenant=request.tenant,
                charge_s=request.work_s,
            )
        )

    def _compute_work(self, id: str) -> None:
        """Compute the work of a resumed request, with the tokens that it has."""
        item, queued = self._items[id], self._queue.get(id)
        serving = self._serving(item.version)
        if queued is not None and serving:
            tokens = item.request.prompt_tokens + item.output_tokens
            work_s = min(estimate.predictor.prefill_s(tokens) for estimate in serving)
            self._put(msgspec.structs.replace(queued, work_s=work_s))

    def take(self, id: str, name: str, now: float) -> Item | None:
        """Dequeue a request that its replica was granted; None if it is not placed there."""
        queued = self._queue.get(id)
        if queued is None or queued.replica != name:
            return None
        self._queue.serve(id, now)
        return self._forget(id)

    def accepted(self, id: str, name: str) -> None:
        """The replica accepted a request: its next load counts the request."""
        if name in self._estimates:
            self._estimates[name].accepted(id)

    def drop(self, id: str, name: str | None, now: float) -> None:
        """Remove a request that ended. `name`: the replica that it was sent to."""
        queued = self._queue.remove(id)
        self._forget(id)
        replica = queued.replica if queued is not None else name
        if replica and replica in self._estimates:
            self._estimates[replica].release(id, now)

    def relegate_late(self, now: float) -> list[Item]:
        """Relegate promised requests that can no longer meet their deadline.

        A resumed request keeps its place, because its client is already reading.
        """
        if not len(self._queue):
            return []
        late: list[Item] = []
        freed: set[str] = set()
        for late_id in self._queue.late(now):
            queued, item = self._queue.get(late_id), self._items[late_id]
            if queued is None or item.moves:
                continue
            if queued.replica in self._estimates:
                self._estimates[queued.replica].accepted(late_id)
                freed.add(queued.replica)
            relegated = msgspec.structs.replace(queued, promised=False, replica="")
            self._put(relegated)
            late.append(item)
        for name in freed:  # one recount for all requests: `update` lets the accepted ones go
            estimate = self._estimates[name]
            estimate.update(estimate.load, self._reported_s[name])
        return late

    def place_waiting(self, now: float) -> None:
        """Place the most urgent unplaced requests: all promised, some relegated per replica."""
        while self.place_next(now):
            pass

    def place_next(self, now: float) -> bool:
        """Take the next step of `place_waiting`; False if there is none left.

        A round goes through the requests in the order of its beginning, so that one that fits
        nowhere does not stop those behind it.
        """
        if self._resumed:
            self._compute_work(self._resumed.popitem()[0])
            return True
        if self._round is None:
            self._round = iter(self._unplaced(now))
        room = self._relegated_room()
        for waiting_id in self._round:
            queued = self._queue.get(waiting_id)
            if queued is None or queued.replica or not (queued.promised or room > 0):
                continue
            item = self._items[waiting_id]
            pending = _pending(item, self._class_tpot_s)
            steps = self.extend_forecasts(pending.prompt_tokens, item.version, None, pending.tpot_s)
            if any(True for _ in steps):  # the rest is left to the next steps
                self._round = itertools.chain([waiting_id], self._round)
                return True
            cached = self.cached_tokens(PageNames(item.hashes), pending.prompt_tokens)
            option = place(pending, self._serving(item.version), cached, now)
            if option is not None:
                self._estimates[option.replica].hold(pending, option, now, queued.promised)
                self._put(_placed(queued, option.replica))
            return True
        self._round = None
        return False

    def _unplaced(self, now: float) -> list[str]:
        """Ids of the unplaced requests that may be placed, most urgent first."""
        ids: list[str] = []
        if self._estimates and self._unplaced_promised:
            ids += (queued.id for queued in self._queue.unplaced(now, True))
        if self._unplaced_relegated and self._relegated_room() > 0:
            ids += (queued.id for queued in self._queue.unplaced(now, False))
        return ids

    def _relegated_room(self) -> int:
        """Number of relegated requests that may be placed in addition."""
        placed = sum(len(self._relegated.get(name, ())) for name in self._estimates)
        return MAX_RELEGATED_PLACED * len(self._estimates) - placed

    def heads(self, now: float) -> dict[str, tuple[QueuedRequest, ...]]:
        """The most urgent requests placed on each replica, to be published to it."""
        if not len(self._queue):
            return dict.fromkeys(self._estimates, ())
        heads = self._queue.heads(now, MAX_HEADS)
        return {name: heads.get(name, ()) for name in self._estimates}

    def published(self, heads: Sequence[QueuedRequest], now: float) -> tuple[Head, ...]:
        """Return the heads of a replica as messages: most publications repeat most heads."""
        return tuple(self._head(queued, now) for queued in heads)

    def _head(self, queued: QueuedRequest, now: float) -> Head:
        return Head(
            id=queued.id,
            age_s=max(0.0, now - queued.arrival_s),
            due_in_s=queued.due_s - now,
            work_s=queued.work_s,
            promised=queued.promised,
            weight=queued.weight,
            tenant=queued.tenant,
            charge_s=queued.charge_s,
            beyond_share=queued.beyond_share,
            elsewhere_s=self._queue.elsewhere_s(queued.tenant, queued.replica, now),
        )

    # --- views ------------------------------------------------------------------------------------

    def get(self, id: str) -> Item | None:
        """A waiting request."""
        return self._items.get(id)

    def items(self) -> list[Item]:
        """All waiting requests, in no order."""
        return list(self._items.values())

    def waiting(self, now: float) -> list[QueuedRequest]:
        """All waiting requests, most urgent first."""
        ids = self._queue.order(now)
        return [queued for queued in map(self._queue.get, ids) if queued is not None]

    def placed_on(self, name: str) -> tuple[QueuedRequest, ...]:
        """Waiting requests that are placed on one replica."""
        return self._queue.placed_on(name)

    def waiting_for(self, version: str) -> int:
        """Number of requests that wait for a replica of this version."""
        return self._count_by_version[version]

    def retry_after_s(self) -> float:
        return retry_after_s(self.estimates)

    # --- state ------------------------------------------------------------------------------------

    def _serving(self, version: str) -> Sequence[ReplicaEstimate]:
        """Estimates of the replicas of one version: only they can read its tokens."""
        return self._by_version.get(version, [])

    def _put(self, queued: QueuedRequest) -> None:
        """Enqueue a request, replacing its former entry."""
        self._unmark(queued.id)
        if not queued.promised and queued.replica:
            self._relegated.setdefault(queued.replica, set()).add(queued.id)
        elif queued.promised and not queued.replica:
            self._unplaced_promised.add(queued.id)
        elif not queued.promised:
            self._unplaced_relegated.add(queued.id)
        if not queued.promised:
            self._unpromised[queued.id] = queued
            waiting_s = self._unpromised_s.get(queued.tenant, 0.0)
            self._unpromised_s[queued.tenant] = waiting_s + queued.work_s
        self._queue.add(queued)

    def _unmark(self, id: str) -> None:
        self._unplaced_promised.discard(id)
        self._unplaced_relegated.discard(id)
        queued = self._unpromised.pop(id, None)
        if queued is not None:
            if queued.replica in self._relegated:
                self._relegated[queued.replica].discard(id)
            waiting_s = self._unpromised_s.pop(queued.tenant, 0.0) - queued.work_s
            if waiting_s > 1e-9:
                self._unpromised_s[queued.tenant] = waiting_s

    def _remember(self, item: Item) -> None:
        item_id = item.request.id
        self._forget(item_id)
        self._items[item_id] = item
        self._count_by_version[item.version] += 1
        self._room.hold(item.request.tenant, 1)

    def _forget(self, id: str) -> Item | None:
        self._unmark(id)
        self._resumed.pop(id, None)
        item = self._items.pop(id, None)
        if item is not None:
            self._count_by_version[item.version] -= 1
            if not self._count_by_version[item.version]:
                del self._count_by_version[item.version]
            self._room.hold(item.request.tenant, -1)
        return item


def split_names(hashes: bytes) -> list[bytes]:
    """The page names in a joined byte string."""
    return list(PageNames(hashes))


def _tightest_s(classes: Sequence[SloClass]) -> float:
    return min((slo_class.slo.tpot_s for slo_class in classes), default=math.inf)


def _pending(item: Dispatchable, class_tpot_s: float) -> PendingRequest:
    request, emitted = item.request, item.output_tokens
    return PendingRequest(
        id=request.id,
        prompt_tokens=request.prompt_tokens + emitted,
        max_output_tokens=max(1, request.max_output_tokens - emitted),
        due_s=request.due_s,
        tpot_s=request.tpot_s,
        class_tpot_s=class_tpot_s,
        slo_class=request.slo_class,
        tenant=request.tenant,
        beyond_share=request.beyond_share,
    )


def _placed(queued: QueuedRequest, replica: str) -> QueuedRequest:
    return msgspec.structs.replace(queued, replica=replica)
