"""Run steps on one rank, in order.

    step ──> switches checked ──> inputs built (ends, switches, starts, new pages)
         ──> rows from the stage before ──> own layers ──> rows to the next stage
         ──> last stage of a chunk's tail group: logits of yielding rows, sampled, reported

`begin` launches a step and `finish` reports it. On a GPU, `begin` returns before the device is
done, so the host can build and launch the next step meanwhile. Sampled tokens stay on the device
for that step; only `finish` waits. On a CPU both are synchronous.

The scheduler decides which chunk runs where and when. A broken KVP column (see `parallel.kvp`)
costs only the batch's shared chunks: their rows yield no token. Any other error ends the rank, and
`kind_of` classifies it for the controller.
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
    ScoredPrompt,
    StageDone,
    Step,
    TokenOut,
    Withdrawn,
)
from medha.topology import Coordinate
from medha_worker.device import ComputeDevice, PendingFetch
from medha_worker.inputs import InputBuilder, StepInputs
from medha_worker.kv.fetches import MoveTargets
from medha_worker.kv.page_leases import PageLease, PageLeases
from medha_worker.kv.pages import KvPages, PageEpochs
from medha_worker.model.decoder import Decoder
from medha_worker.parallel.collectives import PeerLost, TensorParallel
from medha_worker.parallel.kvp import GroupColumn
from medha_worker.parallel.mesh import Mesh
from medha_worker.parallel.pipeline_parallel import Note, Pipeline
from medha_worker.piecewise_graphs import PiecewiseGraphs
from medha_worker.sampler import SampledRow, SampledTokens, logprobs_of, score
from medha_worker.sequences import SequenceState

SCORED_ROWS = 256
Sample = Callable[[torch.Tensor, Sequence[SampledRow], ComputeDevice], SampledTokens]


@dataclasses.dataclass(slots=True)
class LaunchedBatch:
    """A batch launched on the device; `pending` is ready once the device has finished it."""

    batch: Batch
    began_s: float
    inputs: StepInputs | None = None
    column: GroupColumn | None = None
    note: Note | None = None
    drawn: SampledTokens | None = None
    scored: list[tuple[SequenceState, int, PendingFetch]] = dataclasses.field(default_factory=list)
    pending: PendingFetch | None = None

    @property
    def ready(self) -> bool:
        """True if `Runner.finish` would return at once."""
        return self.pending is None or self.pending.ready


class Runner:
    """The compute thread of a rank, without its loop. All calls belong to that thread.

    `patience_s` is the longest the device may wait for a peer; None without peers.
    """

    def __init__(
        self,
        at: Coordinate,
        *,
        model: Decoder | PiecewiseGraphs,
        kv: KvPages,
        inputs: InputBuilder,
        tp: TensorParallel,
        pipeline: Pipeline,
        mesh: Mesh,
        copies: MoveTargets,
        epochs: PageEpochs,
        sample: Sample,
        device: ComputeDevice,
        patience_s: float | None = None,
    ) -> None:
        self.at = at
        self._model, self._kv, self._inputs = model, kv, inputs
        self._tp, self._pipeline, self._mesh = tp, pipeline, mesh
        self._copies, self._epochs, self._sample = copies, epochs, sample
        self._device, self._patience_s = device, patience_s
        self._leases = PageLeases(at.group, epochs)
        self._failed_generation = 0
        self._finished_s = 0.0
        # sequence -> tokens computed when this group was last its tail
        self._computed: dict[int, int] = {}

    # --- steps --------------------------------------------------------------------------------

    def expect(self, step: Step) -> None:
        """Post the receive for a later step's rows while the current step is computed."""
        rows = sum(chunk.length for chunk in step.batch.of_group(self.at.group))
        if rows:
            self._pipeline.expect(step.batch.number, rows)

    def run(self, step: Step) -> list[RankReport]:
        """`begin`, then `finish`."""
        return self.finish(self.begin(step))

    @torch.inference_mode()
    def begin(self, step: Step) -> LaunchedBatch:
        """Launch a step. Raises PeerLost when a peer of the own group is gone.

        If a sequence has a grammar, finish earlier batches first: see `needs_host_tokens`.
        """
        batch, launched = step.batch, LaunchedBatch(step.batch, time.perf_counter())
        self._account(step)
        if not batch.of_group(self.at.group):
            self._inputs.sequences.apply(step)
            return launched
        inputs = launched.inputs = self._inputs.build(step)
        column = launched.column = self._column(batch, inputs)
        hidden = self._rows(launched, inputs, column)
        launched.began_s = time.perf_counter()
        if inputs.whole is not None:
            done = inputs.whole.run(hidden, inputs)
        else:
            done = self._model.forward(hidden, inputs, self._kv, column)
        self._vote(inputs, column)
        self._pipeline.send(batch.number, done, column.failure is not None)
        if self._pipeline.last:
            launched.scored = self._score(done, inputs)
        if self._pipeline.last and inputs.yielding:
            logits = done if inputs.whole else self._model.logits(done[inputs.yield_rows])
            launched.drawn = self._draw(logits, inputs, column)
        launched.pending = launched.drawn.pending if launched.drawn else self._device.fetch()
        return launched

    def finish(self, launched: LaunchedBatch) -> list[RankReport]:
        """Wait until the device has finished a batch, and return its reports. Call in `begin`
        order."""
        inputs, column, batch = launched.inputs, launched.column, launched.batch
        if inputs is None or column is None or launched.pending is None:
            return []
        tokens = self._tokens(launched.drawn, inputs, column) if launched.drawn else ()
        if launched.drawn is None:
            launched.pending.wait(self._patience_s)
        if launched.note is not None:
            launched.note.broken(self._patience_s)
        began_s, self._finished_s = max(launched.began_s, self._finished_s), time.perf_counter()
        reports: list[RankReport] = self._failure(batch, column)
        if self.at.shard == 0:
            reports += self._scores(launched, column)
            if tokens:
                reports.append(BatchTokens(batch.number, tokens))
            reports.append(StageDone(batch.number, self._finished_s - began_s))
        return reports

    def needs_host_tokens(self, step: Step) -> bool:
        """True if a sampled sequence has a grammar or bad words, which need its tokens on the host.

        Batches in flight must then be finished before the step begins.
        """
        chunks = step.batch.of_group(self.at.group)
        return self._inputs.sequences.need_output(chunk.seq for chunk in chunks)

    def _account(self, step: Step) -> None:
        """Apply switches, ended sequences and newly allocated pages to page ownership."""
        for move in step.switches:
            if move.target == self.at.group:
                self._copies.switch(move)
        for seq in step.ends:
            self._computed.pop(seq, None)
        group = self.at.group
        for chunk in step.batch.chunks:
            if chunk.tail == group:  # one of the chunk's groups
                if chunk.pages:
                    self._epochs.hand_out(chunk.pages)
                self._computed[chunk.seq] = chunk.end

    def _column(self, batch: Batch, inputs: StepInputs) -> GroupColumn:
        if not inputs.shared:
            return GroupColumn(self.at.group, None)
        try:
            return GroupColumn(self.at.group, self._mesh.column(batch.generation))
        except PeerLost as error:
            return GroupColumn(self.at.group, None, error)

    def _rows(
        self, launched: LaunchedBatch, inputs: StepInputs, column: GroupColumn
    ) -> torch.Tensor:
        """Return token ids in the first stage, else the rows sent by the stage before."""
        if self._pipeline.first:
            return inputs.tokens
        hidden, note = self._pipeline.receive(inputs.number, inputs.rows)
        if not (note.ready or inputs.shared):
            launched.note = note
        elif note.broken(self._patience_s) and inputs.shared:
            column.fail(PeerLost("the stage before lost its KVP column"))
        return hidden

    def _vote(self, inputs: StepInputs, column: GroupColumn) -> None:
        """Break the shared rows of every shard if one shard's column failed."""
        if not inputs.shared or self._tp.size == 1:
            return
        mine = torch.full((1,), float(column.failure is not None), device=self._device.at)
        (votes,) = self._device.fetch(self._tp.all_reduce(mine)).wait(self._patience_s)
        if votes.item() and column.failure is None:
            column.fail(PeerLost("another shard lost its KVP column"))

    def _draw(self, logits: torch.Tensor, inputs: StepInputs, column: GroupColumn) -> SampledTokens:
        """Sample the yielding rows, identically on every shard; broken rows change no state."""
        drawn = self._sample(
            logits, [state.draw(at) for _, state, at in inputs.yielding], self._device
        )
        kept: Sequence[int] = range(len(inputs.yielding))
        if lost := _lost(inputs, column):
            kept = [i for i in kept if inputs.yielding[i][0] not in lost]
        self._inputs.drew(inputs, drawn.tokens, kept)
        return drawn

    def _score(
        self, done: torch.Tensor, inputs: StepInputs
    ) -> list[tuple[SequenceState, int, PendingFetch]]:
        """Launch the log probabilities of the prompts that want them, some rows at a time."""
        scored = []
        for row, state, position, count in inputs.scored:
            if state.prompt is None:
                continue
            for cut in range(0, count, SCORED_ROWS):
                size = min(SCORED_ROWS, count - cut)
                hidden = done[row + cut : row + cut + size]
                logits = hidden if inputs.whole else self._model.logits(hidden)
                first = position + cut
                targets = state.prompt[first : first + size]
                wanted = state.sampling.prompt_logprobs or 0
                scored.append((state, first, score(logits, targets, wanted, self._device)))
        return scored

    def _scores(self, launched: LaunchedBatch, column: GroupColumn) -> list[ScoredPrompt]:
        """Return the log probabilities of prompts; broken rows yield none."""
        inputs = launched.inputs
        if inputs is None:
            return []
        lost = _lost(inputs, column)
        broken = {state.seq for row, state, _, _ in inputs.scored if row in lost}
        return [
            ScoredPrompt(
                state.seq,
                first,
                logprobs_of(pending.wait(self._patience_s), state.sampling.prompt_logprobs or 0),
            )
            for state, first, pending in launched.scored
            if state.seq not in broken
        ]

    def _tokens(
        self, drawn: SampledTokens, inputs: StepInputs, column: GroupColumn
    ) -> tuple[TokenOut, ...]:
        """Return the sampled tokens to report; broken rows yield none."""
        lost, tokens = _lost(inputs, column), []
        sampled = drawn.read(self._patience_s)
        for (row, state, position), (token, logprob) in zip(inputs.yielding, sampled, strict=True):
            if row not in lost:
                state.sampled(position, token)
                error = state.constraint.error if state.constraint is not None else ""
                tokens.append(TokenOut(state.seq, token, logprob, error))
        return tuple(tokens)

    def _failure(self, batch: Batch, column: GroupColumn) -> list[RankReport]:
        """Report a broken generation, once."""
        if column.failure is None or batch.generation <= self._failed_generation:
            return []
        self._failed_generation = batch.generation
        return [RankFailed("column", str(column.failure)[:4096], batch.generation, batch.number)]

    # --- moves: ordered with the steps, so that they see what the steps before them left ---------

    def offer(self, order: OfferPages, now: float) -> PageLease:
        """Lease a move's pages to the target group. Raises EngineError if this rank does not hold
        them."""
        state = self._inputs.sequences[order.move.seq]
        pages = state.pages
        held = {n: int(pages.ids[pages.before(n)]) for n in order.move.logical if n in pages}
        full, rest = divmod(self._computed.get(order.move.seq, 0), self._kv.page_tokens)
        partial = full if rest else None
        return self._leases.offer(order.move, held, partial, order.lease_s, now)

    def reserve(self, order: FetchPages) -> None:
        """Claim a move's target pages. Raises EngineError if they are out of range or in use."""
        self._copies.reserve(order.move, self._inputs.sequences.pages_in_use())

    def withdraw(self, move: int, now: float) -> Withdrawn | None:
        """End a lease and report whether its pages stayed intact.

        Return None if this rank is the target of the move: it then drops its copy.
        """
        if move in self._copies:
            if self._copies.whole(move):
                self._copies.landed(move, False)
            return None
        return self._leases.withdraw(move, now)


def kind_of(error: BaseException) -> str:
    """Return the kind of error that RankFailed reports."""
    if isinstance(error, PeerLost):
        return "group"
    text = str(error).lower()
    if isinstance(error, MemoryError) or "out of memory" in text or "can't allocate" in text:
        return "memory"
    if isinstance(error, MedhaError):
        return "internal"
    return "model" if isinstance(error, (RuntimeError, ValueError, IndexError)) else "internal"


def _lost(inputs: StepInputs, column: GroupColumn) -> frozenset[int]:
    """Return the rows spoiled by a broken column."""
    if column.failure is None:
        return frozenset()
    return frozenset(
        row for rows in inputs.shared for row in range(rows.start, rows.start + rows.length)
    )
