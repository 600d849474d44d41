"""Deterministic arithmetic on a real GPU: the same bytes whatever a request is batched with.

Run when named: python -m pytest tests/gpu
"""

from __future__ import annotations

import pathlib

import pytest
import torch
from msgspec.structs import replace
from tests.support.served import Served, Wish

from medha.config import Scheduling
from medha.messages import BatchTokens, RankReport, Sampling
from medha.profile import H200
from medha_worker.device import device_of
from medha_worker.engine import PRODUCT_ROWS
from medha_worker.model.checkpoint_writer import TinyModel, write_config
from medha_worker.model.layers import Linear
from medha_worker.runner import LaunchedBatch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

MODEL = TinyModel(
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=1408,
    vocab=4096,
    max_tokens=65_536,
)
SHAPES = [(4096, 6144), (4096, 4096), (4096, 28_672), (14_336, 4096), (4096, 128_256)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_products_row_has_the_same_bits_wherever_it_stands(shape: tuple[int, int]) -> None:
    """Of Llama-3-8B's shapes, in every place of a block, with any neighbours."""
    at = device_of("cuda", deterministic=True).at
    dice = torch.Generator(at).manual_seed(0)
    weight = torch.randn(shape[1], shape[0], device=at, dtype=torch.bfloat16, generator=dice).t()
    linear = Linear(weight, rows=PRODUCT_ROWS)
    row = torch.randn(1, shape[0], device=at, dtype=torch.bfloat16, generator=dice)
    alone = linear(row)
    for rows, place in ((2, 1), (64, 40), (128, 127), (129, 128), (500, 255), (2048, 1033)):
        x = torch.randn(rows, shape[0], device=at, dtype=torch.bfloat16, generator=dice)
        x[place] = row
        assert torch.equal(linear(x)[place], alone[0]), (rows, place)


def texts(served: Served, wishes: list[Wish]) -> dict[int, list[int]]:
    """Every request's tokens; prompts follow the order in which requests come."""
    finish, drawn = served.runner.finish, dict[int, list[int]]()

    def noted(launched: LaunchedBatch) -> list[RankReport]:
        reports = finish(launched)
        for report in reports:
            if isinstance(report, BatchTokens):
                for token in report.tokens:
                    drawn.setdefault(token.seq, []).append(token.token)
        return reports

    served.runner.finish = noted  # type: ignore[method-assign]
    served.play(wishes)
    return drawn


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_texts_are_the_same_bytes_in_chunks_of_any_size_beside_any_others(
    tmp_path: pathlib.Path, family: str, kv_dtype: str
) -> None:
    window = 700 if family == "mistral" else 0
    write_config(tmp_path, replace(MODEL, family=family, window=window))
    device = device_of("cuda", deterministic=True)

    def play(most: int, apart_s: float) -> dict[int, list[int]]:
        served = Served(
            tmp_path,
            device,
            profile=H200,
            pages=1024,
            kv_dtype=kv_dtype,
            deterministic=True,
            settings=Scheduling(budget="tokens", batch_tokens=most),
        )
        wishes = [
            Wish(
                prompt_tokens=300 * n + 17,
                output_tokens=40,
                arrival_s=apart_s * n,
                sampling=Sampling(temperature=0.8 * (n % 2), top_p=0.9, seed=n),
            )
            for n in range(1, 12)
        ]
        return texts(served, wishes)

    expected = play(2048, 0.0)
    assert len(expected) == 11 and all(len(tokens) == 40 for tokens in expected.values())
    assert play(2048, 0.05) == expected, "in other company"
    assert play(128, 0.0) == expected, "in smaller chunks"
