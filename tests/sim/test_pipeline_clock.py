"""The pipeline clock: stages overlap, participants wait for each other, shards are followed."""

from __future__ import annotations

import pytest

from medha.batch import Batch, Chunk, Move
from medha.corrections import REGIMES
from medha.predictor import Predictor
from medha.profile import A100
from medha.sim.pipeline_clock import Layout, Misprediction, PipelineClock
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology

OF = Predictor(
    A100, LLAMA_3_8B, Topology(tp=8, spp=2, kvp_min=2, kvp_max=3, tokens_per_group=100_000)
)


def clock(layout: Layout = ()) -> PipelineClock:
    pipeline = PipelineClock(OF, 64, lambda seq: layout)
    for group in range(3):
        pipeline.join(group, 0.0)
    return pipeline


def batch(
    number: int, *chunks: Chunk, switches: tuple[int, ...] = (), ended: tuple[int, ...] = ()
) -> Batch:
    return Batch(number, 1, chunks, switches, ended)


def chunk(seq: int, start: int, length: int, *groups: int, tail: int | None = None) -> Chunk:
    return Chunk(seq, start, length, groups, groups[-1] if tail is None else tail)


def seconds(length: int, keys: int, groups: int = 1, tail: bool = True, stage: int = 0) -> float:
    load = OF.load()
    load.add_chunk(length, keys, groups, tail)
    return load.stage_s(stage)


def test_the_next_batch_enters_stage_0_while_the_first_is_in_stage_1() -> None:
    of = clock()
    run = of.run(batch(1, chunk(1, 0, 512, 0)), 0.0)
    first, second = seconds(512, 0), seconds(512, 0, stage=1)
    assert run.ends_s == pytest.approx((first, first + second))
    assert run.slowest_s == pytest.approx(max(first, second))
    assert 0 not in of.free_groups(0.5 * first) and 0 in of.free_groups(run.ends_s[0])
    later = of.run(batch(2, chunk(1, 512, 512, 0)), run.ends_s[0])
    assert later.ends_s[0] == pytest.approx(run.ends_s[0] + seconds(512, 512))
    assert later.ends_s[1] == pytest.approx(
        max(later.ends_s[0], run.ends_s[1]) + seconds(512, 512, stage=1)
    )


def test_a_shared_batch_waits_for_every_participant_and_a_lone_group_does_not() -> None:
    of = clock()
    busy = of.run(batch(1, chunk(1, 0, 4096, 0)), 0.0)
    shared = of.run(batch(2, chunk(2, 0, 64, 0, 1)), 0.0)
    alone = of.run(batch(3, chunk(3, 0, 64, 2)), 0.0)
    assert shared.ends_s[0] == pytest.approx(busy.ends_s[0] + seconds(64, 0, 2))
    assert alone.ends_s[0] == pytest.approx(seconds(64, 0))


def test_a_group_pays_only_for_the_shard_that_it_holds() -> None:
    of = clock()
    of.run(batch(1, chunk(1, 0, 100_000, 0)), 0.0)
    of.run(batch(2, chunk(1, 100_000, 50_000, 0, 1)), 1e3)
    assert of.held[1] == {0: 100_000, 1: 50_000}
    ends = of.run(batch(3, chunk(1, 150_000, 256, 0, 1)), 2e6).ends_s
    older, newer = seconds(256, 100_000, 2, False), seconds(256, 50_000, 2, True)
    assert ends[0] - 2e6 == pytest.approx(max(older, newer), rel=1e-4)


def test_a_switch_moves_tokens_and_an_end_forgets_them() -> None:
    of = clock()
    of.run(batch(1, chunk(1, 0, 6400, 0)), 0.0)
    of.copied(Move(7, 1, 0, 1, (0, 1, 2), (0, 1, 2), (5, 6, 7)))
    of.run(batch(2, chunk(1, 6400, 10, 0, 1), switches=(7,)), 10.0)
    assert of.held[1] == {0: 6400 - 192, 1: 192 + 10}
    of.run(batch(3, chunk(2, 0, 10, 0), ended=(1,)), 20.0)
    assert set(of.held) == {2}


def test_cached_pages_count_from_the_first_chunk_on() -> None:
    of = clock(layout=((0, tuple((page, page) for page in range(1000))),))
    end = of.run(batch(1, chunk(1, 64_000, 100, 0)), 0.0).ends_s[0]
    assert end == pytest.approx(seconds(100, 64_000))


def test_a_straggling_stage_is_slower_by_its_factor() -> None:
    slow = PipelineClock(
        OF, 64, lambda seq: (), lambda number, stage, regime: 3.0 if stage else 1.0
    )
    slow.join(0, 0.0)
    ends = slow.run(batch(1, chunk(1, 0, 512, 0)), 0.0).ends_s
    assert ends[1] - ends[0] == pytest.approx(3.0 * seconds(512, 0, stage=1))


def test_mispredictions_stay_within_the_error_and_half_of_it_is_a_bias_per_regime() -> None:
    def factors(seed: int, replica: int, regime: int) -> list[float]:
        wrong = Misprediction(0.2, seed, replica)
        return [wrong(number, 0, regime) for number in range(1, 400)]

    for regime in range(len(REGIMES)):
        drawn = factors(3, 0, regime)
        assert drawn == factors(3, 0, regime) != factors(3, 1, regime)
        assert 0.8 <= min(drawn) < max(drawn) <= 1.2
        biases = [sum(factors(3, replica, regime)) / 399 for replica in (0, 1)]
        assert [abs(bias - 1.0) for bias in biases] == pytest.approx([0.1, 0.1], abs=0.02)
        assert (biases[0] - 1.0) * (biases[1] - 1.0) > 0.0
    wrong = Misprediction(0.2, 3, 0)
    assert wrong(1, 0, 2) == wrong(1, 1, 2) != wrong(2, 0, 2)


def test_a_group_that_left_is_free_no_more_and_holds_nothing() -> None:
    of = clock()
    of.run(batch(1, chunk(1, 0, 64, 0), chunk(2, 0, 64, 1)), 0.0)
    of.leave(1)
    assert of.free_groups(1e9) == {0, 2}
    assert of.held == {1: {0: 64}, 2: {}}
