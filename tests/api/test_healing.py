"""How soon one lost event is made up for, and that nothing is written once all is well."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.hurried import MOMENT
from tests.api.played import Router
from tests.api.proxy import Call, Proxy, event
from tests.api.test_long_outages import logged

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(600)

RESYNC_S = 3.0
SPREAD = 1.25
"""A resync is spread over so much more than its time."""
SLACK_S = 8.0
"""What a busy machine may take to list everything, and to act."""
HURRY = 10.0
USUAL = {"MEDHA_RESYNC_S": "30", "MEDHA_LEASE_S": "15", "MEDHA_REPORT_S": "2"}
FAILED = {"phase": "Failed", "reason": "Test", "message": "it fell"}
SETTLED_S, REST_S = 20.0, 90.0
"""Of the operator's own time, of which ten seconds pass in one."""


class Loss:
    """The next event of this kind about this name never comes, to whoever watches by this agent."""

    def __init__(self, proxy: Proxy, agent: str, kind: str, type: str, name: str) -> None:
        self._wanted = agent, kind, (type, name)
        self.at_s = 0.0
        proxy.events = self._events

    def _events(self, call: Call, line: bytes) -> list[bytes]:
        found = call.agent[:5], call.path.rpartition("/")[2], event(line)
        if self.at_s or found != self._wanted:
            return [line]
        self.at_s = time.monotonic()
        return []


def test_one_lost_event_is_made_up_for_with_the_next_resync(
    served: Fleet, start_operator: Start, proxy: Proxy, api: httpx.Client,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Each of these would never be known without it: nothing else tells of them."""
    start_operator(MEDHA_RESYNC_S=str(RESYNC_S))
    until(lambda: any(each.watches and each.agent.startswith("kopf/") for each in proxy.calls))
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
        Loss(proxy, "kopf/", "medhareplicas", "ADDED", "llama"), "a resource that is made",
        lambda: served.create("llama"), lambda: len(served.pods()) == 2,
    )  # fmt: skip
    lost(
        Loss(proxy, "kopf/", "medhareplicas", "MODIFIED", "llama"), "an edit",
        lambda: served.change("llama", {"replicas": 2}), lambda: len(served.pods()) == 4,
    )  # fmt: skip
    before = uids(served)
    lost(
        Loss(proxy, "medha", "pods", "MODIFIED", "llama-1-g0-s1"), "a pod that fails",
        lambda: served.tell("llama-1-g0-s1", FAILED),
        lambda: len(uids(served).items() - before.items()) == 2,
    )  # fmt: skip
    before = uids(served)
    lost(
        Loss(proxy, "medha", "pods", "DELETED", "llama-0-g0-s1"), "a pod that is gone",
        lambda: served.remove("llama-0-g0-s1"),
        lambda: len(uids(served).items() - before.items()) == 2,
    )  # fmt: skip
    service = min(each["metadata"]["name"] for each in served.list("services"))
    lost(
        Loss(proxy, "medha", "services", "DELETED", service), "a Service that is gone",
        lambda: api.delete(f"{core}/services/{service}").raise_for_status(),
        lambda: api.get(f"{core}/services/{service}").status_code == 200,
    )  # fmt: skip
    with capsys.disabled():
        print("\n", *(f"{what}: {each:.1f} s" for what, each in took_s.items()), sep="\n  ")  # noqa: T201
    assert max(took_s.values()) <= SPREAD * RESYNC_S + SLACK_S


def uids(fleet: Fleet) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}


def well(fleet: Fleet) -> bool:
    """Everything that there is runs, and the status tells of nothing else."""
    told = fleet.status("llama")
    return all(
        each["status"] == "True"
        for each in told["conditions"]
        if each["type"] in ("Placed", "GroupsReady", "KvpReady", "Updated")
    )


def test_once_all_is_well_nothing_is_written_for_a_minute_and_a_half(
    served: Fleet, start_operator: Start, proxy: Proxy, router: Router
) -> None:
    """By the operator's own clock: three resyncs, and more than passes between any two messages.
    One resource was healed, one is scaled by the operator, one by others, one fits nowhere."""
    operator = start_operator(hurry=HURRY, **USUAL, **router.settings)
    served.create("llama")
    served.create("own", autoscaling={"maxReplicas": 3})
    served.create("others", autoscaling={"maxReplicas": 3, "mode": "External"})
    served.create("homeless", placement={"nodeSelector": {"test": "nowhere"}})
    named = ("llama", "own", "others")
    served.played(lambda: all(served.is_ready(each) for each in named))
    pods = set(uids(served).items())
    served.tell("llama-0-g0-s1", FAILED)
    served.played(lambda: len(pods - uids(served).items()) == 2, "its group is made anew")
    served.played(lambda: all(served.is_ready(each) for each in named) and well(served))
    until(lambda: time.monotonic() - proxy.last_write_s() > SETTLED_S / HURRY, "it settles")
    began, began_s = len(proxy.done), its_time_s(operator)
    until(lambda: its_time_s(operator) - began_s > REST_S)
    assert [each.call for each in proxy.done[began:] if each.call.own] == []
    assert operator.leads()


def its_time_s(operator: Operator) -> float:
    """What the operator's own clock says."""
    told = len(logged(operator, MOMENT))
    operator.process.send_signal(signal.SIGUSR1)
    return until(lambda: logged(operator, MOMENT)[told:])[-1][0]
