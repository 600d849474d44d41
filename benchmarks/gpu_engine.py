"""The engine's targets on one GPU, measured in one run: Llama-3-8B's shape, random weights, bf16.

    python -m benchmarks.gpu_engine --json table.json
    python -m benchmarks.gpu_engine --rows tpot burst --profile here.json
    python -m benchmarks.gpu_engine --rows prefill900k       alone, as it takes minutes
    python -m benchmarks.gpu_engine --device cpu --shape tiny      the logic alone: no verdicts

The scheduler that serves decides, and the runner of a rank computes, in one process; long contexts
that only decodes need are filled, not computed. Targets are stated for one H200, as parts of what
vLLM 0.24.0 took there (see docs/performance.md). Each row is printed, and the file written, as it
comes; one that breaks is a row too. Exits with 1 when a target is missed or a row broke, and with 2
where there is no GPU.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from rich.console import Console
from tests.support.paged_case import EXACT, difference
from tests.support.served import Served, Story, Wish
from tests.support.sheet import Row, Sheet
from tests.support.stopwatch import Stopwatch
from tests.support.workbench import PAGE_TOKENS, Workbench

from medha.errors import SpecError, UserError
from medha.predictor import Predictor
from medha.profile import CPU_CORE, H200, Profile, decode
from medha.topology import Topology
from medha_worker.attention.backend import attention_for
from medha_worker.attention.kernel_interface import Span
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.device import ComputeDevice, device_of
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import TinyModel, write_config
from medha_worker.profiler import machine

LLAMA_3_8B = TinyModel(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    max_tokens=1 << 20,
    rope_theta=500_000.0,
    dtype="bfloat16",
)
SHAPES = {"llama-3-8b": LLAMA_3_8B, "tiny": TinyModel(layers=2, max_tokens=1 << 20)}

# vLLM 0.24.0 on one H200, default settings: tokens -> seconds; and the part of it to reach.
TTFT_S = {128: 0.010, 2048: 0.047, 8192: 0.210, 32768: 1.21, 131_072: 10.31, 393_216: 74.9}
TPOT_S = {128: 0.00491, 2048: 0.00503, 32768: 0.00601, 131_072: 0.00897}
LONG_TOKENS, LONG_PART, PART = 131_072, 0.9, 1.0
BURST_S = 11.3
COUNTED = 32  # tokens over which a decode's time is averaged
SHORT_CHUNK, CHUNKS = 64, (64, 128, 256, 512, 2048)
# How far a predicted prefill may be off, and from which length on.
MISS, JUDGED_TOKENS = 0.05, 32768
LONGEST = 900_000


# --- rows -----------------------------------------------------------------------------------------


def ttft(bench: Workbench) -> Iterator[Row]:
    """Single prompts on an idle replica; for short ones the best of several."""
    served = bench.served()
    for tokens, theirs_s in TTFT_S.items():
        part = LONG_PART if tokens >= LONG_TOKENS else PART
        rounds = 5 if tokens < JUDGED_TOKENS else 1
        yield from _alone(bench, served, "ttft", tokens, 1e3 * part * theirs_s, rounds)


def prefill900k(bench: Workbench) -> Iterator[Row]:
    """900 K tokens really computed, keys in FP8: minutes, so it is measured when it is named."""
    served = bench.served("fp8_e4m3" if bench.timed else "auto", LONGEST + 4096)
    expected_s = served.predictor.prefill_s(bench.tokens(LONGEST))
    if expected_s > bench.patience_s:
        raise SpecError(
            "--patience",
            bench.patience_s,
            f"must be at least the {expected_s:,.0f} s that 900 K tokens should take here",
            "give more, or leave this row out",
        )
    yield from _alone(bench, served, "prefill900k", LONGEST, 0.0, 1)


def _alone(
    bench: Workbench, served: Served, row: str, tokens: int, target_ms: float, rounds: int
) -> Iterator[Row]:
    """The best TTFT of `rounds` prompts alone, and how well it was predicted when it came."""
    wish = Wish(prompt_tokens=bench.tokens(tokens), output_tokens=1)
    tried = []
    for _ in range(rounds):
        expected_s = served.predictor.prefill_s(wish.prompt_tokens)
        tried.append((served.play([wish])[0].ttft_s, expected_s))
    best_s, expected_s = min(tried)
    shape = served.shape
    flops = shape.layers * (
        shape.attention_flops(wish.prompt_tokens, 0) + shape.linear_flops(wish.prompt_tokens)
    )
    note = f"{flops / best_s / 1e12:,.0f} TFLOP/s of causal work" if bench.timed else ""
    yield bench.row(row, f"TTFT alone, {tokens:,} tokens", 1e3 * best_s, "ms", target_ms, note=note)
    by_profile_s = Predictor(bench.profile, shape, Topology()).prefill_s(wish.prompt_tokens)
    note = (
        f"predicted {1e3 * expected_s:,.1f} ms, measured {1e3 * best_s:,.1f} ms;"
        f" {bench.profile.name} alone says {1e3 * by_profile_s:,.1f} ms"
    )
    limit = 100.0 * MISS if tokens >= JUDGED_TOKENS else 0.0
    yield bench.row(
        row,
        "… its prediction was off by",
        100.0 * abs(expected_s / best_s - 1.0),
        "%",
        limit,
        note=note,
    )


def tpot(bench: Workbench) -> Iterator[Row]:
    """Single decodes with a filled context."""
    served = bench.served()
    for tokens, theirs_s in TPOT_S.items():
        took_s = decode_s(served, bench.tokens(tokens))
        yield bench.row(
            "tpot", f"TPOT alone after {tokens:,} tokens", 1e3 * took_s, "ms", 1e3 * 0.9 * theirs_s
        )


def host(bench: Workbench) -> Iterator[Row]:
    """64 decodes: what an iteration costs the host, and whether the device hides it."""
    served = bench.served()
    context, tokens = bench.tokens(2048), bench.tokens(2048) + 128
    wishes = [Wish(prompt_tokens=context, output_tokens=tokens, filled=True)] * 64
    watch = Stopwatch(served)
    with watch:
        served.play(wishes, lambda _: len(watch.of(64)) >= 4 * COUNTED)
    turns = watch.of(64)[COUNTED:]
    spent_s = np.array([turn.host_s for turn in turns])
    parts = ", ".join(
        f"{name} {1e3 * float(np.median([turn.parts_s[name] for turn in turns])):.2f}"
        for name in watch.parts
    )
    device_ms = 1e3 * float(np.median([turn.device_s for turn in turns]))
    note = (
        f"p99 {1e3 * float(np.quantile(spent_s, 0.99)):.2f} ms over {len(turns)} batches;"
        f" {parts}; the device {device_ms:.2f} ms"
    )
    yield bench.row(
        "host",
        "the host's time of a batch of 64 decodes, p50",
        1e3 * float(np.median(spent_s)),
        "ms",
        1.0,
        note=note,
    )
    behind = [turn.behind for turn in turns]
    yield bench.row(
        "host",
        "… batches launched before the one before was done",
        100.0 * sum(behind) / len(behind),
        "%",
        95.0,
        least=True,
    )


def decode_s(served: Served, context: int) -> float:
    """Seconds of one token: the median gap, once the first ones have warmed up."""
    wish = Wish(prompt_tokens=context, output_tokens=COUNTED + 8, filled=True)
    gaps = served.play([wish])[0].gaps_s()
    return float(np.median(gaps[-COUNTED:]))


def convoy(bench: Workbench) -> Iterator[Row]:
    """32 decodes run, a 128 K prompt arrives, and 2 K prompts every 0.7 s."""
    served = bench.served()
    apart_s, count = (0.7, 24) if bench.timed else (0.0, 4)
    lasting = max(256, bench.tokens(1 << 12))
    decodes = [Wish(prompt_tokens=bench.tokens(1024), output_tokens=lasting, filled=True)] * 32
    long = Wish(prompt_tokens=bench.tokens(131_072), output_tokens=1, arrival_s=apart_s)
    short = [
        Wish(prompt_tokens=bench.tokens(2048), output_tokens=1, arrival_s=(2 + i) * apart_s)
        for i in range(count)
    ]

    def over(seen: Sequence[Story]) -> bool:
        # In a dry run all prompts may be answered before a decode has two tokens.
        decoded = any(len(story.token_s) > 1 for story in _of(seen, decodes))
        return decoded and _all_answered(seen, long, short)

    stories = served.play([*decodes, long, *short], over)
    whole = _of(stories, [long])[0]
    during_s = (whole.arrived_s, whole.token_s[0]) if bench.timed else ()
    gaps = [gap for story in _of(stories, decodes) for gap in story.gaps_s(*during_s)]
    p50, p99, most = (1e3 * float(q) for q in np.quantile(gaps, (0.5, 0.99, 1.0)))
    note = f"p50 {p50:.1f} ms over {len(gaps)} gaps"
    yield bench.row(
        "convoy", "TBT p99 of 32 decodes during a 128 K prompt", p99, "ms", 30.0, note=note
    )
    yield bench.row("convoy", "… at most", most, "ms", 45.0)
    yield from _shorts(bench, "convoy", _of(stories, short), 120.0)
    yield bench.row("convoy", "… TTFT of the 128 K prompt", whole.ttft_s, "s", 12.0)


def queue(bench: Workbench) -> Iterator[Row]:
    """A 384 K prompt prefills, and a 2 K prompt comes every 2 s."""
    served = bench.served()
    apart_s, count = (2.0, 40) if bench.timed else (0.0, 4)
    long = Wish(prompt_tokens=bench.tokens(393_216), output_tokens=1)
    short = [
        Wish(prompt_tokens=bench.tokens(2048), output_tokens=1, arrival_s=(1 + i) * apart_s)
        for i in range(count)
    ]
    stories = served.play([long, *short], lambda seen: _all_answered(seen, long, short))
    yield from _shorts(bench, "queue", _of(stories, short), 100.0)
    ttft_s = _of(stories, [long])[0].ttft_s
    yield bench.row("queue", "… TTFT of the 384 K prompt", ttft_s, "s", 75.0)


def _shorts(bench: Workbench, row: str, stories: list[Story], p50_ms: float) -> Iterator[Row]:
    """TTFT of the 2 K prompts that came while the long one ran."""
    ttfts_ms = [1e3 * story.ttft_s for story in stories]
    note = f"{len(ttfts_ms)} came"
    yield bench.row(
        row,
        "TTFT p50 of 2 K prompts meanwhile",
        float(np.median(ttfts_ms)),
        "ms",
        p50_ms,
        note=note,
    )
    yield bench.row(row, "… at most", max(ttfts_ms), "ms", 200.0)


def _of(stories: Sequence[Story], wishes: Sequence[Wish]) -> list[Story]:
    """The stories of these wishes."""
    ids = {id(wish) for wish in wishes}
    return [story for story in stories if id(story.wish) in ids]


def _all_answered(stories: Sequence[Story], long: Wish, short: Sequence[Wish]) -> bool:
    """Return True if the long prompt and all short ones that arrived meanwhile were answered."""
    answered = [story for story in stories if story.token_s]
    return bool(_of(answered, [long])) and len(_of(answered, short)) == len(_of(stories, short))


def chunks(bench: Workbench) -> Iterator[Row]:
    """Attention alone, of one layer: time per token of a 64-row chunk and of the best, over 1 M."""
    m, device = bench.model, bench.device
    dtype = torch.bfloat16 if bench.timed else torch.float32
    prefix = bench.tokens(1 << 20) // PAGE_TOKENS * PAGE_TOKENS
    count = prefix // PAGE_TOKENS + max(CHUNKS) // PAGE_TOKENS
    kv = KvPages(range(1), count, m.kv_heads, PAGE_TOKENS, m.head_dim, dtype, device.at)
    kv.memory.normal_()
    kernel = attention_for(m.heads, m.kv_heads, m.head_dim, PAGE_TOKENS, dtype, dtype, device.at)
    plain = ReferenceAttention(m.heads, m.kv_heads, m.head_dim, PAGE_TOKENS, tile_pages=32)
    each_s = {}
    for rows in CHUNKS:
        places = torch.arange(prefix, prefix + rows, device=device.at)
        span = Span(0, rows, prefix, np.arange((prefix + rows) // PAGE_TOKENS), True)
        plan = kernel.plan([span])
        q = torch.randn(rows, m.heads, m.head_dim, device=device.at).to(dtype)
        k, v = torch.randn(2, rows, m.kv_heads, m.head_dim, device=device.at).to(dtype)
        kv.write(0, torch.cat((k, v), 1), (places // PAGE_TOKENS, places % PAGE_TOKENS))

        run = functools.partial(plan.run, q, k, v, kv.pool(0))
        states = run()
        if rows == SHORT_CHUNK:
            off = difference(states, plain.plan([span]).run(q.float(), k, v, kv.pool(0)))
            yield bench.row(
                "chunks",
                "64 rows over 1 M: off from float32",
                100.0 * off.worst,
                "%",
                100.0 * EXACT.worst,
            )
        each_s[rows] = min(bench.wait(run) for _ in range(5)) / rows
    best = min(each_s, key=lambda rows: each_s[rows])
    more = 100.0 * (each_s[SHORT_CHUNK] / each_s[best] - 1.0)
    yield bench.row(
        "chunks",
        "attention of 64-token chunks over 1 M: more than the best chunk",
        more,
        "%",
        10.0,
        note=f"the best is {best}",
    )


def long_decode(bench: Workbench) -> Iterator[Row]:
    """A sequence of 900 K tokens with FP8 keys: bytes that a token must read, per second."""
    narrow = "fp8_e4m3" if bench.timed else "auto"
    context = bench.tokens(900_000)
    served = bench.served(narrow, 900_000 + 4096)
    copy = bench.copy_bytes_per_s()
    took_s = decode_s(served, context)
    shape = served.shape
    read = shape.weight_bytes + context * shape.kv_bytes_per_token
    part = 100.0 * read / took_s / copy
    note = f"{1e3 * took_s:.1f} ms a token; a copy moves {copy / 1e9:,.0f} GB/s"
    yield bench.row(
        "decode",
        "decode of 900 K tokens, FP8 KV: of copy bandwidth",
        part,
        "%",
        88.0,
        least=True,
        note=note,
    )


def burst(bench: Workbench) -> Iterator[Row]:
    """256 requests of 1,024 in and 256 out, all at once."""
    served = bench.served()
    count = 256 if bench.timed else 12
    wish = Wish(prompt_tokens=bench.tokens(1024), output_tokens=bench.tokens(256))
    stories = served.play([wish] * count)
    took_s = max(s.token_s[-1] for s in stories) - min(s.arrived_s for s in stories)
    rate = sum(len(story.token_s) for story in stories) / took_s
    yield bench.row(
        "burst",
        "256 requests of 1,024 in, 256 out",
        took_s,
        "s",
        BURST_S,
        note=f"{rate:,.0f} tokens/s",
    )


ROWS: dict[str, Callable[[Workbench], Iterator[Row]]] = {
    "ttft": ttft,
    "tpot": tpot,
    "convoy": convoy,
    "queue": queue,
    "burst": burst,
    "chunks": chunks,
    "decode": long_decode,
    "host": host,
    "prefill900k": prefill900k,
}
# Longer than all others together: measured when it is named.
NAMED = ("prefill900k",)


# --- table-----------------------------------------------------------------------------------------


def pool_tokens(given: int, device: ComputeDevice, shape: TinyModel) -> int:
    """Return the pool's tokens: what memory allows besides weights and scratch, up to the need."""
    most = 524_288 if device.at.type == "cuda" else 16_384
    if given or device.at.type != "cuda":
        return given or most
    free, _ = torch.cuda.mem_get_info(device.at)
    hidden, inner = shape.hidden, shape.heads * shape.head_dim + 2 * shape.kv_heads * shape.head_dim
    layer = hidden * (inner + shape.heads * shape.head_dim + 3 * shape.intermediate)
    weights = 2 * (shape.layers * layer + 2 * shape.vocab * hidden)
    token_bytes = 4 * shape.layers * shape.kv_heads * shape.head_dim
    return min(most, int((0.92 * free - weights - (6 << 30)) / token_bytes))


def main() -> int:
    given = arguments()
    try:
        device = device_of(given.device)
        profile = profile_of(given.profile, device)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    shape, name = SHAPES[given.shape], machine(device.at.type)
    console = Console(width=140)
    console.print(f"{given.shape} on {name}, profile {profile.name}", highlight=False)
    head = {
        "machine": name,
        "shape": given.shape,
        "profile": profile.name,
        "torch": str(torch.__version__),
    }
    sheet = Sheet(console, given.json, head)
    with tempfile.TemporaryDirectory() as folder:
        write_config(pathlib.Path(folder), shape)
        pool = pool_tokens(given.pool_tokens, device, shape)
        bench = Workbench(device, shape, pathlib.Path(folder), pool, profile, given.patience)
        for row in given.rows:
            if not sheet.section(row, functools.partial(ROWS[row], bench)):
                bench.clear()
    return sheet.close()


def profile_of(file: pathlib.Path | None, device: ComputeDevice) -> Profile:
    """Return the profile for the scheduler. Raises SpecError if the file holds none."""
    if file is None:
        return H200 if device.at.type == "cuda" else CPU_CORE
    try:
        return decode(file.read_bytes(), str(file))
    except OSError as error:
        raise SpecError(
            "--profile",
            str(file),
            f"must be readable ({error.strerror})",
            "name what `medha calibrate` wrote",
        ) from None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", nargs="+", choices=ROWS, default=[r for r in ROWS if r not in NAMED]
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--json", type=pathlib.Path, help="write the table there too")
    parser.add_argument("--profile", type=pathlib.Path, help="of `medha calibrate`; else shipped")
    parser.add_argument("--patience", type=float, default=450.0, help="seconds for one request")
    parser.add_argument("--pool-tokens", type=int, default=0, help="0: as many as fit")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
