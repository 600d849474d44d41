"""Projections whose FP8 weights stay so in memory, and are dequantised where they are used.

    w[o, i] = q[o, i] · scale[of_output[o], i // step]        rounded once, to the activations' type

A product dequantises a tile of outputs, multiplies, and goes on to the next in the same scratch, so
that a rank needs memory for one tile only, which on a GPU stays in its cache. Weights are those of
the dequantised checkpoint, bit by bit. On a CPU, few rows are multiplied by a kernel that widens
weights in registers (see `NativeFp8`). FlashInfer's and torch's FP8 products are not used: they
round activations to FP8, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from medha_worker.model.layers import Projection, linear
from medha_worker.model.native_arithmetic import NativeFp8
from medha_worker.model.packed_weights import Fp8Parts

# Entries of a tile; a tile has at least one output.
TILE_ON_CPU, TILE_ON_GPU = 1 << 20, 1 << 24


class Scratch:
    """Memory for dequantised weights of type `dtype`, which all products of a rank share.

    A product must be over before the next one begins, as in a rank's thread and on its stream.
    `tile`: entries of a tile (0: what suits the device). `by_bits`: convert by shifting bits, as
    suits a CPU.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        at: torch.device | str,
        tile: int = 0,
        by_bits: bool | None = None,
    ) -> None:
        on_cpu = torch.device(at).type == "cpu"
        self.dtype, self._by_bits = dtype, on_cpu if by_bits is None else by_bits
        self.tile = tile or (TILE_ON_CPU if on_cpu else TILE_ON_GPU)
        self.native: NativeFp8 | None = None
        if on_cpu and dtype == torch.float32:
            self.native = NativeFp8()
        self._memory = torch.empty(0, dtype=dtype, device=at)
        self._halves = torch.empty(0, dtype=torch.int16, device=at)
        self._wide = self._memory
        self.reserve(self.tile)

    @property
    def entries(self) -> int:
        """Number of weights that the scratch has memory for."""
        return len(self._memory)

    def reserve(self, entries: int) -> None:
        """Enlarge the scratch if it is smaller; no CUDA graph may hold it yet."""
        if entries <= self.entries:
            return
        self._memory = self._memory.new_empty(entries)
        if self._by_bits:
            self._halves = self._halves.new_empty(entries)
            narrow = self.dtype != torch.float32
            self._wide = torch.empty(entries) if narrow else self._memory

    def dequantised(self, numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return `numbers` [outputs, inputs] · `scales` [outputs, parts], until the next call."""
        shape, parts = numbers.shape, (*scales.shape, -1)
        out = self._memory[: numbers.numel()].view(shape)
        if not self._by_bits:
            # Of two types torch computes the product in float32, and rounds it once.
            out.copy_(numbers).view(parts).mul_(scales.unsqueeze(2))
            return out
        wide = self._wide[: numbers.numel()].view(shape)
        _shrink(numbers, self._halves[: numbers.numel()].view(shape), wide)
        wide.view(parts).mul_((256.0 * scales).unsqueeze(2))
        return out if wide.data_ptr() == out.data_ptr() else out.copy_(wide)


def _shrink(numbers: torch.Tensor, halves: torch.Tensor, wide: torch.Tensor) -> None:
    """Write FP8 `numbers` · 2⁻⁸ to `wide`, float32; a tenth of the time of torch's conversion.

    The bits of e4m3 are those of float16 with a narrower exponent: sign, 4 + 3 bits of 5 + 10, of
    2⁻⁸ of the number. NaN reads as 480.
    """
    halves.copy_(numbers.view(torch.int8))  # extends the sign
    halves.bitwise_left_shift_(7).bitwise_and_(-0x4080)  # all bits but 14, a copy of the sign
    wide.copy_(halves.view(torch.float16))


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Linear:
    """x·W + b with the fields of Fp8Parts. `rows`: of each product, as in a Linear."""

    numbers: torch.Tensor
    scales: torch.Tensor
    of_output: torch.Tensor
    scratch: Scratch
    bias: torch.Tensor | None = None
    rows: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.scratch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        whole = self._of_few(x)
        if whole is not None:
            return whole
        outputs = len(self.numbers)
        out = x.new_empty(len(x), outputs)
        for tile, product in self._tiles():
            if tile.stop - tile.start == outputs:
                return product(x)
            out[:, tile] = product(x)
        return out

    def onto(self, x: torch.Tensor, sum_: torch.Tensor) -> None:
        """sum ← sum + x·W + b, in place."""
        whole = self._of_few(x)
        if whole is not None:
            sum_.add_(whole)
            return
        for tile, product in self._tiles():
            product.onto(x, sum_[:, tile])

    def in_blocks(self, rows: int) -> Fp8Linear:
        """Return the same weights with products of `rows` rows each."""
        return dataclasses.replace(self, rows=rows)

    def by_output(self) -> torch.Tensor:
        """Return the weight as [out, in]."""
        return torch.cat([self._dequantised(tile).clone() for tile in self._cuts()])

    def _of_few(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product if the compiled kernel serves it."""
        weight = self.numbers, self.scales, self.of_output
        native = self.scratch.native
        if native is None or self.rows or not native.serves(x, *weight):
            return None
        out = native(x, *weight)
        return out if self.bias is None else out.add_(self.bias)

    def _tiles(self) -> Iterator[tuple[slice, Projection]]:
        """Yield some outputs and their products, each valid until the next."""
        for tile in self._cuts():
            bias = None if self.bias is None else self.bias[tile]
            product: Projection = linear(self._dequantised(tile), bias, shared=True)
            yield tile, product.in_blocks(self.rows) if self.rows else product

    def _cuts(self) -> Iterator[slice]:
        outputs, inputs = self.numbers.shape
        size = max(self.scratch.tile // inputs, 1)
        for start in range(0, outputs, size):
            yield slice(start, min(start + size, outputs))

    def _dequantised(self, tile: slice) -> torch.Tensor:
        scales = self.scales.index_select(0, self.of_output[tile])
        return self.scratch.dequantised(self.numbers[tile], scales)


def fp8_linear(parts: Sequence[Fp8Parts], scratch: Scratch, bias: torch.Tensor | None) -> Fp8Linear:
    """Return projections side by side, whose inputs have equal parts."""
    of_output, before = [], 0
    for part in parts:
        of_output.append(part.of_output + before)
        before += len(part.scales)
    numbers = torch.cat([part.numbers.view(torch.uint8) for part in parts])
    scales = torch.cat([part.scales for part in parts])
    scratch.reserve(numbers.shape[1])
    return Fp8Linear(numbers.view(torch.float8_e4m3fn), scales, torch.cat(of_output), scratch, bias)


@dataclasses.dataclass(frozen=True, slots=True)
class Fp8Stack:
    """Weights of several projections of one shape: `numbers` [n, out, in], `scales` [n, blocks,
    parts], and the `of_output` of them all."""

    numbers: torch.Tensor
    scales: torch.Tensor
    of_output: torch.Tensor
    scratch: Scratch

    @classmethod
    def of(cls, projections: Sequence[Fp8Linear]) -> Fp8Stack:
        """Copy the weights of `projections` into one tensor."""
        first = projections[0]
        first.scratch.reserve(first.numbers.numel())
        numbers = torch.stack([own.numbers.view(torch.uint8) for own in projections])
        scales = torch.stack([own.scales for own in projections])
        numbers = numbers.view(torch.float8_e4m3fn)
        return cls(numbers, scales, first.of_output, first.scratch)

    def __getitem__(self, number: int) -> Fp8Linear:
        """Return a projection in the memory of the stack."""
        return Fp8Linear(self.numbers[number], self.scales[number], self.of_output, self.scratch)

    @property
    def at_once(self) -> int:
        """Number of projections that a tile holds."""
        return max(self.scratch.tile // self.numbers[0].numel(), 1)

    def dequantised(self, chosen: Sequence[int]) -> torch.Tensor:
        """Return the weights of at most `at_once` projections as [n, in, out], until the next
        product."""
        _, outputs, inputs = self.numbers.shape
        own = torch.tensor(chosen, device=self.scales.device)
        scales = self.scales.index_select(0, own).index_select(1, self.of_output)
        numbers = self.numbers.view(torch.uint8).index_select(0, own).view(self.numbers.dtype)
        weights = self.scratch.dequantised(numbers.flatten(0, 1), scales.flatten(0, 1))
        return weights.view(-1, outputs, inputs).transpose(1, 2)
