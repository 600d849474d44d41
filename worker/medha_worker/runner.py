"""Runs steps on one rank, in order: sequences, pages, model, peers, sampling, reports.

    step ──> switches checked ──> inputs built (ends, switches, starts, new pages)
         ──> rows from the stage before ──> own layers ──> rows to the next stage
         ──> last stage of a chunk's tail group: logits of yielding rows, sampled, reported

`begin` launches a step and `finish` tells of it. On a GPU the first returns before the device is
done, so that the next step can be built and launched meanwhile: what was drawn stays on the device
for it, and `finish` is where the batch's one wait is. On a CPU nothing is left to wait for.

Obeys: which chunk runs where and when was decided by the scheduler. A broken KVP column (see
`parallel.kvp`) costs only the shared chunks of the batch: their rows yield no token, everything
else goes on. Any other error ends the rank; `kind_of` names it for the controller.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from medha.batch import Batch
from medha.errors import MedhaError
from medha.messages import (
    BatchTokens,
    FetchPages,
    OfferPages,
    RankFailed,
    RankReport,
    StageDone,
    Step,
    TokenOut,
    Withdrawn,
)
from medha.topology import Coordinate
from medha_worker.device import Arriving, Device
from medha_worker.inputs import InputBuilder, StepInputs
from medha_worker.kv.epochs import PageEpochs
from medha_worker.kv.fetches import Copies
from medha_worker.kv.grants import Grant, Grants
from medha_worker.kv.pages import KvPages
from medha_worker.model.decoder import Decoder
from medha_worker.parallel.communicator import PeerLost
from medha_worker.parallel.interface import TensorParallel
from medha_worker.parallel.kvp import GroupColumn
from medha_worker.parallel.mesh import Mesh
from medha_worker.parallel.pipeline import Note, Pipeline
from medha_worker.pieces import Pieces
from medha_worker.sampler import Draw, Drawn

Sample = Callable[[torch.Tensor, Sequence[Draw], Device], Drawn]


@dataclasses.dataclass(slots=True)
class Flight:
    """A batch that was launched; `arriving` comes when the device is done with it."""

    batch: Batch
    began_s: float
    inputs: StepInputs | None = None
    column: GroupColumn | None = None
    note: Note | None = None
    drawn: Drawn | None = None
    arriving: Arriving | None = None

    @property
    def ready(self) -> bool:
        """Whether `Runner.finish` returns at once."""
        return self.arriving is None or self.arriving.ready


class Runner:
    """One rank's compute thread, without its loop. All calls belong to that thread.

    `patience_s`: how long the device may wait for a peer; None where it has none.
    """

    def __init__(
        self,
        at: Coordinate,
        *,
        model: Decoder | Pieces,
        kv: KvPages,
        inputs: InputBuilder,
        tp: TensorParallel,
        pipeline: Pipeline,
        mesh: Mesh,
        copies: Copies,
        epochs: PageEpochs,
        sample: Sample,
        device: Device,
        patience_s: float | None = None,
    ) -> None:
        self.at = at
        self._model, self._kv, self._inputs = model, kv, inputs
        self._tp, self._pipeline, self._mesh = tp, pipeline, mesh
        self._copies, self._epochs, self._sample = copies, epochs, sample
        self._device, self._patience_s = device, patience_s
        self._grants = Grants(at.group, epochs)
        self._failed_generation = 0
        self._finished_s = 0.0
        # sequence -> tokens computed when this group was last its tail
        self._computed: dict[int, int] = {}

    # --- steps --------------------------------------------------------------------------------

    def expect(self, step: Step) -> None:
        """Let the rows of a step that runs next arrive while the one before is computed."""
        rows = sum(chunk.length for chunk in step.batch.of_group(self.at.group))
        if rows:
            self._pipeline.expect(step.batch.number, rows)

    def run(self, step: Step) -> list[RankReport]:
        """`begin`, then `finish`."""
        return self.finish(self.begin(step))

    @torch.inference_mode()
    def begin(self, step: Step) -> Flight:
        """Launch one step; raises PeerLost when a peer of the own group is gone.

        A sequence with penalties needs the host to know what was drawn: see `needs_told`.
        """
        batch, flight = step.batch, Flight(step.batch, time.perf_counter())
        self._account(step)
        if not batch.of_group(self.at.group):
            self._inputs.sequences.apply(step)
            return flight
        inputs = flight.inputs = self._inputs.build(step)
        column = flight.column = self._column(batch, inputs)
        hidden = self._rows(flight, inputs, column)
        flight.began_s = time.perf_counter()
        if inputs.whole is not None:
            done = inputs.whole.run(hidden, inputs)
        else:
            done = self._model.forward(hidden, inputs, self._kv, column)
        self._vote(inputs, column)
        self._pipeline.send(batch.number, done, column.failure is not None)
        if self._pipeline.last and inputs.yielding:
            logits = done if inputs.whole else self._model.logits(done[inputs.yield_rows])
            flight.drawn = self._draw(logits, inputs, column)
        flight.arriving = flight.drawn.arriving if flight.drawn else self._device.fetch()
        return flight

    def finish(self, flight: Flight) -> list[RankReport]:
        """Wait until the device is done with a batch, and tell of it; in the order of `begin`."""
        inputs, column, batch = flight.inputs, flight.column, flight.batch
        if inputs is None or column is None or flight.arriving is None:
            return []
        tokens = self._tokens(flight.drawn, inputs, column) if flight.drawn else ()
        if flight.drawn is None:
            flight.arriving.wait(self._patience_s)
        if flight.note is not None:
            flight.note.broken(self._patience_s)
        began_s, self._finished_s = max(flight.began_s, self._finished_s), time.perf_counter()
        reports: list[RankReport] = self._failure(batch, column)
        if self.at.shard == 0:
            if tokens:
                reports.append(BatchTokens(batch.number, tokens))
            reports.append(StageDone(batch.number, self._finished_s - began_s))
        return reports

    def needs_told(self, step: Step) -> bool:
        """Whether the step draws with penalties on tokens that this rank drew last: batches under
        way must be finished first."""
        known = self._inputs.sequences
        return any(
            chunk.seq in known and known[chunk.seq].history is not None
            for chunk in step.batch.of_group(self.at.group)
        )

    def _account(self, step: Step) -> None:
        """Moves that take effect, sequences that end, pages that are handed out."""
        for move in step.switches:
            if move.target == self.at.group:
                self._copies.switch(move)
        for seq in step.ends:
            self._computed.pop(seq, None)
        for chunk in step.batch.of_group(self.at.group):
            if chunk.tail == self.at.group:
                self._epochs.hand_out(chunk.pages)
                self._computed[chunk.seq] = chunk.end

    def _column(self, batch: Batch, inputs: StepInputs) -> GroupColumn:
        if not inputs.shared:
            return GroupColumn(self.at.group, None)
        try:
            return GroupColumn(self.at.group, self._mesh.column(batch.generation))
        except PeerLost as error:
            return GroupColumn(self.at.group, None, error)

    def _rows(self, flight: Flight, inputs: StepInputs, column: GroupColumn) -> torch.Tensor:
        """Token ids in the first stage, else what the stage before sent."""
        if self._pipeline.first:
            return inputs.tokens
        hidden, note = self._pipeline.receive(inputs.number, inputs.rows)
        if not (note.ready or inputs.shared):
            flight.note = note
        elif note.broken(self._patience_s) and inputs.shared:
            column.fail(PeerLost("the stage before lost its KVP column"))
        return hidden

    def _vote(self, inputs: StepInputs, column: GroupColumn) -> None:
        """What broke one shard's column has spoilt the rows of all."""
        if not inputs.shared or self._tp.size == 1:
            return
        mine = torch.full((1,), float(column.failure is not None), device=self._device.at)
        (votes,) = self._device.fetch(self._tp.all_reduce(mine)).wait(self._patience_s)
        if votes.item() and column.failure is None:
            column.fail(PeerLost("another shard lost its KVP column"))

    def _draw(self, logits: torch.Tensor, inputs: StepInputs, column: GroupColumn) -> Drawn:
        """Draw for the rows that yield here, every shard alike; broken rows change nothing."""
        drawn = self._sample(
            logits, [state.draw(at) for _, state, at in inputs.yielding], self._device
        )
        lost = _lost(inputs, column)
        kept = [i for i, (row, _, _) in enumerate(inputs.yielding) if row not in lost]
        self._inputs.drew(inputs, drawn.tokens, kept)
        return drawn

    def _tokens(
        self, drawn: Drawn, inputs: StepInputs, column: GroupColumn
    ) -> tuple[TokenOut, ...]:
        """What was drawn, as it is told; broken rows bring nothing."""
        lost, tokens = _lost(inputs, column), []
        told = drawn.read(self._patience_s)
        for (row, state, position), (token, logprob) in zip(inputs.yielding, told, strict=True):
            if row not in lost:
                state.sampled(position, token)
                tokens.append(TokenOut(state.seq, token, logprob))
        return tuple(tokens)

    def _failure(self, batch: Batch, column: GroupColumn) -> list[RankReport]:
        """A broken generation is told once."""
        if column.failure is None or batch.generation <= self._failed_generation:
            return []
        self._failed_generation = batch.generation
        return [RankFailed("column", str(column.failure)[:4096], batch.generation, batch.number)]

    # --- moves: ordered with the steps, so that they see what the steps before them left ---------

    def offer(self, order: OfferPages, now: float) -> Grant:
        """Grant a move's pages; raises EngineError when they are not there to give."""
        state = self._inputs.sequences[order.move.seq]
        pages = state.pages
        held = {n: int(pages.ids[pages.before(n)]) for n in order.move.logical if n in pages}
        full, rest = divmod(self._computed.get(order.move.seq, 0), self._kv.page_tokens)
        partial = full if rest else None
        return self._grants.offer(order.move, held, partial, order.lease_s, now)

    def reserve(self, order: FetchPages) -> None:
        """Claim a move's target pages; raises EngineError when they are strange or in use."""
        self._copies.reserve(order.move, self._inputs.sequences.pages_in_use())

    def withdraw(self, move: int, now: float) -> Withdrawn | None:
        """End a grant; None when this rank takes part in the move at its other end, which then
        gives up a copy that stood and will not be switched to."""
        if move in self._copies:
            if self._copies.whole(move):
                self._copies.landed(move, False)
            return None
        return self._grants.withdraw(move, now)


def kind_of(error: BaseException) -> str:
    """What RankFailed calls this error."""
    if isinstance(error, PeerLost):
        return "group"
    text = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text:
        return "memory"
    if isinstance(error, MedhaError):
        return "internal"
    return "model" if isinstance(error, (RuntimeError, ValueError, IndexError)) else "internal"


def _lost(inputs: StepInputs, column: GroupColumn) -> frozenset[int]:
    """Rows that a broken column has spoilt."""
    if column.failure is None:
        return frozenset()
    return frozenset(
        row for rows in inputs.shared for row in range(rows.start, rows.start + rows.length)
    )
