"""Host–device traffic of a rank: upload arrays, keep going, fetch results later.

    host      build n │ launch n │ build n+1 │ launch n+1 │ wait n │ report n │ …
    device            │ ……………………… n ……………………… │ ……………………… n+1 ……………………… │ …

`upload` packs all arrays of a step into one pinned block and copies it asynchronously. `fetch`
copies results into pinned memory behind everything launched so far; only `wait` blocks, once per
batch. torch's allocator keeps a pinned block until its copies are done, so none is overwritten
early. On a CPU both are immediate, and the same code serves both.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from medha.errors import SetupError
from medha_worker.parallel.collectives import PeerLost

Array = npt.NDArray[Any]
# Where an array begins in a block: a multiple of every item's size.
ALIGNED_BYTES = 16
# Between two polls of an event that may never come.
_POLL_S = 20e-6


class PendingFetch(Protocol):
    """Results being copied to the host."""

    @property
    def ready(self) -> bool:
        """True if `wait` would return at once."""
        ...

    def wait(self, timeout_s: float | None = None) -> tuple[torch.Tensor, ...]:
        """Return the results on the host.

        Raises PeerLost if they do not arrive within `timeout_s`; only a silent peer can cause that.
        """
        ...


class ComputeDevice(Protocol):
    """The device of a rank; `at` is where its tensors live."""

    at: torch.device

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        """Return the arrays as read-only tensors on the device."""
        ...

    def fetch(self, *tensors: torch.Tensor) -> PendingFetch:
        """Copy the tensors' values, as of everything launched so far, to the host."""
        ...


class CpuDevice:
    """Host and device in one: no copies, no waits."""

    at = torch.device("cpu")

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, *tensors: torch.Tensor) -> PendingFetch:
        return _HostResults(tensors)


class _HostResults:
    """Results that are on the host already."""

    ready = True

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def wait(self, timeout_s: float | None = None) -> tuple[torch.Tensor, ...]:
        return self._tensors


class CudaDevice:
    """The first GPU of the process, and the calling thread's stream.

    `deterministic` forbids split-K products, whatever their shape.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self.at = torch.device("cuda", 0)
        torch.cuda.set_device(self.at)
        sum_exactly(deterministic)

    def upload(self, *arrays: Array) -> list[torch.Tensor]:
        block = torch.empty(block_bytes(arrays), dtype=torch.uint8, pin_memory=True)
        pack(arrays, block)
        return unpack(arrays, block.to(self.at, non_blocking=True))

    def fetch(self, *tensors: torch.Tensor) -> PendingFetch:
        pinned = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors)
        for here, there in zip(pinned, tensors, strict=True):
            here.copy_(there, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return _CudaFetch(event, pinned)


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context whose work on a GPU waits for no work of other threads.

    Its stream has high priority: torch shares those of usual priority with collectives and graphs.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def sum_exactly(deterministic: bool) -> None:
    """Keep partial sums of split-K products in float32 until all are added.

    `deterministic`: split no product, which of torch's backends only cuBLASLt can.
    """
    if deterministic:
        torch.backends.cuda.preferred_blas_library("cublaslt")
    products: Any = torch.backends.cuda.matmul
    allowed = (False, not deterministic)  # (sum in narrow types, split K)
    products.allow_bf16_reduced_precision_reduction = allowed
    products.allow_fp16_reduced_precision_reduction = allowed


class _CudaFetch:
    """Results that are ready once an event in the stream has passed."""

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
                raise PeerLost(f"the device has waited {timeout_s:g} s for a peer, which is lost")
            time.sleep(_POLL_S)
        return self._pinned


CPU = CpuDevice()


def device_of(name: str, deterministic: bool = False) -> ComputeDevice:
    """Return the device `cpu` or `cuda`. Raises SetupError if this machine does not have it."""
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


@functools.cache
def _dtype(kind: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=kind)).dtype


def block_bytes(arrays: Sequence[Array]) -> int:
    """Return the bytes that the arrays take side by side, each aligned."""
    return sum(-(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for array in arrays)


def pack(arrays: Sequence[Array], block: torch.Tensor) -> None:
    """Write the arrays into `block` (uint8, on the host)."""
    target, at = block.numpy(), 0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[at : at + array.nbytes] = flat
        at += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def unpack(arrays: Sequence[Array], block: torch.Tensor) -> list[torch.Tensor]:
    """Return views of `block` with the arrays that `pack` wrote."""
    views, at = [], 0
    for array in arrays:
        flat = block[at : at + array.nbytes].view(_dtype(array.dtype))
        views.append(flat if array.ndim == 1 else flat.view(array.shape))
        at += -(-array.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
    return views
