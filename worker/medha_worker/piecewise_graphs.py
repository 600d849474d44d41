"""Piecewise CUDA graphs: small batches with chunks or shared rows, in few launches.

A CUDA graph can hold neither attention over chunks, whose launches depend on the batch, nor a KVP
column's exchange. Everything between two attentions, up to storing keys and values, treats each row
alone. So it is recorded for a few row counts and replayed for any batch that fits:

    enter, before 0 │ attend 0 │ after 0, before 1 │ attend 1 │ … │ attend L−1 │ after L−1
    recorded          launched   recorded            launched        launched     recorded

Padding rows are computed and dropped: no row reads another here. Their keys go to a spare page, as
do those of rows that another group stores. Whole-batch `graphs` take
precedence. Batches above the largest size are launched normally, as the device has enough work to
hide the host, and so are those with adapters, whose products depend on the batch. `fitting`, which
is pure, picks sizes; `graphs` records.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence

import torch

from medha_worker.graphs import MOST_BYTES, GraphRecorder, Replay
from medha_worker.inputs import StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.decoder import Decoder
from medha_worker.parallel.collectives import KvpColumn

SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512)

_LOG = logging.getLogger("medha.rank")


def fitting(rows: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `sizes` that holds `rows`; None: launch normally."""
    at = bisect.bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None


class _PiecewiseGraph:
    """The layers of a stage for `size` rows, split at each attention."""

    def __init__(
        self, size: int, model: Decoder, kv: KvPages, turns: torch.Tensor, record: GraphRecorder
    ) -> None:
        self._model, self._turns, self._layers = model, turns, model.weights.layers
        self._kv = kv
        c, at = model.config, turns.device
        rows = (size,) if model.first else (size, c.hidden)
        dtype = model.dtype
        self._rows = torch.zeros(rows, dtype=torch.int64 if model.first else dtype, device=at)
        self._hidden = torch.zeros(size, c.hidden, dtype=dtype, device=at)
        self._qkv = torch.zeros(size, model.row_heads, c.head_dim, dtype=dtype, device=at)
        rows_kept = self._qkv[:, model.heads :]
        self._kept = rows_kept.to(kv.memory.dtype)  # the same memory if the types are
        self._pages = torch.full((size,), kv.pages, dtype=torch.int64, device=at)
        self._offsets = torch.zeros(size, dtype=torch.int64, device=at)
        attended = model.heads * model.state_dim
        self._attended = torch.zeros(size, attended, dtype=dtype, device=at)
        self._replays: list[Replay] = [
            record(self._piece(place))[1] for place in range(len(self._layers) + 1)
        ]

    def forward(
        self, x: torch.Tensor, inputs: StepInputs, kv: KvPages, column: KvpColumn
    ) -> torch.Tensor:
        """Run the stage like `Decoder.forward`, for at most `size` rows."""
        count, model = inputs.rows, self._model
        self._rows[:count].copy_(x)
        self._turns[:count].copy_(inputs.turns)
        self._place(inputs)
        qkv, kept, attended = self._qkv[:count], self._kept[:count], self._attended[:count]
        for number, replay in zip(model.layers, self._replays, strict=False):
            replay()
            attended.copy_(model.attended(number, qkv, kept, inputs, kv, column))
        self._replays[-1]()
        return self._hidden[:count]

    def _place(self, inputs: StepInputs) -> None:
        """Set where keys and values go."""
        count, (pages, offsets) = inputs.rows, inputs.slot_mapping
        if inputs.written is None:
            self._pages[:count].copy_(pages)
            self._offsets[:count].copy_(offsets)
            self._pages[count:].fill_(self._kv.pages)
        else:
            self._pages.fill_(self._kv.pages)
            self._pages.index_copy_(0, inputs.written, pages)
            self._offsets.index_copy_(0, inputs.written, offsets)

    def _piece(self, place: int) -> Callable[[], torch.Tensor]:
        """Return the work before attention number `place`, from the previous attention on."""
        model, layers, hidden = self._model, self._layers, self._hidden

        def work() -> torch.Tensor:
            if place:
                model.after(layers[place - 1], hidden, self._attended)
            else:
                hidden.copy_(model.enter(self._rows))
            if place == len(layers):
                return hidden
            qkv = self._qkv.copy_(model.before(layers[place], hidden, self._turns))
            slots = self._pages, self._offsets
            kept = model.store(model.layers[place], qkv, self._kv, slots)
            if kept.data_ptr() != self._kept.data_ptr():
                self._kept.copy_(kept)
            return qkv

        return work


class PiecewiseGraphs:
    """A stage's model whose small batches run in pieces; a drop-in for its Decoder.

    `kv` has a spare page. `turns(rows)` allocates rotary factors for that many rows. Sizes are
    recorded from the smallest on, until all recordings together take `most_bytes`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        kv: KvPages,
        turns: Callable[[int], torch.Tensor],
        record: GraphRecorder,
        *,
        sizes: Sequence[int] = SIZES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.model = model
        self._cuts: dict[int, _PiecewiseGraph] = {}
        for size in sorted(sizes):
            if record.used_bytes() >= most_bytes:
                _LOG.warning(
                    "out of graph memory: batches above %d rows run without piecewise graphs",
                    self.largest,
                )
                break
            self._cuts[size] = _PiecewiseGraph(size, model, kv, turns(size), record)
        self._sizes = sorted(self._cuts)

    @property
    def largest(self) -> int:
        """Rows of the largest batch that runs in pieces."""
        return max(self._cuts, default=0)

    @torch.inference_mode()
    def forward(
        self, x: torch.Tensor, inputs: StepInputs, kv: KvPages, column: KvpColumn
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        size = None if inputs.adapters else fitting(inputs.rows, self._sizes)
        stage = self.model if size is None else self._cuts[size]
        return stage.forward(x, inputs, kv, column)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""
        return self.model.logits(hidden)
