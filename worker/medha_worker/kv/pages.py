"""The KV pool of one rank: tensors in pages; which page belongs to whom is decided elsewhere.

Layout HND, one block of memory for all own layers:

    memory  [layers, pages, 2 (key, value), kv_heads, page_tokens, head_dim]

so that page `p` of a layer is one contiguous block at `bases[layer] + p × page_bytes`, and a slice
of heads within it stays contiguous (what transfers between ranks need).
"""

from __future__ import annotations

import math

import torch

from medha.errors import SetupError

# Where tokens are written: (page, offset in the page) of each, int64.
Slots = tuple[torch.Tensor, torch.Tensor]


class KvPages:
    """Pages of keys and values of the layers that one rank holds.

    Zeroed at first: rows beyond a page's last token are masked, never trusted to be finite.
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
    ) -> None:
        self.layers, self.pages, self.page_tokens = layers, pages, page_tokens
        self.kv_heads, self.head_dim = kv_heads, head_dim
        shape = (len(layers), pages, 2, kv_heads, page_tokens, head_dim)
        try:
            self.memory = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            gib = math.prod(shape) * dtype.itemsize / 2**30
            raise SetupError(
                f"a KV pool of {pages} pages needs {gib:.1f} GiB, which {device} does not have"
                f" ({str(error).splitlines()[0]}); set spec.engine.kvPages or kvMemory lower"
            ) from None
        self._pools = self.memory.unbind(0)
        # The same memory as [pages, page_tokens, 2 · kv_heads, head_dim]: what a token's rows fill.
        self._tokens = tuple(pool.flatten(1, 2).transpose(1, 2) for pool in self._pools)

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

    def write(self, layer: int, rows: torch.Tensor, slots: Slots) -> None:
        """Store n tokens' `rows` [n, 2 · kv_heads, head_dim], keys before values, at `slots`."""
        self._tokens[layer - self.layers.start].index_put_(slots, rows.to(self.memory.dtype))


def page_bytes(kv_heads: int, page_tokens: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one page of one layer."""
    return 2 * kv_heads * page_tokens * head_dim * dtype.itemsize
