"""The attention kernels of the CUDA backend on this GPU: first exact, then how fast.

    python -m benchmarks.gpu_kernels
    python -m benchmarks.gpu_kernels --json kernels.json --types bf16 --quick

Every path is first compared with attention in float32, over memory that was poisoned; then each is
timed by the device's clock as the engine runs it, with its plans, its gathers and its merges. The
shape is a layer of Llama-3 8B: 32 query heads over 8 of 128, pages of 64 tokens. Each row is
printed, and the file written, as it comes; what breaks is a row too. Exits with 1 when a path is
wrong, breaks or misses its target, with 2 where there is no GPU. Kernels are compiled first, in one
build and once only; that takes minutes more, and half as many for one type of pages.

Targets are what these kernels reached alone on one H200 (docs/performance.md), less 3 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch
from rich.console import Console
from tests.support.compiling import compile_kernels
from tests.support.paged_case import (
    CASES,
    Case,
    Laid,
    Work,
    difference,
    lay,
    limit,
    poison,
)
from tests.support.sheet import Row, Sheet

from medha.errors import UserError
from medha_worker.attention.backend import attention_for
from medha_worker.attention.fp8_scales import FP8, Scales
from medha_worker.attention.graph_decode import GraphDecodes
from medha_worker.attention.kernel_interface import Partial, Span
from medha_worker.attention.paged import PagedAttention
from medha_worker.graphs import CudaGraphRecorder

HEADS, KV_HEADS, HEAD_DIM, T = 32, 8, 128, 64
MILLION = 1 << 20
SLACK = 0.97
# Half of what an iteration may cost the CPU.
PLAN_US = 500.0
BF16 = torch.bfloat16
TYPES = {"bf16": BF16, "fp8": FP8}


def row(section: str, what: str, value: float, unit: str, target: float = 0.0) -> Row:
    """A row: `value` is to be at least `target` (at most, where that is negative)."""
    least, limit = target > 0, abs(target)
    met = (value >= limit if least else value <= limit) if target else None
    return Row(row=section, what=what, value=value, unit=unit, target=limit, least=least, met=met)


@dataclasses.dataclass(frozen=True)
class KernelBench:
    """Pools of a million tokens of one layer, in both types, and the backends over them."""

    device: torch.device
    pools: dict[torch.dtype, torch.Tensor]
    attentions: dict[tuple[torch.dtype, bool], PagedAttention]
    scales: Scales
    repeats: int

    def layer_s(self, dtype: torch.dtype, works: list[Work], tensor: bool = False) -> float:
        """Seconds of one layer's attention for `works`, whose pages lie in random order."""
        attention = self.attentions[dtype, tensor]
        spans = _spans(works, len(self.pools[dtype]))
        rows = sum(work.length for work in works)
        q = torch.randn(rows, HEADS, HEAD_DIM, device=self.device, dtype=BF16)
        k = torch.zeros(rows, KV_HEADS, HEAD_DIM, device=self.device).to(dtype)
        plan, pool = attention.plan(spans), self.pools[dtype]
        scales = self.scales if dtype == FP8 else None
        return self.seconds(lambda: plan.run(q, k, k, pool, scales))

    def seconds(self, call: Callable[[], object]) -> float:
        """Median of the device's time for one call."""
        return statistics.median(device_times_s(call, self.repeats))


def device_times_s(call: Callable[[], object], repeats: int) -> list[float]:
    """Return device times of `repeats` calls, after one untimed call."""
    call()
    times_s: list[float] = []
    for _ in range(repeats):
        began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times_s.append(float(began.elapsed_time(ended)) / 1e3)
    return times_s


def _spans(works: list[Work], pages: int) -> list[Span]:
    order = np.random.default_rng(0).permutation(pages)
    spans, row, first = [], 0, 0
    for work in works:
        count = -(-(work.held + work.length) // T)
        ids, first = order[first : first + count].astype(np.int64), first + count
        spans.append(Span(row, work.length, work.held, ids, True))
        row += work.length
    return spans


def backend(dtype: torch.dtype, tensor: bool = False, narrow_tokens: int = 0) -> PagedAttention:
    """The engine's own choice, or with single rows on tensor cores."""
    chosen = attention_for(HEADS, KV_HEADS, HEAD_DIM, T, BF16, dtype, "cuda")
    assert isinstance(chosen, PagedAttention)
    if not tensor and not narrow_tokens:
        return chosen
    decodes = "tensor" if tensor else chosen.geometry.decodes
    geometry = dataclasses.replace(chosen.geometry, decodes=decodes)
    return PagedAttention(
        geometry,
        chosen.library,
        chosen.device,
        choose=chosen.choose,
        narrow_tokens=narrow_tokens or chosen.most_tokens,
    )


# Sums as long as they get, and what single rows run on instead of CUDA cores.
LONG = (
    Case("64 rows after 1,000,000 keys", (Work(1_000_000, 64),)),
    Case("2,048 rows after 1,000,000 keys", (Work(1_000_000, 2048),)),
    Case("a decode over 1,000,000 keys", (Work(1_000_000, 1),)),
)
SINGLES = (
    Case("decodes", tuple(Work(n, 1) for n in (0, 1, 63, 64, 127, 1000, 70_000, 1_000_000))),
    Case("64 decodes", (Work(8128, 1),) * 64),
)


def exact(sheet: Sheet, name: str) -> None:
    """Measure the error of each path over pages of type `name` against float32 attention."""
    for case in (*CASES, *LONG):
        sheet.attempt("exact", f"{name}: {case.name}", functools.partial(off, name, case))
    for case in SINGLES:
        for how in ("tensor cores", "a graph"):
            call = functools.partial(off, name, case, how)
            sheet.attempt("exact", f"{name}: {case.name} on {how}", call)


def off(name: str, case: Case, how: str = "") -> Row:
    """A case's worst error; single rows may run on "tensor cores" or in "a graph"."""
    on = backend(TYPES[name], how == "tensor cores")
    most, laid = limit(case, on.geometry), lay(case, on.geometry, on.device)
    if how == "a graph":
        states = _replayed(on, laid)
    else:
        plan = on.plan(laid.spans)
        poison(on.device)
        states = plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)
    seen = difference(states, laid.expected(on.geometry))
    what = f"{name}: {case.name}" + (f" on {how}" if how else "")
    measured = row("exact", what, 100 * seen.worst, "% off", -100 * most.worst)
    note = f"typically {100 * seen.typical:.2f} %, lse {seen.lse:.1e}"
    return msgspec.structs.replace(measured, met=seen.within(most), note=note)


def _replayed(on: PagedAttention, laid: Laid) -> Partial:
    """The states of a graph that was recorded for no rows, and is replayed for these."""
    captured = GraphDecodes(on, len(laid.q), len(laid.pool), spare=len(laid.pool) - 1)
    captured.plan([])
    states = captured.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)

    def work() -> torch.Tensor:
        return captured.run(laid.q, laid.k, laid.v, laid.pool, laid.scales).out

    _, replay = CudaGraphRecorder()(work)
    captured.plan(laid.spans)
    poison(on.device)
    replay()
    return states


def sums() -> Iterator[Row]:
    """Measure how FP8 loses precision as a sum grows."""
    for tokens in (16_384, 131_072, MILLION // 2):
        laid = lay(Case("", (Work(tokens, 512),)), backend(FP8).geometry, torch.device("cuda"))
        expected = laid.expected(backend(FP8).geometry)
        for part in (4096, 16_384, 65_536, tokens):
            if part <= tokens:
                plan = backend(FP8, narrow_tokens=part).plan(laid.spans)
                states = plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)
                typical = difference(states, expected).typical
                what = f"fp8: {tokens:,} keys, sums of {part:,}, typically"
                yield row("sums", what, 100 * typical, "% off")


def ceilings(bench: KernelBench) -> Iterator[Row]:
    a, b = torch.randn(2, 8192, 8192, device=bench.device, dtype=BF16)
    yield row(
        "ceilings", "product 8192³", 2 * 8192**3 / bench.seconds(lambda: a @ b) / 1e12, "TFLOP/s"
    )
    weight = torch.randn(4096, 28_672, device=bench.device, dtype=BF16)
    for rows in (128, 256, 512, 2048):
        x = torch.randn(rows, 4096, device=bench.device, dtype=BF16)
        took_s = bench.seconds(lambda x=x: x @ weight)  # type: ignore[misc]
        flops = 2 * rows * weight.numel()
        yield row("ceilings", f"linear 4096 × 28672, {rows} rows", flops / took_s / 1e12, "TFLOP/s")
    yield row("ceilings", "device copy", copied(bench), "GB/s")


def copied(bench: KernelBench) -> float:
    """GB/s read and written."""
    source = bench.pools[BF16].view(-1)[: 1 << 30]
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: target.copy_(source)) / 1e9


CHUNKS = {32: 422, 64: 498, 128: 554, 256: 555, 512: 542, 2048: 545}


def chunks(bench: KernelBench) -> Iterator[Row]:
    rates = {}
    for length, best in CHUNKS.items():
        took_s = bench.layer_s(BF16, [Work(MILLION - 4096, length)])
        rates[length] = _flops(MILLION - 4096, length) / took_s / 1e12
        yield row("chunks", f"chunk {length} over 1 M", rates[length], "TFLOP/s", SLACK * best)
    cost = max(rates.values()) / rates[64]
    yield row("chunks", "chunk 64 against the best chunk", cost, "× the time a token", -1.1)
    for held in (8192, 131_072):
        for length in (64, 512, 2048):
            took_s = bench.layer_s(BF16, [Work(held, length)])
            rate = _flops(held, length) / took_s / 1e12
            yield row("chunks", f"chunk {length} over {held // 1024} K", rate, "TFLOP/s")
    for length, best in ((64, 0), (512, 728)) if FP8 in bench.pools else ():
        took_s = bench.layer_s(FP8, [Work(MILLION - 4096, length)])
        rate = _flops(MILLION - 4096, length) / took_s / 1e12
        yield row("chunks", f"chunk {length} over 1 M, FP8", rate, "TFLOP/s", SLACK * best)


def _flops(held: int, length: int) -> float:
    return 4.0 * HEADS * HEAD_DIM * (length * held + length * (length + 1) / 2)


def decodes(bench: KernelBench) -> Iterator[Row]:
    copy = copied(bench)
    for name, dtype in TYPES.items():
        if dtype not in bench.pools:
            continue
        for batch, held, best in ((1, MILLION - 64, 4351), (8, 131_000, 4328), (64, 8128, 4090)):
            for tensor in (False, True):
                took_s = bench.layer_s(dtype, [Work(held, 1)] * batch, tensor)
                moved = 2 * batch * (held + 1) * KV_HEADS * HEAD_DIM * dtype.itemsize
                target = SLACK * best if dtype == BF16 else 0.88 * copy if batch == 1 else 0.0
                cores = "tensor cores" if tensor else "CUDA cores"
                what = f"decode {batch} × {held:,}, {name}, {cores}"
                rate = moved / took_s / 1e9
                yield row("decodes", what, rate, "GB/s", 0.0 if tensor else target)


def plans(bench: KernelBench) -> Iterator[Row]:
    """Measure the CPU time of a plan, arrays included."""
    on, pool = bench.attentions[BF16, False], len(bench.pools[BF16])
    captured = GraphDecodes(on, 64, pool, spare=pool - 1)
    for name, works, plan in (
        ("64 decodes × 8 K", [Work(8128, 1)] * 64, on.plan),
        ("64 decodes × 8 K, for a graph", [Work(8128, 1)] * 64, captured.plan),
        ("chunk 64 over 1 M", [Work(MILLION - 4096, 64)], on.plan),
        ("chunk 2048 over 8 K", [Work(8192, 2048)], on.plan),
    ):
        spans, times = _spans(works, pool - 1), []
        for _ in range(20):
            torch.cuda.synchronize()
            began = time.perf_counter()
            plan(spans)
            times.append(time.perf_counter() - began)
        yield row("plans", f"plan of {name}", 1e6 * statistics.median(times), "µs", -PLAN_US)


def pools(device: torch.device, types: list[str]) -> KernelBench:
    shape = (MILLION // T + 1, 2, KV_HEADS, T, HEAD_DIM)
    wide = torch.empty(shape, device=device, dtype=BF16).normal_()
    pools_by_type = {BF16: wide}
    if "fp8" in types:
        pools_by_type[FP8] = torch.empty(shape, device=device, dtype=FP8)
        for first in range(0, len(wide), 1024):  # in pieces: a pool is four gigabytes
            pools_by_type[FP8][first : first + 1024] = wide[first : first + 1024].to(FP8)
    ones = torch.ones(KV_HEADS, device=device)
    attentions = {
        (dtype, tensor): backend(dtype, tensor)
        for dtype in pools_by_type
        for tensor in (False, True)
    }
    return KernelBench(device, pools_by_type, attentions, Scales(ones, ones, ones), 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there too")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--quick", action="store_true", help="exactness alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels.py measures a GPU, and torch finds none here", file=sys.stderr)
        return 2
    console, device = Console(width=140), torch.device("cuda")
    try:
        compiled_s = compile_kernels([(HEAD_DIM, "fp8" in options.types)])
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    console.print(f"{name}, torch {torch.__version__}; kernels compiled in {compiled_s:.0f} s")
    head = {"device": name, "torch": str(torch.__version__), "compiled_s": compiled_s}
    sheet = Sheet(console, options.json, head)
    with torch.inference_mode():
        for kind in options.types:
            exact(sheet, kind)
        if "fp8" in options.types:
            sheet.section("sums", sums)
        if not options.quick:
            torch.cuda.empty_cache()
            bench = pools(device, options.types)
            for section in (ceilings, chunks, decodes, plans):
                sheet.section(section.__name__, functools.partial(section, bench))
    return sheet.close()


if __name__ == "__main__":
    sys.exit(main())
