"""An operator that is shown the past as it starts, or everything twice: it destroys nothing by it.

Lists that the API server gave before, with the versions of then, are given in place of its present
ones, and what came since is not told (a replica of it that lags behind does just that); calls reach
it twice, and events come twice or late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.proxy import Answer, Call, Proxy

from medha_operator.client import PARTIAL_LIST

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(600)

WHOLE = ("medhareplicas", "nodes", "pods")
"""Kinds that are listed with more than their metadata."""


class Past:
    """What operators are told of some kinds from a moment on: nothing but how they were then."""

    def __init__(self, fleet: Fleet, proxy: Proxy) -> None:
        self._fleet, self._proxy = fleet, proxy
        self._then: dict[str, bytes] = {}
        self._calls: dict[str, Call] = {}
        self._kinds: tuple[str, ...] = ()
        self.served: set[str] = set()
        """What was asked and answered with what is not so (any more)."""

    def take(self) -> None:
        """The moment is now: every list that operators have asked for yet is kept."""
        asked = [each for each in self._proxy.calls if self._lists(each)]
        self._calls = {_asked(each): each for each in asked}
        self._then = {name: self._now(call) for name, call in self._calls.items()}

    def show(self, *kinds: str) -> None:
        """From now on these kinds are told of as they were; some of them are otherwise now."""
        self._kinds = kinds
        self.other = {
            name
            for name, call in self._calls.items()
            if _kind(call) in kinds and _items(self._now(call)) != _items(self._then[name])
        }
        assert self.other, f"nothing of {kinds} has changed since"
        self._proxy.after = self._answer
        self._proxy.events = lambda call, line: [] if _kind(call) in kinds else [line]

    def _answer(self, call: Call) -> Answer | None:
        name = _asked(call)
        if _kind(call) not in self._kinds or not self._lists(call) or name not in self._then:
            return None
        self.served |= {name} & self.other
        return Answer(200, page=self._then[name])

    def _now(self, call: Call) -> bytes:
        accept = {} if _kind(call) in WHOLE else {"Accept": PARTIAL_LIST}
        return self._fleet.api.get(call.path, params=call.query, headers=accept).content

    @staticmethod
    def _lists(call: Call) -> bool:
        return call.verb == "GET" and not call.watches and "limit" in call.query


def _asked(call: Call) -> str:
    return f"{call.path} {sorted(call.query.items())}"


def _kind(call: Call) -> str:
    return call.path.rpartition("/")[2]


def _items(page: bytes) -> Any:
    return msgspec.json.decode(page)["items"]


def uids(fleet: Fleet) -> Mapping[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}


def more_replicas(fleet: Fleet, past: Past) -> None:
    """One where there are two by now."""
    fleet.create("llama", parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    past.take()
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)


def fewer_replicas(fleet: Fleet, past: Past) -> None:
    """Two where there is one left."""
    fleet.create("llama", replicas=2, parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    past.take()
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 1)


def another_of_its_name(fleet: Fleet, past: Past) -> None:
    """A pod where another one bears its name by now."""
    fleet.create("llama", parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    (name,) = fleet.pods()
    past.take()
    fleet.remove(name)
    fleet.played(lambda: bool(fleet.pods()) and fleet.is_ready("llama"))


def another_node(fleet: Fleet, past: Past) -> None:
    """Two nodes with room where there is a third, and on it what is running."""
    past.take()
    for each in fleet.nodes:
        fleet.change_node(each, {"unschedulable": True})
    home = fleet.add_node()
    fleet.create("llama", parallelism={"spp": 2})
    fleet.played(lambda: fleet.is_ready("llama"))
    assert {each["spec"]["nodeName"] for each in fleet.pods().values()} == {home}


@pytest.mark.parametrize(
    "change, kinds",
    [
        (more_replicas, ["medhareplicas"]),
        (more_replicas, ["pods"]),
        (more_replicas, ["medhareplicas", "pods", "services", "configmaps"]),
        (fewer_replicas, ["medhareplicas"]),
        (fewer_replicas, ["pods"]),
        (another_of_its_name, ["pods"]),
        (another_node, ["nodes"]),
    ],
    ids=lambda each: each.__name__ if callable(each) else "-".join(each),
)
def test_a_stale_view_at_the_start_leads_to_no_deletion(
    fleet: Fleet, start_operator: Start, proxy: Proxy,
    change: Callable[[Fleet, Past], None], kinds: list[str],
) -> None:  # fmt: skip
    past = Past(fleet, proxy)
    first = start_operator()
    until(first.leads)
    change(fleet, past)
    first.kill()
    before, done = uids(fleet).items(), len(proxy.done)
    past.show(*kinds)
    second = start_operator(name="two")
    until(second.leads)
    seen = len(proxy.calls)
    until(lambda: sum(each.path.endswith("/nodes") for each in proxy.calls[seen:]) >= 3)
    assert past.served == past.other
    assert before <= uids(fleet).items()
    proxy.trust()
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == len(before))
    assert uids(fleet).items() == before
    deleted = [each.call for each in proxy.done[done:] if each.status == 200
               and each.call.verb == "DELETE" and "/pods/" in each.call.path]  # fmt: skip
    assert not [each for each in deleted if each.path.rpartition("/")[2] in dict(before)]


def test_writes_that_come_twice_and_events_that_come_twice_or_late_make_nothing_twice(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    proxy.twice = lambda call: call.own
    proxy.events = lambda call, line: [line, line]
    proxy.delay = lambda call: 0.2 if call.watches else 0.0
    operator = start_operator()
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    assert len(fleet.pods()) == 4
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    assert operator.alive()
