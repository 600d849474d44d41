"""Prompts of one history that arrive before its pages are cached."""

from __future__ import annotations

import pytest

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import BLOCK_TOKENS, Arrival
from medha.topology import Topology

SLO_CLASS = SloClass(slo=Slo(tpot_s=0.1), when_infeasible="relegate")


@pytest.mark.parametrize("spp", [1, 2])
@pytest.mark.parametrize("policy", ["lars", "edf", "fcfs"])
def test_a_history_is_computed_once_for_prompts_that_come_at_once(policy: str, spp: int) -> None:
    layout, loop, settings = Topology(tp=8, spp=spp), Loop(), Scheduling(policy=policy)
    predictor = Predictor(A100, LLAMA_3_8B, layout)
    scheduler = Scheduler(
        layout, LLAMA_3_8B, predictor, settings, 60_000, 64, 1 << 20, (SLO_CLASS,)
    )
    clock = PipelineClock(Predictor(A100, LLAMA_3_8B, layout), 64, scheduler.layout)
    replica = SimReplica("r", scheduler, clock, loop, keep_log=True)
    fleet = SimulatedFleet([replica], loop, (SLO_CLASS,), settings, 64, 1 << 20)
    arrivals = [
        Arrival(
            id=f"r{index}",
            arrival_s=0.05 * index,
            prompt_tokens=100_000 + 100 * index,
            output_tokens=20,
            blocks=tuple(range(100_000 // BLOCK_TOKENS)),
        )
        for index in range(6)
    ]
    fleet.play(arrivals)
    loop.run(most_events=100_000)
    assert all(record.in_time for record in fleet.records())
    chunks = [chunk for _, batch in replica.log for chunk in batch.chunks if not chunk.decode]
    assert sum(chunk.length for chunk in chunks) < 1.15 * 100_000
