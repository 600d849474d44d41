"""The decoder: the layers of one stage and TP shard, run over the rows of a step.

    h ← h + out(attention(rotate(qkv(norm h))))        attention over the group's shard, partial
    h ← h + mlp(norm h)                                states merged over the column where shared

All `families` are these two lines. Some add biases, some norm each head's query and key before the
rotation, some have layers with `experts`, some latent attention (`latent_projections`), and some
layers with an attention window: the step brings a plan for every window.
Peers appear as TensorParallel and KvpColumn; a rank alone gets their solo classes, so one code path
serves all layouts. The first stage embeds tokens; the last computes logits of the requested rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.latent_attention import LATENT_EPS
from medha.topology import kv_heads_of
from medha_worker.inputs import StepInputs
from medha_worker.kv.pages import KvPages, SlotMapping
from medha_worker.model.layers import Arithmetic, TorchArithmetic
from medha_worker.model.low_rank import Adapter, adapted
from medha_worker.parallel.collectives import KvpColumn, TensorParallel
from medha_worker.weights import LayerWeights, Weights


class Decoder:
    """The decoder layers `layers` (of `config.layers`) as one shard of `tp`; `adapters` by name."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: range,
        tp: TensorParallel,
        weights: Weights,
        arithmetic: Arithmetic | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.adapters = adapters or {}
        self.config, self.layers, self.tp, self.weights = config, layers, tp, weights
        self.heads = config.heads // tp.size
        self.arithmetic = arithmetic or TorchArithmetic(config.norm_eps, weights.at)
        self.latent_arithmetic = self.arithmetic.with_eps(LATENT_EPS)
        self.kv_heads = len(kv_heads_of(tp.rank, tp.size, config.kv_heads))

    @property
    def first(self) -> bool:
        """True if these layers take token ids."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """True if these layers are followed by the head."""
        return self.layers.stop == self.config.layers

    @property
    def row_heads(self) -> int:
        """Heads of a row before attention: queries, and what pages keep."""
        return self.heads + self.config.planes * self.kv_heads

    @property
    def state_dim(self) -> int:
        """Entries of a head's attention."""
        return self.config.latent.rank if self.config.latent else self.config.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights and of the hidden states between stages."""
        return self.weights.layers[0].attention_norm.dtype

    @torch.inference_mode()
    def forward(
        self, x: torch.Tensor, inputs: StepInputs, kv: KvPages, column: KvpColumn
    ) -> torch.Tensor:
        """Return hidden states [rows, hidden] after this stage's layers.

        `x` holds token ids (int64 [rows]) in the first stage, else hidden states of the stage
        before, which are overwritten. Keys and values of rows whose tail is this group are written
        to `kv`.
        """
        hidden, layers = self.enter(x), self.weights.layers
        if inputs.adapters:
            layers = adapted(layers, inputs.adapters, self.adapters)
        for number, layer in zip(self.layers, layers, strict=True):
            qkv = self.before(layer, hidden, inputs.turns)
            self.after(layer, hidden, self.attend(number, qkv, inputs, kv, column))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, vocab] float32 of `hidden` [n, hidden] of the last stage."""
        norm, head = self.weights.norm, self.weights.head
        if norm is None or head is None:
            raise ValueError(f"layers {self.layers} are not the last stage: it has no head")
        x = self.arithmetic.norm(hidden, norm)
        gathered = self.tp.all_gather(head(x))
        return gathered[:, : self.config.vocab].float()

    # --- a layer in parts: row by row (enter, before, after), and across rows (attend) ------------

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of the first layer."""
        return self._embed(x) if self.first else x

    def before(
        self, layer: LayerWeights, hidden: torch.Tensor, turns: torch.Tensor
    ) -> torch.Tensor:
        """Return queries, keys and values [rows, row_heads, head_dim], rotated."""
        normed = self.arithmetic.norm(hidden, layer.attention_norm)
        if layer.latent is not None:
            return layer.latent.rows(layer.qkv(normed), turns, self.latent_arithmetic)
        qkv = layer.qkv(normed).view(len(hidden), -1, self.config.head_dim)
        turned = qkv[:, : self.heads + self.kv_heads]
        if layer.head_norms is not None:
            turned.copy_(self.arithmetic.norm(turned, layer.head_norms))
        self.arithmetic.rotate(turned, self.heads, turns)
        return qkv

    def attend(
        self,
        number: int,
        qkv: torch.Tensor,
        inputs: StepInputs,
        kv: KvPages,
        column: KvpColumn,
    ) -> torch.Tensor:
        """Store the rows' keys and values; return attention [rows, heads·state_dim] over all
        shards."""
        written = inputs.written is None or inputs.written.numel()
        slots = inputs.slot_mapping if written else None
        kept = self.store(number, qkv, kv, slots, inputs.written)
        return self.attended(number, qkv, kept, inputs, kv, column)

    def store(
        self,
        number: int,
        qkv: torch.Tensor,
        kv: KvPages,
        slots: SlotMapping | None,
        which: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the rows' keys and values in the pages' type [rows, planes · kv_heads, head_dim];
        store those of rows `which` (None: of all) at `slots`, if any."""
        kept = kv.kept(number, qkv[:, self.heads :])
        if slots is not None:
            kv.write(number, kept, slots, which)
        return kept

    def attended(
        self,
        number: int,
        qkv: torch.Tensor,
        kept: torch.Tensor,
        inputs: StepInputs,
        kv: KvPages,
        column: KvpColumn,
    ) -> torch.Tensor:
        """Return attention like `attend`, of rows whose keys and values are stored."""
        k, v = kept[:, : self.kv_heads], kept[:, -self.kv_heads :]  # a latent is both
        attention = inputs.attention[self.config.window(number)]
        q, pool, scales = qkv[:, : self.heads], kv.pool(number), kv.scales(number)
        partial = attention.run(q, k, v, pool, scales)
        out = partial.out
        if inputs.shared:
            partial = partial.natural()
            out = column.merge(partial.out, partial.lse, inputs.shared)
        return out.to(qkv.dtype).flatten(1)

    def after(self, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the layer's outputs to `hidden`, summed over shards."""
        alone = self.tp.size == 1
        if layer.latent is not None:
            attended = layer.latent.values(attended)
        if alone:
            layer.out.onto(attended, hidden)
        else:
            hidden.add_(self.tp.all_reduce(layer.out(attended)))
        normed = self.arithmetic.norm(hidden, layer.mlp_norm)
        if alone:
            layer.mlp.onto(normed, hidden, self.arithmetic)
        else:
            hidden.add_(self.tp.all_reduce(layer.mlp(normed, self.arithmetic)))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vocabulary-parallel embedding: a shard looks up its own ids; rows of other shards are
        zero."""
        table = self.weights.embedding
        if table is None:
            raise ValueError(f"layers {self.layers} are not the first stage: it embeds nothing")
        if self.tp.size == 1:
            return functional.embedding(tokens, table)
        local = tokens - self.tp.rank * len(table)
        foreign = (local < 0) | (local >= len(table))
        rows = functional.embedding(local.masked_fill(foreign, 0), table)
        return self.tp.all_reduce(rows.masked_fill_(foreign.unsqueeze(1), 0))
