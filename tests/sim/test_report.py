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


def test_lengths_are_those_beyond_the_prefix_hit() -> None:
    report = summarise(
        [record("a", prompt_tokens=200_000, cached_tokens=199_500), record("b")], 10.0
    )
    assert [(part.name, part.requests) for part in report.by_length] == [("0 – 1K", 2)]
    assert (report.short.requests, report.long.requests) == (2, 0)


def test_work_in_time_weighs_requests_by_the_seconds_that_they_take() -> None:
    report = summarise(
        [
            record("short", offered_s=1.0),
            record("long and late", 2.0, offered_s=6.0, prompt_tokens=10_000),
            record("refused", None, refused="overloaded", offered_s=1.0),
            record("undecided", None, ttft_deadline_s=1000.0, offered_s=50.0),
        ],
        100.0,
    )
    assert report.total.work_in_time == pytest.approx(1 / 8)
    assert (report.short.work_in_time, report.long.work_in_time) == (0.5, 0.0)


def test_refusals_are_counted_by_code() -> None:
    refused = [record(f"r{n}", None, refused=code) for n, code in enumerate("bab")]
    assert summarise([*refused, record("a")], 10.0).refusals == {"a": 1, "b": 2}


def test_a_slow_answer_misses_its_tpot_and_keeps_its_promise() -> None:
    report = summarise([record("slow", finished_s=15.0, promised=True), record("ok")], 100.0)
    assert report.total.tpot_missed == 1
    assert report.total.promises_broken == 0 and report.total.in_time == 2


def test_the_longest_wait_counts_from_arrival_to_the_token_or_to_the_end() -> None:
    late, never = record("late", 2.0), record("never", None, ttft_deadline_s=10.0)
    refused = record("refused", None, refused="overloaded")
    report = summarise([record("ok"), late, refused], 100.0)
    assert report.total.longest_wait == pytest.approx(4.0)
    assert report.total.most_overdue_s == pytest.approx(1.5)
    report = summarise([record("ok"), never], 100.0)
    assert report.total.longest_wait == pytest.approx(9.0)
    assert report.total.most_overdue_s == pytest.approx(80.0)
    assert summarise([record("ok")], 100.0).total.most_overdue_s == 0.0


def test_a_departure_before_the_deadline_is_neither_a_miss_nor_a_broken_promise() -> None:
    gone = record("gone", None, ttft_deadline_s=5.0, left_s=14.9, promised=True, offered_s=1.0)
    report = summarise([record("ok", promised=True, offered_s=1.0), gone], 100.0)
    total = report.total
    assert (total.departed, total.censored, total.promises_broken) == (1, 0, 0)
    assert (total.requests, total.promised) == (2, 2)
    assert total.attainment == total.kept == total.work_in_time == 1.0
    assert total.longest_wait == pytest.approx(0.2) and total.most_overdue_s == 0.0
    assert "left before a token was due: 1" in table(report)


def test_one_that_waited_beyond_its_deadline_is_late_though_its_client_left() -> None:
    gave_up = record("gave up", None, ttft_deadline_s=5.0, left_s=20.0, promised=True)
    total = summarise([record("ok", promised=True), gave_up], 100.0).total
    assert (total.departed, total.censored, total.promises_broken) == (0, 0, 1)
    assert total.kept == total.attainment == 0.5
    assert total.longest_wait == pytest.approx(2.0)  # to when it left, not to the end
    assert total.most_overdue_s == pytest.approx(5.0)


def test_a_departure_after_the_first_token_changes_nothing() -> None:
    left = record("left", 0.1, left_s=10.15, finished_s=None, promised=True)
    total = summarise([left], 100.0).total
    assert (total.in_time, total.departed, total.promises_broken) == (1, 0, 0)


def test_tenants_are_told_apart() -> None:
    report = summarise([record("a", tenant="x"), record("b", 3.0, tenant="y")], 10.0)
    assert [(part.name, part.attainment) for part in report.by_tenant] == [("x", 1.0), ("y", 0.0)]


def test_the_table_has_a_line_per_part_and_tells_the_load() -> None:
    records = [
        record("a", tenant="x"),
        record("b", prompt_tokens=9000, tenant="y"),
        record("c", None, refused="overloaded", tenant="y"),
    ]
    lines = table(summarise(records, 10.0, offered=0.79, stated=0.8)).splitlines()
    assert len(lines) == 2 + 2 + 2 + 1 + 1
    assert lines[2].startswith("          0 – 1K        2   0.500")
    assert [line.split()[0] for line in lines[4:7]] == ["x", "y", "all"]
    assert lines[-1] == (
        "10.0 s; offered load 0.79 (0.80 stated); refused: 1 overloaded; "
        "longest wait of a request of at most 8K: 0.20 of its deadline"
    )
    assert len({len(line) for line in lines[:-1]}) == 1  # columns stand below their heads
