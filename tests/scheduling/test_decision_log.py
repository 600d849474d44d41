"""Same inputs, same batches: a logged run comes out the same, byte for byte."""

from __future__ import annotations

import functools
import random

import pytest

from medha.config import Scheduling
from medha.errors import ProtocolError, Refusal, SpecError
from medha.scheduling.decision_log import VERSION, RecordingScheduler, replay
from medha.testing import Driven, request, scheduler, topology


def leave(driven: Driven, name: str) -> None:
    driven.plan.abort(name, driven.now)


def recorded(kvp: int = 2, spp: int = 2, seed: int = 1) -> list[bytes]:
    """A log of a busy minute: long and short prompts, aborts, a refusal, a lost group, moves."""
    log: list[bytes] = []
    dice = random.Random(seed)
    layout = topology(spp=spp, kvp=kvp, tokens_per_group=3000)
    plan = scheduler(layout, Scheduling(fixed_s=0.05), pages=400, join=False, key_s=1e-9)
    driven = Driven(RecordingScheduler(plan, log.append))
    for group in range(kvp):
        driven.plan.group_joined(group, 1, 0.0)
    names = [f"r{n}" for n in range(60)]
    for name in names:
        tokens = 9000 if dice.random() < 0.1 else dice.randint(1, 800)
        arriving = request(
            name,
            tokens,
            dice.uniform(0, 5),
            within_s=0.5 + 2e-4 * tokens,
            output_tokens=dice.randint(1, 40),
        )
        driven.submit([arriving], hashes=[bytes([7 * n % 250] * 16) for n in range(tokens // 640)])
    for name in dice.sample(names, 10):
        when = dice.uniform(0, 6)
        driven.at(when, functools.partial(leave, driven, name))
    driven.at(3.0, lambda: driven.plan.plan_moves(driven.now))
    driven.at(4.0, lambda: driven.plan.take_kv_events())
    driven.at(9.0, lambda: driven.plan.take_failed())
    driven.run()
    with pytest.raises(Refusal):
        driven.plan.submit(request("giant", 10**6), driven.now)
    return log


@pytest.mark.parametrize("kvp, spp", [(1, 1), (1, 3), (2, 2), (3, 2)])
def test_a_replayed_log_comes_out_the_same(kvp: int, spp: int) -> None:
    log = recorded(kvp, spp)
    assert replay(log) == len(log) - 1 > 200


def test_two_runs_write_the_same_bytes() -> None:
    assert recorded() == recorded()


def test_a_changed_outcome_is_found_and_named() -> None:
    log = recorded()
    place = next(n for n, row in enumerate(log) if b'"next_batch"' in row and b"null" not in row)
    log[place] = log[place].replace(b'"outcome":[', b'"outcome":[9')
    with pytest.raises(ProtocolError, match=rf"line {place + 1} comes out differently"):
        replay(log)


def test_a_log_of_another_version_is_refused() -> None:
    log = recorded()
    with pytest.raises(SpecError, match="of version 2, not 7"):
        replay([log[0].replace(f'"version":{VERSION}'.encode(), b'"version":7')])


def test_what_is_not_a_log_is_refused() -> None:
    with pytest.raises(SpecError, match="heading"):
        replay([b"hello"])
    with pytest.raises(SpecError, match="line 2"):
        replay([recorded()[0], b'{"call":"sing","args":[],"outcome":null}'])
