"""Small models of each family on one device, through every path, against float32 on a CPU.

Of the tests of a GPU, and of a test on a CPU that shows what they would find.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

Tokens = npt.NDArray[np.int32]

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Head sizes that kernels are made for, groups of 4, 7, 2 and 8; weights in bfloat16.
MODELS = {
    "llama": TinyModel(
        hidden=320,
        heads=8,
        kv_heads=2,
        head_dim=128,
        layers=4,
        dtype="bfloat16",
        rope=LLAMA3,
        rope_theta=500_000.0,
    ),
    "qwen2": TinyModel(
        family="qwen2", hidden=320, heads=14, head_dim=64, layers=4, tied=True, dtype="bfloat16"
    ),
    "qwen3": TinyModel(
        family="qwen3", hidden=320, heads=4, head_dim=128, layers=4, dtype="bfloat16"
    ),
    "qwen3_moe": TinyModel(
        # Rounding may select another last expert; of four it has little weight.
        family="qwen3_moe",
        per_token=4,
        hidden=320,
        heads=4,
        head_dim=128,
        layers=4,
        dtype="bfloat16",
    ),
    "deepseek_v3": TinyModel(
        # Rounding may also select another group, so the factor is 1.
        family="deepseek_v3",
        hidden=320,
        heads=16,
        head_dim=64,
        q_rank=192,
        kv_rank=512,
        nope_dim=64,
        rope_dim=64,
        per_token=4,
        groups=4,
        groups_chosen=2,
        layers=4,
        dtype="bfloat16",
    ),
    "mistral": TinyModel(
        family="mistral", hidden=320, heads=16, head_dim=64, layers=4, window=200, dtype="bfloat16"
    ),
}

PROMPT, DRAWN = 700, 24
GRAPHS, CUTS = (1, 2, 4), (4, 16, 64)
# Lengths of the steps in which a prompt is computed: at once, in chunks that are launched, in ones
# that run in pieces, row by row.
STEPS = {
    "whole": (PROMPT,),
    "chunks": (300, 1, 333, 66),
    "pieces": (600, 64, 3, 20, 13),
    "decodes": (680, *(1,) * 20),
}
# What bfloat16 makes of logits, root of the mean square in parts of their spread; and how far below
# the maximum of float32 a greedy token's logit may lie, in the same parts.
OFF, EPSILON = 0.03, 0.15


def prompt(model: TinyModel, seed: int = 1) -> Tokens:
    return recalling(PROMPT, model.vocab, seed=seed)


def exact(folder: pathlib.Path, tokens: Tokens) -> torch.Tensor:
    """Logits [tokens, vocab] of the CPU's engine in float32, which is held against transformers."""
    return logits_of(SoloEngine(folder, pages=32), tokens, (len(tokens),))


def logits_of(engine: SoloEngine, tokens: Tokens, lengths: Sequence[int]) -> torch.Tensor:
    """Logits of all rows, computed in steps of these lengths; [rows, vocab] on the host."""
    assert sum(lengths) == len(tokens)
    engine.start(1, tokens)
    actual = [engine.step((1, length)).float().cpu().clone() for length in lengths]
    engine.end(1)
    return torch.cat(actual)


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of the mean square of the error, in parts of what is expected's spread."""
    return float((actual - expected).square().mean().sqrt() / expected.std())


def below(folder: pathlib.Path, text: Tokens, drawn: Sequence[int]) -> float:
    """Return the largest gap of drawn tokens below float32's maximum, relative to the spread.

    Both are computed after the same earlier tokens.
    """
    logits = exact(folder, np.concatenate([text, np.array(drawn[:-1], dtype=np.int32)]))
    rows = logits[len(text) - 1 :]
    lacking = rows.max(-1).values - rows.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    return float(lacking.max() / logits.std())


def written(model: TinyModel, folder: pathlib.Path) -> pathlib.Path:
    return write_checkpoint(folder, model)


# --- needles --------------------------------------------------------------------------------------

PHRASES, WORDS = 12, 8


def copying(tokens: int) -> TinyModel:
    """A model that copies what followed the same two words, up to `tokens` back."""
    return TinyModel(
        layers=3,
        hidden=520,
        heads=2,
        kv_heads=2,
        head_dim=128,
        intermediate=128,
        max_tokens=2 * tokens,
        rope_theta=1e12,
        reach=2 * tokens,
        dtype="bfloat16",
    )


def needles(engine: SoloEngine, tokens: int, chunk: int) -> float:
    """The part of words found: phrases that stand once, at all depths of a prompt, come again at
    its end, and from two words each is to be known how it goes on."""
    dice = np.random.default_rng(7)
    phrases = dice.permutation(np.arange(400, 512))[: PHRASES * WORDS].astype(np.int32)
    phrases = phrases.reshape(PHRASES, WORDS)
    every = tokens // (PHRASES + 1)
    text = dice.integers(5, 400, (PHRASES + 1, every)).astype(np.int32)
    parts = [part for both in zip(text, phrases, strict=False) for part in both]
    first = np.concatenate([*parts, text[-1]])
    again = phrases[dice.permutation(PHRASES)]
    engine.start(1, np.concatenate([first, again.reshape(-1)]))
    for at in range(0, len(first), chunk):
        inputs = min(chunk, len(first) - at)
        engine.step((1, inputs))
    logits = engine.step((1, again.size)).float().cpu()
    engine.end(1)
    predicted = logits.argmax(-1).view(PHRASES, WORDS)[:, 1:-1]
    return float((predicted == torch.from_numpy(again[:, 2:])).float().mean())
