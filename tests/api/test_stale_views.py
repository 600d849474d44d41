"""An operator that is shown the past as it starts, or everything twice: it destroys nothing by it.

The API server's own former answers are given in place of its present ones (a replica of it that
lags behind does just that), calls reach it twice, and events come twice or late.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.proxy import Call, Proxy

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(600)

LONG = 50


@pytest.mark.parametrize("kind", ["medhareplicas", "pods", "nodes", ""])
def test_a_stale_list_at_the_start_leads_to_no_deletion(
    fleet: Fleet, start_operator: Start, proxy: Proxy, kind: str
) -> None:
    """The past: one replica where there are two by now; `kind` empty: all kinds lag behind."""
    first = start_operator()
    fleet.create("llama", parallelism={"spp": 1})
    fleet.played(lambda: fleet.is_ready("llama"))
    past = len(proxy.calls)
    until(lambda: sum("/leases" not in each.path for each in proxy.calls[past:]) > 14)
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    first.kill()
    before = {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}
    lagging = [True]

    def older(call: Call) -> int:
        lists = "/leases" not in call.path and call.path.endswith(f"/{kind}" if kind else "s")
        return LONG if lists and lagging and "medha" in call.agent else 0

    proxy.older = older
    second = start_operator(name="two")
    until(second.leads)
    seen = len(proxy.calls)
    until(lambda: sum(each.path.endswith("/nodes") for each in proxy.calls[seen:]) >= 3)
    assert {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()} == before
    lagging.clear()
    fleet.played(lambda: fleet.is_ready("llama"))
    assert {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()} == before
    assert not [each for each in proxy.calls if each.verb == "DELETE" and "/pods/" in each.path]


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
