"""The KV pool of a rank: tensors in pages. The scheduler decides which page belongs to whom.

Layout HND, one block of memory for all own layers:

    memory  [layers, pages, planes, kv_heads, page_tokens, head_dim]

with two planes, keys and values, or one of latents (see `checkpoints.latent_attention`). Page `p`
of a layer is one contiguous block at `bases[layer] + p × page_bytes`, and a slice of heads within
it stays contiguous, as transfers between ranks need. In FP8 each layer has `scales`, which follow
from the weights and so need not move with the pages.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.checkpoints.fit import page_bytes
from medha.errors import EngineError, SetupError
from medha_worker.attention.fp8_scales import FP8, Scales

# Page and offset in the page of each written token, int64.
SlotMapping = tuple[torch.Tensor, torch.Tensor]

# Size of a huge page on x86 and most other processors.
HUGE = 2 << 20


class KvPages:
    """Pages of keys and values of the layers that this rank holds.

    Zeroed at first; rows beyond a page's last token are masked, never assumed finite. `scales`: one
    per own layer if `dtype` is FP8. `spare`: extra pages, from number `pages` on, where padding
    rows of CUDA graphs write. Raises SetupError if the memory cannot be allocated.
    """

    def __init__(
        self,
        layers: range,
        pages: int,
        kv_heads: int,
        page_tokens: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        planes: int = 2,
        scales: Sequence[Scales] = (),
        spare: int = 0,
    ) -> None:
        if len(scales) != (len(layers) if dtype == FP8 else 0):
            raise ValueError(f"{len(scales)} scales for {len(layers)} layers of {dtype}")
        self.layers, self.pages, self.page_tokens = layers, pages, page_tokens
        self.kv_heads, self.head_dim, self.planes = kv_heads, head_dim, planes
        self._scales = scales
        shape = (len(layers), pages + spare, planes, kv_heads, page_tokens, head_dim)
        try:
            self.memory = zeros(shape, dtype, torch.device(device))
        except (RuntimeError, OSError, OverflowError) as error:
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise SetupError(
                f"a KV pool of {pages} pages needs {gib:.1f} GiB, which {device} does not have"
                f" ({str(error).splitlines()[0]}); set spec.engine.kvPages or kvMemory lower"
            ) from None
        self._pools = self.memory.unbind(0)
        # The same memory as [pages, page_tokens, planes · kv_heads, head_dim], to write tokens. A
        # GPU stores by index element by element, so it gets eight bytes at once; FP8 needs an
        # integer view everywhere, as torch cannot store narrow floats by index.
        wide = (dtype == FP8 or self.memory.is_cuda) and head_dim * dtype.itemsize % 8 == 0
        self._stored = torch.int64 if wide else torch.uint8 if dtype == FP8 else dtype
        memory = self.memory.view(self._stored)
        self._tokens = tuple(pool.flatten(1, 2).transpose(1, 2) for pool in memory.unbind(0))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in one layer."""
        item = self.memory.itemsize
        return page_bytes(self.kv_heads, self.page_tokens, self.head_dim, item, self.planes)

    @property
    def bases(self) -> tuple[int, ...]:
        """Address of each own layer's first page, in layer order."""
        return tuple(self.memory[i].data_ptr() for i in range(len(self.layers)))

    def pool(self, layer: int) -> torch.Tensor:
        """Return the pages [pages, planes, kv_heads, page_tokens, head_dim] of model layer
        `layer`."""
        return self._pools[layer - self.layers.start]

    def page(self, layer: int, page: int) -> torch.Tensor:
        """Return page [planes, kv_heads, page_tokens, head_dim] of a layer, contiguous."""
        return self.pool(layer)[page]

    def scales(self, layer: int) -> Scales | None:
        """Return the FP8 scales of model layer `layer`; None if pages hold the values
        themselves."""
        return self._scales[layer - self.layers.start] if self._scales else None

    def kept(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Convert tokens' `rows` [n, planes · kv_heads, head_dim], keys before values, to the
        pages' type."""
        scales = self.scales(layer)
        return rows.to(self.memory.dtype) if scales is None else scales.store(rows)

    def write(
        self,
        layer: int,
        kept: torch.Tensor,
        slot_mapping: SlotMapping,
        which: torch.Tensor | None = None,
    ) -> None:
        """Store rows converted by `kept` at `slot_mapping`; only those at `which`, if given."""
        rows = kept.view(self._stored)
        rows = rows if which is None else rows[which]
        self._tokens[layer - self.layers.start].index_put_(slot_mapping, rows)


class PageEpochs:
    """Epochs of a rank's pool, one per page for all layers: allocation counts that detect reuse.

    A page's epoch increases whenever a sequence receives the page to write it. An unchanged (page,
    epoch) proves that nothing wrote the page in between. A cached page that a second sequence reads
    keeps its epoch.
    """

    def __init__(self, pages: int) -> None:
        self._epochs: npt.NDArray[np.int64] = np.zeros(pages, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._epochs)

    def hand_out(self, pages: Sequence[int]) -> None:
        """Increment the epochs of pages about to be written. Raises EngineError if one is out of
        range."""
        if pages:
            self._epochs[self.check(pages)] += 1

    def of(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Return the epochs of these pages. Raises EngineError if one is out of range."""
        return tuple(self._epochs[self.check(pages)].tolist())

    def check(self, pages: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the pages as an index. Raises EngineError if one is out of range or repeated."""
        index = np.asarray(pages, dtype=np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < len(self._epochs)):
            wrong = next(p for p in pages if not 0 <= p < len(self._epochs))
            raise EngineError(f"page {wrong} is out of range: the pool has {len(self._epochs)}")
        if len(set(pages)) != len(pages):
            raise EngineError(f"pages {tuple(pages)} repeat a page: all must be distinct")
        return index


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate zeroed memory, on the CPU in huge pages where it is large enough.

    Other processes read huge pages at least 1.5 times as fast, since the kernel copies page by
    page.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    whole = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # without huge pages, ordinary ones serve
        whole.madvise(mmap.MADV_HUGEPAGE)
    rows = torch.frombuffer(whole, dtype=torch.uint8)
    first = -rows.data_ptr() % HUGE
    return rows[first : first + size].view(dtype).view(*shape)
