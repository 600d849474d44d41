"""The operator uses every right that it has, by the API server's audit log.

In every other test too it acts as an account with the rights of charts/medha/README.md and no more;
here it is led through all its work and must use each right. The log does not show that applying a
new object needs the right to create it: those rights are taken away and given back.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import httpx
import pytest
from tests.api.fleet import SHORT_LEASE, Fleet, Operator, until
from tests.api.proxy import Proxy
from tests.api.rights import (
    Right,
    documented,
    forbidden_requests,
    may_create,
    refuse_creation,
    used_rights,
)
from tests.api.server import ApiServer
from tests.api.stand_ins import Router

from medha_operator.resources.views import UNREACHABLE

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

APPLIED = (
    ("", "services"),
    ("", "configmaps"),
    ("policy", "poddisruptionbudgets"),
    ("networking.k8s.io", "networkpolicies"),
    ("keda.sh", "scaledobjects"),
)
"""Kinds that need the right to create if they are new, and are logged as a patch."""


AUTOSCALED = {"MEDHA_PROMETHEUS": "http://prometheus:9090", "MEDHA_WORKER_FLOWS": '{"egress": []}'}


def test_every_right_is_used_and_none_is_missing(
    fleet: Fleet,
    start_operator: Start,
    proxy: Proxy,
    router: Router,
    keda: str,
    api_server: ApiServer,
) -> None:
    settings = {**router.settings, **AUTOSCALED, **SHORT_LEASE}

    def asked(verb: str, end: str) -> bool:
        return any(call.verb == verb and call.path.endswith(end) for call in proxy.calls)

    first = start_operator(**settings)
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    fleet.change("llama", {"replicas": 1, "template": {"annotations": {"a": "b"}}})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    fleet.played(lambda: fleet.condition("llama", "Updated").get("status") == "True")
    fleet.create("other", autoscaling={"minReplicas": 2, "maxReplicas": 3})  # it writes /scale
    fleet.played(lambda: fleet.is_ready("other") and asked("PUT", "/scale"))
    scaled = f"{keda}/namespaces/{fleet.namespace}/scaledobjects/other"
    fleet.change("other", {"autoscaling": {"mode": "External"}})
    fleet.played(lambda: fleet.api.get(scaled).is_success)
    fleet.change("other", {"autoscaling": {"mode": "Builtin"}})
    fleet.played(lambda: fleet.api.get(scaled).status_code == 404)

    first.kill()  # the next operator sends the Event again
    start_operator("two", **settings)
    known = {pod["metadata"]["uid"] for pod in fleet.pods().values()}
    fleet.remove(next(pod for pod in fleet.pods() if pod.startswith("llama-")))

    def comes_again() -> bool:
        return any(
            pod["metadata"]["uid"] not in known and "nodeName" in pod["spec"]
            for pod in fleet.pods().values()
        )

    fleet.played(comes_again)  # bound, but not started
    until(lambda: asked("GET", "/events"), "it waits for its volumes, and somebody asks why")
    fleet.played(lambda: fleet.is_ready("llama"))

    home = next(iter(fleet.pods().values()))["spec"]["nodeName"]
    silent = {"taints": [{"key": UNREACHABLE, "effect": "NoExecute"}]}
    fleet.change_node(home, silent, ready="Unknown")
    fleet.played(lambda: all(pod["spec"].get("nodeName") != home for pod in fleet.pods().values()))
    fleet.played(lambda: fleet.is_ready("llama") and asked("GET", f"/nodes/{home}"))

    granted: set[Right] = set().union(*(row.rights for row in documented()))
    rights = used_rights(api_server.audit, proxy.account)
    assert forbidden_requests(api_server.audit, proxy.account) == []
    assert {right for right in rights if right[1]} - granted == set()
    assert granted - rights == {(group, kind, "create") for group, kind in APPLIED}


def test_applying_a_new_object_needs_the_right_to_create_it(
    fleet: Fleet,
    start_operator: Start,
    router: Router,
    keda: str,
    api: httpx.Client,
    api_server: ApiServer,
) -> None:
    """All of these rights are missing at first; each returns once its lack was reported."""
    account = f"operator-of-{fleet.namespace}"
    lacking = set(APPLIED)

    def lack(kinds: Set[tuple[str, str]]) -> None:
        refuse_creation(api, fleet.namespace, account, kinds)
        until(
            lambda: (
                {k for k in APPLIED if not may_create(api, fleet.namespace, account, k)} == kinds
            )
        )

    lack(lacking)
    # Not the token whose calls are in the audit log: a forbidden call there fails every test.
    bare = Proxy(api_server.url, api_server.token, str(api_server.authority))
    with bare.running():
        operator = start_operator(via=bare, **router.settings, **AUTOSCALED)
        fleet.create("llama", autoscaling={"mode": "External", "minReplicas": 1, "maxReplicas": 2})

        def missing() -> set[tuple[str, str]]:
            plurals = {
                reply.call.path.split("/")[-2]
                for reply in bare.done
                if reply.call.verb == "PATCH" and reply.status == 403 and b"create" in reply.answer
            }
            return {kind for kind in lacking if kind[1] in plurals}

        while lacking:
            lacking -= fleet.played(missing, f"one of {lacking} is refused")
            lack(lacking)
        scaled = f"{keda}/namespaces/{fleet.namespace}/scaledobjects/llama"
        fleet.played(lambda: fleet.is_ready("llama") and fleet.api.get(scaled).is_success)
        operator.end()
