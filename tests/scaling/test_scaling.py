"""Autoscaling over virtual hours of signals: steady, noisy, stale and empty."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.fleet.autoscaling import (
    ClassShare,
    Journal,
    Policy,
    ScalingDecision,
    ScalingMemory,
    ScalingRecord,
    ScalingSignals,
    decide,
    quantile,
    replay,
)
from medha.metrics import RATIO

POLICY = Policy(least=1, most=8, target_slack=0.2, down_after_s=600.0)
LOOK_S = 5.0


class Run:
    """Looks every LOOK_S of virtual time; the fleet follows each decision after `cold_start_s`."""

    def __init__(self, policy: Policy = POLICY, current: int = 1, cold_start_s: float = 60.0):
        self.policy, self.current, self.ready = policy, current, current
        self.cold_start_s = cold_start_s
        self.at_s, self.memory = 0.0, ScalingMemory()
        self.due: list[float] = []
        self.records: list[ScalingRecord] = []
        self.changes: list[tuple[float, int]] = []

    def look(self, **reported: object) -> ScalingDecision:
        self.at_s += LOOK_S
        self.ready = min(self.current, self.ready + sum(due_s <= self.at_s for due_s in self.due))
        self.due = [due_s for due_s in self.due if due_s > self.at_s]
        signals = ScalingSignals(
            at_s=self.at_s,
            current=self.current,
            ready=self.ready,
            cold_start_s=self.cold_start_s,
            **{"arrived": 99, **reported},  # type: ignore[arg-type]
        )
        decision, self.memory = decide(self.policy, self.memory, signals)
        self.records.append(ScalingRecord(policy=self.policy, signals=signals, decision=decision))
        if decision.replicas != self.current:
            self.changes.append((self.at_s, decision.replicas))
            more = max(0, decision.replicas - self.current)
            self.due += [self.at_s + self.cold_start_s] * more
            self.current = decision.replicas
            self.ready = min(self.ready, self.current)
        return decision

    def looks(self, seconds: float, reported: Callable[[], dict[str, object]]) -> list[str]:
        """The reasons of all decisions in this time."""
        return [self.look(**reported()).why for _ in range(round(seconds / LOOK_S))]


def late() -> dict[str, object]:
    """Work for one and a half replicas arrives, with little slack."""
    return {"slack_p10": -0.3, "offered": 1.5, "busy": 20}


def idle() -> dict[str, object]:
    return {}


def easy() -> dict[str, object]:
    return {"slack_p10": 0.5, "offered": 0.9, "busy": 2}


def test_little_slack_brings_one_more_and_what_is_on_its_way_is_not_asked_for_twice() -> None:
    run = Run(cold_start_s=120.0)
    reasons = run.looks(180.0, late)
    ((at_s, count),) = run.changes
    assert count == 2 and 40.0 <= at_s <= 80.0
    assert reasons.count("LittleSlack") == 1
    assert "Starting" in reasons


def test_what_two_do_not_relieve_brings_a_third_once_both_have_been_seen_at_work() -> None:
    run = Run()
    run.looks(600.0, lambda: {"slack_p10": -0.3, "offered": 2.1, "busy": 20})
    assert [count for _, count in run.changes][:2] == [2, 3]
    first, second = run.changes[0][0], run.changes[1][0]
    assert second - first >= 60.0 + 30.0  # its start, and what signals look back


def test_much_more_work_than_replicas_doubles_them_at_once() -> None:
    run = Run(current=2)
    run.looks(60.0, lambda: {"slack_p10": -1.0, "offered": 7.0, "busy": 99})
    assert run.changes[0][1] == 4


def test_the_fleet_goes_back_after_the_stabilisation_and_not_before() -> None:
    run = Run()
    run.looks(80.0, late)
    run.looks(240.0, easy)
    assert run.current == 2
    ended = run.at_s
    run.looks(580.0, idle)
    assert run.current == 2
    run.looks(120.0, idle)
    assert run.current == 1 and run.changes[-1][0] - ended >= 600.0


def test_a_replica_that_takes_an_hour_to_start_is_kept_for_an_hour() -> None:
    run = Run(current=2, cold_start_s=3600.0)
    run.looks(3500.0, idle)
    assert run.current == 2
    run.looks(200.0, idle)
    assert run.current == 1


def test_an_empty_queue_with_fresh_reports_is_no_pressure_and_no_missing_data() -> None:
    run = Run(msgspec.structs.replace(POLICY, down_after_s=60.0), current=2)
    assert set(run.looks(55.0, idle)) == {"Stabilising"}
    run.looks(30.0, idle)
    assert run.current == 1


def test_stale_reports_hold_the_fleet_and_break_the_stabilisation() -> None:
    run = Run(current=3)
    run.looks(590.0, idle)
    assert set(run.looks(3600.0, lambda: {"fresh": False})) == {"NoData"}
    assert run.changes == []
    run.looks(590.0, idle)
    assert run.changes == []
    run.looks(60.0, idle)
    assert run.changes


def test_refusals_alone_are_pressure() -> None:
    """Refused requests have no slack, and nothing runs or waits."""
    run = Run()
    run.looks(60.0, lambda: {"slack_p10": -1.0, "offered": 0.9})
    assert run.changes[0][1] == 2


def test_a_class_that_misses_its_slo_is_pressure_though_slack_is_fine() -> None:
    run = Run()
    reported = {"slack_p10": 3.0, "offered": 0.4, "classes": (ClassShare("chat", 5, 20),)}
    run.looks(90.0, lambda: reported)
    assert run.records[-1].decision.why in ("MissedSlo", "Starting") and run.current == 2
    few = Run()
    few.looks(90.0, lambda: {**reported, "classes": (ClassShare("chat", 0, 3),)})
    assert few.current == 1


@pytest.mark.parametrize("alone", [-0.2, 0.0, 0.01, 0.12, 0.21, 0.25, 2.3])
def test_a_fleet_in_nobodys_way_gets_no_replica_more_and_gives_back_what_it_has(
    alone: float,
) -> None:
    """Clients ask for answers nearly as fast as they can be: no load is to blame for that."""
    run = Run(current=3)
    run.looks(3600.0, lambda: {"slack_p10": alone, "alone_p10": alone, "offered": 0.1, "busy": 1})
    assert [count for _, count in run.changes] == [1]


def test_what_a_load_takes_from_requests_in_a_hurry_is_pressure() -> None:
    run = Run()
    run.looks(120.0, lambda: {"slack_p10": -0.5, "alone_p10": 0.12, "offered": 0.7, "busy": 5})
    assert [count for _, count in run.changes] == [2]


def test_the_budget_is_kept_and_said() -> None:
    run = Run(msgspec.structs.replace(POLICY, most=2))
    reasons = run.looks(600.0, late)
    assert run.current == 2 and "AtMaximum" in reasons


def test_what_finds_no_place_is_not_asked_for() -> None:
    run = Run()
    assert "NoRoom" in run.looks(120.0, lambda: {**late(), "room": False})
    assert run.changes == []


def test_bounds_that_changed_hold_at_once_even_without_data() -> None:
    assert Run(current=9).look(fresh=False).replicas == 8
    assert Run(msgspec.structs.replace(POLICY, least=3)).look(fresh=False).replicas == 3


def test_from_zero_the_first_request_brings_a_replica_and_idleness_takes_it_again() -> None:
    run = Run(msgspec.structs.replace(POLICY, least=0, down_after_s=120.0), current=0)
    run.looks(300.0, idle)
    assert run.current == 0
    assert run.look(held=1, fresh=False).why == "FirstRequest" and run.current == 1
    run.looks(60.0, lambda: {"held": 1, "busy": 1})
    run.looks(300.0, lambda: {"busy": 1})
    assert run.current == 1  # one request still runs
    run.looks(150.0, idle)
    assert run.current == 0


def test_pages_in_use_keep_replicas_that_prompts_do_not_need() -> None:
    run = Run(current=4)
    run.looks(1200.0, lambda: {"kv_filled": 3.0, "busy": 50})
    assert run.current == 4
    run.looks(1200.0, lambda: {"kv_filled": 1.5, "busy": 50})
    assert run.current == 2


def test_a_fleet_that_was_too_small_is_made_small_again_later_and_later() -> None:
    """Two are enough and one is not: for the whole stabilisation it looks as if one were."""
    run = Run(current=2)
    run.looks(10 * 3600.0, lambda: {**easy(), "offered": 0.5} if run.ready > 1 else late())
    fewer = [at_s for at_s, count in run.changes if count == 1]
    pauses = [later - sooner for sooner, later in itertools.pairwise(fewer)]
    assert len(fewer) <= 10 and pauses == sorted(pauses) and pauses[0] >= 1200.0
    assert max(pauses) >= 8 * 600.0  # and no later than that
    gone = run.at_s
    run.looks(1300.0, idle)
    assert run.current == 0 or run.changes[-1][0] - gone <= 1300.0  # no client regrets it


def test_half_of_a_fleet_goes_at_once_and_no_more_before_another_stabilisation() -> None:
    run = Run(msgspec.structs.replace(POLICY, least=0), current=8)
    run.looks(3600.0, idle)
    assert [count for _, count in run.changes] == [4, 2, 1, 0]
    times = [at_s for at_s, _ in run.changes]
    assert all(later - sooner >= 600.0 for sooner, later in itertools.pairwise(times))


def test_a_replica_that_comes_and_goes_does_not_hide_what_is_missing() -> None:
    run = Run(current=4)
    for _ in range(5):
        for ready, seconds in ((4, 20.0), (3, 100.0)):
            for _ in range(round(seconds / LOOK_S)):
                run.ready = ready
                run.look(slack_p10=-1.0, offered=3.0, busy=50)
    assert run.current > 4


def test_one_that_is_lost_is_waited_for_before_another_is_asked_for() -> None:
    run = Run(current=2, cold_start_s=100.0)
    run.looks(60.0, easy)
    for ready, seconds in ((1, 150.0), (2, 600.0)):
        for _ in range(round(seconds / LOOK_S)):
            run.ready = ready
            run.look(**(late() if ready == 1 else easy()))
    assert run.changes == []


def test_what_starts_is_not_asked_for_again_after_a_time_without_looks() -> None:
    run = Run(cold_start_s=400.0)
    run.looks(80.0, late)
    assert run.current == 2
    for _ in range(3):
        run.at_s += 90.0  # longer than memory lasts
        run.looks(30.0, late)
    assert run.current == 2


@pytest.mark.parametrize("arrived, count", [(1, 1), (5, 2), (99, 2)])
def test_few_requests_say_less_than_many(arrived: int, count: int) -> None:
    run = Run()
    run.looks(50.0, lambda: {"slack_p10": -1.0, "arrived": arrived, "offered": 0.1, "busy": 1})
    assert run.current == count


def test_a_class_of_few_that_all_miss_keeps_the_fleet_and_brings_more_in_the_end() -> None:
    run = Run(current=2)
    missing = (ClassShare("many", met=290, missed=0), ClassShare("few", met=0, missed=4))
    run.looks(250.0, lambda: {"slack_p10": 5.0, "offered": 0.3, "classes": missing})
    assert run.current == 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [0.05, 0.1, 0.3])
def test_ten_minutes_of_noise_around_the_target_change_nothing(seed: int, spread: float) -> None:
    """Each look is the P10 of a window of thirty seconds, so neighbours share most of it."""
    dice, run = random.Random(seed), Run(current=2)
    recent = [dice.gauss(0.2, spread) for _ in range(6)]

    def noise() -> dict[str, object]:
        recent.append(dice.gauss(0.2, spread))
        p10 = sum(recent[-6:]) / 6
        return {"slack_p10": p10, "offered": 1.1 + dice.uniform(-0.3, 0.3), "busy": 10}

    run.looks(600.0, noise)
    assert run.changes == []


@pytest.mark.parametrize("seed", range(5))
def test_a_fleet_in_a_closed_loop_settles_and_does_not_swing(seed: int) -> None:
    """A fluid queue with bursts: slack falls with what is behind, replicas relieve it, and what
    would wait for more than four seconds is refused."""
    dice, run, behind_s = random.Random(seed), Run(), 0.0
    for minute in range(240):
        rate = 2.2 if 20 <= minute < 140 else 0.25
        for _ in range(round(60.0 / LOOK_S)):
            offered = max(0.0, rate * dice.gauss(1.0, 0.15))
            behind_s += (offered - run.ready) * LOOK_S
            behind_s = min(4.0 * run.ready, max(0.0, behind_s))
            slack = 0.5 - behind_s / max(1, run.ready) / 2.0
            run.look(slack_p10=max(-4.0, slack), offered=offered, backlog_s=behind_s, busy=5)
    counts = [count for _, count in run.changes]
    peak = max(counts)
    assert peak in (3, 4)
    rise = counts.index(peak)
    assert counts[: rise + 1] == sorted(counts[: rise + 1])
    assert counts[rise:] == sorted(counts[rise:], reverse=True)
    assert run.current == 1


look = st.fixed_dictionaries(
    {
        "fresh": st.booleans(),
        "slack_p10": st.none() | st.floats(-4, 25),
        "offered": st.floats(0, 20),
        "backlog_s": st.floats(0, 1e4),
        "held": st.integers(0, 3),
        "busy": st.integers(0, 100),
        "kv_filled": st.floats(0, 9),
        "arrived": st.integers(0, 50),
        "room": st.booleans(),
        "classes": st.just(())
        | st.builds(
            lambda met, missed: (ClassShare("a", met, missed),),
            st.integers(0, 50),
            st.integers(0, 50),
        ),
    }
)


@given(st.lists(look, min_size=1, max_size=60), st.integers(0, 3), st.integers(0, 5))
def test_for_any_signals_bounds_hold_and_no_data_means_no_change(
    looks: list[dict[str, object]], least: int, more: int
) -> None:
    policy = Policy(least=least, most=max(1, least + more), target_slack=0.2, down_after_s=60.0)
    run = Run(policy, current=max(least, 1))
    ups: list[float] = []
    for reported in looks:
        before = run.current
        decision = run.look(**reported)
        assert policy.least <= decision.replicas <= policy.most
        assert decision.replicas <= max(2 * before, before + 1)
        if not reported["fresh"] and not reported["held"]:
            assert decision.replicas == before
        if decision.replicas < before:
            assert all(run.at_s - at >= 60.0 for at in ups)
            assert decision.replicas >= before // 2
        ups += [run.at_s] if decision.replicas > before else []
    journal = Journal()
    for record in run.records:
        journal = journal.noted(record, 20)
    again = msgspec.json.decode(msgspec.json.encode(journal), type=Journal)
    assert replay(again) == [record.decision for record in run.records[-20:]]


def exact(values: list[float], share: float) -> float:
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


@given(st.lists(st.floats(-6, 30), min_size=1, max_size=200))
def test_a_quantile_of_buckets_is_in_the_bucket_of_the_true_one(values: list[float]) -> None:
    def bucket(value: float) -> int:
        return sum(edge < value for edge in RATIO)

    counts = [0] * (len(RATIO) + 1)
    for value in values:
        counts[bucket(value)] += 1
    tenth = quantile(RATIO, counts, 0.1)
    assert tenth is not None
    place = bucket(exact(values, 0.1))
    low = RATIO[place - 1] if place else RATIO[0]
    high = RATIO[min(place, len(RATIO) - 1)]
    assert low <= tenth <= high


def test_no_observation_has_no_quantile() -> None:
    assert quantile(RATIO, [0] * (len(RATIO) + 1), 0.1) is None
