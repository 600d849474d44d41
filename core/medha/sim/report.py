"""Whether we kept our word: latencies, attainment and goodput from records of requests.

Pure: records in, a struct and a table of text out; the simulator makes the records, and so does
`medha replay` from what a live fleet answered. Latency counts from arrival; refused and unfinished
requests stay in the statistics: a refusal is a miss, and so is a request whose deadline passed
before the end; one that was still in time when the run ended is counted as censored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from medha.metrics import LENGTH_EDGES

BUCKETS = LENGTH_EDGES  # upper bounds in prompt tokens, then the rest


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What became of one request; times are seconds, absolute on the run's clock.

    `refused` is a Refusal's code; `worst_gap_s` the longest time between two of its tokens.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_deadline_s: float = 0.5
    tpot_s: float = 0.03
    work_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    worst_gap_s: float = 0.0
    promised: bool = False
    refused: str = ""
    slo_class: str = "default"
    tenant: str = ""
    replica: str = ""

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def in_time(self) -> bool:
        """Its first token came within the deadline."""
        return self.ttft_s is not None and self.ttft_s <= self.ttft_deadline_s

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean time per output token after the first; None before it is known."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def good(self) -> bool:
        """In time, finished, and its tokens came at the promised pace."""
        pace = self.mean_tpot_s
        return self.in_time and self.finished_s is not None and (
            pace is None or pace <= self.tpot_s
        )  # fmt: skip


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percentiles and mean of `count` values, in seconds; all zero when there are none."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcome of a part of the requests (a length bucket, a class, or all).

    `attainment`: share in time, of all that are decided (not censored); `kept`: share of promises
    kept; `goodput_per_s`: requests per second that met TTFT and TPOT.
    """

    name: str
    requests: int
    in_time: int
    good: int
    refused: int
    promised: int
    promises_broken: int
    censored: int
    attainment: float
    kept: float
    goodput_per_s: float
    ttft: Spread
    tpot: Spread
    e2e: Spread
    worst_gap: Spread


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`offered`: work of all arrivals over the capacity of the run (ρ), None when unknown."""

    seconds: float
    offered: float | None
    total: Part
    by_length: tuple[Part, ...]
    by_class: tuple[Part, ...]


def summarise(
    records: Sequence[Record], seconds: float, offered: float | None = None,
    buckets: Sequence[int] = BUCKETS,
) -> Report:  # fmt: skip
    """Report of a run that lasted `seconds` (the clock when it ended)."""
    bounds = [0, *buckets, 1 << 62]
    by_length = [
        _part(
            _bucket_name(low, high),
            [record for record in records if low < record.prompt_tokens <= high],
            seconds,
        )
        for low, high in itertools.pairwise(bounds)
    ]
    classes = sorted({record.slo_class for record in records})
    return Report(
        seconds=seconds,
        offered=offered,
        total=_part("all", records, seconds),
        by_length=tuple(part for part in by_length if part.requests),
        by_class=tuple(
            _part(name, [record for record in records if record.slo_class == name], seconds)
            for name in classes
        ),
    )


def table(report: Report) -> str:
    """The report as text: one line per part."""
    head = (
        f"{'prompt tokens':>14} {'requests':>8} {'in time':>8} {'kept':>6} {'refused':>8} "
        f"{'censored':>8} {'good/s':>7} | {'TTFT p50':>9} {'p90':>8} {'p99':>8} | "
        f"{'TPOT p50':>9} {'p99':>7}"
    )
    lines = [head, "-" * len(head)]
    parts: list[Part] = [*report.by_length]
    if len(report.by_class) > 1:
        parts += report.by_class
    lines += [_line(part) for part in [*parts, report.total]]
    load = "" if report.offered is None else f", offered load {report.offered:.2f}"
    return "\n".join([*lines, f"{report.seconds:.1f} s{load}"])


def spread(values: Iterable[float]) -> Spread:
    """Percentiles of values in seconds."""
    array = np.sort(np.fromiter(values, dtype=np.float64))
    if not len(array):
        return Spread()
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return Spread(len(array), float(array.mean()), p50, p90, p99, float(array[-1]))


def _part(name: str, records: Sequence[Record], end_s: float) -> Part:
    censored = [
        record for record in records
        if record.first_token_s is None and not record.refused
        and record.arrival_s + record.ttft_deadline_s >= end_s
    ]  # fmt: skip
    promised = [record for record in records if record.promised]
    out = {record.id for record in censored}
    broken = sum(not record.in_time for record in promised if record.id not in out)
    judged = sum(record.id not in out for record in promised)
    in_time = sum(record.in_time for record in records)
    good = sum(record.good for record in records)
    decided = len(records) - len(censored)
    return Part(
        name=name,
        requests=len(records),
        in_time=in_time,
        good=good,
        refused=sum(bool(record.refused) for record in records),
        promised=len(promised),
        promises_broken=broken,
        censored=len(censored),
        attainment=in_time / decided if decided else 1.0,
        kept=1.0 - broken / judged if judged else 1.0,
        goodput_per_s=good / end_s if end_s > 0 else 0.0,
        ttft=spread(record.ttft_s for record in records if record.ttft_s is not None),
        tpot=spread(r for record in records if (r := record.mean_tpot_s) is not None),
        e2e=spread(
            record.finished_s - record.arrival_s
            for record in records
            if record.finished_s is not None
        ),
        worst_gap=spread(record.worst_gap_s for record in records if record.output_tokens > 1),
    )


def _line(part: Part) -> str:
    return (
        f"{part.name:>14} {part.requests:>8} {part.attainment:>8.3f} {part.kept:>6.3f} "
        f"{part.refused:>8} {part.censored:>8} {part.goodput_per_s:>7.2f} | "
        f"{part.ttft.p50:>8.3f}s {part.ttft.p90:>7.2f}s {part.ttft.p99:>7.2f}s | "
        f"{1e3 * part.tpot.p50:>7.1f}ms {1e3 * part.tpot.p99:>5.0f}ms"
    )


def _bucket_name(low: int, high: int) -> str:
    def short(tokens: int) -> str:
        return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)

    return f"> {short(low)}" if high == 1 << 62 else f"{short(low)} – {short(high)}"
