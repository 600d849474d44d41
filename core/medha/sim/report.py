"""Report of latencies, attainment and goodput from records of requests.

The simulator makes the records; `medha replay` makes them from the responses of a live fleet.
Latency counts from arrival. A refused request is a miss, and so is one whose deadline passed
without a token. A request without a token before its deadline at the end of the run is censored.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from medha.metrics import LENGTH_EDGES

BUCKETS = LENGTH_EDGES  # upper bounds in prompt tokens, then the rest


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcome of one request; times are seconds on the clock of the run.

    `refused`: code of the Refusal. `worst_gap_s`: the longest time between two tokens.
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
        """True if the first token arrived within the deadline."""
        return self.ttft_s is not None and self.ttft_s <= self.ttft_deadline_s

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean time per output token after the first; None before the request has finished."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def good(self) -> bool:
        """True if the request finished and met its TTFT and TPOT targets."""
        pace = self.mean_tpot_s
        return (
            self.in_time and self.finished_s is not None and (pace is None or pace <= self.tpot_s)
        )


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percentiles and mean of `count` values in seconds; all zero without values."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class ReportSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of a length bucket, a class, or all requests.

    `attainment`: share of requests in time, without censored ones. `kept`: share of promises kept.
    `goodput_per_s`: requests per second that met TTFT and TPOT.
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
    """Statistics of a run. `offered`: work of all arrivals over capacity (ρ); None if unknown."""

    seconds: float
    offered: float | None
    total: ReportSection
    by_length: tuple[ReportSection, ...]
    by_class: tuple[ReportSection, ...]


def summarise(
    records: Sequence[RequestRecord],
    seconds: float,
    offered: float | None = None,
    buckets: Sequence[int] = BUCKETS,
) -> Report:
    """Make the report of a run that ended at `seconds`."""
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
    """Format the report as text, one line per section."""
    head = (
        f"{'prompt tokens':>14} {'requests':>8} {'in time':>8} {'kept':>6} {'refused':>8} "
        f"{'censored':>8} {'good/s':>7} | {'TTFT p50':>9} {'p90':>8} {'p99':>8} | "
        f"{'TPOT p50':>9} {'p99':>7}"
    )
    lines = [head, "-" * len(head)]
    parts: list[ReportSection] = [*report.by_length]
    if len(report.by_class) > 1:
        parts += report.by_class
    lines += [_line(part) for part in [*parts, report.total]]
    load = "" if report.offered is None else f", offered load {report.offered:.2f}"
    return "\n".join([*lines, f"{report.seconds:.1f} s{load}"])


def spread(values: Iterable[float]) -> Spread:
    """Compute percentiles of values in seconds."""
    array = np.sort(np.fromiter(values, dtype=np.float64))
    if not len(array):
        return Spread()
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return Spread(len(array), float(array.mean()), p50, p90, p99, float(array[-1]))


def _part(name: str, records: Sequence[RequestRecord], end_s: float) -> ReportSection:
    censored = [
        record
        for record in records
        if record.first_token_s is None
        and not record.refused
        and record.arrival_s + record.ttft_deadline_s >= end_s
    ]
    promised = [record for record in records if record.promised]
    out = {record.id for record in censored}
    broken = sum(not record.in_time for record in promised if record.id not in out)
    judged = sum(record.id not in out for record in promised)
    in_time = sum(record.in_time for record in records)
    good = sum(record.good for record in records)
    decided = len(records) - len(censored)
    return ReportSection(
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


def _line(part: ReportSection) -> str:
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
