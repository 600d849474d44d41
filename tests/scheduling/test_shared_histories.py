"""Prompts of common histories: pages that others have computed are taken over at any time."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import POLICIES, Scheduling
from medha.request import Request
from medha.testing import Driven, leftovers, request, scheduler, topology

PAGE = 64


@dataclasses.dataclass(frozen=True)
class Turn:
    """A prompt that continues `shared` pages of a history with `own` tokens."""

    gap_s: float
    history: int
    shared: int
    own: int
    output: int
    extra_s: float

    @property
    def tokens(self) -> int:
        return PAGE * self.shared + self.own

    def names(self, number: int) -> list[bytes]:
        """Name its full pages; those of its own tokens occur once."""
        shared = [b"%d/%d" % (self.history, page) for page in range(self.shared)]
        return shared + [b"own %d/%d" % (number, page) for page in range(self.own // PAGE)]


TURNS = st.lists(
    st.builds(
        Turn,
        gap_s=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
        history=st.integers(0, 1),
        shared=st.integers(0, 150),
        own=st.integers(1, 700),
        output=st.integers(1, 12),
        extra_s=st.sampled_from([0.01, 0.2, 0.5, 4.0]),
    ),
    min_size=1,
    max_size=20,
)


def submit(driven: Driven, turns: list[Turn], *, answers: bool = True) -> dict[str, list[bytes]]:
    """Submit all turns; return the names of each one's pages."""
    names: dict[str, list[bytes]] = {}
    moments = itertools.accumulate(turn.gap_s for turn in turns)
    for number, (turn, at) in enumerate(zip(turns, moments, strict=True)):
        arriving: Request = request(
            f"r{number}",
            turn.tokens,
            at,
            within_s=1.5e-4 * turn.tokens + turn.extra_s,
            output_tokens=turn.output if answers else 1,
            tpot_s=0.05,
        )
        names[arriving.id] = turn.names(number)
        driven.submit([arriving], hashes=names[arriving.id])
    return names


@pytest.mark.parametrize("pages", [190, 1200])
@given(TURNS, st.sampled_from(POLICIES), st.sampled_from([(1, 1), (1, 3), (2, 1), (3, 2)]))
@settings(max_examples=40)
def test_only_pages_that_others_computed_are_skipped_and_every_prompt_ends(
    pages: int, turns: list[Turn], policy: str, layout: tuple[int, int]
) -> None:
    kvp, spp = layout
    plan = scheduler(
        topology(spp=spp, kvp=kvp, tokens_per_group=6_000 if kvp > 1 else None),
        Scheduling(policy=policy),
        pages=pages,
        key_s=2e-10,
    )
    driven = Driven(plan)
    names = submit(driven, turns)
    driven.run()
    assert set(driven.finished) == set(names)
    assert leftovers(plan) == {}
    id_of = {admitted.seq: name for name, admitted in driven.admitted.items()}
    computed: set[bytes] = set()
    reached: dict[int, int] = {}
    for _, batch in driven.batches:
        for chunk in batch.chunks:
            before, own = reached.get(chunk.seq, 0), names[id_of[chunk.seq]]
            if chunk.start > before:
                assert before % PAGE == chunk.start % PAGE == 0
                assert computed.issuperset(own[before // PAGE : chunk.start // PAGE])
            reached[chunk.seq] = chunk.end
            computed.update(own[: chunk.end // PAGE])


@pytest.mark.parametrize("spp", [1, 2])
@given(TURNS)
@settings(max_examples=40)
def test_no_promise_is_broken(spp: int, turns: list[Turn]) -> None:
    plan = scheduler(topology(spp=spp), Scheduling(max_batch_s=0.05), batch_s=0.003, key_s=1e-9)
    driven = Driven(plan)
    submit(driven, turns, answers=False)
    driven.run()
    promised = [name for name, admitted in driven.admitted.items() if admitted.promised]
    assert [name for name in promised if not driven.in_time(name)] == []
