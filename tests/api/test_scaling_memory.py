"""The autoscaler's memory after a loss of the Lease, and the next operator's view of its last
writes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from tests.api.fleet import SHORT_LEASE, Fleet, Operator, until
from tests.api.proxy import Answer, Call, Proxy
from tests.api.stand_ins import Router

from medha.fleet.autoscaling import Journal, replay

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)


def journal(operator: Operator) -> Journal:
    journals = msgspec.json.decode(operator.scaling(), type=dict[str, Journal])
    return next(iter(journals.values()), Journal())


def replicas(fleet: Fleet) -> int:
    return int(fleet.api.get(fleet.path("llama")).json()["spec"]["replicas"])


@pytest.mark.parametrize("silent", ["/leases/medha-operator", "/v1/leases"])
def test_a_moment_without_the_lease_or_those_of_others_keeps_the_autoscalers_memory(
    served: Fleet, start_operator: Start, router: Router, proxy: Proxy, silent: str
) -> None:
    operator = start_operator(**router.settings)
    served.create("llama", autoscaling={"maxReplicas": 3})
    served.played(lambda: served.is_ready("llama") and len(journal(operator).looks) > 3)
    proxy.before = lambda call: Answer(0) if silent in call.path else None
    until(lambda: operator.metric("medha_desired_replicas") is None)
    last = journal(operator).looks[-1]
    proxy.trust()
    until(lambda: operator.leads() and operator.metric("medha_desired_replicas") == 1.0)
    until(lambda: journal(operator).looks[-1] != last)
    journal_kept = journal(operator)
    assert last in journal_kept.looks
    assert replay(journal_kept) == [record.decision for record in journal_kept.looks]


@pytest.mark.parametrize("conflicts", [0, 1])
def test_a_zero_written_by_the_former_operator_before_it_died_is_its_own(
    served: Fleet, start_operator: Start, router: Router, proxy: Proxy, conflicts: int
) -> None:
    """The API server forgets who wrote a zero to /scale, and no status records it."""
    first = start_operator(**router.settings, **SHORT_LEASE)
    autoscaling = {"minReplicas": 0, "maxReplicas": 3, "scaleDownStabilization": "3s"}
    served.create("llama", autoscaling=autoscaling)

    def die(call: Call) -> Answer | None:
        if call.verb == "PUT" and call.path.endswith("/scale"):
            first.process.kill()
            return Answer(0)
        return None

    proxy.after = die
    served.played(lambda: first.process.poll() is not None)
    assert replicas(served) == 0 and served.status("llama")["scaling"]["replicas"] == 1
    proxy.trust()
    refused: list[Call] = []

    def conflict(call: Call) -> Answer | None:
        if call.verb == "PUT" and call.path.endswith("/scale") and len(refused) < conflicts:
            refused.append(call)
            return Answer(409)
        return None

    proxy.before = conflict
    served.change("llama", {"autoscaling": {"scaleDownStabilization": "10m"}})
    with router.held("llama"):  # for another writer's number the wait would be this long
        second = start_operator("two", **router.settings, **SHORT_LEASE)
        until(second.leads)
        served.played(lambda: replicas(served) == 1 and served.is_ready("llama"))
        # A replica that has just become ready has not reported yet.
        served.played(lambda: served.condition("llama", "ScalingActive")["reason"] == "Scaling")
    assert len(refused) == conflicts
