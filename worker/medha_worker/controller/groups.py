"""KVP groups and their ranks, and the generations of columns that running groups form.

    absent ── a rank's Hello ──> starting ── all ready ──> joining ── columns formed ──> running
       ^                             │                        │                             │
       └──────── released ───────────┴──────── a rank lost ───┴──────> lost <───────────────┘
                                                                        └─ a new Hello ─> starting

A group is lost as a whole: if one rank falls silent, fails or returns as another incarnation, the
others get Leave, and the supervisor restarts the group. Reports of past incarnations are ignored.

A generation is the set of groups that can share a sequence. All its members form it in background
while the one before serves; it counts once every rank has sent Formed. One that fails or takes too
long is dropped and its number is not used again. Generation 0 is a group's own TP and SPP wiring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from medha import PROTOCOL
from medha.config import STALL_S
from medha.messages import (
    Dissolve,
    Forget,
    Form,
    GroupStatus,
    Leave,
    Loading,
    Peer,
    RankHello,
    RankReady,
)
from medha.peer_liveness import PeerLiveness
from medha.topology import Coordinate, Topology
from medha_worker.controller.outbox import Outbox

ABSENT, STARTING, JOINING, RUNNING, LOST = "absent", "starting", "joining", "running", "lost"


class LostGroup(msgspec.Struct, frozen=True):
    """A group was lost; `was_running`: the scheduler had it."""

    group: int
    reason: str
    was_running: bool


class _Rank:
    def __init__(self, hello: RankHello, now: float) -> None:
        self.incarnation, self.store = hello.incarnation, hello.store
        self.life = PeerLiveness(now)
        self.loaded = 0.0
        self.ready: RankReady | None = None


class _Group:
    def __init__(self) -> None:
        self.state = ABSENT
        self.ranks: dict[Coordinate, _Rank] = {}
        self.gone: set[str] = set()  # incarnations that may not return


class RankGroups:
    """The groups of ranks of one replica; sends ranks the commands that their state calls for."""

    def __init__(
        self,
        topology: Topology,
        outbox: Outbox,
        timeout_s: float,
        form_timeout_s: float,
        incarnation: str,
    ) -> None:
        self._topology, self._outbox = topology, outbox
        self._timeout_s, self._form_timeout_s = timeout_s, form_timeout_s
        self._incarnation = incarnation
        self._groups = [_Group() for _ in range(topology.kvp_max)]
        self._wirings = 0
        self.reasons: dict[int, str] = {}  # group -> why it was lost or refused

    # --- state --------------------------------------------------------------------------------

    def state(self, group: int) -> str:
        return self._groups[group].state

    def in_state(self, *states: str) -> tuple[int, ...]:
        """Groups in any of these states, ascending."""
        return tuple(g for g, group in enumerate(self._groups) if group.state in states)

    @property
    def running(self) -> tuple[int, ...]:
        return self.in_state(RUNNING)

    @property
    def lost(self) -> tuple[int, ...]:
        """Groups that the supervisor must restart."""
        return self.in_state(LOST)

    def ranks(self, groups: tuple[int, ...]) -> list[Coordinate]:
        """Ranks of these groups that have joined."""
        return [at for group in groups for at in self._groups[group].ranks]

    def store(self, group: int) -> str:
        """Address and path of the store that the first rank of a complete group serves.

        The path separates controllers, which count wirings and generations from 1.
        """
        return f"{self._groups[group].ranks[Coordinate(group, 0, 0)].store}/{self._incarnation}"

    def all_ranks(self) -> list[Coordinate]:
        return self.ranks(tuple(range(len(self._groups))))

    def contains(self, at: Coordinate) -> bool:
        return (
            0 <= at.group < len(self._groups)
            and 0 <= at.stage < self._topology.spp
            and 0 <= at.shard < self._topology.tp
        )

    def pages(self, group: int) -> int:
        """KV pages that every rank of a ready group can hold."""
        return min(
            (rank.ready.pages for rank in self._groups[group].ranks.values() if rank.ready),
            default=0,
        )

    def status(
        self, free: Callable[[int], tuple[int, int]], releasable: tuple[int, ...]
    ) -> tuple[GroupStatus, ...]:
        """Status of each group; `free(group)` gives (free, total) pages of a running one."""
        statuses = []
        for index, group in enumerate(self._groups):
            free_pages, pages = free(index) if group.state == RUNNING else (0, self.pages(index))
            loaded = [rank.loaded for rank in group.ranks.values()]
            statuses.append(
                GroupStatus(
                    group=index,
                    state=group.state,
                    pages=pages,
                    free_pages=free_pages,
                    releasable=index in releasable,
                    loaded=sum(loaded) / self._topology.ranks_per_group,
                    ranks=tuple(str(at) for at in sorted(group.ranks)),
                )
            )
        return tuple(statuses)

    # --- ranks join ---------------------------------------------------------------------------

    def hello(self, at: Coordinate, hello: RankHello, now: float) -> LostGroup | None:
        """Add a rank; if it replaces another incarnation, its group is lost.

        The last rank of a group to join triggers the group's TP and SPP wiring. A rank of an
        earlier controller is wired already, so it must rejoin.
        """
        group = self._groups[at.group]
        if hello.protocol != PROTOCOL:
            reason = f"rank {at} speaks protocol {hello.protocol}, this controller {PROTOCOL}"
            self._outbox.to_ranks((at,), Leave(f"{reason}; start both from one version"))
            self.reasons[at.group] = reason
            return None
        if hello.controller not in ("", self._incarnation):
            self._outbox.to_ranks((at,), Leave("its controller was replaced", rejoin=True))
            return None
        if hello.incarnation in group.gone:
            self._outbox.to_ranks((at,), Leave(f"{at} was given up as {hello.incarnation}"))
            return None
        known = group.ranks.get(at)
        if known is not None and known.incarnation == hello.incarnation:
            known.life.seen(now)
            return None
        lost = None
        if known is not None:
            reason = f"rank {at} came back as another process"
            lost = self.lose(at.group, reason, leave=False)
        group.ranks[at] = _Rank(hello, now)
        if group.state in (ABSENT, LOST):
            group.state = STARTING
            self.reasons.pop(at.group, None)
        if len(group.ranks) == self._topology.ranks_per_group:
            self._wirings += 1
            wiring = Form(
                generation=0,
                members=(at.group,),
                store=f"{self.store(at.group)}/g{at.group}-{self._wirings}",
                controller=self._incarnation,
                timeout_s=self._form_timeout_s,
            )
            self._outbox.to_ranks(group.ranks, wiring)
        return lost

    def loading(self, at: Coordinate, message: Loading) -> None:
        rank = self._groups[at.group].ranks[at]
        rank.loaded = message.done_bytes / max(message.total_bytes, 1)

    def ready(self, at: Coordinate, message: RankReady) -> None:
        """Record that a rank holds weights and pages; exchange peers once its group is ready."""
        group = self._groups[at.group]
        rank = group.ranks[at]
        rank.ready, rank.loaded = message, 1.0
        complete = len(group.ranks) == self._topology.ranks_per_group
        if group.state == STARTING and complete and all(r.ready for r in group.ranks.values()):
            group.state = JOINING
            for other in self.in_state(JOINING, RUNNING):
                if other != at.group:
                    self._send_peers(at.group, other)
                    self._send_peers(other, at.group)

    def _send_peers(self, group: int, to: int) -> None:
        for at, rank in self._groups[group].ranks.items():
            if rank.ready is None:
                continue
            peer = Peer(
                group=group,
                agent=rank.ready.agent,
                metadata=rank.ready.metadata,
                bases=rank.ready.bases,
                page_bytes=rank.ready.page_bytes,
                pages=rank.ready.pages,
            )
            self._outbox.to_ranks((Coordinate(to, at.stage, at.shard),), peer)

    def joined(self, groups: tuple[int, ...]) -> None:
        """Set groups running, whose columns are formed."""
        for group in groups:
            self._groups[group].state = RUNNING

    # --- groups leave -------------------------------------------------------------------------

    def lose(self, group: int, reason: str, leave: bool = True) -> LostGroup | None:
        """Give up a group: its ranks leave and its peers forget it; None if it was not present.

        `leave` False: some of its ranks are new processes already and must not get Leave.
        """
        lost = self._groups[group]
        if lost.state in (ABSENT, LOST):
            return None
        was_running = lost.state == RUNNING
        self._dismiss(group, f"group {group} is lost: {reason}"[:4096] if leave else "")
        lost.state = LOST
        self.reasons[group] = reason
        return LostGroup(group, reason, was_running)

    def release(self, group: int) -> None:
        """Dismiss a group that holds nothing any more."""
        self._dismiss(group, f"group {group} is released")
        self._groups[group].state = ABSENT

    def _dismiss(self, group: int, reason: str) -> None:
        leaving = self._groups[group]
        if reason:
            self._outbox.to_ranks(leaving.ranks, Leave(reason))
        leaving.gone |= {rank.incarnation for rank in leaving.ranks.values()}
        leaving.ranks = {}
        others = tuple(g for g in self.in_state(JOINING, RUNNING) if g != group)
        self._outbox.to_ranks(self.ranks(others), Forget(group))

    # --- signs of life ------------------------------------------------------------------------

    def accept(self, at: Coordinate, now: float) -> bool:
        """Note a sign of life; False if the rank's reports do not count.

        What a rank queued for an earlier controller arrives before its Hello. If ranks of its group
        were given up, no Hello follows: the rank rejoins, or has an order to leave already.
        """
        group = self._groups[at.group]
        rank = group.ranks.get(at)
        if rank is None:
            if group.gone:
                text = f"{at} is unknown to this controller"
                self._outbox.to_ranks((at,), Leave(text, rejoin=True))
            return False
        rank.life.seen(now)
        return True

    def disconnected(self, at: Coordinate, now: float) -> None:
        """Note that a rank's connection ended: it reconnects soon, or it is dead."""
        if at.group < len(self._groups) and at in self._groups[at.group].ranks:
            self._groups[at.group].ranks[at].life.disconnected(now)

    def excuse_pause(self, pause_s: float) -> None:
        """Do not count a time in which this process did not run as the ranks' silence."""
        if STALL_S < pause_s < float("inf"):
            for group in self._groups:
                for rank in group.ranks.values():
                    rank.life.excuse(pause_s)

    def quiet(self, now: float) -> bool:
        """Return True if a rank of a running group may hang."""
        return any(rank.life.quiet(now) for group in self.running for rank in self._ranks_of(group))

    def gone(self, now: float) -> bool:
        """Return True if every running group, one at least, has a rank that is probably dead."""
        running = self.running
        return bool(running) and all(
            any(rank.life.gone(now) for rank in self._ranks_of(group)) for group in running
        )

    def _ranks_of(self, group: int) -> Iterable[_Rank]:
        return self._groups[group].ranks.values()

    def silent(self, now: float) -> list[tuple[int, str]]:
        """List groups with a dead rank, each with the reason."""
        silent = []
        for index, group in enumerate(self._groups):
            for at, rank in group.ranks.items():
                if reason := rank.life.death(now, self._timeout_s):
                    silent.append((index, f"rank {at}: {reason}"))
                    break
        return silent


class PendingGeneration(msgspec.Struct):
    """A generation that is being formed; `awaited` ranks have not answered yet."""

    generation: int
    members: tuple[int, ...]
    awaited: set[Coordinate]
    ends_s: float


class FormationResult(msgspec.Struct, frozen=True):
    """End of a formation; if `error` is empty, the generation counts from now on."""

    generation: int
    members: tuple[int, ...]
    error: str = ""


class Generations:
    """The current generation, the one being formed, and old ones that batches still use."""

    def __init__(self, outbox: Outbox, timeout_s: float, incarnation: str) -> None:
        self._outbox, self._timeout_s, self._incarnation = outbox, timeout_s, incarnation
        self._last = 0
        self.current = 0
        self.members: tuple[int, ...] = ()
        self.forming: PendingGeneration | None = None
        self._old: list[tuple[int, tuple[Coordinate, ...]]] = []  # (generation, its ranks)

    def form(
        self, members: tuple[int, ...], ranks: list[Coordinate], store: str, now: float
    ) -> None:
        """Start to form the next generation of `members`, whose ranks `ranks` meet at `store`."""
        self._last += 1
        self.forming = PendingGeneration(self._last, members, set(ranks), now + self._timeout_s)
        order = Form(
            generation=self._last,
            members=members,
            store=store,
            controller=self._incarnation,
            timeout_s=self._timeout_s,
        )
        self._outbox.to_ranks(ranks, order)

    def formed(self, at: Coordinate, generation: int, error: str) -> FormationResult | None:
        """Record a rank's answer; returns the result with the last answer or the first error."""
        forming = self.forming
        if forming is None or generation != forming.generation:
            return None
        if error:
            return self._fail(f"rank {at}: {error}")
        forming.awaited.discard(at)
        if forming.awaited:
            return None
        self.forming = None
        return FormationResult(forming.generation, forming.members)

    def adopt(self, formation: FormationResult, ranks: list[Coordinate]) -> None:
        """Make the formed generation current; the old one stays on `ranks` while it is used."""
        if self.current:
            self._old.append((self.current, tuple(ranks)))
        self.current, self.members = formation.generation, formation.members

    def overdue(self, now: float) -> FormationResult | None:
        """Fail a formation that takes too long."""
        if self.forming is None or now < self.forming.ends_s:
            return None
        late = ", ".join(str(at) for at in sorted(self.forming.awaited))
        return self._fail(f"no answer from {late} within {self._timeout_s:g} s")

    def group_lost(self, group: int) -> FormationResult | None:
        """Fail a formation that includes a lost group."""
        if self.forming is None or group not in self.forming.members:
            return None
        return self._fail(f"group {group} is lost")

    def _fail(self, error: str) -> FormationResult:
        assert self.forming is not None
        failed = FormationResult(self.forming.generation, self.forming.members, error)
        self.forming = None
        return failed

    def close_unused(self, in_use: set[int], present: set[Coordinate]) -> None:
        """Dissolve old generations that no batch in flight uses, on the ranks still present."""
        kept = []
        for generation, ranks in self._old:
            if generation in in_use:
                kept.append((generation, ranks))
            else:
                self._outbox.to_ranks((at for at in ranks if at in present), Dissolve(generation))
        self._old = kept

    def break_now(self, ranks: list[Coordinate]) -> None:
        """Dissolve the current generation on `ranks`, since a member died.

        Exchanges that block on the member fail at once.
        """
        if self.current:
            self._outbox.to_ranks(ranks, Dissolve(self.current))
        self._old = []
        self.members = ()
