"""The scheduler keeps apart which sequences hold pages and which need several groups."""

from __future__ import annotations

import functools
import random

import pytest

from medha.config import Scheduling
from medha.testing import Driven, leftovers, request, scheduler, topology


@pytest.mark.parametrize("seed", range(8))
def test_they_are_those_that_a_scan_of_all_sequences_finds(seed: int) -> None:
    """Prompts span groups, answers outgrow their pages, clients leave, groups come and go."""
    draw = random.Random(seed)
    plan = scheduler(
        topology(spp=draw.choice((1, 2)), kvp=2, kvp_max=3, tokens_per_group=2000),
        Scheduling(output_reserve=0.0),
        pages=40,
    )
    driven = Driven(plan)
    driven.submit(
        request(
            f"r{number}",
            draw.choice((60, 300, 2500)),
            draw.uniform(0.0, 2.0),
            within_s=draw.choice((0.5, 5.0)),
            output_tokens=draw.choice((1, 20, 200)),
        )
        for number in range(40)
    )
    seen = [0, 0]

    def check() -> None:
        groups, sequences = plan._state.groups, plan._state.sequences
        started = {number for number, sequence in sequences.items() if sequence.started}
        assert set(groups.holders) == started
        lacking = {
            number
            for number, sequence in sequences.items()
            if not (sequence.started or sequence.stopped)
            and 0 < len(sequence.assigned_groups) < groups.groups_needed(sequence)
        }
        assert lacking <= set(groups.large)
        seen[0] = max(seen[0], len(started))
        seen[1] = max(seen[1], len(lacking))

    def leave(name: str) -> None:
        plan.abort(name, driven.now)

    for step in range(400):
        driven.at(step / 100.0, check)
    for number in range(0, 40, 5):
        driven.at(draw.uniform(0.5, 3.0), functools.partial(leave, f"r{number}"))
    driven.at(1.0, lambda: plan.group_lost(1, 2, driven.now))
    driven.at(1.5, lambda: plan.group_joined(1, 3, driven.now))
    driven.at(1.8, lambda: plan.group_joined(2, 4, driven.now))
    driven.run()
    check()
    assert seen[0] > 1 and seen[1] > 0
    assert leftovers(plan) == {}
