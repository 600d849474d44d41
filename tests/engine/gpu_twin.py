"""The parts of a rank that only a GPU has, as twins on the CPU: paged kernels and graphs.

`medha_worker.engine` takes them in the place of its own; everything around them is the rank's code.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.engine import plain_library

from medha.checkpoints.latent_attention import LatentAttention
from medha_worker import flashinfer
from medha_worker.attention.flashinfer_plan import Geometry
from medha_worker.attention.latent_paged import LatentGeometry, LatentPagedAttention
from medha_worker.attention.paged import PagedAttention
from medha_worker.graphs import Replay, Work
from medha_worker.kv.pages import KvPages
from medha_worker.parallel.collectives import TensorParallel


class Again:
    """Records by doing the work once more, into the memory of the first result."""

    recorded, replays = 0, 0

    def __init__(self, tp: TensorParallel | None = None) -> None:
        del tp

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        Again.recorded += 1
        out = work()

        def replay() -> None:
            Again.replays += 1
            out.copy_(work())

        return out, replay

    def used_bytes(self) -> int:
        return 0


def attention_for(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    latent: LatentAttention | None = None,
    **_: Any,
) -> PagedAttention | LatentPagedAttention:
    """Return paged attention on the kernels' oracle."""
    library: flashinfer.Library = plain_library  # type: ignore[assignment]
    if latent is not None:
        sizes = LatentGeometry(
            heads=heads, latent=latent, page_tokens=page_tokens, dtype=dtype, kernel="fa3"
        )
        return LatentPagedAttention(sizes, library, device)
    geometry = Geometry(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        page_tokens=page_tokens,
        kv_dtype=kv_dtype,
    )
    return PagedAttention(geometry, library, device)


def pages(*arguments: Any, **named: Any) -> KvPages:
    """Return a pool with the spare page that graphs need."""
    return KvPages(*arguments, **(named | {"spare": 1}))


TWINS = {"attention_for": attention_for, "KvPages": pages, "CudaGraphRecorder": Again}
"""By the names that `medha_worker.engine` imports."""
