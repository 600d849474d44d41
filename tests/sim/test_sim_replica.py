"""A simulated replica: random workloads end, and batches are correct."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from medha.batch import Batch
from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Request, Slo
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.scenario import LLAMA_3_8B
from medha.testing import SingleReplicaRouter
from medha.topology import Topology

PAGE = 64


def replica(
    topology: Topology,
    pages: int = 3000,
    slowness: float = 0.0,
    seed: int = 0,
    cold_start_s: float = 2.0,
    **settings: object,
) -> SimReplica:
    predictor = Predictor(A100, LLAMA_3_8B, topology)
    scheduler = Scheduler(
        topology,
        LLAMA_3_8B,
        predictor,
        Scheduling(**settings),  # type: ignore[arg-type]
        pages,
        PAGE,
        200_000,
    )
    rng = random.Random(seed)
    clock = PipelineClock(
        Predictor(A100, LLAMA_3_8B, topology),
        PAGE,
        scheduler.layout,
        (lambda number, stage, regime: 1.0 + slowness * rng.random()) if slowness else None,
    )
    return SimReplica("r", scheduler, clock, Loop(), cold_start_s, keep_log=True)


def play(of: SimReplica, requests: list[Request]) -> None:
    router = SingleReplicaRouter(of.scheduler)

    def arrive(request: Request) -> None:
        of.submit(router.decide(request, of.loop.now))

    for request in requests:
        of.loop.at(request.arrival_s, ARRIVE, functools.partial(arrive, request))
    of.loop.run(most_events=40_000)


def requests_of(seed: int, count: int = 25, longest: int = 60_000) -> list[Request]:
    rng, now, requests = random.Random(seed), 0.0, []
    for index in range(count):
        now += rng.expovariate(8.0)
        prompt = int(min(longest, max(1, rng.lognormvariate(6.5, 1.8))))
        requests.append(
            Request(
                id=f"q{index}",
                arrival_s=now,
                prompt_tokens=prompt,
                max_output_tokens=rng.randint(1, 40),
                ttft_deadline_s=Slo().ttft_deadline_s(prompt / 50_000),
                tpot_s=0.05,
            )
        )
    return requests


SHAPES = [
    Topology(tp=8),
    Topology(tp=4, spp=3),
    Topology(tp=8, spp=2, kvp_min=2, kvp_max=2, tokens_per_group=20_000),
    Topology(tp=8, kvp_min=1, kvp_max=3, tokens_per_group=20_000),
]


@pytest.mark.parametrize("seed", range(52))
def test_a_random_workload_ends_well(seed: int) -> None:
    rng, topology = random.Random(seed), SHAPES[seed % len(SHAPES)]
    policy = rng.choice(["lars", "lars", "edf", "fcfs", "lars-paper", "srpf"])
    slowness = 0.5 if seed % 3 == 0 else 0.0
    of = replica(topology, slowness=slowness, seed=seed, policy=policy)
    requests = requests_of(seed)
    play(of, requests)
    assert not of.live and not of.refused
    emitted = {record.id: record.output_tokens for record in of.records()}
    assert emitted == {request.id: request.max_output_tokens for request in requests}
    check_batches([batch for _, batch in of.log], requests, of)
    load = of.scheduler.load(of.loop.now)
    assert load.pending_s == 0 and load.decoding == 0
    running = [
        (free, most)
        for free, most in zip(load.free_pages, load.total_pages, strict=True)
        if free >= 0
    ]
    assert running and all(free == most for free, most in running)


def check_batches(batches: list[Batch], requests: list[Request], of: SimReplica) -> None:
    """Numbers without gaps; every prompt computed once, in order; decodes follow one by one."""
    assert [batch.number for batch in batches] == list(range(1, len(batches) + 1))
    reached: dict[int, int] = {}
    total = 0
    for chunk in itertools.chain.from_iterable(batch.chunks for batch in batches):
        assert chunk.start == reached.get(chunk.seq, 0)
        assert chunk.tail in chunk.groups and list(chunk.groups) == sorted(set(chunk.groups))
        reached[chunk.seq] = chunk.end
        total += chunk.length
    expected = sum(request.prompt_tokens + request.max_output_tokens - 1 for request in requests)
    assert total == expected


@pytest.mark.parametrize("topology", SHAPES)
def test_what_the_packer_predicts_is_what_the_clock_takes(topology: Topology) -> None:
    of = replica(topology)
    taken: dict[int, float] = {}
    run = of.clock.run

    def noting(batch: Batch, now: float) -> object:
        result = run(batch, now)
        taken[batch.number] = result.slowest_s
        return result

    of.clock.run = noting  # type: ignore[assignment,method-assign]
    play(of, requests_of(7, count=40))
    wrong = [
        (batch.number, batch.predicted_s, taken[batch.number])
        for _, batch in of.log
        if abs(taken[batch.number] / batch.predicted_s - 1) > 1e-6
    ]
    assert not wrong


def test_the_same_workload_makes_the_same_batches_at_the_same_times() -> None:
    logs = []
    for _ in range(2):
        of = replica(SHAPES[2], slowness=0.3, seed=5)
        play(of, requests_of(11, count=40))
        logs.append(of.log)
    assert logs[0] == logs[1] and len(logs[0]) > 100


def test_a_long_prompt_that_needs_more_groups_waits_for_one_to_join_and_grows_into_it() -> None:
    of = replica(SHAPES[3], pages=500, cold_start_s=5.0)
    long = Request(
        id="long", arrival_s=0.0, prompt_tokens=60_000, max_output_tokens=5, ttft_deadline_s=60.0
    )
    play(of, [long])
    (record,) = of.records()
    assert record.output_tokens == 5
    assert record.first_token_s is not None and record.first_token_s > 5.0
    used = {group for _, batch in of.log for group in batch.groups}
    assert used == {0, 1, 2}


def test_a_client_that_leaves_gives_its_pages_back_and_the_rest_go_on() -> None:
    of = replica(SHAPES[1])
    requests = requests_of(3, count=12)
    for request in requests:
        of.loop.at(request.arrival_s, ARRIVE, functools.partial(of.submit, request))
    for index in (2, 5, 8):
        when = requests[index].arrival_s + 0.02
        of.loop.at(when, ARRIVE, functools.partial(of.abort, f"q{index}"))
    of.loop.run(most_events=200_000)
    done = {record.id for record in of.records() if record.finished_s is not None}
    assert {f"q{index}" for index in range(12)} - {"q2", "q5", "q8"} <= done
    load = of.scheduler.load(of.loop.now)
    assert load.free_pages == load.total_pages


def test_a_lost_group_is_recomputed_and_every_token_still_comes() -> None:
    of = replica(SHAPES[2])
    long = Request(id="long", arrival_s=0.0, prompt_tokens=35_000, max_output_tokens=5)
    requests, lost = [long, *requests_of(4, count=15)], list[int]()
    of.loop.at(0.5, ARRIVE, lambda: lost.extend(of.lose(1)))
    play(of, requests)
    assert lost
    emitted = {record.id: record.output_tokens for record in of.records()}
    assert emitted == {request.id: request.max_output_tokens for request in requests}


def attainment(policy: str, load: float, seed: int) -> float:
    """Share in time of short prompts among a few long ones, by the server's load."""
    of = replica(Topology(tp=8), pages=20_000, policy=policy)
    rng, now, requests = random.Random(seed), 0.0, []
    predictor = of.clock.predictor
    lengths = [
        rng.randint(60_000, 150_000) if index % 20 == 10 else rng.randint(200, 8000)
        for index in range(160)
    ]
    mean_s = sum(predictor.prefill_s(length) for length in lengths) / len(lengths)
    for index, length in enumerate(lengths):
        now += rng.expovariate(load / mean_s)
        work_s = predictor.prefill_s(length)
        requests.append(
            Request(
                id=f"q{index}",
                arrival_s=now,
                prompt_tokens=length,
                work_s=work_s,
                ttft_deadline_s=Slo().ttft_deadline_s(work_s),
            )
        )
    play(of, requests)
    short = [record for record in of.records() if record.prompt_tokens <= 8000]
    return sum(record.in_time for record in short) / len(short)


def test_at_equal_load_lars_serves_short_ones_no_worse_than_edf_and_edf_than_fcfs() -> None:
    lars, edf, fcfs = (
        sum(attainment(policy, 0.9, seed) for seed in range(3)) / 3
        for policy in ("lars", "edf", "fcfs")
    )
    assert lars >= edf >= fcfs
    assert lars > 0.9 and fcfs < 0.5
