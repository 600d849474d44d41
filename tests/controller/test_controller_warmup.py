"""Before serving, a controller without a profile measures its machine with real steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha.predictor import Predictor
from medha.profile import decode
from medha.topology import Topology
from medha_worker.controller.startup import Warmup

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]
Judge = Callable[[VirtualReplica, m.Submit], None]
Idle = Callable[[VirtualReplica], None]

LAYOUTS = [Topology(), Topology(spp=2), Topology(spp=2, kvp_min=2, kvp_max=2)]


@pytest.mark.parametrize("topology", LAYOUTS)
def test_the_measured_profile_predicts_the_machine_and_serving_follows(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle, topology: Topology
) -> None:
    replica = make_replica(topology=topology, key_s=2e-9, measure=True)
    replica.run(5.0)
    assert replica.hello is not None
    learned = Predictor(decode(replica.hello.profile), replica.shape, topology)
    true = replica.clock.predictor
    for batch in [((64, 0, False),), ((256, 512, False),), ((1, 40, True),) * 8]:
        assert learned.batch_s(batch) == pytest.approx(true.batch_s(batch), rel=0.15)
    warmed = replica.controller.batches.offset
    assert 30 < warmed == len(replica.log)
    first, second = make_submit("one", 700, outputs=9), make_submit("two", 30, outputs=30)
    replica.submit_at(6.0, first)
    replica.submit_at(6.0, second)
    replica.run(20.0)
    judge(replica, first)
    judge(replica, second)
    assert [batch.number for _, batch in replica.log] == list(range(1, len(replica.log) + 1))
    assert not replica.groups[0].tables.keys() - {1, 2}, "ranks still know dummy sequences"
    idle(replica)


def test_a_small_pool_is_measured_with_the_batches_that_fit(
    make_replica: Make, make_submit: Submit, judge: Judge
) -> None:
    replica = make_replica(pages=8, measure=True)
    first = make_submit("one", 60, outputs=5)
    replica.submit_at(6.0, first)
    replica.run(10.0)
    judge(replica, first)


def test_a_slow_machine_is_measured_for_a_few_seconds_only(make_replica: Make) -> None:
    replica = make_replica(batch_s=0.8, measure=True)
    replica.run(30.0)
    assert replica.hello is not None
    assert replica.hellos[0][0] < 6.0


def test_a_group_lost_while_it_is_measured_is_measured_again(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(batch_s=0.05, measure=True, topology=Topology(spp=2))
    replica.loop.at(1.0, 0, lambda: replica.kill_group(0))
    replica.run(7.0)
    assert replica.hello is None
    replica.start_group(0)
    first = make_submit("one", 300, outputs=5)
    replica.submit_at(15.0, first)
    replica.run(30.0)
    judge(replica, first)
    idle(replica)


@pytest.mark.parametrize("context", [1, 10, 33, 34, 300])
def test_no_batch_of_a_small_context_exceeds_it(context: int) -> None:
    dummies = warmup(max_context_tokens=context)
    while (batch := dummies.next(0.0)) is not None:
        for chunk in batch.chunks:
            assert 0 < chunk.length <= context - chunk.start
        dummies.done(batch.number, 0.01)
    assert dummies.samples


def warmup(max_context_tokens: int = 4096) -> Warmup:
    return Warmup(
        group=0,
        spp=1,
        pages=4096,
        page_tokens=64,
        max_context_tokens=max_context_tokens,
        vocab=256,
        budget_s=2.0,
        longest_s=10.0,
    )


def test_a_slow_first_batch_is_neither_measured_nor_takes_the_others_time() -> None:
    dummies, now = warmup(), 0.0
    while (batch := dummies.next(now)) is not None:
        took_s = 30.0 if batch.number == 1 else 0.1  # the first pages code in
        now += took_s
        dummies.done(batch.number, took_s)
    assert dummies.finished
    assert {sample.seconds for sample in dummies.samples} == {0.1}
    assert 20 <= len(dummies.samples) <= 21
    assert now < 30.0 + 2.0 + 0.2


def test_all_batches_run_if_there_is_time() -> None:
    dummies = warmup()
    while (batch := dummies.next(0.0)) is not None:
        dummies.done(batch.number, 0.01)
    lengths = {sum(length for length, _, _ in sample.entries) for sample in dummies.samples}
    assert {1, 4, 16, 32, 128, 256, 512} <= lengths


def test_a_machine_too_slow_for_large_batches_is_measured_with_small_ones(
    make_replica: Make,
) -> None:
    dummies, sizes = warmup(), []
    while (batch := dummies.next(0.0)) is not None:
        sizes.append(sum(chunk.length for chunk in batch.chunks))
        dummies.done(batch.number, 0.03 * sizes[-1])
    assert {1, 4, 32, 128} <= set(sizes)
    assert max(sizes) * 0.03 < 10.0
    replica = make_replica(slowness=lambda number, stage, regime: 3000.0, measure=True)
    replica.run(60.0)
    assert replica.hello is not None
    assert replica.hellos[0][0] < 30.0
