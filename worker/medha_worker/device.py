"""The device of a rank as its loop sees it: arrays go there, the loop goes on, results come back.

    host      build n │ launch n │ build n+1 │ launch n+1 │ wait n │ report n │ …
    device            │ ……………………… n ……………………… │ ……………………… n+1 ……………………… │ …

`upload` packs all arrays of a step into one pinned block and one copy that nobody waits for.
`fetch` copies results into pinned memory behind everything launched so far; only `wait` waits, once
per batch. torch keeps a pinned block until the copies out of it have left (its allocator notes an
event for each), so none is overwritten early. On a CPU both happen at once: one code serves both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from medha.errors import SetupError
from medha_worker.parallel.communicator import PeerLost

Array = npt.NDArray[Any]
# Where an array begins in a block: a multiple of every item's size.
ALIGNED_BYTES = 16
# Between two looks at an event that may never come.
_LOOK_S = 20e-6


class Arriving(Protocol):
    """Results on their way to the host."""

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> tuple[torch.Tensor, ...]:
        """The results, on the host. Raises PeerLost when they do not come within `timeout_s`,
        which only a peer's silence can bring about."""
        ...


class Device(Protocol):
    """`at`: where the tensors of the rank live."""

    at: torch.device

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """The arrays as tensors on the device, which must not be written to."""
        ...

    def fetch(self, *tensors: torch.Tensor) -> Arriving:
        """What the tensors hold after everything that was launched so far."""
        ...


class CpuDevice:
    """Host and device are one: nothing is copied, nothing is awaited."""

    at = torch.device("cpu")

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, *tensors: torch.Tensor) -> Arriving:
        return _Here(tensors)


class _Here:
    """Results that were on the host all the time."""

    ready = True

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def wait(self, timeout_s: float | None = None) -> tuple[torch.Tensor, ...]:
        return self._tensors


class CudaDevice:
    """The process's first GPU, and the stream that the calling thread launches into.

    `deterministic`: no product is cut along its length, whatever its shape.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self.at = torch.device("cuda", 0)
        torch.cuda.set_device(self.at)
        # Sums of a product that was cut along its length stay in float32 until all are added.
        products: Any = torch.backends.cuda.matmul
        allowed = (False, not deterministic)  # to sum in narrow types, to cut
        products.allow_bf16_reduced_precision_reduction = allowed
        products.allow_fp16_reduced_precision_reduction = allowed

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        block = torch.empty(block_bytes(arrays), dtype=torch.uint8, pin_memory=True)
        pack(arrays, block)
        return unpack(arrays, block.to(self.at, non_blocking=True))

    def fetch(self, *tensors: torch.Tensor) -> Arriving:
        pinned = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for here, there in zip(pinned, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _OnItsWay(event, pinned)


class _OnItsWay:
    """Results behind an event in the stream."""

    def __init__(self, event: torch.cuda.Event, pinned: tuple[torch.Tensor, ...]) -> None:
        self._event, self._pinned = event, pinned

    @property
    def ready(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self, timeout_s: float | None = None) -> tuple[torch.Tensor, ...]:
        if timeout_s is None:
            self._event.synchronize()
            return self._pinned
        end = time.monotonic() + timeout_s
        while not self.ready:
            if time.monotonic() > end:
                raise PeerLost(f"the device waits for a peer since {timeout_s:g} s: it is gone")
            time.sleep(_LOOK_S)
        return self._pinned


CPU = CpuDevice()


def device_of(name: str, deterministic: bool = False) -> Device:
    """`cpu` or `cuda`, the latter `deterministic` or not; raises SetupError for what this machine
    does not have."""
    if name == "cpu":
        return CPU
    if name != "cuda":
        raise SetupError(f"device is {name}: must be cpu or cuda; set device to one of them")
    if not torch.cuda.is_available():
        raise SetupError(
            "device is cuda: torch finds no GPU that it can use here; set device to cpu, or run"
            " where there are an NVIDIA GPU, its driver and torch built for CUDA"
        )
    return CudaDevice(deterministic)


def block_bytes(arrays: Sequence[Array]) -> int:
    """What the arrays take side by side, each from an aligned place on."""
    return sum(-(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for array in arrays)


def pack(arrays: Sequence[Array], block: torch.Tensor) -> None:
    """Write the arrays into `block` (uint8, on the host)."""
    target, at = block.numpy(), 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[at : at + array.nbytes] = flat
        at += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def unpack(arrays: Sequence[Array], block: torch.Tensor) -> list[torch.Tensor]:
    """Views of `block`, wherever it is, that hold what `pack` wrote."""
    views, at = [], 0
    for array in arrays:
        kind = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views.append(block[at : at + array.nbytes].view(kind).view(array.shape))
        at += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return views
