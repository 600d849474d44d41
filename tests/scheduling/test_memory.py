"""Lack of pages: waiting, preemption, and the prefix cache."""

from __future__ import annotations

import pytest

from medha.batch import BatchResult, Sampled
from medha.config import Scheduling
from medha.testing import Driven, leftovers, request, scheduler, topology

G0 = frozenset({0})


def test_a_prompt_that_does_not_fit_is_passed_over_for_smaller_ones() -> None:
    plan = scheduler(settings=Scheduling(policy="fcfs", finish_fill=1.0), pages=20)
    plan.submit(request("holder", 640, output_tokens=500, within_s=1.0), 0.0)
    plan.submit(request("middle", 1200, within_s=1.0), 0.0)
    plan.submit(request("small", 64, within_s=1.0), 0.0)
    batch = plan.next_batch(0.0, G0)
    assert batch is not None
    assert [chunk.seq for chunk in batch.chunks] == [1, 3]


@pytest.mark.parametrize("promised", [False, None])
def test_who_was_passed_over_for_long_is_waited_for(promised: bool | None) -> None:
    # Small prompts of 9 pages keep coming and would for ever leave too little for the big one.
    plan = scheduler(settings=Scheduling(growth_timeout_s=8.0), pages=20)
    driven = Driven(plan, seconds=lambda batch, stage: 0.02)
    driven.submit(
        request(f"s{n}", 512, 0.1 * n, within_s=9.0, output_tokens=20, promised=promised)
        for n in range(60)
    )
    driven.submit([request("big", 1200, 0.5, within_s=9.0)])
    driven.run()
    # It is passed over for a second (an eighth of the timeout), then the next pages are its.
    assert 1.5 < driven.first_s["big"] < 2.6
    assert set(driven.finished) == set(driven.requests)
    assert leftovers(plan) == {}


def test_a_large_late_prompt_frees_its_pages_for_small_ones() -> None:
    # It takes 938 of 1000 pages for a deadline that it cannot meet; a small prompt takes 31.
    plan = scheduler(pages=1000)
    driven = Driven(plan)
    driven.submit([request("large", 60_000, within_s=1.0)])
    small = [
        request(f"small{n}", 2_000, 0.05, within_s=1.5, output_tokens=200, tpot_s=0.05)
        for n in range(4)
    ]
    driven.submit(small)
    driven.run()
    assert [prompt.id for prompt in small if not driven.in_time(prompt.id)] == []
    assert "large" in driven.first_s
    assert leftovers(plan) == {}


def test_a_late_prompt_with_more_done_than_a_small_one_has_keeps_its_pages() -> None:
    plan = scheduler(pages=1000)
    driven = Driven(plan)
    driven.submit([request("large", 60_000, within_s=1.0)])
    small = [
        request(f"small{n}", 2_000, 0.5, within_s=1.5, output_tokens=200, tpot_s=0.05)
        for n in range(4)
    ]
    driven.submit(small)
    driven.run()
    assert driven.finished.keys() == {"large", *(prompt.id for prompt in small)}
    assert plan._lifecycle.preempted_count == 0


def test_a_growing_decode_takes_the_pages_of_the_prefill_with_most_slack() -> None:
    plan = scheduler(settings=Scheduling(output_reserve=0.0), pages=12)
    first = plan.submit(request("talk", 64, within_s=1.0, output_tokens=200, tpot_s=0.01), 0.0)
    batch = plan.next_batch(0.0, G0)
    assert batch is not None
    plan.complete(batch.number, BatchResult((Sampled(first.seq, False),)), 0.01)
    relaxed = plan.submit(request("relaxed", 640, 0.01, within_s=60.0), 0.01)
    now, preempted = 0.01, False
    for _ in range(200):
        batch = plan.next_batch(now, G0)
        if batch is None:
            break
        preempted = preempted or relaxed.seq in batch.ended
        now += batch.predicted_s
        tokens = tuple(Sampled(chunk.seq, False) for chunk in batch.chunks if chunk.yields)
        plan.complete(batch.number, BatchResult(tokens), now)
    assert plan.take_failed() == ()
    assert leftovers(plan) == {}


def test_decodes_that_outgrow_memory_are_recomputed_and_all_finish() -> None:
    # Six sequences of up to 8 pages each in 20 pages, nothing reserved for output.
    plan = scheduler(settings=Scheduling(output_reserve=0.0), pages=20)
    driven = Driven(plan)
    driven.submit(
        request(f"r{n}", 128, 0.001 * n, within_s=1.0, output_tokens=380) for n in range(6)
    )
    driven.run()
    assert set(driven.finished) == set(driven.requests)
    assert all(batch.output_tokens == 380 for batch in driven.finished.values())
    assert plan._lifecycle.preempted_count > 0
    assert leftovers(plan) == {}


def test_a_sequence_that_outgrows_the_whole_replica_fails_with_both_numbers() -> None:
    plan = scheduler(settings=Scheduling(output_reserve=0.0), pages=4)
    driven = Driven(plan)
    driven.submit([request("endless", 128, within_s=1.0, output_tokens=1000)])
    driven.run()
    (failed,) = plan.take_failed()
    assert (failed.request_id, failed.code) == ("endless", "kv_exhausted")
    assert "holds 256 tokens" in failed.message
    assert leftovers(plan) == {}


def test_a_prompt_that_leaves_no_room_for_its_reserve_is_served_and_bars_nobody() -> None:
    # 20 pages hold the prompt, not the share of its output that would be reserved.
    plan = scheduler(settings=Scheduling(growth_timeout_s=8.0), pages=20)
    driven = Driven(plan)
    driven.submit([request("full", 1250, within_s=9.0, output_tokens=1000)])
    driven.submit(request(f"s{n}", 512, 0.3 * n, within_s=9.0, output_tokens=20) for n in range(20))
    driven.run()
    # It gets its pages, and fails where no replica of this size could go on.
    assert "full" in driven.first_s
    assert [failure.code for failure in plan.take_failed()] == ["kv_exhausted"]
    assert set(driven.finished) == set(driven.requests) - {"full"}
    assert leftovers(plan) == {}


def test_a_second_prompt_finds_the_first_ones_pages() -> None:
    plan = scheduler(pages=100)
    names = [bytes([n] * 16) for n in range(10)]
    driven = Driven(plan)
    driven.submit([request("first", 640)], hashes=names)
    driven.run()
    assert plan.take_kv_events() == ([(0, name) for name in names], [])
    # All ten pages are cached, but the last token is always recomputed: nine count.
    again = plan.submit(request("again", 640, 1.0), 1.0, names)
    assert again.cached_tokens == 576
    batch = plan.next_batch(1.0, G0)
    assert batch is not None and (batch.chunks[0].start, batch.chunks[0].length) == (576, 64)
    assert plan.layout(again.seq) == ((0, tuple((n, n) for n in range(9))),)


def test_generated_text_is_found_by_the_next_turn() -> None:
    plan = scheduler(pages=100)
    turn = plan.submit(request("turn", 60, output_tokens=8), 0.0, ())
    now = 0.0
    for count in range(8):
        batch = plan.next_batch(now, G0)
        assert batch is not None
        now += 0.01
        # The fifth token (position 64) is sampled when positions 0..63 are held: page 0 is full.
        name = b"p" * 16 if batch.chunks[0].end == 64 else None
        plan.complete(batch.number, BatchResult((Sampled(turn.seq, count == 7, name),)), now)
    assert plan.take_kv_events() == ([(0, b"p" * 16)], [])
    assert plan.submit(request("next", 100, now), now, [b"p" * 16]).cached_tokens == 64


def test_without_the_prefix_cache_nothing_is_named() -> None:
    plan = scheduler(settings=Scheduling(prefix_cache=False))
    driven = Driven(plan)
    driven.submit([request("first", 640)], hashes=[bytes([n] * 16) for n in range(10)])
    driven.run()
    assert plan.take_kv_events() == ([], [])


def test_no_more_than_max_running_sequences_have_pages() -> None:
    plan = scheduler(settings=Scheduling(max_running=2, finish_fill=1.0))
    for name in "abc":
        plan.submit(request(name, 64, output_tokens=5), 0.0)
    batch = plan.next_batch(0.0, G0)
    assert batch is not None and len(batch.chunks) == 2
    assert plan.load(0.0).waiting == 1


def test_prompts_that_find_no_pages_are_not_tried_one_by_one() -> None:
    # Each of the 200 would fit alone; with the holder's output there is room for one.
    plan = scheduler(settings=Scheduling(policy="fcfs", finish_fill=1.0), pages=320)
    plan.submit(request("holder", 64, within_s=9.0, output_tokens=76_800), 0.0)
    for n in range(200):
        plan.submit(request(f"r{n}", 11 * 64, within_s=9.0), 0.0)
    tried = plan._admission.tried
    assert plan.next_batch(0.0, G0) is not None
    assert plan._admission.started_count >= 1
    assert plan._admission.tried - tried <= 4


@pytest.mark.parametrize(
    ("before", "pages", "group"), [(2_500, 10_000, 0), (20_000, 10_000, 1), (2_500, 104, 1)]
)
def test_a_prompt_leaves_its_cached_pages_only_for_a_group_that_ends_it_sooner(
    before: int, pages: int, group: int
) -> None:
    plan = scheduler(topology(kvp=2), Scheduling(policy="fcfs"), pages=pages)
    names = [n.to_bytes(16) for n in range(64)]
    driven = Driven(plan)
    driven.submit([request("history", 4_096, promised=False)], names)
    driven.submit([request("first", 4_096 + before, 1.0, promised=False, within_s=8.0)], names)
    driven.submit([request("other", min(60_000, 60 * pages), 1.0, promised=False, within_s=20.0)])
    driven.submit([request("turn", 4_200, 1.01, promised=False, within_s=9.0)], names)
    driven.at(1.02, lambda: plan.abort("other", 1.02))  # its group becomes idle
    driven.run()
    assert driven.admitted["turn"].cached_tokens == 4_096
    seq = driven.admitted["turn"].seq
    chunks = [chunk for _, batch in driven.batches for chunk in batch.chunks if chunk.seq == seq]
    assert (chunks[0].start, chunks[0].groups) == (0 if group else 4_096, (group,))
    assert leftovers(plan) == {}
