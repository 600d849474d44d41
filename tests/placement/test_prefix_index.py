"""The prefix index: leading pages per replica, exact under any events, bounded, honest on gaps."""

from __future__ import annotations

import random

import numpy as np
import pytest

from medha.fleet.prefix_index import PrefixIndex, chain
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


@pytest.mark.parametrize("seed", range(5))
def test_any_history_equals_plain_sets(seed: int) -> None:
    rng, index = random.Random(seed), PrefixIndex()
    prompts = [names(12, seed=seed) for seed in range(4)]
    pages = [page for prompt in prompts for page in prompt]
    held: dict[str, set[bytes]] = {name: set() for name in "abcd"}
    numbers = dict.fromkeys("abcd", 0)
    for _ in range(300):
        name = rng.choice("abcd")
        stored, removed = set(rng.sample(pages, 3)), set(rng.sample(pages, 2))
        numbers[name] += 1
        snapshot = numbers[name] == 1 or rng.random() < 0.05
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
