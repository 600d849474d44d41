"""Windows in every layer: dropped pages change no logit, whatever else is scheduled.

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
from tests.support.scheduled_engine import Answer, ScheduledEngine

from medha.config import Scheduling
from medha.model import KeptPages
from medha.testing import leftovers
from medha_worker.model.checkpoint_writer import TinyModel

Tokens = npt.NDArray[np.int32]
Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, Tokens], torch.Tensor]

TOLERANCE = 1e-4
AHEAD = Scheduling(ahead_s=10.0)
MODELS = {
    "mistral, 64": TinyModel(family="mistral", window=64),
    "mistral, 100": TinyModel(family="mistral", window=100, layers=3),
    "qwen2, all layers": TinyModel(family="qwen2", window=64, layers=3),
    "qwen3_moe": TinyModel(family="qwen3_moe", window=100, layers=3),
}


def check(answer: Answer, folder: pathlib.Path, oracle: Oracle) -> None:
    """Compare logits and tokens of the output with those of transformers."""
    assert answer.done
    tokens = np.array(answer.tokens, dtype=np.int32)
    expected = oracle(folder, tokens)[answer.prompt_tokens - 1 : -1]
    actual = torch.stack([answer.logits[at] for at in sorted(answer.logits)])
    error = float((actual - expected).abs().max() / expected.std())
    assert error < TOLERANCE
    assert actual.argmax(-1).tolist() == answer.tokens[answer.prompt_tokens :]


@pytest.mark.parametrize("chunk", [16, 48, 500])
@pytest.mark.parametrize("settings", [Scheduling(), AHEAD], ids=["", "decided ahead"])
@pytest.mark.parametrize("name", MODELS)
def test_mixed_batches_that_pass_the_window_many_times_agree_with_transformers(
    name: str, settings: Scheduling, chunk: int, checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(MODELS[name])
    served = ScheduledEngine(folder, pages=260, chunk=chunk, settings=settings)
    answers = []
    for number, tokens in enumerate((1, 15, 63, 64, 65, 99, 101, 333, 700)):
        answers.append(served.submit(f"r{number}", recalling(tokens, 512, seed=tokens), 150))
        served.run(steps=3)
    served.run()
    for answer in answers:
        check(answer, folder, oracle)
    window = MODELS[name].window
    assert served.most_held <= -(-(window + chunk) // 16) + 2
    assert leftovers(served.scheduler) == {}


@pytest.mark.parametrize("pages", [KeptPages.pages, KeptPages.least])
def test_the_longest_prompt_fits_into_the_pages_of_a_window(
    pages: Callable[[KeptPages, int], int], checkpoint: Folder, oracle: Oracle
) -> None:
    """A context of 8,150 tokens in a pool of 2,128, and in one of 96."""
    folder = checkpoint(TinyModel(family="mistral", window=64, layers=2))
    served = ScheduledEngine(folder, pages=pages(KeptPages(64, 16), 8192), chunk=1000)
    answer = served.submit("long", recalling(8000, 512, seed=8), 150)
    served.run()
    check(answer, folder, oracle)
    assert leftovers(served.scheduler) == {}


@pytest.mark.parametrize("name", MODELS)
def test_hits_within_and_beyond_the_window_agree_with_transformers(
    name: str, checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(MODELS[name])
    served = ScheduledEngine(folder, pages=160, chunk=96)
    shared = recalling(1000, 512, seed=1)
    answers = [served.submit("first", shared, 2)]
    served.run()
    for number, cut in enumerate((40, 96, 500, 992, 1000)):
        own = recalling(70 + number, 512, seed=50 + number)
        prompt = np.concatenate([shared[:cut], own])
        answers.append(served.submit(f"hit{number}", prompt, 130))
        assert answers[-1].cached_tokens >= cut // 16 * 16
        served.run(steps=2)
    served.run()
    for answer in answers:
        check(answer, folder, oracle)
    assert leftovers(served.scheduler) == {}


def test_preempted_sequences_go_on_as_if_nothing_had_happened(
    checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(MODELS["mistral, 100"])
    for prefix_cache in (True, False):
        settings = Scheduling(prefix_cache=prefix_cache, output_reserve=0.0)
        served = ScheduledEngine(folder, pages=30, chunk=64, settings=settings)
        answers = [
            served.submit(f"r{number}", recalling(20 + 9 * number, 512, seed=number), 220)
            for number in range(7)
        ]
        served.run()
        for answer in answers:
            check(answer, folder, oracle)
        assert served.scheduler._lifecycle.preempted_count > 0
        assert leftovers(served.scheduler) == {}


def test_models_with_a_window_in_some_layers_keep_all_pages(
    checkpoint: Folder, oracle: Oracle
) -> None:
    folder = checkpoint(TinyModel(family="qwen2", window=64, window_from=2, layers=4))
    served = ScheduledEngine(folder, pages=100, chunk=96)
    answer = served.submit("long", recalling(700, 512, seed=3), 150)
    served.run()
    check(answer, folder, oracle)
    assert served.most_held == -(-849 // 16)
