"""Shape of a model: the few numbers that determine time, memory and placement."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

CHUNK_TOKENS = 2048
"""Tokens beyond its window for which a sequence reserves pages; larger chunks take free ones."""


class KeptPages(msgspec.Struct, frozen=True):
    """Pages of a context that its later tokens can see.

    `window_tokens`: tokens that a token sees in every layer, its own included; 0: all.

        logical page   | 0 | 1 | 2 | 3 | 4 | 5 |       position p sees (p − window, p]:
        kept at p              | ····x | xxxxp         pages before `first_page(p)` are dropped
    """

    window_tokens: int
    page_tokens: int

    def first_page(self, position: int) -> int:
        """Return the first logical page that a token at `position`, or a later one, sees.

        That of the token before, if the window is a single token.
        """
        if not self.window_tokens:
            return 0
        return max(0, position - max(1, self.window_tokens - 1)) // self.page_tokens

    def pages(self, tokens: int) -> int:
        """Return the pages that a context of `tokens` reserves: all of them, or those of a window,
        of CHUNK_TOKENS, and one."""
        pages = -(-tokens // self.page_tokens)
        if not self.window_tokens:
            return pages
        return min(pages, self._of(self.window_tokens) + self._of(CHUNK_TOKENS) + 1)

    def least(self, tokens: int) -> int:
        """Return the pages without which a context of `tokens` cannot be computed: all of them, or
        those of a window that begins within a page, and one for the next tokens."""
        pages = -(-tokens // self.page_tokens)
        return min(pages, self._of(self.window_tokens) + 2) if self.window_tokens else pages

    def longest_hit(self, pages: int, holds: Callable[[int], bool]) -> int:
        """Return the most of `pages` leading pages after which a prompt can go on.

        Of these, `holds` is true for all that later tokens see. Takes about as many calls as there
        are windows in the prompt, or pages in the hit.
        """
        end = pages
        while end:
            seen = range(self.first_page(end * self.page_tokens), end)
            missing = next((page for page in seen if not holds(page)), end)
            if missing == end:
                break
            end = missing
        return end

    def _of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)


class LatentShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of multi-head latent attention.

    `kv_rank`: entries of a token's latent, which all heads share. `q_rank`: entries between hidden
    states and queries (0: queries are projected directly). A head's query has `nope_dim` plain and
    `rope_dim` rotated entries; its output has `value_dim`.
    """

    q_rank: int = 0
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        counts = (self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim)
        if min(counts) < 1 or self.q_rank < 0:
            raise ValueError(
                f"kv_rank, nope_dim, rope_dim, value_dim are {counts}, q_rank is {self.q_rank}: the"
                " four must be at least 1, and q_rank at least 0"
            )


class ModelShape(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A decoder-only transformer with gated MLP and grouped-query attention.

    Counts are whole-model; `param_bytes` and `kv_bytes` are bytes per parameter and per cached
    scalar in memory (2 for bfloat16, 4 for float32, 1 for FP8), `packed_bytes` per weight of
    projections that stay packed (0: none do). In `window_layers` of the layers a token attends
    to `window_tokens`, its own included; older tokens stay cached if other layers see them.
    `expert_layers` of the layers have `experts` MLPs of width `expert_intermediate` instead of one,
    and a router that selects `experts_per_token` of them for each token, and an MLP of width
    `shared_intermediate` for all (0: none). With `latent`, pages hold one head, of latent and
    rotated key, for keys and values both: `kv_heads` is 1 and `head_dim` the width of both.
    `adapters`: number of LoRA adapters that requests may name; `adapter_params`: entries of A and B
    of an adapter in a layer, the mean of both.
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
    packed_bytes: float = 0.0
    kv_bytes: float = 2.0
    max_context_tokens: int = 4096
    window_tokens: int = 0
    window_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    expert_layers: int = 0
    shared_intermediate: int = 0
    latent: LatentShape | None = None
    adapters: int = 0
    adapter_params: float = 0.0

    def __post_init__(self) -> None:
        latent = self.latent
        if latent is not None:
            width = latent.kv_rank + latent.rope_dim
            if self.kv_heads != 1 or self.head_dim != width:
                raise ValueError(
                    f"kv_heads is {self.kv_heads} and head_dim is {self.head_dim}: must be 1 and"
                    f" {width} (kv_rank + rope_dim) with latent attention"
                )
        counts = (self.experts, self.experts_per_token, self.expert_intermediate)
        if not any((*counts, self.expert_layers)):
            return
        if min(counts) < 1 or not 1 <= self.expert_layers <= self.layers:
            raise ValueError(
                f"experts, experts_per_token, expert_intermediate are {counts}, expert_layers is"
                f" {self.expert_layers}: all must be at least 1, and expert_layers at most"
                f" {self.layers}; set all four or none"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token is {self.experts_per_token}: must be at most experts, which is"
                f" {self.experts}"
            )

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's query, key, value and output projections."""
        return int(self.attention_params_of(1))

    def attention_params_of(self, tp: int) -> float:
        """Return `attention_params` of one of `tp` shards. Latents are replicated over shards."""
        latent = self.latent
        if latent is None:
            whole = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
            return whole / tp
        heads = self.heads / tp
        queries = heads * (latent.nope_dim + latent.rope_dim)
        into = self.hidden * (latent.kv_rank + latent.rope_dim)
        if latent.q_rank:
            into += latent.q_rank * self.hidden
            queries_params = latent.q_rank * queries
        else:
            queries_params = self.hidden * queries
        of_heads = latent.kv_rank * (latent.nope_dim + latent.value_dim)
        return into + queries_params + heads * (of_heads + latent.value_dim * self.hidden)

    def absorbed_params_of(self, tp: int) -> float:
        """Return those `attention_params_of` a shard that never stay packed: of a head's products
        with latents."""
        latent = self.latent
        if latent is None:
            return 0.0
        return self.heads / tp * latent.kv_rank * (latent.nope_dim + latent.value_dim)

    @property
    def mlp_params(self) -> int:
        """Parameters of gate, up and down projections in a layer without experts."""
        return 3 * self.hidden * self.intermediate

    @property
    def expert_params(self) -> int:
        """Parameters of one expert's gate, up and down projections."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def shared_params(self) -> int:
        """Parameters of the MLP for all tokens in a layer with experts."""
        return 3 * self.hidden * self.shared_intermediate

    @property
    def router_params(self) -> int:
        """Parameters of the router in a layer with experts."""
        return self.hidden * self.experts

    @property
    def params(self) -> int:
        """Parameters of the whole model, all experts included."""
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        layers = self.layers * (self.attention_params + 2 * self.hidden)
        layers += (self.layers - self.expert_layers) * self.mlp_params
        always = self.router_params + self.shared_params
        layers += self.expert_layers * (always + self.experts * self.expert_params)
        return layers + embeddings + self.hidden

    @property
    def projection_bytes(self) -> float:
        """Bytes in memory per weight of attention and MLPs, but `absorbed_params_of` and
        routers."""
        return self.packed_bytes or self.param_bytes

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole model in memory."""
        dense = (self.layers - self.expert_layers) * self.mlp_params
        experts = self.shared_params + self.experts * self.expert_params
        attention = self.layers * (self.attention_params - self.absorbed_params_of(1))
        projections = attention + dense + self.expert_layers * experts
        saved = self.param_bytes - self.projection_bytes
        return self.params * self.param_bytes - projections * saved

    @property
    def expert_share(self) -> float:
        """Share of layers that have experts."""
        return self.expert_layers / self.layers if self.experts else 0.0

    def experts_read(self, tokens: float) -> float:
        """Expected number of distinct experts of a layer that `tokens` rows select: E·(1 − (1 −
        k/E)ⁿ), if all experts are equally likely."""
        missed = 1.0 - self.experts_per_token / self.experts
        return float(self.experts * (1.0 - missed**tokens))

    @property
    def adapted_share(self) -> float:
        """Expected share of requests that name an adapter, if each is as likely as none."""
        return self.adapters / (self.adapters + 1)

    def adapters_read(self, requests: int) -> float:
        """Expected number of distinct adapters of `requests`: n·(1 − (n / (n + 1))ʳ), if each is as
        likely as none."""
        return float(self.adapters * (1.0 - self.adapted_share**requests))

    @property
    def kv_bytes_per_token_layer(self) -> float:
        """Bytes of keys and values of one token in one layer, all KV heads."""
        return self.planes * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def planes(self) -> int:
        """Cached rows of a token and KV head: its key and value (2), or a latent (1)."""
        return 1 if self.latent else 2

    @property
    def state_dim(self) -> int:
        """Entries of a head's attention over cached rows."""
        return self.latent.kv_rank if self.latent else self.head_dim

    @property
    def pair_flops(self) -> float:
        """FLOPs of a head's score and weighted value, for a pair of query and cached row."""
        return 2.0 * (self.head_dim + self.state_dim)

    @property
    def kv_bytes_per_token(self) -> float:
        return self.layers * self.kv_bytes_per_token_layer

    def linear_flops(self, tokens: int) -> float:
        """FLOPs of a layer's linear operators over `tokens` rows, the mean of the layers (2 per
        multiply-add); of the experts, only those that a token selects."""
        share = self.expert_share
        active = (1.0 - share) * self.mlp_params
        selected = self.experts_per_token * self.expert_params
        active += share * (self.router_params + self.shared_params + selected)
        return 2.0 * tokens * (self.attention_params + active)

    @property
    def windowed_share(self) -> float:
        """Share of layers that attend to a window only."""
        return self.window_layers / self.layers if self.window_tokens else 0.0

    @property
    def sliding_tokens(self) -> int:
        """Window beyond which no layer sees a token; 0: none, or no context is longer."""
        slides = self.window_layers == self.layers and self.max_context_tokens > self.window_tokens
        return self.window_tokens if slides else 0

    def kept_pages(self, page_tokens: int) -> KeptPages:
        """Return which pages of that size a context keeps."""
        return KeptPages(self.sliding_tokens, page_tokens)

    def attention_flops(self, chunk: int, prefix: int) -> float:
        """FLOPs of causal attention, the mean of the layers: `chunk` query rows after `prefix`.

        Scores and values cost 2 FLOPs each per pair of query and key and per dimension.
        """
        every = pairs(chunk, prefix)
        seen = every
        if share := self.windowed_share:
            seen = (1.0 - share) * every + share * pairs(chunk, prefix, self.window_tokens)
        return seen * self.heads * self.pair_flops


def pairs(chunk: float, prefix: float, window: float = 0.0) -> float:
    """Pairs of query and key of `chunk` rows after `prefix` keys: Σ min(prefix + i, window) over
    i = 1 … chunk; a window of 0 is none."""
    if not window or prefix + chunk <= window:
        return chunk * prefix + chunk * (chunk + 1) / 2
    growing = max(window - prefix, 0.0)  # rows before the window is full
    return growing * prefix + growing * (growing + 1) / 2 + (chunk - growing) * window
