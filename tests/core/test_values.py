"""Prefix names, model arithmetic, deadlines, batches and configs."""

from __future__ import annotations

import pathlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.batch import Batch, Chunk
from medha.config import RouterConfig, RouterModel, read, render
from medha.errors import SpecError
from medha.fleet.prefix_index import HASH_BYTES, chain, salt_of
from medha.model import pairs
from medha.request import Request, Slo
from medha.sim.scenario import LLAMA_3_8B


def test_llama_3_8b_has_eight_billion_parameters_and_128_kib_of_kv_per_token() -> None:
    assert LLAMA_3_8B.params == 8_030_261_248
    assert LLAMA_3_8B.kv_bytes_per_token == 131_072


def test_attention_flops_are_those_of_the_causal_pairs() -> None:
    pairs = sum(10 + i + 1 for i in range(7))
    assert LLAMA_3_8B.attention_flops(7, 10) == 4 * pairs * 32 * 128


@pytest.mark.parametrize("window", [1, 5, 16, 17, 18, 30])
def test_rows_of_a_windowed_layer_are_paired_with_the_keys_in_sight(window: int) -> None:
    for chunk in (1, 7, 16):
        for prefix in (0, 3, 10, 40):
            counted = sum(min(prefix + i + 1, window) for i in range(chunk))
            assert pairs(chunk, prefix, window) == counted
    half = msgspec.structs.replace(LLAMA_3_8B, window_tokens=window, window_layers=16)
    both = (pairs(7, 10) + pairs(7, 10, window)) / 2
    assert half.attention_flops(7, 10) == 4 * both * 32 * 128


@given(st.lists(st.integers(0, 99), max_size=40), st.integers(0, 39), st.integers(1, 8))
def test_page_names_agree_exactly_up_to_the_first_difference(
    tokens: list[int], place: int, page: int
) -> None:
    ours = np.array(tokens, dtype=np.int32)
    theirs = ours.copy()
    if tokens:
        theirs[place % len(tokens)] += 1
    a, b = (list(chain(t, page, b"salt")) for t in (ours, theirs))
    assert len(a) == len(tokens) // page and all(len(name) == HASH_BYTES for name in a)
    same = (place % len(tokens)) // page if tokens else 0
    assert a[:same] == b[:same]
    assert not set(a[same:]) & set(b[same:])


def test_tenants_and_models_share_no_page_name() -> None:
    salts = {
        salt_of(model, tenant, key)
        for model in ("a", "ab")
        for tenant in ("", "b")
        for key in (b"", b"k")
    }
    assert len(salts) == 8
    assert salt_of("a", "bc") != salt_of("ab", "c")


def test_a_deadline_is_the_floor_or_the_multiple_of_the_work() -> None:
    slo = Slo(ttft_floor_s=0.5, ttft_multiplier=1.5)
    assert slo.ttft_deadline_s(0.1) == 0.5
    assert slo.ttft_deadline_s(10.0) == 15.0
    request = Request(id="a", arrival_s=3.0, prompt_tokens=5, ttft_deadline_s=15.0)
    assert request.due_s == 18.0 and request.total_tokens == 6


def test_a_batch_knows_its_groups_and_what_each_runs() -> None:
    short = Chunk(1, 0, 32, (1,), 1)
    long = Chunk(2, 64, 32, (0, 2), 2)
    batch = Batch(1, 1, (short, long))
    assert batch.groups == (0, 1, 2) and batch.tokens == 64
    assert batch.of_group(2) == (long,) and batch.of_group(1) == (short,)
    assert long.shared and not short.shared and long.end == 96


def test_a_config_file_is_read_as_it_was_rendered(tmp_path: pathlib.Path) -> None:
    config = RouterConfig(
        fleet_bind="tcp://127.0.0.1:1", models=(RouterModel(name="m", max_context_tokens=9),)
    )
    (tmp_path / "router.json").write_bytes(render(config))
    assert read(RouterConfig, tmp_path / "router.json") == config


@pytest.mark.parametrize(
    "text", [b"{}", b'{"fleet_bind": "\xff"}', b"[1", b'{"fleet_bind": 1}', b'{"porrt": 1}']
)
def test_a_broken_config_file_is_named_with_its_fault(tmp_path: pathlib.Path, text: bytes) -> None:
    path = tmp_path / "router.json"
    path.write_bytes(text)
    with pytest.raises(SpecError, match=r"router\.json"):
        read(RouterConfig, path)


def test_a_missing_config_file_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SpecError, match="must be readable"):
        read(RouterConfig, tmp_path / "none.json")


def test_values_cannot_be_written_to() -> None:
    with pytest.raises(AttributeError):
        LLAMA_3_8B.layers = 3  # type: ignore[misc]
    assert msgspec.structs.replace(LLAMA_3_8B, layers=3).layers == 3
