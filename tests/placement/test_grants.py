"""Grants of one controller over several routers: one order, and room for promised and late work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import POLICIES, QueueOrder
from medha.fleet.grants import GrantQueue
from medha.fleet.request_queue import QueuedRequest, RequestQueue
from medha.messages import Head, Load, Submit

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
    single, grants = RequestQueue(order), GrantQueue(window_s=1e9, order=order)
    for request, _ in queued:
        single.add(request)
    for router, now in enumerate(published_s):
        heads = tuple(head(request, now) for request, of in queued if of == router)
        grants.heads(str(router), heads, now)
    granted = [head.id for head in grants.grantable(Load(), NOW_S)]
    assert granted == single.order(NOW_S)


def request(id: str, *, due_s: float = 9.0, promised: bool = False) -> QueuedRequest:
    return QueuedRequest(id=id, arrival_s=0.0, due_s=due_s, work_s=1.0, promised=promised)


def granted_with(load: Load) -> list[str]:
    """Ids granted in order, of two requests of each kind from two routers."""
    grants = GrantQueue(window_s=0.1)
    for router in "ab":
        kinds = (
            request(f"late-{router}", due_s=0.5),
            request(f"hopeful-{router}"),
            request(f"kept-{router}", promised=True),
        )
        grants.heads(router, tuple(head(queued, 0.0) for queued in kinds), 0.0)
    return [queued.id for queued in grants.grantable(load, 0.0)]


def test_promised_requests_are_granted_at_once() -> None:
    full = Load(ahead_s=0.2, relegated_ahead_s=0.2)
    assert granted_with(full) == ["kept-a", "kept-b"]


def test_a_request_that_may_be_in_time_waits_for_kept_work_and_a_late_one_for_late_work() -> None:
    assert granted_with(Load(relegated_ahead_s=0.2)) == ["kept-a", "kept-b"]
    assert granted_with(Load(ahead_s=0.2)) == ["kept-a", "kept-b", "late-a"]


def test_without_promises_all_wait_for_the_work_ahead() -> None:
    grants = GrantQueue(window_s=1.5, order=QueueOrder(policy="edf"))
    waiting = (request("c"), request("b", promised=True), request("a"), request("d", due_s=1.0))
    grants.heads("a", tuple(head(queued, 0.0) for queued in waiting), 0.0)
    assert [queued.id for queued in grants.grantable(Load(), 0.0)] == ["d", "a"]
    assert grants.grantable(Load(ahead_s=1.5), 0.0) == []


def test_a_router_that_is_gone_leaves_no_heads_and_no_leases() -> None:
    grants = GrantQueue(window_s=0.1)
    kept = QueuedRequest(id="kept", arrival_s=0.0, due_s=9.0, work_s=1.0, promised=True)
    grants.heads("a", (head(kept, 0.0),), 0.0)
    assert grants.grant(Load(), 0.0) and grants.outstanding == 1
    grants.forget("a")
    assert not grants.outstanding and not grants.waiting


def test_a_request_that_came_with_its_head_begins_when_there_is_room() -> None:
    grants = GrantQueue(window_s=0.1)
    heads = tuple(head(request(name, due_s=9.0), 0.0) for name in ("first", "second"))
    early = Submit(id="second", tokens=bytes(4), age_s=0.25)
    grants.heads("a", heads, 0.0, (early,))
    full = Load(ahead_s=0.2)
    assert grants.begin(full, 0.5) == []
    assert grants.begin(Load(), 0.5) == [], "the first one fills the window"
    grants.submitted("first", 0.5)
    [(router, begun)] = grants.begin(Load(), 0.75)
    assert (router, begun.id, begun.age_s) == ("a", "second", 1.0)
    assert not grants.waiting and not grants.outstanding


def test_an_early_request_is_dropped_with_its_head_or_its_promise() -> None:
    grants = GrantQueue(window_s=0.1)
    early = Submit(id="r", tokens=bytes(4), promised=True)
    kept = head(request("r", promised=True), 0.0)
    relegated = head(request("r"), 0.0)
    for later in ((), (relegated,)):
        grants.heads("a", (kept,), 0.0, (early,))
        grants.heads("a", later, 0.1)
        grants.heads("a", (kept,), 0.2)
        assert grants.begin(Load(), 0.2) == []
        assert grants.grant(Load(), 0.2)["a"].ids == ("r",)
        grants.forget("a")
    grants.heads("a", (kept,), 0.3, (early,))
    grants.heads("a", (kept,), 0.4)
    assert [begun.id for _, begun in grants.begin(Load(), 0.4)] == ["r"]


def test_requests_beyond_a_share_wait_for_late_work_and_not_for_kept_work() -> None:
    grants = GrantQueue(window_s=0.1)
    beyond = Head("b", 0.0, 9.0, 1.0, False, tenant="hog", charge_s=1.0, beyond_share=True)
    grants.heads("a", (beyond,), 0.0)
    assert not grants.grantable(Load(relegated_ahead_s=0.1), 0.0)
    assert grants.grantable(Load(ahead_s=0.1), 0.0)


def test_a_controller_shares_what_it_grants_among_tenants_of_all_routers() -> None:
    """The hog has many heads in both routers; the other has some in the second only."""
    grants = GrantQueue(window_s=0.5)
    heads = {
        "a": [f"hog-{index}" for index in range(40)],
        "b": [f"hog-{index}" for index in range(40, 60)] + [f"small-{n}" for n in range(30)],
    }
    served: list[str] = []
    for step in range(40):
        now = 0.1 * step
        for router, names in heads.items():
            published = tuple(
                Head(name, 0.0, 0.5, 1.0, False, tenant=name.split("-")[0], charge_s=1.0)
                for name in names
                if name not in served
            )
            grants.heads(router, published, now)
        first = grants.grantable(Load(), now)[0]
        grants.submitted(first.id, now)
        served.append(first.id)
    small = sum(name.startswith("small") for name in served)
    assert small == 20
