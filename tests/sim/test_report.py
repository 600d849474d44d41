"""The report: refusals are misses, the unfinished are counted, percentiles are of what came."""

from __future__ import annotations

import pytest

from medha.sim.report import RequestRecord, spread, summarise, table


def record(id: str = "r", ttft: float | None = 0.1, **more: object) -> RequestRecord:
    first = None if ttft is None else 10.0 + ttft
    fields: dict[str, object] = {
        "id": id,
        "arrival_s": 10.0,
        "prompt_tokens": 100,
        "first_token_s": first,
        "finished_s": None if first is None else first + 0.2,
        "output_tokens": 11,
        "tpot_s": 0.03,
        **more,
    }
    return RequestRecord(**fields)  # type: ignore[arg-type]


def test_attainment_counts_refusals_and_late_ones_as_misses() -> None:
    report = summarise(
        [record("a"), record("b", 0.7), record("c", None, refused="overloaded"), record("d", None)],
        100.0,
    )
    assert report.total.attainment == 0.25
    assert (report.total.in_time, report.total.refused, report.total.censored) == (1, 1, 0)


def test_one_that_was_still_in_time_at_the_end_is_censored_not_missed() -> None:
    waiting = record("w", None, ttft_deadline_s=1000.0, promised=True)
    report = summarise([record("a", promised=True), waiting], 100.0)
    assert report.total.censored == 1
    assert report.total.attainment == 1.0 and report.total.kept == 1.0


def test_a_broken_promise_is_seen() -> None:
    report = summarise(
        [record("a", promised=True), record("b", 2.0, promised=True), record("c", 2.0)], 100.0
    )
    assert report.total.promised == 2 and report.total.promises_broken == 1
    assert report.total.kept == 0.5


def test_goodput_needs_the_pace_too() -> None:
    slow = record("slow", finished_s=15.0)
    report = summarise([record("ok"), slow, record("late", 0.6)], 10.0)
    assert report.total.in_time == 2
    assert report.total.good == 1 and report.total.goodput_per_s == 0.1
    assert slow.mean_tpot_s == pytest.approx(0.49)


def test_lengths_and_classes_are_told_apart() -> None:
    records = [
        record("a"),
        record("b", prompt_tokens=8192),
        record("c", prompt_tokens=200_000),
        record("d", slo_class="gold"),
    ]
    report = summarise(records, 10.0)
    assert [(part.name, part.requests) for part in report.by_length] == [
        ("0 – 1K", 2),
        ("1K – 8K", 1),
        ("128K – 384K", 1),
    ]
    assert [(part.name, part.requests) for part in report.by_class] == [("default", 3), ("gold", 1)]


def test_percentiles_are_those_of_a_hundred_values() -> None:
    of = spread(float(value) for value in range(1, 102))
    assert (of.count, of.p50, of.p90, of.p99, of.most) == (101, 51.0, 91.0, 100.0, 101.0)
    assert spread([]).count == 0


def test_the_table_has_a_line_per_part_and_tells_the_load() -> None:
    text = table(summarise([record("a"), record("b", prompt_tokens=9000)], 10.0, offered=0.8))
    lines = text.splitlines()
    assert len(lines) == 6
    assert lines[2].startswith("        0 – 1K        1    1.000")
    assert lines[-1] == "10.0 s, offered load 0.80"
