"""Builders for every test suite: a model, a predictor, requests, a scheduler, a replica to drive.

Small and exact: by default a prompt token costs a tenth of a millisecond, whatever its context, and
nothing else costs anything, so that expected times can be worked out by hand. `Driven` plays the
router and the ranks of one replica in virtual time, stage by stage, each batch taking exactly as
long as it is predicted to (or as `seconds` says).
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import abc

from msgspec import structs

from medha.batch import Batch, BatchResult, Sampled
from medha.config import Scheduling
from medha.fleet.offers import PendingRequest
from medha.fleet.placement import place
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.messages import Load
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile
from medha.request import Request, SloClass
from medha.scheduling.decision_log import RecordingScheduler
from medha.scheduling.interface import Admitted, Completed
from medha.scheduling.scheduler import Scheduler
from medha.topology import Topology

TOKEN_S = 1e-4


def shape(layers: int = 4, max_context_tokens: int = 1 << 20, window_tokens: int = 0) -> ModelShape:
    """Return a model whose head costs nothing compared to its layers; all may have a window."""
    return ModelShape(
        layers=layers,
        hidden=1024,
        heads=8,
        kv_heads=8,
        head_dim=128,
        intermediate=4096,
        vocab=8,
        max_context_tokens=max_context_tokens,
        window_tokens=window_tokens,
        window_layers=layers if window_tokens else 0,
    )


def profile(
    token_s: float = TOKEN_S,
    key_s: float = 0.0,
    batch_s: float = 0.0,
    layers: int = 4,
    read_s: float = 0.0,
) -> Profile:
    """A machine on which a row costs `token_s` in all layers together, a (row, key) pair `key_s`,
    and a batch `batch_s` per stage; each chunk of a batch reads each of its keys in `read_s`."""
    model = shape(layers)
    weights = (model.attention_params + model.mlp_params) * layers
    pair = 4.0 * model.head_dim * model.heads * layers
    return Profile(
        name="exact",
        linear_flops_per_s=2.0 * weights / token_s,
        linear_bytes_per_s=1e30,
        elementwise_bytes_per_s=1e30,
        attention_flops_per_s=pair / key_s if key_s else 1e30,
        attention_bytes_per_s=model.kv_bytes_per_token / read_s if read_s else 1e30,
        batch_s=batch_s,
        transfer_bytes_per_s=1e30,
        kvp_bytes_per_s=1e30,
        p2p_bytes_per_s=1e30,
    )


def topology(
    spp: int = 1, kvp: int = 1, kvp_max: int | None = None, tokens_per_group: int | None = None
) -> Topology:
    return Topology(spp=spp, kvp_min=kvp, kvp_max=kvp_max or kvp, tokens_per_group=tokens_per_group)


def request(
    id: str,
    prompt_tokens: int = 100,
    arrival_s: float = 0.0,
    *,
    within_s: float = 0.5,
    output_tokens: int = 1,
    tpot_s: float = 0.03,
    promised: bool | None = None,
    work_s: float = 0.0,
) -> Request:
    """A request whose first token is due `within_s` after its arrival."""
    return Request(
        id=id,
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        max_output_tokens=output_tokens,
        ttft_deadline_s=within_s,
        tpot_s=tpot_s,
        promised=promised,
        work_s=work_s,
    )


def predictor(
    layout: Topology | None = None,
    *,
    token_s: float = TOKEN_S,
    key_s: float = 0.0,
    batch_s: float = 0.0,
    budget_s: float = 0.1,
    window_tokens: int = 0,
    read_s: float = 0.0,
) -> Predictor:
    """An exact predictor for the machine of `profile`."""
    machine = profile(token_s, key_s, batch_s, read_s=read_s)
    model = shape(window_tokens=window_tokens)
    return Predictor(machine, model, layout or topology(), budget_s=budget_s)


def scheduler(
    layout: Topology | None = None,
    settings: Scheduling | None = None,
    *,
    pages: int = 10_000,
    page_tokens: int = 64,
    max_context_tokens: int = 1 << 20,
    token_s: float = TOKEN_S,
    key_s: float = 0.0,
    batch_s: float = 0.0,
    window_tokens: int = 0,
    read_s: float = 0.0,
    join: bool = True,
    classes: tuple[SloClass, ...] = (),
) -> Scheduler:
    """A scheduler whose groups 0 .. kvp_min-1 have joined at time 0 with generation 1."""
    layout, settings = layout or topology(), settings or Scheduling()
    budget_s = settings.fixed_s if settings.budget == "fixed" else settings.max_batch_s
    times = predictor(
        layout,
        token_s=token_s,
        key_s=key_s,
        batch_s=batch_s,
        budget_s=budget_s,
        window_tokens=window_tokens,
        read_s=read_s,
    )
    built = Scheduler(
        layout, times.shape, times, settings, pages, page_tokens, max_context_tokens, classes
    )
    for group in range(layout.kvp_min if join else 0):
        built.group_joined(group, 1, 0.0)
    return built


class SingleReplicaRouter:
    """Promises what fits a replica by its last Load, as a fleet's router does."""

    def __init__(self, scheduler: Scheduler) -> None:
        settings, self._scheduler = scheduler.settings, scheduler
        self._class_tpot_s = min((of.slo.tpot_s for of in scheduler.classes), default=math.inf)
        self._estimate = ReplicaEstimate(
            "replica",
            scheduler.predictor,
            scheduler.max_context_tokens,
            settings.min_batch_s,
            settings.max_batch_s,
            settings.max_running,
        )

    def decide(self, arriving: Request, now: float) -> Request:
        """Return a request that arrives, promised or not, by the replica's present Load."""
        self.update(self._scheduler.load(now), now)
        return self.decide_by_last(arriving, now)

    def update(self, load: Load, now: float) -> None:
        """Take a Load over, which counts all requests before it."""
        self._estimate.update(load, now)

    def decide_by_last(self, arriving: Request, now: float) -> Request:
        """Return a request that arrives, promised or not, by the last Load; the next counts it."""
        pending = PendingRequest(
            id=arriving.id,
            prompt_tokens=arriving.prompt_tokens,
            max_output_tokens=arriving.max_output_tokens,
            due_s=arriving.due_s,
            tpot_s=arriving.tpot_s,
            class_tpot_s=self._class_tpot_s,
            slo_class=arriving.slo_class,
            tenant=arriving.tenant,
            beyond_share=arriving.beyond_share,
        )
        offer = place(pending, [self._estimate], {}, now)
        promised = offer is not None and offer.fits and offer.firm
        if offer is not None:
            self._estimate.hold(pending, offer, now, promised)
            self._estimate.accepted(arriving.id)
        return structs.replace(arriving, promised=promised)


class Driven:
    """A replica in virtual time around a scheduler, and its router.

    The router decides on each arrival whose `promised` is None.
    Every (group, stage) runs its batches in number order; a shared batch starts on a stage when all
    its groups are there. `first_s` and `finished` are by request id, `batches` (time, batch).
    """

    def __init__(
        self,
        plan: Scheduler | RecordingScheduler,
        *,
        seconds: abc.Callable[[Batch, int], float] | None = None,
        stops: abc.Callable[[str, int], bool] = lambda name, count: False,
    ) -> None:
        self.plan, self.now = plan, 0.0
        scheduler = plan.scheduler if isinstance(plan, RecordingScheduler) else plan
        self.router = SingleReplicaRouter(scheduler)
        self._lead_s = plan.settings.lead_s(plan.topology.spp)
        self.seconds = seconds or (lambda batch, stage: batch.predicted_s)
        self.stops = stops
        self.batches: list[tuple[float, Batch]] = []
        self.first_s: dict[str, float] = {}
        self.admitted: dict[str, Admitted] = {}
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, Completed] = {}
        self.emitted: dict[int, int] = {}
        self._busy_until: dict[tuple[int, int], float] = {}
        self._events: list[tuple[float, int, abc.Callable[[], object]]] = []
        self._order = 0
        self._id_of: dict[int, str] = {}

    def at(self, when_s: float, act: abc.Callable[[], object]) -> None:
        """Do something at that moment, before the next decision."""
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, act))

    def submit(self, requests: abc.Iterable[Request], hashes: abc.Sequence[bytes] = ()) -> None:
        """Let requests arrive, each at its own arrival time."""
        for arriving in requests:
            self.at(arriving.arrival_s, functools.partial(self._arrive, arriving, hashes))

    def run(self, until_s: float = float("inf")) -> None:
        """Go on until nothing happens any more, or until that moment."""
        while self._events and self._events[0][0] <= until_s:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                heapq.heappop(self._events)[2]()
            self._decide()

    def in_time(self, id: str) -> bool:
        """Return whether the first token met its deadline (a nanosecond of rounding allowed)."""
        return self.first_s.get(id, float("inf")) <= self.requests[id].due_s + 1e-9

    def _arrive(self, arriving: Request, hashes: abc.Sequence[bytes]) -> None:
        if arriving.promised is None:
            arriving = self.router.decide(arriving, self.now)
        admitted = self.plan.submit(arriving, self.now, hashes)
        self.admitted[arriving.id], self.requests[arriving.id] = admitted, arriving
        self._id_of[admitted.seq] = arriving.id

    def _decide(self) -> None:
        groups = range(self.plan.topology.kvp_max)
        while True:
            free = {
                group
                for group in groups
                if self._lead_s or self._busy_until.get((group, 0), 0.0) <= self.now
            }
            batch = self.plan.next_batch(self.now, frozenset(free))
            if batch is None:
                return
            self.batches.append((self.now, batch))
            ready = self.now
            for stage in range(self.plan.topology.spp):
                places = [(group, stage) for group in batch.groups]
                start = max(ready, *(self._busy_until.get(place, 0.0) for place in places))
                ready = start + self.seconds(batch, stage)
                self._busy_until.update(dict.fromkeys(places, ready))
                self.at(ready, functools.partial(self._done, batch, stage))
            if self._lead_s:
                self.at(max(self.now, ready - 0.5 * self._lead_s), lambda: None)

    def _done(self, batch: Batch, stage: int) -> None:
        self.plan.stage_done(batch.number, stage, self.now)
        if stage < self.plan.topology.spp - 1:
            return
        sampled = []
        for chunk in batch.chunks:
            if chunk.yields:
                name = self._id_of[chunk.seq]
                count = self.emitted[chunk.seq] = self.emitted.get(chunk.seq, 0) + 1
                sampled.append(Sampled(chunk.seq, self.stops(name, count)))
                self.first_s.setdefault(name, self.now)
        for completed in self.plan.complete(batch.number, BatchResult(tuple(sampled)), self.now):
            self.finished[completed.request_id] = completed


def leftovers(plan: Scheduler) -> dict[str, object]:
    """Return what an idle scheduler should no longer hold; empty if everything was freed.

    Raises AssertionError if its page accounting is inconsistent.
    """
    pool, groups = plan._state.pool, plan._state.groups
    for pages in pool.groups.values():
        pages.check()
    remains: dict[str, object] = {
        "held pages": {g: p.total - p.unused for g, p in pool.groups.items() if p.unused < p.total},
        "reserved pages": {g: p.reserved for g, p in pool.groups.items() if p.reserved},
        "claimed pages": pool.claimed,
        "waiting": [sequence.id for rows in groups.running.values() for sequence in rows.sequences],
        "pending seconds": sum(groups.queues.pending_s(group) for group in groups.running),
        "sequences": sorted(plan._state.sequences),
        "sequences with pages": sorted(groups.holders),
        "sequences of several groups": sorted(groups.large),
        "batches in flight": sorted(plan._state.in_flight.by_number),
        "running": plan._admission.started_count,
        "decodes": len(plan._state.running),
        "decodes counted": plan._account.counted_count(),
        "decodes ready or away": sum(
            len(decodes) + decodes.in_flight + sum(decodes.keys.values())
            for decodes in plan._state.running.by_groups.values()
        ),
    }
    return {name: value for name, value in remains.items() if value}
