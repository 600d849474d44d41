"""Promised work by tenant: what a replica reports to routers."""

from __future__ import annotations

import msgspec
import pytest

from medha.messages import Load
from medha.tenants import ACTIVE_S, LISTED, SHORT_HALF_LIFE_S, PromisedWork, TenantWork
from medha.testing import request, scheduler


def seconds(report: tuple[TenantWork, ...]) -> dict[str, float]:
    return {work.tenant: work.seconds for work in report}


def test_short_prompts_are_counted_apart_too() -> None:
    work = PromisedWork()
    for work_s in (0.5, 20.0, 0.25):
        work.charge("a", work_s, 0.0, short=work_s < 1.0)
    assert work.report(0.0) == (TenantWork("a", 20.75, 0.75),)
    assert work.report(SHORT_HALF_LIFE_S)[0].of(short=True) == 0.375
    assert work.report(SHORT_HALF_LIFE_S + 60.0)[0].of(short=False) < 10.375


def test_a_charge_is_half_forgotten_after_a_minute_and_left_out_after_five() -> None:
    work = PromisedWork()
    work.charge("a", 8.0, 0.0, short=False)
    assert seconds(work.report(60.0)) == pytest.approx({"a": 4.0})
    work.charge("a", 1.0, 60.0, short=False)
    assert seconds(work.report(60.0)) == pytest.approx({"a": 5.0})
    assert work.report(60.0 + ACTIVE_S) == ()


def test_a_report_lists_the_tenants_that_were_promised_something_last() -> None:
    work = PromisedWork()
    for index in range(200):
        work.charge(f"t{index}", 1.0, 0.001 * index, short=True)
    names = [entry.tenant for entry in work.report(1.0)]
    assert names == [f"t{index}" for index in range(199, 199 - LISTED, -1)]
    work.charge("t0", 1.0, 1.0, short=True)
    assert seconds(work.report(1.0))["t0"] == pytest.approx(2.0, rel=0.02)


def test_answers_that_run_count_for_the_next_seconds_if_that_is_more() -> None:
    work = PromisedWork()
    work.charge("a", 0.5, 0.0, short=True)
    work.replace_coming({"a": 2.0})
    work.add_coming("a", 1.0)
    assert work.report(0.0) == (TenantWork("a", 0.5, 3.0),)
    work.replace_coming({"a": 0.25})
    work.charge("a", 0.5, 0.0, short=True)
    assert work.report(0.0) == (TenantWork("a", 1.0, 1.0),)
    work.replace_coming({})
    assert work.report(SHORT_HALF_LIFE_S)[0].short_s == 0.5


def test_a_load_reports_promises_by_tenant_until_long_after_their_prompts() -> None:
    replica = scheduler()
    first = msgspec.structs.replace(request("a", 2000, promised=True), tenant="acme")
    late = msgspec.structs.replace(request("b", 2000, promised=False), tenant="late")
    assert replica.submit(first, 0.0).promised and not replica.submit(late, 0.0).promised
    assert seconds(replica.load(0.0).promised_work) == pytest.approx({"acme": 0.2})
    replica.abort("a", 0.1)
    load = replica.load(0.1)
    assert load.promised_work[0].seconds == pytest.approx(0.2, rel=0.01)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(load), type=Load) == load


def test_what_is_beyond_a_share_runs_after_all_that_is_promised_and_is_never_kept() -> None:
    """Short work without a promise is done out of order where promises leave time: not this."""
    for beyond in (False, True):
        replica = scheduler()
        hog = msgspec.structs.replace(
            request("hog", 100, within_s=9.0, promised=False), tenant="hog", beyond_share=beyond
        )
        number = replica.submit(hog, 0.0).seq
        assert replica.submit(request("other", 4000, within_s=8.0, promised=True), 0.0).promised
        batch = replica.next_batch(0.0, frozenset({0}))
        assert batch is not None
        assert (batch.chunks[0].seq == number) == (not beyond)


def test_a_batch_of_what_is_beyond_a_share_is_short() -> None:
    """A promised arrival waits for it."""
    seconds = {}
    for beyond in (False, True):
        replica = scheduler()
        hog = msgspec.structs.replace(
            request("hog", 100_000, within_s=1.0, promised=False), beyond_share=beyond
        )
        replica.submit(hog, 0.0)
        batch = replica.next_batch(0.0, frozenset({0}))
        assert batch is not None
        seconds[beyond] = sum(chunk.length for chunk in batch.chunks)
    assert seconds[True] <= 0.25 * seconds[False]
