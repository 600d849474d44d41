"""The rights that the operator has are those that it uses: the API server's audit log says so.

In every other test too it acts as an account with what docs/operator.md grants and no more; here it
is led through all that it does, and must have used each right. The log does not tell that an object
that is applied and new needs the right to create it: those rights are taken away and given back.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.played import Router
from tests.api.proxy import Proxy
from tests.api.rights import Right, documented, may, refuse_creation, refused, used
from tests.api.server import ApiServer

from medha_operator.observed import UNREACHABLE

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(900)

APPLIED = (
    ("", "services"), ("", "configmaps"), ("policy", "poddisruptionbudgets"),
    ("networking.k8s.io", "networkpolicies"), ("keda.sh", "scaledobjects"),
)  # fmt: skip
"""What needs the right to create it when it is new, and is logged as a patch."""


AUTOSCALED = {"MEDHA_PROMETHEUS": "http://prometheus:9090", "MEDHA_WORKER_FLOWS": '{"egress": []}'}


def test_every_right_is_used_and_none_is_missing(
    fleet: Fleet, start_operator: Start, proxy: Proxy, router: Router, keda: str,
    api_server: ApiServer,
) -> None:  # fmt: skip
    settings = {**router.settings, **AUTOSCALED}

    def asked(verb: str, end: str) -> bool:
        return any(each.verb == verb and each.path.endswith(end) for each in proxy.calls)

    first = start_operator(**settings)
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    fleet.change("llama", {"replicas": 1, "template": {"annotations": {"a": "b"}}})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    fleet.played(lambda: fleet.condition("llama", "Updated")["status"] == "True")
    fleet.create("other", autoscaling={"minReplicas": 2, "maxReplicas": 3})  # it writes /scale
    fleet.played(lambda: fleet.is_ready("other") and asked("PUT", "/scale"))
    scaled = f"{keda}/namespaces/{fleet.namespace}/scaledobjects/other"
    fleet.change("other", {"autoscaling": {"mode": "External"}})
    fleet.played(lambda: fleet.api.get(scaled).is_success)
    fleet.change("other", {"autoscaling": {"mode": "Builtin"}})
    fleet.played(lambda: fleet.api.get(scaled).status_code == 404)

    first.kill()  # the next one tells again what is known
    start_operator("two", **settings)
    known = {each["metadata"]["uid"] for each in fleet.pods().values()}
    fleet.remove(next(each for each in fleet.pods() if each.startswith("llama-")))

    def comes_again() -> bool:
        return any(
            each["metadata"]["uid"] not in known and "nodeName" in each["spec"]
            for each in fleet.pods().values()
        )

    fleet.played(comes_again)  # and is bound, no further
    until(lambda: asked("GET", "/events"), "it waits for its volumes, and somebody asks why")
    fleet.played(lambda: fleet.is_ready("llama"))

    home = next(iter(fleet.pods().values()))["spec"]["nodeName"]
    silent = {"taints": [{"key": UNREACHABLE, "effect": "NoExecute"}]}
    fleet.change_node(home, silent, ready="Unknown")
    fleet.played(
        lambda: all(each["spec"].get("nodeName") != home for each in fleet.pods().values())
    )
    fleet.played(lambda: fleet.is_ready("llama") and asked("GET", f"/nodes/{home}"))

    granted: set[Right] = set().union(*(row.rights for row in documented()))
    found = used(api_server.audit, proxy.account)
    assert refused(api_server.audit, proxy.account) == []
    assert {right for right in found if right[1]} - granted == set()
    assert granted - found == {(group, kind, "create") for group, kind in APPLIED}


def test_what_is_applied_needs_the_right_to_create_it(
    fleet: Fleet, start_operator: Start, router: Router, keda: str, api: httpx.Client,
    api_server: ApiServer,
) -> None:  # fmt: skip
    """None of these rights is there at first; each comes back once its lack was told."""
    account = f"operator-of-{fleet.namespace}"
    lacking = set(APPLIED)

    def lack(kinds: Set[tuple[str, str]]) -> None:
        refuse_creation(api, fleet.namespace, account, kinds)
        until(lambda: {k for k in APPLIED if not may(api, fleet.namespace, account, k)} == kinds)

    lack(lacking)
    # Not the token whose calls are in the audit log: nothing that stands there may be forbidden.
    bare = Proxy(api_server.url, api_server.token, str(api_server.authority))
    with bare.running():
        operator = start_operator(via=bare, **router.settings, **AUTOSCALED)
        fleet.create("llama", autoscaling={"mode": "External", "minReplicas": 1, "maxReplicas": 2})

        def told() -> set[tuple[str, str]]:
            plurals = {
                each.call.path.split("/")[-2]
                for each in bare.done
                if each.call.verb == "PATCH" and each.status == 403 and b"create" in each.answer
            }
            return {kind for kind in lacking if kind[1] in plurals}

        while lacking:
            lacking -= fleet.played(told, f"one of {lacking} is refused")
            lack(lacking)
        scaled = f"{keda}/namespaces/{fleet.namespace}/scaledobjects/llama"
        fleet.played(lambda: fleet.is_ready("llama") and fleet.api.get(scaled).is_success)
        operator.end()
