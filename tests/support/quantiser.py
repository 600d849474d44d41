"""Quantise a checkpoint in each packed format, from the format's definition.

`quantise` writes two folders: the packed checkpoint, and a plain float32 one of the very weights
that the packed numbers stand for, computed before they are packed.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Format:
    """A way to pack weights. `spelling`: of config.json and of the scales' names.

    `block`: outputs and inputs of an FP8 block; (0, 0): the tensor, (1, 0): an output. `group`,
    `symmetric`, `ordered` (desc_act), `offset` of zeros: of 4 bits. `left`: names of projections
    that stay plain.
    """

    spelling: str
    block: tuple[int, int] = (0, 0)
    group: int = 0
    symmetric: bool = False
    ordered: bool = False
    offset: int = 0
    left: tuple[str, ...] = ()


FORMATS = {
    "fp8, blocks": Format("fp8", block=(128, 128), left=("model.layers.1.self_attn.o_proj",)),
    "fp8, narrow blocks": Format("fp8", block=(40, 24)),
    "fp8, tensor": Format("fp8"),
    "fbgemm_fp8": Format("fbgemm_fp8", block=(1, 0), left=("model.layers.1.self_attn.o_proj",)),
    "modelopt": Format("modelopt", left=("down_proj",)),
    "compressed-tensors, tensor": Format("compressed-tensors"),
    "compressed-tensors, outputs": Format("compressed-tensors", block=(1, 0)),
    "compressed-tensors, blocks": Format("compressed-tensors", block=(32, 64), left=("down_proj",)),
    "awq": Format("awq", group=32, left=("model.layers.1.self_attn.o_proj",)),
    "awq, narrow groups": Format("awq", group=8),
    "awq, one group": Format("awq"),
    "gptq": Format("gptq", group=32, symmetric=True, offset=1),
    "gptq, asymmetric": Format("gptq", group=8, offset=1, left=("layers.1.mlp.up_proj",)),
    "gptq, inputs in order of activation": Format("gptq", group=32, ordered=True, offset=1),
    "gptq, version 2": Format("gptq"),
    "pack-quantized": Format("pack-quantized", group=32, symmetric=True, left=("layers.1.mlp.up",)),
    "pack-quantized, asymmetric": Format("pack-quantized", group=8),
    "pack-quantized, outputs": Format("pack-quantized", symmetric=True),
}


def quantise(
    folder: pathlib.Path, target: pathlib.Path, packing: Format
) -> tuple[pathlib.Path, pathlib.Path]:
    """Write what `folder` holds into `target`; return the packed and the plain folder."""
    packed_folder, plain_folder = target / "packed", target / "plain"
    for copy in (packed_folder, plain_folder):
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "_proj_with_mqa")) or any(
            part in module for part in packing.left
        ):
            continue
        weight, parts = PACKERS[packing.spelling](tensor.float(), packing)
        del packed[name]
        packed |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
        plain[name] = weight.contiguous()
    save_file(packed, packed_folder / "model.safetensors", {"format": "pt"})
    save_file(plain, plain_folder / "model.safetensors", {"format": "pt"})
    config = packed_folder / "config.json"
    settings = json.loads(config.read_text()) | {"quantization_config": settings_of(packing)}
    config.write_text(json.dumps(settings))
    return packed_folder, plain_folder


def settings_of(packing: Format) -> dict[str, Any]:
    """The `quantization_config` that the format's own tool writes."""
    rows, columns = packing.block
    if packing.spelling == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [rows, columns] if columns else None,
            "modules_to_not_convert": ["lm_head", *packing.left],
        }
    if packing.spelling == "fbgemm_fp8":
        return {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head", *packing.left],
        }
    if packing.spelling == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": None,
            "producer": {"name": "modelopt", "version": "0.33.0"},
            "exclude_modules": ["lm_head", *packing.left],
        }
    if packing.spelling == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": packing.group or -1,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": list(packing.left) or None,
        }
    if packing.spelling == "gptq":
        return {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": packing.group or -1,
            "sym": packing.symmetric,
            "desc_act": packing.ordered,
            "checkpoint_format": "gptq" if packing.offset else "gptq_v2",
        }
    if packing.spelling == "pack-quantized":
        weights = {
            "num_bits": 4,
            "type": "int",
            "strategy": "group" if packing.group else "channel",
            "group_size": packing.group or None,
            "symmetric": packing.symmetric,
            "actorder": "weight",
            "block_structure": None,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *packing.left],
        }
    activations = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    strategy = "block" if columns else "channel" if rows else "tensor"
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": strategy,
        "dynamic": False,
        "symmetric": True,
        "block_structure": [rows, columns] if columns else None,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *packing.left],
        "kv_cache_scheme": None,
    }


def pack_fp8(weight: torch.Tensor, packing: Format) -> tuple[torch.Tensor, Tensors]:
    """Divide each block by its largest number / 448, the largest of e4m3."""
    rows, columns = (given or size for given, size in zip(packing.block, weight.shape, strict=True))
    tops, lefts = range(0, len(weight), rows), range(0, weight.shape[1], columns)
    scales, stands_for = torch.empty(len(tops), len(lefts)), torch.empty_like(weight)
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    for i, top in enumerate(tops):
        for j, left in enumerate(lefts):
            block = slice(top, top + rows), slice(left, left + columns)
            scale = weight[block].abs().max().clamp(min=1e-6) / 448
            numbers[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            stands_for[block] = numbers[block].float() * scale
            scales[i, j] = scale
    if packing.block == (0, 0):
        scales = scales.reshape(() if packing.spelling in ("fp8", "modelopt") else (1,))
    inverse = packing.spelling == "fp8" and packing.block[1] > 0
    parts = {"weight": numbers, "weight_scale" + "_inv" * inverse: scales}
    if packing.spelling == "modelopt":
        parts["input_scale"] = torch.tensor(0.25)  # of activations, which stay as they are
    return stands_for, parts


def rounded(weight: Array, packing: Format, of_input: Array) -> tuple[Array, Array, Array, Array]:
    """Numbers, zeros and scales of a weight [inputs, outputs], and what they stand for.

    Zeros and scales are [groups, outputs]; the scales have the 16 bits of the formats.
    """
    groups, outputs = int(of_input.max()) + 1, weight.shape[1]
    numbers = np.zeros(weight.shape, np.uint32)
    zeros = np.zeros((groups, outputs), np.uint32)
    scales = np.zeros((groups, outputs), np.float16)
    stands_for = np.zeros(weight.shape, np.float32)
    for group in range(groups):
        own = np.flatnonzero(of_input == group)
        low, high = weight[own].min(0).clip(max=0), weight[own].max(0).clip(min=0)
        if packing.symmetric:
            high = np.maximum(high, -low)
            low = -high
        scale = ((high - low) / 15).clip(min=1e-4).astype(np.float16)
        zero = np.round(-low / scale.astype(np.float32)).clip(0, 15)
        if packing.symmetric:
            zero[:] = 8
        number = (np.round(weight[own] / scale.astype(np.float32)) + zero).clip(0, 15)
        numbers[own], zeros[group], scales[group] = number, zero, scale
        stands_for[own] = (number - zero).astype(np.float32) * scale.astype(np.float32)
    return numbers, zeros, scales, stands_for


def words_of(numbers: Array, order: tuple[int, ...]) -> torch.Tensor:
    """Eight neighbouring columns in a word: number `order[i]` at bits 4·i."""
    words = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for column in range(words.shape[1]):
        for place, number in enumerate(order):
            words[:, column] |= numbers[:, 8 * column + number] << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def pack_awq(weight: torch.Tensor, packing: Format) -> tuple[torch.Tensor, Tensors]:
    """As AutoAWQ's WQLinear_GEMM: words of eight outputs, the even ones first."""
    by_input = weight.t().numpy()
    of_input = np.arange(len(by_input)) // (packing.group or len(by_input))
    numbers, zeros, scales, stands_for = rounded(by_input, packing, of_input)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": words_of(numbers, order),
        "qzeros": words_of(zeros, order),
        "scales": torch.from_numpy(scales),
    }
    return torch.from_numpy(stands_for.T), parts


def pack_gptq(weight: torch.Tensor, packing: Format) -> tuple[torch.Tensor, Tensors]:
    """As AutoGPTQ's QuantLinear: words of eight inputs, and zeros less one."""
    by_input = weight.t().numpy()
    of_input = np.arange(len(by_input)) // (packing.group or len(by_input))
    if packing.ordered:
        of_input = np.random.default_rng(7).permutation(of_input)
    numbers, zeros, scales, stands_for = rounded(by_input, packing, of_input)
    order = tuple(range(8))
    stored = (zeros - np.uint32(packing.offset)) & np.uint32(15)
    parts = {
        "qweight": words_of(numbers.T, order).t(),
        "qzeros": words_of(stored, order),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(of_input.astype(np.int32)),
    }
    return torch.from_numpy(stands_for.T), parts


def pack_compressed(weight: torch.Tensor, packing: Format) -> tuple[torch.Tensor, Tensors]:
    """As llm-compressor's W4A16: words of eight inputs, and zeros in words of eight outputs."""
    by_input = weight.t().numpy()
    of_input = np.arange(len(by_input)) // (packing.group or len(by_input))
    numbers, zeros, scales, stands_for = rounded(by_input, packing, of_input)
    order = tuple(range(8))
    parts = {
        "weight_packed": words_of(numbers.T, order),
        "weight_scale": torch.from_numpy(scales).t(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not packing.symmetric:
        parts["weight_zero_point"] = words_of(zeros, order).t()
    return torch.from_numpy(stands_for.T), parts


PACKERS = {
    "fp8": pack_fp8,
    "fbgemm_fp8": pack_fp8,
    "modelopt": pack_fp8,
    "compressed-tensors": pack_fp8,
    "awq": pack_awq,
    "gptq": pack_gptq,
    "pack-quantized": pack_compressed,
}
