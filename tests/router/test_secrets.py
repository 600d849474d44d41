"""Values that clients must not guess: ids and seeds."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from medha_router.app import SystemBits

WORDS, WORD_BITS = 624, 32


def untempered(word: int) -> int:
    """Return the state of a Mersenne Twister behind one of its outputs."""
    word ^= word >> 18
    word ^= word << 15 & 0xEFC60000
    seven = word
    for _ in range(4):
        seven = word ^ (seven << 7 & 0x9D2C5680)
    word = eleven = seven
    for _ in range(2):
        eleven = word ^ eleven >> 11
    return eleven


def successor(ids: list[int], bits: int) -> int:
    """Return the id that a Mersenne Twister draws after these, which hold its whole state."""
    words = [number >> shift & 0xFFFFFFFF for number in ids for shift in range(0, bits, WORD_BITS)]
    generator = random.Random()
    generator.setstate((3, (*map(untempered, words), WORDS), None))
    return generator.getrandbits(bits)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=300))
def test_random_numbers_have_their_bits_and_share_none(sizes: list[int]) -> None:
    draw_bits = SystemBits()
    numbers = [draw_bits(bits) for bits in sizes]
    assert all(number < 1 << bits for number, bits in zip(numbers, sizes, strict=True))
    words = [f"{draw_bits(96):024x}" for _ in range(1000)]
    assert len({word[start : start + 12] for word in words for start in (0, 12)}) == 2000
    assert {bit for bit in range(96) if any(int(word, 16) >> bit & 1 for word in words)} == {
        *range(96)
    }


def test_ids_do_not_give_away_the_next_one(served: Any) -> None:
    known = random.Random(7)
    drawn = [known.getrandbits(96) for _ in range(WORDS // 3)]
    assert successor(drawn, 96) == known.getrandbits(96)  # the attack works on a Mersenne Twister
    ids = [
        int(served.http.get("/v1/models").headers["x-medha-request-id"], 16)
        for _ in range(WORDS // 3 + 1)
    ]
    assert successor(ids[:-1], 96) != ids[-1]
