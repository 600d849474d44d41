"""Choice of the attention kernels for a device; the only module that imports both backends."""

from __future__ import annotations

import torch

from medha.checkpoints.latent_attention import LatentAttention
from medha.errors import SetupError
from medha_worker import flashinfer
from medha_worker.attention.cpu import cpu_attention
from medha_worker.attention.flashinfer_plan import Geometry
from medha_worker.attention.fp8_scales import FP8
from medha_worker.attention.kernel_interface import Attention
from medha_worker.attention.latent_paged import WIDTHS, LatentGeometry, LatentPagedAttention
from medha_worker.attention.paged import PagedAttention
from medha_worker.attention.reference import ReferenceAttention

# Supported by the CUDA kernels; plain torch serves the rest.
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
# Deterministic mode splits keys every this many tokens.
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
    latent: LatentAttention | None = None,
    deterministic: bool = False,
    spare: int = 0,
) -> Attention:
    """Return the attention of a rank with `heads` over `kv_heads` in `dtype`, with pages of
    `kv_dtype`.

    `latent`: pages hold latents. `deterministic`: a row's state must not depend on other rows of
    its batch (see `fixed_blocks`). `spare`: a page that no sequence owns. Raises SetupError if the
    device's kernels are missing or do not support these sizes.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return cpu_attention(heads, kv_heads, head_dim, page_tokens, kv_dtype, latent)
    if latent is not None:
        if (latent.rank, latent.rope_dim) != WIDTHS or dtype not in DTYPES or kv_dtype != dtype:
            return ReferenceAttention(heads, 1, head_dim, page_tokens, tile_pages=32, latent=latent)
        sizes = LatentGeometry(
            heads=heads,
            latent=latent,
            page_tokens=page_tokens,
            dtype=dtype,
            kernel="fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2",
        )
        return LatentPagedAttention(sizes, flashinfer.flashinfer(), device)
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
        # CUDA cores reach 2.5 TB/s on an H200 with four query heads per KV head, tensor cores 4.
        decodes="cores" if heads == kv_heads else "tensor",
        split_pages=max(1, SPLIT_TOKENS // page_tokens) if deterministic else 0,
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    library = flashinfer.flashinfer()
    return PagedAttention(geometry, library, device, processors=processors, spare=spare)
