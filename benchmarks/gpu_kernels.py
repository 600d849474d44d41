"""The attention kernels of the CUDA backend on this GPU: first exact, then how fast.

    python benchmarks/gpu_kernels.py
    python benchmarks/gpu_kernels.py --json kernels.json --types bf16 --quick

Every path is first compared with attention in float32, over memory that was poisoned; then each is
timed by the device's clock as the engine runs it, with its plans, its gathers and its merges. The
shape is a layer of Llama-3 8B: 32 query heads over 8 of 128, pages of 64 tokens. Exits with 1 when
a path is wrong or a target is missed, with 2 where there is no GPU. Kernels are compiled when first
used, all at once and once only; that takes minutes more, and half as many for one type of pages.

Targets are what these kernels reached alone on one H200 (docs/performance.md), less 3 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from medha.errors import UserError
from medha_worker.attention.captured import CapturedDecodes
from medha_worker.attention.choice import attention_for
from medha_worker.attention.interface import Span
from medha_worker.attention.paged import PagedAttention
from medha_worker.attention.scales import FP8, Scales
from medha_worker.calibrate_chunks import device_times_s
from medha_worker.testing.paged_case import (
    CASES,
    Case,
    Work,
    difference,
    lay,
    limit,
    poison,
)

HEADS, KV_HEADS, HEAD_DIM, T = 32, 8, 128, 64
MILLION = 1 << 20
SLACK = 0.97
# Half of what an iteration may cost the CPU.
PLAN_US = 500.0
BF16 = torch.bfloat16
TYPES = {"bf16": BF16, "fp8": FP8}


class Row(msgspec.Struct):
    """One line of the table: `value` in `unit`, to be at least `target` (at most, where that is
    negative); no target, no verdict."""

    name: str
    value: float
    unit: str
    target: float = 0.0

    @property
    def verdict(self) -> str:
        if not self.target:
            return ""
        good = self.value >= self.target if self.target > 0 else self.value <= -self.target
        return "ok" if good else "MISSED"


@dataclasses.dataclass(frozen=True)
class Bench:
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
        geometry, chosen.library, chosen.device, table=chosen.table,
        narrow_tokens=narrow_tokens or chosen.most_tokens,
    )  # fmt: skip


def compile_all(types: list[str]) -> float:
    """Have every kernel compiled, side by side; seconds."""
    began = time.perf_counter()

    def first_use(what: tuple[torch.dtype, bool, tuple[Work, ...], int]) -> None:
        dtype, tensor, works, window = what
        on = backend(dtype, tensor)
        laid = lay(Case("", works, window), on.geometry, on.device)
        on.plan(laid.spans).run(laid.q, laid.k, laid.v, laid.pool, laid.scales)

    decode, chunk = (Work(2000, 1),), (Work(20_000, 20), Work(0, 20))
    uses = [(TYPES[name], False, works, window) for name in types for works in (decode, chunk)
            for window in (0, 1024)]  # fmt: skip
    uses += [(TYPES[name], True, decode, 0) for name in types]
    with ThreadPoolExecutor(len(uses)) as threads:
        list(threads.map(first_use, uses))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def errors(types: list[str]) -> Iterator[Row]:
    """How far each path is from attention in float32; of FP8 also how that grows with a sum."""
    for name in types:
        on = backend(TYPES[name])
        for case in CASES:
            most, laid = limit(case, on.geometry), lay(case, on.geometry, on.device)
            plan = on.plan(laid.spans)
            poison(on.device)
            found = plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)
            off = difference(found, laid.expected(on.geometry))
            worst = off.worst if off.within(most) else math.nan
            yield Row(f"{name}: {case.name}", 100 * worst, "% off", -100 * most.worst)
    for tokens in (16_384, 131_072, MILLION // 2) if "fp8" in types else ():
        laid = lay(Case("", (Work(tokens, 512),)), backend(FP8).geometry, torch.device("cuda"))
        expected = laid.expected(backend(FP8).geometry)
        for part in (4096, 16_384, 65_536, tokens):
            if part <= tokens:
                plan = backend(FP8, narrow_tokens=part).plan(laid.spans)
                found = plan.run(laid.q, laid.k, laid.v, laid.pool, laid.scales)
                off = difference(found, expected)
                name = f"fp8: {tokens:,} keys, sums of {part:,}, typically"
                yield Row(name, 100 * off.typical, "% off")


def ceilings(bench: Bench) -> Iterator[Row]:
    a, b = torch.randn(2, 8192, 8192, device=bench.device, dtype=BF16)
    yield Row("product 8192³", 2 * 8192**3 / bench.seconds(lambda: a @ b) / 1e12, "TFLOP/s")
    weight = torch.randn(4096, 28_672, device=bench.device, dtype=BF16)
    for rows in (128, 256, 512, 2048):
        x = torch.randn(rows, 4096, device=bench.device, dtype=BF16)
        took_s = bench.seconds(lambda x=x: x @ weight)  # type: ignore[misc]
        flops = 2 * rows * weight.numel()
        yield Row(f"linear 4096 × 28672, {rows} rows", flops / took_s / 1e12, "TFLOP/s")
    yield Row("device copy", copied(bench), "GB/s")


def copied(bench: Bench) -> float:
    """GB/s read and written."""
    source = bench.pools[BF16].view(-1)[: 1 << 30]
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: target.copy_(source)) / 1e9


CHUNKS = {32: 422, 64: 498, 128: 554, 256: 555, 512: 542, 2048: 545}


def chunks(bench: Bench) -> Iterator[Row]:
    rates = {}
    for length, best in CHUNKS.items():
        took_s = bench.layer_s(BF16, [Work(MILLION - 4096, length)])
        rates[length] = _flops(MILLION - 4096, length) / took_s / 1e12
        yield Row(f"chunk {length} over 1 M", rates[length], "TFLOP/s", SLACK * best)
    cost = max(rates.values()) / rates[64]
    yield Row("chunk 64 against the best chunk", cost, "× the time a token", -1.1)
    for held in (8192, 131_072):
        for length in (64, 512, 2048):
            took_s = bench.layer_s(BF16, [Work(held, length)])
            rate = _flops(held, length) / took_s / 1e12
            yield Row(f"chunk {length} over {held // 1024} K", rate, "TFLOP/s")
    for length, best in ((64, 0), (512, 728)) if FP8 in bench.pools else ():
        took_s = bench.layer_s(FP8, [Work(MILLION - 4096, length)])
        rate = _flops(MILLION - 4096, length) / took_s / 1e12
        yield Row(f"chunk {length} over 1 M, FP8", rate, "TFLOP/s", SLACK * best)


def _flops(held: int, length: int) -> float:
    return 4.0 * HEADS * HEAD_DIM * (length * held + length * (length + 1) / 2)


def decodes(bench: Bench, copy: float) -> Iterator[Row]:
    for name, dtype in TYPES.items():
        if dtype not in bench.pools:
            continue
        for batch, held, best in ((1, MILLION - 64, 4351), (8, 131_000, 4328), (64, 8128, 4090)):
            for tensor in (False, True):
                took_s = bench.layer_s(dtype, [Work(held, 1)] * batch, tensor)
                moved = 2 * batch * (held + 1) * KV_HEADS * HEAD_DIM * dtype.itemsize
                target = SLACK * best if dtype == BF16 else 0.88 * copy if batch == 1 else 0.0
                cores = "tensor cores" if tensor else "CUDA cores"
                yield Row(f"decode {batch} × {held:,}, {name}, {cores}", moved / took_s / 1e9,
                          "GB/s", 0.0 if tensor else target)  # fmt: skip


def plans(bench: Bench) -> Iterator[Row]:
    """What a plan costs the CPU, arrays included."""
    on, pool = bench.attentions[BF16, False], len(bench.pools[BF16])
    captured = CapturedDecodes(on, 64, pool, spare=pool - 1)
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
        yield Row(f"plan of {name}", 1e6 * statistics.median(times), "µs", -PLAN_US)


def pools(device: torch.device, types: list[str]) -> Bench:
    shape = (MILLION // T + 1, 2, KV_HEADS, T, HEAD_DIM)
    wide = torch.empty(shape, device=device, dtype=BF16).normal_()
    found = {BF16: wide}
    if "fp8" in types:
        found[FP8] = torch.empty(shape, device=device, dtype=FP8)
        for first in range(0, len(wide), 1024):  # in pieces: a pool is four gigabytes
            found[FP8][first : first + 1024] = wide[first : first + 1024].to(FP8)
    ones = torch.ones(KV_HEADS, device=device)
    made = {(dtype, tensor): backend(dtype, tensor)
            for dtype in found for tensor in (False, True)}  # fmt: skip
    return Bench(device, found, made, Scales(ones, ones, ones), 10)


def shown(title: str, rows: Iterator[Row], console: Console) -> list[Row]:
    table, found = Table(title=title), []
    for column in ("what", "measured", "", "target", ""):
        table.add_column(column, justify="right" if column in ("measured", "target") else "left")
    for row in rows:
        found.append(row)
        target = f"{'≥' if row.target > 0 else '≤'} {abs(row.target):,.2f}" if row.target else ""
        table.add_row(row.name, f"{row.value:,.2f}", row.unit, target, row.verdict)
    console.print(table)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=pathlib.Path, help="write the figures there too")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--quick", action="store_true", help="exactness alone")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_kernels.py measures a GPU, and torch finds none here", file=sys.stderr)
        return 2
    console, device = Console(width=100), torch.device("cuda")
    try:
        compiled_s = compile_all(options.types)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    console.print(f"{name}, torch {torch.__version__}; kernels compiled in {compiled_s:.0f} s")
    with torch.inference_mode():
        wrong = shown("Off from attention in float32", errors(options.types), console)
        tables = {"errors": wrong}
        if not options.quick and all(row.verdict != "MISSED" for row in wrong):
            torch.cuda.empty_cache()
            bench = pools(device, options.types)
            tables["ceilings"] = shown("Ceilings", ceilings(bench), console)
            tables["chunks"] = shown("Chunks", chunks(bench), console)
            tables["decodes"] = shown("Single rows", decodes(bench, copied(bench)), console)
            tables["plans"] = shown("Plans, on the CPU", plans(bench), console)
    missed = [row.name for rows in tables.values() for row in rows if row.verdict == "MISSED"]
    if options.json is not None:
        told = {"device": name, "torch": torch.__version__, "compiled_s": compiled_s,
                "missed": missed, "tables": tables}  # fmt: skip
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    console.print(
        f"missed: {', '.join(missed)}" if missed else "every path exact, no target missed"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
