"""Page accounting: every page in one place, shared by hash, given back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.model import KeptPages
from medha.scheduling.block_pool import BlockPool, GroupPages

ACTS = st.lists(st.tuples(st.sampled_from(["take", "share", "name", "release"]), st.integers(0, 9)))


@given(ACTS)
def test_pages_are_conserved_whatever_happens(acts: list[tuple[str, int]]) -> None:
    pages = GroupPages(6)
    holders: list[int] = []
    for act, number in acts:
        name = bytes([number])
        found_page = pages.find(name)
        if act == "take" and pages.unused:
            holders.append(pages.take())
        elif act == "share" and found_page is not None:
            pages.share(found_page)
            holders.append(found_page)
        elif act == "name" and holders:
            pages.cache(holders[number % len(holders)], name)
        elif act == "release" and holders:
            pages.release([holders.pop(number % len(holders))])
        pages.check()
        assert sum(pages.references(page) for page in set(holders)) == len(holders)
    pages.release(holders)
    pages.check()
    assert pages.unused == pages.total


def test_a_released_named_page_is_found_again() -> None:
    pages = GroupPages(2)
    page = pages.take()
    pages.cache(page, b"a")
    pages.release([page])
    assert pages.find(b"a") == page and pages.available == 2
    pages.share(page)
    assert pages.available == 1


def test_the_oldest_cached_page_gives_way_first() -> None:
    pages = GroupPages(3)
    held = [pages.take() for _ in range(3)]
    for page, name in zip(held, (b"a", b"b", b"c"), strict=True):
        pages.cache(page, name)
    pages.release(reversed(held))
    taken = pages.take()
    assert taken == held[2]
    assert pages.find(b"c") is None and pages.find(b"a") == held[0]


def test_releasing_twice_is_an_error() -> None:
    pages = GroupPages(1)
    page = pages.take()
    pages.release([page])
    with pytest.raises(ValueError, match="more often"):
        pages.release([page])


def test_taking_many_prefers_free_pages_and_then_the_cache() -> None:
    pages = GroupPages(4)
    first = pages.take()
    pages.cache(first, b"a")
    pages.release([first])
    assert first not in pages.take_many(3)
    assert pages.take_many(1) == [first] and pages.find(b"a") is None
    pages.check()


def test_a_prefix_is_followed_across_groups_until_a_gap() -> None:
    pool = BlockPool(4, KeptPages(0, 64), groups_max=2)
    pool.join(0)
    pool.join(1)
    where = {b"a": 0, b"b": 0, b"c": 1, b"e": 1}
    for name, group in where.items():
        pool[group].cache(pool[group].take(), name)
    assert [group for group, _ in pool.leading([b"a", b"b", b"c", b"d", b"e"], (0, 1))] == [0, 0, 1]
    assert pool.leading([b"a", b"b", b"c"], (1,)) == []


def test_events_tell_what_is_findable_now() -> None:
    pool = BlockPool(1, KeptPages(0, 64), groups_max=1)
    pool.join(0)
    page = pool[0].take()
    pool[0].cache(page, b"a")
    assert pool.take_events() == ([(0, b"a")], [])
    pool[0].release([page])
    pool[0].cache(pool[0].take(), b"b")
    assert pool.take_events() == ([(0, b"b")], [(0, b"a")])
    pool.leave(0)
    assert pool.take_events() == ([], [(0, b"b")])
