"""A Controller in virtual time: fake ranks below it, fake routers above, a Loop in between.

The real Controller, driven event by event: all messages of an instant are delivered, then it ticks
once. A PipelineClock times the ranks, and streams are checked token by token. Tests lose a group,
disconnect a router or drop a step; `Client` holds the outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.support.virtual_ranks import (
    Client,
    FakeGroup,
    RunningBatch,
    hellos,
    places,
    read,
    ready,
    sample,
)

from medha import messages as m
from medha.batch import Batch
from medha.config import WorkerConfig
from medha.metrics import MetricsSink
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile
from medha.scheduling.interface import SchedulerInterface
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, DECIDE, DONE, WATCH, Loop
from medha.sim.pipeline_clock import PipelineClock, Slowness
from medha.topology import Coordinate
from medha_worker.controller.controller import Controller
from medha_worker.controller.outbox import Redial, ToRanks, ToRouter
from medha_worker.controller.startup import Identity

BEAT_S = 0.5
RETRY_S = 0.01
BREAK_S = 0.02  # from a peer's death, or a Dissolve, until a blocked exchange fails


class NoMetrics:
    """Metrics sink that keeps nothing."""

    def add(self, name: str, amount: float, *labels: str) -> None: ...

    def set(self, name: str, value: float, *labels: str) -> None: ...

    def observe(self, name: str, value: float, *labels: str) -> None: ...


class VirtualReplica:
    """Groups 0..kvp_min-1 stand ready at time 0; `routers` are the names in the config.

    `wrap` may put something around the scheduler (a recorder). With `beats` the ranks and routers
    beat in virtual time, and silence counts; without, time passes only where something happens.
    `measure`: the controller lacks `profile`, by which the fake ranks are timed; it warms up.
    """

    def __init__(
        self,
        config: WorkerConfig,
        shape: ModelShape,
        profile: Profile,
        *,
        pages: int,
        beats: bool = True,
        wrap: Callable[[Scheduler], SchedulerInterface] = lambda scheduler: scheduler,
        loop: Loop | None = None,
        slowness: Slowness | None = None,
        files: dict[str, bytes] | None = None,
        hashes: dict[str, str] | None = None,
        measure: bool = False,
        metrics: MetricsSink | None = None,
    ) -> None:
        self.config, self.shape, self.pages, self.beats = config, shape, pages, beats
        self.window = shape.sliding_tokens
        self.loop = loop or Loop()
        self.topology = config.topology
        self.clients: dict[str, Client] = {}
        self.log: list[tuple[float, Batch]] = []
        self.silent_routers: set[str] = set()
        self.hellos: list[tuple[float, str]] = []
        self.hello: m.Hello | None = None
        self.grants: list[tuple[float, str, m.Grant]] = []
        self.news: list[tuple[str, m.KvEvents]] = []
        self.reports: list[tuple[float, m.LoadReport]] = []
        self.parts: list[m.FilePart] = []
        self.counts: list[tuple[str, m.TenantCounts]] = []
        self.redials: list[str] = []
        self.drop_step: tuple[int, int] | None = None  # (group, step) to lose on the way
        self.dropped = False
        self.refuse_forming: set[int] = set()  # groups whose ranks cannot join a generation
        self.move_fault = ""  # fault of every move: offer, fetch, changed, dumb
        self.move_faults = 0
        self.rejected: dict[str, str] = {}
        self.groups: dict[int, FakeGroup] = {}
        self._incarnations = 0
        self._starts: dict[int, dict[int, tuple[tuple[int, int], ...]]] = {}
        self._running: dict[int, RunningBatch] = {}
        self._reported_broken: set[tuple[int, int]] = set()
        self._tick_due = self._retry_due = False
        self._wrap = wrap
        self.after_tick: Callable[[], None] = lambda: None
        self.scheduler: Scheduler | None = None
        of = Predictor(profile, shape, config.topology, config.scheduling.max_batch_s)
        self.clock = PipelineClock(of, config.page_tokens, self._layout, slowness)
        self.controller = Controller(
            config,
            Identity(
                incarnation="c1",
                shape=shape,
                files=files or {},
                hashes=hashes or {},
                profile=None if measure else profile,
            ),
            make_scheduler=self._make_scheduler,
            metrics=metrics or NoMetrics(),
            clock=lambda: 0.0,
        )
        for group in range(config.topology.kvp_min):
            self.start_group(group)
        self.kick()
        if beats:
            self._beat()

    def _make_scheduler(self, profile: Profile, pages: int) -> tuple[SchedulerInterface, Predictor]:
        config = self.config
        predictor = Predictor(profile, self.shape, self.topology, config.scheduling.max_batch_s)
        self.scheduler = Scheduler(
            self.topology,
            self.shape,
            predictor,
            config.scheduling,
            pages,
            config.page_tokens,
            config.max_context_tokens,
            config.classes,
        )
        return self._wrap(self.scheduler), predictor

    def _layout(self, seq: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        return tuple(sorted(self._starts.get(seq, {}).items()))

    # --- what a test does ---------------------------------------------------------------------

    def submit_at(self, time_s: float, submit: m.Submit, router: str = "a") -> None:
        """Send a request from a router at that time."""

        def arrive() -> None:
            self.clients.setdefault(submit.id, Client())
            self.controller.on_router(router, submit, self.loop.now)
            self.kick()

        self.loop.at(time_s, ARRIVE, arrive)

    def send_at(self, time_s: float, message: m.RouterMessage, router: str = "a") -> None:
        """Send a message from a router at that time."""

        def send() -> None:
            self.controller.on_router(router, message, self.loop.now)
            self.kick()

        self.loop.at(time_s, ARRIVE, send)

    def client(self, id: str, emitted: Sequence[int] = ()) -> Client:
        """Add the client of a coming request, which has already read `emitted`."""
        client = self.clients[id] = Client()
        client.tokens += emitted
        return client

    def start_group(self, group: int) -> None:
        """Start the group's processes, which load and are ready at once."""
        self._incarnations += 1
        self.groups[group] = FakeGroup(group, self.pages, self.config.page_tokens)
        self.clock.join(group, self.loop.now)
        now = self.loop.now
        for at, hello in hellos(self.topology, group, f"i{self._incarnations}"):
            self.controller.on_rank(at, hello, now)
        for at in self.topology.group_ranks(group):
            self.controller.on_rank(at, ready(self.pages), now)
        self._deliver()
        self.kick()

    def kill_group(self, group: int) -> None:
        """Kill the group's processes; peers that are blocked on it notice soon."""
        del self.groups[group]
        self.clock.leave(group)
        for running in self._running.values():
            if group in running.batch.groups:
                running.broken = True
                self.loop.at(self.loop.now + BREAK_S, DONE, self._escape(running))

    def run(self, until_s: float = float("inf"), most_events: int = 2_000_000) -> None:
        self.loop.run(until_s, most_events)

    def kick(self) -> None:
        """Tick once all messages of this instant are delivered."""
        if not self._tick_due:
            self._tick_due = True
            self.loop.at(self.loop.now, DECIDE, self._tick)

    # --- time ---------------------------------------------------------------------------------

    def _beat(self) -> None:
        now = self.loop.now
        for group in self.groups:
            for at in self.topology.group_ranks(group):
                self.controller.on_rank(at, m.RankBeat(), now)
        for router in self.config.routers:
            if router not in self.silent_routers:
                self.controller.on_router(router, m.RouterBeat(), now)
        self.kick()
        self.loop.at(now + BEAT_S, WATCH, self._beat)

    def _tick(self) -> None:
        self._tick_due = False
        now = self.loop.now
        if not self.beats:
            for router in self.config.routers:
                self.controller.on_router(router, m.RouterBeat(), now)
        self._deliver(self.controller.on_tick(now))
        self.after_tick()
        if self.controller.running_requests and not self._running and not self._retry_due:
            self._retry_due = True
            self.loop.at(now + RETRY_S, WATCH, self._retry)

    def _retry(self) -> None:
        self._retry_due = False
        self.kick()

    # --- what the controller sends ------------------------------------------------------------

    def _deliver(self, items: Sequence[object] | None = None) -> None:
        for item in self.controller.take() if items is None else items:
            match item:
                case ToRanks(ranks, message):
                    here = tuple(at for at in ranks if at.group in self.groups)
                    if here:
                        self._command(here, message)
                case ToRouter(router, message):
                    self._receive(router, message)
                case Redial(router):
                    self.redials.append(router)

    def _receive(self, router: str, message: m.ReplicaMessage) -> None:
        now = self.loop.now
        match message:
            case m.Hello():
                self.hellos.append((now, router))
                self.hello = message
                if router in self.rejected:
                    answer: m.RouterMessage = m.Rejected(self.rejected[router])
                    self.controller.on_router(router, answer, now)
                elif router not in self.silent_routers:
                    self.controller.on_router(router, m.Welcome(f"{router}-1"), now)
            case m.Tokens():
                client = self.clients[message.id]
                assert not client.over and message.first == len(client.tokens)
                client.tokens += message.tokens
                if client.first_s is None:
                    client.first_s = now
            case m.Finished():
                assert not self.clients[message.id].over
                self.clients[message.id].finished = message
            case m.Failed():
                assert not self.clients[message.id].over
                self.clients[message.id].failed = message
            case m.KvEvents():
                self.news.append((router, message))
            case m.LoadReport():
                self.reports.append((now, message))
            case m.FilePart():
                self.parts.append(message)
            case m.Grant():
                self.grants.append((now, router, message))
            case m.TenantCounts():
                self.counts.append((router, message))

    def _command(self, ranks: tuple[Coordinate, ...], message: m.RankCommand) -> None:
        now, group = self.loop.now, ranks[0].group
        match message:
            case m.Step():
                if self.drop_step == (group, message.step):
                    self.drop_step, self.dropped = None, True
                    return
                if message.step > self.groups[group].last_step + 1:
                    gap = m.Gap(self.groups[group].last_step + 1)
                    self.loop.at(now, DONE, lambda: self._report(ranks[0], gap))
                    return
                if message.step == self.groups[group].last_step + 1:
                    self._step(group, message)
            case m.Form(generation=generation) if generation:
                self.loop.at(now, DONE, lambda: self._formed(ranks, generation))
            case m.Leave():
                for left in {at.group for at in ranks} & set(self.groups):
                    del self.groups[left]
                    self.clock.leave(left)
            case m.OfferPages():
                tokens = len(message.move.logical) * self.config.page_tokens
                later_s = now + self.clock.predictor.move_s(tokens)
                self.loop.at(later_s, DONE, lambda: self._offered(message, ranks))
            case m.FetchPages():
                self._fetched(message, ranks)
            case m.Withdraw():
                for at in ranks:
                    withdrawn = m.Withdrawn(message.move, self.move_fault != "changed")
                    self.controller.on_rank(at, withdrawn, now)
            case m.Dissolve():
                for running in self._running.values():
                    if running.broken:
                        self.loop.at(now + BREAK_S, DONE, self._escape(running))

    def _report(self, at: Coordinate, report: m.RankReport) -> None:
        self.controller.on_rank(at, report, self.loop.now)
        self._deliver()
        self.kick()

    def _formed(self, ranks: tuple[Coordinate, ...], generation: int) -> None:
        for at in ranks:
            if at.group in self.groups:
                error = "cannot reach a peer" if at.group in self.refuse_forming else ""
                self.controller.on_rank(at, m.Formed(generation, error), self.loop.now)
        self._deliver()
        self.kick()

    # --- steps --------------------------------------------------------------------------------

    def _step(self, group: int, step: m.Step) -> None:
        number = step.batch.number
        running = self._running.setdefault(number, RunningBatch(step.batch))
        for seq, cached in self.groups[group].apply(step).items():
            if not running.steps & self._starts.get(seq, {}).keys():
                self._starts[seq] = {}
            self._starts[seq][group] = cached
        running.steps.add(group)
        if not set(step.batch.groups) <= set(self.groups) and not running.broken:
            running.broken = True
            self.loop.at(self.loop.now + BREAK_S, DONE, self._escape(running))
        if running.broken or not running.steps >= set(step.batch.groups):
            return
        now, batch = self.loop.now, step.batch
        self.log.append((now, batch))
        for chunk in batch.chunks:
            groups = [self.groups[at] for at in chunk.groups]
            running.places.append((chunk, places(groups, chunk, self.window)))
        tokens = sample(self.groups, running.places, self.shape.vocab, self.window)
        self._check_rows(running)
        run = self.clock.run(batch, now)
        for stage, end_s in enumerate(run.ends_s):
            self.loop.at(end_s, DONE, self._stage_done(running, stage, run.slowest_s, tokens))
        lead_s = self.config.scheduling.lead_s(self.topology.spp)
        if lead_s:  # some time after which the next batch may be decided
            self.loop.at(max(now, run.ends_s[0] - 0.5 * lead_s), WATCH, self.kick)

    def _stage_done(
        self,
        running: RunningBatch,
        stage: int,
        elapsed_s: float,
        tokens: dict[int, list[m.TokenOut]],
    ) -> Callable[[], None]:
        number = running.batch.number

        def done() -> None:
            if running.broken:
                return
            last, now = stage == self.topology.spp - 1, self.loop.now
            self._check_rows(running)
            if last:
                del self._running[number]
                for group, out in tokens.items():
                    at = Coordinate(group, stage, 0)
                    self.controller.on_rank(at, m.BatchTokens(number, tuple(out)), now)
            for group in running.batch.groups:
                at = Coordinate(group, stage, 0)
                self.controller.on_rank(at, m.StageDone(number, elapsed_s), now)
            self.kick()

        return done

    def _check_rows(self, running: RunningBatch) -> None:
        """Check that the pages in sight hold the request's own tokens, for as long as a batch runs.

        A token that is being sampled is not known yet, nor are those of a request that ended.
        """
        engine = self.controller.engine
        if engine is None:
            return
        for chunk, held in running.places:
            state = engine.requests.by_seq(chunk.seq)
            if state is None or not all(
                self.groups.get(group.group) is group and chunk.seq in group.tables
                for group, _ in held
            ):
                continue
            seen = read(held, chunk, self.window)
            text = m.from_bytes(bytes(state.tokens)).tolist()[chunk.end - len(seen) : chunk.end]
            assert seen[: len(text)] == text, f"sequence {chunk.seq} sees other tokens"

    def _escape(self, running: RunningBatch) -> Callable[[], None]:
        """Survivors leave a broken batch: one RankFailed per generation, then StageDone."""
        batch = running.batch

        def escape() -> None:
            if self._running.pop(batch.number, None) is None:
                return
            for group in set(batch.groups) & set(self.groups):
                for stage in range(self.topology.spp):
                    at = Coordinate(group, stage, 0)
                    if (group, batch.generation) not in self._reported_broken:
                        failed = m.RankFailed("column", "peer lost", batch.generation, batch.number)
                        self.controller.on_rank(at, failed, self.loop.now)
                    self.controller.on_rank(at, m.StageDone(batch.number, 0.0), self.loop.now)
                self._reported_broken.add((group, batch.generation))
            self.kick()

        return escape

    # --- moves --------------------------------------------------------------------------------

    def _offered(self, order: m.OfferPages, ranks: tuple[Coordinate, ...]) -> None:
        move = order.move
        if move.source in self.groups and move.target in self.groups:
            self.clock.copied(move)
        self.move_faults += bool(self.move_fault)
        error = "the pages are not here" if self.move_fault == "offer" else ""
        for at in ranks:
            if at.group in self.groups:
                offered = m.Offered(move.id, (0,) * len(move.logical), error=error)
                self.controller.on_rank(at, offered, self.loop.now)
        self._deliver()
        self._deliver()
        self.kick()

    def _fetched(self, order: m.FetchPages, ranks: tuple[Coordinate, ...]) -> None:
        move = order.move
        if self.move_fault == "dumb":
            return
        source, target = self.groups.get(move.source), self.groups[move.target]
        if source is not None:
            for old, new in zip(move.from_pages, move.to_pages, strict=True):
                target.content[new] = list(source.content[old])
        for at in ranks:
            fetched = m.Fetched(move.id, source is not None and self.move_fault != "fetch")
            self.controller.on_rank(at, fetched, self.loop.now)
        self._deliver()
