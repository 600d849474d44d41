"""Report of latencies, attainment and goodput from records of requests.

The simulator makes the records; `medha replay` makes them from the responses of a live fleet.
Latency counts from arrival. A refused request is a miss, and so is one whose deadline passed
without a token. A request without a token before its deadline at the end of the run is censored.
One whose client left before that is departed: what it would have got is not known.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from medha.metrics import LENGTH_EDGES

SHORT_TOKENS = LENGTH_EDGES[1]
MOST_TOKENS = 1 << 62
LEAST_S = 1e-9


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Outcome of one request; times are seconds on the clock of the run.

    `refused`: code of the Refusal. `worst_gap_s`: the longest time between two tokens. `offered_s`:
    seconds of a replica that the request takes, 0 if unknown. `left_s`: when its client left.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    ttft_deadline_s: float = 0.5
    tpot_s: float = 0.03
    work_s: float = 0.0
    offered_s: float = 0.0
    first_token_s: float | None = None
    finished_s: float | None = None
    left_s: float | None = None
    worst_gap_s: float = 0.0
    promised: bool = False
    refused: str = ""
    slo_class: str = "default"
    tenant: str = ""
    replica: str = ""

    @property
    def uncached_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def in_time(self) -> bool:
        """True if the first token arrived within the deadline."""
        return self.ttft_s is not None and self.ttft_s <= self.ttft_deadline_s

    @property
    def departed(self) -> bool:
        """True if the client left without a token while the request could still be in time."""
        return (
            self.left_s is not None
            and self.first_token_s is None
            and self.left_s <= self.arrival_s + self.ttft_deadline_s
        )

    @property
    def mean_tpot_s(self) -> float | None:
        """Mean time per output token after the first; None before the request has finished."""
        if self.finished_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def tpot_missed(self) -> bool:
        """True if the request finished and its tokens came more slowly than its TPOT target."""
        pace_s = self.mean_tpot_s
        return pace_s is not None and pace_s > self.tpot_s

    @property
    def good(self) -> bool:
        """True if the request finished and met its TTFT and TPOT targets."""
        return self.in_time and self.finished_s is not None and not self.tpot_missed

    def waited_s(self, end_s: float) -> float:
        """Seconds until the first token, else until the client left or the end of the run.

        0 after a refusal, and of a departed request.
        """
        if self.refused or self.departed:
            return 0.0
        if self.ttft_s is not None:
            return self.ttft_s
        until_s = end_s if self.left_s is None else self.left_s
        return max(0.0, until_s - self.arrival_s)


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percentiles and mean of `count` values in seconds; all zero without values."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class ReportSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of a length bucket, a class, a tenant, or all requests.

    `attainment`: share of requests in time, without censored and departed ones; `work_in_time`: the
    same share of their offered seconds. `kept`: share of promises kept. `tpot_missed`: requests
    whose tokens came more slowly than their TPOT target. `goodput_per_s`: requests per second that
    met TTFT and TPOT. `longest_wait`: the longest wait for a first token, in multiples of the
    deadline; `most_overdue_s`: the longest wait beyond the deadline. Neither counts refusals or
    departures.
    """

    name: str
    requests: int
    in_time: int
    good: int
    refused: int
    promised: int
    promises_broken: int
    tpot_missed: int
    censored: int
    departed: int = 0
    attainment: float
    work_in_time: float
    kept: float
    goodput_per_s: float
    longest_wait: float
    most_overdue_s: float
    ttft: Spread
    tpot: Spread
    e2e: Spread
    worst_gap: Spread


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Statistics of a run.

    `offered`: load that arrived, over capacity (ρ), and `stated`: that of the scenario; None if
    unknown. Lengths are uncached prompt tokens: `short` has at most SHORT_TOKENS, `long` more.
    `refusals`: number by code.
    """

    seconds: float
    offered: float | None
    stated: float | None = None
    total: ReportSection
    short: ReportSection
    long: ReportSection
    by_length: tuple[ReportSection, ...]
    by_class: tuple[ReportSection, ...]
    by_tenant: tuple[ReportSection, ...] = ()
    refusals: dict[str, int] = {}


def summarise(
    records: Sequence[RequestRecord],
    seconds: float,
    offered: float | None = None,
    stated: float | None = None,
) -> Report:
    """Make the report of a run that ended at `seconds`."""

    def section(name: str, keep: Callable[[RequestRecord], bool]) -> ReportSection:
        return _section(name, [record for record in records if keep(record)], seconds)

    def within(low: int, high: int) -> ReportSection:
        return section(_bucket_name(low, high), lambda record: low < record.uncached_tokens <= high)

    def named(name: str, name_of: Callable[[RequestRecord], str]) -> ReportSection:
        return section(name, lambda record: name_of(record) == name)

    def each(name_of: Callable[[RequestRecord], str]) -> tuple[ReportSection, ...]:
        return tuple(named(name, name_of) for name in sorted(set(map(name_of, records))))

    by_length = [within(*bounds) for bounds in itertools.pairwise((0, *LENGTH_EDGES, MOST_TOKENS))]
    refusals = collections.Counter(record.refused for record in records if record.refused)
    return Report(
        seconds=seconds,
        offered=offered,
        stated=stated,
        total=_section("all", records, seconds),
        short=section("short", lambda record: record.uncached_tokens <= SHORT_TOKENS),
        long=section("long", lambda record: record.uncached_tokens > SHORT_TOKENS),
        by_length=tuple(bucket for bucket in by_length if bucket.requests),
        by_class=each(lambda record: record.slo_class),
        by_tenant=each(lambda record: record.tenant),
        refusals=dict(sorted(refusals.items())),
    )


def table(report: Report) -> str:
    """Format the report as text, one line per section."""
    head = (
        f"{'uncached tokens':>16} {'requests':>8} {'in time':>7} {'work':>6} {'promised':>8} "
        f"{'broken':>6} {'refused':>7} {'slow':>5} {'censored':>8} {'good/s':>7} | "
        f"{'TTFT p50':>9} {'p90':>8} {'p99':>8} | {'TPOT p50':>9} {'p99':>7}"
    )
    sections = [*report.by_length]
    for sorts in (report.by_class, report.by_tenant):
        if len(sorts) > 1:
            sections += sorts
    lines = [head, "-" * len(head), *map(_line, [*sections, report.total])]
    facts = [f"{report.seconds:.1f} s"]
    if report.offered is not None:
        stated = "" if report.stated is None else f" ({report.stated:.2f} stated)"
        facts.append(f"offered load {report.offered:.2f}{stated}")
    if report.total.departed:
        facts.append(f"left before a token was due: {report.total.departed}")
    if report.refusals:
        counts = ", ".join(f"{count} {code}" for code, count in report.refusals.items())
        facts.append(f"refused: {counts}")
    if report.short.requests:
        facts.append(
            f"longest wait of a request of at most {SHORT_TOKENS // 1024}K: "
            f"{report.short.longest_wait:.2f} of its deadline"
        )
    return "\n".join([*lines, "; ".join(facts)])


def spread(values: Iterable[float]) -> Spread:
    """Compute percentiles of values in seconds."""
    array = np.sort(np.fromiter(values, dtype=np.float64))
    if not len(array):
        return Spread()
    p50, p90, p99 = np.percentile(array, (50, 90, 99)).tolist()
    return Spread(len(array), float(array.mean()), p50, p90, p99, float(array[-1]))


def _section(name: str, records: Sequence[RequestRecord], end_s: float) -> ReportSection:
    censored = [
        record
        for record in records
        if record.first_token_s is None
        and record.left_s is None
        and not record.refused
        and record.arrival_s + record.ttft_deadline_s >= end_s
    ]
    promised = [record for record in records if record.promised]
    departed = [record for record in records if record.departed]
    out = {record.id for record in (*censored, *departed)}
    overdue_s = [record.waited_s(end_s) - record.ttft_deadline_s for record in records]
    broken = sum(not record.in_time for record in promised if record.id not in out)
    judged = sum(record.id not in out for record in promised)
    in_time = sum(record.in_time for record in records)
    good = sum(record.good for record in records)
    decided = len(records) - len(out)
    in_time_s = sum(record.offered_s for record in records if record.in_time)
    decided_s = sum(record.offered_s for record in records if record.id not in out)
    return ReportSection(
        name=name,
        requests=len(records),
        in_time=in_time,
        good=good,
        refused=sum(bool(record.refused) for record in records),
        promised=len(promised),
        promises_broken=broken,
        tpot_missed=sum(record.tpot_missed for record in records),
        censored=len(censored),
        departed=len(departed),
        attainment=in_time / decided if decided else 1.0,
        work_in_time=in_time_s / decided_s if decided_s else 1.0,
        kept=1.0 - broken / judged if judged else 1.0,
        goodput_per_s=good / end_s if end_s > 0 else 0.0,
        longest_wait=max(
            (r.waited_s(end_s) / max(r.ttft_deadline_s, LEAST_S) for r in records), default=0.0
        ),
        most_overdue_s=max(0.0, *overdue_s) if overdue_s else 0.0,
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
        f"{part.name:>16} {part.requests:>8} {part.attainment:>7.3f} {part.work_in_time:>6.3f} "
        f"{part.promised:>8} {part.promises_broken:>6} {part.refused:>7} {part.tpot_missed:>5} "
        f"{part.censored:>8} {part.goodput_per_s:>7.2f} | "
        f"{part.ttft.p50:>8.3f}s {part.ttft.p90:>7.2f}s {part.ttft.p99:>7.2f}s | "
        f"{1e3 * part.tpot.p50:>7.1f}ms {1e3 * part.tpot.p99:>5.0f}ms"
    )


def _bucket_name(low: int, high: int) -> str:
    def short(tokens: int) -> str:
        return f"{tokens // 1024}K" if tokens >= 1024 else str(tokens)

    return f"> {short(low)}" if high == MOST_TOKENS else f"{short(low)} – {short(high)}"
