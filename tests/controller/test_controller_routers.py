"""Several routers, one replica: introductions, silence, the pull of work, files and cache news."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest
from tests.support.virtual_ranks import Client
from tests.support.virtual_replica import VirtualReplica

from medha import PROTOCOL
from medha import messages as m
from medha.config import QueueOrder
from medha.fleet.grants import GrantQueue
from medha.fleet.prefix_index import chain
from medha.topology import Topology
from medha_worker.controller.outbox import Redial

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]
Judge = Callable[[VirtualReplica, m.Submit], None]
Idle = Callable[[VirtualReplica], None]


def head(id: str, *, age_s: float = 0.0, work_s: float = 0.01, promised: bool = True) -> m.Head:
    return m.Head(id=id, age_s=age_s, due_in_s=0.5 - age_s, work_s=work_s, promised=promised)


def test_the_order_of_the_scheduling_settings_reaches_routers(make_replica: Make) -> None:
    replica = make_replica(settings={"policy": "srpf", "max_batch_s": 0.2, "dispatch_budgets": 1.0})
    replica.run(1.0)
    assert replica.hello is not None
    assert replica.hello.order == QueueOrder(policy="srpf", guard_s=0.2, short_s=1.6)


def test_a_silent_router_is_dialled_again_and_its_requests_stop(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(routers=("a", "b"), topology=Topology(spp=2))
    mine, yours = make_submit("mine", 200, outputs=6000), make_submit("yours", 200, outputs=6000)
    replica.submit_at(1.0, mine, "a")
    replica.submit_at(1.0, yours, "b")
    replica.loop.at(2.0, 0, lambda: replica.silent_routers.add("a"))
    replica.run(7.6)
    assert replica.redials == ["a"]
    assert replica.controller.engine is not None
    assert [request.id for request in replica.controller.engine.requests.all()] == ["yours"]
    replica.run(14.0)
    times = [time_s for time_s, router in replica.hellos if router == "a" and time_s > 7.0]
    assert len(times) >= 6
    assert all(later - earlier <= 1.1 for earlier, later in itertools.pairwise(times))
    replica.silent_routers.clear()
    replica.run(16.0)
    assert set(replica.controller.routers.welcome) == {"a", "b"}
    replica.run(40.0)
    judge(replica, yours)
    assert not replica.clients["mine"].over
    idle(replica)


def test_a_router_that_answers_no_hello_is_dialled_again_with_the_present_keys(
    make_replica: Make,
) -> None:
    """A router with another key receives no Hello; one that refuses is left alone."""
    replica = make_replica(routers=("a", "b", "c"))
    replica.silent_routers |= {"b", "c"}
    for second in range(5, 100, 20):
        replica.send_at(second, m.Rejected("no such model"), "c")
    replica.run(95.0)
    assert replica.redials == ["b"] * 3
    replica.silent_routers.remove("b")
    replica.run(98.0)
    assert set(replica.controller.routers.welcome) == {"a", "b"}


def test_a_restarted_router_gets_no_tokens_of_old_requests(
    make_replica: Make, make_submit: Submit, idle: Idle
) -> None:
    replica = make_replica()
    replica.submit_at(1.0, make_submit("old", 100, outputs=5000))
    replica.send_at(1.5, m.Welcome("a-2"))
    replica.run(10.0)
    assert not replica.clients["old"].over
    idle(replica)


def test_a_router_that_lost_this_replica_gets_hello_at_once_and_its_requests_stop(
    make_replica: Make, make_submit: Submit, idle: Idle
) -> None:
    replica = make_replica()
    replica.submit_at(1.0, make_submit("old", 100, outputs=5000))
    replica.send_at(1.5, m.Rejected("say Hello first"))
    replica.run(2.1)  # an idle replica ticks with the beats here, each half second
    assert len(replica.hellos) == 2 and replica.hellos[-1][0] <= 2.0
    assert replica.controller.routers.welcome == ("a",)
    replica.run(5.0)
    assert not replica.clients["old"].over
    idle(replica)


def test_a_router_of_another_version_is_refused_with_both_versions(
    make_replica: Make, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    replica.silent_routers.add("a")
    replica.send_at(1.0, m.Welcome("a-1", PROTOCOL + 1))
    with caplog.at_level(logging.ERROR):
        replica.run(2.0)
    assert f"speaks protocol {PROTOCOL + 1}, this replica {PROTOCOL}" in caplog.text
    assert replica.controller.routers.welcome == ()


def test_a_router_that_rejects_this_replica_is_logged_once_and_tried_again(
    make_replica: Make, caplog: pytest.LogCaptureFixture
) -> None:
    replica = make_replica()
    replica.rejected["a"] = "this router serves other models"
    with caplog.at_level(logging.ERROR):
        replica.run(5.0)
    assert caplog.text.count("this router serves other models") == 1
    assert len(replica.hellos) >= 4
    assert replica.controller.status(5.0).refused == "this router serves other models"
    replica.rejected.clear()
    replica.run(10.0)
    assert replica.controller.status(10.0).refused == ""


def test_a_router_that_awaits_hello_does_not_refuse_this_replica(make_replica: Make) -> None:
    replica = make_replica()
    replica.silent_routers.add("a")
    replica.send_at(1.0, m.Rejected("say Hello first", stranger=True))
    replica.run(2.0)
    assert replica.controller.status(2.0).refused == ""


def test_counts_of_a_router_reach_the_other_routers_only(make_replica: Make) -> None:
    replica = make_replica(routers=("a", "b", "c"))
    replica.silent_routers.add("c")
    counts = m.TenantCounts("a-1", (m.TenantCount("alice", 3.0, 50.0, 20.0, 1.5),))
    replica.send_at(1.0, counts)
    replica.send_at(1.0, m.TenantCounts("c-1", counts.counts), router="c")  # not welcome
    replica.run(2.0)
    assert replica.counts == [("b", counts)]


def test_a_router_may_fetch_files_before_its_welcome(make_replica: Make) -> None:
    replica = make_replica(files={"tokenizer.json": b"{}"}, hashes={"tokenizer.json": "h"})
    replica.silent_routers.add("a")
    replica.send_at(1.0, m.FetchFile("h"))
    replica.run(2.0)
    assert replica.parts == [m.FilePart("h", 0, 2, b"{}")]
    assert replica.controller.routers.welcome == ()


def test_the_most_urgent_head_over_all_routers_is_granted_first(make_replica: Make) -> None:
    replica = make_replica(
        routers=("a", "b"), settings={"dispatch_budgets": 1.0, "max_batch_s": 0.1}
    )
    relaxed = head("relaxed", work_s=0.09)
    late = head("late", age_s=0.4, work_s=0.09)
    relegated = head("relegated", age_s=0.1, work_s=0.09, promised=False)
    replica.send_at(1.0, m.Heads((relegated, relaxed)), "a")
    replica.send_at(1.0, m.Heads((late,)), "b")
    replica.run(1.15)
    granted = [(router, grant.ids) for _, router, grant in replica.grants]
    assert granted == [("b", ("late",)), ("a", ("relaxed",))]


def test_a_lease_that_lapses_lets_the_head_be_granted_again() -> None:
    grants = GrantQueue(window_s=0.05, lease_s=0.2)
    first, second = (head(name, promised=False, work_s=0.06) for name in ("one", "two"))
    grants.heads("a", (first, second), 0.0)
    idle, busy = m.Load(), m.Load(ahead_s=0.06)
    assert grants.grant(idle, 0.0)["a"].ids == ("one",)
    assert grants.grant(idle, 0.1) == {}
    assert grants.grant(idle, 0.2)["a"].ids == ("one",)
    grants.submitted("one", 0.2)
    assert grants.grant(busy, 0.21) == {}, "the window is full of work that runs here"
    assert grants.grant(idle, 0.22)["a"].ids == ("two",)


def test_no_head_is_granted_while_draining(make_replica: Make) -> None:
    replica = make_replica()
    replica.loop.at(0.9, 0, replica.controller.drain)
    replica.send_at(1.0, m.Heads((head("one"),)))
    replica.run(2.0)
    assert replica.grants == []


def test_a_request_that_came_with_its_head_runs_without_a_grant_and_once(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica()
    client = replica.clients["one"] = Client()
    early = m.Heads((head("one"),), (make_submit("one", 200, outputs=20),))
    for time_s in (1.0, 1.0, 1.01):
        replica.send_at(time_s, early)
    replica.run(1.02)
    assert replica.controller.running_requests == 1
    replica.run(3.0)
    assert replica.grants == [] and client.finished is not None and len(client.tokens) == 20


def test_an_idle_replica_reports_its_load_twice_a_second_and_a_busy_one_when_it_changes(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica()
    replica.run(5.0)
    assert 9 <= len(replica.reports) <= 12
    replica.submit_at(5.1, make_submit("one", 500, outputs=800))
    replica.run(5.6)
    recent = [time_s for time_s, _ in replica.reports if time_s > 5.1]
    assert len(recent) >= 5
    assert min(b - a for a, b in itertools.pairwise(recent)) >= 0.02 - 1e-9


def test_a_router_that_comes_late_gets_a_snapshot_of_the_prefix_cache(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica(routers=("a", "b"))
    replica.silent_routers.add("b")
    submit = make_submit("one", 64, outputs=2, salt=b"s")
    names = b"".join(chain(m.from_bytes(submit.tokens), 16, b"s"))
    replica.submit_at(1.0, make_submit("one", 64, outputs=2, salt=b"s", hashes=names))
    replica.run(3.0)
    before = [event for router, event in replica.news if router == "a"]
    assert [event.number for event in before] == [1, 2]
    assert before[0].snapshot and before[0].stored == b"" and before[1].stored == names
    replica.silent_routers.clear()
    replica.run(5.0)
    late = [event for router, event in replica.news if router == "b"]
    assert late == [m.KvEvents(1, names, snapshot=True)]
    replica.send_at(6.0, m.Welcome("b-1"), "b")  # it missed news and asks again
    replica.run(7.0)
    again = [event for router, event in replica.news if router == "b"][len(late) :]
    assert again == late


def test_files_are_served_in_parts_by_their_hash(make_replica: Make) -> None:
    data = bytes(range(256)) * 10_000
    replica = make_replica(files={"tokenizer.json": data}, hashes={"tokenizer.json": "h"})
    offsets = [0, 1 << 20, 2 << 20]
    for offset in offsets:
        replica.send_at(1.0, m.FetchFile("h", offset))
    replica.send_at(1.0, m.FetchFile("unknown"))
    replica.run(2.0)
    assert b"".join(part.data for part in replica.parts) == data
    assert [part.total for part in replica.parts] == [len(data)] * 3 + [0]


def test_messages_of_a_router_without_welcome_are_ignored(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica()
    replica.silent_routers.add("a")
    replica.submit_at(1.0, make_submit("one"))
    replica.run(2.0)
    assert not replica.controller.running_requests and not replica.clients["one"].over


def test_a_redial_drops_messages_of_the_old_link(make_replica: Make) -> None:
    replica = make_replica()
    replica.run(1.0)
    replica.controller.routers.drop_silent(100.0)
    items = replica.controller.take()
    assert items == [Redial("a")]
