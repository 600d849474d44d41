"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as config.json describes it.

A token's keys and values are products of one latent, which all heads share:

    c = norm(W_DKV·x),  k_R = rotate(W_KR·x)           kept: c and k_R of each token and layer
    score = s·(q_N·(W_UK·c) + q_R·k_R) = s·((q_N·W_UK)·c + q_R·k_R)
    out = Σ p·(W_UV·c) = W_UV·(Σ p·c)

So attention runs over one head, whose key is c and k_R side by side and whose value is c. The keys
and their defaults are those of transformers.
"""

from __future__ import annotations

import math
import pathlib
from typing import Any

import msgspec

from medha.checkpoints.json_fields import count, even_count
from medha.checkpoints.rope_settings import Rope
from medha.errors import CheckpointError
from medha.model import LatentShape

# ε of the norms of latents, which config.json does not name.
LATENT_EPS = 1e-6


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of latent attention; `scale` is s.

    `paired`: in the weights, entries 2i and 2i + 1 of a rotated part turn together; otherwise i and
    i + rope_dim / 2 do.
    """

    shape: LatentShape
    scale: float
    paired: bool = True

    @property
    def rank(self) -> int:
        """Entries of a latent."""
        return self.shape.kv_rank

    @property
    def rope_dim(self) -> int:
        """Entries of the rotated key, and of the rotated part of each query."""
        return self.shape.rope_dim

    @property
    def width(self) -> int:
        """Entries of a cached row: latent and rotated key."""
        return self.shape.kv_rank + self.shape.rope_dim


def latent_of(
    path: pathlib.Path, raw: dict[str, Any], rope: Rope, heads: int, kv_heads: int
) -> LatentAttention:
    """Return the latent attention that config.json `raw` names. Raises CheckpointError naming the
    field."""
    if kv_heads != heads:
        raise CheckpointError(
            f"{path}: num_key_value_heads is {kv_heads}: must be num_attention_heads, which is"
            f" {heads}, as all heads share one latent; fetch the file again"
        )
    q_rank = 0
    if raw.get("q_lora_rank", 1) is not None:
        q_rank = count(path, raw, "q_lora_rank", 1536)
    shape = LatentShape(
        q_rank=q_rank,
        kv_rank=even_count(path, raw, "kv_lora_rank", 512),
        nope_dim=count(path, raw, "qk_nope_head_dim", 128),
        rope_dim=even_count(path, raw, "qk_rope_head_dim", 64),
        value_dim=count(path, raw, "v_head_dim", 128),
    )
    return LatentAttention(shape=shape, scale=_scale(shape, rope), paired=_paired(path, raw))


def _scale(shape: LatentShape, rope: Rope) -> float:
    """Return s = m² / √(head size), with m = 0.1·mscale_all_dim·ln(factor) + 1 if rotation is
    scaled."""
    grown = 1.0
    if rope.kind != "default" and rope.mscale_all_dim and rope.factor > 1.0:
        grown = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return grown * grown / math.sqrt(shape.nope_dim + shape.rope_dim)


def _paired(path: pathlib.Path, raw: dict[str, Any]) -> bool:
    """Return rope_interleave, which deepseek_v2 lacks."""
    given = raw.get("rope_interleave")
    if given is None:
        return True
    if not isinstance(given, bool) or (not given and raw["model_type"] == "deepseek_v2"):
        raise CheckpointError(
            f"{path}: rope_interleave is {given!r}: must be true or absent, or false for"
            " deepseek_v3; fetch the file again"
        )
    return given
