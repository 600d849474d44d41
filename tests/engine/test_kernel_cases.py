"""The cases that GPUs are tested with, by the oracle of their kernels; splits as on an H200."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from benchmarks import gpu_kernels
from tests.engine import plain_library
from tests.support.paged_case import (
    CASES,
    EXACT,
    NARROW,
    Case,
    Off,
    Work,
    difference,
    lay,
    limit,
)

from medha_worker import engine
from medha_worker.attention.flashinfer_plan import Geometry
from medha_worker.attention.fp8_scales import FP8
from medha_worker.attention.paged import PagedAttention

CPU = torch.device("cpu")
CLOSE = Off(1e-4, 1e-4, 1e-4)
SMALL = Geometry(
    heads=4, kv_heads=2, head_dim=16, page_tokens=64, dtype=torch.float32, kv_dtype=torch.float32
)
NARROW_PAGES = Geometry(
    heads=4, kv_heads=2, head_dim=16, page_tokens=64, dtype=torch.float32, kv_dtype=FP8
)


def backend(geometry: Geometry) -> PagedAttention:
    return PagedAttention(geometry, plain_library, CPU)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_cases_for_a_gpu_are_sound_by_the_oracle_of_its_kernels(case: Case) -> None:
    """Over pools where unused slots are NaN; prefixes are cut as on an H200."""
    laid = lay(case, SMALL, CPU)
    actual = backend(SMALL).plan(laid.spans).run(laid.q, laid.k, laid.v, laid.pool)
    assert difference(actual, laid.expected(SMALL)).within(CLOSE)


def test_a_case_in_fp8_is_close_by_the_oracle_of_its_kernels() -> None:
    laid = lay(Case("", (Work(40_000, 20), Work(700, 1), Work(0, 70))), NARROW_PAGES, CPU)
    plan = backend(NARROW_PAGES).plan(laid.spans)
    actual = plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)
    off = difference(actual, laid.expected(NARROW_PAGES))
    assert off.within(NARROW) and off.typical > 1e-3


def test_fp8_through_a_window_is_attended_with_queries_in_the_models_type() -> None:
    """The oracle refuses what `fa3` hangs on."""
    for window, kernel in ((0, "fa3"), (1024, "fa2")):
        assert NARROW_PAGES.kernel_for(window) == kernel
        assert NARROW_PAGES.narrow_queries(window) == (kernel == "fa3")
        assert SMALL.kernel_for(window) == "fa3" and not SMALL.narrow_queries(window)
    case = next(case for case in CASES if case.window)
    laid, attention = lay(case, NARROW_PAGES, CPU), backend(NARROW_PAGES)
    actual = attention.plan(laid.spans).run(laid.q, laid.k, laid.v, laid.pool, laid.scales)
    assert limit(case, NARROW_PAGES) == EXACT
    assert difference(actual, laid.expected(NARROW_PAGES)).within(EXACT)


def test_a_pool_that_leaves_too_little_for_large_chunks_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In FP8, 2,048 rows after 900 K tokens are cut in 64 parts; else keys are gathered too."""
    shape = Geometry(
        heads=32, kv_heads=8, head_dim=128, page_tokens=64, dtype=torch.bfloat16, kv_dtype=FP8
    )
    room = backend(shape).scratch_bytes
    assert 5.3 < room / 1e9 < 5.6
    same = dataclasses.replace(shape, kv_dtype=torch.bfloat16)
    assert 1 << 29 < backend(same).scratch_bytes < 1.3e9
    assert backend(dataclasses.replace(same, kernel="fa2")).scratch_bytes == 0
    engine.warn_if_memory_is_tight(room, room)
    assert not caplog.records
    engine.warn_if_memory_is_tight(1 << 30, room)
    assert "1.0 GiB of the GPU are free" in caplog.text and "kvMemory lower" in caplog.text


def test_a_wrong_state_is_told() -> None:
    laid = lay(Case("", (Work(100, 1), Work(0, 2, False))), SMALL, CPU)
    expected = laid.expected(SMALL)
    actual = backend(SMALL).plan(laid.spans).run(laid.q, laid.k, laid.v, laid.pool)
    assert difference(actual, expected).within(CLOSE)
    actual.out[0] *= 1.5
    assert difference(actual, expected).worst > 0.4
    actual.lse[1] = 0.0  # a row that sees nothing
    assert not difference(actual, expected).within(NARROW)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here, which it would measure")
def test_the_benchmark_says_in_a_sentence_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_kernels.py"])
    assert gpu_kernels.main() == 2
    assert capsys.readouterr().err == "gpu_kernels.py measures a GPU, and torch finds none here\n"


def test_a_benchmarks_target_is_reached_missed_or_absent() -> None:
    assert [
        gpu_kernels.row("", "", *row).verdict
        for row in (
            (5.0, "GB/s", 4.0),
            (3.0, "GB/s", 4.0),
            (1.0, "% off", -2.0),
            (3.0, "% off", -2.0),
            (float("nan"), "% off", -2.0),
            (3.0, "GB/s"),
        )
    ] == ["met", "MISSED", "met", "MISSED", "MISSED", ""]
