"""Several replicas behind one door, in virtual time: the very placement and admission that serve.

Plays the router: admits, queues, places, and hands a request over when a replica has room, that is
when the work that would run before a most urgent newcomer is under `dispatch_budgets` batches.
Replicas may join and leave; what comes while there is none is held for the next.
Messages take no time, and a Load is read afresh at each decision; the live router knows it as of
the last LoadReport, so the fleet here is the best case of the same decisions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.config import Scheduling
from medha.demand import Demand
from medha.errors import Refusal
from medha.messages import KvEvents, ModelDemand
from medha.request import Request, SloClass
from medha.scheduling.admission import Usage, admit
from medha.scheduling.placement import Newcomer, Option, Standing
from medha.scheduling.prefix_index import PrefixIndex
from medha.scheduling.queue import Queue, Queued
from medha.sim.loop import ARRIVE, Loop
from medha.sim.replica import SimReplica
from medha.sim.report import Record
from medha.sim.workload import Arrival

MODEL = "model"  # the only one


class Waiting(msgspec.Struct, frozen=True):
    """A request in the fleet's queue."""

    request: Request
    hashes: tuple[bytes, ...]


class Fleet:
    """Replicas, one queue for all of them, and the records of what became of each request.

    `classes` by name; `settings` as the replicas'; `deadlines_s` overrides the TTFT deadline of
    single requests (as the header does).
    """

    def __init__(
        self, replicas: Sequence[SimReplica], loop: Loop, classes: Sequence[SloClass],
        settings: Scheduling, page_tokens: int, max_context_tokens: int,
        deadlines_s: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        self.loop, self.settings, self.page_tokens = loop, settings, page_tokens
        self.max_context_tokens = max_context_tokens
        self.classes = {each.name: each for each in classes}
        self.deadlines_s = deadlines_s or {}
        self.predictor = replicas[0].clock.predictor  # all are alike
        self.replicas: dict[str, SimReplica] = {}
        self.standings: dict[str, Standing] = {}
        self.usage = Usage(classes)
        self.index = PrefixIndex()
        self.queue = Queue(
            settings.policy, guard_s=settings.dispatch_budgets * settings.max_batch_s,
            short_s=8.0 * settings.max_batch_s, relegated_share=settings.relegated_share,
            work_floor_s=settings.work_floor_s, normaliser=settings.normaliser,
        )  # fmt: skip
        self.refused: list[Record] = []
        self.held: list[Request] = []
        self.offered_s = 0.0
        self._demand = Demand()
        self._counted: dict[str, int] = {}
        self._left: list[SimReplica] = []
        self._arrivals: dict[str, Arrival] = {}
        self._waiting: dict[str, Waiting] = {}
        self._events: dict[str, int] = {}
        for replica in replicas:
            self.join(replica)

    # --- replicas come and go ---------------------------------------------------------------------

    def join(self, replica: SimReplica) -> None:
        """It serves from now on, first of all what was held."""
        self.replicas[replica.name] = replica
        self.standings[replica.name] = Standing(
            replica.name, replica.clock.predictor, self.max_context_tokens,
            self.settings.min_batch_s, self.settings.max_batch_s,
        )  # fmt: skip
        self._events[replica.name] = self._counted[replica.name] = 0
        replica.watch = self.dispatch
        held, self.held = self.held, []
        self._tell(replica.name, replica)
        for request in held:
            self._admit(self._arrivals.pop(request.id), request, held=True)
        self.dispatch(replica)

    def leave(self, name: str) -> None:
        """Nothing more is placed on it, and it goes when what it has is done."""
        self.standings[name].draining = True
        self._let_go(self.replicas[name])

    @property
    def serving(self) -> list[str]:
        """Replicas that take requests."""
        return [name for name, standing in self.standings.items() if not standing.draining]

    def demand(self) -> ModelDemand:
        """What clients wanted lately, as a router tells it."""
        now = self.loop.now
        for name, replica in [*self.replicas.items()]:
            self._count(name, replica)
        items = [item for item in map(self.queue.get, self._waiting) if item is not None]
        running = sum(len(replica.live) for replica in self.replicas.values())
        found = self._demand.of(
            MODEL, now, backlog_s=sum(item.work_s for item in items), waiting=len(items),
            running=running,
        )  # fmt: skip
        return msgspec.structs.replace(found, held=len(self.held))

    # --- requests ---------------------------------------------------------------------------------

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """Let all of them arrive at their times."""
        for arrival in arrivals:
            self.loop.at(arrival.arrival_s, ARRIVE, functools.partial(self.arrive, arrival))

    def arrive(self, arrival: Arrival) -> None:
        """Admit one request, refuse it, or hold it while no replica serves."""
        for name, replica in self.replicas.items():
            self._tell(name, replica)
        request = self._request(arrival)
        self.offered_s += request.work_s
        if self.serving:
            self._admit(arrival, request)
        else:
            self._arrivals[request.id] = arrival
            self.held.append(request)

    def _request(self, arrival: Arrival) -> Request:
        """With its work and its deadline, after what some cache has of it."""
        slo_class = self.classes[arrival.slo_class]
        cached = self._cached(arrival.page_names(self.page_tokens))
        most = min(max(cached.values(), default=0), arrival.prompt_tokens - 1)
        work_s = self.predictor.prefill_s(arrival.prompt_tokens, most)
        return Request(
            id=arrival.id, arrival_s=self.loop.now, prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.output_tokens, tpot_s=slo_class.slo.tpot_s, work_s=work_s,
            ttft_deadline_s=self.deadlines_s.get(
                arrival.id, slo_class.slo.ttft_deadline_s(work_s)
            ),
            slo_class=slo_class.name, tenant=arrival.tenant, weight=slo_class.weight,
        )  # fmt: skip

    def _cached(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Tokens of a prompt in each replica's cache."""
        found = self.index.match(hashes)
        return {name: pages * self.page_tokens for name, pages in found.items()}

    def _admit(self, arrival: Arrival, request: Request, held: bool = False) -> None:
        """What was held is taken, however late, without a promise if it must."""
        now, slo_class = self.loop.now, self.classes[request.slo_class]
        if held:
            slo_class = msgspec.structs.replace(slo_class, when_infeasible="relegate")
        hashes = arrival.page_names(self.page_tokens)
        newcomer = Newcomer(
            id=request.id, prompt_tokens=request.prompt_tokens,
            max_output_tokens=request.max_output_tokens, due_s=request.due_s,
            tpot_s=request.tpot_s, slo_class=request.slo_class, tenant=request.tenant,
        )  # fmt: skip
        try:
            verdict = admit(
                newcomer, list(self.standings.values()), self._cached(hashes), slo_class,
                self.usage, now, now - request.arrival_s,
            )  # fmt: skip
        except Refusal as refusal:
            self._demand.refused(MODEL, request, refusal, now, self._idle_tpot_s(request))
            self.refused.append(_refused(request, refusal.code))
            return
        option = verdict.option
        request = msgspec.structs.replace(request, promised=verdict.promised)
        if held:
            self._demand.arrived(MODEL, request, now)
        else:
            first_s = now - request.arrival_s + option.first_s(verdict.promised)
            self._demand.taken(MODEL, request, first_s, option.work_s, now)
        self.usage.add(request.slo_class, request.tenant, request.work_s, now)
        self._waiting[request.id] = Waiting(request, hashes)
        self._enqueue(request, newcomer, option, verdict.promised)

    def dispatch(self, replica: SimReplica) -> None:
        """Hand over what is most urgent while the replica has room; then what fits nowhere."""
        leaving = self.standings[replica.name].draining
        if leaving:
            self._let_go(replica)
        if not self._waiting or replica.name not in self.replicas:
            return
        self._tell(replica.name, replica)
        window_s = self.settings.dispatch_budgets * self.settings.max_batch_s
        now = self.loop.now
        mine = [
            item
            for item in map(self.queue.get, self.queue.order(now))
            if item is not None
            and item.replica in ((replica.name,) if leaving else ("", replica.name))
        ]
        for item in mine:
            if self.standings[replica.name].load.ahead_s >= window_s:
                return
            self.queue.take(item.id)
            waiting = self._waiting.pop(item.id)
            replica.submit(waiting.request, waiting.hashes)
            self.standings[replica.name].accepted(item.id)
            self._tell(replica.name, replica)

    def records(self) -> list[Record]:
        """What became of every request; those still queued or held are unfinished."""
        waiting = [*(waiting.request for waiting in self._waiting.values()), *self.held]
        replicas = [*self._left, *self.replicas.values()]
        served = [record for replica in replicas for record in replica.records()]
        return [*served, *(_refused(request, "") for request in waiting), *self.refused]

    def _count(self, name: str, replica: SimReplica) -> None:
        """Whether those that have ended since the last time met their SLO."""
        over = replica.over[self._counted[name] :]
        self._counted[name] += len(over)
        for live in over:
            idle_tpot_s = self._idle_tpot_s(live.request)
            good = replica.record(live).good
            self._demand.over(MODEL, live.request, good, self.loop.now, idle_tpot_s)

    def _idle_tpot_s(self, request: Request) -> float:
        """The best that any replica there is could do for it alone."""
        return min(
            (each.idle_tpot_s(request.prompt_tokens) for each in self.standings.values()),
            default=0.0,
        )

    def _let_go(self, replica: SimReplica) -> None:
        """One that leaves is gone once nothing runs there and nothing is promised to it."""
        name = replica.name
        if name not in self.replicas or replica.live or self.queue.placed_on(name):
            return
        self._count(name, replica)
        self._left.append(self.replicas.pop(name))
        self.index.forget(name)
        for of in (self.standings, self._events, self._counted):
            of.pop(name, None)

    def _enqueue(
        self, request: Request, newcomer: Newcomer, option: Option, promised: bool
    ) -> None:
        place = option.replica if promised else ""
        self.queue.add(
            Queued(
                id=request.id, arrival_s=request.arrival_s, due_s=request.due_s,
                work_s=option.work_s, promised=promised, replica=place, weight=request.weight,
            )
        )  # fmt: skip
        if promised:
            self.standings[place].hold(newcomer, option, self.loop.now, True)
            self.dispatch(self.replicas[place])
        else:
            for replica in [*self.replicas.values()]:
                self.dispatch(replica)

    def _tell(self, name: str, replica: SimReplica) -> None:
        """What the replica would report now: its Load and its cache's changes."""
        stored, removed = replica.scheduler.take_kv_events()
        if stored or removed:
            self._events[name] += 1
            self.index.apply(
                name,
                KvEvents(
                    self._events[name],
                    b"".join(block for _, block in stored),
                    b"".join(block for _, block in removed),
                    snapshot=self._events[name] == 1,
                ),
            )
        self.standings[name].told(replica.scheduler.load(self.loop.now), self.loop.now)


def _refused(request: Request, code: str) -> Record:
    return Record(
        id=request.id, arrival_s=request.arrival_s, prompt_tokens=request.prompt_tokens,
        ttft_deadline_s=request.ttft_deadline_s, tpot_s=request.tpot_s, work_s=request.work_s,
        promised=bool(request.promised), refused=code, slo_class=request.slo_class,
        tenant=request.tenant,
    )  # fmt: skip
