"""KVP groups: overlapping participants, growth, loss, moves, and no deadlock."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator

import pytest

from medha.batch import Batch, BatchResult, Sampled
from medha.config import Scheduling
from medha.errors import Refusal
from medha.scheduling.scheduler import Scheduler
from medha.testing import Driven, leftovers, request, scheduler, topology


def jitter(seed: int) -> Driven:
    """Drive three groups and stages; batches take a third to three times their predicted time.

    Long prompts live in {0,1}, {1,2} and {0,2}, short ones anywhere.
    """
    dice = random.Random(seed)
    layout = topology(spp=3, kvp=3, tokens_per_group=4000)
    plan = scheduler(layout, Scheduling(max_batch_s=0.05), pages=600, key_s=1e-9)
    driven = Driven(plan, seconds=lambda batch, stage: batch.predicted_s * dice.uniform(0.3, 3.0))
    for n in range(90):
        tokens = dice.randint(4500, 7500) if n % 6 == 0 else dice.randint(1, 700)
        driven.submit([request(f"r{n}", tokens, dice.uniform(0, 4), within_s=5.0, output_tokens=6)])
    return driven


@pytest.mark.parametrize("seed", range(4))
def test_overlapping_groups_never_block_each_other_for_ever(seed: int) -> None:
    driven = jitter(seed)
    driven.run()
    assert set(driven.finished) == set(driven.requests)
    assert leftovers(driven.plan) == {}  # type: ignore[arg-type]
    spans = {batch.groups for _, batch in driven.batches if len(batch.groups) > 1}
    assert spans >= {(0, 1), (1, 2)} or spans >= {(0, 2), (1, 2)} or spans >= {(0, 1), (0, 2)}


def test_every_group_runs_its_batches_in_number_order() -> None:
    # Two long ones are planned for {0,1}, {1,2}, {0,2} by hand; batches are acknowledged in any
    # order that the pipeline allows: per group in order, groups against each other at random.
    dice = random.Random(5)
    layout = topology(spp=3, kvp=3, tokens_per_group=1000)
    plan = scheduler(layout, Scheduling(max_batch_s=0.05), pages=600)
    for n, pair in enumerate([(0, 1), (1, 2), (0, 2)] * 2):
        plan.submit(request(f"r{n}", 5000, within_s=60.0, output_tokens=8), 0.0)
        place(plan, f"r{n}", pair)
    queues: dict[int, list[Batch]] = {0: [], 1: [], 2: []}
    stage: dict[int, int] = {}
    done, now, spans = 0, 0.0, set()
    while done < 6:
        now += 0.01
        free = frozenset(
            group for group, batches in queues.items() if all(stage[b.number] > 0 for b in batches)
        )
        batch = plan.next_batch(now, free)
        if batch is not None:
            for group in batch.groups:
                assert not queues[group] or queues[group][-1].number < batch.number
                queues[group].append(batch)
            stage[batch.number] = 0
            spans.add(batch.groups)
            continue
        # A stage of a batch may end when every batch before it, on all its groups, is beyond it.
        movable = [
            batch
            for batch in {b.number: b for batches in queues.values() for b in batches}.values()
            if all(
                stage[other.number] > stage[batch.number]
                for group in batch.groups
                for other in queues[group]
                if other.number < batch.number
            )
        ]
        assert movable, "nothing can run and nothing can end: a deadlock"
        ending = dice.choice(movable)
        plan.stage_done(ending.number, stage[ending.number], now)
        stage[ending.number] += 1
        if stage[ending.number] == 3:
            tokens = tuple(Sampled(c.seq, False) for c in ending.chunks if c.yields)
            done += len(plan.complete(ending.number, BatchResult(tokens), now))
            for group in ending.groups:
                queues[group].remove(ending)
    assert spans >= {(0, 1), (1, 2), (0, 2)}
    for number, batches in queues.items():
        assert batches == [], number
    assert leftovers(plan) == {}


def overlapping(promised: bool) -> tuple[Scheduler, Batch, Batch]:
    """Return a plan, the batch of a prompt that needs both groups next, and one of the other."""
    plan = scheduler(topology(kvp=2, tokens_per_group=900), Scheduling(finish_fill=1.0))
    plan.submit(request("long", 1984, within_s=30.0, promised=promised), 0.0)
    first = plan.next_batch(0.0, frozenset({0, 1}))
    assert first is not None and first.groups == (0,)
    plan.submit(request("busy", 800, 0.05, within_s=0.5), 0.05)
    place(plan, "busy", (1,))
    alone = plan.next_batch(0.05, frozenset({1}))
    assert alone is not None and alone.groups == (1,)
    return plan, first, alone


def test_a_group_that_waits_runs_an_independent_batch_that_fits_the_gap() -> None:
    # Group 1 has begun a batch of 80 ms of its own when the long one wants both groups.
    plan, first, alone = overlapping(promised=False)
    finish(plan, first, 0.096)
    plan.submit(request("rider", 2000, 0.096, within_s=9.0), 0.096)
    gap = plan.next_batch(0.096, frozenset({0}))
    assert gap is not None and gap.groups == (0,)
    assert 0.096 + gap.predicted_s <= 0.05 + alone.predicted_s + 1e-9
    finish(plan, gap, 0.13)
    finish(plan, alone, 0.13)
    shared = plan.next_batch(0.13, frozenset({0, 1}))
    assert shared is not None and shared.groups == (0, 1)


def test_a_group_that_a_promised_prompt_needs_next_is_free_when_its_chunk_ends() -> None:
    plan, first, alone = overlapping(promised=True)
    assert 0.05 + alone.predicted_s <= first.predicted_s + 1e-9
    finish(plan, alone, 0.05 + alone.predicted_s)
    finish(plan, first, first.predicted_s)
    shared = plan.next_batch(first.predicted_s, frozenset({0, 1}))
    assert shared is not None and shared.groups == (0, 1)


def test_a_group_does_not_wait_for_a_prompt_that_gave_way_to_its_own() -> None:
    # Each chunk of the narrow prompt takes longer than a batch of decodes in the other group. The
    # wide one needs both groups, has more slack, and gives way to it whenever both are free.
    settings = Scheduling(max_batch_s=0.05, min_batch_s=0.01)
    plan = scheduler(topology(kvp=2, tokens_per_group=30_000), settings, key_s=1e-7, batch_s=0.015)
    driven = Driven(plan)
    driven.submit([request("wide", 50_000, within_s=1000.0)])
    driven.submit([request("narrow", 20_000, 100.0, within_s=60.0, promised=False)])
    driven.at(100.0, lambda: place(plan, "narrow", (1,)))
    driven.submit([request("talk", 100, 100.0, within_s=9.0, output_tokens=2000, tpot_s=0.05)])
    driven.at(100.0, lambda: place(plan, "talk", (0,)))
    driven.run()
    assert driven.in_time("narrow") and driven.in_time("wide")


def place(plan: Scheduler, name: str, groups: tuple[int, ...]) -> None:
    """Assign those groups to a prompt instead of the scheduler's choice."""
    sequence = plan._state.by_id[name]
    plan._state.queues.dequeue(sequence)
    sequence.assign(groups)
    plan._state.groups.update_shared(sequence)
    plan._state.queues.enqueue(sequence)


def finish(plan: Scheduler, batch: Batch, now: float) -> None:
    plan.stage_done(batch.number, 0, now)
    tokens = tuple(Sampled(chunk.seq, False) for chunk in batch.chunks if chunk.yields)
    plan.complete(batch.number, BatchResult(tokens), now)


# --- growth -------------------------------------------------------------------------------------


def test_a_long_prompt_claims_groups_that_are_still_to_come() -> None:
    plan = scheduler(topology(kvp=1, kvp_max=4, tokens_per_group=6400), pages=100)
    driven = Driven(plan)
    driven.submit([request("long", 20_000, within_s=30.0, promised=True)])
    driven.run(until_s=0.05)
    assert plan.wanted_groups(0.05) == 4
    assert plan.load(0.05).claimable_pages < 300
    for group, when in ((1, 0.3), (2, 0.4), (3, 0.5)):
        driven.at(when, lambda group=group: plan.group_joined(group, group + 1, driven.now))  # type: ignore[misc]
    driven.run()
    assert set(driven.finished) == {"long"}
    last = driven.batches[-1][1]
    assert last.groups == (0, 1, 2, 3) and last.generation == 4
    assert leftovers(plan) == {}
    assert plan.releasable(driven.now + 10.0) == ()
    assert plan.releasable(driven.now + 31.0) == (3, 2, 1)
    assert plan.wanted_groups(driven.now + 31.0) == 1


@pytest.mark.parametrize("cold_start_s", [0.5, 6.0, 20.0])
def test_a_prompt_waits_without_pages_for_the_groups_that_it_needs(cold_start_s: float) -> None:
    """Short prompts find pages meanwhile; it starts when the groups come, or after some time."""
    plan = scheduler(topology(kvp=1, kvp_max=4, tokens_per_group=6400), pages=100)
    driven = Driven(plan)
    short = [request(f"s{n}", 100, 0.1 * n, within_s=1.0) for n in range(100)]
    driven.submit([request("long", 20_000, within_s=60.0), *short])
    for group in (1, 2, 3):
        driven.at(cold_start_s, lambda group=group: plan.group_joined(group, group + 1, driven.now))  # type: ignore[misc]
    driven.run()
    assert not driven.admitted["long"].promised
    assert [s.id for s in short if not driven.in_time(s.id)] == [] and driven.in_time("long")
    assert leftovers(plan) == {}


def test_a_chunk_out_of_step_with_pages_still_ends_where_the_next_group_takes_over() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=1000), page_tokens=64)
    plan.submit(request("long", 4000, within_s=30.0), 0.0)
    long = plan._state.by_id["long"]
    long.scheduled_tokens = 992  # half a page beyond a border, and chunks of one page from here on
    long.add_tokens(0, 992)
    assert [plan._state.groups.overhang(long, length, 0) for length in (32, 64, 96)] == [0, 32, 0]


def test_a_prefill_pauses_until_a_group_comes_and_fails_when_none_does() -> None:
    settings = Scheduling(growth_timeout_s=5.0)
    plan = scheduler(topology(kvp=1, kvp_max=2, tokens_per_group=6400), settings, pages=100)
    driven = Driven(plan)
    long = request("long", 10_000, within_s=30.0, promised=True)
    driven.submit([long, request("b", 10, 1.0, within_s=1.0)])
    driven.at(9.0, lambda: None)
    driven.run()
    # It held its pages until it failed, and others had to wait for them.
    failed = plan.take_failed()
    assert [(failure.request_id, failure.code) for failure in failed] == [
        ("long", "kv_growth_timeout")
    ]
    assert "6400 of 10000" in failed[0].message and "1 of 2 groups" in failed[0].message
    assert driven.first_s["b"] > 9.0
    assert leftovers(plan) == {}


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers() -> None:
    plan = scheduler(topology(kvp=1, kvp_max=2), pages=100)
    with pytest.raises(Refusal, match=r"is 12801 tokens.*at most 12800") as refused:
        plan.submit(request("giant", 12_801), 0.0)
    assert refused.value.code == "context_length_exceeded"
    plan.submit(request("fits", 12_800), 0.0)


# --- loss ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_a_lost_group_takes_nothing_else_along(seed: int) -> None:
    driven = jitter(seed)
    plan = driven.plan
    assert isinstance(plan, Scheduler)
    dice = random.Random(seed)
    moments = sorted(dice.uniform(0.5, 5.0) for _ in range(3))
    generations = itertools.count(2)
    for when in moments:
        group = dice.randrange(3)
        driven.at(when, lambda group=group: plan.group_lost(group, next(generations), driven.now))  # type: ignore[misc]
        driven.at(when + 0.4, functools.partial(come_back, driven, plan, group, generations))
    driven.run()
    assert set(driven.finished) == set(driven.requests)
    assert leftovers(plan) == {}


def come_back(driven: Driven, plan: Scheduler, group: int, generations: Iterator[int]) -> None:
    if group not in plan._state.groups:
        plan.group_joined(group, next(generations), driven.now)


def test_what_other_groups_hold_is_found_again_by_hash() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=900))
    names = [bytes([n] * 16) for n in range(46)]
    driven = Driven(plan)
    driven.submit([request("long", 2976, within_s=30.0, output_tokens=90_000)], hashes=names)
    driven.run(until_s=0.35)
    seq = driven.admitted["long"].seq
    assert plan.group_lost(1, 2, driven.now) == (seq,)
    plan.group_joined(1, 3, driven.now)
    batch = plan.next_batch(driven.now, frozenset({0, 1}))
    assert batch is not None and batch.ended == (seq,)
    # Group 0 holds a chunk that ended at a page border for the next group: 15 pages.
    assert batch.chunks[0].start == 15 * 64
    assert plan.layout(seq) == ((0, tuple((n, n) for n in range(15))),)


def test_shared_work_waits_for_new_columns_after_a_loss() -> None:
    plan = scheduler(topology(kvp=3, tokens_per_group=900))
    driven = Driven(plan)
    driven.submit([request("long", 1700, within_s=30.0, output_tokens=9)])
    driven.run(until_s=0.05)
    lost = next(group for group in (2, 1) if group not in plan._state.by_id["long"].assigned_groups)
    plan.group_lost(lost, 1, driven.now)
    driven.run(until_s=1.0)
    assert all(len(batch.groups) == 1 for _, batch in driven.batches)
    driven.at(1.5, lambda: plan.regenerated(2, 1.5))
    driven.run()
    shared = [batch for _, batch in driven.batches if len(batch.groups) > 1]
    assert shared and all(batch.generation == 2 for batch in shared)
    assert set(driven.finished) == {"long"}


# --- moves --------------------------------------------------------------------------------------


def test_pages_move_to_the_smaller_shard_and_switch_with_a_batch() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=4000), key_s=1e-7)
    driven = Driven(plan)
    driven.submit([request("long", 4600, within_s=30.0, output_tokens=50_000, tpot_s=1.0)])
    driven.run(until_s=1.8)
    sequence = plan._state.by_id["long"]
    before = dict(sequence.tokens_by_group)
    (move,) = plan.plan_moves(driven.now)
    assert (move.source, move.target) == (0, 1) and before[0] > before[1]
    assert len(move.logical) == len(move.from_pages) == len(move.to_pages) > 1
    free = plan.load(driven.now).free_pages
    plan.moved(move.id, True, driven.now)
    count = len(driven.batches)
    driven.run(until_s=driven.now + 0.1)
    switched = [batch for _, batch in driven.batches[count:] if batch.switches]
    assert [batch.switches for batch in switched] == [(move.id,)]
    assert sequence.tokens_by_group[0] < before[0] - 64 * len(move.logical) + 128
    layout = dict(plan.layout(move.seq))
    assert set(zip(move.logical, move.to_pages, strict=True)) <= set(layout[1])
    assert plan.load(driven.now).free_pages[0] >= free[0] + len(move.logical) - 2
    plan.abort("long", driven.now)
    driven.run()
    assert leftovers(plan) == {}


@pytest.mark.parametrize("ok", [True, False])
def test_a_move_whose_sequence_leaves_gives_its_pages_back(ok: bool) -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=4000), key_s=1e-7)
    driven = Driven(plan)
    driven.submit([request("long", 4600, within_s=30.0, output_tokens=50_000, tpot_s=1.0)])
    driven.run(until_s=1.8)
    (move,) = plan.plan_moves(driven.now)
    plan.abort("long", driven.now)
    driven.run()
    # The copy still reads the source's pages: nothing comes back before it has ended.
    assert plan.load(driven.now).free_pages[0] < 10_000
    plan.moved(move.id, ok, driven.now)
    assert leftovers(plan) == {}


def test_a_failed_copy_changes_nothing() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=4000), key_s=1e-7)
    driven = Driven(plan)
    driven.submit([request("long", 4600, within_s=30.0, output_tokens=50_000, tpot_s=1.0)])
    driven.run(until_s=1.8)
    layout = plan.layout(driven.admitted["long"].seq)
    (move,) = plan.plan_moves(driven.now)
    plan.moved(move.id, False, driven.now)
    assert plan.layout(driven.admitted["long"].seq) == layout
    plan.abort("long", driven.now)
    driven.run()
    assert leftovers(plan) == {}


def test_pages_that_are_only_reserved_in_a_lost_group_go_with_it() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=2000), pages=100)
    plan.submit(request("long", 3000, within_s=9.0, promised=True), 0.0)
    sequence = plan._state.by_id["long"]
    gone = sequence.assigned_groups[1]
    # As if a growth claim had moved there: pages are reserved in a group that is not assigned.
    sequence.assign(sequence.assigned_groups[:1])
    assert sequence.reserved[gone] > 0
    plan.group_lost(gone, 2, 0.0)
    assert gone not in sequence.reserved
    plan.group_joined(gone, 3, 0.0)
    assert plan.next_batch(0.0, frozenset({0, 1})) is not None


def test_a_promise_goes_to_the_group_where_it_breaks_none() -> None:
    """The first group has nothing due sooner, but a later promise that only just fits."""
    layout = topology(kvp=2, tokens_per_group=400_000)
    plan = scheduler(layout, Scheduling(max_batch_s=0.05))
    idle_s = plan.predictor.prefill_s(100_000)
    just_s = plan._promises.full_cost_s(idle_s) * 1.001
    plan.submit(request("tight", 100_000, within_s=just_s, promised=True), 0.0)
    plan.submit(request("soon", 2000, within_s=0.3, promised=True), 0.0)
    by_id = plan._state.by_id
    assert [by_id[name].assigned_groups for name in ("tight", "soon")] == [(0,), (1,)]
    margins = plan.load(0.0).margins
    assert margins[0][0][1] < 0.05 < margins[1][0][1]
    plan.submit(request("next", 500, within_s=0.35, promised=True), 0.0)
    assert by_id["next"].assigned_groups == (1,)


def test_margins_are_one_list_while_a_promise_spans_groups() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=4000), Scheduling(max_batch_s=0.05))
    plan.submit(request("alone", 1000, within_s=9.0, promised=True), 0.0)
    assert sorted(map(len, plan.load(0.0).margins)) == [0, 1]
    plan.submit(request("spans", 6000, within_s=8.0, promised=True), 0.0)
    (least,) = plan.load(0.0).margins
    assert len(least) == 2 and len(plan.load(0.0).lead_s) == 1
    plan.abort("spans", 0.0)
    assert len(plan.load(0.0).margins) == 2


def test_relegated_work_sends_no_prompt_to_a_group_where_it_waits() -> None:
    #   g0  |-- kept, 2 s --|                 g1  |------------- relegated, 15 s -------------|
    layout = topology(kvp=2, tokens_per_group=400_000)
    plan = scheduler(layout, Scheduling(max_batch_s=0.05))
    plan.submit(request("late", 150_000, within_s=1.0, promised=False), 0.0)
    plan.submit(request("kept", 20_000, within_s=9.0, promised=False), 0.0)
    plan.submit(request("next", 20_000, within_s=10.0, promised=False), 0.0)
    by_id = plan._state.by_id
    assert [by_id[name].kept for name in ("late", "kept", "next")] == [False, True, True]
    (late,), (kept,) = by_id["late"].assigned_groups, by_id["kept"].assigned_groups
    assert late != kept and by_id["next"].assigned_groups == (late,)


def test_a_promise_goes_to_the_group_that_has_pages_for_it() -> None:
    layout = topology(kvp=2, tokens_per_group=400_000)
    plan = scheduler(layout, Scheduling(max_batch_s=0.05), pages=100)
    size = plan.page_tokens
    plan.submit(request("large", 95 * size, within_s=900.0, promised=True), 0.0)
    plan.submit(request("soon", 20 * size, within_s=2.0, promised=True), 0.0)
    (large,), (soon,) = (plan._state.by_id[name].assigned_groups for name in ("large", "soon"))
    plan.submit(request("next", 20 * size, within_s=2.5, promised=True), 0.0)
    assert large != soon and plan._state.by_id["next"].assigned_groups == (soon,)


@pytest.mark.parametrize("reserved, reused", [(60, True), (75, False)])
def test_a_promise_goes_to_its_cached_pages_if_no_other_prompt_has_reserved_them(
    reserved: int, reused: bool
) -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=400_000), pages=100)
    size, names = plan.page_tokens, [bytes([n] * 16) for n in range(30)]
    driven = Driven(plan)
    driven.submit([request("first", 30 * size)], hashes=names)
    driven.run()
    large = request("large", reserved * size, driven.now, within_s=900.0, promised=True)
    plan.submit(large, driven.now)
    turn = request("turn", 31 * size, driven.now, promised=True)
    assert plan.submit(turn, driven.now, names).cached_tokens == (30 * size if reused else 0)
    assert plan._state.by_id["turn"].started
