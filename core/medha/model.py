"""Shape of a model: the few numbers that determine time, memory and placement."""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer with gated MLP and grouped-query attention.

    Counts are whole-model; `param_bytes` and `kv_bytes` are bytes per parameter and per cached
    scalar (2 for bfloat16, 4 for float32, 1 for FP8). In `window_layers` of the layers a token
    attends to `window_tokens`, its own included; older tokens stay cached for the other layers.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied_embeddings: bool = False
    param_bytes: float = 2.0
    kv_bytes: float = 2.0
    max_context_tokens: int = 4096
    window_tokens: int = 0
    window_layers: int = 0

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_params(self) -> int:
        """Parameters of one layer's gate, up and down projections."""
        return 3 * self.hidden * self.intermediate

    @property
    def layer_params(self) -> int:
        return self.attention_params + self.mlp_params + 2 * self.hidden

    @property
    def params(self) -> int:
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * self.layer_params + embeddings + self.hidden

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """Bytes of keys and values of one token in one layer, all KV heads."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers * self.kv_bytes_per_token_layer

    def linear_flops(self, tokens: int) -> int:
        """FLOPs of one layer's linear operators over `tokens` rows (2 per multiply-add)."""
        return 2 * tokens * (self.attention_params + self.mlp_params)

    @property
    def windowed_share(self) -> float:
        """Share of layers that attend to a window only."""
        return self.window_layers / self.layers if self.window_tokens else 0.0

    def attention_flops(self, chunk: int, prefix: int) -> float:
        """FLOPs of causal attention, the mean of the layers: `chunk` query rows after `prefix`.

        Scores and values cost 2 FLOPs each per pair of query and key and per dimension.
        """
        every = pairs(chunk, prefix)
        seen = every
        if share := self.windowed_share:
            seen = (1.0 - share) * every + share * pairs(chunk, prefix, self.window_tokens)
        return 4 * seen * self.heads * self.head_dim


def pairs(chunk: float, prefix: float, window: float = 0.0) -> float:
    """Pairs of query and key of `chunk` rows after `prefix` keys: Σ min(prefix + i, window) over
    i = 1 … chunk; a window of 0 is none."""
    if not window or prefix + chunk <= window:
        return chunk * prefix + chunk * (chunk + 1) / 2
    growing = max(window - prefix, 0.0)  # rows before the window is full
    return growing * prefix + growing * (growing + 1) / 2 + (chunk - growing) * window
