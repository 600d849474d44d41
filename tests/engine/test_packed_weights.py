"""Packed weights: each format read as defined, in any shard, and settings that are not served."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.gpu.models import MODELS, OFF, STEPS, exact, logits_of, off, prompt
from tests.support.quantiser import FORMATS, Format, quantise, settings_of
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from torch._subclasses.fake_tensor import FakeTensorMode

from medha.checkpoints.checkpoint_files import held_tensors
from medha.checkpoints.decoder_config import DecoderConfig, read_config
from medha.checkpoints.fit import check_packed, packed_bytes
from medha.checkpoints.quantization import Quantization
from medha.checkpoints.tensor_names import check_tensors
from medha.config import WorkerConfig
from medha.errors import CheckpointError, SpecError
from medha.model import ModelShape
from medha.predictor import Products
from medha.profile import Profile, Tile
from medha.topology import Coordinate, Topology
from medha_worker.device import CPU
from medha_worker.engine import RankEngine
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.int4_linear import Int4Linear, int4_linear
from medha_worker.model.layers import GatedMlp, Projection, linear
from medha_worker.model.packed_weights import Int4Parts
from medha_worker.weights import Checkpoint, Weights, load

Folder = Callable[[TinyModel], pathlib.Path]
Quantised = Callable[[str, TinyModel], tuple[pathlib.Path, pathlib.Path]]
# TP 2 halves a word of 8 outputs, a group of 8 inputs, and blocks.
HALVED = TinyModel(layers=2, intermediate=344)

EVEN_OF = {
    "llama": TinyModel(layers=2, intermediate=384),
    "qwen2": TinyModel(family="qwen2", layers=2, intermediate=384, tied=True),
}

format_ = pytest.mark.parametrize("name", FORMATS)


@pytest.fixture(scope="module")
def quantised(checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    """The packed checkpoint and the plain one of the same weights, written when first asked for."""

    @functools.cache
    def folders(name: str, model: str) -> tuple[pathlib.Path, pathlib.Path]:
        return quantise(
            checkpoint(models[model]), tmp_path_factory.mktemp("quantised"), FORMATS[name]
        )

    models: dict[str, TinyModel] = {}

    def made(name: str, model: TinyModel) -> tuple[pathlib.Path, pathlib.Path]:
        models[repr(model)] = model
        return folders(name, repr(model))

    return made


def tensors(held: object) -> Iterator[torch.Tensor]:
    """Every tensor of a rank's weights, in order."""
    if isinstance(held, torch.Tensor):
        yield held.to_dense() if held.is_mkldnn else held
    elif dataclasses.is_dataclass(held):
        for field in dataclasses.fields(held):
            yield from tensors(getattr(held, field.name))
    elif isinstance(held, tuple):
        for part in held:
            yield from tensors(part)


def loaded(
    folder: pathlib.Path, shard: int = 0, tp: int = 1, dtype: torch.dtype = torch.float32
) -> Weights:
    config = read_config(folder)
    return load(Checkpoint(folder), config, range(config.layers), shard, tp, dtype)


@format_
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(
    "model",
    [HALVED, FAMILIES["qwen3_moe"], FAMILIES["deepseek_v3"]],
    ids=["dense", "experts", "latents"],
)
def test_a_shard_holds_what_the_packed_numbers_stand_for(
    name: str, tp: int, model: TinyModel, quantised: Quantised
) -> None:
    packed, plain = quantised(name, model)
    for shard in range(tp):
        actual, expected = (list(tensors(loaded(folder, shard, tp))) for folder in (packed, plain))
        assert len(actual) == len(expected) > 10
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@format_
def test_narrow_types_round_the_dequantised_weight_once(name: str, quantised: Quantised) -> None:
    packed, plain = quantised(name, HALVED)
    actual, expected = (list(tensors(loaded(f, dtype=torch.bfloat16))) for f in (packed, plain))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@format_
def test_tokens_are_those_of_the_dequantised_checkpoint(name: str, quantised: Quantised) -> None:
    prompts = [recalling(length, 512, seed=length) for length in (30, 130, 300)]
    packed, plain = (
        SoloEngine(folder, pages=32).generate(prompts, 20, chunk=64)
        for folder in quantised(name, HALVED)
    )
    assert packed == plain


@format_
def test_packed_weights_have_the_names_that_are_checked(
    name: str, quantised: Quantised, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(quantised(name, HALVED)[0], tmp_path / "packed")
    model = read_config(folder)
    check_tensors(folder, held_tensors(folder), model)
    assert model.quantization is not None
    lost = "model.layers.0.self_attn.k_proj" + model.quantization.suffix
    held = load_file(folder / "model.safetensors")
    del held[lost]
    save_file(held, folder / "model.safetensors")
    for check in (
        lambda: check_tensors(folder, held_tensors(folder), model),
        lambda: loaded(folder),
    ):
        with pytest.raises(CheckpointError, match=f"has no tensor {lost}, which"):
            check()


@format_
def test_each_part_of_a_packed_weight_is_checked_before_loading(
    name: str, quantised: Quantised, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(quantised(name, HALVED)[0], tmp_path / "packed")
    model = read_config(folder)
    assert model.quantization is not None
    file = folder / "model.safetensors"
    held = load_file(file)
    module = "model.layers.0.self_attn.k_proj."
    free = ("input_scale", "weight_shape", *(() if model.quantization.ordered else ("g_idx",)))
    parts = [part for part in held if part.startswith(module) and not part.endswith(free)]
    assert len(parts) > 1
    for part in parts:
        for changed in (held[part].to(torch.int64), None):
            others = {**held, part: changed}
            save_file({name: own for name, own in others.items() if own is not None}, file)
            for check in (
                lambda: check_tensors(folder, held_tensors(folder), model),
                lambda: loaded(folder),
            ):
                with pytest.raises(CheckpointError, match=re.escape(part.removesuffix("_inv"))):
                    check()


@pytest.mark.parametrize("name", ["fp8, blocks", "modelopt", "awq", "pack-quantized"])
def test_scales_with_which_no_answer_is_sound_are_named(
    name: str, quantised: Quantised, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(quantised(name, HALVED)[0], tmp_path / "packed")
    file = folder / "model.safetensors"
    held = load_file(file)
    scales = next(part for part in held if re.search(r"k_proj\.(weight_)?scale", part))
    held[scales].view(-1)[0] = float("nan")
    save_file(held, file)
    with pytest.raises(CheckpointError, match=r"k_proj.* NaN or infinities: fetch"):
        loaded(folder)


@format_
def test_progress_ends_at_the_whole(name: str, quantised: Quantised) -> None:
    folder, seen = quantised(name, HALVED)[0], []
    config = read_config(folder)

    def note(done: int, total: int) -> None:
        seen.append((done, total))

    load(Checkpoint(folder), config, range(config.layers), 0, 1, torch.float32, note)
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    assert seen[-1][1] < (folder / "model.safetensors").stat().st_size


# --- weights that stay packed ---------------------------------------------------------------------

EVEN = EVEN_OF["llama"]
INT4 = ("awq", "gptq", "pack-quantized")


def projections(held: Weights) -> Iterator[Projection]:
    for layer in held.layers:
        assert isinstance(layer.mlp, GatedMlp)
        yield from (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down)


@pytest.mark.parametrize("name", INT4)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen2"])  # qwen2 has biases
def test_packed_projections_compute_what_plain_ones_do(
    name: str, tp: int, family: str, quantised: Quantised
) -> None:
    folder, plain = quantised(name, EVEN_OF[family])
    config = read_config(folder)
    left = 0
    for shard in range(tp):
        packed = load(Checkpoint(folder), config, range(2), shard, tp, torch.float32, packed=True)
        pairs = zip(projections(packed), projections(loaded(plain, shard, tp)), strict=True)
        for actual, expected in pairs:
            left += not isinstance(actual, Int4Linear)
            weight = expected.by_output()
            torch.testing.assert_close(actual.by_output(), weight, rtol=1e-5, atol=1e-6)
            for rows in (1, 2, 33):
                x = torch.randn(rows, weight.shape[1])
                torch.testing.assert_close(actual(x), expected(x), rtol=1e-4, atol=1e-4)
                sums = torch.randn(2, rows, len(weight))
                sums[1] = sums[0]
                actual.onto(x, sums[0])
                expected.onto(x, sums[1])
                torch.testing.assert_close(sums[0], sums[1], rtol=1e-4, atol=1e-4)
    assert left == (0 if name == "gptq" else tp)  # the others leave a projection plain


@pytest.mark.parametrize("name", INT4)
def test_tokens_of_packed_weights_are_those_of_the_dequantised(
    name: str, quantised: Quantised
) -> None:
    prompts = [recalling(length, 512, seed=length) for length in (30, 130, 300)]
    folder, plain = quantised(name, EVEN)
    packed = SoloEngine(folder, pages=32, packed=True).generate(prompts, 20, chunk=64)
    assert packed == SoloEngine(plain, pages=32).generate(prompts, 20, chunk=64)


@pytest.mark.parametrize("name", INT4)
@pytest.mark.parametrize("steps", STEPS)
def test_logits_with_packed_weights_in_bfloat16_are_near_float32(
    name: str, steps: str, quantised: Quantised
) -> None:
    """As near as those of a GPU must be."""
    model = MODELS["llama"]
    folder, plain = quantised(name, model)
    engine = SoloEngine(folder, pages=32, dtype=torch.bfloat16, packed=True)
    actual = logits_of(engine, prompt(model), STEPS[steps])
    assert off(actual, exact(plain, prompt(model))) < OFF


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_keeps_weights_packed_if_its_config_says_so(
    packed: bool, quantised: Quantised
) -> None:
    config = WorkerConfig(
        replica="r",
        model="m",
        checkpoint=str(quantised("gptq", EVEN)[0]),
        max_context_tokens=64,
        topology=Topology(),
        kv_pages=2,
        rank_bind="ipc://x",
        packed_weights=packed,
    )
    engine = RankEngine(config, Coordinate(0, 0, 0), CPU, lambda done, total: None)
    kinds = {type(projection) for projection in projections(engine.weights)}
    assert kinds == {Int4Linear if packed else type(linear(torch.ones(2, 2)))}


def test_inputs_in_another_order_than_config_json_says_cannot_stay_packed(
    quantised: Quantised,
) -> None:
    folder = quantised("gptq, inputs in order of activation", EVEN)[0]
    config = read_config(folder)
    assert config.quantization is not None and config.quantization.ordered
    with pytest.raises(CheckpointError, match=r"q_proj\.g_idx orders inputs, though"):
        load(Checkpoint(folder), config, range(2), 0, 1, torch.float32, packed=True)


@pytest.mark.parametrize("name", INT4)
def test_packed_weights_take_the_bytes_that_the_predictor_reads(
    name: str, quantised: Quantised
) -> None:
    folder = quantised(name, EVEN)[0]
    config = read_config(folder)
    assert config.quantization is not None
    held = load(Checkpoint(folder), config, range(2), 0, 1, torch.bfloat16, packed=True)
    held_bytes = config.quantization.held_bytes(2.0)
    assert held_bytes == 0.5 + 2 * 2 / 32
    for projection in projections(held):
        if isinstance(projection, Int4Linear):
            size = projection.packed.nbytes + projection.scales.nbytes
            assert size == held_bytes * projection.by_output().numel()


def test_a_gpu_gets_numbers_in_the_order_and_types_of_its_kernel() -> None:
    """Tensors without values stand for a GPU's: torch checks shapes and types."""
    with FakeTensorMode():
        there = torch.device("cuda")
        parts = Int4Parts(
            torch.zeros(64, 192, dtype=torch.int32, device=there),
            torch.zeros(64, 6, dtype=torch.int32, device=there),
            torch.zeros(64, 6, device=there),
            torch.zeros(192, dtype=torch.int64, device=there),
        )
        linear = int4_linear([parts, parts], torch.bfloat16, None)
        assert linear.packed.shape == (128 // 8, 192 // 64, 32, 2)  # 192 inputs: tiles of 64
        out = linear(torch.zeros(5, 192, dtype=torch.bfloat16, device=there))
    assert out.shape == (5, 128) and out.dtype == torch.bfloat16


# --- what is refused ------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8"}
COMPRESSED = settings_of(Format("compressed-tensors"))
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def with_weights(**changes: object) -> dict[str, Any]:
    """A group of compressed-tensors whose weights have other settings."""
    group = COMPRESSED["config_groups"]["group_0"]
    changed = group | {"weights": group["weights"] | changes}
    return COMPRESSED | {"config_groups": {"group_0": changed}}


def packed_with(**changes: object) -> dict[str, Any]:
    """A group of compressed-tensors whose 4-bit weights have other settings."""
    settings = settings_of(Format("pack-quantized", group=32, symmetric=True))
    group = settings["config_groups"]["group_0"]
    changed = group | {"weights": group["weights"] | changes}
    return settings | {"config_groups": {"group_0": changed}}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ("nvfp4", "quant_method is 'nvfp4': must be one of fp8, "),
        ({"bits": 4}, "quant_method is None: must be one of fp8, "),
        (FP8 | {"activation_scheme": "tiled"}, "activation_scheme is 'tiled': must be dynamic or"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2': must be e4m3"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size is \[128\]: must be two"),
        (FP8 | {"weight_block_size": [0, 128]}, r"weight_block_size is \[0, 128\]: must be two"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype is 'fp4': must be fp8"),
        (
            FP8 | {"modules_to_convert": ["embed"]},
            r"modules_to_convert is \['embed'\]: must be abs",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4': must be fp8"),
        ({"quant_method": "modelopt"}, "quant_algo is None: must be fp8"),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "W4A16_AWQ"}},
            "quantization.quant_algo is 'W4A16_AWQ': must be fp8",
        ),
        (COMPRESSED | {"format": "int-quantized"}, "format is 'int-quantized': must be float-q"),
        (packed_with(type="float"), "group_0.weights.type is 'float': must be int"),
        (packed_with(num_bits=8), "group_0.weights.num_bits is 8: must be 4"),
        (packed_with(actorder="group"), "weights.actorder is 'group': must be None or weight or"),
        (packed_with(actorder=True), "weights.actorder is True: must be None or weight or"),
        (packed_with(strategy="tensor"), "weights.strategy is 'tensor': must be group or channel"),
        (packed_with(group_size=0), "weights.group_size is 0: must be a positive"),
        (packed_with(symmetric="yes"), "weights.symmetric is 'yes': must be True or False"),
        (COMPRESSED | {"config_groups": None}, "config_groups is None: must be an object"),
        (COMPRESSED | {"config_groups": {}}, r"config_groups is \[\]: must have one format"),
        (COMPRESSED | {"transform_config": {"a": 1}}, "transform_config is .* must be absent"),
        (
            COMPRESSED | {"sparsity_config": {"format": "sparse-bitmask"}},
            "sparsity_config.format is 'sparse-bitmask': must be dense",
        ),
        (with_weights(num_bits=4), "group_0.weights.num_bits is 4: must be 8"),
        (with_weights(type="int"), "group_0.weights.type is 'int': must be float"),
        (with_weights(strategy="group"), "group_0.weights.strategy is 'group': must be tensor or"),
        (with_weights(strategy="block"), "group_0.weights.block_structure is None: must suit"),
        (with_weights(symmetric=False), "group_0.weights.symmetric is False: must be True"),
        (AWQ | {"bits": 8}, "bits is 8: must be 4"),
        (AWQ | {"version": "GEMV"}, "version is 'GEMV': must be gemm"),
        (AWQ | {"zero_point": False}, "zero_point is False: must be True"),
        (AWQ | {"zero_point": 1}, "zero_point is 1: must be True"),
        (AWQ | {"backend": "llm-awq"}, "backend is 'llm-awq': must be autoawq"),
        (AWQ | {"group_size": 0}, "group_size is 0: must be a positive"),
        (GPTQ | {"bits": 8}, "bits is 8: must be 4"),
        ({"quant_method": "gptq"}, "bits is None: must be 4"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin': must be gptq or"),
        (GPTQ | {"lm_head": True}, "lm_head is True: must be absent"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True: must be absent"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype is 'int16': must be int32"),
        (GPTQ | {"dynamic": True}, "dynamic is True: must be an object"),
        (GPTQ | {"dynamic": {r"+:.*\.1\..*": {"bits": 8}}}, "dynamic is .*: must only leave modul"),
    ],
)
def test_a_setting_that_is_not_served_is_named(
    settings: object, named: str, tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    config = json.loads((tiny / "config.json").read_text()) | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"quantization_config.*{named}") as caught:
        read_config(tmp_path)
    assert "use a checkpoint of another format" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_first_name_of_compressed_settings_is_read(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    plain = json.loads((tiny / "config.json").read_text())

    def read(settings: dict[str, Any]) -> Quantization | None:
        (tmp_path / "config.json").write_text(json.dumps(plain | {"compression_config": settings}))
        return read_config(tmp_path).quantization

    assert read(COMPRESSED) == Quantization(method="fp8")
    with pytest.raises(CheckpointError, match=r"compression_config\.format is 'dense': must be"):
        read(COMPRESSED | {"format": "dense"})


def test_the_settings_of_hf_quant_config_are_read_in_config_json(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    given = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    plain = json.loads((tiny / "config.json").read_text())
    settings = {"quantization_config": given | {"quant_method": "modelopt"}}
    (tmp_path / "config.json").write_text(json.dumps(plain | settings))
    assert read_config(tmp_path).quantization == Quantization(method="fp8")


def damaged(folder: pathlib.Path, target: pathlib.Path, **parts: torch.Tensor | None) -> None:
    """Copy a checkpoint, with other parts of one projection (None: without)."""
    shutil.copytree(folder, target)
    held = load_file(target / "model.safetensors")
    for part, tensor in parts.items():
        del held[f"model.layers.1.mlp.up_proj.{part}"]
        if tensor is not None:
            held[f"model.layers.1.mlp.up_proj.{part}"] = tensor
    save_file(held, target / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "part", "tensor", "named"),
    [
        ("fp8, blocks", "weight_scale_inv", None, "no tensor .*up_proj.weight_scale, which"),
        ("fp8, blocks", "weight_scale_inv", torch.ones(3, 2), r"must be \[3, 1\] by the weight_bl"),
        ("fp8, tensor", "weight_scale", torch.ones(3), r"scales are \[3\]: must be \[1, 1\]"),
        ("fp8, tensor", "weight", torch.ones(344, 128).to(torch.float8_e5m2), "is F8_E5M2: must"),
        (
            "fp8, tensor",
            "weight",
            torch.ones(344, 128).to(torch.int8),
            "up_proj.weight is I8: must",
        ),
        ("awq", "qzeros", None, "no tensor .*up_proj.qzeros, which config.json implies"),
        ("awq", "qweight", torch.ones(16, 344).int(), r"qweight is \[16, 344\].*\[128, 43\]"),
        ("gptq", "scales", torch.ones(11, 128), r"scales is \[11, 128\].*\[4, 344\]"),
        (
            "gptq",
            "g_idx",
            torch.arange(128).int() // 16,
            "g_idx names groups 0 to 7: must be 0 to 3",
        ),
        ("gptq", "g_idx", torch.arange(128).int() // 32 - 1, "g_idx names groups -1 to 2: must be"),
        ("pack-quantized, asymmetric", "weight_zero_point", None, "no .*weight_zero_point, which"),
        (
            "pack-quantized, outputs",
            "weight_scale",
            torch.ones(344, 4),
            r"weight_scale is \[344, 4\].*\[344, 1\]",
        ),
        ("gptq, inputs in order of activation", "g_idx", None, "no tensor .*up_proj.g_idx, which"),
    ],
)
def test_parts_that_do_not_fit_together_are_named(
    name: str,
    part: str,
    tensor: torch.Tensor | None,
    named: str,
    quantised: Quantised,
    tmp_path: pathlib.Path,
) -> None:
    damaged(quantised(name, HALVED)[0], tmp_path / "bad", **{part: tensor})
    with pytest.raises(CheckpointError, match=named) as caught:
        loaded(tmp_path / "bad")
    assert "up_proj" in str(caught.value) and "\n" not in str(caught.value)


def test_packed_weights_without_their_settings_are_named(
    quantised: Quantised, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(quantised("fp8, tensor", HALVED)[0], tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is F8_E4M3: must be F32 or"):
        loaded(folder)


@pytest.mark.parametrize(
    ("name", "file", "method"),
    [
        ("gptq", "quantize_config.json", "gptq"),
        ("awq", "quant_config.json", "awq"),
        ("fp8, tensor", "hf_quant_config.json", "modelopt"),
    ],
)
def test_settings_that_are_not_in_config_json_are_named(
    name: str, file: str, method: str, quantised: Quantised, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(quantised(name, HALVED)[0], tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text("{}")
    named = rf'q_proj is packed, but .* {file} is not read: add .*"quant_method": "{method}"'
    with pytest.raises(CheckpointError, match=named):
        loaded(folder)
    with pytest.raises(CheckpointError, match=named):
        check_tensors(folder, held_tensors(folder), read_config(folder))


def test_settings_of_another_checkpoint_do_not_keep_plain_weights_from_loading(
    quantised: Quantised, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(quantised("gptq", HALVED)[1], tmp_path / "plain")
    (folder / "quantize_config.json").write_text("{}")
    assert len(loaded(folder).layers) == 2


def fitting(
    model: DecoderConfig, tp: int = 1, device: str = "cpu", **changes: object
) -> WorkerConfig:
    return WorkerConfig(
        replica="r",
        model="m",
        checkpoint="",
        max_context_tokens=100,
        topology=Topology(tp=tp),
        rank_bind="",
        packed_weights=True,
        device=device,
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("packing", "more", "named"),
    [
        (None, {}, "needs FP8 or 4-bit weights"),
        (Quantization(method="awq"), {}, "needs groups of 32, 64, 128, 256 neighbouring inputs"),
        (Quantization(method="awq", group=16), {}, "needs groups of 32"),
        (Quantization(method="gptq", group=32, ordered=True), {}, "without desc_act"),
        (Quantization(method="awq", group=128), {"tp": 2}, r"inputs \(128, 64, 192\)"),
        (
            Quantization(method="awq", group=32),
            {"device": "cuda"},
            "needs dtype bfloat16 and arith",
        ),
        (
            Quantization(method="awq", group=32),
            {"device": "cuda", "dtype": "bfloat16", "deterministic": True},
            "needs dtype bfloat16 and arith",
        ),
    ],
)
def test_weights_that_cannot_stay_packed_are_named(
    packing: Quantization | None, more: dict[str, Any], named: str, checkpoint: Folder
) -> None:
    model = read_config(checkpoint(EVEN))
    fits = msgspec.structs.replace(model, quantization=Quantization(method="gptq", group=32))
    assert packed_bytes(fits, fitting(fits, tp=2)) == 0.5 + 2 * 4 / 32
    assert packed_bytes(fits, fitting(fits, device="cuda", dtype="bfloat16")) == 0.5 + 2 * 2 / 32
    model = msgspec.structs.replace(model, quantization=packing)
    with pytest.raises(SpecError, match=f"packedWeights is Enabled: .*{named}.*; use Disabled"):
        packed_bytes(model, fitting(model, **more))


def test_packed_experts_are_refused(checkpoint: Folder) -> None:
    model = read_config(checkpoint(FAMILIES["qwen3_moe"]))
    model = msgspec.structs.replace(model, quantization=Quantization(method="awq", group=32))
    with pytest.raises(SpecError, match="needs a model without experts"):
        check_packed(model, fitting(model))


def test_the_predictor_reads_packed_projections_faster_and_the_head_as_before() -> None:
    plain = ModelShape(
        layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=256, vocab=512
    )
    packed = msgspec.structs.replace(plain, packed_bytes=0.5625)
    projections = 4 * (plain.attention_params + plain.mlp_params)
    assert packed.weight_bytes == plain.params * 2 - projections * (2 - 0.5625)
    assert plain.weight_bytes == plain.params * 2
    for tiles in ((), (Tile(rows=16, columns=64, efficiency=0.5),)):
        profile = Profile(
            name="slow to read",
            linear_flops_per_s=1e15,
            linear_bytes_per_s=1e9,
            tiles=tiles,
            elementwise_bytes_per_s=1e9,
            attention_flops_per_s=1e12,
            attention_bytes_per_s=1e9,
        )
        slow, fast = (Products(profile, shape, 1) for shape in (plain, packed))
        assert fast.layer(1) < 0.5 * slow.layer(1)
        assert fast.head(1) == slow.head(1)
