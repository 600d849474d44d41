"""Small batches with chunks, or shared between KVP groups, in few launches: layers cut in pieces.

A CUDA graph holds neither attention over chunks, whose launches follow the batch, nor a column's
exchange. Everything between two attentions needs each row alone, so it is recorded once for a few
numbers of rows, and replayed for any batch that fits:

    enter, before 0 │ attend 0 │ after 0, before 1 │ attend 1 │ … │ attend L−1 │ after L−1
    recorded          launched   recorded            launched        launched     recorded

Rows beyond those of a batch are computed and mean nothing: no row sees another here. What `graphs`
replays whole never comes this way. Beyond the largest size the device has work enough for the host
to hide behind, and all is launched. `fitting` picks sizes, and is pure; recording is `graphs`'.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence

import torch

from medha_worker.graphs import MOST_BYTES, Record, Replay
from medha_worker.inputs import StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.decoder import Decoder
from medha_worker.parallel.interface import KvpColumn

SIZES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)

_LOG = logging.getLogger("medha.rank")


def fitting(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of the ascending `sizes` that holds so many rows; None: launch all."""
    at = bisect.bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None


class _Cut:
    """The layers of a stage for `size` rows, cut at each attention."""

    def __init__(self, size: int, model: Decoder, turns: torch.Tensor, record: Record) -> None:
        self._model, self._turns, self._layers = model, turns, model.weights.layers
        c, at = model.config, turns.device
        heads, kv_heads, width = model.heads, model.kv_heads, c.head_dim
        rows = (size,) if model.first else (size, c.hidden)
        dtype = model.dtype
        self._rows = torch.zeros(rows, dtype=torch.int64 if model.first else dtype, device=at)
        self._hidden = torch.zeros(size, c.hidden, dtype=dtype, device=at)
        self._qkv = torch.zeros(size, heads + 2 * kv_heads, width, dtype=dtype, device=at)
        self._attended = torch.zeros(size, heads * width, dtype=dtype, device=at)
        self._replays: list[Replay] = [
            record(self._piece(place))[1] for place in range(len(self._layers) + 1)
        ]

    def forward(
        self, x: torch.Tensor, inputs: StepInputs, kv: KvPages, column: KvpColumn
    ) -> torch.Tensor:
        """As the model's own, for no more rows than fit."""
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
        """What lies before attention number `place`, down to the one before it."""
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


class Pieces:
    """A stage's model whose small batches run in pieces; takes the place of its Decoder.

    `turns(rows)`: memory for the turns of so many rows. Sizes are recorded from the smallest on,
    until all recordings together have taken `most_bytes`.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Decoder,
        turns: Callable[[int], torch.Tensor],
        record: Record,
        *,
        sizes: Sequence[int] = SIZES,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self.model = model
        self._cuts: dict[int, _Cut] = {}
        for size in sorted(sizes):
            if record.used_bytes() >= most_bytes:
                _LOG.warning("batches above %d rows are not cut in pieces: memory", self.largest)
                break
            self._cuts[size] = _Cut(size, model, turns(size), record)
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
        size = fitting(inputs.rows, self._sizes)
        stage = self.model if size is None else self._cuts[size]
        return stage.forward(x, inputs, kv, column)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Decoder.logits`."""
        return self.model.logits(hidden)
