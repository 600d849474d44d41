"""What FP8 keys and values stand for: number × scale, one scale for each KV head of a layer.

e4m3 has 3 bits of mantissa from 2⁻⁶ to 448, so within 14 powers of two its relative error is the
same wherever a number lies, and a scale has one task: no number may be larger than 448. `of_layer`
takes it from the weights alone, by Cauchy and Schwarz, as no hidden state is needed for that:

    |x̂| ≤ √hidden, its mean square being 1:   |(W·(g∘x̂) + b)_i| ≤ √hidden · |W_i∘g| + |b_i|
    behind a norm of heads:                   |k_i| ≤ √head_dim · |g_i|
    rotation turns two entries into each other: their bound is the root of the sum of both squares

The typical number then lies about √hidden below the bound: far from both ends. Every rank, group
and replica finds the same scales, and keys that moved or were cached mean the same everywhere.
Scales are powers of two: they move exponents alone, so putting them into queries and outputs, as
kernels without scales of their own need it, rounds nothing.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Factors = dict[torch.dtype, torch.Tensor]


class Scales:
    """Of one layer, each [kv_heads] float32, powers of two.

    `query` serves kernels that want queries in FP8 too; it is that of all query heads of a KV head.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.query, self.key, self.value = query, key, value
        self.products = query * key  # of FP8 queries with stored keys
        # As every type multiplies by them, laid out once: on a GPU each conversion is a launch.
        self._store = _factors(torch.cat((key, value)).reciprocal())
        self._narrow, self._key = _factors(query.reciprocal()), _factors(key)
        self._value = _factors(value)

    def store(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows` [n, 2 · kv_heads, head_dim], keys before values, as FP8 numbers."""
        return _narrow(rows, self._store)

    def query_numbers(self, q: torch.Tensor) -> torch.Tensor:
        """`q` [n, heads, head_dim] as FP8 numbers."""
        return _narrow(q, self._narrow)

    def meeting(self, q: torch.Tensor) -> torch.Tensor:
        """Queries whose products with the stored numbers are those of `q` with the keys."""
        return _by_head(q, self._key)

    def restore(self, out: torch.Tensor) -> None:
        """Make of attention over the stored numbers, `out` [n, heads, head_dim], that over the
        values, in place."""
        factor = self._value[out.dtype]
        _parts(out, factor).mul_(factor)


def of_layer(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor,
    head_norms: torch.Tensor | None,
    kv_heads: int,
    stretch: float = 1.0,
) -> Scales:
    """The scales of a layer from its `weight` [heads + 2 · kv_heads, head_dim, hidden] and `bias`
    [heads + 2 · kv_heads, head_dim] of queries, keys and values, pairs of a rotation side by side,
    the `norm` [hidden] before, and the `head_norms` [heads + kv_heads, head_dim], where there are
    any. `stretch`: what the rotation multiplies by.
    """
    most = (weight.float() * norm.float()).norm(dim=-1) * weight.shape[-1] ** 0.5
    if bias is not None:
        most += bias.float().abs()
    if head_norms is not None:
        most[: len(head_norms)] = head_norms.float().abs() * weight.shape[1] ** 0.5
    turned = most[:-kv_heads].unflatten(-1, (-1, 2)).norm(dim=-1).amax(-1) * stretch
    query = turned[:-kv_heads].view(kv_heads, -1).amax(-1)
    return Scales(*map(_power, (query, turned[-kv_heads:], most[-kv_heads:].amax(-1))))


def _power(most: torch.Tensor) -> torch.Tensor:
    """The least power of two with which numbers up to `most` fit; 1 for nothing but zeros."""
    exponent = (most / FP8_MAX).log2().ceil()
    return torch.where(most > 0, exponent, 0.0).exp2()


def _factors(of: torch.Tensor) -> Factors:
    return {dtype: of.to(dtype).view(-1, 1, 1) for dtype in DTYPES}


def _parts(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """`x` [n, heads, head_dim] as [n, factors, heads of one, head_dim]."""
    return x.view(len(x), len(factor), -1, x.shape[-1])


def _by_head(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    factor = factors[x.dtype]
    return (_parts(x, factor) * factor).flatten(1, 2)


def _narrow(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Rounded, and cut where a rounded weight let it pass the bound: beyond is no number."""
    return _by_head(x, factors).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
