"""Room that owners share, against the rule computed from what each holds."""

from __future__ import annotations

import collections

from hypothesis import given
from hypothesis import strategies as st

from medha.fleet.shared_room import SharedRoom

MOST = 40
OWNERS = "abcdefgh"
changes = st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(-20, 25)), max_size=60)


@given(changes)
def test_an_owner_has_all_of_it_alone_and_a_quarter_once_several_hold_half(
    steps: list[tuple[str, int]],
) -> None:
    room, held = SharedRoom(MOST), collections.Counter[str]()
    for owner, more in steps:
        if more < 0:
            more = -min(held[owner], -more)
        others = sum(min(count, MOST // 4) for name, count in held.items() if name != owner)
        own = held[owner] + more
        alone, modest, roomy = others == 0, own <= MOST // 4, others + own <= MOST // 2
        fits = others + own <= MOST and (alone or modest or roomy)
        assert room.fits(owner, more) == fits
        if fits or more < 0:
            room.hold(owner, more)
            held[owner] += more
        assert room.held == held.total()


@given(changes, st.integers(1, MOST // 8))
def test_a_modest_newcomer_fits_whatever_one_owner_holds(
    steps: list[tuple[str, int]], modest: int
) -> None:
    room = SharedRoom(MOST)
    for _, more in steps:
        if more > 0 and room.fits("hog", more):
            room.hold("hog", more)
    assert room.fits("newcomer", modest)
