"""Per-sequence state of a rank: its pages in the own group, sampling settings and device slot.

Replicated on every rank of a group and changed only by steps, in step order, so all ranks agree
without communication. The scheduler decides which page ids are free.

    logical pages     0 1 2 3 4 5 6 …          of the sequence, page_tokens each
    own group         0 1     4 5              any set of full pages, ascending
    the tail group          2 3     6 (partial)  the only partial page is the last logical one

Every sequence has a slot, a row of the tensors that stay on the device: see `DeviceSlots`.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.batch import Move
from medha.errors import EngineError, ProtocolError
from medha.messages.fields import Sampling
from medha.messages.ranks import SequenceStart, Step
from medha_worker.device import CPU, ComputeDevice
from medha_worker.grammar_masks import Constraint, Grammars
from medha_worker.penalties import PenaltyTable, TokenCounts
from medha_worker.sampler import History, SampledRow

Ids = npt.NDArray[np.int64]
NO_PAGE = -1


class PageTable:
    """Pages of one sequence in one group, ascending by logical page; append is the common case.

    `ids`: page ids in this order; a view that later appends leave alone.
    """

    def __init__(self, pages: Iterable[tuple[int, int]] = ()) -> None:
        self._logical: list[int] = []
        self._room: Ids = np.empty(0, dtype=np.int64)
        self.ids = self._room
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

    def ends_with(self, first: int, last: int) -> bool:
        """Return True if the pages from `first` on are all of `first` … `last`."""
        logical, count = self._logical, last - first + 1
        return len(logical) >= count and logical[-1] == last and logical[-count] == first

    def before(self, logical: int) -> int:
        """Return the number of held pages before `logical`."""
        return bisect.bisect_left(self._logical, logical)

    def since(self, logical: int) -> tuple[Ids, Ids]:
        """Numbers and ids of the held pages from `logical` on."""
        cut = self.before(logical)
        return np.array(self._logical[cut:], dtype=np.int64), self.ids[cut:]

    def append(self, first_logical: int, ids: Sequence[int]) -> None:
        """Append pages `first_logical`, `first_logical` + 1, … after all held ones."""
        if first_logical <= self.last_logical:
            raise ProtocolError(
                f"page {first_logical} of a sequence comes after page {self.last_logical}:"
                " new pages must follow the held ones"
            )
        used, needed = len(self._logical), len(self._logical) + len(ids)
        if needed > len(self._room):
            grown = np.empty(max(needed, 2 * len(self._room)), dtype=np.int64)
            grown[:used] = self.ids
            self._room = grown
        self._room[used:needed] = ids
        self.ids = self._room[:needed]
        self._logical.extend(range(first_logical, first_logical + len(ids)))

    def insert(self, pages: Iterable[tuple[int, int]]) -> None:
        """Add (logical, id) pairs anywhere; pages already held keep their ids."""
        held = dict(pages) | dict(zip(self._logical, self.ids.tolist(), strict=True))
        self._replace(held.items())

    def remove(self, logical: Iterable[int]) -> None:
        """Drop logical pages; pages not held are ignored."""
        gone = set(logical)
        pairs = zip(self._logical, self.ids.tolist(), strict=True)
        self._replace(pair for pair in pairs if pair[0] not in gone)

    def _replace(self, pages: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(pages)
        self._logical = [logical for logical, _ in ordered]
        self.ids = self._room = np.array([page for _, page in ordered], dtype=np.int64)


@dataclasses.dataclass(slots=True)
class SequenceState:
    """State of a sequence on this rank, with its device slot.

    `counts` exist only for penalties, `constraint` for a grammar, `history` for a grammar or bad
    words, all three only where tokens are sampled; `prompt` only if its tokens have log
    probabilities. `adapter`: its name, or empty. `drawn` means that this rank drew its last token,
    which the device holds before the host does.
    """

    seq: int
    slot: int
    sampling: Sampling
    prompt_tokens: int
    rope_tokens: int
    pages: PageTable
    history: History | None = None
    constraint: Constraint | None = None
    counts: TokenCounts | None = None
    prompt: Ids | None = None
    adapter: str = ""
    drawn: bool = False

    def draw(self, position: int) -> SampledRow:
        """Return the sampling inputs for the token at `position`."""
        emitted = position - self.prompt_tokens
        return SampledRow(
            self.sampling, position, emitted, self.history, self.constraint, self.counts
        )

    def see(self, position: int, tokens: npt.NDArray[np.int32]) -> None:
        """Take in tokens that the host knows, from `position` on."""
        if self.history is not None:
            self.history.see(position, tokens)
        if self.counts is not None:
            self.counts.see(position, tokens)

    def sampled(self, position: int, token: int) -> None:
        """Record on the host that this rank drew `token` at `position`."""
        if self.history is not None:
            self.history.see(position, np.array([token], dtype=np.int32))


class DeviceSlots:
    """Rows for `slots` sequences of `width` pages, on the device from step to step.

        last    [slots]         the token that this rank drew last; the host may not have it yet
        table   [slots, width]  page id of each logical page of the own group, −1 where it holds
                                none: a copy of the sequences' page tables

    Page changes are staged on the host and copied at once when a step that needs them is built. A
    decode that takes no new page copies nothing. Slots of ended sequences are reused. The tensors
    grow by doubling, up to the longest sequence.
    """

    def __init__(self, device: ComputeDevice = CPU, slots: int = 16, width: int = 16) -> None:
        self._device, self._count, self._width = device, slots, width
        self.last = torch.zeros(slots, dtype=torch.int64, device=device.at)
        self.table = self._empty(slots, width)
        self._free = list(range(slots))[::-1]
        self._cleared: list[int] = []
        self._staged: list[tuple[int, Ids, Ids]] = []

    def take(self) -> int:
        """Return a free slot; its table row is empty after the next `flush`."""
        if not self._free:
            self._grow(2 * self._count, self._width)
        slot = self._free.pop()
        self._cleared.append(slot)
        return slot

    def release(self, slot: int) -> None:
        """Free the slot of a sequence that ended, and drop its staged changes."""
        self._staged = [change for change in self._staged if change[0] != slot]
        self._free.append(slot)

    def put(self, slot: int, logical: Ids, ids: Ids) -> None:
        """Stage page `ids` for these logical pages of a slot (−1: no longer held)."""
        if not len(logical):
            return
        needed = int(logical.max()) + 1
        if needed > self._width:
            self._grow(self._count, max(needed, 2 * self._width))
        self._staged.append((slot, logical, ids))

    def flush(self) -> None:
        """Copy staged changes to the device; the last of several changes to a page wins."""
        if self._cleared:
            cleared = np.array(self._cleared, dtype=np.int64)
            self._cleared = []
            self.table.index_fill_(0, self._device.upload(cleared)[0], NO_PAGE)
        if not self._staged:
            return
        places = np.concatenate([self.places(slot, pages) for slot, pages, _ in self._staged])
        ids = np.concatenate([ids for _, _, ids in self._staged]).astype(np.int32)
        if len({slot for slot, _, _ in self._staged}) < len(self._staged):
            places, first = np.unique(places[::-1], return_index=True)
            ids = ids[::-1][first]
        self._staged = []
        where, what = self._device.upload(places, ids)
        self.table.view(-1).index_copy_(0, where, what)

    def places(self, slots: Ids | int, logical: Ids) -> Ids:
        """Return where the table holds pairs of slot and logical page, until it grows."""
        return slots * self._width + logical

    def pages(self, places: torch.Tensor) -> torch.Tensor:
        """Return the page ids (int64) at `places`."""
        return self.table.view(-1).index_select(0, places).long()

    def set_last(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store the tokens that the sequences at `slots` drew."""
        self.last.index_copy_(0, slots, tokens)

    def _empty(self, slots: int, width: int) -> torch.Tensor:
        return torch.full((slots, width), NO_PAGE, dtype=torch.int32, device=self._device.at)

    def _grow(self, slots: int, width: int) -> None:
        grown, last = self._empty(slots, width), self.last.new_zeros(slots)
        grown[: self._count, : self._width] = self.table
        last[: self._count] = self.last
        self._free[:0] = range(slots - 1, self._count - 1, -1)
        self.table, self.last = grown, last
        self._count, self._width = slots, width


class Sequences:
    """The sequences of `group`, each with a device slot.

    `grammars` and `penalties` exist where tokens are sampled.
    """

    def __init__(
        self,
        group: int,
        device_slots: DeviceSlots | None = None,
        grammars: Grammars | None = None,
        penalties: PenaltyTable | None = None,
    ) -> None:
        self._grammars, self._penalties = grammars, penalties
        self.group, self.device_slots = group, device_slots or DeviceSlots()
        self._known: dict[int, SequenceState] = {}
        self._with_history: set[int] = set()

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

    def need_output(self, seqs: Iterable[int]) -> bool:
        """Return True if one of the sequences has a grammar or bad words here."""
        return bool(self._with_history) and not self._with_history.isdisjoint(seqs)

    def pages_in_use(self) -> set[int]:
        """Return the ids of all pages that sequences hold."""
        return {page for state in self._known.values() for page in state.pages.ids.tolist()}

    def apply(self, step: Step) -> None:
        """Apply the step's ends, switches and starts, in this order; its chunks come later."""
        for seq in step.ends:
            self._forget(seq)
        for move in step.switches:
            self._switch(move)
        for start in step.starts:
            self._forget(start.seq)
            state = self._known[start.seq] = self._begin(start)
            if state.history is not None:
                self._with_history.add(start.seq)

    def append(self, state: SequenceState, first_logical: int, ids: Sequence[int]) -> None:
        """Add the pages that a step brings for a sequence, from `first_logical` on."""
        state.pages.append(first_logical, ids)
        logical = np.arange(first_logical, first_logical + len(ids))
        self.device_slots.put(state.slot, logical, np.array(ids, dtype=np.int64))

    def _begin(self, start: SequenceStart) -> SequenceState:
        history, constraint, counts, prompt = None, None, None, None
        tokens = np.frombuffer(start.history, dtype=np.int32)
        if start.sampling.prompt_logprobs is not None:
            prompt = tokens[: start.prompt_tokens].astype(np.int64)
        if start.sampling.penalised and self._penalties is not None:
            counts = self._penalties.begin(start.sampling, tokens, start.prompt_tokens)
        if start.sampling.grammar and self._grammars is not None:
            constraint = self._grammars.begin(start.sampling)
        if start.sampling.needs_output and self._penalties is not None:
            history = History(tokens, start.prompt_tokens)
        state = SequenceState(
            seq=start.seq,
            slot=self.device_slots.take(),
            sampling=start.sampling,
            prompt_tokens=start.prompt_tokens,
            rope_tokens=start.rope_tokens,
            pages=PageTable(start.cached),
            history=history,
            constraint=constraint,
            counts=counts,
            prompt=prompt,
            adapter=start.adapter,
        )
        self.device_slots.put(state.slot, *state.pages.since(0))
        return state

    def _forget(self, seq: int) -> None:
        state = self._known.pop(seq, None)
        self._with_history.discard(seq)
        if state is not None:
            self.device_slots.release(state.slot)
            if state.counts is not None:
                state.counts.table.release(state.counts)

    def _switch(self, move: Move) -> None:
        """Apply a completed move; a sequence that starts in this step has it already."""
        state = self._known.get(move.seq)
        if state is None:
            return
        if move.source == self.group:
            state.pages.remove(move.logical)
            gone = np.array(move.logical, dtype=np.int64)
            self.device_slots.put(state.slot, gone, np.full(len(gone), NO_PAGE))
        if move.target == self.group:
            state.pages.insert(zip(move.logical, move.to_pages, strict=True))
            # Pages already held keep their ids.
            self.device_slots.put(state.slot, *state.pages.since(min(move.logical, default=0)))
