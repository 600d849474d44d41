"""The simulator's replica and the serving controller make identical batches at identical times.

Two independent drivers of the same scheduler: `sim.replica` calls it directly, the controller
exchanges messages with fake ranks and a fake router. Any difference is a bug in one of them. Only
the generation's number may differ: the controller forms base groups together.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import pytest
from tests.support.virtual_ranks import expected_tokens
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha import testing
from medha.batch import Batch
from medha.config import Scheduling, WorkerConfig
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.request import Request
from medha.scheduling.decision_log import RecordingScheduler, replay
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, DONE, Loop
from medha.sim.pipeline_clock import PipelineClock, Slowness
from medha.sim.replica import SimReplica
from medha.topology import Topology

VOCAB, PAGE_TOKENS, COLD_START_S = 50_000, 16, 0.4
SHAPE = msgspec.structs.replace(testing.shape(), vocab=VOCAB)
PROFILE = msgspec.structs.replace(
    testing.profile(key_s=2e-9, batch_s=1e-3), transfer_latency_s=2e-3, transfer_bytes_per_s=1e9
)
POLICIES = ("lars", "lars", "lars-paper", "edf", "fcfs")
LAYOUTS = (
    Topology(spp=1),
    Topology(spp=2),
    Topology(spp=3),
    Topology(spp=2, kvp_min=2, kvp_max=2, tokens_per_group=600),
    Topology(spp=3, kvp_min=1, kvp_max=3, tokens_per_group=600),
)
ALONE = (Topology(), Topology(kvp_min=1, kvp_max=2, tokens_per_group=600))


class Draw(msgspec.Struct, frozen=True):
    """A client: its request, the tokens after which the model stops, the time it disconnects."""

    request: Request
    prompt: list[int]
    stops_after: int | None
    leaves_s: float | None
    window: int = 0

    @property
    def submit(self) -> m.Submit:
        stops: tuple[int, ...] = ()
        if self.stops_after is not None:
            stops = (expected_tokens(self.prompt, self.stops_after, VOCAB, self.window)[-1],)
        return m.Submit(
            id=self.request.id,
            tokens=m.to_bytes(self.prompt),
            max_output_tokens=self.request.max_output_tokens,
            sampling=m.Sampling(temperature=0.0, stop_tokens=stops),
            ttft_deadline_s=self.request.ttft_deadline_s,
            tpot_s=self.request.tpot_s,
            work_s=self.request.work_s,
        )


def workload(seed: int, longest: int, window: int) -> list[Draw]:
    rng = np.random.default_rng(seed)
    draws, at_s = [], 0.1
    for place in range(25):
        at_s += float(rng.exponential(0.03))
        long = rng.random() < 0.15
        tokens = int(rng.integers(500, longest) if long else rng.integers(1, 400))
        outputs = int(rng.integers(1, 12))
        request = Request(
            id=f"r{place}",
            arrival_s=at_s,
            prompt_tokens=tokens,
            max_output_tokens=outputs,
            ttft_deadline_s=float(rng.uniform(0.05, 1.0)),
            tpot_s=float(rng.uniform(0.003, 0.05)),
        )
        stops = int(rng.integers(1, outputs + 1)) if rng.random() < 0.3 else None
        leaves_s = at_s + float(rng.exponential(0.1)) if rng.random() < 0.2 else None
        prompt = rng.integers(0, VOCAB, tokens).tolist()
        draws.append(Draw(request, prompt, stops, leaves_s, window))
    return draws


def simulated(
    config: WorkerConfig, shape: ModelShape, pages: int, draws: list[Draw], slowness: float
) -> list[tuple[float, Batch]]:
    settings = config.scheduling
    predictor = Predictor(PROFILE, shape, config.topology, settings.max_batch_s)
    scheduler = Scheduler(
        config.topology,
        shape,
        predictor,
        settings,
        pages,
        PAGE_TOKENS,
        config.max_context_tokens,
        config.classes,
    )
    of = Predictor(PROFILE, shape, config.topology, settings.max_batch_s)
    clock = PipelineClock(of, PAGE_TOKENS, scheduler.layout, jitter(slowness))
    loop = Loop()
    replica = SimReplica("r0", scheduler, clock, loop, COLD_START_S, keep_log=True)
    for draw in draws:
        arrive = functools.partial(replica.submit, draw.request, (), draw.stops_after)
        loop.at(draw.request.arrival_s, ARRIVE, arrive)
        if draw.leaves_s is not None:
            loop.at(draw.leaves_s, ARRIVE, functools.partial(replica.abort, draw.request.id))
    loop.run(60.0, 200_000)
    return replica.log


def served(
    config: WorkerConfig,
    shape: ModelShape,
    pages: int,
    draws: list[Draw],
    slowness: float,
    log: list[bytes],
) -> VirtualReplica:
    replica = VirtualReplica(
        config,
        shape,
        PROFILE,
        pages=pages,
        beats=False,
        wrap=lambda scheduler: RecordingScheduler(scheduler, log.append),
        slowness=jitter(slowness),
    )
    joining: set[int] = set()

    def start(group: int) -> None:
        joining.discard(group)
        replica.start_group(group)

    def resize() -> None:
        assert replica.scheduler is not None
        wanted = replica.scheduler.wanted_groups(replica.loop.now)
        for group in range(min(wanted, config.topology.kvp_max)):
            if group not in replica.groups and group not in joining:
                joining.add(group)
                at_s = replica.loop.now + COLD_START_S
                replica.loop.at(at_s, DONE, functools.partial(start, group))

    replica.after_tick = resize
    for draw in draws:
        replica.submit_at(draw.request.arrival_s, draw.submit)
        if draw.leaves_s is not None:
            replica.send_at(draw.leaves_s, m.Abort(draw.request.id))
    replica.run(60.0, 200_000)
    return replica


def jitter(size: float) -> Slowness:
    """Stages that take longer than predicted, each batch and stage by its own factor."""
    return lambda number, stage, regime: 1.0 + size * ((number * 7 + stage * 3) % 5)


def unnumbered(log: list[tuple[float, Batch]]) -> list[tuple[float, Batch]]:
    return [(time_s, msgspec.structs.replace(batch, generation=0)) for time_s, batch in log]


@pytest.mark.parametrize("seed", range(60))
def test_the_simulator_and_the_controller_decide_alike(seed: int) -> None:
    compare(seed, LAYOUTS[seed % len(LAYOUTS)], ahead_s=0.0)


@pytest.mark.parametrize("seed", range(100, 124))
def test_they_decide_alike_one_step_ahead(seed: int) -> None:
    compare(seed, ALONE[seed % len(ALONE)], ahead_s=0.01)


@pytest.mark.parametrize("seed", range(200, 225))
def test_they_decide_alike_where_windows_slide(seed: int) -> None:
    """In pools of fewer pages than most contexts need without a window."""
    compare(seed, LAYOUTS[seed % len(LAYOUTS)], ahead_s=0.0, window=100)


def compare(seed: int, topology: Topology, ahead_s: float, window: int = 0) -> None:
    settings = Scheduling(
        policy=POLICIES[seed // 5 % len(POLICIES)], release_cooldown_s=1e9, ahead_s=ahead_s
    )
    config = WorkerConfig(
        replica="r0",
        model="m",
        checkpoint="",
        max_context_tokens=8192,
        topology=topology,
        page_tokens=PAGE_TOKENS,
        scheduling=settings,
        routers=("a",),
        rank_bind="",
        rank_timeout_s=1e9,
    )
    pages, slowness = (60, 150)[seed % 2], (0.0, 0.1)[seed // 2 % 2]
    shape = SHAPE
    if window:
        shape = msgspec.structs.replace(SHAPE, window_tokens=window, window_layers=SHAPE.layers)
        pages = (20, 150)[seed % 2]
    longest = 3000 if window else min(pages * PAGE_TOKENS * topology.kvp_max, 3000)
    draws = workload(seed, longest, window)
    log: list[bytes] = []
    replica = served(config, shape, pages, draws, slowness, log)
    expected = simulated(config, shape, pages, draws, slowness)
    assert len(expected) > 20
    for ours, theirs in zip(unnumbered(replica.log), unnumbered(expected), strict=False):
        assert ours == theirs
    assert len(replica.log) == len(expected)
    assert replay(log) == len(log) - 1
