"""What a rank knows of each sequence: its pages in the own group, and what sampling needs.

Replicated on every rank of a group and changed only by steps, in step order, so all ranks agree
without talking. Pages are ids; which id is free is the scheduler's business.

    logical pages     0 1 2 3 4 5 6 …          of the sequence, page_tokens each
    own group         0 1     4 5              any set of full pages, ascending
    the tail group          2 3     6 (partial)  the only partial page is the last logical one
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from medha.batch import Move
from medha.errors import EngineError, ProtocolError
from medha.messages.fields import Sampling
from medha.messages.ranks import SequenceStart, Step
from medha_worker.sampler import Draw, History
from medha_worker.seats import NO_PAGE, Seats


class PageTable:
    """Pages of one sequence in one group, ascending by logical page; append is the common case."""

    def __init__(self, pages: Iterable[tuple[int, int]] = ()) -> None:
        self._logical: list[int] = []
        self._ids: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._replace(pages)

    def __len__(self) -> int:
        return len(self._logical)

    def __contains__(self, logical: int) -> bool:
        at = bisect.bisect_left(self._logical, logical)
        return at < len(self._logical) and self._logical[at] == logical

    @property
    def last_logical(self) -> int:
        """Highest logical page held, −1 if none."""
        return self._logical[-1] if self._logical else -1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Page ids in ascending logical order; a view that later appends leave alone."""
        return self._ids[: len(self._logical)]

    def before(self, logical: int) -> int:
        """How many held pages precede `logical`."""
        return bisect.bisect_left(self._logical, logical)

    def since(self, logical: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Numbers and ids of the held pages from `logical` on."""
        cut = self.before(logical)
        return np.array(self._logical[cut:], dtype=np.int64), self.ids[cut:]

    def append(self, first_logical: int, ids: Sequence[int]) -> None:
        """Pages `first_logical`, `first_logical` + 1, … above all held ones."""
        if first_logical <= self.last_logical:
            raise ProtocolError(
                f"page {first_logical} of a sequence comes after page {self.last_logical}:"
                " new pages must follow the held ones"
            )
        used, needed = len(self._logical), len(self._logical) + len(ids)
        if needed > len(self._ids):
            grown = np.empty(max(needed, 2 * len(self._ids)), dtype=np.int64)
            grown[:used] = self._ids[:used]
            self._ids = grown
        self._ids[used:needed] = ids
        self._logical.extend(range(first_logical, first_logical + len(ids)))

    def insert(self, pages: Iterable[tuple[int, int]]) -> None:
        """Add (logical, id) pairs anywhere; those held already stay as they are."""
        held = dict(pages) | dict(zip(self._logical, self.ids.tolist(), strict=True))
        self._replace(held.items())

    def remove(self, logical: Iterable[int]) -> None:
        """Drop logical pages; those not held are ignored."""
        gone = set(logical)
        pairs = zip(self._logical, self.ids.tolist(), strict=True)
        self._replace(pair for pair in pairs if pair[0] not in gone)

    def _replace(self, pages: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(pages)
        self._logical = [logical for logical, _ in ordered]
        self._ids = np.array([page for _, page in ordered], dtype=np.int64)


@dataclasses.dataclass(slots=True)
class SequenceState:
    """One sequence on one rank, at `seat`. `history` exists only where penalties need it; `drawn`:
    this rank drew a token of it, which the device knows before the host does."""

    seq: int
    seat: int
    sampling: Sampling
    prompt_tokens: int
    rope_tokens: int
    pages: PageTable
    history: History | None = None
    drawn: bool = False

    def draw(self, position: int) -> Draw:
        """What sampling the token at `position` needs."""
        return Draw(self.sampling, position, position - self.prompt_tokens, self.history)

    def sampled(self, position: int, token: int) -> None:
        """The host learns that this rank drew `token` at `position`."""
        if self.history is not None:
            self.history.see(position, np.array([token], dtype=np.int32))


class Sequences:
    """The sequences that the ranks of `group` know, each with its seat on the device."""

    def __init__(self, group: int, seats: Seats | None = None) -> None:
        self.group, self.seats = group, seats or Seats()
        self._known: dict[int, SequenceState] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, seq: int) -> bool:
        return seq in self._known

    def __getitem__(self, seq: int) -> SequenceState:
        try:
            return self._known[seq]
        except KeyError:
            raise EngineError(
                f"sequence {seq} is unknown to group {self.group}: its start was never sent"
            ) from None

    def pages_in_use(self) -> set[int]:
        """Ids of all pages that known sequences hold."""
        return {page for state in self._known.values() for page in state.pages.ids.tolist()}

    def apply(self, step: Step) -> None:
        """Forget, switch, then create, as the step says; chunks come after."""
        for seq in step.ends:
            self._forget(seq)
        for move in step.switches:
            self._switch(move)
        for start in step.starts:
            self._forget(start.seq)
            self._known[start.seq] = self._begin(start)

    def append(self, state: SequenceState, first_logical: int, ids: Sequence[int]) -> None:
        """A step brings pages `first_logical`, `first_logical` + 1, … of a sequence."""
        state.pages.append(first_logical, ids)
        logical = np.arange(first_logical, first_logical + len(ids))
        self.seats.put(state.seat, logical, np.array(ids, dtype=np.int64))

    def _begin(self, start: SequenceStart) -> SequenceState:
        history = None
        if start.sampling.penalised:
            tokens = np.frombuffer(start.history, dtype=np.int32)
            history = History(tokens, start.prompt_tokens)
        state = SequenceState(
            seq=start.seq,
            seat=self.seats.take(),
            sampling=start.sampling,
            prompt_tokens=start.prompt_tokens,
            rope_tokens=start.rope_tokens,
            pages=PageTable(start.cached),
            history=history,
        )
        self.seats.put(state.seat, *state.pages.since(0))
        return state

    def _forget(self, seq: int) -> None:
        state = self._known.pop(seq, None)
        if state is not None:
            self.seats.leave(state.seat)

    def _switch(self, move: Move) -> None:
        """A copied move takes effect; a sequence that starts in this very step knows already."""
        state = self._known.get(move.seq)
        if state is None:
            return
        if move.source == self.group:
            state.pages.remove(move.logical)
            gone = np.array(move.logical, dtype=np.int64)
            self.seats.put(state.seat, gone, np.full(len(gone), NO_PAGE))
        if move.target == self.group:
            state.pages.insert(zip(move.logical, move.to_pages, strict=True))
            # Pages that were held already stay as they are.
            self.seats.put(state.seat, *state.pages.since(min(move.logical, default=0)))
