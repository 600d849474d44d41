"""Prompts that take over pages which others compute: no logit changes.

The real scheduler decides, unused pages are NaN, and transformers is the oracle.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.recalling_prompts import recalling
from tests.support.scheduled_engine import ScheduledEngine

from medha.config import Scheduling
from medha.testing import leftovers
from medha_worker.model.checkpoint_writer import TinyModel

Tokens = npt.NDArray[np.int32]
TOLERANCE = 1e-4


@pytest.mark.parametrize("chunk", [20, 48])
@pytest.mark.parametrize("settings", [Scheduling(), Scheduling(ahead_s=10.0)], ids=["", "ahead"])
def test_prompts_of_one_history_that_arrive_at_once_agree_with_transformers(
    settings: Scheduling,
    chunk: int,
    checkpoint: Callable[[TinyModel], pathlib.Path],
    oracle: Callable[[pathlib.Path, Tokens], torch.Tensor],
) -> None:
    folder = checkpoint(TinyModel())
    served = ScheduledEngine(folder, pages=260, chunk=chunk, settings=settings)
    history = recalling(333, 512, seed=1)
    prompts = [
        np.concatenate([history[:shared], recalling(own, 512, seed=own)])
        for shared, own in ((333, 40), (333, 9), (320, 64), (160, 100), (0, 50))
    ]
    answers = []
    for number, prompt in enumerate(prompts):
        answers.append(served.submit(f"r{number}", prompt, 5))
        served.run(steps=2)
    served.run()
    assert served.caught_up
    for answer in answers:
        assert answer.done
        tokens = np.array(answer.tokens, dtype=np.int32)
        expected = oracle(folder, tokens)[answer.prompt_tokens - 1 : -1]
        actual = torch.stack([answer.logits[at] for at in sorted(answer.logits)])
        assert float((actual - expected).abs().max() / expected.std()) < TOLERANCE
    assert leftovers(served.scheduler) == {}
