"""LoRA adapters in a batch: rows of an adapter get x·A·B on top of a projection's result.

    column-parallel (q, k, v, gate, up)    A [inputs, r] whole, B [r, outputs of the shard]
    row-parallel (o, down)                 A [inputs of the shard, r], B [r, outputs] whole

Sums over shards are those of the layer: (Σ xₛ·Aₛ)·B = Σ xₛ·Aₛ·B. The scale is part of B. Adapted
projections stand in the place of a layer's own for one batch, so a batch without adapters computes
what it would without this module. Base weights may be packed.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.lora import WEIGHTS, Lora, tensor_name
from medha.errors import CheckpointError, EngineError
from medha.topology import kv_heads_of
from medha_worker.model.layers import GatedMlp, Linear, Projection
from medha_worker.model.rope import interleaved
from medha_worker.model.widened_linear import WidenedLinear, widens
from medha_worker.weights import LayerWeights, all_finite

# Rows of one adapter in a batch.
Rows = slice | torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class LowRank:
    """A shard's A and B of projections that are side by side.

    `down` [inputs, Σ r]: their A side by side. `ups`: of each, its columns of x·A, its outputs and
    its B [r, outputs].
    """

    down: Projection
    ups: tuple[tuple[slice, slice, Projection], ...]

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·A·B, in place."""
        inner = self.down(x)
        for columns, outputs, up in self.ups:
            up.onto(inner[:, columns], sum_[:, outputs])


@dataclasses.dataclass(frozen=True, slots=True)
class LayerAdapter:
    """An adapter's part in one layer, by the fields of LayerWeights and GatedMlp; None: none."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class AdaptedProjection:
    """A projection for one batch, in which some rows have adapters."""

    base: Projection
    adapters: tuple[tuple[Rows, LowRank], ...]

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base.bias

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        self._add(x, out)
        return out

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b + the adapters' parts, in place."""
        self.base.onto(x, sum_)
        self._add(x, sum_)

    def in_blocks(self, rows: int) -> AdaptedProjection:
        """Raise ValueError: it lasts for one batch."""
        raise ValueError(f"products of {rows} rows are set when adapters are loaded")

    def by_output(self) -> torch.Tensor:
        """Return the base weight as [out, in]."""
        return self.base.by_output()

    def _add(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        for rows, adapter in self.adapters:
            if isinstance(rows, slice):
                adapter.onto(x[rows], sum_[rows])
            else:
                own = sum_.index_select(0, rows)
                adapter.onto(x.index_select(0, rows), own)
                sum_.index_copy_(0, rows, own)


# The parts of an adapter in the layers of a rank's stage.
Adapter = tuple[LayerAdapter, ...]


def adapted(
    layers: Sequence[LayerWeights],
    batch: Sequence[tuple[str, Rows]],
    adapters: Mapping[str, Adapter],
) -> tuple[LayerWeights, ...]:
    """Return the layers for a batch with rows of adapters, by name. Raises EngineError."""
    for name, _ in batch:
        if name not in adapters:
            raise EngineError(
                f"the batch names the adapter {name!r}: this rank has"
                f" {', '.join(sorted(adapters)) or 'none'}"
            )
    parts = [(rows, adapters[name]) for name, rows in batch]
    return tuple(
        _adapted(layer, [(rows, adapter[place]) for rows, adapter in parts])
        for place, layer in enumerate(layers)
    )


def _adapted(layer: LayerWeights, parts: Sequence[tuple[Rows, LayerAdapter]]) -> LayerWeights:
    def of(base: Projection, name: str) -> Projection:
        own = [(rows, getattr(adapter, name)) for rows, adapter in parts]
        held = tuple((rows, low_rank) for rows, low_rank in own if low_rank is not None)
        return AdaptedProjection(base, held) if held else base

    mlp = layer.mlp
    if isinstance(mlp, GatedMlp):
        mlp = GatedMlp(of(mlp.gate_up, "gate_up"), of(mlp.down, "down"))
    return dataclasses.replace(layer, qkv=of(layer.qkv, "qkv"), out=of(layer.out, "out"), mlp=mlp)


def load_adapter(
    lora: Lora,
    config: DecoderConfig,
    layers: range,
    shard: int,
    tp: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    rows: int = 0,
) -> Adapter:
    """Load an adapter's part in `layers` for shard `shard` of `tp`, in `dtype` on `device`.

    `rows`: of each product (see `Linear`). Raises CheckpointError.
    """
    path = pathlib.Path(lora.folder) / WEIGHTS
    try:
        with safe_open(path, framework="pt") as tensors:
            loader = _AdapterLoader(tensors, lora, config, shard, tp, dtype, device, rows)
            return tuple(loader.layer(number) for number in layers)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a sound safetensors file ({error}): fetch it again"
        ) from None


class _AdapterLoader:
    """A load in progress, with the shard's outputs or inputs of each projection."""

    def __init__(
        self,
        tensors: Any,
        lora: Lora,
        config: DecoderConfig,
        shard: int,
        tp: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: int,
    ) -> None:
        self._tensors, self._lora, self._rows = tensors, lora, rows
        self._dtype, self._device, self._head_dim = dtype, device, config.head_dim
        kv = kv_heads_of(shard, tp, config.kv_heads)
        kv_rows = slice(kv.start * config.head_dim, kv.stop * config.head_dim)
        q_rows = _share(config.heads * config.head_dim, shard, tp)
        width = _share(config.intermediate, shard, tp)
        self._cuts = {
            "q_proj": q_rows,
            "k_proj": kv_rows,
            "v_proj": kv_rows,
            "o_proj": q_rows,
            "gate_proj": width,
            "up_proj": width,
            "down_proj": width,
        }

    def layer(self, number: int) -> LayerAdapter:
        return LayerAdapter(
            qkv=self._columns(number, ("q_proj", "k_proj", "v_proj")),
            out=self._row(number, "o_proj"),
            gate_up=self._columns(number, ("gate_proj", "up_proj")),
            down=self._row(number, "down_proj"),
        )

    def _columns(self, layer: int, names: tuple[str, ...]) -> LowRank | None:
        """Load column-parallel projections side by side; some may have no adapter."""
        downs: list[torch.Tensor] = []
        ups: list[tuple[slice, slice, Projection]] = []
        at, rank = 0, self._lora.rank
        for name in names:
            cut = self._cuts[name]
            outputs = slice(at, at + cut.stop - cut.start)
            at = outputs.stop
            if (layer, name) not in self._lora.projections:
                continue
            columns = slice(len(downs) * rank, (len(downs) + 1) * rank)
            downs.append(self._read(layer, name, "A")[:])
            up = self._read(layer, name, "B")[cut]
            if name in ("q_proj", "k_proj"):
                up = interleaved(up, self._head_dim)
            ups.append((columns, outputs, self._linear(up, self._lora.scale)))
        return LowRank(self._linear(torch.cat(downs)), tuple(ups)) if downs else None

    def _row(self, layer: int, name: str) -> LowRank | None:
        """Load a row-parallel projection."""
        if (layer, name) not in self._lora.projections:
            return None
        down = self._linear(self._read(layer, name, "A")[:, self._cuts[name]])
        up = self._linear(self._read(layer, name, "B")[:], self._lora.scale)
        return LowRank(down, ((slice(None), slice(None), up),))

    def _read(self, layer: int, name: str, part: str) -> Any:
        """Return a lazy slice of a tensor."""
        return self._tensors.get_slice(tensor_name(layer, name, part))

    def _linear(self, weight: torch.Tensor, scale: float = 1.0) -> Projection:
        """Return x·Wᵀ·scale for `weight` [outputs, inputs], which is scaled before rounding."""
        weight = weight.to(self._device, torch.float32).mul(scale).to(self._dtype)
        if not all_finite(weight):
            raise CheckpointError(
                f"{self._lora.folder}/{WEIGHTS} holds NaN, infinities or numbers beyond those of"
                f" {self._dtype}: save the adapter again"
            )
        if widens(weight):
            return WidenedLinear(weight)
        turned = weight.t().contiguous() if weight.is_cpu else weight.contiguous().t()
        return Linear(turned, rows=self._rows)


def _share(size: int, shard: int, tp: int) -> slice:
    return slice(shard * (size // tp), (shard + 1) * (size // tp))
