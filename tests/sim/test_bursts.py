"""Promises of a router when requests come at once, mostly to pipelines, with exact predictions."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import SHIPPED
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import RequestRecord
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import BLOCK_TOKENS, Arrival
from medha.topology import Topology

IDLE_S = 5.0

# (arrival, prompt tokens, output tokens, number of the history that the prompt begins with or -1)
Wish = tuple[float, int, int, int]


def blocks(history: int, tokens: int) -> tuple[int, ...]:
    return tuple(10_000 * (history + 1) + block for block in range(tokens // BLOCK_TOKENS))


def served(
    profile: str,
    layout: Topology,
    tpot_s: float,
    wishes: Sequence[Wish],
    histories: Sequence[int] = (),
    deadlines_s: dict[str, float] | None = None,
    when_infeasible: str = "refuse",
) -> list[RequestRecord]:
    """Serve requests on one replica that is idle and has the histories in its cache."""

    def predictor() -> Predictor:
        return Predictor(SHIPPED[profile], LLAMA_3_8B, layout)

    loop, plan_settings = Loop(), Scheduling(max_running=1024)
    slo_class = SloClass(slo=Slo(tpot_s=tpot_s), when_infeasible=when_infeasible)
    classes = (slo_class,)
    plan = Scheduler(layout, LLAMA_3_8B, predictor(), plan_settings, 60_000, 64, 1 << 20, classes)
    replica = SimReplica("r", plan, PipelineClock(predictor(), 64, plan.layout), loop)
    long_s = {f"history-{number}": 1e6 for number in range(len(histories))}
    due_s = {**(deadlines_s or {}), **long_s}
    fleet = SimulatedFleet([replica], loop, classes, plan_settings, 64, 1 << 20, due_s)
    for number, tokens in enumerate(histories):
        first = Arrival(
            id=f"history-{number}",
            arrival_s=loop.now,
            prompt_tokens=tokens,
            blocks=blocks(number, tokens),
        )
        loop.at(first.arrival_s, ARRIVE, functools.partial(fleet.arrive, first))
        loop.run(most_events=200_000)
    begin_s = loop.now + IDLE_S
    for number, (arrival_s, prompt, output, history) in enumerate(wishes):
        arrival = Arrival(
            id=f"r{number}",
            arrival_s=begin_s + arrival_s,
            prompt_tokens=prompt,
            output_tokens=output,
            blocks=blocks(history, min(prompt, histories[history])) if history >= 0 else (),
        )
        loop.at(arrival.arrival_s, ARRIVE, functools.partial(fleet.arrive, arrival))
    loop.run(most_events=2_000_000)
    return [record for record in fleet.records() if record.id.startswith("r")]


def late(records: Sequence[RequestRecord]) -> dict[str, float]:
    """By how much promises were broken."""
    return {
        record.id: (record.ttft_s or float("inf")) - record.ttft_deadline_s
        for record in records
        if record.promised and not record.in_time
    }


def test_a_promise_waits_for_the_batches_in_flight_in_every_stage() -> None:
    # The short prompt comes when two batches of 0.1 s fill both stages: it cannot have 0.1 s.
    wishes = [(0.0, 43_847, 1, -1), (0.2897, 2002, 1, -1)]
    records = served("a100", Topology(tp=8, spp=2), 0.15, wishes, deadlines_s={"r1": 0.1})
    assert late(records) == {}
    assert [record.id for record in records if record.promised] == ["r0"]
    records = served("a100", Topology(tp=8, spp=2), 0.15, wishes, deadlines_s={"r1": 0.15})
    assert late(records) == {} and all(record.promised for record in records)


def test_prompts_that_come_at_once_count_the_answers_of_those_before() -> None:
    # No batch ends between the arrivals. With an answer at 218,000 tokens in every third batch,
    # 2,190 tokens at that depth take half as long again.
    wishes = [(0.0, 218_924, 200, 0), (0.0, 257_145, 1, -1), (0.0, 221_113, 1, 0)]
    records = served("a100", Topology(tp=1, spp=3), 0.05, wishes, [218_923])
    assert late(records) == {}
    assert next(record for record in records if record.id == "r0").promised


def test_the_first_answer_of_a_replica_takes_no_time_from_earlier_promises() -> None:
    # From then on promises count on batches as short as answers make them.
    wishes = [
        (0.0, 31_769, 1, -1),
        (0.0, 98_800, 1, -1),
        (0.0, 71_049, 1, -1),
        (0.0, 28_405, 2, -1),
    ]
    records = served("a100", Topology(tp=4, spp=3, kvp_min=2, kvp_max=2), 0.02, wishes)
    assert late(records) == {}


@pytest.mark.parametrize("kvp", [1, 2])
def test_batches_are_short_before_an_answer_begins(kvp: int) -> None:
    # Batches of 0.1 s ahead of the second token would hold stage 0 up, three times.
    layout = Topology(tp=1, spp=4, kvp_min=kvp, kvp_max=kvp)
    wishes = [(0.0, 65_525, 1, -1), (0.0, 59_521, 54, 0), (0.0, 16_086, 1, -1)]
    wishes += [(0.0148, 109_902, 49, 1)]
    records = served("h100", layout, 0.075, wishes, [54_521, 108_813], when_infeasible="relegate")
    assert late(records) == {}
    assert any(record.promised for record in records)


@pytest.mark.parametrize(("spp", "output_tokens"), [(2, 2), (3, 2), (3, 3), (4, 3), (4, 5)])
def test_the_second_token_of_a_short_answer_is_in_time_in_a_pipeline(
    spp: int, output_tokens: int
) -> None:
    # It waits for stage 0 and behind all batches in flight, and has no time to catch up.
    layout = Topology(tp=4, spp=spp)
    wishes = [(0.0, 4_000, output_tokens, -1), (0.0, 60_000, 1, -1), (0.001, 2_000, 1, -1)]
    records = served("a100", layout, 0.1, wishes)
    answers = [record for record in records if record.output_tokens > 1]
    assert [record.promised for record in answers] == [True]
    assert not any(record.tpot_missed for record in answers)
    assert late(records) == {}


def burst(seed: int) -> tuple[list[Wish], list[int]]:
    """Up to twelve prompts at once or within a second, some on histories."""
    draw = random.Random(seed)
    histories = [int(2 ** draw.uniform(12, 18)) for _ in range(2)]
    low, high = draw.choice([(7, 12), (9, 15.5), (12, 17), (10, 19.9)])
    wishes = []
    for _ in range(draw.randint(2, 12)):
        prompt, history = int(2 ** draw.uniform(low, high)), -1
        if draw.random() < 0.3:
            history = draw.randrange(2)
            prompt = histories[history] + draw.choice([1, min(prompt, 5000)])
        output = draw.choice([1, 2, 20, 200, 2000])
        wishes.append((draw.choice([0.0, draw.uniform(0.0, 1.0)]), prompt, output, history))
    return sorted(wishes), histories


@given(
    seed=st.integers(0, 10_000),
    profile=st.sampled_from(["a100", "h100"]),
    tp=st.sampled_from([2, 4, 8]),
    spp=st.integers(1, 4),
    kvp=st.integers(1, 2),
    tpot_s=st.sampled_from([0.05, 0.1, 0.3]),
)
@settings(max_examples=20)
def test_no_promise_is_broken_with_exact_predictions(
    seed: int, profile: str, tp: int, spp: int, kvp: int, tpot_s: float
) -> None:
    layout = Topology(tp=tp, spp=spp, kvp_min=kvp, kvp_max=kvp)
    wishes, histories = burst(seed)
    records = served(profile, layout, tpot_s, wishes, histories)
    assert late(records) == {}
    assert all(record.finished_s is not None or record.refused for record in records)
