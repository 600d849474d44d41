"""Selection of the kernels compiled before GPU tests and benchmarks, all in one build."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import Any

import pytest
from tests.gpu.conftest import needs
from tests.support.compiling import arch_of, specs, wanted

DECODE = "batch_decode_with_kv_cache_dtype_q_bf16_dtype_kv_{}_use_swa_{}_use_logits_cap_False"
CHUNK = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_{}_use_swa_{}_f16qk_False{}"


def test_pages_of_fp8_are_compiled_for_where_they_are_used() -> None:
    for name in ("norm", DECODE.format("bf16", True), CHUNK.format("bf16", False, "_sm90")):
        assert wanted(name, False) and wanted(name, True)
    for name in (DECODE.format("e4m3", False), CHUNK.format("e4m3", True, "")):
        assert wanted(name, True) and not wanted(name, False)


def test_architectures_are_called_as_the_compiler_calls_them() -> None:
    assert [arch_of(8, 0), arch_of(8, 9), arch_of(9, 0)] == ["8.0", "8.9", "9.0a"]


class Chosen:
    """A test as pytest collects it."""

    def __init__(self, name: str, *head_dims: int) -> None:
        self.name, self.args = name, head_dims

    def iter_markers(self, name: str) -> list[Chosen]:
        return [self] if name == "kernels" else []


def test_chosen_tests_say_which_heads_they_attend_and_in_which_pages() -> None:
    chosen: list[Any] = [
        Chosen("test_a[bf16]", 128),
        Chosen("test_a[fp8]", 128),
        Chosen("test_b", 64, 128),
    ]
    assert needs(chosen) == [(64, False), (128, False), (128, True)]
    assert needs(chosen[:1]) == [(128, False)] and needs([]) == []


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
def test_modules_are_named_once_however_often_they_are_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    names = [spec.name for spec in specs([(128, True), (128, False), (64, False)], "9.0a")]
    assert len(names) == len(set(names)) and {"norm", "rope", "silu_and_mul"} <= set(names)
    assert sum("head_dim_qk_64" in name for name in names) == 5
