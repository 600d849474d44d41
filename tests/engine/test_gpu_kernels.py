"""The kernel benchmark judges, over the kernels' oracle on a CPU: what is exact and what is not."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from benchmarks import gpu_kernels
from tests.engine import plain_library
from tests.support.paged_case import Case
from tests.support.paged_case import Work as Rows

from medha_worker import flashinfer
from medha_worker.attention.flashinfer_plan import Geometry
from medha_worker.attention.fp8_scales import FP8
from medha_worker.attention.paged import PagedAttention
from medha_worker.graphs import Replay, Work

MIXED = Case("a chunk and a decode", (Rows(700, 20), Rows(300, 1)))
SINGLES = Case("decodes", (Rows(700, 1), Rows(0, 1), Rows(64, 1)))


class Again:
    """Records by calling once more, into the same memory."""

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        def replay() -> None:
            work()

        return work(), replay


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, whose backend is the oracle."""

    def backend(dtype: torch.dtype, tensor: bool = False) -> PagedAttention:
        geometry = Geometry(
            heads=4,
            kv_heads=2,
            head_dim=64,
            page_tokens=64,
            dtype=torch.bfloat16,
            kv_dtype=dtype,
            kernel="fa3",
            decodes="tensor" if tensor else "cores",
        )
        library: flashinfer.Library = plain_library  # type: ignore[assignment]
        return PagedAttention(geometry, library, torch.device("cpu"))

    for name, twin in (
        ("backend", backend),
        ("CudaGraphRecorder", Again),
        ("poison", lambda at: None),
    ):
        monkeypatch.setattr(gpu_kernels, name, twin)
    return gpu_kernels


@pytest.mark.parametrize("name", ["bf16", "fp8"])
@pytest.mark.parametrize("how", ["", "tensor cores", "a graph"])
def test_exact_kernels_are_found_exact_however_rows_run(
    script: ModuleType, name: str, how: str
) -> None:
    row = script.off(name, SINGLES if how else MIXED, how)
    assert row.met and row.value < row.target and name in row.what and how in row.what


@pytest.mark.parametrize("how", ["", "tensor cores", "a graph"])
def test_a_kernel_that_forgets_its_last_keys_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    lengths = plain_library._lengths

    def short(*arguments: object) -> list[int]:
        return [max(1, count - 9) for count in lengths(*arguments)]  # type: ignore[arg-type]

    monkeypatch.setattr(plain_library, "_lengths", short)
    row = script.off("bf16", Case("", (Rows(40, 1), Rows(64, 1))), how)
    assert row.met is False


def test_what_is_timed_is_checked_in_each_type_of_pages(script: ModuleType) -> None:
    assert set(script.TYPES.values()) == {torch.bfloat16, FP8}
    assert max(work.held for case in script.LONG for work in case.works) == 1_000_000
    assert {work.length for case in script.LONG for work in case.works} >= {1, 64}
