"""Windows in every layer: a sequence keeps what a later token sees, and gives the rest back."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.errors import Refusal
from medha.fleet.prefix_index import PrefixIndex
from medha.messages import KvEvents
from medha.model import CHUNK_TOKENS, KeptPages
from medha.scheduling.block_pool import BlockPool
from medha.scheduling.running import DecodeGroup
from medha.scheduling.scheduler import Scheduler
from medha.scheduling.sequence import Sequence
from medha.testing import Driven, leftovers, request, scheduler, shape, topology

PAGE = 16
WINDOWS = st.sampled_from([1, 2, 15, 16, 17, 100, 1000])

# --- which pages are kept -------------------------------------------------------------------------


@given(WINDOWS, st.integers(1, 40), st.integers(0, 3000))
def test_a_page_is_dropped_once_no_later_token_sees_a_token_of_it(
    window: int, page_tokens: int, position: int
) -> None:
    kept = KeptPages(window, page_tokens)
    first_seen = max(0, position - window + 1)
    if window == 1 and position:
        first_seen = position - 1  # the newest page is always held
    assert kept.first_page(position) == first_seen // page_tokens
    assert KeptPages(0, page_tokens).first_page(position) == 0


@given(WINDOWS, st.integers(1, 40), st.integers(1, 5000))
def test_the_least_pages_hold_a_window_and_the_next_token_anywhere(
    window: int, page_tokens: int, tokens: int
) -> None:
    kept = KeptPages(window, page_tokens)
    most = max(
        position // page_tokens - kept.first_page(position) + 1 for position in range(tokens)
    )
    assert most <= kept.least(tokens) <= min(most + 2, -(-tokens // page_tokens))
    assert kept.least(tokens) <= kept.pages(tokens) <= -(-tokens // page_tokens)


@given(WINDOWS, st.integers(1, 20), st.lists(st.booleans(), max_size=200))
def test_the_longest_hit_is_that_of_a_search_from_the_end(
    window: int, page_tokens: int, held: list[bool]
) -> None:
    for kept in (KeptPages(window, page_tokens), KeptPages(0, page_tokens)):
        slow = next(
            pages
            for pages in range(len(held), -1, -1)
            if all(held[kept.first_page(pages * page_tokens) : pages])
        )
        assert kept.longest_hit(len(held), held.__getitem__) == slow


def test_a_search_without_a_hit_looks_at_one_page_of_each_window() -> None:
    looks: list[int] = []

    def holds(page: int) -> bool:
        looks.append(page)
        return False

    assert KeptPages(4096, 64).longest_hit(16_000, holds) == 0
    assert len(looks) <= 16_000 * 64 / 4096 + 1


# --- sequences ------------------------------------------------------------------------------------


def make(window: int, pages: int, *, spp: int = 1, kvp: int = 1, **fields: float) -> Scheduler:
    return scheduler(
        topology(spp=spp, kvp=kvp, tokens_per_group=500),
        Scheduling(**fields),  # type: ignore[arg-type]
        pages=pages,
        page_tokens=PAGE,
        window_tokens=window,
        batch_s=1e-3,
    )


def first_to_compute(sequence: Sequence) -> int:
    """Return the position of the first token that some stage has not computed yet."""
    if sequence.decoding and sequence.output_tokens:
        return sequence.prompt_tokens + sequence.output_tokens - 1
    return sequence.computed_tokens


class Watched(Driven):
    """Checks every sequence and every page after each event."""

    def __init__(self, plan: Scheduler) -> None:
        super().__init__(plan)
        self.scheduler = plan
        self.most_held = 0

    def _decide(self) -> None:
        super()._decide()
        state = self.scheduler._state
        kept, slides = state.pool.kept, state.pool.slides
        for pages in state.pool.groups.values():
            pages.check()
        holders: dict[tuple[int, int], int] = {}
        for sequence in state.sequences.values():
            held = [
                (group, page)
                for group, page in zip(sequence.group_of, sequence.page_of, strict=True)
                if page >= 0
            ]
            for place in held:
                holders[place] = holders.get(place, 0) + 1
            if not sequence.started or sequence.stopped or not slides:
                continue
            self.most_held = max(self.most_held, len(held))
            assert len(sequence.assigned_groups) == 1
            assert {group for group, _ in self.scheduler.layout(sequence.number)} <= {0, 1}
            position = first_to_compute(sequence)
            needed = range(kept.first_page(position), len(sequence.page_of))
            assert all(sequence.page_of[logical] >= 0 for logical in needed), "a page is missing"
            away = sequence.scheduled_tokens - position
            assert len(held) <= math.ceil((kept.window_tokens + away) / PAGE) + 2
            assert sum(sequence.tokens_by_group.values()) == (
                sequence.scheduled_tokens - sequence.first_page * PAGE
            )
        for (group, page), count in holders.items():
            assert state.pool[group].references(page) == count


ARRIVALS = st.lists(
    st.tuples(
        st.floats(0.0, 0.4),  # seconds since the one before
        st.one_of(st.integers(1, 300), st.integers(1, 12_000)),  # prompt tokens
        st.integers(1, 90),  # output tokens
        st.integers(0, 2),  # text
        st.booleans(),  # the client leaves
    ),
    min_size=1,
    max_size=16,
)


@given(
    ARRIVALS,
    WINDOWS,
    st.sampled_from([(1, 1, 0.0), (1, 1, 0.01), (1, 3, 0.0), (2, 1, 0.01), (2, 2, 0.0)]),
    st.sampled_from([0, 30, 400]),
)
@settings(max_examples=80, deadline=None)
def test_no_page_in_sight_is_dropped_and_all_return(
    arrivals: list[tuple[float, int, int, int, bool]],
    window: int,
    layout: tuple[int, int, float],
    more: int,
) -> None:
    """In pools from just one window to several; preemptions, hits and aborts among it."""
    kvp, spp, ahead_s = layout
    pages = KeptPages(window, PAGE).least(1 << 20) + more
    plan = make(window, pages, spp=spp, kvp=kvp, ahead_s=ahead_s)
    driven = Watched(plan)
    moments = itertools.accumulate(gap for gap, *_ in arrivals)
    stay = []
    for n, (at, (_, tokens, output, text, leaves)) in enumerate(
        zip(moments, arrivals, strict=True)
    ):
        arriving = request(f"r{n}", tokens, at, output_tokens=output, tpot_s=0.05)
        driven.submit([arriving], [f"{text}-{page}".encode() for page in range(tokens // PAGE)])
        if leaves:
            driven.at(at + 0.05, lambda n=n: plan.abort(f"r{n}", driven.now))  # type: ignore[misc]
        else:
            stay.append(f"r{n}")
    driven.run()
    assert set(stay) <= set(driven.finished)
    assert plan._lifecycle.take_failed() == ()
    assert leftovers(plan) == {}


def test_a_long_prompt_needs_a_window_a_chunk_and_a_page() -> None:
    plan = make(4096, 10_000)
    driven = Watched(plan)
    driven.submit([request("long", 100_000, output_tokens=2000, tpot_s=0.05)])
    driven.run(0.001)
    pool = plan._state.pool[0]
    assert pool.total - pool.available <= (4096 + CHUNK_TOKENS) / PAGE + 1
    driven.run()
    assert driven.finished["long"].output_tokens == 2000
    assert leftovers(plan) == {}


def test_a_full_pool_still_computes_chunks_of_the_reserved_size() -> None:
    """Other prompts hold the rest, and what it drops stays reserved for it."""
    kept = KeptPages(1000, PAGE)
    plan = make(1000, 2 * kept.pages(1 << 20), max_batch_s=0.5, min_batch_s=0.5)
    driven = Watched(plan)
    driven.submit([request(f"r{n}", 30_000, within_s=60.0) for n in range(2)])
    driven.run()
    lengths = [chunk.length for _, batch in driven.batches for chunk in batch.chunks]
    assert plan._lifecycle.preempted_count == 0
    assert len(lengths) <= 2 * 30_000 / (CHUNK_TOKENS - PAGE) + 2
    assert leftovers(plan) == {}


def test_a_decode_at_its_window_never_waits_for_a_page() -> None:
    """Dropped pages stay reserved for it, however many others would take them."""
    kept = KeptPages(100, PAGE)
    plan = make(100, kept.pages(1 << 20) + 20)
    driven = Watched(plan)
    driven.submit([request("long", 3000, output_tokens=3000, tpot_s=0.05)])
    driven.submit(
        [request(f"r{n}", 200, 0.5 + 0.05 * n, output_tokens=20, tpot_s=0.05) for n in range(200)]
    )
    driven.run()
    assert len(driven.finished) == 201
    assert plan._lifecycle.preempted_count == 0


def test_what_a_sequence_drops_stays_reserved_while_it_needs_more() -> None:
    """Alone it always has its bound, held or reserved, until fewer tokens are left."""
    plan = make(100, 1000)
    driven = Watched(plan)
    driven.submit([request("long", 9000, output_tokens=3000, tpot_s=0.05)])
    bound, pool = KeptPages(100, PAGE).pages(1 << 20), plan._state.pool[0]
    had: list[int] = []
    for moment in range(1, 5000):
        driven.run(0.002 * moment)
        if "long" in driven.finished:
            break
        had.append(pool.total - pool.available)
    assert set(had[:600]) == {bound} and had == sorted(had, reverse=True)
    assert leftovers(plan) == {}


def test_decodes_count_the_keys_that_each_of_them_sees() -> None:
    decodes = DecodeGroup((0,), 500)
    for number, tokens in enumerate((100, 5000)):
        sequence = Sequence(number, request(f"r{number}", tokens))
        sequence.schedule(tokens, 0, [number])
        decodes.add(sequence)
    assert decodes.keys == {0: 100 + 500}
    assert decodes.keys_of(1) == {0: 100}
    decodes.take(1)
    assert decodes.keys == {0: 500}


def test_more_long_prompts_run_at_once() -> None:
    """1,000 pages of 16 tokens hold one context of 16,000 tokens, or many windows."""
    running = {}
    for window in (0, 500):
        plan = make(window, 1000)
        driven = Driven(plan)
        driven.submit([request(f"r{n}", 9000, within_s=60.0) for n in range(12)])
        driven.run(0.01)
        running[window] = plan._admission.started_count
        driven.run()
        assert len(driven.finished) == 12
    assert running[0] == 1 and running[500] >= 6


def test_a_context_longer_than_the_pool_is_served_if_a_window_fits() -> None:
    plan, driven = make(500, KeptPages(500, PAGE).least(1 << 20)), None
    driven = Watched(plan)
    driven.submit([request("long", 50_000, output_tokens=40, tpot_s=0.05)])
    driven.run()
    assert driven.finished["long"].reason == "length"
    short = make(500, KeptPages(500, PAGE).least(1 << 20) - 1)
    with pytest.raises(Refusal, match="at most 528 "):
        short.submit(request("long", 50_000), 0.0)


def test_a_preempted_prompt_goes_on_from_the_last_window_that_is_cached() -> None:
    plan = make(100, 700)
    names = [str(page).encode() for page in range(600)]
    driven = Watched(plan)
    driven.submit([request("one", 9600, output_tokens=1)], names)
    driven.run()
    pool = plan._state.pool[0]
    # Its first pages were dropped first, so that they give way first.
    pool.release(pool.take_many(pool.total - 8)[::-1])
    assert pool.find(names[0]) is None and pool.find(names[-1]) is not None
    second = Watched(plan)
    second.now = driven.now
    second.submit([request("two", 9610, driven.now, output_tokens=3)], names)
    second.run()
    assert second.admitted["two"].cached_tokens == 9600
    assert sum(chunk.length for _, batch in second.batches for chunk in batch.chunks) == 12
    assert leftovers(plan) == {}


@pytest.mark.parametrize("gone", range(7))
def test_a_hit_needs_every_page_of_its_window(gone: int) -> None:
    """Pages of 16, a window of 40: after page 6, the tokens from 73 on, which page 4 begins."""
    pool = BlockPool(9, KeptPages(40, PAGE), groups_max=1)
    pool.join(0)
    names = [bytes([page]) for page in range(7)]
    for page, name in enumerate(names):
        if page != gone:
            pool[0].cache(pool[0].take(), name)
    first, hit = pool.hit(names, (0,))
    assert first + len(hit) == {4: 4, 5: 5, 6: 6}.get(gone, 7)
    assert [page for _, page in hit] == [pool[0].find(name) for name in names[first:][:3]]


def test_a_hit_lies_in_one_group() -> None:
    pool = BlockPool(9, KeptPages(40, PAGE), groups_max=2)
    pool.join(0)
    pool.join(1)
    names = [bytes([page]) for page in range(7)]
    for page, name in enumerate(names):
        pool[page % 2].cache(pool[page % 2].take(), name)
    assert pool.hit(names, (0, 1)) == (0, [(0, 0)])
    for name in names[3:6]:
        if pool[1].find(name) is None:
            pool[1].cache(pool[1].take(), name)
    first, hit = pool.hit(names, (0, 1))
    assert (first, [group for group, _ in hit]) == (3, [1, 1, 1])


@given(
    st.lists(st.integers(0, 30), max_size=20),
    st.sampled_from([1, 16, 40, 1000]),
    st.integers(1, 31),
)
def test_a_router_expects_the_hit_that_a_replica_finds(
    gone: list[int], window: int, pages: int
) -> None:
    kept, names = KeptPages(window, PAGE), [bytes([page]) * 16 for page in range(31)]
    pool = BlockPool(40, kept, groups_max=1)
    pool.join(0)
    stored = [name for page, name in enumerate(names) if page not in gone]
    for name in stored:
        pool[0].cache(pool[0].take(), name)
    index = PrefixIndex()
    index.apply("r", KvEvents(number=1, stored=b"".join(stored), removed=b"", snapshot=True))
    first, hit = pool.hit(names[:pages], (0,))
    assert index.match_sliding(names[:pages], kept).get("r", 0) == first + len(hit)


# --- models ---------------------------------------------------------------------------------------


def test_a_model_slides_if_every_layer_has_the_window_and_contexts_are_longer() -> None:
    assert shape(window_tokens=100).sliding_tokens == 100
    assert shape(window_tokens=100, max_context_tokens=100).sliding_tokens == 0
    assert shape().sliding_tokens == 0
    assert shape(window_tokens=100).kept_pages(64) == KeptPages(100, 64)
