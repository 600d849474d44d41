"""Several replicas behind one router or more, in virtual time.

Drives the Dispatchers of the routers and the grants of the controllers; messages take no time:

    arrival ──Dispatcher.admit──► queue ──place, heads──► Grants ──grant, take──► SimReplica

A replica reports its Load at every arrival and after every round of its scheduler. A router knows
the Load of the last LoadReport, so the simulated fleet is the best case of the same decisions.
Requests are dealt to the routers in turn. Those that arrive while no replica serves are held for
the next one. Those of a replica that lost all its groups are queued again with their tokens if
another one serves; else they wait there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.config import Scheduling
from medha.errors import Refusal
from medha.fleet.admission import attainable_tpot_s
from medha.fleet.demand import DemandWindow
from medha.fleet.dispatcher import Dispatcher
from medha.fleet.grants import GrantQueue
from medha.fleet.replica_estimate import least_tpot_s
from medha.messages import Head, Load, ModelDemand
from medha.predictor import Predictor
from medha.request import Request, SloClass
from medha.sim.loop import ARRIVE, Loop
from medha.sim.replica import Live, SimReplica
from medha.sim.report import RequestRecord
from medha.sim.workload import Arrival

MODEL = "model"  # the only one
VERSION = ""  # all replicas serve the same version
SENT = 64  # requests of a replica that may have ended, before they are forgotten


class SimulatedRequest:
    """A request in the queue of a router, as its dispatcher reads it.

    `lost`: what the replica that lost it had served; `moves`: the number of these replicas.
    """

    __slots__ = ("arrival", "dispatcher", "hashes", "lost", "moves", "page_names", "request")

    version = VERSION

    def __init__(
        self,
        request: Request,
        arrival: Arrival,
        page_tokens: int,
        dispatcher: Dispatcher[SimulatedRequest],
    ) -> None:
        self.request, self.arrival, self.dispatcher = request, arrival, dispatcher
        self.page_names = arrival.page_names(page_tokens)
        self.hashes = b"".join(self.page_names)
        self.lost: Live | None = None
        self.moves = 0

    @property
    def output_tokens(self) -> int:
        return 0 if self.lost is None else self.lost.emitted


class SimulatedLink:
    """A replica as the dispatcher reads it, and what its controller would hold for it."""

    version = VERSION

    def __init__(self, replica: SimReplica, settings: Scheduling, max_context_tokens: int) -> None:
        self.replica, self.max_context_tokens = replica, max_context_tokens
        self.min_batch_s, self.max_batch_s = settings.min_batch_s, settings.max_batch_s
        self.max_running = settings.max_running
        window_s = settings.dispatch_budgets * settings.max_batch_s
        self.grants = GrantQueue(window_s, settings.queue_order)
        self.load: Load | None = None
        self.reported_s = float("nan")  # time of `load`; nan if the replica has changed since
        self.draining = False
        self.published: list[tuple[str, bool]] = []  # (id, promised) of the heads it has
        self.sent: dict[str, SimulatedRequest] = {}  # those that it serves, and some ended ones
        self.counted = 0  # ended requests that demand has counted

    @property
    def name(self) -> str:
        return self.replica.name

    @property
    def predictor(self) -> Predictor:
        return self.replica.scheduler.predictor

    def keep(self, item: SimulatedRequest) -> None:
        """Keep a request that was submitted, in case the replica loses it."""
        if len(self.sent) > 2 * len(self.replica.live) + SENT:
            self.sent = {
                name: sent for name, sent in self.sent.items() if self.replica.serves(name)
            }
        self.sent[item.request.id] = item

    @property
    def open(self) -> bool:
        return self.load is not None and bool(self.load.total_pages) and not self.draining


class SimulatedFleet:
    """Replicas, routers with a queue for all of them, and a record of each request.

    `settings`: those of the replicas. `deadlines_s` and `tpots_s` override the TTFT deadline and
    the TPOT target of single requests, as the request headers do. `weights`: by tenant, as API
    keys have them.
    """

    def __init__(
        self,
        replicas: Sequence[SimReplica],
        loop: Loop,
        classes: Sequence[SloClass],
        settings: Scheduling,
        page_tokens: int,
        max_context_tokens: int,
        deadlines_s: Mapping[str, float] | None = None,
        tpots_s: Mapping[str, float] | None = None,
        routers: int = 1,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.loop, self.settings, self.page_tokens = loop, settings, page_tokens
        self.max_context_tokens = max_context_tokens
        self.classes = {slo_class.name: slo_class for slo_class in classes}
        self.deadlines_s, self.tpots_s = deadlines_s or {}, tpots_s or {}
        self.weights = weights or {}
        self.predictor = replicas[0].scheduler.predictor  # all are alike
        self.dispatchers: dict[str, Dispatcher[SimulatedRequest]] = {
            f"router-{index}": Dispatcher(classes, settings.queue_order) for index in range(routers)
        }
        self._dealt = itertools.cycle(self.dispatchers.values())
        self.links: dict[str, SimulatedLink] = {}
        self.refused: list[RequestRecord] = []
        self._refused_ids: set[str] = set()
        self.held: list[SimulatedRequest] = []
        self.left: list[tuple[SimulatedRequest, float]] = []  # while they were queued, and when
        self.hand_overs: list[tuple[float, str, str]] = []  # (time, request, replica)
        self._demand = DemandWindow()
        self._left: list[SimReplica] = []
        self._late: set[str] = set()  # promised when admitted, relegated in the queue
        for replica in replicas:
            self.join(replica)

    # --- replicas ---------------------------------------------------------------------------------

    @property
    def replicas(self) -> dict[str, SimReplica]:
        return {name: link.replica for name, link in self.links.items()}

    @property
    def serving(self) -> list[str]:
        """Names of the replicas that take requests."""
        return [name for name, link in self.links.items() if not link.draining]

    @property
    def waiting(self) -> int:
        """Number of requests in the queues of all routers."""
        return sum(map(len, self.dispatchers.values()))

    def pending_s(self, name: str) -> float:
        """Prefill seconds that a replica has or has been given, as the most loaded router counts
        them."""
        return max(
            estimate.pending_s
            for dispatcher in self.dispatchers.values()
            for estimate in dispatcher.estimates
            if estimate.name == name
        )

    def join(self, replica: SimReplica) -> None:
        """Add a replica. Held requests are admitted first."""
        link = SimulatedLink(replica, self.settings, self.max_context_tokens)
        self.links[replica.name] = link
        replica.watch = self._on_round
        self._report(link)
        held, self.held = self.held, []
        for item in held:
            self._admit(item, held=True)
        self._dispatch()

    def leave(self, name: str) -> None:
        """Drain a replica: its queued requests go elsewhere, and it leaves when idle."""
        link = self.links[name]
        link.draining = True
        self._report(link)
        self._dispatch()
        self._remove_if_idle(link)

    def _remove_if_idle(self, link: SimulatedLink) -> None:
        if link.name not in self.links or link.replica.live:
            return
        self._count_ended(link)
        self._left.append(self.links.pop(link.name).replica)
        for dispatcher in self.dispatchers.values():
            dispatcher.remove_replica(link.name)

    # --- requests ---------------------------------------------------------------------------------

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """Schedule all arrivals."""
        for arrival in arrivals:
            self.loop.at(arrival.arrival_s, ARRIVE, functools.partial(self.arrive, arrival))

    def arrive(self, arrival: Arrival) -> None:
        """Admit a request, refuse it, or hold it while no replica serves."""
        for link in self.links.values():
            if link.reported_s != self.loop.now:
                self._report(link)
        late = [self._relegate_late(dispatcher) for dispatcher in self.dispatchers.values()]
        if any(late):
            self._dispatch()  # a router publishes its heads after each report
        dispatcher = next(self._dealt)
        request = self._request(arrival, dispatcher)
        item = SimulatedRequest(request, arrival, self.page_tokens, dispatcher)
        if self.serving:
            self._admit(item)
            self._dispatch()
        else:
            self.held.append(item)

    def _request(self, arrival: Arrival, dispatcher: Dispatcher[SimulatedRequest]) -> Request:
        """The request with its work after prefix hits, and its deadline."""
        slo_class = self._class_of(arrival.slo_class, arrival.tenant)
        hashes = b"".join(arrival.page_names(self.page_tokens))
        tpot_s = slo_class.slo.tpot_s
        budget_s = self.settings.reference_budget_s(tpot_s, self.predictor.topology.spp)
        work_s = self.predictor.at_budget(budget_s).prefill_s(arrival.prompt_tokens)
        if self.links:
            work_s = dispatcher.idle_work_s(arrival.prompt_tokens, hashes, VERSION, tpot_s)
        deadline_s = self.deadlines_s.get(arrival.id, slo_class.slo.ttft_deadline_s(work_s))
        return Request(
            id=arrival.id,
            arrival_s=self.loop.now,
            prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.max_output_tokens,
            tpot_s=self._tpot_s(arrival, slo_class),
            work_s=work_s,
            ttft_deadline_s=deadline_s,
            slo_class=slo_class.name,
            tenant=arrival.tenant,
            weight=slo_class.weight,
        )

    def _class_of(self, name: str, tenant: str) -> SloClass:
        """The class of a request, with the weight of its tenant."""
        slo_class, weight = self.classes[name], self.weights.get(tenant, 1.0)
        if weight == 1.0:
            return slo_class
        return msgspec.structs.replace(slo_class, weight=slo_class.weight * weight)

    def _tpot_s(self, arrival: Arrival, slo_class: SloClass) -> float:
        """The TPOT target: its own, else that of its class as far as it can be met."""
        least_s = least_tpot_s(arrival.prompt_tokens, self.predictor, self.settings.min_batch_s)
        class_s = attainable_tpot_s(slo_class.slo.tpot_s, least_s)
        return self.tpots_s.get(arrival.id, class_s)

    def _admit(self, item: SimulatedRequest, held: bool = False) -> None:
        """Enqueue a request or record its refusal. A held request is never refused for being late:
        it goes on without a promise."""
        now, request = self.loop.now, item.request
        slo_class = self._class_of(request.slo_class, request.tenant)
        if held:
            slo_class = msgspec.structs.replace(slo_class, when_infeasible="relegate")
        try:
            decision = item.dispatcher.admit(item, slo_class, now)
        except Refusal as refusal:
            self._demand.refused(MODEL, request, refusal, now, self._least_tpot_s(request))
            self.refused.append(self._unserved(item, refusal.code))
            self._refused_ids.add(request.id)
            return
        option = decision.option
        item.request = msgspec.structs.replace(
            request, promised=decision.promised, beyond_share=decision.beyond_share
        )
        if held:
            self._demand.arrived(MODEL, request, now)
        else:
            first_s = now - request.arrival_s + option.first_s(decision.promised)
            self._demand.taken(MODEL, request, first_s, option.work_s, now)

    def _on_round(self, replica: SimReplica) -> None:
        """A replica reports after a round of its scheduler."""
        link = self.links.get(replica.name)
        if link is None:
            return
        if link.draining:
            self._remove_if_idle(link)
        if replica.empty and replica.live and self._others_serve(link):
            self._requeue_all(link)
        elif self.waiting:
            self._report(link)
            self._dispatch(ready=link)
        else:
            self._report_cache(link)
            link.reported_s = float("nan")

    def _others_serve(self, link: SimulatedLink) -> bool:
        return any(
            not other.draining and not other.replica.empty
            for other in self.links.values()
            if other is not link
        )

    def _requeue_all(self, link: SimulatedLink) -> None:
        """Queue the requests of a replica without KVP groups again, for other replicas."""
        now = self.loop.now
        for live in link.replica.withdraw():
            item = link.sent.pop(live.request.id)
            item.lost, item.moves = live, item.moves + 1
            item.dispatcher.drop(live.request.id, link.name, now)
            item.dispatcher.resume(item, now)
        for other in self.links.values():
            self._report(other)
        self._dispatch()

    def _report(self, link: SimulatedLink) -> None:
        """Pass a replica's cache changes and Load to the dispatchers."""
        self._report_cache(link)
        link.load, link.reported_s = link.replica.scheduler.load(self.loop.now), self.loop.now
        for dispatcher in self.dispatchers.values():
            dispatcher.update_replica(link, self.loop.now)

    def _report_cache(self, link: SimulatedLink) -> None:
        events = link.replica.take_kv_events()
        if events is not None:
            for dispatcher in self.dispatchers.values():
                dispatcher.apply_kv_events(link.name, events)

    def cancel(self, id: str) -> None:
        """The client left: remove its request from the queue or abort it on its replica.

        Routers have forgotten a refused one.
        """
        if id in self._refused_ids:
            return
        now = self.loop.now
        self.left += [(item, now) for item in self.held if item.request.id == id]
        self.held = [item for item in self.held if item.request.id != id]
        for dispatcher in self.dispatchers.values():
            item = dispatcher.get(id)
            if item is not None:
                dispatcher.drop(id, None, now)
                self.left.append((item, now))
        for link in self.links.values():
            if link.replica.serves(id):
                link.replica.abort(id)
                link.reported_s = float("nan")
                for dispatcher in self.dispatchers.values():
                    dispatcher.drop(id, link.name, now)
        self._dispatch()

    def _dispatch(self, ready: SimulatedLink | None = None) -> None:
        """Place, publish heads and submit what replicas grant, until no replica grants more.

        A replica grants when its heads change, and after a round of its scheduler (`ready`).
        """
        granted = True
        while granted and self.waiting:
            granted = False
            heads = {
                router: self._heads(dispatcher) for router, dispatcher in self.dispatchers.items()
            }
            for name, link in self.links.items():
                published = {router: of.get(name, ()) for router, of in heads.items()}
                ids = [(head.id, head.promised) for of in published.values() for head in of]
                changed, link.published = ids != link.published, ids
                if ids and (changed or link is ready):
                    granted = self._pull(link, published) or granted
            ready = None

    def _heads(self, dispatcher: Dispatcher[SimulatedRequest]) -> dict[str, tuple[Head, ...]]:
        """The heads that a router publishes, by replica."""
        now = self.loop.now
        self._relegate_late(dispatcher)
        dispatcher.place_waiting(now)
        heads = dispatcher.heads(now)
        return {name: dispatcher.published(placed, now) for name, placed in heads.items()}

    def _relegate_late(self, dispatcher: Dispatcher[SimulatedRequest]) -> bool:
        """Relegate queued requests that are too late for their promise; False if none is."""
        late = dispatcher.relegate_late(self.loop.now)
        for item in late:
            item.request = msgspec.structs.replace(item.request, promised=False)
            if self.settings.queue_order.keeps_promises:
                self._late.add(item.request.id)
        return bool(late)

    def _pull(self, link: SimulatedLink, heads: dict[str, tuple[Head, ...]]) -> bool:
        """Submit the requests that a replica grants; False if it grants none."""
        now = self.loop.now
        for router, published in heads.items():
            link.grants.heads(router, published, now)
        grants = link.grants.grant(link.replica.scheduler.ahead(now), now)
        for router, grant in grants.items():
            for request_id in grant.ids:
                self._submit(link, self.dispatchers[router], request_id)
        if grants:
            self._report(link)
        return bool(grants)

    def _submit(
        self, link: SimulatedLink, dispatcher: Dispatcher[SimulatedRequest], id: str
    ) -> None:
        item = dispatcher.take(id, link.name, self.loop.now)
        if item is None:
            return
        link.replica.submit(item.request, item.page_names, item.arrival.output_tokens, item.lost)
        link.keep(item)
        link.grants.submitted(id, self.loop.now)
        link.published = [head for head in link.published if head[0] != id]
        dispatcher.accepted(id, link.name)
        self.hand_overs.append((self.loop.now, id, link.name))

    # --- results ----------------------------------------------------------------------------------

    def demand(self) -> ModelDemand:
        """Recent demand, as a router reports it."""
        now = self.loop.now
        for link in self.links.values():
            self._count_ended(link)
        waiting = [
            queued for dispatcher in self.dispatchers.values() for queued in dispatcher.waiting(now)
        ]
        demand = self._demand.of(
            MODEL,
            now,
            backlog_s=sum(queued.work_s for queued in waiting),
            waiting=len(waiting),
            running=sum(len(link.replica.live) for link in self.links.values()),
        )
        return msgspec.structs.replace(demand, held=len(self.held))

    def records(self) -> list[RequestRecord]:
        """A record of every request; queued and held requests are unfinished.

        A promise that was given stays one, even if the queue relegated the request later.
        """
        items = [dispatcher.items() for dispatcher in self.dispatchers.values()]
        unfinished = [*itertools.chain(*items), *self.held]
        replicas = [*self._left, *self.replicas.values()]
        served = [record for replica in replicas for record in replica.records()]
        left = [self._unserved(item, "", left_s) for item, left_s in self.left]
        queued = [self._unserved(item, "") for item in unfinished]
        records = [*served, *queued, *left, *self.refused]
        return [
            msgspec.structs.replace(record, promised=True) if record.id in self._late else record
            for record in records
        ]

    def _count_ended(self, link: SimulatedLink) -> None:
        """Count the requests that ended since the last call, by whether they met their SLO.

        Those whose client left are neither.
        """
        over = link.replica.over[link.counted :]
        link.counted += len(over)
        for live in over:
            least_tpot_s = self._least_tpot_s(live.request)
            record = live.record(link.name)
            if record.left_s is None:
                self._demand.over(MODEL, live.request, record.good, self.loop.now, least_tpot_s)

    def _unserved(
        self, item: SimulatedRequest, code: str, left_s: float | None = None
    ) -> RequestRecord:
        """The record of a request that no replica has.

        `code`: of its refusal; `left_s`: when its client left.
        """
        if item.lost is not None:
            return msgspec.structs.replace(item.lost.record(""), refused=code, left_s=left_s)
        request = item.request
        cached = item.dispatcher.cached_tokens(item.page_names, request.prompt_tokens)
        return RequestRecord(
            id=request.id,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            cached_tokens=max(cached.values(), default=0),
            ttft_deadline_s=request.ttft_deadline_s,
            tpot_s=request.tpot_s,
            work_s=request.work_s,
            promised=bool(request.promised),
            refused=code,
            left_s=left_s,
            slo_class=request.slo_class,
            tenant=request.tenant,
        )

    def _least_tpot_s(self, request: Request) -> float:
        """Smallest TPOT target that a replica can accept after that prompt."""
        return least_tpot_s(request.prompt_tokens, self.predictor, self.settings.min_batch_s)
