"""Packed weights of a checkpoint, as `quantization_config` in config.json describes them.

Served: FP8 (e4m3) with a scale for each tensor, output or block, and 4 bits as AutoAWQ (gemm), GPTQ
and compressed-tensors pack them. The weights are what the file holds: a module that the
configuration leaves out (`modules_to_not_convert`, `ignore`, `exclude_modules`) is stored in a
plain type and read as such. Activations are never quantised, whatever the scheme.
"""

from __future__ import annotations

import pathlib
from collections.abc import Container
from typing import Any, Literal, NoReturn

import msgspec

from medha.checkpoints.checkpoint_files import FLOATS
from medha.errors import CheckpointError

SERVED = (
    "fp8, fbgemm_fp8, modelopt (FP8), compressed-tensors (float-quantized,"
    " pack-quantized), awq and gptq"
)
ACTIVATION_SCHEMES = ("dynamic", "static")
SETTINGS_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files that hold the settings for tools that do not write them to config.json, with their
quant_method."""


WORDS = ("I32",)
Part = tuple[tuple[int, ...], tuple[str, ...]]


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """Format of the packed weights.

    `block`: outputs and inputs that share an FP8 scale; None: those of the tensor, or of each
    output. `group`: inputs that share a scale and a zero of 4-bit weights; 0: all. `ordered`: the
    file names the group of each input. `zero_offset`: what GPTQ subtracts from a zero before it
    stores it. `symmetric`: compressed-tensors stores no zeros, as all are in the middle.
    """

    method: Literal["fp8", "awq", "gptq", "pack-quantized"]
    block: tuple[int, int] | None = None
    group: int = 0
    ordered: bool = False
    zero_offset: int = 0
    symmetric: bool = False

    @property
    def stored_bytes(self) -> float:
        """Bytes of a packed weight in the file, without its share of scales."""
        return 1.0 if self.method == "fp8" else 0.5

    @property
    def suffix(self) -> str:
        """End of the name of a packed weight's tensor."""
        if self.method == "pack-quantized":
            return ".weight_packed"
        return ".weight" if self.method == "fp8" else ".qweight"

    def parts(self, shape: tuple[int, int]) -> dict[str, Part]:
        """Return shape and types of the tensors that hold a packed weight of `shape`, [outputs,
        inputs], by the end of their name; without FP8 scales, which have several forms.

        4-bit numbers are packed as words of eight.
        """
        outputs, inputs = shape
        if self.method == "fp8":
            return {self.suffix: (shape, ("F8_E4M3",))}
        groups = -(-inputs // (self.group or inputs))
        of_outputs, of_inputs = -(-outputs // 8), -(-inputs // 8)
        if self.method == "pack-quantized":
            held: dict[str, Part] = {
                self.suffix: ((outputs, of_inputs), WORDS),
                ".weight_scale": ((outputs, groups), FLOATS),
            }
            zeros: dict[str, Part] = {".weight_zero_point": ((of_outputs, groups), WORDS)}
            return held if self.symmetric else held | zeros
        words = (inputs, of_outputs) if self.method == "awq" else (of_inputs, outputs)
        held = {
            self.suffix: (words, WORDS),
            ".qzeros": ((groups, of_outputs), WORDS),
            ".scales": ((groups, outputs), FLOATS),
        }
        order: dict[str, Part] = {".g_idx": ((inputs,), WORDS)}
        return held | order if self.ordered else held

    def held_bytes(self, scalar_bytes: float) -> float:
        """Bytes of a weight that stays packed in memory, with its share of a scale and a zero; FP8
        scales are float32, those of outputs and tensors not counted."""
        if self.method == "fp8":
            shared = 4.0 / (self.block[0] * self.block[1]) if self.block else 0.0
            return self.stored_bytes + shared
        return self.stored_bytes + 2.0 * scalar_bytes / self.group


def quantization_of(path: pathlib.Path, raw: dict[str, Any]) -> Quantization | None:
    """Return the format that config.json `raw` names; None if weights are plain. Raises
    CheckpointError naming the setting if it is not served."""
    # The second is what compressed-tensors wrote at first.
    name = "quantization_config" if raw.get("quantization_config") else "compression_config"
    given = raw.get(name)
    if not given:
        return None
    settings = _Settings(path, given if isinstance(given, dict) else {"quant_method": given}, name)
    method = settings.raw.get("quant_method")
    if method == "fp8":
        return _fp8(settings)
    if method == "fbgemm_fp8":
        return Quantization(method="fp8")
    if method == "modelopt":
        return _modelopt(settings)
    if method == "compressed-tensors":
        return _compressed(settings)
    if method == "awq":
        return _awq(settings)
    if method == "gptq":
        return _gptq(settings)
    settings.refuse("quant_method", method, f"must be one of {SERVED}")


def fp8_scales(module: str, held: Container[str]) -> str:
    """Return the name of a module's FP8 scales: DeepSeek's, which is no inverse, or the others'."""
    inverse = module + ".weight_scale_inv"
    return inverse if inverse in held else module + ".weight_scale"


def refuse_unnamed(folder: pathlib.Path, module: str) -> None:
    """Raise CheckpointError for a packed `module` whose settings are in a file that is not read;
    do nothing without such a file."""
    for name, method in SETTINGS_FILES.items():
        if (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: {module} is packed, but config.json has no quantization_config, and"
                f" {name} is not read: add its settings to config.json as quantization_config,"
                f' with "quant_method": "{method}", or use the bfloat16 checkpoint'
            )


class _Settings:
    """An object of config.json, whose values can be refused by their full name."""

    def __init__(
        self, path: pathlib.Path, raw: dict[str, Any], name: str = "quantization_config"
    ) -> None:
        self.path, self.raw, self.name = path, raw, name

    def refuse(self, key: str, value: object, expected: str) -> NoReturn:
        raise CheckpointError(
            f"{self.path}: {self.name}.{key} is {value!r}: {expected};"
            " use a checkpoint of another format, such as the bfloat16 one"
        )

    def within(self, key: str, allowed: tuple[object, ...], default: object) -> Any:
        """Return a value that must be one of `allowed`; a name counts in any case."""
        value = self.raw.get(key, default)
        named = value.lower() if isinstance(value, str) else value
        if named not in allowed or isinstance(named, bool) != isinstance(allowed[0], bool):
            self.refuse(key, value, f"must be {' or '.join(map(str, allowed))}")
        return named

    def absent(self, key: str, why: str) -> None:
        """Refuse any value but an empty one."""
        if self.raw.get(key):
            self.refuse(key, self.raw[key], f"must be absent, as {why}")

    def part(self, key: str, value: object) -> _Settings:
        if not isinstance(value, dict):
            self.refuse(key, value, "must be an object")
        return _Settings(self.path, value, f"{self.name}.{key}")

    def block(self, key: str) -> tuple[int, int] | None:
        """Return the outputs and inputs of a block, None if there are none."""
        value = self.raw.get(key)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != 2
            or not all(type(size) is int and size > 0 for size in value)
        ):
            self.refuse(key, value, "must be two positive whole numbers, outputs and inputs")
        return value[0], value[1]

    def group(self, *keys: str) -> int:
        """Return the inputs of a group; 0: all."""
        key = next((key for key in keys if key in self.raw), keys[0])
        value = self.raw.get(key, 128)
        if type(value) is not int or (value < 1 and value != -1):
            self.refuse(key, value, "must be a positive whole number, or -1 for all inputs")
        return max(value, 0)


def _fp8(settings: _Settings) -> Quantization:
    settings.within("activation_scheme", ACTIVATION_SCHEMES, "dynamic")
    settings.within("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    settings.within("expert_dtype", ("fp8",), "fp8")
    settings.absent("modules_to_convert", "tables in FP8 are not served")
    return Quantization(method="fp8", block=settings.block("weight_block_size"))


def _modelopt(settings: _Settings) -> Quantization:
    # hf_quant_config.json has the settings in an object of their own.
    if "quantization" in settings.raw:
        settings = settings.part("quantization", settings.raw["quantization"])
    settings.within("quant_algo", ("fp8",), None)
    return Quantization(method="fp8")


def _compressed(settings: _Settings) -> Quantization:
    packing = settings.within(
        "format", ("float-quantized", "naive-quantized", "pack-quantized"), None
    )
    read = _packed_weights if packing == "pack-quantized" else _float_weights
    settings.absent("transform_config", "rotated weights are not served")
    sparsity = settings.raw.get("sparsity_config")
    if sparsity:
        settings.part("sparsity_config", sparsity).within("format", ("dense",), "dense")
    groups = settings.part("config_groups", settings.raw.get("config_groups"))
    formats = {read(groups.part(name, group)) for name, group in groups.raw.items()}
    if len(formats) != 1:
        settings.refuse("config_groups", sorted(groups.raw), "must have one format of weights")
    return formats.pop()


def _float_weights(group: _Settings) -> Quantization:
    """Return the format of a group of compressed-tensors' modules."""
    weights = group.part("weights", group.raw.get("weights"))
    for tensors in (
        weights,
        group.part("input_activations", group.raw.get("input_activations") or {}),
    ):
        tensors.within("type", ("float",), "float")
        tensors.within("num_bits", (8,), 8)
    strategy = weights.within("strategy", ("tensor", "channel", "block"), None)
    weights.within("symmetric", (True,), True)
    block = weights.block("block_structure")
    if (block is None) == (strategy == "block"):
        weights.refuse("block_structure", block, f"must suit the strategy {strategy}")
    return Quantization(method="fp8", block=block)


def _packed_weights(group: _Settings) -> Quantization:
    """Return the format of a group of compressed-tensors' modules with weights of 4 bits."""
    weights = group.part("weights", group.raw.get("weights"))
    weights.within("type", ("int",), "int")
    weights.within("num_bits", (4,), None)
    weights.within("actorder", (None, "weight", "static"), None)
    strategy = weights.within("strategy", ("group", "channel"), None)
    return Quantization(
        method="pack-quantized",
        group=weights.group("group_size") if strategy == "group" else 0,
        symmetric=weights.within("symmetric", (True, False), True),
    )


def _awq(settings: _Settings) -> Quantization:
    settings.within("bits" if "bits" in settings.raw else "w_bit", (4,), 4)
    settings.within("version" if "version" in settings.raw else "format", ("gemm",), "gemm")
    settings.within("zero_point", (True,), True)
    if settings.raw.get("backend") == "llm-awq":
        settings.refuse("backend", "llm-awq", "must be autoawq, as llm-awq packs otherwise")
    return Quantization(method="awq", group=settings.group("group_size", "q_group_size"))


def _gptq(settings: _Settings) -> Quantization:
    settings.within("bits", (4,), None)
    key = "checkpoint_format" if "checkpoint_format" in settings.raw else "format"
    packing = settings.within(key, ("gptq", "gptq_v2"), "gptq")
    settings.within("pack_dtype", ("int32",), "int32")
    settings.absent("lm_head", "a packed output table is not served")
    settings.absent("is_marlin_format", "weights in a kernel's own order are not served")
    rules = settings.part("dynamic", settings.raw.get("dynamic") or {}).raw
    if any(not rule.startswith("-:") for rule in rules):
        settings.refuse("dynamic", rules, "must only leave modules out (-:)")
    return Quantization(
        method="gptq",
        group=settings.group("group_size"),
        ordered=settings.within("desc_act", (False, True), False),
        zero_offset=int(packing == "gptq"),
    )
