"""The account of decodes: what promises count on, and which prompts may start."""

from __future__ import annotations

import functools
import math
import random

import msgspec
import pytest

from medha.config import Scheduling
from medha.request import Request, Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.testing import Driven, SingleReplicaRouter, leftovers, request, scheduler, topology

# A batch costs 3 ms, a prompt token 0.1 ms, and so does a decode.
SETTINGS = Scheduling(max_batch_s=0.05)


def crowd(count: int, output_tokens: int, within_s: float) -> list[Request]:
    """Prompts of 50 ms each, all at once."""
    return [
        request(f"r{n}", 500, within_s=within_s, output_tokens=output_tokens, tpot_s=0.05)
        for n in range(count)
    ]


@pytest.mark.parametrize("output_tokens, least, most", [(1, 60, 64), (200, 45, 62)])
def test_a_promise_counts_the_decodes_that_it_brings(
    output_tokens: int, least: int, most: int
) -> None:
    plan = scheduler(settings=SETTINGS, batch_s=0.003)
    driven = Driven(plan)
    driven.submit(crowd(90, output_tokens, within_s=4.0))
    driven.run()
    given = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert least <= len(given) <= most
    assert [name for name in given if not driven.in_time(name)] == []
    assert leftovers(plan) == {}


@pytest.mark.parametrize("when_infeasible", ["refuse", "relegate"])
def test_reported_margins_leave_time_for_answers_to_come_only_to_the_relegated(
    when_infeasible: str,
) -> None:
    """A short prompt may use that time where nothing is relegated."""
    classes = (SloClass(when_infeasible=when_infeasible),)
    plan = scheduler(settings=SETTINGS, batch_s=0.003, classes=classes)
    driven = Driven(plan)
    names = [f"a{number}" for number in range(9)]
    driven.submit(
        [request(name, 10, output_tokens=200, tpot_s=0.05, promised=True) for name in names]
    )
    driven.run(0.1)
    driven.submit([request("long", 60_000, 0.1, within_s=12.0, output_tokens=1, promised=True)])
    driven.run(0.15)
    (reported,) = plan.load(driven.now).margins
    assert len(plan._running.running) == len(names)
    lead_s = plan._in_flight.lead_s(0, driven.now, plan._account.budget_s)
    exact_s = plan._promises.least_margin_s(0, driven.now + lead_s)
    least_s = min(margin_s for _, margin_s in reported)
    if when_infeasible == "refuse":
        assert least_s == pytest.approx(exact_s)
    else:
        assert least_s < exact_s - 0.05


def test_without_decodes_nothing_runs_beside_a_prompt() -> None:
    plan = scheduler(settings=SETTINGS, batch_s=0.003)
    plan.submit(request("one", 500, within_s=4.0, output_tokens=1), 0.0)
    assert plan._waiting[0].alongside.tolist() == [0.0]
    assert plan._account.budget_s == SETTINGS.max_batch_s


def test_a_prompts_own_answer_never_counts_against_its_prefill() -> None:
    work_s = {}
    for output_tokens in (2, 2000):
        plan = scheduler(settings=SETTINGS, batch_s=0.003, key_s=1e-8)
        answer = request(
            "one", 40_000, within_s=9.0, output_tokens=output_tokens, tpot_s=0.05, promised=True
        )
        plan.submit(answer, 0.0)
        plan._account.refresh(0.0)
        work_s[output_tokens] = plan._waiting[0].work_s.tolist()
    assert work_s[2] == work_s[2000]


def test_a_prompt_without_a_promise_starts_once_its_decodes_can_be_borne() -> None:
    # Promises fill all the time, without any decode; the late prompt's decodes make
    # every batch short. It starts when they are done, and no promise is late.
    plan = scheduler(settings=SETTINGS, batch_s=0.005)
    driven = Driven(plan)
    driven.submit(crowd(68, 1, within_s=4.0))
    late = request("late", 500, 0.1, within_s=0.1, output_tokens=200, tpot_s=0.02)
    driven.submit([late])
    driven.run(until_s=1.0)
    assert not plan._state.by_id["late"].started
    driven.run()
    given = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert len(given) > 50
    assert [name for name in given if not driven.in_time(name)] == []
    assert driven.first_s["late"] < 4.5
    assert leftovers(plan) == {}


@pytest.mark.parametrize("leave", [True, False])
def test_a_prompt_waits_for_no_promise_that_is_gone(leave: bool) -> None:
    # Alongside the promise a crowd begins one after the other.
    plan = scheduler(settings=SETTINGS, batch_s=0.003)
    driven = Driven(plan)
    kept = request("kept", 30_000, within_s=3.7, promised=True)
    driven.submit([kept])
    driven.submit(
        request(f"late{n}", 30, 0.2, within_s=0.01, output_tokens=900, tpot_s=0.05, promised=False)
        for n in range(200)
    )
    driven.run(until_s=2.0)
    assert not plan._state.by_id["late199"].started
    if leave:
        plan.abort("kept", driven.now)
    else:
        plan._state.promises.set_rank(plan._state.by_id["kept"], kept=False, promised=False)
    driven.run(until_s=8.0)
    assert [n for n in range(200) if f"late{n}" not in driven.first_s] == []
    driven.run()
    assert leftovers(plan) == {}


@pytest.mark.parametrize("spans", [False, True])
def test_a_decode_costs_a_promise_in_another_group_what_was_tried(spans: bool) -> None:
    # While a decode spans both groups, all batches wait for the slower one.
    plan = scheduler(topology(kvp=2, tokens_per_group=20_000), SETTINGS, batch_s=0.003, key_s=5e-8)
    account, promises = plan._account, plan._promises
    plan.submit(
        request("both", 30_000, within_s=90.0, output_tokens=900, tpot_s=0.05, promised=False), 0.0
    )
    plan.submit(request("kept", 2_000, within_s=9.0, promised=True), 0.0)
    answer = request("long", 15_000, within_s=9.0, output_tokens=2000, tpot_s=0.05, promised=True)
    plan.submit(answer, 0.0)
    kept, long = plan._state.by_id["kept"], plan._state.by_id["long"]
    (group,), (other,) = kept.assigned_groups, long.assigned_groups
    assert group != other
    account.remove(long)
    if spans:
        account.begin(plan._state.by_id["both"], 0.0)
    account.refresh(0.0)
    rows = promises.waiting[group].rows

    def work_s() -> float:
        return float(promises.waiting[group].work_s[promises.waiting[group].row_of(kept)])

    before_s = work_s()
    account._try(long, account.cost_s(long), group, 0.0)
    ((due_s, margin_s),) = rows.promise_margins(9, 0.0, 0.0, 1.0)
    tried_s = due_s - margin_s
    assert tried_s > before_s
    account.count(long, 0.0)
    account.refresh(0.0)
    counts_s = tried_s if spans else before_s
    assert work_s() == pytest.approx(counts_s)


def test_what_is_promised_later_reckons_with_the_answer_of_a_promised_prompt() -> None:
    # The prompt takes some 11 s, and its answer 45 s. Routers count it before it has begun.
    plan = scheduler(
        topology(kvp=2, tokens_per_group=200_000),
        Scheduling(max_batch_s=0.05, decode_room=0.0),
        batch_s=0.003,
        key_s=1e-9,
    )
    first = request("first", 100_000, within_s=25.0, output_tokens=900, tpot_s=0.05, promised=True)
    plan.submit(first, 0.0)
    plan._account.refresh(0.0)
    (group,) = plan._state.by_id["first"].assigned_groups
    part = {due_s: plan._account.part_until(group, due_s, 0.0) for due_s in (9.0, 30.0, 900.0)}
    assert part[9.0] == 0.0 < part[900.0] < part[30.0]
    parts = plan.load(0.0).decode_parts
    for due_s, least in part.items():
        assert next(reported for upto_s, reported in parts if due_s <= upto_s) >= least


@pytest.mark.parametrize("spans", [False, True])
def test_an_answer_waits_for_a_promise_of_another_group_while_batches_span(spans: bool) -> None:
    # The promise has less time left than the decode costs it. The prompt is held at its end.
    plan = scheduler(
        topology(kvp=2, tokens_per_group=20_000),
        Scheduling(max_batch_s=0.05, decode_room=0.0),
        batch_s=0.003,
        key_s=1e-7,
    )
    if spans:
        plan.submit(request("spans", 30_000, within_s=90.0, promised=False), 0.0)
    kept = request("kept", 9_000, within_s=5.985, output_tokens=2, tpot_s=0.05, promised=True)
    plan.submit(kept, 0.0)
    plan._account.refresh(0.0)
    late = request("late", 3_000, within_s=40.0, output_tokens=2000, tpot_s=0.05, promised=False)
    plan.submit(late, 0.0)
    account, sequence = plan._account, plan._state.by_id["late"]
    assert sequence.assigned_groups != plan._state.by_id["kept"].assigned_groups
    account.count(sequence, 0.0)
    assert account.may_end(sequence, 0.0, guaranteed=True) is not spans


def test_a_promise_is_delayed_by_an_answer_in_another_group_only_while_it_runs() -> None:
    # The wide prompt soon runs in both groups. The answer of the other takes a tenth of that time.
    plan = scheduler(
        topology(kvp=2, tokens_per_group=30_000),
        Scheduling(max_batch_s=0.05, decode_room=0.0),
        batch_s=0.003,
        key_s=2e-8,
        read_s=8e-8,
    )
    wide = request("wide", 50_000, within_s=200.0, output_tokens=2, tpot_s=0.05, promised=True)
    plan.submit(wide, 0.0)
    sequence = plan._state.by_id["wide"]

    def work_s() -> list[float]:
        plan._account.refresh(0.0)
        queues = plan._state.queues.by_group.values()
        return [float(queue.work_s[queue.row_of(sequence)]) for queue in queues]

    before_s = work_s()
    long = request("long", 29_000, within_s=90.0, output_tokens=100, tpot_s=0.05, promised=True)
    plan.submit(long, 0.0)
    assert len(plan._state.by_id["long"].assigned_groups) == 1
    answer_s = plan._account._length_s(plan._state.by_id["long"])
    for after_s, alone_s in zip(work_s(), before_s, strict=True):
        assert alone_s <= after_s < alone_s + answer_s


@pytest.mark.parametrize("answer", [2, 2000])
def test_a_promise_counts_its_answer_behind_its_prompt(answer: int) -> None:
    # The promise that is due later runs alongside the answer, and has little time left.
    plan = scheduler(
        settings=Scheduling(max_batch_s=0.05, decode_room=0.0), batch_s=0.003, read_s=8e-8
    )
    kept = request("kept", 100_000, within_s=16.0, output_tokens=2, tpot_s=0.05, promised=True)
    plan.submit(kept, 0.0)
    plan._account.refresh(0.0)
    long = request("long", 20_000, within_s=6.0, output_tokens=answer, tpot_s=0.05)
    assert SingleReplicaRouter(plan).decide(long, 0.0).promised is (answer == 2)


def test_a_tight_tpot_is_granted_only_as_far_as_promises_allow() -> None:
    # At 11 ms a token, batches of 10 ms would double the time of the promised prompt.
    plan = scheduler(settings=SETTINGS, batch_s=0.005)
    driven = Driven(plan)
    talk = request("talk", 60, within_s=5.0, output_tokens=2000, tpot_s=0.05)
    kept = request("kept", 30_000, 0.1, within_s=4.6, promised=True)
    tight = request("tight", 300, 0.2, within_s=0.5, output_tokens=200, tpot_s=0.011)
    driven.submit([talk, kept, tight])
    driven.run(until_s=1.0)
    assert plan._state.by_id["tight"].tpot_s == 0.05 and driven.in_time("tight")
    driven.run()
    assert driven.in_time("kept")
    free = scheduler(settings=SETTINGS, batch_s=0.005)
    free.submit(tight, 0.2)
    assert free._state.by_id["tight"].tpot_s == 0.011


@pytest.mark.parametrize("when_infeasible", ["refuse", "relegate"])
@pytest.mark.parametrize("output_tokens", [20, 100])
def test_prompts_without_a_promise_are_not_shut_out_by_decodes(
    output_tokens: int, when_infeasible: str
) -> None:
    # Short prompts alone offer 130 % load and decode; the long one has no chance to be in time.
    classes = (SloClass(when_infeasible=when_infeasible),)
    plan = scheduler(settings=SETTINGS, batch_s=0.003, key_s=1e-9, classes=classes)
    driven = Driven(plan)
    driven.submit(
        request(f"s{n}", 500, n / 26.0, within_s=0.5, output_tokens=output_tokens, tpot_s=0.05)
        for n in range(1500)
    )
    driven.submit([request("long", 15_000, 1.0, within_s=1.0, output_tokens=200, tpot_s=0.05)])
    driven.run(until_s=57.0)
    assert driven.first_s["long"] < 50.0
    given = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert [name for name in given if name in driven.first_s and not driven.in_time(name)] == []


@pytest.mark.parametrize("kvp", [1, 2])
def test_everything_counted_is_counted_out_when_requests_leave(kvp: int) -> None:
    draw = random.Random(3)
    plan = scheduler(topology(kvp=kvp, tokens_per_group=20_000), SETTINGS, batch_s=0.003, pages=900)
    driven = Driven(plan)

    def leave(name: str) -> None:
        plan.abort(name, driven.now)

    for number in range(80):
        at, name = 0.05 * number, f"r{number}"
        tokens = draw.choice([300, 900, 30_000])
        driven.submit([request(name, tokens, at, within_s=1.0, output_tokens=50, tpot_s=0.05)])
        if draw.random() < 0.4:
            gone_s = at + draw.uniform(0.0, 2.0)
            driven.at(gone_s, functools.partial(leave, name))
    driven.run()
    assert leftovers(plan) == {}


def test_a_promise_given_elsewhere_begins_although_others_may_not() -> None:
    plan = scheduler(settings=SETTINGS, batch_s=0.003, pages=20)
    first = request("first", 900, within_s=30.0, output_tokens=40, tpot_s=0.05, promised=True)
    second = request("second", 900, within_s=30.0, output_tokens=40, tpot_s=0.05, promised=True)
    plan.submit(first, 0.0)
    plan.submit(second, 0.0)  # its pages are taken
    assert not plan._state.by_id["second"].started
    plan._account.closed[0] = 1
    assert plan._admission.max_pages(0) == plan._state.pool[0].available


@pytest.mark.parametrize("tpot_s", [0.011, 0.05])
def test_a_promise_without_pages_does_not_wait_for_who_waits_for_it(tpot_s: float) -> None:
    # "big" was passed over for long, and its decodes would cost "owed" its promise; once "talk" has
    # gone there are pages for either.
    settings = Scheduling(max_batch_s=0.05, growth_timeout_s=4.0)
    classes = (SloClass(slo=Slo(tpot_s=tpot_s)),)
    plan = scheduler(settings=settings, batch_s=0.003, pages=100, classes=classes)
    driven = Driven(plan)
    talk = request("talk", 1200, within_s=5.0, output_tokens=300, tpot_s=0.05)
    big = request("big", 5700, 0.1, within_s=0.1, output_tokens=200, tpot_s=tpot_s, promised=False)
    owed = request("owed", 5700, 0.2, within_s=1.7, promised=True)
    driven.submit([talk, big, owed])
    driven.run()
    assert driven.in_time("owed") and driven.first_s["owed"] < driven.first_s["big"]
    assert set(driven.finished) == set(driven.requests)
    assert leftovers(plan) == {}


def test_while_a_promise_waits_for_pages_only_small_prompts_are_tried() -> None:
    """The others would be visited for each batch, in vain: 29 ms if 2,000 of them wait."""
    plan = scheduler(settings=SETTINGS, batch_s=0.003, pages=100)
    plan.submit(request("first", 2500, within_s=30.0, promised=True), 0.0)
    plan.submit(request("owed", 5000, within_s=30.0, promised=True), 0.0)
    plan.submit(request("other", 1200, within_s=0.1, promised=False), 0.0)
    available, small = plan._state.pool[0].available, 100 // 16
    queue = plan._waiting[0]
    assert not plan._state.by_id["owed"].started
    assert plan._admission.page_limits(0, queue, 0.0)[0] == small
    plan.abort("owed", 0.0)
    assert plan._admission.page_limits(0, queue, 0.0)[0] == available - small


def test_the_first_answer_shortens_no_batch_of_a_promise_unless_it_was_promised() -> None:
    # Batches of 11 ms hold 8 ms of prefills, batches of 50 ms 47.
    classes = (SloClass(slo=Slo(tpot_s=0.011)),)
    plan = scheduler(settings=SETTINGS, batch_s=0.003, classes=classes)
    driven = Driven(plan)
    driven.submit([request("long", 100_000, within_s=12.0, promised=True)])
    talk = request("talk", 500, 0.1, within_s=0.1, output_tokens=300, tpot_s=0.011, promised=False)
    driven.submit([talk])
    driven.run()
    assert driven.in_time("long") and plan._promises.broken_count == 0
    assert set(driven.finished) == {"long", "talk"}


def test_decodes_that_outgrow_their_pages_take_none_from_a_promised_prefill() -> None:
    # Of 28 pages the decodes have one each and fill 60 tokens of it; the long prompt has 19.
    plan = scheduler(
        settings=Scheduling(max_batch_s=0.05, output_reserve=0.01),
        batch_s=0.003,
        pages=28,
        token_s=1e-3,
    )
    driven = Driven(plan)
    driven.submit(
        request(f"d{n}", 60, within_s=2.0, output_tokens=90, tpot_s=0.05) for n in range(7)
    )
    driven.submit([request("long", 1200, 0.1, within_s=2.75, output_tokens=2, tpot_s=0.05)])
    driven.run()
    assert plan._lifecycle.preempted_count > 0
    assert driven.admitted["long"].promised and driven.in_time("long")
    assert set(driven.finished) == set(driven.requests)


def test_an_idle_replica_forgets_what_decodes_took() -> None:
    """Nothing runs that could remind it, so that it would leave room for them for ever."""
    plan = scheduler(settings=SETTINGS, batch_s=0.003, key_s=1e-7)
    driven = Driven(plan)
    driven.submit([request("deep", 80_000, within_s=900.0, output_tokens=50, tpot_s=0.05)])
    driven.run()
    ended_s = driven.now
    ((_, after),) = plan.load(ended_s).decode_parts
    assert after > 0.15 and leftovers(plan) == {}
    ((_, later),) = plan.load(ended_s + 30.0).decode_parts
    assert later == pytest.approx(after / math.e, rel=0.01)
    assert plan.load(ended_s + 900.0).decode_parts[0][1] == SETTINGS.decode_room


def test_a_sixteenth_of_the_places_is_kept_for_promises() -> None:
    plan = scheduler(settings=Scheduling(max_running=32))
    driven = Driven(plan)
    driven.submit([request(f"r{n}", 64, promised=False, output_tokens=900) for n in range(40)])
    driven.run(until_s=1.0)
    assert plan._admission.started_count == 30
    assert plan.load(1.0).free_places == 2
    for name in ("a", "b"):
        plan.submit(request(name, 64, within_s=1.0, promised=True, output_tokens=900), 1.0)
    assert plan._admission.started_count == 32
    assert plan.load(1.0).free_places == 0, "no router may promise a place that is taken"


def test_half_of_the_places_are_kept_for_what_is_in_its_tenants_share() -> None:
    plan = scheduler(settings=Scheduling(max_running=32))
    driven = Driven(plan)
    chats = [request(f"r{n}", 64, promised=False, output_tokens=900) for n in range(40)]
    driven.submit(msgspec.structs.replace(beyond, beyond_share=True) for beyond in chats)
    driven.run(until_s=1.0)
    assert plan.load(1.0).free_places == 16


def test_a_tenant_is_charged_for_places_beyond_the_work_of_its_prompts() -> None:
    plan = scheduler(settings=Scheduling(max_running=8))
    driven = Driven(plan)
    driven.submit(request(f"r{n}", 64, promised=True, output_tokens=90_000) for n in range(4))
    charged = []
    for second in range(1, 12):
        driven.run(until_s=float(second))
        charged.append(plan.load(float(second)).promised_work[0].seconds)
    assert 4.0 < charged[-1] - charged[0] < 5.0, "4 of 8 places for 10 s, a little forgotten"


def charged_s(key_s: float, tpot_s: float) -> float:
    """Seconds charged for ten seconds of an answer after 5,000 tokens, alongside a long prompt."""
    classes = (SloClass(slo=Slo(tpot_s=0.05)),)
    plan = scheduler(settings=SETTINGS, batch_s=0.003, key_s=key_s, classes=classes)
    driven, work_s = Driven(plan), []
    answer = request("a", 5000, within_s=99.0, output_tokens=3500, tpot_s=tpot_s, promised=True)
    driven.submit([msgspec.structs.replace(answer, tenant="a")])
    driven.submit([request("b", 500_000, within_s=9e9, promised=False)])
    for until_s in (31.5, 41.5):
        driven.run(until_s=until_s)
        work = plan.load(until_s).promised_work
        work_s.append(sum(entry.seconds for entry in work if entry.tenant == "a"))
    assert not driven.finished
    return work_s[1] - math.exp2(-10.0 / 60.0) * work_s[0]


def test_a_tenant_is_charged_for_what_its_answers_take_from_prefills() -> None:
    # Of each batch of 47.5 ms, 3 are overhead, and a decode that reads 5,000 keys takes 10.1 ms.
    assert charged_s(2e-6, 0.05) == pytest.approx(10.0 * 10.1 / 44.5, rel=0.2)
    # Batches of 19 ms hold 16 ms of prefills.
    shortened = 1.0 - (16.0 / 19.0) / (44.5 / 47.5)
    assert charged_s(0.0, 0.02) == pytest.approx(10.0 * shortened, rel=0.2)
    assert charged_s(0.0, 0.05) < 0.1


@pytest.mark.parametrize("spare_s", [0.0, 0.05, 0.1, 0.15, 0.2])
def test_prompts_that_start_between_two_batches_are_tried_together(spare_s: float) -> None:
    def planned(within_s: float) -> Scheduler:
        plan = scheduler(settings=SETTINGS, batch_s=0.003)
        plan.submit(request("due", 30_000, within_s=within_s, promised=True), 0.0)
        for number in range(60):
            tokens = 20 + 3 * number
            plan.submit(request(f"r{number}", 10, output_tokens=tokens, tpot_s=0.05), 0.0)
        plan._account.refresh(0.0)
        return plan

    tightest_s = 9.0 - planned(9.0)._promises.least_margin_s(0, 0.0)
    plan = planned(tightest_s + spare_s)
    account, promises, tried_s = plan._account, plan._promises, [spare_s]
    for number in range(60):
        account.closed.clear()
        if account.can_bear(plan._state.by_id[f"r{number}"], 0.0):
            tried_s.append(promises.least_margin_s(0, 0.0, tried=True))
    account.refresh(0.0)
    assert (len(tried_s) > 1) == (spare_s > 0.0)
    assert promises.least_margin_s(0, 0.0) == pytest.approx(tried_s[-1], abs=1e-3)
