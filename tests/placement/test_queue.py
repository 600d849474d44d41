"""The router's queue: a total order by urgency, and a share for those without a promise."""

from __future__ import annotations

import collections
import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import QueueOrder, Scheduling
from medha.errors import SpecError
from medha.fleet.request_queue import AGEING, QueuedRequest, RequestQueue
from medha.tenants import ServedWork


def item(
    id: str,
    due_s: float = 10.0,
    work_s: float = 0.1,
    arrival_s: float = 0.0,
    promised: bool = True,
    replica: str = "r0",
    weight: float = 1.0,
) -> QueuedRequest:
    return QueuedRequest(
        id=id,
        arrival_s=arrival_s,
        due_s=due_s,
        work_s=work_s,
        promised=promised,
        replica=replica,
        weight=weight,
    )


def queue_of(*items: QueuedRequest, policy: str = "lars") -> RequestQueue:
    queue = RequestQueue(QueueOrder(policy=policy))
    for queued in items:
        queue.add(queued)
    return queue


def test_short_promised_ones_go_by_deadline_then_long_ones_by_relative_slack() -> None:
    queue = queue_of(
        item("long-loose", 100.0, 10.0),  # ρ = 9
        item("long-tight", 150.0, 100.0),  # ρ = 0.5
        item("short-later", 9.0),
        item("short-sooner", 5.0),
    )
    assert queue.order(0.0) == ["short-sooner", "short-later", "long-tight", "long-loose"]


def test_a_promised_one_whose_slack_runs_out_goes_first() -> None:
    queue = queue_of(item("short", 5.0), item("long", 100.0, 50.0))
    assert queue.order(0.0) == ["short", "long"]
    assert queue.order(49.9)[0] == "short"  # its own slack has run out too, and it is due first
    queue.remove("short")
    queue.add(item("fresh", 55.0, arrival_s=49.9))
    assert queue.order(49.9) == ["long", "fresh"] or queue.order(49.9) == ["fresh", "long"]
    queue.add(item("fresh", 155.0, arrival_s=49.9))
    assert queue.order(49.9) == ["long", "fresh"]


def test_relegated_ones_follow_shortest_first_and_weight_helps() -> None:
    queue = queue_of(
        item("big", work_s=5.0, promised=False),
        item("small", work_s=1.0, promised=False),
        item("heavy", work_s=5.0, promised=False, weight=10.0),
        item("kept", 99.0),
    )
    assert queue.order(0.0) == ["kept", "heavy", "small", "big"]


def test_a_relegated_long_one_goes_before_short_ones_that_come_much_later() -> None:
    queue = queue_of(
        item("long", work_s=1.35, promised=False),
        *(item(f"{at}", work_s=0.02, arrival_s=at, promised=False) for at in (10.0, 26.0, 27.0)),
    )
    assert queue.order(30.0) == ["10.0", "26.0", "long", "27.0"]


def served_until(queue: RequestQueue, seconds: float) -> dict[str, float]:
    """Serve the first in order, one after the other; returns seconds by tenant."""
    served: dict[str, float] = collections.defaultdict(float)
    now = 0.0
    while now < seconds:
        queued = queue.get(queue.order(now)[0])
        assert queued is not None
        queue.serve(queued.id, now)
        served[queued.tenant] += queued.work_s
        now += queued.work_s
    return dict(served)


@pytest.mark.parametrize("sizes", [(0.1, 0.1), (0.3, 0.1), (0.05, 0.8)])
def test_relegated_work_of_tenants_is_served_by_weight_whatever_their_sizes_and_numbers(
    sizes: tuple[float, float],
) -> None:
    queue = RequestQueue()
    for tenant, weight, count, work_s in (("a", 1.0, 2000, sizes[0]), ("b", 3.0, 600, sizes[1])):
        for index in range(count):
            queue.add(
                QueuedRequest(
                    id=f"{tenant}{index}",
                    arrival_s=0.001 * index,
                    due_s=10.0,
                    work_s=work_s,
                    promised=False,
                    weight=weight,
                    tenant=tenant,
                    charge_s=work_s,
                )
            )
    served = served_until(queue, 60.0)
    assert abs(served["b"] / 3.0 - served["a"]) <= sum(sizes)


def test_a_tenant_that_was_promised_much_waits_for_others_without_a_promise() -> None:
    queue = RequestQueue()
    for index, tenant in enumerate(("a", "b")):
        for promised in (True, False):
            queue.add(
                QueuedRequest(
                    id=f"{tenant}-{promised}",
                    arrival_s=float(index),
                    due_s=9.0,
                    work_s=1.0,
                    promised=promised,
                    tenant=tenant,
                    charge_s=1.0,
                )
            )
    assert queue.order(1.0)[2:] == ["a-False", "b-False"]
    queue.serve("a-True", 1.0)
    assert queue.order(1.0)[1:] == ["b-False", "a-False"]


def relegated(id: str, tenant: str, work_s: float, arrival_s: float = 0.0) -> QueuedRequest:
    return QueuedRequest(
        id=id,
        arrival_s=arrival_s,
        due_s=9.0,
        work_s=work_s,
        promised=False,
        tenant=tenant,
        charge_s=work_s,
    )


@given(
    charges=st.lists(st.tuples(st.sampled_from("abcdef"), st.floats(0.1, 9.0)), max_size=12),
    waiting=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.floats(0.1, 9.0), st.floats(0.0, 5.0)), max_size=12
    ),
)
def test_the_work_of_tenants_is_shared_as_defined(
    charges: list[tuple[str, float]], waiting: list[tuple[str, float, float]]
) -> None:
    """A tenant's k-th request counts as what it was served, here and elsewhere, and its first."""
    queue, here, elsewhere, now = RequestQueue(), ServedWork(), ServedWork(), 10.0
    for number, (tenant, seconds) in enumerate(charges):
        if number % 3:
            sent = relegated(f"sent{number}", tenant, seconds)
            queue.add(sent)
            queue.serve(sent.id, float(number) / 2.0)
            here.charge(tenant, seconds, float(number) / 2.0)
        else:
            queue.note_elsewhere("router", tenant, seconds, float(number) / 2.0)
            elsewhere.replace(tenant, seconds, float(number) / 2.0)
    items = [relegated(f"{number}", *item) for number, item in enumerate(waiting)]
    for item in items:
        queue.add(item)
    keys: dict[str, float] = {}
    for tenant in sorted({item.tenant for item in items}):
        own = [item for item in items if item.tenant == tenant]
        own.sort(key=lambda item: (item.work_s + AGEING * item.arrival_s, item.arrival_s))
        key = here.of(tenant, now) + elsewhere.of(tenant, now)
        for item in own:
            keys[item.id] = key
            key += item.work_s
    order = queue.order(now)
    assert sorted(order) == sorted(keys)
    if len({item.tenant for item in items}) > 1:
        assert all(
            keys[first] <= keys[second] + 1e-9 for first, second in itertools.pairwise(order)
        )


def test_the_queue_forgets_the_names_of_tenants_that_left() -> None:
    queue = RequestQueue()
    for index in range(1000):
        queue.add(
            QueuedRequest(
                id=str(index),
                arrival_s=0.0,
                due_s=9.0,
                work_s=1.0,
                promised=False,
                tenant=f"t{index}",
            )
        )
        if index >= 2:
            queue.remove(str(index - 2))
    assert len(queue._tenants) < 80
    assert queue.order(0.0) == ["998", "999"]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", ["a", "b", "c"]),
        ("edf", ["c", "b", "a"]),
        ("srpf", ["b", "c", "a"]),
        ("lrs", ["c", "b", "a"]),
        ("lars-paper", ["c", "a", "b"]),
    ],
)
def test_other_policies_order_all_alike(policy: str, order: list[str]) -> None:
    queue = queue_of(
        item("a", 30.0, 10.0, 0.0),
        item("b", 9.0, 1.0, 1.0),
        item("c", 5.0, 2.0, 2.0),
        policy=policy,
    )
    assert queue.order(0.0) == order


def test_ties_go_to_the_earlier_arrival_then_to_the_smaller_id() -> None:
    queue = queue_of(
        item("late", arrival_s=5.0), item("b", arrival_s=1.0), item("a", arrival_s=1.0)
    )
    assert queue.order(6.0) == ["a", "b", "late"]


def test_the_order_of_waiting_requests_may_change() -> None:
    queue = queue_of(item("small", 50.0, 1.0), item("due", 20.0, 10.0))
    assert queue.order(0.0) == ["due", "small"]  # long ones by relative slack: none is short
    queue.set_order(QueueOrder(short_s=1.0))
    assert queue.order(0.0) == ["small", "due"]
    queue.set_order(QueueOrder(policy="srpf"))
    assert queue.order(0.0) == ["small", "due"]
    queue.set_order(QueueOrder(policy="edf"))
    assert queue.order(0.0) == ["due", "small"]


def test_an_unknown_policy_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"scheduling.policy is best: must be one of lars, .*fcfs"):
        RequestQueue(QueueOrder(policy="best"))
    with pytest.raises(SpecError, match=r"scheduling.normaliser is size"):
        RequestQueue().set_order(QueueOrder(normaliser="size"))
    with pytest.raises(SpecError, match=r"scheduling.policy is best"):
        Scheduling(policy="best")


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), max_size=60), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_heads_are_the_first_of_each_kind_in_the_order_of_the_queue(
    drawn: list[tuple[int, int, int, int]], limit: int
) -> None:
    items = [
        item(str(index), float(due), float(work), float(arrival), index % 3 > 0, "xy"[at % 2])
        for index, (due, work, arrival, at) in enumerate(drawn)
    ]
    queue = queue_of(*items)
    order = [queue.get(item_id) for item_id in queue.order(1.0)]
    for replica, heads in queue.heads(1.0, limit).items():
        here = [queued for queued in order if queued and queued.replica == replica]
        first = {
            queued.id
            for promised in (True, False)
            for queued in [queued for queued in here if queued.promised == promised][:limit]
        }
        assert list(heads) == [queued for queued in here if queued.id in first]


def test_heads_are_per_replica_and_bounded_and_the_unplaced_wait_apart() -> None:
    queue = queue_of(
        item("a", 1.0, replica="x"),
        item("b", 2.0, replica="y"),
        item("c", 3.0, replica="x"),
        item("d", 4.0, replica=""),
        item("e", 5.0, replica="x"),
    )
    heads = queue.heads(0.0, limit=2)
    assert {name: [queued.id for queued in items] for name, items in heads.items()} == {
        "x": ["a", "c"],
        "y": ["b"],
    }
    assert [queued.id for queued in queue.unplaced(0.0, promised=True)] == ["d"]
    assert not list(queue.unplaced(0.0, promised=False))
    assert {queued.id for queued in queue.placed_on("x")} == {"a", "c", "e"}


def test_a_replaced_item_waits_once() -> None:
    queue = queue_of(item("a", 1.0), item("a", 9.0, replica="y"), item("b", 5.0))
    assert len(queue) == 2 and queue.order(0.0) == ["b", "a"]
    assert queue.get("a") == item("a", 9.0, replica="y")


def test_promised_ones_that_cannot_make_it_any_more_are_named() -> None:
    queue = queue_of(item("a", 1.0), item("b", 9.0), item("c", 1.0, promised=False))
    assert queue.late(0.95) == ("a",)


@given(st.lists(st.tuples(st.sampled_from("ar"), st.integers(0, 30)), max_size=400))
@settings(max_examples=50, deadline=None)
def test_the_order_holds_what_was_added_and_not_removed(steps: list[tuple[str, int]]) -> None:
    queue, waiting = RequestQueue(), set()
    for what, number in steps:
        name = str(number)
        if what == "a":
            queue.add(item(name, due_s=number % 7, work_s=number % 3, promised=number % 2 == 0))
            waiting.add(name)
        else:
            gone = queue.remove(name)
            assert (gone is not None) == (name in waiting)
            waiting.discard(name)
    assert len(queue) == len(waiting)
    assert sorted(queue.order(1.0)) == sorted(waiting)


def test_ten_thousand_are_ordered_in_a_few_milliseconds() -> None:
    rng, queue = random.Random(1), RequestQueue()
    for index in range(10_000):
        queue.add(
            item(
                str(index),
                rng.uniform(0, 100),
                rng.uniform(0.01, 50),
                rng.uniform(0, 9),
                rng.random() < 0.8,
            )
        )
    best = min(_timed(queue) for _ in range(5))
    assert best < 0.05  # the goal is 2 ms of a core; this only catches a change of kind


def _timed(queue: RequestQueue) -> float:
    start = time.thread_time()
    queue.order(1.0)
    return time.thread_time() - start
