"""CPU backend: chunks of several tokens in plain torch, single rows in the kernel of singles.c.

Every pointer passed to the kernel refers to an array checked here: page ids lie in the pool, and
every row has the pages of its tokens, so no input makes the kernel read elsewhere. The library is
built with the project and lies in this folder; it needs neither Python nor torch. It releases the
interpreter's lock, so a large plan runs in as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from medha.checkpoints.latent_attention import LatentAttention
from medha.errors import EngineError, SetupError
from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import Attention, AttentionPlan, Partial, Span
from medha_worker.attention.reference import ReferenceAttention, ReferencePlan, unfilled

# Two dots, so that Python does not import it as a module.
LIBRARY = pathlib.Path(__file__).with_name("singles.kernel.so")
# Supported by the kernel: pool dtypes, head sizes in multiples of `LANES` scalars, and at most
# `GROUP` query heads per KV head (GROUP of singles.c).
DTYPES, LANES, GROUP = (torch.float32, torch.bfloat16), 16, 64
# Tokens times KV heads above which a second thread pays off.
THREADED = 8192

_NONE = np.empty(0, dtype=np.int64)

Ids = npt.NDArray[np.int64]
Kernel = Callable[..., None]


def cpu_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_tokens: int,
    dtype: torch.dtype,
    latent: LatentAttention | None = None,
) -> Attention:
    """Return attention over pages in `dtype`, with the compiled kernel if it supports the sizes.

    Raises SetupError if the kernel was not built.
    """
    chunks = ReferenceAttention(heads, kv_heads, head_dim, page_tokens, latent=latent)
    if not NativeKernel.serves(heads, kv_heads, head_dim, dtype):
        return chunks
    singles = NativeKernel(heads, kv_heads, head_dim, page_tokens, dtype, latent=latent)
    return CpuAttention(singles, chunks)


class CpuAttention:
    """Attention that sends single rows to `singles` and everything else to `chunks`."""

    def __init__(self, singles: NativeKernel, chunks: ReferenceAttention) -> None:
        self.singles, self.chunks = singles, chunks

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        single = [span for span in spans if span.length == 1]
        several = [span for span in spans if span.length > 1]
        return CpuPlan(
            self.singles.plan(single) if single else None,
            self.chunks.plan(several) if several else None,
            self.chunks.state_dim,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class CpuPlan:
    """A step's spans, planned for every layer."""

    singles: NativePlan | None
    chunks: ReferencePlan | None
    state_dim: int

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        """Return partial states. `scales` is always None: pages with scales are served by torch
        alone."""
        states = unfilled(q)
        if self.chunks is not None:
            self.chunks.fill(q, k, v, pool, states)
        if self.singles is not None:
            self.singles.fill(q, pool, states)
        return states.cut(self.state_dim)


# --- single rows ----------------------------------------------------------------------------------


class _Plan(ctypes.Structure):
    """`struct plan` of singles.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("row", "tokens", "first", "pages")),
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "kv_heads", "head_dim", "page_tokens", "narrow")
        ),
        ("hidden", ctypes.c_void_p),
        ("planes", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


@functools.cache
def load(library: pathlib.Path = LIBRARY) -> Kernel:
    """Load the kernel. Raises SetupError if it was not built, or not for this machine."""
    try:
        kernel = ctypes.CDLL(str(library)).medha_singles
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"{library} is the compiled attention kernel and cannot be loaded ({error}); run `make"
            " setup`, or install medha again where there is a C compiler"
        ) from None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    kernel.argtypes = [
        pointer,
        number,
        number,
        pointer,
        number,
        pointer,
        pointer,
        pointer,
        number,
    ]
    kernel.restype = None
    return kernel


class NativeKernel:
    """The compiled kernel for pages of one geometry, if it `serves` that geometry.

    `lanes` limits the width of the registers, in float32 scalars.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_tokens: int,
        dtype: torch.dtype,
        lanes: int = LANES,
        latent: LatentAttention | None = None,
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.page_tokens, self.dtype, self.lanes = page_tokens, dtype, lanes
        self.planes = 1 if latent else 2
        self.scale = latent.scale if latent else head_dim**-0.5
        self.call = load()
        self._threads: ThreadPoolExecutor | None = None

    @staticmethod
    def serves(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
        """Return True if the kernel supports these sizes; otherwise plain torch is used."""
        grouped = heads % kv_heads == 0 and heads // kv_heads <= GROUP
        return grouped and head_dim % LANES == 0 and dtype in DTYPES

    def plan(self, spans: Sequence[Span]) -> NativePlan:
        """Plan single rows. Raises EngineError for a span that is not one row with all its
        pages."""
        tokens = [span.held + span.tail for span in spans]
        hidden = [0 if s.sight is None else s.sight.hidden(self.page_tokens) for s in spans]
        pages = []
        for span, count in zip(spans, tokens, strict=True):
            needed = -(-count // self.page_tokens)
            if span.length != 1 or span.start < 0 or not 0 <= needed <= len(span.pages):
                raise EngineError(
                    f"a span of {span.length} rows from row {span.start} sees {count} tokens on"
                    f" {len(span.pages)} pages of {self.page_tokens}: expected one row, with the"
                    " pages of its tokens; plan longer chunks separately"
                )
            pages.append(span.pages[:needed])
        return NativePlan(self, [span.start for span in spans], tokens, hidden, pages)

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Extra threads, idle until a plan is large enough to share."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(torch.get_num_threads(), "attention")
        return self._threads


class NativePlan:
    """A step's single rows, planned for every layer.

    Row `starts[i]` attends to `tokens[i]` tokens of `pages[i]`, except the first `hidden[i]`.
    """

    def __init__(
        self,
        kernel: NativeKernel,
        starts: list[int],
        tokens: list[int],
        hidden: list[int],
        pages: list[Ids],
    ) -> None:
        self.kernel = kernel
        self._rows_needed = max(starts, default=-1) + 1
        sees = [count > out for count, out in zip(tokens, hidden, strict=True)]
        self._bare = [row for row, any_ in zip(starts, sees, strict=True) if not any_]
        seeing = [i for i, any_ in enumerate(sees) if any_]
        counts = np.array([len(pages[i]) for i in seeing], dtype=np.int64)
        # Arrays that the plan points to must live as long as the plan.
        self._tokens = np.array([tokens[i] for i in seeing], dtype=np.int64)
        self._hidden = np.array([hidden[i] for i in seeing], dtype=np.int64)
        self._arrays = (
            np.array([starts[i] for i in seeing], dtype=np.int64),
            self._tokens,
            np.cumsum(counts) - counts,
            np.concatenate([_NONE, *(pages[i] for i in seeing)]),
        )
        ids = self._arrays[3]
        self._lowest, self._highest = int(ids.min(initial=0)), int(ids.max(initial=-1))
        self._plan = _Plan(
            *(array.ctypes.data for array in self._arrays),
            kernel.heads,
            kernel.kv_heads,
            kernel.head_dim,
            kernel.page_tokens,
            kernel.dtype == torch.bfloat16,
            self._hidden.ctypes.data,
            kernel.planes,
            kernel.scale,
        )
        self.parts = self._split(torch.get_num_threads())

    def fill(self, q: torch.Tensor, pool: torch.Tensor, into: Partial) -> None:
        """Store the rows' states in `into`; see `kernel_interface.AttentionPlan`. Other rows are
        untouched.

        Raises EngineError if a tensor differs from the plan.
        """
        q = q.float()
        if q.stride(-1) != 1 or q.stride(1) != q.shape[-1]:
            q = q.contiguous()
        self._check(q, pool, into)
        for row in self._bare:
            into.out[row].zero_()
            into.lse[row].fill_(float("-inf"))
        q_at, stride, pool_at = q.data_ptr(), q.stride(0), pool.data_ptr()
        out_at, lse_at, plan = into.out.data_ptr(), into.lse.data_ptr(), ctypes.byref(self._plan)

        def part(first: int, end: int) -> None:
            self.kernel.call(
                plan, first, end, q_at, stride, pool_at, out_at, lse_at, self.kernel.lanes
            )

        others = [self.kernel.threads.submit(part, *border) for border in self.parts[1:]]
        for border in self.parts[:1]:
            part(*border)
        for other in others:
            other.result()

    def _split(self, threads: int) -> list[tuple[int, int]]:
        """Split pairs of row and KV head into parts of about equal work."""
        ends = np.cumsum(np.repeat(self._tokens - self._hidden, self.kernel.kv_heads))
        if not len(ends):
            return []
        parts = max(min(threads, int(ends[-1]) // THREADED), 1)
        shares = ends[-1] * np.arange(1, parts) // parts
        borders = [0, *np.searchsorted(ends, shares).tolist(), len(ends)]
        return [(a, b) for a, b in itertools.pairwise(borders) if a < b]

    def _check(self, q: torch.Tensor, pool: torch.Tensor, into: Partial) -> None:
        K = self.kernel
        page = (K.planes, K.kv_heads, K.page_tokens, K.head_dim)
        rows = len(into.out)
        if not (
            pool.shape[1:] == page
            and pool.dtype == K.dtype
            and pool.is_contiguous()
            and 0 <= self._lowest <= self._highest + 1 <= len(pool)
        ):
            raise EngineError(
                f"a pool {list(pool.shape)} of {pool.dtype} for pages {self._lowest} …"
                f" {self._highest}: must hold them as {list(page)} of {K.dtype}, contiguous"
            )
        if not (
            rows == len(q) >= self._rows_needed
            and q.shape == into.out.shape == (rows, K.heads, K.head_dim)
            and into.lse.shape == (rows, K.heads)
            and into.out.dtype == into.lse.dtype == torch.float32
            and into.out.is_contiguous()
            and into.lse.is_contiguous()
        ):
            raise EngineError(
                f"queries {list(q.shape)} with states {list(into.out.shape)},"
                f" {list(into.lse.shape)}: must be {self._rows_needed} rows or more of {K.heads}"
                f" heads of {K.head_dim}, states contiguous in float32"
            )
