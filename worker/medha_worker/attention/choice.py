"""Which kernels attend on a device: the one place that knows both backends."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medha.errors import SetupError
from medha_worker import kernels
from medha_worker.attention.calls import Geometry
from medha_worker.attention.cpu import cpu_attention
from medha_worker.attention.interface import Attention
from medha_worker.attention.paged import PagedAttention
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.attention.scales import FP8
from medha_worker.attention.splits import H200, Choice

# What the CUDA kernels are made for; plain torch serves the rest.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# Query heads of a KV head that the decode kernel on CUDA cores is made for.
GROUPS = (1, 2, 3, 4, 8)
# Where keys are split for rows that must not depend on their batch: after so many tokens.
SPLIT_TOKENS = 32_768


def attention_for(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device | str,
    *,
    deterministic: bool = False,
    spare: int = 0,
    table: Sequence[Choice] = H200,
) -> Attention:
    """Attention of a rank with `heads` over `kv_heads` in `dtype`, with pages of `kv_dtype`.

    `deterministic`: a row's state does not depend on the rows beside it (see `blocks`); `spare`: a
    page that nobody owns. Raises SetupError when the device's kernels are not there, or not for
    this.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return cpu_attention(heads, kv_heads, head_dim, page_tokens, kv_dtype)
    if head_dim not in HEAD_DIMS or dtype not in DTYPES or kv_dtype not in (dtype, FP8):
        if deterministic:
            raise SetupError(
                f"arithmetic is Deterministic, with head_dim {head_dim}, dtype {dtype} and pages of"
                f" {kv_dtype}: on a GPU it needs head_dim in {HEAD_DIMS}, bfloat16 or float16, and"
                " pages of that type or FP8; set spec.engine.arithmetic to Fast, or device to cpu"
            )
        return ReferenceAttention(heads, kv_heads, head_dim, page_tokens, tile_pages=32)
    hopper = torch.cuda.get_device_capability(device)[0] == 9 and not deterministic
    geometry = Geometry(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_tokens=page_tokens,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kernel="fa3" if hopper else "fa2",
        decodes="cores" if heads // kv_heads in GROUPS else "tensor",
        split_pages=max(1, SPLIT_TOKENS // page_tokens) if deterministic else 0,
    )
    library, cuts = kernels.flashinfer(), table if hopper else ()
    return PagedAttention(geometry, library, device, table=cuts, spare=spare)
