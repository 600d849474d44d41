"""KVP groups and their ranks: who is here, who is ready, who fell silent.

    absent ── a rank says hello ──> starting ── all ready ──> joining ── columns formed ──> running
       ^                                │                        │                             │
       └──────── released ──────────────┴──────── a rank lost ───┴──────> lost <───────────────┘
                                                                           └─ hello anew ─> starting

A group is lost as a whole: when one rank falls silent, fails or comes back as another incarnation,
the others are told to leave, and whoever supervises them starts the group anew. What a rank of a
past incarnation still sends is not heard. Decides from messages and time; forms no columns (see
`generations`) and knows no sequence.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from medha import PROTOCOL
from medha.config import CLOSED_S, STALL_S
from medha.messages import Forget, Form, GroupStatus, Leave, Loading, Peer, RankHello, RankReady
from medha.topology import Coordinate, Topology
from medha_worker.controller.outbox import Outbox

ABSENT, STARTING, JOINING, RUNNING, LOST = "absent", "starting", "joining", "running", "lost"


class Lost(msgspec.Struct, frozen=True):
    """A group is gone; `was_running`: the scheduler counted on it."""

    group: int
    why: str
    was_running: bool


class _Rank:
    def __init__(self, hello: RankHello, now: float) -> None:
        self.incarnation, self.pid, self.heard_s = hello.incarnation, hello.pid, now
        self.closed_s = float("inf")
        self.loaded = 0.0
        self.ready: RankReady | None = None


class _Group:
    def __init__(self) -> None:
        self.state = ABSENT
        self.ranks: dict[Coordinate, _Rank] = {}
        self.gone: set[str] = set()  # incarnations that may not come back


class Membership:
    """The groups of one replica; tells ranks what follows from who is there."""

    def __init__(
        self,
        topology: Topology,
        outbox: Outbox,
        store: str,
        timeout_s: float,
        form_timeout_s: float,
    ) -> None:
        self._topology, self._outbox, self._store = topology, outbox, store
        self._timeout_s, self._form_timeout_s = timeout_s, form_timeout_s
        self._groups = [_Group() for _ in range(topology.kvp_max)]
        self._wirings = 0
        self.why: dict[int, str] = {}

    # --- what is ------------------------------------------------------------------------------

    def state(self, group: int) -> str:
        return self._groups[group].state

    def in_state(self, *states: str) -> tuple[int, ...]:
        """Groups in any of these states, ascending."""
        return tuple(g for g, group in enumerate(self._groups) if group.state in states)

    @property
    def running(self) -> tuple[int, ...]:
        return self.in_state(RUNNING)

    @property
    def restart(self) -> tuple[int, ...]:
        """Groups that whoever supervises them must start anew."""
        return self.in_state(LOST)

    def ranks(self, groups: tuple[int, ...]) -> list[Coordinate]:
        """Ranks of these groups that are here."""
        return [at for group in groups for at in self._groups[group].ranks]

    def knows(self, at: Coordinate) -> bool:
        return (
            0 <= at.group < len(self._groups)
            and 0 <= at.stage < self._topology.spp
            and 0 <= at.shard < self._topology.tp
        )

    def pages(self, group: int) -> int:
        """KV pages that every rank of a ready group can hold."""
        return min(
            (r.ready.pages for r in self._groups[group].ranks.values() if r.ready), default=0
        )

    def status(
        self, free: Callable[[int], tuple[int, int]], releasable: tuple[int, ...]
    ) -> tuple[GroupStatus, ...]:
        """One line per group; `free(group)` gives (free, total) pages of a running one."""
        lines = []
        for index, group in enumerate(self._groups):
            free_pages, pages = free(index) if group.state == RUNNING else (0, self.pages(index))
            loaded = [rank.loaded for rank in group.ranks.values()]
            lines.append(
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
        return tuple(lines)

    # --- what happens -------------------------------------------------------------------------

    def hello(self, at: Coordinate, hello: RankHello, now: float) -> Lost | None:
        """A rank introduces itself; another incarnation of a known one means its group is lost."""
        group = self._groups[at.group]
        if hello.protocol != PROTOCOL:
            reason = f"rank {at} speaks protocol {hello.protocol}, this controller {PROTOCOL}"
            self._outbox.to_ranks((at,), Leave(f"{reason}; start both from one version"))
            self.why[at.group] = reason
            return None
        if hello.incarnation in group.gone:
            self._outbox.to_ranks((at,), Leave(f"{at} was given up as {hello.incarnation}"))
            return None
        known = group.ranks.get(at)
        if known is not None and known.incarnation == hello.incarnation:
            known.heard_s, known.closed_s = now, float("inf")
            return None
        lost = None
        if known is not None:
            why = f"rank {at} came back as another process"
            lost = self.lose(at.group, why, leave=False)
        group.ranks[at] = _Rank(hello, now)
        if group.state in (ABSENT, LOST):
            group.state = STARTING
            self.why.pop(at.group, None)
        if len(group.ranks) == self._topology.ranks_per_group:
            self._wirings += 1
            wiring = Form(
                generation=0,
                members=(at.group,),
                store=f"{self._store}/g{at.group}-{self._wirings}",
                timeout_s=self._form_timeout_s,
            )
            self._outbox.to_ranks(group.ranks, wiring)
        return lost

    def heard(self, at: Coordinate, now: float) -> bool:
        """Whether this rank's message counts; notes that it lives. One who speaks without having
        said hello since its group was given up is a process of old, and leaves."""
        rank = self._groups[at.group].ranks.get(at)
        if rank is None:
            self._outbox.to_ranks((at,), Leave(f"group {at.group} was given up; start anew"))
            return False
        rank.heard_s, rank.closed_s = now, float("inf")
        return True

    def hung_up(self, at: Coordinate, now: float) -> None:
        """A rank's connection has ended: it speaks soon on another, or it is dead."""
        if at.group < len(self._groups) and at in self._groups[at.group].ranks:
            self._groups[at.group].ranks[at].closed_s = now

    def loading(self, at: Coordinate, message: Loading) -> None:
        rank = self._groups[at.group].ranks[at]
        rank.loaded = message.done_bytes / max(message.total_bytes, 1)

    def ready(self, at: Coordinate, message: RankReady) -> None:
        """Weights and pool stand; the last rank of a group introduces the group to its peers."""
        group = self._groups[at.group]
        rank = group.ranks[at]
        rank.ready, rank.loaded = message, 1.0
        complete = len(group.ranks) == self._topology.ranks_per_group
        if group.state == STARTING and complete and all(r.ready for r in group.ranks.values()):
            group.state = JOINING
            for other in self.in_state(JOINING, RUNNING):
                if other != at.group:
                    self._introduce(at.group, other)
                    self._introduce(other, at.group)

    def _introduce(self, group: int, to: int) -> None:
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
        """Their columns are formed: they run."""
        for group in groups:
            self._groups[group].state = RUNNING

    def lose(self, group: int, why: str, leave: bool = True) -> Lost | None:
        """Give the group up: its ranks leave, its peers forget it; None if it was not here.

        `leave` False: some of its ranks are new processes already and must not be told.
        """
        lost = self._groups[group]
        if lost.state in (ABSENT, LOST):
            return None
        was_running = lost.state == RUNNING
        self._part(group, f"group {group} is lost: {why}"[:4096] if leave else "")
        lost.state = LOST
        self.why[group] = why
        return Lost(group, why, was_running)

    def release(self, group: int) -> None:
        """The group holds nothing any more and goes."""
        self._part(group, f"group {group} is released")
        self._groups[group].state = ABSENT

    def _part(self, group: int, reason: str) -> None:
        parting = self._groups[group]
        if reason:
            self._outbox.to_ranks(parting.ranks, Leave(reason))
        parting.gone |= {rank.incarnation for rank in parting.ranks.values()}
        parting.ranks = {}
        others = tuple(g for g in self.in_state(JOINING, RUNNING) if g != group)
        self._outbox.to_ranks(self.ranks(others), Forget(group))

    def excuse(self, slept_s: float) -> None:
        """We did not run for `slept_s`: time that we slept through is nobody's silence."""
        if STALL_S < slept_s < float("inf"):
            for group in self._groups:
                for rank in group.ranks.values():
                    rank.heard_s += slept_s
                    rank.closed_s += slept_s

    def silent(self, now: float) -> list[tuple[int, str]]:
        """Groups with a rank that was not heard for too long, and why that is so."""
        found = []
        for index, group in enumerate(self._groups):
            for at, rank in group.ranks.items():
                if now - rank.closed_s > CLOSED_S:
                    found.append((index, f"rank {at} is gone: its connection has ended"))
                    break
                if now - rank.heard_s > self._timeout_s:
                    found.append((index, f"rank {at} is silent for {now - rank.heard_s:.1f} s"))
                    break
        return found
