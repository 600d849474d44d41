"""Single rows on a CPU: the kernel of singles.c.

Every pointer passed to the kernel refers to an array checked here: page ids lie in the pool, and
every row has the pages of its tokens, so no input makes the kernel read elsewhere. The library is
built with the project and lies in this folder; it needs neither Python nor torch. It releases the
interpreter's lock, so a large plan runs in as many threads as torch uses.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import pathlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha.checkpoints.latent_attention import LatentAttention
from medha.errors import EngineError, SetupError
from medha_worker.attention.kernel_interface import Partial, Span

# Two dots, so that Python does not import it as a module.
LIBRARY = pathlib.Path(__file__).with_name("singles.kernel.so")
POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
ARGUMENTS = (POINTER, NUMBER, NUMBER, POINTER, NUMBER, POINTER, POINTER, POINTER, NUMBER)
# Supported by the kernel: pool dtypes, head sizes in multiples of `LANES` scalars, and at most
# `GROUP` query heads per KV head (GROUP of singles.c).
DTYPES, LANES, GROUP = (torch.float32, torch.bfloat16), 16, 64
# Tokens times KV heads above which a second thread pays off.
THREADED = 8192

_NONE = np.empty(0, dtype=np.int64)

Ids = npt.NDArray[np.int64]
Kernel = Callable[..., None]


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
def load(library: pathlib.Path, name: str, *arguments: Any) -> Kernel:
    """Load function `name`, of these types of ctypes. Raises SetupError if the library was not
    built, or not for this machine."""
    try:
        kernel = ctypes.CDLL(str(library))[name]
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"{library} is a compiled kernel and cannot be loaded ({error}); run `make"
            " setup`, or install medha again where there is a C compiler"
        ) from None
    kernel.argtypes = arguments
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
        self.call = load(LIBRARY, "medha_singles", *ARGUMENTS)
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

    def check(
        self, q: torch.Tensor, pool: torch.Tensor, into: Partial, rows_needed: int, pages: range
    ) -> None:
        """Raise EngineError unless the tensors are what a plan of `rows_needed` rows and page ids
        in `pages` expects."""
        page = (self.planes, self.kv_heads, self.page_tokens, self.head_dim)
        rows = len(into.out)
        if not (
            pool.shape[1:] == page
            and pool.dtype == self.dtype
            and pool.is_contiguous()
            and 0 <= pages.start <= pages.stop <= len(pool)
        ):
            raise EngineError(
                f"a pool {list(pool.shape)} of {pool.dtype} for pages {pages.start} …"
                f" {pages.stop - 1}: must hold them as {list(page)} of {self.dtype}, contiguous"
            )
        if not (
            rows == len(q) >= rows_needed
            and q.shape == into.out.shape == (rows, self.heads, self.head_dim)
            and into.lse.shape == (rows, self.heads)
            and into.out.dtype == into.lse.dtype == torch.float32
            and into.out.is_contiguous()
            and into.lse.is_contiguous()
        ):
            raise EngineError(
                f"queries {list(q.shape)} with states {list(into.out.shape)},"
                f" {list(into.lse.shape)}: must be {rows_needed} rows or more of {self.heads}"
                f" heads of {self.head_dim}, states contiguous in float32"
            )

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
        q = heads_together(q)
        pages = range(self._lowest, self._highest + 1)
        self.kernel.check(q, pool, into, self._rows_needed, pages)
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


def heads_together(q: torch.Tensor) -> torch.Tensor:
    """Return `q` [rows, heads, head_dim] in float32, with each row's heads contiguous."""
    q = q.float()
    return q if q.stride(-1) == 1 and q.stride(1) == q.shape[-1] else q.contiguous()
