"""Decode batches in one launch each: CUDA graphs, recorded for a few sizes and replayed.

A batch of single rows that shares no row with another KVP group is padded to the next recorded
size. Its inputs are copied to the addresses that the graph reads, its attention is planned into the
graph's buffers, and one launch does the rest. Small mixed or shared batches run in
`piecewise_graphs`; larger ones launch kernel by kernel, which hides the host's work. Padding rows
write to a spare page and their results are dropped.

`size_for`, which is pure, decides what to replay. Only `GraphRecorder` differs between devices: its
CPU twin calls the same work again, so everything but recording is tested without a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from medha.batch import Chunk
from medha_worker.attention.kernel_interface import AttentionPlan, Span
from medha_worker.inputs import StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.decoder import Decoder
from medha_worker.parallel.collectives import SoloColumn, SoloTensorParallel, TensorParallel

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Recording stops once all graphs together take this much memory.
MOST_BYTES = 2 << 30

_LOG = logging.getLogger("medha.rank")

Work = Callable[[], torch.Tensor]
Replay = Callable[[], None]


class FixedPlan(AttentionPlan, Protocol):
    """Attention plan for up to a fixed number of single rows, in buffers with fixed addresses."""

    def fits(self, spans: Sequence[Span]) -> bool: ...

    def plan(self, spans: Sequence[Span]) -> None:
        """Set what the next replay attends to."""
        ...


# (rows, window) -> fixed plan
Fixed = Callable[[int, int], FixedPlan]


class GraphRecorder(Protocol):
    """Records work on a device."""

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        """Do `work` once; return its result and a function that repeats it into the same memory."""
        ...

    def used_bytes(self) -> int:
        """Return the device memory taken by recordings so far."""
        ...


def size_for(chunks: Sequence[Chunk], group: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that fits a batch of `group`; None if none does.

    Only batches of yielding single rows whose keys are all in this group are replayed.
    """
    plain = all(chunk.length == 1 and chunk.yields and chunk.groups == (group,) for chunk in chunks)
    at = bisect.bisect_left(sizes, len(chunks))
    return sizes[at] if chunks and plain and at < len(sizes) else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Buffers:
    """Fixed addresses that a graph reads: rows (token ids, or hidden states after the first stage),
    rotary factors, and the pages and offsets to write."""

    rows: torch.Tensor
    turns: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor


class Graph:
    """A decode batch of `size` rows through a stage's layers, and to logits in the last stage."""

    def __init__(
        self,
        size: int,
        model: Decoder,
        kv: KvPages,
        turns: torch.Tensor,
        plans: Mapping[int, FixedPlan],
        record: GraphRecorder,
    ) -> None:
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
        """Return hidden states (logits in the last stage) of a batch whose attention is planned."""
        count, b = inputs.rows, self._buffers
        b.rows[:count].copy_(rows)
        b.turns[:count].copy_(inputs.turns)
        b.pages[:count].copy_(inputs.slot_mapping[0])
        b.offsets[:count].copy_(inputs.slot_mapping[1])
        if count < self.size:
            b.pages[count:].fill_(self._spare)
        self._replay()
        return self._out[:count]

    def _work(self) -> torch.Tensor:
        b = self._buffers
        nothing = b.offsets[:0]
        inputs = StepInputs(
            number=0,
            rows=self.size,
            tokens=b.rows,
            positions=nothing,
            device_slots=nothing,
            turns=b.turns,
            attention=dict(self.plans),
            slot_mapping=(b.pages, b.offsets),
            written=None,
            shared=(),
            yielding=(),
            yield_rows=nothing,
        )
        # `forward` overwrites the previous stage's hidden states.
        rows = b.rows if self._model.first else b.rows.clone()
        hidden = self._model.forward(rows, inputs, self._kv, SoloColumn())
        return self._model.logits(hidden) if self._model.last else hidden


class Graphs:
    """The decode graphs of a rank, recorded before it serves."""

    def __init__(self, group: int, graphs: Sequence[Graph]) -> None:
        self._group = group
        self._by_size = {graph.size: graph for graph in graphs}
        self._sizes = sorted(self._by_size)

    def choose(self, chunks: Sequence[Chunk], spans: Mapping[int, Sequence[Span]]) -> Graph | None:
        """Return the graph for a batch, planned for its `spans` by window; None if none fits."""
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
    record: GraphRecorder,
    *,
    sizes: Sequence[int] = SIZES,
    most_bytes: int = MOST_BYTES,
) -> Graphs:
    """Record graphs of all `sizes`, smallest first, until they take `most_bytes`.

    `turns(rows)` allocates rotary factors for that many rows.
    """
    graphs: list[Graph] = []
    for size in sorted(sizes):
        if record.used_bytes() >= most_bytes:
            _LOG.warning(
                "out of graph memory: batches above %d rows run without a graph", graphs[-1].size
            )
            break
        plans = {window: fixed(size, window) for window in windows}
        graphs.append(Graph(size, model, kv, turns(size), plans, record))
    return Graphs(group, graphs)


class CudaGraphRecorder:
    """Records launches into CUDA graphs that share one memory pool.

    Warm-up and recording use one stream, since cuBLAS keeps a workspace per stream. Shards record
    the same work in the same order, their collectives with it.
    """

    def __init__(self, tp: TensorParallel | None = None) -> None:
        self._tp = tp or SoloTensorParallel()
        self._before = torch.cuda.memory_reserved()
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        # Libraries select kernels and allocate on first use, which must not happen while recording.
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads (the page mover) may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._aside, capture_error_mode="thread_local"
        ):
            out = work()
        return out, graph.replay

    def used_bytes(self) -> int:
        """Return the most that any shard took, so that all of them record the same graphs."""
        used = torch.tensor([torch.cuda.memory_reserved() - self._before], device="cuda")
        return int(self._tp.all_gather(used).max())
