"""A lost event is repaired by the next resync, and nothing is written once all is well."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.proxy import Call, Proxy, event
from tests.api.stand_ins import Router

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

RESYNC_S = 3.0
SPREAD = 1.25
"""Factor by which a resync may be spread beyond its interval."""
SLACK_S = 30.0
"""Time in which a busy machine lists everything and acts. Without the resync it would take until
a watch ends: 75 s."""
SPEED = 4.0
USUAL = {"MEDHA_RESYNC_S": "30", "MEDHA_LEASE_S": "15", "MEDHA_REPORT_S": "2"}
FAILED = {"phase": "Failed", "reason": "Test", "message": "it fell"}
SETTLED_S, REST_S = 20.0, 90.0
"""Seconds of the operator's own time; SPEED of them pass in one."""


class Loss:
    """Loses the next event of this type about this object, for watches of this agent."""

    def __init__(self, proxy: Proxy, agent: str, kind: str, type: str, name: str) -> None:
        self._wanted = agent, kind, (type, name)
        self.at_s = 0.0
        proxy.events = self._events

    def _events(self, call: Call, line: bytes) -> list[bytes]:
        change = call.agent[:5], call.path.rpartition("/")[2], event(line)
        if self.at_s or change != self._wanted:
            return [line]
        self.at_s = time.monotonic()
        return []


def test_the_next_resync_repairs_a_lost_event(
    served: Fleet,
    start_operator: Start,
    proxy: Proxy,
    api: httpx.Client,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only the resync can repair these: no other event carries the information."""
    start_operator(MEDHA_RESYNC_S=str(RESYNC_S))
    until(lambda: any(call.watches and call.agent.startswith("kopf/") for call in proxy.calls))
    took_s: dict[str, float] = {}
    core = f"/api/v1/namespaces/{served.namespace}"

    def lost(
        loss: Loss, what: str, cause: Callable[[], object], healed: Callable[[], bool]
    ) -> None:
        cause()
        served.played(lambda: loss.at_s, f"{what} is lost")
        served.played(healed, f"{what} is made up for")
        took_s[what] = time.monotonic() - loss.at_s
        served.played(lambda: served.is_ready("llama") and well(served), "all is well")

    lost(
        Loss(proxy, "kopf/", "medhareplicas", "ADDED", "llama"),
        "a resource that is made",
        lambda: served.create("llama"),
        lambda: len(served.pods()) == 2,
    )
    lost(
        Loss(proxy, "kopf/", "medhareplicas", "MODIFIED", "llama"),
        "an edit",
        lambda: served.change("llama", {"replicas": 2}),
        lambda: len(served.pods()) == 4,
    )
    before = uids(served)
    lost(
        Loss(proxy, "medha", "pods", "MODIFIED", "llama-1-g0-s1"),
        "a pod that fails",
        lambda: served.set_not_ready("llama-1-g0-s1", FAILED),
        lambda: len(uids(served).items() - before.items()) == 2,
    )
    before = uids(served)
    lost(
        Loss(proxy, "medha", "pods", "DELETED", "llama-0-g0-s1"),
        "a pod that is gone",
        lambda: served.remove("llama-0-g0-s1"),
        lambda: len(uids(served).items() - before.items()) == 2,
    )
    service = min(document["metadata"]["name"] for document in served.list("services"))
    lost(
        Loss(proxy, "medha", "services", "DELETED", service),
        "a Service that is gone",
        lambda: api.delete(f"{core}/services/{service}").raise_for_status(),
        lambda: api.get(f"{core}/services/{service}").status_code == 200,
    )
    with capsys.disabled():
        print("\n", *(f"{what}: {seconds:.1f} s" for what, seconds in took_s.items()), sep="\n  ")  # noqa: T201
    assert max(took_s.values()) <= SPREAD * RESYNC_S + SLACK_S


def uids(fleet: Fleet) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}


def well(fleet: Fleet) -> bool:
    """Return true if everything runs and the status agrees."""
    status = fleet.status("llama")
    return all(
        condition["status"] == "True"
        for condition in status["conditions"]
        if condition["type"] in ("Placed", "GroupsReady", "KvpReady", "Updated")
    )


def test_nothing_is_written_for_ninety_seconds_once_all_is_well(
    served: Fleet, start_operator: Start, proxy: Proxy, router: Router
) -> None:
    """Observe by the operator's clock: three resyncs, longer than the pause between two messages.
    One resource was healed, one is scaled by the operator, one by others, and one fits nowhere."""
    operator = start_operator(speed=SPEED, **USUAL, **router.settings)
    served.create("llama")
    served.create("own", autoscaling={"maxReplicas": 3})
    served.create("others", autoscaling={"maxReplicas": 3, "mode": "External"})
    served.create("homeless", placement={"nodeSelector": {"test": "nowhere"}})
    named = ("llama", "own", "others")
    served.played(lambda: all(served.is_ready(name) for name in named))
    pods = set(uids(served).items())
    served.set_not_ready("llama-0-g0-s1", FAILED)
    served.played(lambda: len(pods - uids(served).items()) == 2, "its group is made anew")
    counted = operator.shown("medha_group_restarts_total")
    assert counted[f'name="llama",namespace="{served.namespace}"'] == sum(counted.values()) == 1.0
    served.played(lambda: all(served.is_ready(name) for name in named) and well(served))
    until(lambda: time.monotonic() - proxy.last_write_s() > SETTLED_S / SPEED, "it settles")
    began, began_s = len(proxy.done), operator.time_s()
    until(lambda: operator.time_s() - began_s > REST_S)
    assert [reply.call for reply in proxy.done[began:] if reply.call.own] == []
    until(operator.leads)
