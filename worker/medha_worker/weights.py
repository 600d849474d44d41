"""Read a rank's share of a checkpoint: its layers and its TP slices, nothing else.

Files are safetensors (one, or several behind an index), memory-mapped. Each slice is read into
pageable memory, copied to the device, and there once into the fused, transposed tensor that the
model uses. On a GPU the driver stages the copies, without pinned memory. safetensors checks every
header against its file's length first. A missing, corrupt or misshapen tensor raises
CheckpointError naming the file, the tensor and the remedy.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medha.checkpoints.checkpoint_files import FLOATS, held_tensors
from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.latent_attention import LatentAttention
from medha.checkpoints.quantization import refuse_unnamed
from medha.checkpoints.routed_experts import RoutedExperts
from medha.checkpoints.tensor_names import (
    EMBEDDING,
    HEAD,
    NORM,
    check_tensor,
    check_tensors,
    missing_head,
)
from medha.errors import CheckpointError
from medha.topology import check_tp, kv_heads_of
from medha_worker.attention.fp8_scales import Scales, of_layer
from medha_worker.model.dummy import DummyCheckpoint
from medha_worker.model.experts import Experts
from medha_worker.model.fp8_linear import Scratch, fp8_linear
from medha_worker.model.int4_linear import int4_linear
from medha_worker.model.latent_projections import LatentProjections
from medha_worker.model.layers import GatedMlp, Mlp, Projection, linear
from medha_worker.model.packed_weights import (
    Fp8Parts,
    Int4Parts,
    Int4Weight,
    PackedWeight,
    packed_weight,
)
from medha_worker.model.rope import interleaved

# Layers loaded at once on a CPU: while some wait for storage, others are laid out.
AT_ONCE = 4

Progress = Callable[[int, int], None]
# A projection's name, its number of outputs, and those of a shard.
Outputs = tuple[str, int, range]
Turn = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """A shard's weights of one layer; all counts are the shard's.

    `qkv` [hidden, (heads + 2·kv_heads)·head_dim]: query, key, value side by side, with the halves
    of each query and key head `interleaved`; `out` [heads·head_dim, hidden]. `head_norms` [heads +
    kv_heads, head_dim]: of queries and keys, `interleaved` too; None in families without. Shard 0
    alone holds row-parallel biases (`out`, `down`). With `latent`, `qkv` is the first product of
    LatentProjections, and `out` is [heads·value_dim, hidden].
    """

    attention_norm: torch.Tensor
    qkv: Projection
    out: Projection
    mlp_norm: torch.Tensor
    mlp: Mlp
    head_norms: torch.Tensor | None = None
    latent: LatentProjections | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one rank. `embedding` [rows, hidden] in the first stage; `norm` and `head` in the
    last.

    rows = ceil(vocab / tp), zero beyond the vocabulary.
    """

    layers: tuple[LayerWeights, ...]
    embedding: torch.Tensor | None
    norm: torch.Tensor | None
    head: Projection | None

    @property
    def at(self) -> torch.device:
        """The device of the weights."""
        return self.layers[0].attention_norm.device

    @property
    def on_device(self) -> bool:
        """True if a GPU needs no numbers on the host, so that CUDA graphs hold the layers."""
        mlps = [layer.mlp for layer in self.layers]
        return all(mlp.on_device for mlp in mlps if isinstance(mlp, Experts))


def in_blocks(held: Weights, rows: int) -> Weights:
    """Return the same weights with products of `rows` rows each (see `Linear`)."""

    layers = tuple(
        dataclasses.replace(
            layer,
            qkv=layer.qkv.in_blocks(rows),
            out=layer.out.in_blocks(rows),
            mlp=layer.mlp.in_blocks(rows),
        )
        for layer in held.layers
    )
    head = None if held.head is None else held.head.in_blocks(rows)
    return dataclasses.replace(held, layers=layers, head=head)


def kv_scales(held: Weights, kv_heads: int, head_dim: int, stretch: float) -> tuple[Scales, ...]:
    """Return the scales of FP8 pages for the held layers; `stretch` is the factor of the rotation.

    Scales of keys and values depend only on the checkpoint, not on how it is divided.
    """
    scales = []
    for layer in held.layers:
        weight = layer.qkv.by_output()
        bias = None if layer.qkv.bias is None else layer.qkv.bias.view(-1, head_dim)
        scales.append(
            of_layer(
                weight.reshape(-1, head_dim, weight.shape[-1]),
                bias,
                layer.attention_norm,
                layer.head_norms,
                kv_heads,
                stretch,
            )
        )
    return tuple(scales)


class Checkpoint:
    """The safetensors files of a folder, opened on first use."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._held = held_tensors(folder)
        self._open: dict[pathlib.Path, Any] = {}
        self._lock = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def check(self, config: DecoderConfig) -> None:
        """Raise CheckpointError unless the files hold the tensors that `config` implies."""
        check_tensors(self.folder, self._held, config)

    def slice(self, name: str, shape: Sequence[int] | None, types: Sequence[str] = FLOATS) -> Any:
        """Return a lazy slice of tensor `name`, which must have `shape` (None: any) and one of
        `types`."""
        check_tensor(self.folder, name, self._held.get(name), shape, types)
        return self._handle(self._held[name].file).get_slice(name)

    def type_of(self, name: str) -> str:
        """Return the type of tensor `name`, as safetensors spells it; empty if it is in no file."""
        header = self._held[name].header
        return "" if header is None else header.dtype

    def _handle(self, path: pathlib.Path) -> Any:
        with self._lock:
            if path not in self._open:
                try:
                    self._open[path] = safe_open(path, framework="pt")
                except (SafetensorError, OSError) as error:
                    raise CheckpointError(
                        f"{path} is not a sound safetensors file ({error}): fetch it again"
                    ) from None
            return self._open[path]


def load(
    checkpoint: Checkpoint | DummyCheckpoint,
    config: DecoderConfig,
    layers: range,
    shard: int,
    tp: int,
    dtype: torch.dtype,
    progress: Progress | None = None,
    device: torch.device | str = "cpu",
    *,
    packed: bool = False,
) -> Weights:
    """Load the weights of `layers` for shard `shard` of `tp`, in `dtype` on `device`.

    `packed`: FP8 and 4-bit weights stay so; `check_packed` says for which models and layouts.
    `progress(done_bytes, total_bytes)` is called as tensors arrive. Raises CheckpointError, or
    SpecError if `tp` does not divide the model.
    """
    check_tp(tp, config.heads, config.kv_heads, config.divided_width)
    if isinstance(checkpoint, Checkpoint):
        checkpoint.check(config)
    loader = _Loader(checkpoint, config, layers, shard, tp, dtype, progress, device)
    if packed:
        loader.scratch = Scratch(dtype, device)
    return loader.load()


def all_finite(tensor: torch.Tensor) -> bool:
    """Return False if a tensor of a plain floating type holds NaN or infinities."""
    if not tensor.dtype.is_floating_point or tensor.itemsize == 1 or not tensor.numel():
        return True
    return bool(torch.stack(tensor.aminmax()).isfinite().all())


def _as_stored(rows: torch.Tensor) -> torch.Tensor:
    return rows


class _Turned:
    """Order of output rows that makes pairs of each head's rotated part adjacent.

    The rotated part is the last of every `width` rows; 0: no row is rotated.
    """

    def __init__(self, latent: LatentAttention, width: int) -> None:
        self._rope, self._width = latent.rope_dim, 0 if latent.paired else width

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not self._width:
            return rows
        heads = rows.reshape(-1, self._width, *rows.shape[1:])
        still, rotated = heads[:, : -self._rope], heads[:, -self._rope :]
        turned = interleaved(rotated.flatten(0, 1), self._rope).reshape(rotated.shape)
        return torch.cat((still, turned), dim=1).flatten(0, 1)


class _Loader:
    """A load in progress, with the places of this shard's slices in each tensor."""

    def __init__(
        self,
        checkpoint: Checkpoint | DummyCheckpoint,
        config: DecoderConfig,
        layers: range,
        shard: int,
        tp: int,
        dtype: torch.dtype,
        progress: Progress | None,
        device: torch.device | str,
    ) -> None:
        self.device = device
        self.checkpoint, self.config, self.layers = checkpoint, config, layers
        self.shard, self.tp, self.dtype, self.progress = shard, tp, dtype, progress
        D = config.head_dim
        kv = kv_heads_of(shard, tp, config.kv_heads)
        self.q_rows = self._of_heads(D)
        self.kv_rows = range(kv.start * D, kv.stop * D)
        self.vocab_rows = -(-config.vocab // tp)
        # Of packed weights; None: weights are dequantised.
        self.scratch: Scratch | None = None
        self.done_bytes = 0
        self._lock = threading.Lock()
        self.total_bytes = self._total_bytes()

    def load(self) -> Weights:
        config = self.config
        first, last = self.layers.start == 0, self.layers.stop == config.layers
        # A file may hold another head than the embedding though config.json ties them.
        own_head = HEAD in self.checkpoint and isinstance(self.checkpoint, Checkpoint)
        tied = config.tied_embeddings and not own_head
        if not tied and HEAD not in self.checkpoint:
            raise missing_head(self.checkpoint.folder)
        embedding = self._vocab(EMBEDDING) if first or (last and tied) else None
        head = None
        if last:
            table = embedding if tied else self._vocab(HEAD)
            assert table is not None
            if config.tied_embeddings and embedding is not None and torch.equal(table, embedding):
                table = embedding
            head = linear(table, shared=table is embedding)
        return Weights(
            layers=self._all_layers(),
            embedding=embedding if first else None,
            norm=self._vector(NORM) if last else None,
            head=head,
        )

    def _all_layers(self) -> tuple[LayerWeights, ...]:
        if torch.device(self.device).type != "cpu":
            return tuple(self._layer(number) for number in self.layers)
        with ThreadPoolExecutor(AT_ONCE, "load") as threads:
            try:
                return tuple(threads.map(self._layer, self.layers))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _layer(self, number: int) -> LayerWeights:
        prefix = f"model.layers.{number}."
        c, attention, mlp = self.config, prefix + "self_attn.", prefix + "mlp."
        experts = c.experts_in(number)
        q_all, out_rows = c.heads * c.head_dim, self.q_rows
        qkv: Projection
        if c.latent is None:
            qkv = self._qkv(attention)
        else:
            qkv = self._first_product(attention, c.latent)
            q_all = c.heads * c.latent.shape.value_dim
            out_rows = self._of_heads(c.latent.shape.value_dim)
        return LayerWeights(
            attention_norm=self._vector(prefix + "input_layernorm.weight"),
            qkv=qkv,
            out=self._row(attention + "o_proj", q_all, out_rows, c.out_bias),
            mlp_norm=self._vector(prefix + "post_attention_layernorm.weight"),
            mlp=self._experts(mlp, experts) if experts else self._mlp(mlp, c.intermediate),
            head_norms=self._head_norms(attention) if c.head_norms else None,
            latent=self._latent(attention, c.latent) if c.latent else None,
        )

    def _qkv(self, attention: str) -> Projection:
        c, D = self.config, self.config.head_dim
        q_all, kv_all = c.heads * D, c.kv_heads * D
        parts = [
            (attention + "q_proj", q_all, self.q_rows),
            (attention + "k_proj", kv_all, self.kv_rows),
            (attention + "v_proj", kv_all, self.kv_rows),
        ]
        turned = [lambda own: interleaved(own, D)] * 2
        return self._columns(parts, c.qkv_bias, turned=turned)

    def _first_product(self, attention: str, latent: LatentAttention) -> Projection:
        """Load the projections to queries or their latents, and to the token's latent and key."""
        shape, c = latent.shape, self.config
        wide = shape.nope_dim + shape.rope_dim
        queries = (attention + "q_proj", c.heads * wide, self._of_heads(wide))
        if shape.q_rank:
            queries = (attention + "q_a_proj", shape.q_rank, range(shape.q_rank))
        kept = (attention + "kv_a_proj_with_mqa", latent.width, range(latent.width))
        turned = [_Turned(latent, 0 if shape.q_rank else wide), _Turned(latent, latent.width)]
        return self._columns([queries, kept], False, turned=turned)

    def _latent(self, attention: str, latent: LatentAttention) -> LatentProjections:
        """Load what follows the first product, of this shard's heads."""
        shape, heads = latent.shape, self.config.heads
        wide, both = shape.nope_dim + shape.rope_dim, shape.nope_dim + shape.value_dim
        norm, up = None, None
        if shape.q_rank:
            norm = self._vector(attention + "q_a_layernorm.weight", shape.q_rank)
            part = (attention + "q_b_proj", heads * wide, self._of_heads(wide))
            up = self._columns([part], False, turned=[_Turned(latent, wide)], inputs=shape.q_rank)
        sizes, rows = (heads * both, latent.rank), self._of_heads(both)
        own = self._weight(attention + "kv_b_proj", sizes, rows, range(latent.rank))
        own = own.to(self.dtype).view(-1, both, latent.rank)
        return LatentProjections(
            rope_dim=shape.rope_dim,
            latent_norm=self._vector(attention + "kv_a_layernorm.weight", latent.rank),
            key_up=own[:, : shape.nope_dim].contiguous(),
            value_up=own[:, shape.nope_dim :].transpose(1, 2).contiguous(),
            query_norm=norm,
            query_up=up,
        )

    def _of_heads(self, width: int) -> range:
        """Return the outputs of this shard's heads, each of `width`."""
        size = self.config.heads // self.tp * width
        return range(self.shard * size, (self.shard + 1) * size)

    def _mlp(self, prefix: str, width: int) -> GatedMlp:
        """Load the slice of an MLP of `width`."""
        biased = self.config.mlp_bias
        return GatedMlp(
            self._columns(self._gate_up(prefix, width), biased),
            self._row(prefix + "down_proj", width, self._share(width), biased),
        )

    def _gate_up(self, prefix: str, width: int) -> list[Outputs]:
        return [(prefix + name, width, self._share(width)) for name in ("gate_proj", "up_proj")]

    def _experts(self, prefix: str, experts: RoutedExperts) -> Experts:
        """Load the router, and a slice of every expert; on a GPU one tensor holds them all."""
        width, shared = experts.intermediate, experts.shared_intermediate
        share, biased = self._share(width), self.config.mlp_bias
        gate = [(prefix + "gate", experts.count, range(experts.count))]
        router = self._columns(gate, False, dtype=torch.float32 if experts.exact else self.dtype)
        bias = None
        if experts.biased:
            name = prefix + "gate.e_score_correction_bias"
            bias = self._count(name, self.checkpoint.slice(name, (experts.count,))[:]).float()
        names = [f"{prefix}experts.{n}." for n in range(experts.count)]
        loaded = Experts(
            router,
            tuple(self._columns(self._gate_up(name, width), biased) for name in names),
            tuple(self._row(name + "down_proj", width, share, biased) for name in names),
            experts,
            bias,
            self._mlp(prefix + "shared_experts.", shared) if shared else None,
        )
        return loaded if torch.device(self.device).type == "cpu" else loaded.grouped()

    def _share(self, width: int) -> range:
        """Return this shard's part of the `width` of an MLP."""
        size = width // self.tp
        return range(self.shard * size, (self.shard + 1) * size)

    def _head_norms(self, attention: str) -> torch.Tensor:
        """Return query norms for each query head, then key norms for each KV head."""
        D = self.config.head_dim
        parts = []
        for name, rows in (("q_norm", self.q_rows), ("k_norm", self.kv_rows)):
            weight = self._vector(f"{attention}{name}.weight", D)
            parts.append(interleaved(weight, D).expand(len(rows) // D, D))
        return torch.cat(parts)

    def _columns(
        self,
        parts: list[Outputs],
        biased: bool,
        *,
        turned: Sequence[Turn] = (),
        inputs: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Projection:
        """Load column-parallel projections of `inputs` (0: hidden size) side by side: output rows
        `range` of each.

        Rows of part i are ordered by `turned[i]`, if given.
        """
        inputs = inputs or self.config.hidden
        kept = None if dtype else self._kept_columns(parts, biased, turned, inputs)
        if kept is not None:
            return kept
        dtype = dtype or self.dtype
        width = sum(len(rows) for _, _, rows in parts)
        weight = torch.empty(width, inputs, dtype=dtype, device=self.device)
        at = 0
        for number, (name, outputs, rows) in enumerate(parts):
            order = turned[number] if number < len(turned) else _as_stored
            cut = slice(at, at + len(rows))
            own = self._weight(name, (outputs, inputs), rows, range(inputs))
            weight[cut].copy_(order(own))
            at += len(rows)
        bias = self._column_bias(parts, turned) if biased else None
        return linear(weight, bias)

    def _column_bias(self, parts: list[Outputs], turned: Sequence[Turn]) -> torch.Tensor:
        """Load the biases of column-parallel projections side by side."""
        biases = []
        for number, (name, outputs, rows) in enumerate(parts):
            tensor = self.checkpoint.slice(name + ".bias", (outputs,))
            own = self._count(name, tensor[rows.start : rows.stop]).to(self.dtype)
            biases.append(turned[number](own) if number < len(turned) else own)
        return torch.cat(biases)

    def _row(self, name: str, inputs: int, columns: range, biased: bool) -> Projection:
        """Load a row-parallel projection: input columns `columns`; its bias is added once, on
        shard 0."""
        shape = (self.config.hidden, inputs)
        bias = self._vector(name + ".bias") if biased and self.shard == 0 else None
        kept = self._kept(name, shape)
        if kept is not None:
            cut = slice(0, self.config.hidden), slice(columns.start, columns.stop)
            return self._packed_linear([kept.parts(cut)], bias)
        part = self._weight(name, shape, range(self.config.hidden), columns)
        return linear(part.to(self.dtype), bias)

    def _kept_columns(
        self, parts: list[Outputs], biased: bool, turned: Sequence[Turn], inputs: int
    ) -> Projection | None:
        """Load column-parallel projections whose weights stay packed; None if they do not."""
        weights = [self._kept(name, (outputs, inputs)) for name, outputs, _ in parts]
        own: list[Fp8Parts | Int4Parts] = []
        for number, (weight, (_, _, rows)) in enumerate(zip(weights, parts, strict=True)):
            if weight is None:
                return None
            part = weight.parts((slice(rows.start, rows.stop), slice(0, inputs)))
            own.append(part.by_output(turned[number]) if number < len(turned) else part)
        return self._packed_linear(own, self._column_bias(parts, turned) if biased else None)

    def _packed_linear(
        self, parts: Sequence[Fp8Parts | Int4Parts], bias: torch.Tensor | None
    ) -> Projection:
        """Return projections of one format side by side."""
        assert self.scratch is not None
        narrow = [part for part in parts if isinstance(part, Int4Parts)]
        if narrow:
            return int4_linear(narrow, self.dtype, bias)
        own = [part for part in parts if isinstance(part, Fp8Parts)]
        return fp8_linear(own, self.scratch, bias)

    def _kept(self, name: str, shape: tuple[int, int]) -> PackedWeight | None:
        """Return a projection's weight if it stays packed."""
        weight = None if self.scratch is None else self._packed(name, shape)
        if isinstance(weight, Int4Weight) and not weight.in_order:
            raise CheckpointError(
                f"{self.checkpoint.folder}: {name}.g_idx orders inputs, though config.json does not"
                " say desc_act: such weights cannot stay packed; set spec.engine.packedWeights to"
                " Disabled"
            )
        return weight

    def _packed(self, name: str, shape: tuple[int, int]) -> PackedWeight | None:
        """Return a projection's weight if the file has it packed."""
        packing = self.config.quantization
        if not isinstance(self.checkpoint, Checkpoint):
            return None
        if packing is None:
            weight = name + ".weight"
            if weight not in self.checkpoint or self.checkpoint.type_of(weight) not in FLOATS:
                refuse_unnamed(self.checkpoint.folder, name)
            return None
        place = functools.partial(self._count, name)
        return packed_weight(self.checkpoint, name, shape, packing, place)

    def _weight(
        self, name: str, shape: tuple[int, int], rows: range, columns: range
    ) -> torch.Tensor:
        """Return a part of a projection's weight [outputs, inputs], dequantised if it is packed."""
        cut = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        packed = self._packed(name, shape)
        if packed is not None:
            return packed[cut]
        name += ".weight"
        return self._count(name, self.checkpoint.slice(name, shape)[cut])

    def _vector(self, name: str, size: int = 0) -> torch.Tensor:
        """Load a vector of `size` entries (0: hidden size)."""
        tensor = self.checkpoint.slice(name, (size or self.config.hidden,))
        return self._count(name, tensor[:]).to(self.dtype)

    def _vocab(self, name: str) -> torch.Tensor:
        """Load this shard's rows of a vocabulary table, padded with zero rows."""
        tensor = self.checkpoint.slice(name, (self.config.vocab, self.config.hidden))
        start = self.shard * self.vocab_rows
        stop = min(start + self.vocab_rows, self.config.vocab)
        shape = (self.vocab_rows, self.config.hidden)
        table = torch.zeros(shape, dtype=self.dtype, device=self.device)
        if start < stop:
            table[: stop - start].copy_(self._count(name, tensor[start:stop, :]))
        return table

    def _count(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what was read of tensor `name`, on the device. Raises CheckpointError for NaN and
        infinities, with which no answer would be sound."""
        with self._lock:
            self.done_bytes += tensor.nbytes
            if self.progress is not None:
                self.progress(min(self.done_bytes, self.total_bytes), self.total_bytes)
        placed = tensor.to(self.device)
        if not all_finite(placed):
            raise CheckpointError(
                f"{self.checkpoint.folder}: {name} holds NaN or infinities: fetch the weights"
                " again, or convert them again in a wider type"
            )
        return placed

    def _total_bytes(self) -> int:
        """Return the bytes that this rank will read, without norms, biases and scales."""
        c, item = self.config, self._item_bytes()
        packed = c.quantization is not None and isinstance(self.checkpoint, Checkpoint)
        stored = c.quantization.stored_bytes if c.quantization and packed else item
        scalars = len(self.layers) * self._attention_scalars()
        for layer in self.layers:
            if experts := c.experts_in(layer):
                widths = experts.count * len(self._share(experts.intermediate))
                widths += len(self._share(experts.shared_intermediate))
                scalars += c.hidden * (experts.count + 3 * widths)
            else:
                scalars += c.hidden * 3 * len(self._share(c.intermediate))
        tables = (self.layers.start == 0) + (self.layers.stop == c.layers)
        return int(stored * scalars + item * c.hidden * tables * self.vocab_rows)

    def _attention_scalars(self) -> int:
        """Return the entries of a layer's projections that this rank will read."""
        c = self.config
        if c.latent is None:
            return c.hidden * 2 * (len(self.q_rows) + len(self.kv_rows))
        return int(c.shape(1.0, 1.0).attention_params_of(self.tp))

    def _item_bytes(self) -> int:
        tensor = self.checkpoint.slice(EMBEDDING, (self.config.vocab, self.config.hidden))
        return 4 if tensor.get_dtype() == "F32" else 2
