"""FlashInfer's `fa2` for chunks, tile by tile in plain torch: which keys meet a row in which order.

What `deterministic` rests on, read off the library's scheduler and kernel (0.6.13) with its quirks:
the tile follows the mean of the entries' rows, keys begin where a window does, parts have a fixed
length, some tiles stay unmasked, masked scores are a large number and not −∞, and a tile that a row
does not see rounds its sum all the same. What a tile gives
is computed in float64 and rounded, so that torch's own order, which follows an array's shape, is
not seen; what tiles give is added up in float32, one after the other.
"""

from __future__ import annotations

import math

import torch

TILE_KEYS = 8
FAR = 5e4


def less(a: int, b: int) -> int:
    """max(a − b, 0), where a negative `a` is a large unsigned number, as there."""
    a %= 1 << 32
    return a - b if a > b else 0


def attend(
    q: torch.Tensor, kv: torch.Tensor, group: int, causal: bool, window_left: int, part: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """States of one entry, `q` [rows, heads, dim], over `kv` [2, heads, keys, dim] in parts of
    `part` keys; log-sum-exps in base 2."""
    rows, count = len(q), kv.shape[2]
    seen = window_left if window_left >= 0 else count
    begin = less(count, rows + seen)
    states = []
    for start in range(begin, count, part):
        end = min(start + part, count)
        size = end - start
        walked, unmasked = size, size // TILE_KEYS
        if causal:
            walked = min(size, less(count - rows + -(-128 // group), start))
            unmasked = min(size, less(count - rows, start)) // TILE_KEYS
        edge = -(-less(count + -(-128 // group), rows + seen + start) // TILE_KEYS)
        state = (torch.full(q.shape[:2], -FAR), torch.zeros(q.shape[:2]), torch.zeros_like(q))
        for number in range(-(-walked // TILE_KEYS)):
            first = start + number * TILE_KEYS
            keys = torch.full((2, kv.shape[1], TILE_KEYS, kv.shape[3]), 9.0)
            keys[1] = 0.0
            taken = kv[:, :, first : min(first + TILE_KEYS, end)]
            keys[:, :, : taken.shape[2]] = taken
            masked = None
            if number >= unmasked or number < edge:
                key, row = torch.arange(first, first + TILE_KEYS), torch.arange(rows).view(-1, 1)
                masked = key >= end
                if causal:
                    masked = masked | (key + rows > count + row)
                if window_left >= 0:
                    masked = masked | (key + rows + window_left < count + row)
                masked = masked.expand(rows, TILE_KEYS)
            state = _tile(q, keys, masked, state)
        m, d, o = state
        states.append((o / d.unsqueeze(-1), d.double().log2().float() + m * _factor(q)))
    return _merged(states)


def _factor(q: torch.Tensor) -> float:
    return math.log2(math.e) / math.sqrt(q.shape[-1])


def _power(x: torch.Tensor) -> torch.Tensor:
    """2 to the power of x."""
    return x.double().exp2().float()


def _tile(
    q: torch.Tensor,
    keys: torch.Tensor,
    masked: torch.Tensor | None,
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, d, o = state
    scores = torch.einsum("nhd,htd->nht", q.double(), keys[0].double()).float()
    if masked is not None:
        scores = scores.masked_fill(masked.unsqueeze(1), -FAR)
    most = torch.maximum(m, scores.amax(-1))
    # One multiply-add, as there: not 1 where the maximum stays, but 1 and a rounding error.
    factor = torch.tensor(_factor(q), dtype=torch.float32)
    shrink = _power((m.double() * factor.double() - (most * factor).double()).float())
    p = _power((scores - most.unsqueeze(-1)) * _factor(q)).double()
    values = torch.einsum("nht,htd->nhd", p, keys[1].double()).float()
    return most, d * shrink + p.sum(-1).float(), o * shrink.unsqueeze(-1) + values


def _merged(
    states: list[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = states[0]
    m, d = lse, torch.ones_like(lse)
    for value, other in states[1:]:
        most = torch.maximum(m, other)
        mine, theirs = _power(m - most), _power(other - most)
        out = out * mine.unsqueeze(-1) + value * theirs.unsqueeze(-1)
        m, d = most, d * mine + theirs
    return out / d.unsqueeze(-1), m + d.double().log2().float()
