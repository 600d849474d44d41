"""Several replicas behind one door, in virtual time: the very placement and admission that serve.

Plays the router: admits, queues, places, and hands a request over when a replica has room, that is
when the work that would run before a most urgent newcomer is under `dispatch_budgets` batches.
Messages take no time, and a Load is read afresh at each decision; the live router knows it as of
the last LoadReport, so the fleet here is the best case of the same decisions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.config import Scheduling
from medha.errors import Refusal
from medha.messages import KvEvents
from medha.request import Request, SloClass
from medha.scheduling.admission import Usage, admit
from medha.scheduling.placement import Newcomer, Option, Standing
from medha.scheduling.prefix_index import PrefixIndex
from medha.scheduling.queue import Queue, Queued
from medha.sim.loop import ARRIVE, Loop
from medha.sim.replica import SimReplica
from medha.sim.report import Record
from medha.sim.workload import Arrival


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
        self.classes = {each.name: each for each in classes}
        self.deadlines_s = deadlines_s or {}
        self.replicas = {replica.name: replica for replica in replicas}
        self.usage = Usage(classes)
        self.index = PrefixIndex()
        self.queue = Queue(
            settings.policy, guard_s=settings.dispatch_budgets * settings.max_batch_s,
            short_s=8.0 * settings.max_batch_s, relegated_share=settings.relegated_share,
            work_floor_s=settings.work_floor_s, normaliser=settings.normaliser,
        )  # fmt: skip
        self.standings = {
            replica.name: Standing(
                replica.name, replica.clock.predictor, max_context_tokens, settings.min_batch_s,
                settings.max_batch_s,
            )
            for replica in replicas
        }  # fmt: skip
        self.refused: list[Record] = []
        self.offered_s = 0.0
        self._waiting: dict[str, Waiting] = {}
        self._events = dict.fromkeys(self.replicas, 0)
        for replica in replicas:
            replica.watch = self.dispatch

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """Let all of them arrive at their times."""
        for arrival in arrivals:
            self.loop.at(arrival.arrival_s, ARRIVE, functools.partial(self.arrive, arrival))

    def arrive(self, arrival: Arrival) -> None:
        """Admit one request, or refuse it."""
        now = self.loop.now
        for name, replica in self.replicas.items():
            self._tell(name, replica)
        slo_class = self.classes[arrival.slo_class]
        hashes = arrival.page_names(self.page_tokens)
        cached = {
            name: pages * self.page_tokens for name, pages in self.index.match(hashes).items()
        }
        first = next(iter(self.replicas.values())).clock.predictor
        most = min(max(cached.values(), default=0), arrival.prompt_tokens - 1)
        work_s = first.prefill_s(arrival.prompt_tokens, most)
        self.offered_s += work_s
        deadline_s = self.deadlines_s.get(arrival.id, slo_class.slo.ttft_deadline_s(work_s))
        newcomer = Newcomer(
            id=arrival.id, prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.output_tokens, due_s=now + deadline_s,
            tpot_s=slo_class.slo.tpot_s, slo_class=slo_class.name, tenant=arrival.tenant,
        )  # fmt: skip
        request = Request(
            id=arrival.id, arrival_s=now, prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.output_tokens, ttft_deadline_s=deadline_s,
            tpot_s=slo_class.slo.tpot_s, work_s=work_s, slo_class=slo_class.name,
            tenant=arrival.tenant, weight=slo_class.weight,
        )  # fmt: skip
        try:
            verdict = admit(
                newcomer, list(self.standings.values()), cached, slo_class, self.usage, now
            )
        except Refusal as refusal:
            self.refused.append(_refused(request, refusal.code))
            return
        self.usage.add(slo_class.name, arrival.tenant, work_s, now)
        request = msgspec.structs.replace(request, promised=verdict.promised)
        self._waiting[request.id] = Waiting(request, hashes)
        self._enqueue(request, newcomer, verdict.option, verdict.promised)

    def dispatch(self, replica: SimReplica) -> None:
        """Hand over what is most urgent while the replica has room; then what fits nowhere."""
        if not self._waiting:
            return
        self._tell(replica.name, replica)
        window_s = self.settings.dispatch_budgets * self.settings.max_batch_s
        now = self.loop.now
        mine = [
            item
            for item in map(self.queue.get, self.queue.order(now))
            if item is not None and item.replica in ("", replica.name)
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
        """What became of every request; those still queued are unfinished."""
        queued = [_refused(waiting.request, "") for waiting in self._waiting.values()]
        served = [record for replica in self.replicas.values() for record in replica.records()]
        return [*served, *queued, *self.refused]

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
            for replica in self.replicas.values():
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
