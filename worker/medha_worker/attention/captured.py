"""Single rows for a CUDA graph: a batch of one size, whose plan changes and whose launches do not.

The graph keeps addresses, so what a plan says lies in buffers of this object, and states come in
the same tensors each time. Rows beyond those of a step read one token of the spare page and mean
nothing.

    once:       captured = CapturedDecodes(attention, rows, pages, spare=kv.pages)
                captured.plan([]); warm up; with torch.cuda.graph(…): … captured.run(…) …
    each step:  if captured.fits(spans): captured.plan(spans); graph.replay()
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace

from medha_worker.attention.calls import DecodeCall, Wrapper, decode_wrapper, plan_decodes
from medha_worker.attention.interface import LogBase, Partial, Span
from medha_worker.attention.paged import PagedAttention
from medha_worker.attention.scales import Scales
from medha_worker.attention.splits import Batch, lay_singles, sees_a_run


class CapturedDecodes:
    """Attention of `rows` single rows over at most `pages` page entries; an `interface.Plan`.

    `spare`: a page that nobody owns (see `kv.pages.KvPages`); `window`: of the layers that run it.
    One for each window and each graph.
    """

    @torch.inference_mode()
    def __init__(
        self, attention: PagedAttention, rows: int, pages: int, *, spare: int, window: int = 0
    ) -> None:
        G, device = attention.geometry, attention.device
        self.attention, self.rows, self.pages = attention, rows, pages
        self.spare, self.window = spare, window
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
        """Whether these spans, in order rows 0, 1, …, can be planned here: never where keys are
        split at fixed places, as a graph's launches do not follow the batch."""
        G = self.attention.geometry
        T = G.page_tokens
        return not (spans and G.split_pages) and (
            len(spans) <= self.rows
            and sum(len(span.pages) for span in spans) <= self.pages
            and all(span.length == 1 and span.tail and span.start == i and sees_a_run(span, T)
                    for i, span in enumerate(spans))
        )  # fmt: skip

    @torch.inference_mode()
    def plan(self, spans: Sequence[Span]) -> None:
        """Make the next `run`, or replay, attend for these; raises ValueError unless they fit."""
        if not self.fits(spans):
            raise ValueError(f"{len(spans)} spans do not fit {self.rows} rows, {self.pages} pages")
        G, device = self.attention.geometry, self.attention.device
        plan_decodes(self._wrapper, self._filled(spans), G, device)

    @torch.inference_mode()
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:  # fmt: skip
        """`q` [rows, heads, head_dim]; the states are good until the next run."""
        self._call.run(q, pool, scales, self._out, self._lse)
        return Partial(self._out, self._lse, LogBase.TWO)

    def _filled(self, spans: Sequence[Span]) -> Batch:
        """The spans' entries, and those of rows that mean nothing."""
        idle = np.array([self.spare], dtype=np.int64)
        rest = [Span(row, 1, 0, idle, True) for row in range(len(spans), self.rows)]
        batch = lay_singles([*spans, *rest], self.attention.geometry.page_tokens)
        assert batch is not None
        return replace(batch, window=self.window)
