"""Models whose layers all have a window: pages are given back while streams go on as they should.

Fake ranks read what each row sees from the pages, when a batch begins and again at its end, and
compare it with the text: a page dropped too early holds another request's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.support.virtual_ranks import expected_tokens
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha.fleet.prefix_index import chain
from medha.model import KeptPages
from medha.topology import Topology

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]
Judge = Callable[[VirtualReplica, m.Submit], None]
Idle = Callable[[VirtualReplica], None]

VOCAB, PAGE = 50_000, 16
LENGTHS = (1, 15, 16, 17, 33, 63, 64, 65, 99, 100, 101, 500, 1999, 8000)


def named(submit: m.Submit, salt: bytes = b"tenant") -> m.Submit:
    names = b"".join(chain(m.from_bytes(submit.tokens), PAGE, salt))
    return msgspec.structs.replace(submit, salt=salt, hashes=names)


@pytest.mark.parametrize("window", [2, 16, 17, 64, 100])
@pytest.mark.parametrize(
    "topology, ahead_s",
    [(Topology(), 0.0), (Topology(), 0.02), (Topology(spp=3), 0.0)],
    ids=["one stage", "decided ahead", "three stages"],
)
def test_streams_pass_their_windows_many_times(
    make_replica: Make,
    make_submit: Submit,
    judge: Judge,
    idle: Idle,
    window: int,
    topology: Topology,
    ahead_s: float,
) -> None:
    replica = make_replica(
        pages=400, window=window, topology=topology, settings={"ahead_s": ahead_s}
    )
    many = [make_submit(f"r{n}", n, outputs=30 + n % 400) for n in LENGTHS]
    for place, submit in enumerate(many):
        replica.submit_at(1.0 + 0.07 * place, submit)
    replica.run(300.0)
    for submit in many:
        judge(replica, submit)
    idle(replica)


@pytest.mark.parametrize("kvp", [1, 2])
def test_a_pool_of_few_windows_serves_all_in_turn(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle, kvp: int
) -> None:
    """Every sequence stays in its group, and some are preempted."""
    pages = KeptPages(200, PAGE).least(1 << 20) + 30
    layout = Topology(kvp_min=kvp, kvp_max=kvp, tokens_per_group=100)
    replica = make_replica(pages=pages, window=200, topology=layout)
    many = [named(make_submit(f"r{i}", 20 + 97 * i % 1500, outputs=400)) for i in range(24)]
    for place, submit in enumerate(many):
        replica.submit_at(1.0 + 0.01 * place, submit)
    replica.run(400.0)
    for submit in many:
        judge(replica, submit)
    assert replica.scheduler is not None
    assert replica.scheduler._lifecycle.preempted_count > 0
    assert all(len(chunk.groups) == 1 for _, batch in replica.log for chunk in batch.chunks)
    idle(replica)


@pytest.mark.parametrize("outputs", [3, 150])
def test_a_second_turn_needs_the_last_window_only(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle, outputs: int
) -> None:
    """Other prompts evict the first pages in between."""
    first = named(make_submit("one", 640, outputs=outputs))
    prompt = m.from_bytes(first.tokens)
    answer = expected_tokens(prompt.tolist(), outputs, VOCAB, 100)
    turn = np.concatenate([prompt, answer, [7, 8, 9]]).astype(np.int32)
    second = named(msgspec.structs.replace(first, id="two", tokens=m.to_bytes(turn)))
    replica = make_replica(pages=60, window=100)
    other = named(make_submit("other", 440, outputs=2))
    replica.submit_at(1.0, first)
    replica.submit_at(20.0, other)
    replica.submit_at(30.0, second)
    replica.run(60.0)
    for submit in (first, second, other):
        judge(replica, submit)
    finished = replica.clients["two"].finished
    assert finished is not None
    assert finished.cached_tokens == (640 + outputs - 1) // PAGE * PAGE
    pool = replica.scheduler._state.pool[0] if replica.scheduler is not None else None
    assert pool is not None and pool.find(first.hashes[:16]) is None
    idle(replica)


def test_prompts_that_share_pages_drop_them_one_by_one(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    """A pool so small that a page which others still hold is missed."""
    whole = make_submit("whole", 3000)
    replica = make_replica(pages=KeptPages(200, PAGE).pages(1 << 20) + 20, window=200)
    many = [
        named(
            msgspec.structs.replace(
                whole, id=f"r{i}", tokens=whole.tokens[: 4 * (150 + 211 * i)], max_output_tokens=90
            )
        )
        for i in range(12)
    ]
    for place, submit in enumerate(many):
        replica.submit_at(1.0 + 0.03 * place, submit)
    replica.run(200.0)
    for submit in many:
        judge(replica, submit)
    idle(replica)


def test_a_lost_group_is_recomputed_from_what_others_cached(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(pages=300, window=64, topology=Topology(kvp_min=2, kvp_max=2))
    many = [named(make_submit(f"r{i}", 300 + 31 * i, outputs=250)) for i in range(10)]
    for submit in many:
        replica.submit_at(1.0, submit)
    replica.run(1.7)
    replica.kill_group(1)
    replica.run(200.0)
    for submit in many:
        judge(replica, submit)
    idle(replica)
