"""The fleet in virtual time: promises are kept, prefixes attract, refusals are correct."""

from __future__ import annotations

import random

import numpy as np
import pytest

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import RequestRecord, summarise
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import Arrival, poisson
from medha.topology import Topology

RELEGATING = SloClass(when_infeasible="relegate", slo=Slo(tpot_s=0.1))
REFUSING = SloClass(slo=Slo(tpot_s=0.1))
RATE_PER_S = 40.0


def fleet(
    count: int = 2,
    *classes: SloClass,
    pages: int = 10_000,
    routers: int = 1,
    spp: int = 1,
    max_running: int = 256,
) -> SimulatedFleet:
    classes = classes or (RELEGATING,)
    loop, settings, replicas = Loop(), Scheduling(max_running=max_running), []
    topology = Topology(tp=8, spp=spp)
    for index in range(count):
        predictor = Predictor(A100, LLAMA_3_8B, topology)
        scheduler = Scheduler(
            topology, LLAMA_3_8B, predictor, settings, pages, 64, 400_000, classes
        )
        clock = PipelineClock(predictor, 64, scheduler.layout)
        replicas.append(SimReplica(f"r{index}", scheduler, clock, loop))
    return SimulatedFleet(replicas, loop, classes, settings, 64, 400_000, routers=routers)


def play(of: SimulatedFleet, arrivals: list[Arrival]) -> dict[str, RequestRecord]:
    of.play(arrivals)
    of.loop.run(most_events=200_000)
    records = of.records()
    assert len(records) == len({record.id for record in records}) == len(arrivals)
    return {record.id: record for record in records}


def arrival(id: str, at: float, prompt: int, output: int = 1, **more: object) -> Arrival:
    return Arrival(
        id=id,
        arrival_s=at,
        prompt_tokens=prompt,
        output_tokens=output,
        **more,  # type: ignore[arg-type]
    )


def lose(of: SimulatedFleet, name: str, at: float) -> None:
    """Lose the only group of a replica at that time."""

    def lost() -> None:
        of.replicas[name].lose(0)

    of.loop.at(at, ARRIVE, lost)


@pytest.mark.parametrize("spp", [2, 3, 4])
def test_a_pipeline_keeps_the_promises_that_a_router_gives(spp: int) -> None:
    tight = SloClass(slo=Slo(ttft_floor_s=0.3, ttft_multiplier=1.3, tpot_s=0.1))
    dice = random.Random(spp)
    arrivals, at = [], 0.0
    for number in range(300):
        at += dice.expovariate(RATE_PER_S)
        prompt = max(100, min(8000, int(dice.lognormvariate(7.2, 1.1))))
        answer = max(1, min(1000, int(dice.lognormvariate(4.8, 0.9))))
        arrivals.append(arrival(f"{number}", at, prompt, answer))
    records = play(fleet(1, tight, spp=spp, pages=60_000), arrivals).values()
    promised = [record for record in records if record.promised]
    assert len(promised) > 100 and all(record.in_time for record in promised)


def test_promises_are_kept_when_answers_take_all_places() -> None:
    chats = [arrival(f"chat-{number}", 0.1 * number, 500, 2000) for number in range(12)]
    single = [arrival(f"single-{number}", 1.0 + 0.2 * number, 2000) for number in range(40)]
    long = [arrival(f"long-{number}", 1.5 + number, 90_000, 50) for number in range(8)]
    records = play(fleet(1, REFUSING, pages=60_000, max_running=8), [*chats, *single, *long])
    promised = [record for record in records.values() if record.promised]
    assert len(promised) >= 8 and all(record.in_time for record in promised)


def test_clients_that_leave_in_time_break_no_promise_wherever_their_request_is() -> None:
    of = fleet(1, REFUSING, pages=60_000)
    of.leave("r0")  # nothing serves: requests are held
    of.arrive(arrival("held", 0.0, 2000))
    of.cancel("held")
    assert of.held == []
    of = fleet(1, REFUSING, pages=60_000)
    of.play([arrival("served", 0.0, 100_000, 10), arrival("stays", 0.0, 1000, 10)])
    of.loop.at(0.4, ARRIVE, lambda: of.cancel("served"))
    of.loop.run(most_events=100_000)
    records = {record.id: record for record in of.records()}
    assert records["served"].promised and records["served"].left_s == 0.4
    total = summarise(of.records(), of.loop.now).total
    assert (total.departed, total.promised, total.promises_broken) == (1, 2, 0)
    assert total.longest_wait <= 1.0


def test_two_long_ones_go_to_two_replicas() -> None:
    records = play(fleet(), [arrival("a", 0.0, 100_000), arrival("b", 0.01, 100_000)])
    assert {record.replica for record in records.values()} == {"r0", "r1"}
    assert all(record.promised and record.in_time for record in records.values())


def test_a_turn_on_a_cached_prefix_goes_back_to_where_it_lies() -> None:
    blocks = tuple(range(100))
    first = arrival("first", 0.0, 51_200, blocks=blocks)
    other = arrival("other", 3.0, 51_200, blocks=tuple(range(1000, 1100)))
    turn = arrival("turn", 9.0, 51_300, blocks=blocks)
    records = play(fleet(3), [first, other, turn])
    assert records["turn"].replica == records["first"].replica
    assert records["turn"].cached_tokens >= 51_136
    ttft, whole = records["turn"].ttft_s, records["first"].ttft_s
    assert ttft is not None and whole is not None and ttft < 0.2 * whole


@pytest.mark.parametrize("seed", range(3))
def test_with_exact_predictions_no_promise_is_broken(seed: int) -> None:
    lengths = [(300, 1), (2000, 1), (6000, 1), (1000, 1), (120_000, 1)]
    arrivals = poisson(lengths, 2.0, 200, seed)
    report = summarise(list(play(fleet(), arrivals).values()), 100.0)
    assert report.total.promised > 100
    assert report.total.promises_broken <= 0.01 * report.total.promised


@pytest.mark.parametrize("seed", range(2))
def test_relegated_short_prompts_do_not_close_the_door_to_promised_ones(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(8.6, 1.2, 4000), 100, 120_000).astype(int)
    outputs = np.clip(rng.lognormal(5.2, 0.8, 4000), 2, 1500).astype(int)
    lengths = list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    tight = SloClass(when_infeasible="relegate", slo=Slo(tpot_s=0.05))
    of = fleet(1, tight, pages=20_000)  # a conversation at load 0.9, decodes included
    report = summarise(list(play(of, poisson(lengths, 4.0, 400, seed)).values()), of.loop.now)
    assert report.total.promises_broken <= 0.005 * report.total.promised
    assert report.total.attainment >= 0.75


@pytest.mark.parametrize("routers", [1, 3])
def test_relegated_requests_get_their_tenth_while_more_is_promised_than_can_be_served(
    routers: int,
) -> None:
    patient = SloClass(name="patient", slo=Slo(ttft_floor_s=100.0, tpot_s=0.1))
    hopeless = Slo(ttft_floor_s=0.001, ttft_multiplier=0.5, tpot_s=0.1)
    spare = SloClass(name="spare", slo=hopeless, when_infeasible="relegate")
    of = fleet(1, patient, spare, routers=routers)
    gap_s = of.predictor.prefill_s(8000) / 1.05
    promised = [
        arrival(f"p{index}", index * gap_s, 8000, slo_class="patient")
        for index in range(int(70.0 / gap_s))
    ]
    relegated = [
        arrival(f"r{index}", 5.0 + 0.1 * index, 8000, slo_class="spare") for index in range(20)
    ]
    of.play([*promised, *relegated])
    of.loop.run(65.0)
    records = {record.id: record for record in of.records()}
    assert all(records[queued.id].promised for queued in promised[:400])
    served = [queued.id for queued in relegated if records[queued.id].first_token_s is not None]
    assert len(served) == 20


@pytest.mark.parametrize("routers", [1, 4])
def test_several_routers_keep_their_promises_in_overload(routers: int) -> None:
    prompts = np.clip(np.random.default_rng(0).lognormal(8.6, 1.2, 4000), 100, 120_000)
    of = fleet(2, routers=routers)
    arrivals = poisson([(int(tokens), 1) for tokens in prompts], 14.0, 600)
    records = list(play(of, arrivals).values())
    assert of.waiting == 0
    assert all(record.finished_s is not None for record in records)
    report = summarise(records, of.loop.now)
    assert report.total.promised > 300
    assert report.total.promises_broken <= 0.005 * report.total.promised


def test_overload_is_refused_with_a_deadline_that_is_then_kept() -> None:
    of = fleet(1, REFUSING)
    burst = [arrival(f"l{index}", 0.1 * index, 150_000) for index in range(6)]
    records = play(of, burst)
    refused = [record for record in records.values() if record.refused]
    served = [record for record in records.values() if not record.refused]
    assert {record.refused for record in refused} == {"deadline_infeasible"}
    assert served and all(record.in_time for record in served)


def test_relegated_ones_are_all_served_in_the_end() -> None:
    burst = [arrival(f"l{index}", 0.1 * index, 150_000, 3) for index in range(6)]
    records = play(fleet(1), burst)
    assert all(record.finished_s is not None for record in records.values())
    assert any(not record.promised for record in records.values())


def test_what_can_never_fit_is_refused_at_once() -> None:
    records = play(fleet(1, pages=1000), [arrival("big", 0.0, 64_001)])
    assert records["big"].refused == "context_length_exceeded"


def test_late_requests_wait_in_the_queue_while_replicas_have_late_work() -> None:
    hopeless = Slo(ttft_floor_s=0.001, ttft_multiplier=0.5, tpot_s=0.1)
    of = fleet(1, SloClass(slo=hopeless, when_infeasible="relegate"))
    burst = [arrival(f"s{index}", 0.0, 8000) for index in range(60)]
    waited: list[int] = []
    of.play(burst)
    of.loop.at(0.3, 3, lambda: waited.append(of.waiting))
    of.loop.run(most_events=100_000)
    assert waited[0] > 40
    assert all(record.finished_s is not None for record in of.records())


def test_more_replicas_keep_more_promises_at_the_same_arrivals() -> None:
    arrivals = poisson([(4000, 5), (1000, 5), (90_000, 5)], 4.0, 150, seed=2)
    single, double = (
        summarise(list(play(fleet(count), arrivals).values()), 100.0).total.attainment
        for count in (1, 2)
    )
    assert double > single


def test_requests_of_a_lost_replica_go_on_elsewhere_at_once() -> None:
    of = fleet(2, pages=60_000)
    of.play([arrival(f"{number}", 0.1 * number, 2000, 200) for number in range(20)])
    lose(of, "r0", 3.0)
    of.loop.run(3.0 - 1e-6)
    there = {live.request.id: live.emitted for live in of.replicas["r0"].live.values()}
    assert any(there.values())
    of.loop.run(most_events=200_000)
    records = {record.id: record for record in of.records()}
    assert len(records) == 20 and all(r.output_tokens == 200 for r in records.values())
    assert {records[name].replica for name in there} == {"r1"}
    assert max(records[name].worst_gap_s for name in there) < 1.0
    assert all(record.in_time for record in records.values())
    loads = [replica.scheduler.load(of.loop.now) for replica in of.replicas.values()]
    assert all(load.free_pages == load.total_pages for load in loads)


def test_requests_of_the_only_replica_wait_until_it_has_a_group_again() -> None:
    of = fleet(1, pages=60_000)
    of.play([arrival(f"{number}", 0.1 * number, 2000, 200) for number in range(5)])
    lose(of, "r0", 1.0)
    of.loop.run(most_events=200_000)
    records = of.records()
    assert len(records) == 5 and all(record.output_tokens == 200 for record in records)
    assert max(record.worst_gap_s for record in records) > 60.0
