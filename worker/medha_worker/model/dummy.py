"""Random weights instead of read ones, for speed benchmarks with config.json alone.

Replaces `weights.Checkpoint`, so the same code slices, fuses and lays out the weights. Products
keep the spread of their inputs and norms are about one, so nothing overflows or vanishes in any
type. The same name and slice give the same numbers, but slices of different shards do not form one
tensor, and outputs have no meaning.
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Sequence

import torch

EMBEDDING = "model.embed_tokens.weight"


class DummyCheckpoint:
    """A checkpoint that has every tensor. `folder`, of config.json, appears in messages only."""

    def __init__(self, folder: pathlib.Path, device: torch.device | str = "cpu") -> None:
        self.folder, self._device = folder, device

    def __contains__(self, name: str) -> bool:
        return True

    def slice(self, name: str, shape: Sequence[int]) -> RandomTensor:
        return RandomTensor(name, tuple(shape), self._device)


class RandomTensor:
    """A tensor with random slices; has the interface of a safetensors slice."""

    def __init__(self, name: str, shape: tuple[int, ...], device: torch.device | str) -> None:
        self._name, self._shape, self._device = name, shape, device

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, cut: slice | tuple[slice, ...]) -> torch.Tensor:
        cuts = cut if isinstance(cut, tuple) else (cut,)
        spans = [part.indices(size) for part, size in zip(cuts, self._shape, strict=True)]
        seed = zlib.crc32(f"{self._name} {spans}".encode())
        dice = torch.Generator(self._device).manual_seed(seed)
        size = [stop - start for start, stop, _ in spans]
        drawn = torch.empty(size, dtype=torch.bfloat16, device=self._device)
        if self._name.endswith("norm.weight"):
            return drawn.normal_(1.0, 0.05, generator=dice)
        spread = 1.0 if self._name == EMBEDDING else self._shape[-1] ** -0.5
        return drawn.normal_(0.0, spread, generator=dice)
