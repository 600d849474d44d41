"""The replica controller without I/O: messages and time in, messages out.

Owns the scheduler and everything that must agree with it: which groups run, which generation of
columns they share, what each rank was told, which router asked for what. Its life:

    ranks of groups 0..kvp_min-1 ready ──> generation 1 formed ──> warm-up (unless a profile is
    given) ──> scheduler made, Hello to routers ──> serving, growing, shrinking, losing groups

`on_rank` and `on_router` take in what arrived; `on_tick` does what is due and returns everything to
send. It opens no socket, reads no clock (`clock` only times the scheduler for a metric), imports no
torch, and decides nothing that the scheduler decides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from medha import PROTOCOL
from medha import messages as m
from medha.config import WorkerConfig
from medha.profile import Profile
from medha.topology import Coordinate
from medha_worker.controller.flights import Flights
from medha_worker.controller.generations import Formation, Generations
from medha_worker.controller.grants import Grants
from medha_worker.controller.membership import JOINING, RUNNING, Lost, Membership
from medha_worker.controller.meters import Meters
from medha_worker.controller.moves import Moves
from medha_worker.controller.outbox import Outbox, Outgoing
from medha_worker.controller.routers import Routers
from medha_worker.controller.serving import Serving
from medha_worker.controller.sessions import Sessions
from medha_worker.controller.startup import Identity, MakeScheduler, Startup
from medha_worker.controller.status import gauges, replica_status

BEAT_S = 0.5
DUTY_S = 0.05
LOST_GRACE_S = 1.0

log = logging.getLogger("medha.controller")


class Controller:
    """See the module. `store`: address of the rendezvous store; `profile` None: measure one."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: Identity,
        *,
        make_scheduler: MakeScheduler,
        store: str,
        profile: Profile | None,
        meters: Meters,
        clock: Callable[[], float],
    ) -> None:
        self.config, self.identity = config, identity
        self._make_scheduler, self._meters, self._clock = make_scheduler, meters, clock
        topology, settings = config.topology, config.scheduling
        self._outbox = outbox = Outbox()
        self.sessions = Sessions()
        self.flights = Flights(topology, outbox)
        self.moves = Moves(topology, outbox)
        self.membership = Membership(
            topology, outbox, store, config.rank_timeout_s, config.collective_timeout_s
        )
        self.generations = Generations(outbox, store, config.collective_timeout_s)
        self.routers = Routers(config.routers, outbox, config.router_timeout_s)
        self.grants = Grants(
            settings.dispatch_budgets * settings.max_batch_s, settings.work_floor_s
        )
        self.serving: Serving | None = None
        self.draining = False
        self._startup = Startup(config, identity, self.flights, self.membership, profile)
        self._releasing: int | None = None
        self._duty_s = self._beat_s = float("-inf")

    # --- what arrives -------------------------------------------------------------------------

    def on_rank(self, at: Coordinate, message: m.RankReport, now: float) -> None:
        """A rank reports; messages of ranks that are unknown or given up are not heard."""
        if not self.membership.knows(at):
            log.warning("rank %s is outside the topology %s", at, self.config.topology)
            return
        if isinstance(message, m.RankHello):
            self._lost(self.membership.hello(at, message, now), now)
            return
        if not self.membership.heard(at, now):
            return
        match message:
            case m.StageDone():
                self._stage_done(at, message, now)
            case m.BatchTokens():
                self.flights.tokens(at, message.number, message.tokens)
                if self.serving is not None:
                    self.serving.settle(now)
            case m.Loading():
                self.membership.loading(at, message)
            case m.RankReady():
                self.membership.ready(at, message)
                self._reshape(now)
            case m.Formed():
                self._formed(at, message, now)
            case m.Offered() if self.serving:
                self.serving.moved(self.moves.offered(at, message, now), now)
            case m.Fetched() if self.serving:
                self.serving.moved(self.moves.fetched(at, message, now), now)
            case m.Withdrawn() if self.serving:
                self.serving.moved(self.moves.withdrawn(at, message, now), now)
            case m.Gap():
                if not self.flights.resend(at, message.expected):
                    self._lose(at.group, f"rank {at} missed step {message.expected}, gone", now)
            case m.RankFailed():
                self._rank_failed(at, message, now)

    def on_router(self, router: str, message: m.RouterMessage, now: float) -> None:
        """A router speaks; before its Welcome it can ask for files, and nothing else counts."""
        match message:
            case m.Welcome():
                self._welcome(router, message, now)
                return
            case m.Rejected():
                if self.routers.rejected(router, message):
                    self._router_lost(router, "does not know us", now)
                return
            case m.FetchFile():
                self.routers.fetch(router, message)
                return
        serving = self.serving
        if serving is None or not self.routers.heard(router, now):
            return
        match message:
            case m.Heads():
                self.grants.heads(router, message.heads, now)
            case m.Submit() if self.draining:
                text = f"replica {self.config.replica} is draining: send it elsewhere"
                self._outbox.to_router(router, m.Failed(message.id, "draining", text, True))
            case m.Submit():
                self.grants.submitted(router, message.id)
                serving.submit(router, message, now)
            case m.Abort():
                serving.abort(router, message.id, now)

    def set_routers(self, routers: tuple[str, ...], now: float) -> None:
        """Names were resolved anew: dial what appeared, let go of what vanished."""
        for router in self.routers.configure(routers):
            self._router_lost(router, "is no longer there", now)

    def drain(self) -> None:
        """Take nothing new from now on; what runs is finished."""
        self.draining = True

    @property
    def drained(self) -> bool:
        return self.draining and not len(self.sessions)

    @property
    def busy(self) -> bool:
        """Something waits for the next tick, not only for messages."""
        return bool(len(self.sessions) or len(self.flights) or self.grants.waiting)

    def on_stop(self, now: float) -> list[Outgoing]:
        """The last words: requests that still run may go elsewhere, ranks leave."""
        if self.serving is not None:
            text = f"replica {self.config.replica} stops"
            self.serving.give_up("replica_lost", text, now)
        ranks = self.membership.ranks(tuple(range(self.config.topology.kvp_max)))
        self._outbox.to_ranks(ranks, m.Leave("the controller stops"))
        return self._outbox.take()

    def take(self) -> list[Outgoing]:
        """What is to be sent already, without doing anything that is due."""
        return self._outbox.take()

    # --- what is due --------------------------------------------------------------------------

    def on_tick(self, now: float) -> list[Outgoing]:
        """Do what is due at `now` and return everything to send, in order."""
        if now - self._beat_s >= BEAT_S:
            self._beat_s = now
            ranks = self.membership.ranks(tuple(range(self.config.topology.kvp_max)))
            self._outbox.to_ranks(ranks, m.ControllerBeat())
        if now - self._duty_s >= DUTY_S:
            self.membership.excuse(now - self._duty_s)
            self.routers.excuse(now - self._duty_s)
            self._duty_s = now
            self._duties(now)
        if self.serving is None:
            self._startup.advance(now)
            if self._startup.profile is not None and self.membership.running:
                self._begin_serving(self._startup.profile, now)
        if self.serving is not None:
            self._serve(self.serving, now)
        return self._outbox.take()

    def _serve(self, serving: Serving, now: float) -> None:
        running = self.membership.running
        serving.dispatch(running, self._whole, now)
        serving.plan_moves(now)
        serving.take_failed()
        stored, removed = serving.scheduler.take_kv_events()
        if stored or removed:
            self.routers.cached(stored, removed)
        wanting = self.grants.waiting and not self.draining and bool(running)
        if wanting or self.routers.due(now):
            load = serving.load(now)
            if wanting:
                for router, grant in self.grants.grant(load.ahead_s, now).items():
                    self._outbox.to_router(router, grant)
            self.routers.report(load, self.draining, serving.predictor.learned(), now)

    def _duties(self, now: float) -> None:
        """What may wait for a twentieth of a second."""
        for group, why in self.membership.silent(now):
            self._lose(group, why, now)
        patience_s = self.config.rank_timeout_s + LOST_GRACE_S
        for group in self.flights.doubtful(patience_s, now):
            self._lose(group, "its column failed, and no peer of it was lost", now)
        for group in self.membership.running:
            if self.flights.stalled(group, 2.0 * self.config.collective_timeout_s, now):
                self._lose(group, "it acknowledges no batch", now)
            elif self.flights.nudge(group, now):
                log.warning("group %d acknowledges nothing: its steps are sent again", group)
        for router in self.routers.lost(now):
            self._router_lost(router, "is silent", now)
        self.routers.say_hello(now)
        self._concluded(self.generations.overdue(now), now)
        if self.serving is not None:
            outcomes, dumb = self.moves.overdue(now)
            for outcome in outcomes:
                self.serving.moved(outcome, now)
            for group in dumb:
                self._lose(group, "it does not end a transfer that was called off", now)
            self.serving.expire(bool(self.membership.running), now)
            gauges(self, self._meters, now)
        self._reshape(now)
        here = set(self.membership.ranks(self.membership.in_state(JOINING, RUNNING)))
        self.generations.close_unused(self.flights.generations, here)

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
            self._router_lost(router, "is another process now", now)

    def _router_lost(self, router: str, why: str, now: float) -> None:
        self.grants.forget(router)
        aborted = self.serving.abort_router(router, now) if self.serving else 0
        log.warning("router %s %s: %d of its requests are aborted", router, why, aborted)

    # --- ranks --------------------------------------------------------------------------------

    def _stage_done(self, at: Coordinate, message: m.StageDone, now: float) -> None:
        if self.serving is not None:
            self.serving.stage_done(at, message, now)
            self.serving.settle(now)
        else:
            self.flights.stage_done(at, message.number, message.elapsed_s, now)

    def _rank_failed(self, at: Coordinate, message: m.RankFailed, now: float) -> None:
        log.error("rank %s failed (%s): %s", at, message.kind, message.message)
        if message.kind == "column":
            self.flights.break_generation(message.generation, now)
        else:
            self._lose(at.group, f"rank {at} failed ({message.kind}): {message.message}", now)

    def _lose(self, group: int, why: str, now: float) -> None:
        self._lost(self.membership.lose(group, why), now)

    def _lost(self, lost: Lost | None, now: float) -> None:
        """A group is gone: what it ran is void, columns with it break, its requests start over."""
        if lost is None:
            return
        log.error("group %d is lost: %s", lost.group, lost.why)
        self._meters.add("medha_rank_restarts_total", self.config.topology.ranks_per_group)
        self._concluded(self.generations.lost(lost.group), now)
        if self._releasing == lost.group:
            self._releasing = None
        if not lost.was_running:
            return
        if lost.group in self.generations.members:
            survivors = tuple(g for g in self.generations.members if g != lost.group)
            self.generations.break_now(self.membership.ranks(survivors))
        if self.serving is not None:
            self.serving.group_lost(lost.group, self.generations.current, lost.why, now)
            self.serving.settle(now)
        else:
            self._startup.lost(lost.group)

    # --- generations --------------------------------------------------------------------------

    @property
    def _whole(self) -> bool:
        """The current generation's columns work."""
        return not self.flights.broken(self.generations.current)

    def _reshape(self, now: float) -> None:
        """Form the next generation when the groups that should run are not those of this one."""
        if self.generations.forming is not None:
            return
        ready, running = self.membership.in_state(JOINING), self.membership.running
        base = range(self.config.topology.kvp_min)
        if not self.generations.current and not set(base) <= {*ready, *running}:
            return
        self._releasing = self._releasable(now) if not ready else None
        members = tuple(g for g in sorted({*ready, *running}) if g != self._releasing)
        if members and (members != self.generations.members or not self._whole):
            self.generations.form(members, self.membership.ranks(members), now)

    def _releasable(self, now: float) -> int | None:
        """The group to let go: the last one that holds nothing, while fewer are wanted."""
        if self.serving is None:
            return None
        scheduler = self.serving.scheduler
        wanted = max(scheduler.wanted_groups(now), self.config.topology.kvp_min)
        idle = set(scheduler.releasable(now)) & set(self.membership.running)
        return max((group for group in idle if group >= wanted), default=None)

    def _formed(self, at: Coordinate, message: m.Formed, now: float) -> None:
        if message.generation == 0:
            if message.error:
                self._lose(at.group, f"rank {at} is not wired: {message.error}", now)
            return
        self._concluded(self.generations.formed(at, message.generation, message.error), now)

    def _concluded(self, formation: Formation | None, now: float) -> None:
        """A generation stands, or could not be formed and its newcomers have to start anew."""
        if formation is None:
            return
        newcomers = tuple(g for g in formation.members if self.membership.state(g) == JOINING)
        if formation.error:
            log.error("generation %d failed: %s", formation.generation, formation.error)
            self._releasing = None
            for group in newcomers:
                self._lose(group, f"generation {formation.generation}: {formation.error}", now)
            self._reshape(now)
            return
        leaving, self._releasing = self._releasing, None
        if leaving is not None and not self._release(leaving, formation.generation, now):
            return  # it holds something again: the generation before stays
        members = self.generations.members
        self.generations.adopt(formation, self.membership.ranks(members))
        log.info("generation %d: groups %s", formation.generation, formation.members)
        self.membership.joined(newcomers)
        if self.serving is not None:
            for group in newcomers:
                self.serving.scheduler.group_joined(group, formation.generation, now)
            self.serving.scheduler.regenerated(formation.generation, now)
        else:
            self._startup.begin()
        self._reshape(now)

    def _release(self, group: int, generation: int, now: float) -> bool:
        """Let a group go if it still holds nothing."""
        serving = self.serving
        if serving is None or self.membership.state(group) != RUNNING:
            return True
        if group not in serving.scheduler.releasable(now) or self.flights.involves(group):
            return False
        serving.scheduler.group_released(group, generation, now)
        self.flights.lose(group)
        self.membership.release(group)
        return True

    def _begin_serving(self, profile: Profile, now: float) -> None:
        """The profile is known and groups run: make the scheduler, introduce ourselves."""
        config, identity = self.config, self.identity
        scheduler, predictor = self._make_scheduler(profile, self._startup.pages)
        self.serving = Serving(
            scheduler=scheduler,
            predictor=predictor,
            sessions=self.sessions,
            flights=self.flights,
            moves=self.moves,
            outbox=self._outbox,
            meters=self._meters,
            page_tokens=config.page_tokens,
            max_context_tokens=config.max_context_tokens,
            vocab=identity.shape.vocab,
            settings=config.scheduling,
            clock=self._clock,
        )
        for group in self.membership.running:
            scheduler.group_joined(group, self.generations.current, now)
        by_hash = {identity.hashes[name]: data for name, data in identity.files.items()}
        self.routers.introduce(self._startup.hello(profile, self.draining), by_hash)
        self.routers.say_hello(now)

    def status(self, now: float) -> m.ReplicaStatus:
        """What /status answers."""
        return replica_status(self, now)
