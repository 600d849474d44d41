"""The prefix index: leading pages per replica, exact under any events, bounded, honest on gaps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.fleet import prefix_index
from medha.fleet.prefix_index import PageNames, PrefixIndex, chain
from medha.messages import KvEvents
from medha.model import KeptPages


def names(count: int, seed: int = 0) -> list[bytes]:
    tokens = np.random.default_rng(seed).integers(0, 1000, count * 4, dtype=np.int32)
    return list(chain(tokens, 4, b"salt"))


def test_the_match_is_the_number_of_leading_pages() -> None:
    index, prompt = PrefixIndex(), names(10)
    assert index.apply("a", KvEvents(1, stored=b"".join(prompt[:6]), snapshot=True))
    assert index.apply("b", KvEvents(1, stored=b"".join(prompt), snapshot=True))
    assert index.apply("c", KvEvents(1, stored=b"".join(prompt[1:]), snapshot=True))
    assert index.match(prompt) == {"a": 6, "b": 10}
    assert index.match(names(3, seed=1)) == {}
    assert index.match([]) == {}


def test_windows_that_slide_need_the_pages_of_the_last_one() -> None:
    """Pages of 4 tokens and a window of 10: three pages before the next token."""
    index, prompt, kept = PrefixIndex(capacity=12), names(10), KeptPages(10, 4)
    index.apply("a", KvEvents(1, stored=b"".join(prompt[6:9]), snapshot=True))
    index.apply("b", KvEvents(1, stored=b"".join(prompt[2:8]), snapshot=True))
    index.apply("c", KvEvents(1, stored=b"".join(prompt[1:3]), snapshot=True))
    assert index.match_sliding(prompt, kept) == {"a": 9, "b": 8}
    assert index.match_sliding(prompt[:8], kept) == {"b": 8}
    assert index.match_sliding(prompt[:2], kept) == {}
    for number in range(2, 9):
        index.apply("b", KvEvents(number, stored=b"".join(names(4, seed=number))))
        assert index.match_sliding(prompt, kept) == {"a": 9, "b": 8}


@given(
    held=st.lists(st.lists(st.booleans(), min_size=20, max_size=20), min_size=1, max_size=5),
    pages=st.integers(0, 20),
    window_tokens=st.integers(1, 90),
)
def test_sliding_windows_of_all_replicas_match_as_those_of_each(
    held: list[list[bool]], pages: int, window_tokens: int
) -> None:
    index, prompt, kept = PrefixIndex(), names(20), KeptPages(window_tokens, 4)
    for number, holds in enumerate(held):
        stored = b"".join(name for name, is_held in zip(prompt, holds, strict=True) if is_held)
        index.apply(f"r{number}", KvEvents(1, stored=stored, snapshot=True))
    expected = {
        f"r{number}": hit
        for number, holds in enumerate(held)
        if (hit := kept.longest_hit(pages, holds.__getitem__))
    }
    assert index.match_sliding(prompt[:pages], kept) == expected


def test_a_gap_drops_the_replica_until_its_snapshot() -> None:
    index, prompt = PrefixIndex(), names(4)
    assert index.apply("a", KvEvents(7, stored=b"".join(prompt[:2]), snapshot=True))
    assert not index.apply("a", KvEvents(9, stored=prompt[3]))
    assert index.match(prompt) == {} and len(index) == 0
    assert not index.apply("a", KvEvents(10, stored=prompt[3]))
    assert index.apply("a", KvEvents(11, stored=b"".join(prompt), snapshot=True))
    assert index.apply("a", KvEvents(12, removed=prompt[3]))
    assert index.match(prompt) == {"a": 3}


def test_events_seen_before_are_ignored() -> None:
    index, prompt = PrefixIndex(), names(2)
    index.apply("a", KvEvents(1, stored=prompt[0], snapshot=True))
    index.apply("a", KvEvents(2, removed=prompt[0]))
    assert index.apply("a", KvEvents(2, stored=prompt[0]))
    assert index.match(prompt) == {}


def test_a_replica_that_went_leaves_no_trace_and_its_place_is_used_again() -> None:
    index, prompt = PrefixIndex(), names(3)
    for name in ("a", "b"):
        index.apply(name, KvEvents(1, stored=b"".join(prompt), snapshot=True))
    index.forget("a")
    index.forget("never-there")
    assert index.match(prompt) == {"b": 3}
    index.apply("c", KvEvents(1, stored=prompt[0], snapshot=True))
    assert index.match(prompt) == {"b": 3, "c": 1}


def test_the_index_is_bounded_and_keeps_what_was_used_lately() -> None:
    index, used = PrefixIndex(capacity=100), names(10, seed=5)
    index.apply("a", KvEvents(1, stored=b"".join(used), snapshot=True))
    for number in range(2, 40):
        assert index.match(used) == {"a": 10}
        index.apply("a", KvEvents(number, stored=b"".join(names(10, seed=100 + number))))
    assert len(index) == 100


@pytest.mark.parametrize(("max_stale", "shards"), [(16, 1), (1, 8), (2, 64), (3, 256)])
@pytest.mark.parametrize("seed", range(5))
def test_any_history_equals_plain_sets(
    monkeypatch: pytest.MonkeyPatch, seed: int, max_stale: int, shards: int
) -> None:
    monkeypatch.setattr(prefix_index, "MAX_STALE", max_stale)
    monkeypatch.setattr(prefix_index, "SHARDS", shards)
    rng, index = random.Random(seed), PrefixIndex()
    prompts = [names(12, seed=seed) for seed in range(4)]
    pages = [page for prompt in prompts for page in prompt]
    held: dict[str, set[bytes]] = {name: set() for name in "abcd"}
    numbers = dict.fromkeys("abcd", 0)
    for _ in range(300):
        name = rng.choice("abcd")
        stored, removed = set(rng.sample(pages, 3)), set(rng.sample(pages, 2))
        numbers[name] += 1
        snapshot = numbers[name] == 1 or rng.random() < 0.2
        if snapshot:
            held[name] = set()
        held[name] = (held[name] - removed) | stored
        assert index.apply(
            name, KvEvents(numbers[name], b"".join(stored), b"".join(removed), snapshot)
        )
        for prompt in prompts:
            expected = {}
            for other, has in held.items():
                depth = next((i for i, page in enumerate(prompt) if page not in has), len(prompt))
                if depth:
                    expected[other] = depth
            assert index.match(prompt) == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_long_prompt_that_was_matched_before_is_matched_as_it_is_held_now(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Replicas store the pages of a prompt from the first and drop them from the last."""
    monkeypatch.setattr(prefix_index, "LONG_NAMES", 4)
    monkeypatch.setattr(prefix_index, "STEP", 3)
    rng, index = random.Random(seed), PrefixIndex()
    joined = b"".join(names(20, seed=seed))
    prompt = PageNames(joined)
    held, numbers = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for _ in range(100):
        name, pages = rng.choice("abc"), rng.randint(0, 20)
        steps = index.matching(prompt)
        for _ in range(rng.randint(0, 9)):
            next(steps, None)
        numbers[name] += 1
        stored, removed = prompt[held[name] : pages], prompt[pages : held[name]]
        held[name] = pages
        if snapshot := numbers[name] == 1 or rng.random() < 0.1:
            stored, removed = prompt[:pages], prompt[:0]
        events = KvEvents(numbers[name], b"".join(stored), b"".join(removed), snapshot)
        assert index.apply(name, events)
        assert index.match(prompt) == {name: pages for name, pages in held.items() if pages}


def test_a_full_index_drops_the_last_pages_of_a_prompt_first() -> None:
    index, prompt = PrefixIndex(capacity=40), names(20, seed=5)
    index.apply("a", KvEvents(1, stored=b"".join(prompt), snapshot=True))
    assert index.match(prompt) == {"a": 20}
    index.apply("a", KvEvents(2, stored=b"".join(names(30, seed=6))))
    assert index.match(prompt) == {"a": 10}


def test_a_long_prompt_that_comes_again_and_again_is_not_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_index, "FRESH", 4)
    index, prompt = PrefixIndex(capacity=3000), names(2000, seed=5)
    index.apply("a", KvEvents(1, stored=b"".join(prompt), snapshot=True))
    for number in range(2, 60):
        assert index.match(prompt) == {"a": 2000}
        index.apply("a", KvEvents(number, stored=b"".join(names(90, seed=number))))


@pytest.mark.parametrize("seed", range(20))
def test_a_match_in_steps_ends_right_whatever_happens_in_between(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    for name, value in (("LONG_NAMES", 4), ("STEP", 2), ("MAX_STALE", 1), ("SHARDS", 4)):
        monkeypatch.setattr(prefix_index, name, value)
    rng, index, prompt = random.Random(seed), PrefixIndex(), names(20, seed=seed)
    held = dict.fromkeys("abc", 0)
    for _ in range(30):
        for _ in index.matching(prompt):
            name = rng.choice("abc")
            if rng.random() < 0.3:
                index.forget(name)
                held[name] = 0
            else:
                held[name] = rng.randint(0, 20)
                stored = b"".join(prompt[: held[name]])
                assert index.apply(name, KvEvents(1, stored=stored, snapshot=True))
        assert index.match(prompt) == {name: pages for name, pages in held.items() if pages}


@given(st.binary(max_size=200), st.integers(-20, 20), st.integers(-20, 20))
def test_names_in_a_joined_string_are_those_of_the_list(joined: bytes, low: int, high: int) -> None:
    joined = joined[: len(joined) // 16 * 16]
    expected = [joined[at : at + 16] for at in range(0, len(joined), 16)]
    cut = PageNames(joined)
    assert (
        list(cut) == expected
        and len(cut) == len(expected)
        and list(cut[low:high]) == expected[low:high]
    )
    if -len(expected) <= low < len(expected):
        assert cut[low] == expected[low]
    else:
        with pytest.raises(IndexError):
            cut[low]
