"""A picture in text of a policy's run: who waited, and what was computed meanwhile.

    edf        tight ━━━━━━━━━━━━▓▓▓▓▓▓▓▓▓▓▓                  late: 4.1, due 1.5
               loose   ────────────────────░░░━━━━            late: 5.2, due 2.8
               short ▁▂▁▁▁▁▁▃▅▆▇████████████▅▁ ▁ ▁            7 of 36 in time

A long prompt has a line from its arrival to its first token. A bar is the number of short prompts
that wait for their first token. Times are multiples of `alone_s`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from demos.comparison import LONGS, Outcome, Span

from medha.sim.report import RequestRecord

WIDTH = 48
BARS = " ▁▂▃▄▅▆▇█"
LEGEND = "─ waits, ━ computed, ░ ▓ the same when late; ▁ to █: short prompts that wait"


def picture(name: str, outcome: Outcome, end: float) -> Iterator[str]:
    """Lines of a run until `end`, in multiples of `alone_s`."""
    end_s = end * outcome.alone_s
    for label in LONGS:
        record = outcome.record(label)
        bars = _long(record, outcome.computed.get(label, ()), end_s)
        due = record.ttft_deadline_s / outcome.alone_s
        verdict = "in time" if record.in_time else "late"
        yield f"{name:<10} {label} {bars} {verdict}: {outcome.ttft(label):.1f}, due {due:.1f}"
        name = ""
    shorts = outcome.shorts
    figure = f"{len(shorts) - outcome.late} of {len(shorts)} in time"
    yield f"{name:<10} short {_waiting(shorts, end_s)} {figure}"


def axis(end: float) -> str:
    """The line below the pictures."""
    return f"{'':<17}0{f'{end:.1f} × the loose prompt alone':>{WIDTH - 1}}"


def _cells(end_s: float) -> list[Span]:
    step_s = end_s / WIDTH
    return [(index * step_s, (index + 1) * step_s) for index in range(WIDTH)]


def _long(record: RequestRecord, computed: Sequence[Span], end_s: float) -> str:
    line = ""
    first_s = end_s if record.first_token_s is None else record.first_token_s
    for low_s, high_s in _cells(end_s):
        middle_s = 0.5 * (low_s + high_s)
        if not record.arrival_s <= middle_s <= first_s:
            line += " "
            continue
        runs = _covered_s(computed, low_s, high_s) >= 0.5 * (high_s - low_s)
        late = middle_s > record.arrival_s + record.ttft_deadline_s
        line += ("░▓" if late else "─━")[runs]
    return line


def _covered_s(spans: Sequence[Span], low_s: float, high_s: float) -> float:
    """Seconds between `low_s` and `high_s` that spans cover; spans may overlap."""
    covered_s = 0.0
    for start_s, end_s in sorted(spans):
        start_s, end_s = max(start_s, low_s), min(end_s, high_s)
        if end_s > start_s:
            covered_s, low_s = covered_s + end_s - start_s, end_s
    return covered_s


def _waiting(shorts: Sequence[RequestRecord], end_s: float) -> str:
    line = ""
    for low_s, high_s in _cells(end_s):
        count = sum(
            short.arrival_s < high_s
            and (short.first_token_s is None or short.first_token_s > low_s)
            for short in shorts
        )
        line += BARS[min(count, len(BARS) - 1)]
    return line
