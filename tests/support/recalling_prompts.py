"""Prompts whose continuation depends on text far back."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def recalling(
    tokens: int, vocab: int, seed: int = 0, first: int = 5, phrase: int = 12
) -> npt.NDArray[np.int32]:
    """Return [tokens] random ids in [first, vocab), about a third of them repeated phrases.

    The last ids begin such a phrase, so that copying heads find a continuation.
    """
    dice = np.random.default_rng(seed)
    prompt = dice.integers(first, vocab, tokens).astype(np.int32)
    at = 3 * phrase
    while at + phrase <= tokens:
        source = int(dice.integers(0, at - phrase))
        prompt[at : at + phrase] = prompt[source : source + phrase]
        at += int(dice.integers(2 * phrase, 4 * phrase))
    if tokens >= 3 * phrase:
        source = int(dice.integers(0, tokens // 2))
        prompt[-phrase // 2 :] = prompt[source : source + (phrase + 1) // 2]
    return prompt
