"""Scales of FP8 keys and values: value = number × scale, one scale per KV head and layer.

e4m3 has 3 bits of mantissa from 2⁻⁶ to 448, so over 14 powers of two its relative error is
constant. The only task of a scale is to keep numbers at or below 448. `of_layer` derives it from
the weights alone, without hidden states, by the Cauchy–Schwarz inequality:

    |x̂| ≤ √hidden, its mean square being 1:   |(W·(g∘x̂) + b)_i| ≤ √hidden · |W_i∘g| + |b_i|
    behind a norm of heads:                   |k_i| ≤ √head_dim · |g_i|
    rotation turns two entries into each other: their bound is the root of the sum of both squares

Typical numbers then lie about √hidden below the bound, far from both ends. Every rank, group and
replica computes the same scales, so moved or cached keys keep their meaning. Scales are powers of
two: folding them into queries and outputs, for kernels without scales, rounds nothing.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Factors = dict[torch.dtype, torch.Tensor]


class Scales:
    """Scales of a layer, each [kv_heads] float32, powers of two.

    `query` serves kernels that need FP8 queries; all query heads of a KV head share it.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        self.query, self.key, self.value = query, key, value
        self.products = query * key  # of FP8 queries with stored keys
        # Converted to each dtype once: on a GPU every conversion is a launch.
        self._store = _factors(torch.cat((key, value)).reciprocal())
        self._narrow, self._key = _factors(query.reciprocal()), _factors(key)
        self._value = _factors(value)

    def store(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows` [n, 2 · kv_heads, head_dim], keys before values, as FP8 numbers."""
        return _narrow(rows, self._store)

    def query_numbers(self, q: torch.Tensor) -> torch.Tensor:
        """Return `q` [n, heads, head_dim] as FP8 numbers."""
        return _narrow(q, self._narrow)

    def meeting(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries whose products with stored numbers equal those of `q` with the keys."""
        return _by_head(q, self._key)

    def restore(self, out: torch.Tensor) -> None:
        """Turn attention over stored numbers, `out` [n, heads, head_dim], into that over values,
        in place."""
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
    """Return the scales of a layer.

    `weight` [heads + 2 · kv_heads, head_dim, hidden] and `bias` [heads + 2 · kv_heads, head_dim]
    are those of queries, keys and values, with rotation pairs adjacent; `norm` [hidden] precedes
    them; `head_norms` [heads + kv_heads, head_dim], if any, follow. `stretch`: factor of the
    rotation.
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
    """Return the smallest power of two with which numbers up to `most` fit; 1 if all are zero."""
    exponent = (most / FP8_MAX).log2().ceil()
    return torch.where(most > 0, exponent, 0.0).exp2()


def _factors(of: torch.Tensor) -> Factors:
    return {dtype: of.to(dtype).view(-1, 1, 1) for dtype in DTYPES}


def _parts(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """View `x` [n, heads, head_dim] as [n, factors, heads per factor, head_dim]."""
    return x.view(len(x), len(factor), -1, x.shape[-1])


def _by_head(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    factor = factors[x.dtype]
    return (_parts(x, factor) * factor).flatten(1, 2)


def _narrow(x: torch.Tensor, factors: Factors) -> torch.Tensor:
    """Round to FP8, clamped: rounding of weights may exceed the bound, and beyond it FP8 has no
    number."""
    return _by_head(x, factors).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
