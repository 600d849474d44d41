"""Single rows for a CUDA graph: fixed launches and buffers, with a plan that changes per step.

The graph keeps addresses, so plans are written into buffers of this object, and states are returned
in the same tensors each time. Padding rows read one token of the spare page.

    once:       decodes = GraphDecodes(attention, rows, pages, spare=kv.pages)
                decodes.plan([]); warm up; with torch.cuda.graph(…): … decodes.run(…) …
    each step:  if decodes.fits(spans): decodes.plan(spans); graph.replay()
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from medha_worker.attention.flashinfer_plan import DecodeCall, Wrapper, decode_wrapper, plan_decodes
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import LogBase, Partial, Span
from medha_worker.attention.kv_splits import KernelBatch, lay_singles, sees_a_run
from medha_worker.attention.paged import PagedAttention


class GraphDecodes:
    """Attention of `rows` single rows over at most `pages` page entries; an AttentionPlan.

    `spare`: a page that no sequence owns (see `kv.pages.KvPages`). `window`: that of the layers
    using it. There is one object per window and graph.
    """

    @torch.inference_mode()
    def __init__(
        self, attention: PagedAttention, rows: int, pages: int, *, spare: int, window: int = 0
    ) -> None:
        G, device = attention.geometry, attention.device
        self.attention, self.rows, self.pages = attention, rows, pages
        self.window = window
        idle = np.array([spare], dtype=np.int64)
        self._padding = [Span(row, 1, 0, idle, True) for row in range(rows)]
        buffers = {
            "paged_kv_indptr_buffer": torch.zeros(rows + 1, dtype=torch.int32, device=device),
            "paged_kv_indices_buffer": torch.zeros(pages + rows, dtype=torch.int32, device=device),
            "paged_kv_last_page_len_buffer": torch.ones(rows, dtype=torch.int32, device=device),
        }
        inner = decode_wrapper(
            attention.library, G, attention.wrappers.workspace, use_cuda_graph=True, **buffers
        )
        self._wrapper = Wrapper.on(device, inner)
        self._call = DecodeCall(self._wrapper, slice(0, rows), G)
        self._out = torch.zeros(rows, G.heads, G.head_dim, dtype=G.dtype, device=device)
        self._lse = torch.zeros(rows, G.heads, dtype=torch.float32, device=device)

    def fits(self, spans: Sequence[Span]) -> bool:
        """Return True if these spans, for rows 0, 1, …, can be planned here.

        Never with fixed key splits, since a graph's launches do not depend on the batch.
        """
        G, pages = self.attention.geometry, 0
        if (spans and G.split_pages) or len(spans) > self.rows:
            return False
        for row, span in enumerate(spans):
            if span.length != 1 or not span.tail or span.start != row:
                return False
            if span.sight is not None and not sees_a_run(span, G.page_tokens):
                return False
            pages += len(span.pages)
        return pages <= self.pages

    @torch.inference_mode()
    def plan(self, spans: Sequence[Span]) -> None:
        """Set what the next `run` or replay attends to. Raises ValueError if the spans do not
        fit."""
        if not self.fits(spans):
            raise ValueError(f"{len(spans)} spans do not fit {self.rows} rows, {self.pages} pages")
        G, device = self.attention.geometry, self.attention.device
        plan_decodes(self._wrapper, self._filled(spans), G, device)

    @torch.inference_mode()
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Return states for `q` [rows, heads, head_dim]; they are valid until the next run."""
        self._call.run(q, pool, scales, self._out, self._lse)
        return Partial(self._out, self._lse, LogBase.TWO)

    def _filled(self, spans: Sequence[Span]) -> KernelBatch:
        """Return the spans' entries, filled up with padding rows."""
        padded = [*spans, *self._padding[len(spans) :]]
        batch = lay_singles(padded, self.attention.geometry.page_tokens)
        assert batch is not None
        return replace(batch, window=self.window)
