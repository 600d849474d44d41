"""Packed weights of a checkpoint: parts of a projection, dequantised after they are cut.

    FP8        w[o, i] = q · scale[o / rows, i / columns]                  blocks of rows · columns
    4 bits     w[o, i] = (q − zero[group(i), o]) · scale[group(i), o]

A 32-bit word packs eight 4-bit numbers. AutoAWQ packs weights of neighbouring outputs, in the order
of WORD_AWQ, GPTQ and compressed-tensors those of neighbouring inputs; all pack zeros of
neighbouring outputs. GPTQ stores zero − 1, and with `desc_act` names the group of each input.

A cut takes all words and blocks that it touches. So a TP shard may begin inside them, and shards
together are the same weights as in one piece, bit by bit. Products are float32, exact for 4 bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from medha.checkpoints.checkpoint_files import FLOATS
from medha.checkpoints.quantization import WORDS, Quantization, fp8_scales
from medha.errors import CheckpointError

# Place of each number in its word, in units of 4 bits.
WORD = (0, 1, 2, 3, 4, 5, 6, 7)
WORD_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
MIDDLE = 8
"""Zero of symmetric 4-bit weights."""

Cut = tuple[slice, slice]
# Moves what was read to the device.
Place = Callable[[torch.Tensor], torch.Tensor]


class Files(Protocol):
    """The files of a checkpoint."""

    def __contains__(self, name: object) -> bool: ...

    def slice(self, name: str, shape: Sequence[int] | None, types: Sequence[str] = FLOATS) -> Any:
        """Return a lazy slice of tensor `name`, of `shape` (None: any) and one of `types`."""
        ...

    def type_of(self, name: str) -> str:
        """Return the type of tensor `name`, as safetensors spells it."""
        ...


def packed_weight(
    files: Files, name: str, shape: tuple[int, int], packing: Quantization, place: Place
) -> PackedWeight | None:
    """Return the weight [outputs, inputs] of projection `name`; None if the file holds it in a
    plain type. Raises CheckpointError for parts that are missing or do not fit together."""
    if packing.method == "fp8":
        plain = name + ".weight" in files and files.type_of(name + ".weight") in FLOATS
        return None if plain else Fp8Weight(files, name, shape, packing, place)
    kind = CompressedWeight if packing.method == "pack-quantized" else Int4Weight
    if name + packing.suffix not in files and name + ".weight" in files:
        return None
    return kind(files, name, shape, packing, place)


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Parts:
    """FP8 weights, not yet multiplied: `numbers` [outputs, inputs], and `scales` [blocks, parts] of
    equal parts of the inputs; `of_output` [outputs]: the block of each output.

    If a cut begins or ends inside a block, parts of inputs are as narrow as both allow.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    of_output: torch.Tensor

    def by_output(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Fp8Parts:
        """Return the weights with their outputs reordered by `change`."""
        return Fp8Parts(change(self.numbers), self.scales, change(self.of_output))

    def dequantised(self) -> torch.Tensor:
        weight, (_, parts) = self.numbers.float(), self.scales.shape
        by_part = weight.view(len(weight), parts, -1)
        by_part.mul_(self.scales.index_select(0, self.of_output).unsqueeze(2))
        return weight


class Fp8Weight:
    """An FP8 weight, and the scales of its blocks; without blocks, of the tensor or its outputs."""

    def __init__(
        self, files: Files, name: str, shape: tuple[int, int], packing: Quantization, place: Place
    ) -> None:
        self._weight = files.slice(name + packing.suffix, *packing.parts(shape)[packing.suffix])
        scales = files.slice(fp8_scales(name, files), None)[...]
        if packing.block is None and scales.numel() in (1, shape[0]):
            scales = scales.reshape(-1, 1)
            self._block = (shape[0] // len(scales), shape[1])
        else:
            self._block = packing.block or shape
        blocks = tuple(-(-n // size) for n, size in zip(shape, self._block, strict=True))
        if scales.shape != blocks:
            raise CheckpointError(
                f"{name}.weight is {list(shape)}, its scales are {list(scales.shape)}: must be"
                f" {list(blocks)} by the weight_block_size of config.json; config.json and the"
                " weights must be of one model"
            )
        if not scales.float().isfinite().all():
            raise CheckpointError(
                f"the scales of {name}.weight hold NaN or infinities: fetch the weights again"
            )
        self._scales, self._place = scales, place

    def __getitem__(self, cut: Cut) -> torch.Tensor:
        """Return a part in float32, on the device."""
        return self.parts(cut).dequantised()

    def parts(self, cut: Cut) -> Fp8Parts:
        """Return a part, not yet multiplied."""
        outputs, inputs = cut
        rows, columns = self._block
        numbers = self._place(self._weight[cut])
        step = inputs.stop - inputs.start
        if inputs.start // columns != (inputs.stop - 1) // columns:
            step = math.gcd(inputs.start, inputs.stop, columns)
        of_input = torch.arange(inputs.start, inputs.stop, step) // columns
        of_output = torch.arange(outputs.start, outputs.stop, dtype=torch.int32) // rows
        first, last = int(of_output[0]), int(of_output[-1])
        scales = self._scales[first : last + 1].float().index_select(1, of_input)
        return Fp8Parts(
            numbers, scales.to(numbers.device), of_output.sub_(first).to(numbers.device)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Int4Parts:
    """4-bit weights, unpacked: `numbers` [outputs, inputs], `zeros` and `scales` [outputs, groups],
    and the group of each input."""

    numbers: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    of_input: torch.Tensor

    def by_output(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Int4Parts:
        """Return the weights with their outputs reordered by `change`."""
        numbers, zeros, scales = map(change, (self.numbers, self.zeros, self.scales))
        return Int4Parts(numbers, zeros, scales, self.of_input)

    def dequantised(self) -> torch.Tensor:
        numbers, of_input = self.numbers - self.zeros[:, self.of_input], self.of_input
        return numbers * self.scales[:, of_input]


class Int4Weight:
    """A weight of 4 bits as AutoAWQ's gemm version packs it, words [inputs, outputs / 8], or GPTQ,
    words [inputs / 8, outputs]. `in_order`: groups are of neighbouring inputs."""

    def __init__(
        self, files: Files, name: str, shape: tuple[int, int], packing: Quantization, place: Place
    ) -> None:
        inputs = shape[1]
        self._awq = packing.method == "awq"
        self._order = WORD_AWQ if self._awq else WORD
        self._offset, self._place = packing.zero_offset, place
        parts = packing.parts(shape)
        self._weights, self._zeros, self._scales = (
            files.slice(name + end, *parts[end]) for end in (packing.suffix, ".qzeros", ".scales")
        )
        self._of_input = in_order = torch.arange(inputs) // (packing.group or inputs)
        groups = int(in_order[-1]) + 1
        if packing.ordered or (not self._awq and name + ".g_idx" in files):
            self._of_input = files.slice(name + ".g_idx", (inputs,), WORDS)[:].long()
            least, most = self._of_input.aminmax()
            if least < 0 or most >= groups:
                raise CheckpointError(
                    f"{name}.g_idx names groups {least} to {most}: must be 0 to {groups - 1};"
                    " config.json and the weights must be of one model"
                )

        self.in_order = torch.equal(self._of_input, in_order)

    def __getitem__(self, cut: Cut) -> torch.Tensor:
        """Return a part in float32, on the device."""
        return self.parts(cut).dequantised()

    def parts(self, cut: Cut) -> Int4Parts:
        """Return a part, not yet multiplied."""
        outputs, inputs = cut
        of_input = self._of_input[inputs]
        groups = slice(int(of_input.min()), int(of_input.max()) + 1)
        zeros = self._by_word(self._zeros, groups, outputs) + self._offset
        scales = self._place(self._scales[groups, outputs]).float()
        if self._awq:
            numbers = self._by_word(self._weights, inputs, outputs).t()
        else:
            words, skip = _words(inputs)
            packed = self._place(self._weights[words, outputs]).t()
            numbers = _unpacked(packed, WORD)[:, skip : skip + len(of_input)]
        return Int4Parts(
            numbers,
            zeros.bitwise_and_(15).t(),
            scales.t(),
            (of_input - groups.start).to(scales.device),
        )

    def _by_word(self, packed: Any, rows: slice, columns: slice) -> torch.Tensor:
        """Return the numbers of `rows` and `columns`, packed along the columns."""
        words, skip = _words(columns)
        numbers = _unpacked(self._place(packed[rows, words]), self._order)
        return numbers[:, skip : skip + columns.stop - columns.start]


class CompressedWeight:
    """A weight of 4 bits as compressed-tensors packs it, words [outputs, inputs / 8]; zeros are
    words [outputs / 8, groups], and scales [outputs, groups]."""

    def __init__(
        self, files: Files, name: str, shape: tuple[int, int], packing: Quantization, place: Place
    ) -> None:
        self._size, self._place = packing.group or shape[1], place
        held = {end: files.slice(name + end, *part) for end, part in packing.parts(shape).items()}
        self._weights, self._scales = held[packing.suffix], held[".weight_scale"]
        self._zeros = held.get(".weight_zero_point")

    def __getitem__(self, cut: Cut) -> torch.Tensor:
        """Return a part in float32, on the device."""
        return self.parts(cut).dequantised()

    def parts(self, cut: Cut) -> Int4Parts:
        """Return a part, not yet multiplied."""
        outputs, inputs = cut
        words, skip = _words(inputs)
        numbers = _unpacked(self._place(self._weights[outputs, words]), WORD)
        of_input = torch.arange(inputs.start, inputs.stop) // self._size
        groups = slice(int(of_input[0]), int(of_input[-1]) + 1)
        scales = self._place(self._scales[outputs, groups]).float()
        return Int4Parts(
            numbers[:, skip : skip + len(of_input)],
            self._zeros_of(outputs, groups, scales.device),
            scales,
            (of_input - groups.start).to(scales.device),
        )

    def _zeros_of(self, outputs: slice, groups: slice, device: torch.device) -> torch.Tensor:
        """Return the zeros [outputs, groups]."""
        count = outputs.stop - outputs.start
        if self._zeros is None:
            shape = (count, groups.stop - groups.start)
            return torch.full(shape, MIDDLE, dtype=torch.int32, device=device)
        words, skip = _words(outputs)
        packed = self._place(self._zeros[words, groups])
        return _unpacked(packed.t(), WORD)[:, skip : skip + count].t()


PackedWeight = Fp8Weight | Int4Weight | CompressedWeight


def _words(numbers: slice) -> tuple[slice, int]:
    """Return the words that hold `numbers`, and how many numbers precede them in the first."""
    return slice(numbers.start // 8, -(-numbers.stop // 8)), numbers.start % 8


def _unpacked(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers [rows, 8·columns] of words [rows, columns], int32."""
    shifts = 4 * torch.tensor(order, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts).bitwise_and_(15).flatten(1)
