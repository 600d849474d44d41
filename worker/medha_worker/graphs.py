"""Decode batches as one launch each: CUDA graphs, recorded once for a few sizes and replayed.

A batch of single rows that shares nothing with another KVP group is padded up to the next recorded
size; what it brings is copied to where the graph reads it, its attention is planned into the
graph's own buffers, and one launch does the rest. Small batches with a chunk in them, or of which a
part is shared, run in `pieces`; larger ones launch by launch, with work enough for the host to hide
behind. Padding rows write to a page that nobody owns, read one token of it, and mean nothing.

What to replay is decided by `size_for`, which is pure. `Record` is the one thing here that a GPU
does differently: its twin on a CPU calls the same work again, so all but recording is tested there.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from medha.batch import Chunk
from medha_worker.attention.interface import Plan, Span
from medha_worker.inputs import StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.decoder import Decoder
from medha_worker.parallel.interface import SoloColumn

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Recording ends where all graphs together have taken so much memory.
MOST_BYTES = 2 << 30

_LOG = logging.getLogger("medha.rank")

Work = Callable[[], torch.Tensor]
Replay = Callable[[], None]


class FixedPlan(Plan, Protocol):
    """Attention of up to so many single rows, whose buffers stay where they are."""

    def fits(self, spans: Sequence[Span]) -> bool: ...

    def plan(self, spans: Sequence[Span]) -> None:
        """What the next replay attends to."""
        ...


# A fixed plan of so many rows for layers with a window.
Fixed = Callable[[int, int], FixedPlan]


class Record(Protocol):
    """How work is recorded on a device."""

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        """Do `work` for the first time: its result, and what does it again into the same memory."""
        ...

    def used_bytes(self) -> int:
        """What recordings have taken of the device's memory so far."""
        ...


def size_for(chunks: Sequence[Chunk], group: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` for a batch of `group`; None: run it launch by launch.

    Replayed are single rows that all yield, of sequences whose keys are all in this group.
    """
    plain = all(chunk.length == 1 and chunk.yields and chunk.groups == (group,) for chunk in chunks)
    at = bisect.bisect_left(sizes, len(chunks))
    return sizes[at] if chunks and plain and at < len(sizes) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffers:
    """Where a graph reads: rows (token ids in the first stage, else hidden states), their turns,
    and the slots of what they write."""

    rows: torch.Tensor
    turns: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor


class Graph:
    """A decode batch of `size` rows through a stage's layers, in the last stage to its logits."""

    def __init__(
        self, size: int, model: Decoder, kv: KvPages, turns: torch.Tensor,
        plans: Mapping[int, FixedPlan], record: Record,
    ) -> None:  # fmt: skip
        self.size, self.plans = size, dict(plans)
        self._model, self._kv, self._spare = model, kv, kv.pages
        at = kv.memory.device
        shape = (size,) if model.first else (size, model.config.hidden)
        self._buffers = _Buffers(
            rows=torch.zeros(shape, dtype=torch.int64 if model.first else model.dtype, device=at),
            turns=turns,
            pages=torch.full((size,), self._spare, dtype=torch.int64, device=at),
            offsets=torch.zeros(size, dtype=torch.int64, device=at),
        )
        for plan in self.plans.values():
            plan.plan([])
        self._out, self._replay = record(self._work)

    def run(self, rows: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """Hidden states, or in the last stage logits, of a batch whose attention is planned."""
        count, b = inputs.rows, self._buffers
        b.rows[:count].copy_(rows)
        b.turns[:count].copy_(inputs.turns)
        b.pages[:count].copy_(inputs.slots[0])
        b.offsets[:count].copy_(inputs.slots[1])
        if count < self.size:
            b.pages[count:].fill_(self._spare)
        self._replay()
        return self._out[:count]

    def _work(self) -> torch.Tensor:
        b = self._buffers
        nothing = b.offsets[:0]
        inputs = StepInputs(
            number=0, rows=self.size, tokens=b.rows, positions=nothing, seats=nothing,
            turns=b.turns, attention=dict(self.plans), slots=(b.pages, b.offsets), written=None,
            shared=(), yielding=(), yield_rows=nothing,
        )  # fmt: skip
        # Hidden states of the stage before are overwritten.
        rows = b.rows if self._model.first else b.rows.clone()
        hidden = self._model.forward(rows, inputs, self._kv, SoloColumn())
        return self._model.logits(hidden) if self._model.last else hidden


class Graphs:
    """The graphs of one rank, recorded before it serves."""

    def __init__(self, group: int, graphs: Sequence[Graph]) -> None:
        self._group = group
        self._by_size = {graph.size: graph for graph in graphs}
        self._sizes = sorted(self._by_size)

    def choose(self, chunks: Sequence[Chunk], spans: Mapping[int, Sequence[Span]]) -> Graph | None:
        """The graph for a batch, planned for its `spans` by window; None where none will do."""
        size = size_for(chunks, self._group, self._sizes)
        if size is None:
            return None
        graph = self._by_size[size]
        if not all(plan.fits(spans[window]) for window, plan in graph.plans.items()):
            return None
        for window, plan in graph.plans.items():
            plan.plan(spans[window])
        return graph


def recorded(
    group: int,
    model: Decoder,
    kv: KvPages,
    turns: Callable[[int], torch.Tensor],
    fixed: Fixed,
    windows: Sequence[int],
    record: Record,
    *,
    sizes: Sequence[int] = SIZES,
    most_bytes: int = MOST_BYTES,
) -> Graphs:
    """Graphs of all `sizes`, small ones first, until they have taken `most_bytes`.

    `turns(rows)`: memory for the turns of so many rows.
    """
    graphs: list[Graph] = []
    for size in sorted(sizes):
        if record.used_bytes() >= most_bytes:
            _LOG.warning("batches above %d rows run without a graph: memory", graphs[-1].size)
            break
        plans = {window: fixed(size, window) for window in windows}
        graphs.append(Graph(size, model, kv, turns(size), plans, record))
    return Graphs(group, graphs)


class RecordCuda:
    """Records launches into CUDA graphs that share one pool of memory.

    On one stream, first tried and then recorded: cuBLAS keeps a workspace for each that it sees.
    """

    def __init__(self) -> None:
        self._before = torch.cuda.memory_reserved()
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        # Libraries choose and allocate on first use, which no graph may hold.
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads (the mover) may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
        ):
            out = work()
        return out, graph.replay

    def used_bytes(self) -> int:
        return torch.cuda.memory_reserved() - self._before
