"""The KV pool of one rank: tensors in pages; which page belongs to whom is decided elsewhere.

Layout HND, one block of memory for all own layers:

    memory  [layers, pages, 2 (key, value), kv_heads, page_tokens, head_dim]

so that page `p` of a layer is one contiguous block at `bases[layer] + p × page_bytes`, and a slice
of heads within it stays contiguous (what transfers between ranks need). In FP8 a layer's numbers
have `scales`, which follow from the weights and so are no part of what moves.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

from medha.errors import SetupError
from medha_worker.attention.scales import FP8, Scales

# Where tokens are written: (page, offset in the page) of each, int64.
Slots = tuple[torch.Tensor, torch.Tensor]


# What the kernel calls huge, on x86 and most else.
HUGE = 2 << 20


class KvPages:
    """Pages of keys and values of the layers that one rank holds.

    Zeroed at first: rows beyond a page's last token are masked, never trusted to be finite.
    `scales`: of each own layer, where `dtype` is FP8. `spare`: pages beyond those that are handed
    out, from number `pages` on; what fills a batch up to the size of a CUDA graph is written there.
    Raises SetupError when the memory cannot be had.
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
        scales: Sequence[Scales] = (),
        spare: int = 0,
    ) -> None:
        if len(scales) != (len(layers) if dtype == FP8 else 0):
            raise ValueError(f"{len(scales)} scales for {len(layers)} layers of {dtype}")
        self.layers, self.pages, self.page_tokens = layers, pages, page_tokens
        self.kv_heads, self.head_dim, self._scales = kv_heads, head_dim, scales
        shape = (len(layers), pages + spare, 2, kv_heads, page_tokens, head_dim)
        try:
            self.memory = zeros(shape, dtype, torch.device(device))
        except (RuntimeError, OSError, OverflowError) as error:
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise SetupError(
                f"a KV pool of {pages} pages needs {gib:.1f} GiB, which {device} does not have"
                f" ({str(error).splitlines()[0]}); set spec.engine.kvPages or kvMemory lower"
            ) from None
        self._pools = self.memory.unbind(0)
        # The same memory as [pages, page_tokens, 2 · kv_heads, head_dim]: what a token's rows fill.
        # In eights of bytes on a GPU, which stores by index number by number; and FP8 everywhere,
        # since there is no storing by index of narrow floats.
        wide = (dtype == FP8 or self.memory.is_cuda) and head_dim * dtype.itemsize % 8 == 0
        self._stored = torch.int64 if wide else torch.uint8 if dtype == FP8 else dtype
        memory = self.memory.view(self._stored)
        self._tokens = tuple(pool.flatten(1, 2).transpose(1, 2) for pool in memory.unbind(0))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return page_bytes(self.kv_heads, self.page_tokens, self.head_dim, self.memory.dtype)

    @property
    def bases(self) -> tuple[int, ...]:
        """Address of each own layer's first page, in layer order."""
        return tuple(self.memory[i].data_ptr() for i in range(len(self.layers)))

    def pool(self, layer: int) -> torch.Tensor:
        """[pages, 2, kv_heads, page_tokens, head_dim] of model layer `layer`."""
        return self._pools[layer - self.layers.start]

    def page(self, layer: int, page: int) -> torch.Tensor:
        """[2, kv_heads, page_tokens, head_dim], contiguous."""
        return self.pool(layer)[page]

    def scales(self, layer: int) -> Scales | None:
        """Of the numbers of model layer `layer`; None where they are the values themselves."""
        return self._scales[layer - self.layers.start] if self._scales else None

    def kept(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Tokens' `rows` [n, 2 · kv_heads, head_dim], keys before values, as pages hold them."""
        scales = self.scales(layer)
        return rows.to(self.memory.dtype) if scales is None else scales.store(rows)

    def write(
        self, layer: int, kept: torch.Tensor, slots: Slots, which: torch.Tensor | None = None
    ) -> None:
        """Store at `slots` n tokens' rows as `kept` gave them, or those at `which` alone."""
        rows = kept.view(self._stored)
        rows = rows if which is None else rows[which]
        self._tokens[layer - self.layers.start].index_put_(slots, rows)


def page_bytes(kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page of one layer."""
    return 2 * kv_heads * page_tokens * head_dim * dtype.itemsize


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory; on the CPU in huge pages where it fills some and the kernel has them: what
    another process reads of it comes half as fast again, or faster, as the kernel copies by page.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    whole = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages has others
        whole.madvise(mmap.MADV_HUGEPAGE)
    rows = torch.frombuffer(whole, dtype=torch.uint8)
    first = -rows.data_ptr() % HUGE
    return rows[first : first + size].view(dtype).view(*shape)
