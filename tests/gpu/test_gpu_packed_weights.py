"""Packed weights on a GPU: dequantised there at load, 4 bits multiplied by torch's kernel, and FP8
dequantised in tiles at use."""

from __future__ import annotations

import pathlib

import pytest
import torch
from tests.gpu.models import (
    CUTS,
    GRAPHS,
    MODELS,
    OFF,
    STEPS,
    exact,
    logits_of,
    off,
    prompt,
    written,
)
from tests.support.quantiser import FORMATS, quantise
from tests.support.solo_engine import SoloEngine

from medha.checkpoints.decoder_config import read_config
from medha_worker.device import device_of
from medha_worker.graphs import CudaGraphRecorder
from medha_worker.model.experts import Experts
from medha_worker.weights import Checkpoint, load

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
    pytest.mark.kernels(128),
]
MODEL = MODELS["llama"]
FP8 = ("fp8, blocks", "fp8, narrow blocks", "compressed-tensors, outputs")


@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_dequantises_to_the_bits_of_a_cpu(name: str, tmp_path: pathlib.Path) -> None:
    folder, _ = quantise(written(MODEL, tmp_path / "model"), tmp_path, FORMATS[name])
    config = read_config(folder)
    on_cpu, on_gpu = (
        load(Checkpoint(folder), config, range(2), 1, 2, torch.bfloat16, device=device)
        for device in ("cpu", "cuda")
    )
    for here, there in zip(on_cpu.layers, on_gpu.layers, strict=True):
        assert torch.equal(here.qkv.by_output(), there.qkv.by_output().cpu())
        assert torch.equal(here.out.by_output(), there.out.by_output().cpu())


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_logits_with_packed_weights_are_those_of_float32(
    name: str, steps: str, recorded: bool, tmp_path: pathlib.Path
) -> None:
    folder, plain = quantise(written(MODEL, tmp_path / "model"), tmp_path, FORMATS[name])
    engine = SoloEngine(
        folder, pages=64, dtype=torch.bfloat16, device=device_of("cuda"), packed=True
    )
    if recorded:
        engine.record(CudaGraphRecorder(), GRAPHS, CUTS)
    actual = logits_of(engine, prompt(MODEL), STEPS[steps])
    assert off(actual, exact(plain, prompt(MODEL))) < OFF


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("name", FP8)
def test_kept_fp8_weights_are_the_bits_of_a_cpu(
    name: str, family: str, tmp_path: pathlib.Path
) -> None:
    folder, _ = quantise(written(MODELS[family], tmp_path / "model"), tmp_path, FORMATS[name])
    config = read_config(folder)
    on_cpu, on_gpu = (
        load(Checkpoint(folder), config, range(2), 1, 2, torch.bfloat16, device=device, packed=kept)
        for device, kept in (("cpu", False), ("cuda", True))
    )
    for here, there in zip(on_cpu.layers, on_gpu.layers, strict=True):
        pairs = [(here.qkv, there.qkv), (here.out, there.out)]
        if isinstance(here.mlp, Experts) and isinstance(there.mlp, Experts):
            pairs += zip(here.mlp.gate_up, there.mlp.gate_up, strict=True)
            pairs += zip(here.mlp.down, there.mlp.down, strict=True)
        for own, other in pairs:
            assert torch.equal(own.by_output(), other.by_output().cpu())


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", FP8)
def test_logits_with_fp8_weights_are_those_of_float32(
    name: str, steps: str, recorded: bool, tmp_path: pathlib.Path
) -> None:
    folder, plain = quantise(written(MODEL, tmp_path / "model"), tmp_path, FORMATS[name])
    engine = SoloEngine(
        folder, pages=64, dtype=torch.bfloat16, device=device_of("cuda"), packed=True
    )
    if recorded:
        engine.record(CudaGraphRecorder(), GRAPHS, CUTS)
    actual = logits_of(engine, prompt(MODEL), STEPS[steps])
    assert off(actual, exact(plain, prompt(MODEL))) < OFF


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("steps", STEPS)
def test_logits_of_experts_in_tiles_are_those_of_float32(
    steps: str, family: str, tmp_path: pathlib.Path
) -> None:
    model = MODELS[family]
    folder, plain = quantise(written(model, tmp_path / "model"), tmp_path, FORMATS["fp8, blocks"])
    engine = SoloEngine(
        folder, pages=64, dtype=torch.bfloat16, device=device_of("cuda"), packed=True
    )
    actual = logits_of(engine, prompt(model), STEPS[steps])
    assert off(actual, exact(plain, prompt(model))) < OFF
