"""An operator that sees outdated lists at its start, or everything twice, destroys nothing.

Former lists of the API server, with their versions, take the place of its present ones, and later
events are held back (a replica of the API server that lags behind does just that); calls reach it
twice, and events arrive twice or late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from tests.api.fleet import SHORT_LEASE, Fleet, Operator, until
from tests.api.proxy import Answer, Call, Proxy

from medha_operator.kube.client import PARTIAL_LIST

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

WHOLE = ("medhareplicas", "nodes", "pods")
"""Kinds that are listed with more than their metadata."""


class Past:
    """Serves former lists of some kinds, as of one moment."""

    def __init__(self, fleet: Fleet, proxy: Proxy) -> None:
        self._fleet, self._proxy = fleet, proxy
        self._then: dict[str, bytes] = {}
        self._calls: dict[str, Call] = {}
        self._kinds: tuple[str, ...] = ()
        self.served: set[str] = set()
        """Calls that were answered with outdated content."""

    def take(self) -> None:
        """Keep every list of operators up to now."""
        lists = [call for call in self._proxy.calls if self._lists(call)]
        self._calls = {_asked(call): call for call in lists}
        self._then = {name: self._now(call) for name, call in self._calls.items()}

    def show(self, *kinds: str) -> None:
        """From now on, serve these kinds as they were; some have changed since."""
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
    """See one replica where there are two."""
    fleet.create("llama", parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    past.take()
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)


def fewer_replicas(fleet: Fleet, past: Past) -> None:
    """See two replicas where one is left."""
    fleet.create("llama", replicas=2, parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    past.take()
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 1)


def newer_pod(fleet: Fleet, past: Past) -> None:
    """See a former pod where a newer one has its name."""
    fleet.create("llama", parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    (name,) = fleet.pods()
    past.take()
    fleet.remove(name)
    fleet.played(lambda: bool(fleet.pods()) and fleet.is_ready("llama"))


def newer_node(fleet: Fleet, past: Past) -> None:
    """See two nodes with room where there is a third, with the running pods."""
    past.take()
    for node in fleet.nodes:
        fleet.change_node(node, {"unschedulable": True})
    home = fleet.add_node()
    fleet.create("llama", parallelism={"spp": 2})
    fleet.played(lambda: fleet.is_ready("llama"))
    assert {pod["spec"]["nodeName"] for pod in fleet.pods().values()} == {home}


@pytest.mark.parametrize(
    "change, kinds",
    [
        (more_replicas, ["medhareplicas"]),
        (more_replicas, ["pods"]),
        (more_replicas, ["medhareplicas", "pods", "services", "configmaps"]),
        (fewer_replicas, ["medhareplicas"]),
        (fewer_replicas, ["pods"]),
        (newer_pod, ["pods"]),
        (newer_node, ["nodes"]),
    ],
    ids=lambda part: part.__name__ if callable(part) else "-".join(part),
)
def test_a_stale_view_at_the_start_leads_to_no_deletion(
    fleet: Fleet,
    start_operator: Start,
    proxy: Proxy,
    change: Callable[[Fleet, Past], None],
    kinds: list[str],
) -> None:
    past = Past(fleet, proxy)
    first = start_operator(**SHORT_LEASE)
    until(first.leads)
    change(fleet, past)
    first.kill()
    before, done = uids(fleet).items(), len(proxy.done)
    past.show(*kinds)
    second = start_operator(name="two", **SHORT_LEASE)
    until(second.leads)
    until(lambda: past.served == past.other, "it has read every outdated list")
    seen = len(proxy.calls)
    until(lambda: sum(call.path.endswith("/nodes") for call in proxy.calls[seen:]) >= 3)
    assert before <= uids(fleet).items()
    proxy.trust()
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == len(before))
    assert uids(fleet).items() == before
    deleted = [
        reply.call
        for reply in proxy.done[done:]
        if reply.status == 200 and reply.call.verb == "DELETE" and "/pods/" in reply.call.path
    ]
    assert not [call for call in deleted if call.path.rpartition("/")[2] in dict(before)]


def test_duplicated_writes_and_duplicated_or_late_events_create_nothing_twice(
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
    until(operator.alive)
