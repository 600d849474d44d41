"""The decoder: the layers of one stage, one TP shard, run over the rows of a step.

    h ← h + out(attention(rotate(qkv(norm h))))        attention over the group's shard, partial
    h ← h + down(silu(gate) · up)                      states merged over the column where shared

All `families` are these two lines. Some add biases (their weights hold them), some norm each head's
query and key before the rotation, and some have layers whose rows see a window of tokens only: the
step brings the attention of every window that its layers have.

Peers appear as two nouns (TensorParallel, KvpColumn); a rank alone has the solo twins, so one code
path serves all layouts. The first stage embeds tokens, the last makes logits, only of the rows that
are asked for.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from medha.topology import kv_heads_of
from medha_worker.inputs import StepInputs
from medha_worker.kv.pages import KvPages
from medha_worker.model.arithmetic import Arithmetic, TorchArithmetic
from medha_worker.model.config import DecoderConfig
from medha_worker.model.layers import LayerWeights, Linear
from medha_worker.parallel.interface import KvpColumn, TensorParallel
from medha_worker.weights import Weights


class Decoder:
    """The decoder layers `layers` (of `config.layers`) as one shard of `tp`."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: range,
        tp: TensorParallel,
        weights: Weights,
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self.config, self.layers, self.tp, self.weights = config, layers, tp, weights
        self.heads = config.heads // tp.size
        self.arithmetic = arithmetic or TorchArithmetic(config.norm_eps, weights.at)
        self.kv_heads = len(kv_heads_of(tp.rank, tp.size, config.kv_heads))

    @property
    def first(self) -> bool:
        """Whether these layers take token ids."""
        return self.layers.start == 0

    @property
    def last(self) -> bool:
        """Whether they are followed by the head."""
        return self.layers.stop == self.config.layers

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of the hidden states between stages."""
        return self.weights.layers[0].qkv.weight.dtype

    @torch.inference_mode()
    def forward(
        self, x: torch.Tensor, inputs: StepInputs, kv: KvPages, column: KvpColumn
    ) -> torch.Tensor:
        """Hidden states [rows, hidden] after this stage's layers.

        `x` is the rows' token ids (int64 [rows]) in the first stage, else the hidden states of the
        stage before, which are overwritten. Keys and values of the rows whose tail is this group
        are written to `kv`.
        """
        hidden = self.enter(x)
        for number, layer in zip(self.layers, self.weights.layers, strict=True):
            qkv = self.before(layer, hidden, inputs.turns)
            self.after(layer, hidden, self.attend(number, qkv, inputs, kv, column))
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab] float32 of the rows `hidden` [n, hidden] of the last stage."""
        norm, head = self.weights.norm, self.weights.head
        if norm is None or head is None:
            raise ValueError(f"layers {self.layers} are not the last stage: it has no head")
        x = self.arithmetic.norm(hidden, norm)
        gathered = self.tp.all_gather(head(x))
        return gathered[:, : self.config.vocab].float()

    # --- a layer, by what needs a row alone and what needs other rows -----------------------------

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """What the first layer gets."""
        return self._embed(x) if self.first else x

    def before(
        self, layer: LayerWeights, hidden: torch.Tensor, turns: torch.Tensor
    ) -> torch.Tensor:
        """Queries, keys and values [rows, heads + 2·kv_heads, head_dim], rotated."""
        normed = self.arithmetic.norm(hidden, layer.attention_norm)
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
        """Keep the rows' keys and values, and attend [rows, heads·head_dim] over all shards."""
        rows = kv.kept(number, qkv[:, self.heads :])
        if inputs.written is None or inputs.written.numel():
            kv.write(number, rows, inputs.slots, inputs.written)
        k, v = rows[:, : self.kv_heads], rows[:, self.kv_heads :]
        attention = inputs.attention[self.config.window(number)]
        q, pool, scales = qkv[:, : self.heads], kv.pool(number), kv.scales(number)
        partial = attention.run(q, k, v, pool, scales)
        out = partial.out
        if inputs.shared:
            partial = partial.natural()
            out = column.merge(partial.out, partial.lse, inputs.shared)
        return out.to(qkv.dtype).view(inputs.rows, -1)

    def after(self, layer: LayerWeights, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        """Add what the layer found to `hidden`."""
        self._add(hidden, layer.out, attended)
        normed = self.arithmetic.norm(hidden, layer.mlp_norm)
        self._add(hidden, layer.down, self.arithmetic.gated(layer.gate_up, normed))

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Vocabulary-parallel: a shard looks up its own ids, the others' rows are zero."""
        table = self.weights.embedding
        if table is None:
            raise ValueError(f"layers {self.layers} are not the first stage: it embeds nothing")
        if self.tp.size == 1:
            return functional.embedding(tokens, table)
        local = tokens - self.tp.rank * len(table)
        foreign = (local < 0) | (local >= len(table))
        rows = functional.embedding(local.masked_fill(foreign, 0), table)
        return self.tp.all_reduce(rows.masked_fill_(foreign.unsqueeze(1), 0))

    def _add(self, hidden: torch.Tensor, linear: Linear, x: torch.Tensor) -> None:
        """hidden ← hidden + linear(x), summed over shards."""
        if self.tp.size == 1:
            linear.onto(x, hidden)
        else:
            hidden.add_(self.tp.all_reduce(linear(x)))
