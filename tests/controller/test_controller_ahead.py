"""Batches sent while another runs: clients read the same, even if requests or groups end."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.support.virtual_ranks import expected_tokens
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha.fleet.prefix_index import chain
from medha.topology import Topology

VOCAB = 50_000
AHEAD = {"ahead_s": 0.01}

Make = Callable[..., VirtualReplica]
MakeSubmit = Callable[..., m.Submit]
Judge = Callable[[VirtualReplica, m.Submit], None]
Idle = Callable[[VirtualReplica], None]


def stopping(make_submit: MakeSubmit, id: str, tokens: int, outputs: int, after: int) -> m.Submit:
    """A request that samples its stop token as output number `after`, from 1."""
    plain = make_submit(id, tokens)
    token = expected_tokens(m.from_bytes(plain.tokens).tolist(), after, VOCAB)[-1]
    sampling = m.Sampling(temperature=0.0, stop_tokens=(token,))
    return make_submit(id, tokens, outputs=outputs, sampling=sampling)


def two_at_once(replica: VirtualReplica) -> int:
    """Count the batches that reached a rank while it ran another."""
    ends, count = 0.0, 0
    for at_s, batch in replica.log:
        count += at_s < ends
        ends = max(ends, at_s) + batch.predicted_s
    return count


def test_decodes_are_sent_before_their_tokens_are_known(
    make_replica: Make, make_submit: MakeSubmit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(settings=AHEAD)
    submits = [make_submit(f"r{n}", 30 + n, outputs=20) for n in range(5)]
    for submit in submits:
        replica.submit_at(0.1, submit)
    replica.run(5.0)
    for submit in submits:
        judge(replica, submit)
    assert two_at_once(replica) >= 15
    idle(replica)


def test_nothing_is_ahead_without_the_setting_or_in_a_pipeline(
    make_replica: Make, make_submit: MakeSubmit, judge: Judge
) -> None:
    plain, piped = make_replica(), make_replica(settings=AHEAD, topology=Topology(spp=2))
    twin = make_replica(topology=Topology(spp=2))
    for replica in (plain, piped, twin):
        replica.submit_at(0.1, make_submit("a", 200, outputs=9))
        replica.run(5.0)
        judge(replica, make_submit("a", 200, outputs=9))
    assert two_at_once(plain) == 0
    assert piped.log == twin.log


@pytest.mark.parametrize("after", [1, 2, 3, 7])
def test_a_stop_token_ends_the_stream_although_a_row_is_behind_it(
    make_replica: Make, make_submit: MakeSubmit, judge: Judge, idle: Idle, after: int
) -> None:
    replica = make_replica(settings=AHEAD, pages=8)
    first = stopping(make_submit, "a", 32 - after, 9, after)  # its surplus row takes a page
    second = make_submit("b", 90, outputs=9)  # waits for the first one's pages
    replica.submit_at(0.1, first)
    replica.submit_at(0.1, second)
    replica.run(5.0)
    judge(replica, first)
    judge(replica, second)
    assert replica.clients["a"].finished == m.Finished(
        id="a", reason="stop", prompt_tokens=32 - after, output_tokens=after, cached_tokens=0
    )
    idle(replica)


def test_a_later_turn_finds_the_pages_of_an_answer(
    make_replica: Make, make_submit: MakeSubmit, judge: Judge
) -> None:
    def named(submit: m.Submit, tokens: list[int]) -> m.Submit:
        names = b"".join(chain(np.array(tokens, dtype=np.int32), 16, b"salt"))
        return msgspec.structs.replace(
            submit, tokens=m.to_bytes(tokens), salt=b"salt", hashes=names
        )

    replica = make_replica(settings=AHEAD)
    prompt = m.from_bytes(make_submit("a", 32).tokens).tolist()
    replica.submit_at(0.1, named(make_submit("a", outputs=40), prompt))
    turn = [*prompt, *expected_tokens(prompt, 40, VOCAB)]
    again = named(make_submit("b", outputs=5), turn)
    replica.submit_at(2.0, again)
    replica.run(5.0)
    judge(replica, again)
    assert replica.clients["b"].finished is not None
    assert replica.clients["b"].finished.cached_tokens == 64


def test_a_lost_step_is_sent_again_with_what_it_held(
    make_replica: Make, make_submit: MakeSubmit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(settings=AHEAD)
    submits = [make_submit(f"r{n}", 30, outputs=20) for n in range(3)]
    replica.drop_step = (0, 6)
    for submit in submits:
        replica.submit_at(0.1, submit)
    replica.run(20.0)
    assert replica.dropped
    for submit in submits:
        judge(replica, submit)
    idle(replica)


@pytest.mark.parametrize("at_s", [0.103, 0.1071, 0.115, 0.13])
def test_a_group_that_dies_takes_no_token_along(
    make_replica: Make, make_submit: MakeSubmit, judge: Judge, idle: Idle, at_s: float
) -> None:
    layout = Topology(kvp_min=2, kvp_max=2, tokens_per_group=400)
    replica = make_replica(settings=AHEAD, topology=layout, rank_timeout_s=1.0)
    submits = [make_submit(f"r{n}", 30 + 7 * n, outputs=20) for n in range(6)]
    submits.append(make_submit("long", 700, outputs=12))
    for submit in submits:
        replica.submit_at(0.1, submit)
    replica.loop.at(at_s, 1, lambda: replica.kill_group(1))
    replica.loop.at(3.0, 1, lambda: replica.start_group(1))
    replica.run(20.0)
    for submit in submits:
        judge(replica, submit)
    idle(replica)


Wish = tuple[int, int, int | None, float | None]
WISHES = st.lists(
    st.tuples(
        st.integers(1, 300),  # prompt tokens
        st.integers(1, 30),  # output tokens
        st.one_of(st.none(), st.integers(1, 12)),  # tokens until it stops
        st.one_of(st.none(), st.floats(0.0, 0.2)),  # seconds until it hangs up
    ),
    min_size=1,
    max_size=10,
)


@given(WISHES, st.sampled_from([24, 60, 1000]), st.integers(0, 1 << 16), st.booleans())
@example(  # a group joins while all that is left of a long prompt runs in stage 0
    wishes=[(n, m, None, None) for n, m in ((1, 1), (1, 1), (110, 3), (154, 1), (5, 1))],
    pages=24,
    seed=3513,
    kvp=True,
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_clients_read_the_same_one_step_ahead(
    make_replica: Make,
    make_submit: MakeSubmit,
    judge: Judge,
    idle: Idle,
    wishes: list[Wish],
    pages: int,
    seed: int,
    kvp: bool,
) -> None:
    """With few pages, decodes and prefills are preempted while two batches hold them."""
    rng = random.Random(seed)
    more: dict[str, Any] = {}
    if kvp:
        more["topology"] = Topology(kvp_min=1, kvp_max=2, tokens_per_group=128)
    replica = make_replica(
        settings=AHEAD | {"output_reserve": 0.0},
        pages=pages,
        slowness=lambda number, stage, regime: 1.0 + 0.3 * (number * 7 % 5),
        **more,
    )
    if kvp:
        replica.loop.at(0.15, 1, lambda: replica.start_group(1))
    submits = {}
    for n, (prompt, outputs, stops, leaves) in enumerate(wishes):
        name, at_s = f"r{n}", 0.1 + rng.random() * 0.1
        submit = make_submit(name, prompt, outputs=outputs)
        if stops is not None:
            submit = stopping(make_submit, name, prompt, outputs, stops)
        replica.submit_at(at_s, submit)
        if leaves is None:
            submits[name] = submit
        else:
            replica.send_at(at_s + leaves, m.Abort(name))
    replica.run(30.0)
    for name, submit in submits.items():
        failed = replica.clients[name].failed
        if failed is None:
            judge(replica, submit)
        else:
            assert failed.code in {"context_length_exceeded", "kv_exhausted"}
    idle(replica)
