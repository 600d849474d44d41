"""Runs steps on one rank, in order: sequences, pages, model, peers, sampling, reports.

    step ──> switches checked ──> inputs built (ends, switches, starts, new pages)
         ──> rows from the stage before ──> own layers ──> rows to the next stage
         ──> last stage of a chunk's tail group: logits of yielding rows, sampled, reported

Obeys: which chunk runs where and when was decided by the scheduler. A broken KVP column (see
`parallel.kvp`) costs only the shared chunks of the batch: their rows yield no token, everything
else goes on. Any other error ends the rank; `kind_of` names it for the controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from medha.batch import Batch
from medha.errors import MedhaError
from medha.messages import (
    BatchTokens,
    FetchPages,
    Logprob,
    OfferPages,
    RankFailed,
    RankReport,
    StageDone,
    Step,
    TokenOut,
    Withdrawn,
)
from medha.topology import Coordinate
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
from medha_worker.parallel.pipeline import Pipeline
from medha_worker.sampler import Draw

Sample = Callable[[torch.Tensor, Sequence[Draw]], list[tuple[int, Logprob | None]]]


class Runner:
    """One rank's compute thread, without its loop. All calls belong to that thread."""

    def __init__(
        self,
        at: Coordinate,
        *,
        model: Decoder,
        kv: KvPages,
        inputs: InputBuilder,
        tp: TensorParallel,
        pipeline: Pipeline,
        mesh: Mesh,
        copies: Copies,
        epochs: PageEpochs,
        sample: Sample,
    ) -> None:
        self.at = at
        self._model, self._kv, self._inputs = model, kv, inputs
        self._tp, self._pipeline, self._mesh = tp, pipeline, mesh
        self._copies, self._epochs, self._sample = copies, epochs, sample
        self._grants = Grants(at.group, epochs)
        self._failed_generation = 0
        # sequence -> tokens computed when this group was last its tail
        self._computed: dict[int, int] = {}

    # --- steps --------------------------------------------------------------------------------

    def expect(self, step: Step) -> None:
        """Let the rows of a step that runs next arrive while the one before is computed."""
        rows = sum(chunk.length for chunk in step.batch.of_group(self.at.group))
        if rows:
            self._pipeline.expect(step.batch.number, rows)

    def run(self, step: Step) -> list[RankReport]:
        """Run one step; raises PeerLost when a peer of the own group is gone."""
        batch = step.batch
        for move in step.switches:
            if move.target == self.at.group:
                self._copies.switch(move)
        for seq in step.ends:
            self._computed.pop(seq, None)
        chunks = batch.of_group(self.at.group)
        if not chunks:
            self._inputs.sequences.apply(step)
            return []
        for chunk in chunks:
            if chunk.tail == self.at.group:
                self._epochs.hand_out(chunk.pages)
                self._computed[chunk.seq] = chunk.end
        inputs = self._inputs.build(step)
        column = self._column(batch, inputs)
        hidden, broken = self._rows(inputs)
        if broken:
            column.fail(PeerLost("the stage before lost its KVP column"))
        began = time.perf_counter()
        hidden = self._model.forward(hidden, inputs, self._kv, column)
        self._vote(inputs, column)
        self._pipeline.send(batch.number, hidden, column.failure is not None)
        tokens = self._tokens(hidden, inputs, column) if self._pipeline.last else ()
        reports: list[RankReport] = self._failure(batch, column)
        if self.at.shard == 0:
            if tokens:
                reports.append(BatchTokens(batch.number, tokens))
            reports.append(StageDone(batch.number, time.perf_counter() - began))
        return reports

    def _column(self, batch: Batch, inputs: StepInputs) -> GroupColumn:
        if not inputs.shared:
            return GroupColumn(self.at.group, None)
        try:
            return GroupColumn(self.at.group, self._mesh.column(batch.generation))
        except PeerLost as error:
            return GroupColumn(self.at.group, None, error)

    def _rows(self, inputs: StepInputs) -> tuple[torch.Tensor, bool]:
        if self._pipeline.first:
            return inputs.tokens, False
        hidden, broken = self._pipeline.receive(inputs.number, inputs.rows)
        return hidden, broken and bool(inputs.shared)

    def _vote(self, inputs: StepInputs, column: GroupColumn) -> None:
        """What broke one shard's column has spoilt the rows of all."""
        if not inputs.shared or self._tp.size == 1:
            return
        mine = 0.0 if column.failure is None else 1.0
        if self._tp.all_reduce(torch.tensor([mine])).item() and column.failure is None:
            column.fail(PeerLost("another shard lost its KVP column"))

    def _tokens(
        self, hidden: torch.Tensor, inputs: StepInputs, column: GroupColumn
    ) -> tuple[TokenOut, ...]:
        """Sample the rows that yield here; broken rows bring nothing. Every shard draws alike."""
        if not inputs.yielding:
            return ()
        logits = self._model.logits(hidden[inputs.yield_rows])
        drawn = self._sample(logits, [state.draw(at) for _, state, at in inputs.yielding])
        lost = _shared_rows(inputs) if column.failure is not None else frozenset()
        tokens = []
        for (row, state, position), (token, logprob) in zip(inputs.yielding, drawn, strict=True):
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


def _shared_rows(inputs: StepInputs) -> frozenset[int]:
    return frozenset(
        row for rows in inputs.shared for row in range(rows.start, rows.start + rows.length)
    )
