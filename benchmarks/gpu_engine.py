"""The engine's targets on one GPU, measured in one run: Llama-3-8B's shape, random weights, bf16.

    python benchmarks/gpu_engine.py --json table.json
    python benchmarks/gpu_engine.py --rows tpot burst
    python benchmarks/gpu_engine.py --device cpu --shape tiny      the logic alone: no verdicts

The scheduler that serves decides, and the runner of a rank computes, in one process; long contexts
that only decodes need are filled, not computed. Targets are stated for one H200, as parts of what
vLLM 0.24.0 took there (see docs/performance.md). Exits with 1 when one is missed, and with 2 where
there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from medha.errors import UserError
from medha.profile import CPU_CORE, H200, Profile
from medha.request import Slo
from medha_worker.attention.choice import attention_for
from medha_worker.attention.interface import Span
from medha_worker.calibrate import machine
from medha_worker.device import Device, device_of
from medha_worker.kv.pages import KvPages
from medha_worker.testing.checkpoint import TinyModel, write_config
from medha_worker.testing.served import Served, Story, Wish

PAGE_TOKENS = 64
LLAMA_3_8B = TinyModel(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256,
    max_tokens=1 << 20, rope_theta=500_000.0, dtype="bfloat16",
)  # fmt: skip
SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TinyModel(layers=2, max_tokens=1 << 20)}

# vLLM 0.24.0 on one H200, default settings: tokens -> seconds; and the part of it to reach.
TTFT_S = {128: 0.010, 2048: 0.047, 8192: 0.210, 32768: 1.21, 131_072: 10.31, 393_216: 74.9}
TPOT_S = {128: 0.00491, 2048: 0.00503, 32768: 0.00601, 131_072: 0.00897}
LONG_TOKENS, LONG_PART, PART = 131_072, 0.9, 1.0
BURST_S = 11.3
COUNTED = 32  # tokens of which a decode's time is the mean
SHORT_CHUNK, CHUNKS = 64, (64, 128, 256, 512, 2048)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table; `met` None: nothing to judge by, as it is no GPU's time; `value` None:
    it could not be measured here, `note` says why."""

    row: str
    what: str
    value: float | None = None
    unit: str = ""
    target: float = 0.0
    least: bool = False
    met: bool | None = None
    note: str = ""


class Bench:
    """The replica that rows are measured on, made when first needed, of one KV type at a time.

    `scale`: lengths are divided by it (1 on a GPU; a dry run on a CPU is small).
    """

    def __init__(self, device: Device, shape: TinyModel, folder: pathlib.Path, pool: int) -> None:
        self.device, self.model, self.folder, self.pool = device, shape, folder, pool
        self.timed = device.at.type == "cuda"
        self.scale = 1 if self.timed else 64
        self._served: Served | None = None
        self._kv = ""

    def tokens(self, count: int) -> int:
        return max(4, count // self.scale)

    def served(self, kv_dtype: str = "auto", pool_tokens: int = 0) -> Served:
        """A replica whose pool holds at least `pool_tokens`, warmed up."""
        if self._served is not None and self._kv == kv_dtype:
            return self._served
        self._served = None
        gc.collect()
        if self.timed:
            torch.cuda.empty_cache()
        profile: Profile = H200 if self.timed else CPU_CORE
        self._kv = kv_dtype
        self._served = Served(
            self.folder, self.device, profile=profile, kv_dtype=kv_dtype,
            dtype="bfloat16" if self.timed else "float32",
            pages=max(self.pool, self.tokens(pool_tokens)) // PAGE_TOKENS + 64,
            slo=Slo(ttft_floor_s=0.15, ttft_multiplier=1.15, tpot_s=0.025),
        )  # fmt: skip
        for _ in range(3):
            mixed = [Wish(prompt_tokens=self.tokens(n), output_tokens=8) for n in (128, 2048, 8192)]
            self._served.play(mixed + [Wish(prompt_tokens=8, output_tokens=16)] * 8)
        return self._served

    def wait(self, work: Callable[[], object]) -> float:
        """Seconds until the device has done `work`."""
        self.device.fetch().wait()
        began = time.perf_counter()
        work()
        self.device.fetch().wait()
        return time.perf_counter() - began

    def copy_bytes_per_s(self) -> float:
        source = torch.zeros(1 << (30 if self.timed else 22), dtype=torch.uint8,
                             device=self.device.at)  # fmt: skip
        target = torch.empty_like(source)
        best_s = min(self.wait(lambda: target.copy_(source)) for _ in range(8))
        return 2.0 * source.nbytes / best_s

    def row(self, row: str, what: str, value: float, unit: str, target: float, *,
            least: bool = False, note: str = "") -> Row:  # fmt: skip
        met = (value >= target if least else value <= target) if self.timed else None
        return Row(row=row, what=what, value=value, unit=unit, target=target, least=least, met=met,
                   note=note)  # fmt: skip


# --- rows -----------------------------------------------------------------------------------------


def ttft(bench: Bench) -> Iterator[Row]:
    """One prompt at a time on an idle replica; of short ones the best of several."""
    served = bench.served()
    for tokens, theirs_s in TTFT_S.items():
        part = LONG_PART if tokens >= LONG_TOKENS else PART
        wish = Wish(prompt_tokens=bench.tokens(tokens), output_tokens=1)
        rounds = 5 if tokens < 32768 else 1
        best_s = min(served.play([wish])[0].ttft_s for _ in range(rounds))
        shape = served.shape
        flops = shape.layers * (
            shape.attention_flops(wish.prompt_tokens, 0) + shape.linear_flops(wish.prompt_tokens)
        )
        note = f"{flops / best_s / 1e12:,.0f} TFLOP/s of causal work" if bench.timed else ""
        yield bench.row("ttft", f"TTFT alone, {tokens:,} tokens", 1e3 * best_s, "ms",
                        1e3 * part * theirs_s, note=note)  # fmt: skip


def tpot(bench: Bench) -> Iterator[Row]:
    """One decode at a time, its context filled."""
    served = bench.served()
    for tokens, theirs_s in TPOT_S.items():
        took_s = decode_s(served, bench.tokens(tokens))
        yield bench.row("tpot", f"TPOT alone after {tokens:,} tokens", 1e3 * took_s, "ms",
                        1e3 * 0.9 * theirs_s)  # fmt: skip


def decode_s(served: Served, context: int) -> float:
    """Seconds of one token: the median gap, once the first ones have warmed up."""
    wish = Wish(prompt_tokens=context, output_tokens=COUNTED + 8, filled=True)
    gaps = served.play([wish])[0].gaps_s()
    return float(np.median(gaps[-COUNTED:]))


def convoy(bench: Bench) -> Iterator[Row]:
    """32 decodes run, a 128 K prompt arrives, and 2 K prompts every 0.7 s."""
    served = bench.served()
    apart_s, count = (0.7, 24) if bench.timed else (0.0, 4)
    decodes = [Wish(prompt_tokens=bench.tokens(1024), output_tokens=1 << 12, filled=True)] * 32
    long = Wish(prompt_tokens=bench.tokens(131_072), output_tokens=1, arrival_s=apart_s)
    short = [
        Wish(prompt_tokens=bench.tokens(2048), output_tokens=1, arrival_s=(2 + i) * apart_s)
        for i in range(count)
    ]
    stories = served.play([*decodes, long, *short], lambda seen: _told(seen, long, short))
    whole = _of(stories, [long])[0]
    gaps = [gap for story in _of(stories, decodes)
            for gap in story.gaps_s(whole.arrived_s, whole.token_s[0])]  # fmt: skip
    p50, p99, most = (1e3 * float(q) for q in np.quantile(gaps, (0.5, 0.99, 1.0)))
    note = f"p50 {p50:.1f} ms over {len(gaps)} gaps"
    yield bench.row("convoy", "TBT p99 of 32 decodes beside a 128 K prompt", p99, "ms", 30.0,
                    note=note)  # fmt: skip
    yield bench.row("convoy", "… at most", most, "ms", 45.0)
    yield from _shorts(bench, "convoy", _of(stories, short), 120.0)
    yield bench.row("convoy", "… TTFT of the 128 K prompt", whole.ttft_s, "s", 12.0)


def queue(bench: Bench) -> Iterator[Row]:
    """A 384 K prompt prefills, and a 2 K prompt comes every 2 s."""
    served = bench.served()
    apart_s, count = (2.0, 40) if bench.timed else (0.0, 4)
    long = Wish(prompt_tokens=bench.tokens(393_216), output_tokens=1)
    short = [
        Wish(prompt_tokens=bench.tokens(2048), output_tokens=1, arrival_s=(1 + i) * apart_s)
        for i in range(count)
    ]
    stories = served.play([long, *short], lambda seen: _told(seen, long, short))
    yield from _shorts(bench, "queue", _of(stories, short), 100.0)
    ttft_s = _of(stories, [long])[0].ttft_s
    yield bench.row("queue", "… TTFT of the 384 K prompt", ttft_s, "s", 75.0)


def _shorts(bench: Bench, row: str, stories: list[Story], p50_ms: float) -> Iterator[Row]:
    """TTFT of the 2 K prompts that came while the long one ran."""
    found = [1e3 * story.ttft_s for story in stories]
    note = f"{len(found)} came"
    yield bench.row(row, "TTFT p50 of 2 K prompts meanwhile", float(np.median(found)), "ms",
                    p50_ms, note=note)  # fmt: skip
    yield bench.row(row, "… at most", max(found), "ms", 200.0)


def _of(stories: Sequence[Story], wishes: Sequence[Wish]) -> list[Story]:
    """The stories of these wishes."""
    ids = {id(wish) for wish in wishes}
    return [story for story in stories if id(story.wish) in ids]


def _told(stories: Sequence[Story], long: Wish, short: Sequence[Wish]) -> bool:
    """Whether the long prompt is answered, and every short one that came while it ran."""
    told = [story for story in stories if story.token_s]
    return bool(_of(told, [long])) and len(_of(told, short)) == len(_of(stories, short))


def chunks(bench: Bench) -> Iterator[Row]:
    """Attention alone of one layer: per token, a chunk of 64 beside the best chunk, over 1 M."""
    m, device = bench.model, bench.device
    dtype = torch.bfloat16 if bench.timed else torch.float32
    prefix = bench.tokens(1 << 20) // PAGE_TOKENS * PAGE_TOKENS
    count = prefix // PAGE_TOKENS + max(CHUNKS) // PAGE_TOKENS
    kv = KvPages(range(1), count, m.kv_heads, PAGE_TOKENS, m.head_dim, dtype, device.at)
    kv.memory.normal_()
    kernel = attention_for(m.heads, m.kv_heads, m.head_dim, PAGE_TOKENS, dtype, dtype, device.at)
    each_s = {}
    for rows in CHUNKS:
        pages = np.arange((prefix + rows) // PAGE_TOKENS, dtype=np.int64)
        plan = kernel.plan([Span(0, rows, prefix, pages, True)])
        q = torch.randn(rows, m.heads, m.head_dim, device=device.at).to(dtype)
        k, v = torch.randn(2, rows, m.kv_heads, m.head_dim, device=device.at).to(dtype)

        def run(plan=plan, q=q, k=k, v=v) -> object:  # type: ignore[no-untyped-def]
            return plan.run(q, k, v, kv.pool(0))

        run()
        each_s[rows] = min(bench.wait(run) for _ in range(5)) / rows
    best = min(each_s, key=lambda rows: each_s[rows])
    more = 100.0 * (each_s[SHORT_CHUNK] / each_s[best] - 1.0)
    yield bench.row("chunks", "attention of 64-token chunks over 1 M: more than the best chunk",
                    more, "%", 10.0, note=f"the best is {best}")  # fmt: skip


def long_decode(bench: Bench) -> Iterator[Row]:
    """One sequence of 900 K tokens, keys in FP8: bytes that a token must read, per second."""
    narrow = "fp8_e4m3" if bench.timed else "auto"
    context = bench.tokens(900_000)
    served = bench.served(narrow, 900_000 + 4096)
    copy = bench.copy_bytes_per_s()
    took_s = decode_s(served, context)
    shape = served.shape
    read = shape.params * shape.param_bytes + context * shape.kv_bytes_per_token
    part = 100.0 * read / took_s / copy
    note = f"{1e3 * took_s:.1f} ms a token; a copy moves {copy / 1e9:,.0f} GB/s"
    yield bench.row("decode", "decode of 900 K tokens, FP8 KV: of copy bandwidth", part, "%", 88.0,
                    least=True, note=note)  # fmt: skip


def burst(bench: Bench) -> Iterator[Row]:
    """256 requests of 1,024 in and 256 out, all at once."""
    served = bench.served()
    count = 256 if bench.timed else 12
    wish = Wish(prompt_tokens=bench.tokens(1024), output_tokens=bench.tokens(256))
    stories = served.play([wish] * count)
    took_s = max(s.token_s[-1] for s in stories) - min(s.arrived_s for s in stories)
    rate = sum(len(story.token_s) for story in stories) / took_s
    yield bench.row("burst", "256 requests of 1,024 in, 256 out", took_s, "s", BURST_S,
                    note=f"{rate:,.0f} tokens/s")  # fmt: skip


ROWS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "ttft": ttft, "tpot": tpot, "convoy": convoy, "queue": queue, "burst": burst,
    "chunks": chunks, "decode": long_decode,
}  # fmt: skip


# --- table ----------------------------------------------------------------------------------------


def show(rows: list[Row], title: str) -> None:
    table = Table(title=title)
    for column in ("what", "measured", "target", "verdict", ""):
        table.add_column(column)
    for row in rows:
        if row.value is None:
            table.add_row(row.what, "—", "", "not measured", row.note)
            continue
        verdict = "not timed" if row.met is None else "met" if row.met else "MISSED"
        table.add_row(
            row.what, f"{row.value:,.4g} {row.unit}",
            f"{'≥' if row.least else '≤'} {row.target:,.4g} {row.unit}", verdict, row.note,
        )  # fmt: skip
    Console(width=140).print(table)


def pool_tokens(given: int, device: Device, shape: TinyModel) -> int:
    """As many as fit beside the weights and what chunks need, at most what the rows ask for."""
    most = 524_288 if device.at.type == "cuda" else 16_384
    if given or device.at.type != "cuda":
        return given or most
    free, _ = torch.cuda.mem_get_info(device.at)
    hidden, inner = shape.hidden, shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    layer = hidden * (inner + shape.heads * shape.head_dim + 3 * shape.intermediate)
    weights = 2 * (shape.layers * layer + 2 * shape.vocab * hidden)
    each = 4 * shape.layers * shape.kv_heads * shape.head_dim
    return min(most, int((0.92 * free - weights - (6 << 30)) / each))


def main() -> int:
    given = arguments()
    try:
        device = device_of(given.device)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[given.shape]
        write_config(pathlib.Path(folder), shape)
        pool = pool_tokens(given.pool_tokens, device, shape)
        bench = Bench(device, shape, pathlib.Path(folder), pool)
        name = machine(device.at.type)
        for row in given.rows:
            try:
                rows.extend(ROWS[row](bench))
            except UserError as error:
                rows.append(Row(row=row, what=f"the rest of {row}", note=str(error)))
    show(rows, f"{given.shape} on {name}")
    if given.json is not None:
        found = {"machine": name, "shape": given.shape, "rows": msgspec.to_builtins(rows)}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(row.met is False for row in rows) else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--json", type=pathlib.Path, help="write the table there too")
    parser.add_argument("--pool-tokens", type=int, default=0, help="0: as many as fit")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
