"""The replica controller without I/O: messages and time in, messages out.

Owns the scheduler and all state that must agree with it: running groups, the generation of their
columns, steps sent to ranks, requests of routers. Its life:

    ranks of groups 0..kvp_min-1 ready ──> generation 1 formed ──> warm-up (unless a profile is
    given) ──> scheduler created, Hello to routers ──> serving, growing, shrinking, losing groups

`on_rank` and `on_router` take each message; `on_tick` does what is due and returns all messages to
send. The controller opens no socket, reads no clock (`clock` only times the scheduler for a
metric), imports no torch, and decides nothing that the scheduler decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from medha import PROTOCOL
from medha import messages as m
from medha.config import WorkerConfig
from medha.fleet.grants import GrantQueue
from medha.metrics import MetricsSink
from medha.profile import Profile
from medha.scheduling.load_report import BANDS
from medha.topology import Coordinate
from medha_worker.controller.batches import BatchTracker
from medha_worker.controller.engine_core import EngineCore
from medha_worker.controller.groups import (
    ABSENT,
    JOINING,
    LOST,
    RUNNING,
    STARTING,
    FormationResult,
    Generations,
    LostGroup,
    RankGroups,
)
from medha_worker.controller.outbox import Outbox, Outgoing
from medha_worker.controller.routers import RouterLinks
from medha_worker.controller.startup import Identity, MakeScheduler, Startup

BEAT_S = 0.5
CHECK_S = 0.05
LOST_GRACE_S = 1.0

log = logging.getLogger("medha.controller")


class Controller:
    """Controller of a replica."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        *,
        make_scheduler: MakeScheduler,
        metrics: MetricsSink,
        clock: Callable[[], float],
    ) -> None:
        self.config, self.identity = config, identity
        self._make_scheduler, self._metrics, self._clock = make_scheduler, metrics, clock
        topology, settings = config.topology, config.scheduling
        self._outbox = outbox = Outbox()
        self.batches = BatchTracker(topology, outbox)
        form_timeout_s, incarnation = config.collective_timeout_s, identity.incarnation
        self.groups = RankGroups(
            topology, outbox, config.rank_timeout_s, form_timeout_s, incarnation
        )
        self.generations = Generations(outbox, form_timeout_s, incarnation)
        self.routers = RouterLinks(config.routers, outbox, config.router_timeout_s)
        self.grants = GrantQueue(
            settings.dispatch_budgets * settings.max_batch_s, settings.queue_order
        )
        self.engine: EngineCore | None = None
        self.draining = False
        self._startup = Startup(config, identity, self.batches, self.groups)
        self._releasing: int | None = None
        self._checked_s = self._beat_s = float("-inf")

    # --- messages in --------------------------------------------------------------------------

    def on_rank(self, at: Coordinate, message: m.RankReport, now: float) -> None:
        """Process a rank's report; those of unknown ranks and of lost groups are ignored."""
        if not self.groups.contains(at):
            log.warning("rank %s is outside the topology %s", at, self.config.topology)
            return
        if isinstance(message, m.RankHello):
            self._lost(self.groups.hello(at, message, now), now)
            return
        if not self.groups.accept(at, now):
            return
        match message:
            case m.StageDone():
                self._stage_done(at, message, now)
            case m.ScoredPrompt():
                if self.engine is not None:
                    self.engine.prompt_scored(message)
            case m.BatchTokens():
                self.batches.tokens(at, message.number, message.tokens)
                if self.engine is not None:
                    self.engine.complete_finished(now)
            case m.Loading():
                self.groups.loading(at, message)
            case m.RankReady():
                self.groups.ready(at, message)
                self._reshape(now)
            case m.Formed():
                self._formed(at, message, now)
            case m.Offered() | m.Fetched() | m.Withdrawn() if self.engine:
                self.engine.on_move(at, message, now)
            case m.Gap():
                if not self.batches.resend_from(at, message.expected):
                    reason = f"rank {at} missed step {message.expected}, which is no longer kept"
                    self._lose(at.group, reason, now)
            case m.RankFailed():
                self._rank_failed(at, message, now)

    def on_router(self, router: str, message: m.RouterMessage, now: float) -> None:
        """Process a router's message; before its Welcome it may only fetch files."""
        accepted = self.routers.accept(router, now)
        match message:
            case m.Welcome():
                self._welcome(router, message, now)
                return
            case m.Rejected():
                if self.routers.rejected(router, message):
                    self._router_lost(router, "no longer accepts this replica", now)
                return
            case m.FetchFile():
                self.routers.send_file_part(router, message)
                return
            case m.TenantCounts():
                self.routers.pass_on(router, message)
                return
        engine = self.engine
        if engine is None or not accepted:
            return
        match message:
            case m.Heads():
                self.grants.heads(router, message.heads, now, message.submits)
            case m.Submit() if self.draining:
                text = f"replica {self.config.replica} is draining: send it elsewhere"
                self._outbox.to_router(router, m.Failed(message.id, "draining", text, True))
            case m.Submit():
                self.grants.submitted(message.id, now)
                engine.submit(router, message, now)
            case m.Abort():
                engine.abort(router, message.id, now)

    def on_disconnect(self, at: Coordinate, now: float) -> None:
        """Note that a rank's connection ended."""
        self.groups.disconnected(at, now)

    def set_routers(self, routers: tuple[str, ...], now: float) -> None:
        """Use a newly resolved list of routers; those that disappeared are lost."""
        for router in self.routers.set_endpoints(routers):
            self._router_lost(router, "is no longer listed", now)

    def drain(self) -> None:
        """Accept no new requests; running ones finish."""
        self.draining = True

    @property
    def running_requests(self) -> int:
        return len(self.engine.requests) if self.engine is not None else 0

    @property
    def drained(self) -> bool:
        return self.draining and not self.running_requests

    @property
    def busy(self) -> bool:
        """True if work waits for the next tick, not only for messages."""
        return bool(self.running_requests or len(self.batches) or self.grants.waiting)

    def on_stop(self, now: float) -> list[Outgoing]:
        """Fail the running requests, dismiss all ranks, and return the last messages to send."""
        if self.engine is not None:
            text = f"replica {self.config.replica} stops"
            self.engine.fail_all("replica_lost", text, now)
        self._outbox.to_ranks(self.groups.all_ranks(), m.Leave("the controller stops"))
        return self._outbox.take()

    def take(self) -> list[Outgoing]:
        """Messages to send already, without doing what is due."""
        return self._outbox.take()

    # --- time ---------------------------------------------------------------------------------

    def on_tick(self, now: float) -> list[Outgoing]:
        """Do what is due at `now` and return all messages to send, in order."""
        if now - self._beat_s >= BEAT_S:
            self._beat_s = now
            self._outbox.to_ranks(self.groups.all_ranks(), m.ControllerBeat())
        if now - self._checked_s >= CHECK_S:
            self.groups.excuse_pause(now - self._checked_s)
            self.routers.excuse_pause(now - self._checked_s)
            self._checked_s = now
            self._check(now)
        if self.engine is None:
            self._startup.advance(now)
            if self._startup.profile is not None and self.groups.running:
                self._start_serving(self._startup.profile, now)
        if self.engine is not None:
            self._serve(self.engine, now)
        return self._outbox.take()

    def _serve(self, engine: EngineCore, now: float) -> None:
        running = self.groups.running
        if self.grants.waiting and not self.draining and running:
            for router, early in self.grants.begin(engine.scheduler.ahead(now), now):
                engine.submit_early(router, early, now)
        engine.dispatch(running, self._columns_healthy, now)
        engine.start_moves(now)
        engine.report_failed()
        stored, removed = engine.scheduler.take_kv_events()
        if stored or removed:
            self.routers.send_cache_events(stored, removed)
        can_grant = self.grants.waiting and not self.draining and bool(running)
        if can_grant:
            for router, grant in self.grants.grant(engine.scheduler.ahead(now), now).items():
                self._outbox.to_router(router, grant)
        if self.routers.report_due(now):
            learned = engine.predictor.learned()
            report = m.LoadReport(
                engine.load(now),
                self.draining,
                quiet=self.groups.quiet(now),
                gone=self.groups.gone(now),
                learned=learned,
            )
            self.routers.send_report(report, now)

    def _check(self, now: float) -> None:
        """Check for silence, stalls and timeouts, every CHECK_S."""
        for group, reason in self.groups.silent(now):
            self._lose(group, reason, now)
        patience_s = self.config.rank_timeout_s + LOST_GRACE_S
        for group in self.batches.suspect_groups(patience_s, now):
            self._lose(group, "its column failed, and no peer of it was lost", now)
        for group in self.groups.running:
            if self.batches.stalled(group, 2.0 * self.config.collective_timeout_s, now):
                self._lose(group, "it acknowledges no batch", now)
            elif self.batches.resend(group, now):
                log.warning("group %d acknowledges nothing: its steps are sent again", group)
        for router in self.routers.drop_silent(now):
            self._router_lost(router, "is silent", now)
        self.routers.redial_unanswered(now)
        self.routers.send_hellos(now)
        self._conclude(self.generations.overdue(now), now)
        if self.engine is not None:
            for group in self.engine.cancel_overdue_moves(now):
                self._lose(group, "it does not end a transfer that was cancelled", now)
            self.engine.expire(bool(self.groups.running), now)
            self._set_gauges(now)
        self._reshape(now)
        present = set(self.groups.ranks(self.groups.in_state(JOINING, RUNNING)))
        self.generations.close_unused(self.batches.generations, present)

    # --- routers ------------------------------------------------------------------------------

    def _welcome(self, router: str, message: m.Welcome, now: float) -> None:
        if message.protocol != PROTOCOL:
            log.error(
                "router %s speaks protocol %d, this replica %d: run the same version of both",
                router,
                message.protocol,
                PROTOCOL,
            )
            return
        if self.routers.welcomed(router, message, now):
            self._router_lost(router, "was restarted", now)

    def _router_lost(self, router: str, reason: str, now: float) -> None:
        self.grants.forget(router)
        aborted = self.engine.abort_router(router, now) if self.engine else 0
        log.warning("router %s %s: %d of its requests are aborted", router, reason, aborted)

    # --- ranks --------------------------------------------------------------------------------

    def _stage_done(self, at: Coordinate, message: m.StageDone, now: float) -> None:
        if self.engine is not None:
            self.engine.stage_done(at, message, now)
            self.engine.complete_finished(now)
        else:
            self.batches.stage_done(at, message.number, message.elapsed_s, now)

    def _rank_failed(self, at: Coordinate, message: m.RankFailed, now: float) -> None:
        log.error("rank %s failed (%s): %s", at, message.kind, message.message)
        if message.kind == "column":
            self.batches.break_generation(message.generation, now)
        else:
            self._lose(at.group, f"rank {at} failed ({message.kind}): {message.message}", now)

    def _lose(self, group: int, reason: str, now: float) -> None:
        self._lost(self.groups.lose(group, reason), now)

    def _lost(self, lost: LostGroup | None, now: float) -> None:
        """Void the batches of a lost group, break its columns and restart its requests."""
        if lost is None:
            return
        log.error("group %d is lost: %s", lost.group, lost.reason)
        self._metrics.add("medha_rank_restarts_total", self.config.topology.ranks_per_group)
        self._conclude(self.generations.group_lost(lost.group), now)
        if self._releasing == lost.group:
            self._releasing = None
        if not lost.was_running:
            return
        if lost.group in self.generations.members:
            survivors = tuple(g for g in self.generations.members if g != lost.group)
            self.generations.break_now(self.groups.ranks(survivors))
        if self.engine is not None:
            self.engine.group_lost(lost.group, self.generations.current, lost.reason, now)
            self.engine.complete_finished(now)
        else:
            self._startup.group_lost(lost.group)

    # --- generations --------------------------------------------------------------------------

    @property
    def _columns_healthy(self) -> bool:
        """True if no column of the current generation has failed."""
        return not self.batches.broken(self.generations.current)

    def _reshape(self, now: float) -> None:
        """Form the next generation if the groups that should run differ from the current ones."""
        if self.generations.forming is not None:
            return
        ready, running = self.groups.in_state(JOINING), self.groups.running
        base = range(self.config.topology.kvp_min)
        if not self.generations.current and not set(base) <= {*ready, *running}:
            return
        self._releasing = self._releasable(now) if not ready else None
        members = tuple(g for g in sorted({*ready, *running}) if g != self._releasing)
        if members and (members != self.generations.members or not self._columns_healthy):
            store = self.groups.store(members[0])
            self.generations.form(members, self.groups.ranks(members), store, now)

    def _releasable(self, now: float) -> int | None:
        """The last group that holds nothing, if fewer groups are wanted than run."""
        if self.engine is None:
            return None
        scheduler = self.engine.scheduler
        wanted = max(scheduler.wanted_groups(now), self.config.topology.kvp_min)
        idle = set(scheduler.releasable(now)) & set(self.groups.running)
        return max((group for group in idle if group >= wanted), default=None)

    def _formed(self, at: Coordinate, message: m.Formed, now: float) -> None:
        if message.generation == 0:
            if message.error:
                self._lose(at.group, f"rank {at} is not wired: {message.error}", now)
            return
        self._conclude(self.generations.formed(at, message.generation, message.error), now)

    def _conclude(self, formation: FormationResult | None, now: float) -> None:
        """Adopt a formed generation, or lose the groups that were to join a failed one."""
        if formation is None:
            return
        newcomers = tuple(g for g in formation.members if self.groups.state(g) == JOINING)
        if formation.error:
            log.error("generation %d failed: %s", formation.generation, formation.error)
            self._releasing = None
            for group in newcomers:
                self._lose(group, f"generation {formation.generation}: {formation.error}", now)
            self._reshape(now)
            return
        leaving, self._releasing = self._releasing, None
        if leaving is not None and not self._release(leaving, formation.generation, now):
            return  # the group holds something again: the generation before stays
        members = self.generations.members
        self.generations.adopt(formation, self.groups.ranks(members))
        log.info("generation %d: groups %s", formation.generation, formation.members)
        self.groups.joined(newcomers)
        if self.engine is not None:
            for group in newcomers:
                self.engine.scheduler.group_joined(group, formation.generation, now)
            self.engine.scheduler.regenerated(formation.generation, now)
        else:
            self._startup.start()
        self._reshape(now)

    def _release(self, group: int, generation: int, now: float) -> bool:
        """Release a group; False if it holds something again."""
        engine = self.engine
        if engine is None or self.groups.state(group) != RUNNING:
            return True
        if group not in engine.scheduler.releasable(now) or self.batches.involves(group):
            return False
        engine.scheduler.group_released(group, generation, now)
        self.batches.lose(group)
        self.groups.release(group)
        return True

    def _start_serving(self, profile: Profile, now: float) -> None:
        """Create the scheduler, now that groups run and the profile is known, and send Hello."""
        identity = self.identity
        scheduler, predictor = self._make_scheduler(profile, self._startup.pages)
        self.engine = EngineCore(
            self.config,
            scheduler,
            predictor,
            batches=self.batches,
            outbox=self._outbox,
            metrics=self._metrics,
            clock=self._clock,
        )
        for group in self.groups.running:
            scheduler.group_joined(group, self.generations.current, now)
        by_hash = {identity.hashes[name]: data for name, data in identity.files.items()}
        self.routers.announce(self._startup.hello(profile, self.draining), by_hash)
        self.routers.send_hellos(now)

    # --- reports ------------------------------------------------------------------------------

    def status(self, now: float) -> m.ReplicaStatus:
        """Answer of /status: the groups and their states, wanted groups, groups to restart."""
        groups, engine = self.groups, self.engine
        wanted = self._wanted_groups(now)
        releasable: tuple[int, ...] = ()
        free: tuple[int, ...] = ()
        total: tuple[int, ...] = ()
        waiting = running = 0
        if engine is not None:
            load = engine.load(now)
            releasable = engine.scheduler.releasable(now)
            free, total = load.free_pages, load.total_pages
            waiting, running = load.waiting, load.prefilling + load.decoding

        def pages(group: int) -> tuple[int, int]:
            return (free[group], total[group]) if group < len(free) else (0, 0)

        return m.ReplicaStatus(
            replica=self.config.replica,
            ready=engine is not None and bool(groups.running) and not self.draining,
            draining=self.draining,
            generation=self.generations.current,
            wanted_groups=wanted,
            groups=groups.status(pages, releasable),
            routers=len(self.routers.welcome),
            waiting=waiting,
            running=running,
            restart_groups=groups.lost,
            refused=self.routers.refused,
            message="; ".join(
                f"group {group}: {reason}" for group, reason in sorted(groups.reasons.items())
            ),
        )

    def _wanted_groups(self, now: float) -> int:
        topology = self.config.topology
        wanted = self.engine.scheduler.wanted_groups(now) if self.engine is not None else 0
        return min(max(wanted, topology.kvp_min), topology.kvp_max)

    def _set_gauges(self, now: float) -> None:
        """Set the levels that dashboards draw."""
        metrics, groups, engine = self._metrics, self.groups, self.engine
        for state in (ABSENT, STARTING, JOINING, RUNNING, LOST):
            metrics.set("medha_kvp_groups", len(groups.in_state(state)), state)
        topology = self.config.topology
        present = topology.kvp_max - len(groups.in_state(ABSENT))
        metrics.set("medha_ranks", present * topology.ranks_per_group)
        metrics.set("medha_kvp_wanted_groups", self._wanted_groups(now))
        metrics.set("medha_kvp_generation", self.generations.current)
        if engine is None:
            return
        engine.count_displaced()
        load = engine.load(now)
        metrics.set("medha_queue_requests", load.waiting)
        metrics.set("medha_queue_work_seconds", load.pending_s)
        pending_s = dict(load.pending_bands)
        for upto in BANDS:
            # The upper edge of a band of relative slack, written as in histograms.
            edge = "+Inf" if upto == BANDS[-1] else f"{upto:g}"
            metrics.set("medha_pending_work_seconds", pending_s.get(upto, 0.0), edge)
        metrics.set("medha_running_requests", load.prefilling + load.decoding)
        metrics.set("medha_prediction_correction_ratio", engine.predictor.correction)
        for group in range(self.config.topology.kvp_max):
            runs = group in groups.running and group < len(load.free_pages)
            available, total = (load.free_pages[group], load.total_pages[group]) if runs else (0, 0)
            cached = min(engine.scheduler.cached_pages(group), available) if runs else 0
            metrics.set("medha_kv_pages", available - cached, str(group), "free")
            metrics.set("medha_kv_pages", cached, str(group), "cached")
            metrics.set("medha_kv_pages", total - available, str(group), "used")
