"""Five batches drawn by hand: what goes in, in which order, and why.

A prompt token costs 0.1 ms, so a budget of 100 ms holds 1,000 tokens: 992 in steps of 16.
"""

from __future__ import annotations

import pytest

from medha.batch import Batch, BatchResult, Chunk, Sampled
from medha.config import Scheduling
from medha.scheduling.scheduler import Scheduler
from medha.testing import request, scheduler, topology

G0 = frozenset({0})


def shown(batch: Batch | None) -> list[str]:
    """`seq:start+length`, `!` where the chunk yields a token, `d` in front of a decode."""
    assert batch is not None
    return [
        f"{'d' if c.decode else ''}{c.seq}:{c.start}+{c.length}{'!' if c.yields else ''}"
        for c in batch.chunks
    ]


def step(plan: Scheduler, now: float, *free: int) -> tuple[Batch, list[str]]:
    batch = plan.next_batch(now, frozenset(free or (0,)))
    assert batch is not None
    return batch, shown(batch)


def finish(plan: Scheduler, batch: Batch, now: float) -> None:
    plan.stage_done(batch.number, 0, now)
    tokens = tuple(Sampled(chunk.seq, False) for chunk in batch.chunks if chunk.yields)
    plan.complete(batch.number, BatchResult(tokens), now)


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    plan = scheduler()
    plan.submit(request("a", 2500, within_s=5.0), 0.0)
    first, drawn = step(plan, 0.0)
    assert drawn == ["1:0+992"]
    assert first.chunks[0].pages == tuple(range(16))  # 992 tokens in pages of 64
    finish(plan, first, 0.1)
    second, drawn = step(plan, 0.1)
    assert drawn == ["1:992+992"]
    # The first page of the chunk is logical page ceil(992 / 64) = 16: the 16th is filled up first.
    assert second.chunks[0].pages == tuple(range(16, 31))
    finish(plan, second, 0.2)
    # The last chunk is exact, whatever the step.
    assert step(plan, 0.2)[1] == ["1:1984+516!"]


def test_short_prompts_ride_along_and_the_long_one_takes_what_is_left() -> None:
    plan = scheduler(settings=Scheduling(finish_fill=1.0))
    plan.submit(request("long", 100_000, within_s=30.0), 0.0)
    plan.submit(request("b", 200, within_s=2.0), 0.0)
    plan.submit(request("c", 100, within_s=2.0), 0.0)
    # Shortest first; the long one gets 700 tokens' worth, in steps of 16.
    assert step(plan, 0.0)[1] == ["3:0+100!", "2:0+200!", "1:0+688"]


def test_a_batch_in_which_a_prompt_ends_is_filled_to_a_half() -> None:
    plan = scheduler(settings=Scheduling(finish_fill=0.5))
    plan.submit(request("long", 100_000, within_s=30.0), 0.0)
    plan.submit(request("b", 200, within_s=2.0), 0.0)
    # 50 ms hold 500 tokens: 200, and 288 of the 300 that are left.
    assert step(plan, 0.0)[1] == ["2:0+200!", "1:0+288"]


def test_a_batch_is_filled_whole_while_a_prompt_is_relegated() -> None:
    plan = scheduler(settings=Scheduling(finish_fill=0.5))
    plan.submit(request("late", 100_000, within_s=1.0), 0.0)
    plan.submit(request("b", 200, within_s=2.0), 0.0)
    assert step(plan, 0.0)[1] == ["2:0+200!", "1:0+784"]


def test_decodes_come_first_and_their_tpot_sets_the_budget() -> None:
    plan = scheduler()
    plan.submit(request("talk", 64, within_s=1.0, output_tokens=9, tpot_s=0.03), 0.0)
    first, drawn = step(plan, 0.0)
    assert drawn == ["1:0+64!"]
    finish(plan, first, 0.0064)
    plan.submit(request("long", 100_000, 0.0064, within_s=30.0), 0.0064)
    # The next token is due 30 ms after the first; 95 % are spent: 28.5 ms, 285 tokens, 1 of
    # them the decode's. The decode's token opens a page.
    second, drawn = step(plan, 0.0064)
    assert drawn == ["d1:64+1!", "2:0+272"]
    assert len(second.chunks[0].pages) == 1
    finish(plan, second, 0.0064 + second.predicted_s)
    third, drawn = step(plan, 0.0064 + second.predicted_s)
    # It ran 2.7 ms ahead: now the target itself bounds the batch, 30 ms. Its page has room.
    assert drawn == ["d1:65+1!", "2:272+288"] and third.chunks[0].pages == ()


@pytest.mark.parametrize(
    ("outputs", "prefill"),
    [(100, "2:0+256"), (9, "2:0+256"), (4, "2:0+192"), (2, "2:0+144")],
)
def test_a_late_decode_is_on_time_again_within_the_tokens_that_it_has_left(
    outputs: int, prefill: str
) -> None:
    plan = scheduler()
    plan.submit(request("talk", 64, within_s=1.0, output_tokens=outputs, tpot_s=0.03), 0.0)
    first, _ = step(plan, 0.0)
    finish(plan, first, 0.0064)
    plan.submit(request("long", 100_000, 0.0064, within_s=30.0), 0.0224)
    # 16 ms late: 2 of each of eight tokens, 2.3 of seven, 8 of two, or half of the TPOT of the
    # last one; 95 % of 28, 27.7, 22 and 14 ms, at least 15 ms.
    assert step(plan, 0.0224)[1] == ["d1:64+1!", prefill]


def test_stage_0_takes_the_next_chunk_while_the_first_is_under_way() -> None:
    plan = scheduler(topology(spp=2))
    plan.submit(request("long", 10_000, within_s=30.0), 0.0)
    # A stage has half of the layers, so that twice the tokens fit its 100 ms.
    first, drawn = step(plan, 0.0)
    assert drawn == ["1:0+2000"]
    # Not before the chunk left stage 0, and never more than two batches in flight.
    assert plan.next_batch(0.05, G0) is None
    plan.stage_done(first.number, 0, 0.1)
    second, drawn = step(plan, 0.1)
    assert drawn == ["1:2000+2000"]
    plan.stage_done(second.number, 0, 0.2)
    assert plan.next_batch(0.2, G0) is None
    plan.complete(first.number, BatchResult(), 0.2)
    assert step(plan, 0.2)[1] == ["1:4000+2000"]


def test_decodes_are_spread_over_the_batches_in_flight() -> None:
    plan = scheduler(topology(spp=2), Scheduling(finish_fill=1.0))
    for name in "abcd":
        plan.submit(request(name, 64, within_s=1.0, output_tokens=9), 0.0)
    first, _ = step(plan, 0.0)
    plan.stage_done(first.number, 0, 0.02)
    finish(plan, first, 0.04)
    second, drawn = step(plan, 0.04)
    assert drawn == ["d1:64+1!", "d2:64+1!"]
    plan.stage_done(second.number, 0, 0.05)
    assert step(plan, 0.05)[1] == ["d3:64+1!", "d4:64+1!"]


def test_a_long_prompt_grows_into_the_next_group() -> None:
    #          0        992      1984     2976        tokens_per_group 1500
    #   g0     |--------|--------|                    holds 1984: a chunk is never split
    #   g1                       |--------|           tail from there on, attends with g0
    plan = scheduler(topology(kvp=2, tokens_per_group=1500), pages=100)
    plan.submit(request("long", 5000, within_s=30.0), 0.0)
    for turn, start in enumerate((0, 992)):
        batch, _ = step(plan, turn / 10, 0, 1)
        assert batch.chunks == (Chunk(1, start, 992, (0,), 0, batch.chunks[0].pages, False, False),)
        finish(plan, batch, turn / 10 + 0.1)
    third, drawn = step(plan, 0.2, 0, 1)
    assert drawn == ["1:1984+992"]
    assert (third.chunks[0].groups, third.chunks[0].tail) == ((0, 1), 1)
    assert third.chunks[0].pages == tuple(range(16))
    # A group that joins with this batch receives its layout of the sequence: nothing yet.
    assert plan.layout(1) == ((0, tuple((n, n) for n in range(31))),)


@pytest.mark.parametrize(
    "settings, drawn",
    [
        (Scheduling(policy="fcfs", finish_fill=1.0), ["1:0+992"]),
        (Scheduling(policy="fcfs", budget="tokens", batch_tokens=512), ["1:0+512"]),
        (
            Scheduling(policy="fcfs", finish_fill=1.0, long_prefill_threshold_tokens=256),
            ["1:0+256", "2:0+100!"],
        ),
        (Scheduling(policy="srpf", finish_fill=1.0), ["2:0+100!", "1:0+896"]),
        # ρ of the long one is 1: it yields the most, 0.4; what others do not use returns to it.
        (Scheduling(policy="lars-paper", finish_fill=1.0), ["2:0+100!", "1:0+896"]),
    ],
    ids=["fcfs", "sarathi-512", "vllm-threshold", "srpf", "lars-paper"],
)
def test_other_policies_pack_the_same_two_prompts_their_way(
    settings: Scheduling, drawn: list[str]
) -> None:
    plan = scheduler(settings=settings)
    plan.submit(request("long", 50_000, within_s=10.0), 0.0)
    plan.submit(request("short", 100, within_s=2.0), 0.0)
    assert step(plan, 0.0)[1] == drawn
