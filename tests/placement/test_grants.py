"""Grants of one controller over several routers: one order, and room for promised and late work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import POLICIES, QueueOrder
from medha.fleet.grants import GrantQueue
from medha.fleet.request_queue import QueuedRequest, RequestQueue
from medha.messages import Head, Load

NOW_S = 8.0


def head(queued: QueuedRequest, now: float) -> Head:
    return Head(
        id=queued.id,
        age_s=now - queued.arrival_s,
        due_in_s=queued.due_s - now,
        work_s=queued.work_s,
        promised=queued.promised,
        weight=queued.weight,
    )


@st.composite
def requests(draw: st.DrawFn) -> QueuedRequest:
    """A request in whole eighths of a second, so that durations are exact."""
    eighths = st.integers(0, 64).map(lambda count: count / 8)
    arrival_s = draw(eighths)
    return QueuedRequest(
        id=draw(st.uuids()).hex,
        arrival_s=arrival_s,
        due_s=arrival_s + draw(eighths),
        work_s=0.125 + draw(eighths) / draw(st.sampled_from((1, 8, 64))),
        promised=draw(st.booleans()),
        weight=draw(st.sampled_from((0.5, 1.0, 4.0))),
    )


@pytest.mark.parametrize("normaliser", ["work", "deadline"])
@pytest.mark.parametrize("policy", POLICIES)
@given(
    queued=st.lists(st.tuples(requests(), st.integers(0, 3)), max_size=40),
    published_s=st.lists(st.integers(0, 8).map(float), min_size=4, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_heads_of_several_routers_are_granted_in_the_order_of_one_queue(
    policy: str,
    normaliser: str,
    queued: list[tuple[QueuedRequest, int]],
    published_s: list[float],
) -> None:
    order = QueueOrder(policy=policy, normaliser=normaliser)
    single, grants = RequestQueue(order), GrantQueue(window_s=0.1, order=order)
    for request, _ in queued:
        single.add(request)
    for router, now in enumerate(published_s):
        heads = tuple(head(request, now) for request, of in queued if of == router)
        grants.heads(str(router), heads, now)
    expected: dict[bool, list[str]] = {False: [], True: []}
    granted: dict[bool, list[str]] = {False: [], True: []}
    late = {
        request.id: policy == "lars"
        and not request.promised
        and request.due_s - NOW_S < request.work_s
        for request, _ in queued
    }
    for request_id in single.order(NOW_S):
        expected[late[request_id]].append(request_id)
    while round_ := grants.grant(Load(), NOW_S):  # one of each kind fills the window
        for grant in round_.values():
            for request_id in grant.ids:
                granted[late[request_id]].append(request_id)
                grants.submitted(request_id)
    assert granted == expected


def test_late_requests_wait_for_late_work_alone() -> None:
    grants = GrantQueue(window_s=0.1)
    late = QueuedRequest(id="late", arrival_s=0.0, due_s=0.5, work_s=1.0, promised=False)
    kept = QueuedRequest(id="kept", arrival_s=0.0, due_s=9.0, work_s=1.0, promised=True)
    grants.heads("a", (head(late, 0.0), head(kept, 0.0)), 0.0)
    assert grants.grant(Load(ahead_s=0.2, relegated_ahead_s=0.2), 0.0) == {}
    assert grants.grant(Load(ahead_s=0.2), 0.0)["a"].ids == ("late",)
    assert grants.grant(Load(relegated_ahead_s=0.2), 0.0)["a"].ids == ("kept",)


def test_a_relegated_request_that_may_be_in_time_goes_after_the_promised_ones() -> None:
    grants = GrantQueue(window_s=0.1)
    hopeful = QueuedRequest(id="hopeful", arrival_s=0.0, due_s=9.0, work_s=1.0, promised=False)
    kept = QueuedRequest(id="kept", arrival_s=0.0, due_s=9.0, work_s=1.0, promised=True)
    grants.heads("a", (head(hopeful, 0.0),), 0.0)
    grants.heads("b", (head(kept, 0.0),), 0.0)
    assert {router: grant.ids for router, grant in grants.grant(Load(), 0.0).items()} == {
        "b": ("kept",)
    }
    grants.submitted("kept")
    busy = Load(relegated_ahead_s=9.0)
    assert grants.grant(busy, 0.0)["a"].ids == ("hopeful",), "a replica may still keep it"


def test_a_router_that_is_gone_leaves_no_heads_and_no_leases() -> None:
    grants = GrantQueue(window_s=0.1)
    kept = QueuedRequest(id="kept", arrival_s=0.0, due_s=9.0, work_s=1.0, promised=True)
    grants.heads("a", (head(kept, 0.0),), 0.0)
    assert grants.grant(Load(), 0.0) and grants.outstanding == 1
    grants.forget("a")
    assert not grants.outstanding and not grants.waiting
