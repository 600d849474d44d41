"""The arrivals of `make demo` in virtual time: its checks hold on slow and on fast machines."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml
from demos.comparison import (
    LONGS,
    LOOSE,
    LOOSE_TOKENS,
    POLICIES,
    Outcome,
    arrivals,
    checks,
    deadline_s,
    ttft_s,
)

from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import SHIPPED
from medha.rendering import scheduling_of
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import Loop
from medha.sim.pipeline_clock import Misprediction, PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import RequestRecord
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import Arrival
from medha.spec import MedhaReplica, parse_all

CORE = msgspec.structs.replace(SHIPPED["cpu-core"], attention_flops_per_s=60e9)
SHAPE = ModelShape(
    layers=4,
    hidden=512,
    heads=8,
    kv_heads=2,
    head_dim=64,
    intermediate=2048,
    vocab=2048,
    param_bytes=4.0,
    kv_bytes=4.0,
    max_context_tokens=32_768,
)
ROOT = Path(__file__).resolve().parents[2]


def resource(policy: str) -> MedhaReplica:
    document = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    document["spec"]["scheduling"].update(POLICIES[policy])
    return parse_all([document])[0]


def play(policy: str, arrived: Iterable[Arrival], slowness: float, alone_s: float) -> Outcome:
    """Run the arrivals after a long prompt from which the predictor learns, as the demo does."""
    spec, start_s = resource(policy).spec, 4.0 * alone_s
    settings = scheduling_of(spec.scheduling, cuda=False)
    new = functools.partial(Predictor, CORE, SHAPE, spec.topology, settings.max_batch_s)
    scheduler = Scheduler(
        spec.topology, SHAPE, new(), settings, 1024, 64, SHAPE.max_context_tokens, spec.classes
    )
    noise = Misprediction(0.3, 1, 0)
    clock = PipelineClock(new(), 64, scheduler.layout, lambda *of: slowness * noise(*of))
    loop = Loop()
    replica = SimReplica("tiny-0", scheduler, clock, loop)
    planned = [Arrival(id="alone", arrival_s=0.0, prompt_tokens=LOOSE_TOKENS)]
    planned += [
        msgspec.structs.replace(arrival, arrival_s=arrival.arrival_s + start_s)
        for arrival in arrived
    ]
    deadlines = {arrival.id: deadline_s(arrival.id, alone_s) for arrival in planned[1:]}
    context = SHAPE.max_context_tokens
    fleet = SimulatedFleet([replica], loop, spec.classes, settings, 64, context, deadlines)
    fleet.play(planned)
    loop.run(float("inf"))
    records = tuple(_from(start_s, record) for record in fleet.records())
    return Outcome(alone_s=alone_s, records=records)


def _from(start_s: float, record: RequestRecord) -> RequestRecord:
    """The record with times from `start_s` on."""
    assert record.first_token_s is not None and record.finished_s is not None
    return msgspec.structs.replace(
        record,
        arrival_s=record.arrival_s - start_s,
        first_token_s=record.first_token_s - start_s,
        finished_s=record.finished_s - start_s,
    )


def outcomes(slowness: Mapping[str, float]) -> dict[str, Outcome]:
    """Runs of all policies, each scaled by what a long prompt takes alone at that slowness."""
    return {name: scaled(name, slowness[name]) for name in POLICIES}


def scaled(policy: str, slowness: float) -> Outcome:
    alone_s = ttft_s(play(policy, (), slowness, 1.0).record("alone"))
    run = play(policy, arrivals(alone_s), slowness, alone_s)
    planned = tuple(record for record in run.records if record.id != "alone")
    return msgspec.structs.replace(run, records=planned)


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_the_checks_of_the_demo_hold_on_fast_and_on_slow_machines(slowness: float) -> None:
    verdicts = checks(outcomes(dict.fromkeys(POLICIES, slowness)))
    assert [claim for claim, held in verdicts.items() if not held] == []


def test_the_checks_of_the_demo_hold_while_the_machine_changes_its_speed() -> None:
    slowness = {"fcfs": 0.6, "threshold": 0.8, "edf": 0.6, "lars-paper": 0.5, "lars": 0.7}
    verdicts = checks(outcomes(slowness))
    assert [claim for claim, held in verdicts.items() if not held] == []


def test_without_a_promise_set_the_checks_of_the_demo_fail() -> None:
    runs = outcomes(dict.fromkeys(POLICIES, 0.6))
    verdicts = checks({**runs, "lars": runs["edf"]})
    failed = [claim for claim, held in verdicts.items() if not held]
    assert "lars breaks no promise" not in failed and len(failed) >= 3


def test_lars_alone_meets_the_deadline_of_a_long_prompt() -> None:
    runs = outcomes(dict.fromkeys(POLICIES, 1.0))
    met = [(name, long) for name, run in runs.items() for long in LONGS if run.record(long).in_time]
    assert met == [("lars", LOOSE)]
