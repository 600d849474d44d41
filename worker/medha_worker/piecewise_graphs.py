"""Piecewise CUDA graphs: small batches with chunks or shared rows, in few launches.

A CUDA graph can hold neither attention over chunks, whose launches depend on the batch, nor a KVP
column's exchange. Everything between two attentions treats each row alone, so it is recorded for a
few row counts and replayed for any batch that fits:

    enter, before 0 │ attend 0 │ after 0, before 1 │ attend 1 │ … │ attend L−1 │ after L−1
    recorded          launched   recorded            launched        launched     recorded

Padding rows are computed and dropped: no row reads another here. Whole-batch `graphs` take
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
        self, size: int, model: Decoder, turns: torch.Tensor, record: GraphRecorder
    ) -> None:
        self._model, self._turns, self._layers = model, turns, model.weights.layers
        c, at = model.config, turns.device
        rows = (size,) if model.first else (size, c.hidden)
        dtype = model.dtype
        self._rows = torch.zeros(rows, dtype=torch.int64 if model.first else dtype, device=at)
        self._hidden = torch.zeros(size, c.hidden, dtype=dtype, device=at)
        self._qkv = torch.zeros(size, model.row_heads, c.head_dim, dtype=dtype, device=at)
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
        for place, number in enumerate(model.layers):
            self._replays[place]()
            attended = model.attend(number, self._qkv[:count], inputs, kv, column)
            self._attended[:count].copy_(attended)
        self._replays[-1]()
        return self._hidden[:count]

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
            return self._qkv.copy_(model.before(layers[place], hidden, self._turns))

        return work


class PiecewiseGraphs:
    """A stage's model whose small batches run in pieces; a drop-in for its Decoder.

    `turns(rows)` allocates rotary factors for that many rows. Sizes are recorded from the smallest
    on, until all recordings together take `most_bytes`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
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
            self._cuts[size] = _PiecewiseGraph(size, model, turns(size), record)
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
