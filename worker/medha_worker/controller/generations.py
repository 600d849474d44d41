"""Generations of the KVP columns: which groups can share a sequence now, and who joins next.

A generation is formed in background by all its members while the one before serves; only when
every rank says Formed does it count. One that fails or takes too long is dropped, its number is not
used again, and the old generation goes on. Numbers rise; 0 is a group's own TP and SPP wiring.
"""

from __future__ import annotations

import msgspec

from medha.messages import Dissolve, Form
from medha.topology import Coordinate
from medha_worker.controller.outbox import Outbox


class Forming(msgspec.Struct):
    """A generation that is being formed; `awaited` ranks have not answered yet."""

    generation: int
    members: tuple[int, ...]
    awaited: set[Coordinate]
    ends_s: float


class Formation(msgspec.Struct, frozen=True):
    """The outcome of a formation; `error` empty means that it counts from now on."""

    generation: int
    members: tuple[int, ...]
    error: str = ""


class Generations:
    """The current generation, the one being formed, and the old one that awaits its end."""

    def __init__(self, outbox: Outbox, store: str, timeout_s: float) -> None:
        self._outbox, self._store, self._timeout_s = outbox, store, timeout_s
        self._last = 0
        self.current = 0
        self.members: tuple[int, ...] = ()
        self.forming: Forming | None = None
        # (generation, its ranks): closed when no batch uses it any more.
        self._old: list[tuple[int, tuple[Coordinate, ...]]] = []

    def form(self, members: tuple[int, ...], ranks: list[Coordinate], now: float) -> None:
        """Begin the next generation among `members`, whose ranks are `ranks`."""
        self._last += 1
        self.forming = Forming(self._last, members, set(ranks), now + self._timeout_s)
        order = Form(
            generation=self._last, members=members, store=self._store, timeout_s=self._timeout_s
        )
        self._outbox.to_ranks(ranks, order)

    def formed(self, at: Coordinate, generation: int, error: str) -> Formation | None:
        """A rank's answer; the outcome with the last one, or at once with an error."""
        forming = self.forming
        if forming is None or generation != forming.generation:
            return None
        if error:
            return self._fail(f"rank {at}: {error}")
        forming.awaited.discard(at)
        if forming.awaited:
            return None
        self.forming = None
        return Formation(forming.generation, forming.members)

    def adopt(self, formation: Formation, ranks: list[Coordinate]) -> None:
        """The formation counts from now on; the one before ends on `ranks` when unused."""
        if self.current:
            self._old.append((self.current, tuple(ranks)))
        self.current, self.members = formation.generation, formation.members

    def overdue(self, now: float) -> Formation | None:
        """The failure of a formation whose time is over."""
        if self.forming is None or now < self.forming.ends_s:
            return None
        late = ", ".join(str(at) for at in sorted(self.forming.awaited))
        return self._fail(f"no answer from {late} within {self._timeout_s:g} s")

    def lost(self, group: int) -> Formation | None:
        """A member is gone: what is being formed with it fails."""
        if self.forming is None or group not in self.forming.members:
            return None
        return self._fail(f"group {group} is lost")

    def _fail(self, error: str) -> Formation:
        assert self.forming is not None
        failed = Formation(self.forming.generation, self.forming.members, error)
        self.forming = None
        return failed

    def close_unused(self, in_use: set[int], here: set[Coordinate]) -> None:
        """Dissolve retired generations that no batch in flight uses, on ranks still here."""
        waiting = []
        for generation, ranks in self._old:
            if generation in in_use:
                waiting.append((generation, ranks))
            else:
                self._outbox.to_ranks((at for at in ranks if at in here), Dissolve(generation))
        self._old = waiting

    def break_now(self, ranks: list[Coordinate]) -> None:
        """A member died: blocked exchanges of the current generation fail at once on `ranks`."""
        if self.current:
            self._outbox.to_ranks(ranks, Dissolve(self.current))
        self._old = []
        self.members = ()
