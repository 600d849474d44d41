"""Rotary positions: frequencies of every scaling kind, and the rotation of queries and keys.

Position p turns pair (i, i + d/2) of a head by p·f_i, f_i = θ^(−2i/d). Weights are loaded with
pairs adjacent, as complex numbers, so that a turn is one product; scores do not change, since
queries and keys are ordered alike. f is scaled by kind:

* linear: f / s.   * llama3: f / s for long wavelengths, f for short ones, smooth between.
* yarn (arXiv 2309.00071): f / s below β_slow turns over the trained length, f above β_fast, a ramp
  between; cosines and sines scaled by 0.1·ln s + 1.
* dynamic NTK: θ grows with the sequence's length. Keys are cached rotated, so the length is fixed
  at admission (`rope_tokens`) and all of a sequence's tokens use one θ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from medha.checkpoints.rope_settings import Rope


class Rotary:
    """Rotary cosines and sines for the rows of a step, on the device."""

    def __init__(
        self,
        rope: Rope,
        head_dim: int,
        at: torch.device | str = "cpu",
        kept: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.complex,
    ) -> None:
        self.rope, self.head_dim = rope, head_dim
        self.scale = _yarn_scale(rope) if rope.kind == "yarn" else 1.0
        self._at, self._kept = torch.device(at), kept
        self._fixed = frequencies(rope, head_dim, rope.original_tokens).to(self._at)

    def angles(
        self, positions: torch.Tensor, spans: Iterable[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), each float32 [rows, 1, head_dim / 2], for `positions` [rows].

        `spans`: (rows, rope_tokens) of the step's chunks in row order; only dynamic NTK uses
        rope_tokens.
        """
        turns = positions.to(torch.float32).unsqueeze(1)
        if self.rope.kind == "dynamic":
            parts = [
                self._of_length(tokens).expand(length, self.head_dim // 2)
                for length, tokens in spans
            ]
            angle = turns * torch.cat(parts)
        else:
            angle = turns * self._fixed
        cos, sin = angle.cos(), angle.sin()
        if self.scale != 1.0:
            cos, sin = cos.mul_(self.scale), sin.mul_(self.scale)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def turns(self, positions: torch.Tensor, spans: Iterable[tuple[int, int]]) -> torch.Tensor:
        """Return `angles` as rotary factors for the rotation.

        By default complex64 [rows, 1, head_dim / 2], cos + i·sin; `kept` may convert them
        otherwise.
        """
        return self._kept(*self.angles(positions, spans))

    def _of_length(self, tokens: int) -> torch.Tensor:
        if tokens <= self.rope.original_tokens:
            return self._fixed
        return frequencies(self.rope, self.head_dim, tokens).to(self._at)


def interleaved(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return checkpoint rows [heads · head_dim, …] with pairs (i, i + head_dim / 2) of each head
    adjacent."""
    halves = rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> None:
    """Rotate interleaved `x` [rows, heads, head_dim] in place.

    `turns`: complex64 [rows, 1, head_dim / 2], cos + i·sin.
    """
    pairs = x.view(*x.shape[:-1], -1, 2)
    if x.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(turns)
    else:  # torch has no complex numbers of narrow types
        pairs.copy_(torch.view_as_real(torch.view_as_complex(pairs.float()).mul_(turns)))


def frequencies(rope: Rope, head_dim: int, tokens: int) -> torch.Tensor:
    """Return f [head_dim / 2] float32 for a sequence of `tokens` (used only by dynamic NTK)."""
    theta = rope.theta
    if rope.kind == "dynamic":
        ratio = max(tokens, rope.original_tokens) / rope.original_tokens
        grown = rope.factor * ratio - (rope.factor - 1)
        theta *= grown ** (head_dim / (head_dim - 2))
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    waves = theta**exponent
    f = 1.0 / waves
    if rope.kind == "linear":
        return f / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, f)
    if rope.kind == "yarn":
        return _yarn(rope, f, head_dim, waves)
    return f


def _llama3(rope: Rope, f: torch.Tensor) -> torch.Tensor:
    """Blend by wavelength: scaled below low_freq_factor turns, unscaled above high_freq_factor.

    Here and in yarn, operations are in transformers' order: late positions multiply every rounding.
    """
    waves = 2 * math.pi / f
    keep = (rope.original_tokens / waves - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - keep) * f / rope.factor + keep * f
    blended = torch.where(
        waves > rope.original_tokens / rope.low_freq_factor, f / rope.factor, blended
    )
    return torch.where(waves < rope.original_tokens / rope.high_freq_factor, f, blended)


def _yarn(rope: Rope, f: torch.Tensor, head_dim: int, waves: torch.Tensor) -> torch.Tensor:
    """Blend by turns; `waves` are θ^(2i/d) = 1 / f."""

    def pair_of(turns: float) -> float:
        """Return the (fractional) pair that makes `turns` turns over the trained length."""
        wave = rope.original_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    keep = 1 - ramp
    return 1.0 / (rope.factor * waves) * (1 - keep) + f * keep


def _yarn_scale(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor * rope.attn_factor

    def grown(by: float) -> float:
        return 0.1 * by * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return grown(rope.mscale) / grown(rope.mscale_all_dim) * rope.attn_factor
    return grown(1.0) * rope.attn_factor
