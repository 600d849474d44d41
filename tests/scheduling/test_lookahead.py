"""Lookahead: batches decided while another runs, with the outcome of batches decided late."""

from __future__ import annotations

import functools
import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch, BatchResult, Sampled
from medha.config import POLICIES, Scheduling
from medha.request import Request
from medha.scheduling.decision_log import RecordingScheduler, replay
from medha.scheduling.scheduler import Scheduler
from medha.testing import Driven, leftovers, request, scheduler, topology

AHEAD = Scheduling(ahead_s=0.01)
GROUP = frozenset({0})


def taken(plan: Scheduler, now: float) -> Batch:
    batch = plan.next_batch(now, GROUP)
    assert batch is not None
    return batch


def tokens(batch: Batch, *finished: int) -> BatchResult:
    yielding = [chunk.seq for chunk in batch.chunks if chunk.yields]
    return BatchResult(tuple(Sampled(seq, seq in finished) for seq in yielding))


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    return [(chunk.seq, chunk.start, chunk.end) for chunk in batch.chunks]


def test_the_next_decode_stands_on_a_token_that_is_still_drawn() -> None:
    plan = scheduler(settings=AHEAD)
    plan.submit(request("a", 50, output_tokens=4), 0.0)
    first = taken(plan, 0.0)
    second = taken(plan, 0.0)
    assert (spans(first), spans(second)) == ([(1, 0, 50)], [(1, 50, 51)])
    assert plan.next_batch(0.0, GROUP) is None, "one batch ahead, no more"
    plan.complete(1, tokens(first), 0.005)
    credit_s = plan._state.running.least_credit(0.005)[0]
    assert credit_s == pytest.approx(2 * 0.03), "of the token behind the one in flight"
    third = taken(plan, 0.005)
    assert spans(third) == [(1, 51, 52)]
    plan.complete(2, tokens(second), 0.0051)
    plan.complete(3, tokens(third), 0.0052)
    (done,) = plan.complete(4, tokens(taken(plan, 0.0052)), 0.0053)
    assert (done.reason, done.output_tokens) == ("length", 4)
    assert leftovers(plan) == {}


def test_an_output_that_ends_by_its_length_has_no_row_too_many() -> None:
    for outputs, most in ((3, 1 << 20), (100, 52)):
        plan = scheduler(settings=AHEAD, max_context_tokens=most)
        driven = Driven(plan)
        driven.submit([request("a", 49, output_tokens=outputs)])
        driven.run()
        assert [spans(batch) for _, batch in driven.batches] == [
            [(1, 0, 49)],
            [(1, 49, 50)],
            [(1, 50, 51)],
        ]
        assert leftovers(plan) == {}


def test_the_row_behind_an_end_is_counted_and_never_taken() -> None:
    plan = scheduler(settings=AHEAD, page_tokens=16)
    plan.submit(request("a", 16, output_tokens=9), 0.0)
    first, surplus = taken(plan, 0.0), taken(plan, 0.0)
    assert surplus.chunks[0].pages, "it takes a page of its own"
    (done,) = plan.complete(1, tokens(first, 1), 0.001)
    assert (done.reason, done.output_tokens) == ("stop", 1)
    assert leftovers(plan)["held pages"] == {0: 2}, "a batch that names them is in flight"
    assert plan.complete(2, tokens(surplus), 0.002) == ()
    assert leftovers(plan) == {}


def test_a_batch_is_decided_no_sooner_than_its_lead() -> None:
    plan = scheduler(settings=AHEAD)
    plan.submit(request("a", 900, output_tokens=4), 0.0)  # 90 ms
    taken(plan, 0.0)
    assert plan.next_batch(0.079, GROUP) is None
    plan.submit(request("b", 30, 0.0795), 0.0795)
    assert spans(taken(plan, 0.0801)) == [(1, 900, 901), (2, 0, 30)]


def test_chunks_of_a_prompt_follow_each_other_without_a_gap() -> None:
    driven = Driven(scheduler(settings=AHEAD))
    driven.submit([request("long", 5000, within_s=9.0)])
    driven.run()
    at, batch = driven.batches[1]
    assert at == pytest.approx(0.0942)
    assert batch.chunks[0].start == 992 and driven.first_s["long"] == pytest.approx(0.5)


def test_batches_that_end_early_do_not_delay_the_decisions_behind_them() -> None:
    plan = scheduler(settings=AHEAD)
    plan.submit(request("long", 50_000, within_s=90.0), 0.0)
    running, begun_s = taken(plan, 0.0), 0.0
    for _ in range(8):
        end_s = begun_s + 0.96 * running.predicted_s
        following = plan.next_batch(end_s - 0.001, GROUP)
        assert following is not None, f"the batch from {begun_s:.3f} s on is predicted to last"
        plan.stage_done(running.number, 0, end_s)
        plan.complete(running.number, BatchResult(()), end_s)
        running, begun_s = following, end_s


def test_nothing_is_decided_ahead_where_a_decode_would_be_left_out() -> None:
    # Two groups hold the sequence: only the one that draws its tokens would know them.
    plan = scheduler(topology(kvp=2, tokens_per_group=64), AHEAD, page_tokens=16)
    plan.submit(request("a", 128, output_tokens=4), 0.0)
    plan.submit(request("b", 8, output_tokens=4), 0.0)
    now, free = 0.0, frozenset({0, 1})
    for _ in range(8):
        batch = plan.next_batch(now, free)
        assert batch is not None
        running = [batch]
        while (more := plan.next_batch(now, free)) is not None:
            assert not set(more.groups) & {g for other in running for g in other.groups}
            running.append(more)
        now += 0.02
        for ending in running:
            plan.complete(ending.number, tokens(ending), now)
        if not plan._state.sequences:
            break
    assert leftovers(plan) == {}


def test_no_decode_goes_ahead_of_one_that_has_no_page() -> None:
    own = msgspec.structs.replace(AHEAD, output_reserve=0.0, finish_fill=1.0)
    plan = scheduler(settings=own, pages=4, page_tokens=16)
    plan.submit(request("full", 32, output_tokens=4), 0.0)
    plan.submit(request("roomy", 20, output_tokens=4), 0.0)
    assert sorted(spans(taken(plan, 0.0))) == [(1, 0, 32), (2, 0, 20)]
    assert plan.next_batch(0.0, GROUP) is None


def test_a_sequence_grows_once_its_token_is_there() -> None:
    plan = scheduler(topology(kvp=2, tokens_per_group=64), AHEAD, pages=2, page_tokens=16)
    plan.submit(request("a", 32, output_tokens=2), 0.0)
    first = taken(plan, 0.0)
    assert plan.next_batch(0.0, frozenset({0, 1})) is None
    assert plan._state.groups.shared == {}
    plan.complete(1, tokens(first), 0.01)
    batch = plan.next_batch(0.01, frozenset({0, 1}))
    assert batch is not None and batch.groups == (0, 1)


def test_a_decode_without_a_page_waits_for_its_token_as_ever() -> None:
    plan = scheduler(settings=AHEAD, pages=2, page_tokens=16)
    plan.submit(request("a", 32, output_tokens=4), 0.0)
    first = taken(plan, 0.0)
    assert plan.next_batch(0.0, GROUP) is None
    plan.complete(1, tokens(first), 0.01)
    assert plan.next_batch(0.01, GROUP) is None
    assert [failure.code for failure in plan.take_failed()] == ["kv_exhausted"]
    assert leftovers(plan) == {}


def test_a_lost_group_takes_both_batches_back() -> None:
    plan = scheduler(settings=AHEAD)
    plan.submit(request("a", 50, output_tokens=4), 0.0)
    taken(plan, 0.0)
    taken(plan, 0.0)
    assert plan.group_lost(0, 2, 0.001) == (1,)
    plan.group_joined(0, 3, 0.5)
    assert spans(taken(plan, 0.5)) == [(1, 0, 50)], "no token of either had come"
    plan.abort("a", 0.51)


def test_generated_pages_are_named_by_what_they_hold() -> None:
    # A page of one token: the newest one is that of a row whose token is not known yet.
    plan = scheduler(settings=AHEAD, page_tokens=1)
    plan.submit(request("a", 2, output_tokens=4), 0.0, [b"0", b"1"])
    running = [taken(plan, 0.0), taken(plan, 0.0)]
    pages = [*running[0].chunks[0].pages, *running[1].chunks[0].pages]
    for number in range(4):
        batch, name = running.pop(0), str(number + 1).encode()
        named = Sampled(1, False, name if number else None)
        plan.complete(batch.number, BatchResult((named,)), 0.001 * number)
        more = plan.next_batch(0.001 * number, GROUP)
        if more is not None:
            running.append(more)
            pages += more.chunks[0].pages
    assert leftovers(plan) == {}
    again = request("b", 5, 1.0, output_tokens=1)
    admitted = plan.submit(again, 1.0, [b"0", b"1", b"2", b"3", b"4"])
    assert admitted.cached_tokens == 4
    (chunk,) = taken(plan, 1.0).chunks
    assert (chunk.start, chunk.end) == (4, 5)
    assert plan.layout(2) == ((0, tuple(enumerate(pages[:4]))),)


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 0.1),  # seconds since the one before
        st.one_of(st.integers(1, 300), st.integers(1, 4000)),  # prompt tokens
        st.integers(1, 30),  # output tokens
        st.sampled_from([0.2, 1.0, 4.0]),  # deadline beyond 1.5 × work
        st.one_of(st.none(), st.integers(1, 12)),  # tokens until it stops
        st.one_of(st.none(), st.floats(0.0, 0.5)),  # when it hangs up, after its arrival
    ),
    min_size=1,
    max_size=20,
)
Arrivals = list[tuple[float, int, int, float, int | None, float | None]]


def hang_up(driven: Driven, name: str) -> None:
    driven.plan.abort(name, driven.now)


def play(plan: Scheduler | RecordingScheduler, arrivals: Arrivals) -> Driven:
    moments = list(itertools.accumulate(arrival[0] for arrival in arrivals))
    stops = {f"r{n}": arrival[4] for n, arrival in enumerate(arrivals)}
    driven = Driven(plan, stops=lambda name, count: count == stops[name])
    for n, (at, (_, prompt, output, extra, _, leaves)) in enumerate(
        zip(moments, arrivals, strict=True)
    ):
        arriving = request(
            f"r{n}", prompt, at, within_s=1.5e-4 * prompt + extra, output_tokens=output, tpot_s=0.05
        )
        driven.submit([arriving])
        if leaves is not None:
            driven.at(at + leaves, functools.partial(hang_up, driven, arriving.id))
    driven.run()
    return driven


@given(ARRIVALS, st.sampled_from(POLICIES), st.sampled_from([120, 400, 5000]), st.booleans())
@settings(max_examples=60)
def test_everything_is_served_and_given_back_whoever_ends_or_leaves(
    arrivals: Arrivals, policy: str, pages: int, kvp: bool
) -> None:
    layout = topology(kvp=2, tokens_per_group=2000) if kvp else topology()
    own = msgspec.structs.replace(AHEAD, policy=policy)
    arrivals = [arrival for arrival in arrivals if arrival[1] < pages * 16]
    plan = scheduler(
        layout, own, pages=pages, page_tokens=16, batch_s=0.002, key_s=1e-9, join=False
    )
    log: list[bytes] = []
    recorded = RecordingScheduler(plan, log.append)
    for group in range(layout.kvp_min):
        recorded.group_joined(group, 1, 0.0)
    driven = play(recorded, arrivals)
    left = {f"r{n}" for n, arrival in enumerate(arrivals) if arrival[5] is not None}
    failed = {failure.request_id for failure in plan.take_failed()}
    assert set(driven.requests) - set(driven.finished) <= left | failed
    for name, done in driven.finished.items():
        served = driven.requests[name]
        stop = arrivals_of(driven, name)
        assert done.output_tokens == min(served.max_output_tokens, stop or 1 << 30)
    assert leftovers(plan) == {}
    assert replay(log) == len(log) - 1
    check_flights(driven)


def arrivals_of(driven: Driven, name: str) -> int | None:
    """Return the number of tokens after which the driver stops it."""
    return next((count for count in range(1, 31) if driven.stops(name, count)), None)


def check_flights(driven: Driven) -> None:
    """Check that at most one batch waits behind another in a group."""
    begun = [at for at, _ in driven.batches]
    assert begun == sorted(begun)
    for number, (_, batch) in enumerate(driven.batches, start=1):
        assert batch.number == number
        assert len({chunk.seq for chunk in batch.chunks}) == len(batch.chunks)


def answered(draw: random.Random) -> list[Request]:
    at, requests = 0.0, []
    for number in range(30):
        at += draw.expovariate(1 / 0.15)
        prompt = draw.randint(1, 1500) if draw.random() > 0.2 else draw.randint(2000, 60_000)
        within_s = 1.5e-4 * prompt + draw.choice([0.2, 0.5, 1.0, 4.0]) + 0.0045
        output = draw.choice([1, 5, 50, 200])
        requests.append(
            request(f"r{number}", prompt, at, within_s=within_s, output_tokens=output, tpot_s=0.05)
        )
    return requests


@pytest.mark.parametrize("kvp", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_with_exact_predictions_no_given_promise_is_broken(kvp: int, seed: int) -> None:
    layout = topology(kvp=kvp, tokens_per_group=20_000 if kvp > 1 else None)
    own = Scheduling(max_batch_s=0.05, ahead_s=0.01)
    plan = scheduler(layout, own, batch_s=0.003, key_s=1e-9)
    driven = Driven(plan)
    driven.submit(answered(random.Random(seed)))
    driven.run()
    promised = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert [name for name in promised if not driven.in_time(name)] == []
    assert set(driven.finished) == set(driven.requests)
    assert leftovers(plan) == {}


@pytest.mark.parametrize("policy", ["fcfs", "edf", "srpf", "lrs", "lars"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_decided_ahead_is_what_would_be_decided_behind(policy: str, seed: int) -> None:
    """All arrive at the start and end as predicted: nothing is learned in between."""
    dice, decisions = random.Random(seed), []
    requests = [
        request(
            f"r{n}",
            dice.randint(1, 3000),
            within_s=30.0,
            output_tokens=dice.randint(1, 40),
            tpot_s=dice.choice([0.02, 0.05]),
        )
        for n in range(12)
    ]
    for ahead_s in (0.0, 0.01):
        own = Scheduling(policy=policy, ahead_s=ahead_s, max_batch_s=0.05)
        driven = Driven(scheduler(settings=own, batch_s=0.003, key_s=1e-9))
        driven.submit(requests)
        driven.run()
        decisions.append([(spans(batch), batch.predicted_s) for _, batch in driven.batches])
    behind, ahead = decisions
    assert [chunks for chunks, _ in ahead] == [chunks for chunks, _ in behind]
    assert [s for _, s in ahead] == pytest.approx([s for _, s in behind])


def test_no_decode_is_skipped_by_a_batch_decided_ahead() -> None:
    driven = Driven(scheduler(settings=AHEAD, batch_s=0.002))
    driven.submit(request(f"d{n}", 40 + n, output_tokens=60, tpot_s=0.03) for n in range(6))
    driven.submit(request(f"p{n}", 700, 0.05 + 0.02 * n, within_s=4.0) for n in range(8))
    driven.run()
    places: dict[int, list[int]] = {}
    for place, (_, batch) in enumerate(driven.batches):
        for chunk in batch.chunks:
            if chunk.decode:
                places.setdefault(chunk.seq, []).append(place)
    assert [len(places[seq]) for seq in range(1, 7)] == [59] * 6
    assert all(own == list(range(own[0], own[0] + 59)) for own in places.values())
