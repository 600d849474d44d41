"""The rules that every operator test checks detect calls that break them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.api.proxy import Call, Done
from tests.api.rules import behind, broken

ROOT = "/api/v1/namespaces/a"
KIND = "/apis/medha.dev/v1alpha1/namespaces/a/medhareplicas/m/status"
OWNED = {"metadata": {"name": "p", "ownerReferences": [{"uid": "1"}]}}


def call(verb: str, path: str, body: Any = None, **query: str) -> Call:
    encoded = b"" if body is None else msgspec.json.encode(body)
    return Call(verb, path, query, "medha-operator", encoded)


@pytest.mark.parametrize(
    "bad, says",
    [
        (call("DELETE", f"{ROOT}/pods/p", {}), "without a UID"),
        (call("PUT", KIND, {"metadata": {}}), "without a resourceVersion"),
        (call("PATCH", f"{ROOT}/pods/p", {"metadata": {}}), "or a field manager"),
        (call("POST", f"{ROOT}/pods", {"metadata": {"name": "p"}}), "an owner or our label"),
        (call("GET", f"{ROOT}/pods"), "without a limit"),
        (call("GET", f"{ROOT}/secrets", limit="5"), "Secrets are listed"),
        (call("GET", "/api/v1/secrets", watch="1"), "Secrets are listed"),
    ],
)
def test_a_call_that_breaks_a_rule_is_reported(bad: Call, says: str) -> None:
    (fault,) = broken([bad], [])
    assert says in fault


def test_allowed_calls_are_not_reported() -> None:
    good = [
        call("DELETE", f"{ROOT}/pods/p", {"preconditions": {"uid": "1"}}),
        call("PUT", KIND, {"metadata": {"resourceVersion": "1"}}),
        call("PATCH", f"{ROOT}/pods/p", {"metadata": {}}, fieldManager="medha-operator"),
        call("POST", f"{ROOT}/pods", OWNED),
        call("GET", f"{ROOT}/pods", limit="500"),
        call("GET", f"{ROOT}/pods", watch="1"),
        call("GET", f"{ROOT}/secrets/medha-keys"),
    ]
    assert broken(good, []) == []


def status_write(generation: int, observed: int, condition: int) -> Done:
    answer = {
        "metadata": {"uid": "1", "generation": generation},
        "status": {
            "observedGeneration": observed,
            "conditions": [{"observedGeneration": condition}],
        },
    }
    put = call("PUT", KIND, {"metadata": {"resourceVersion": "1"}})
    return Done(put, 200, msgspec.json.encode(answer), 0.0)


def test_a_status_of_a_missing_or_former_generation_is_reported() -> None:
    assert broken([], [status_write(1, 1, 1), status_write(3, 2, 2)]) == []
    assert "generation 2 of 1" in broken([], [status_write(1, 1, 2)])[0]
    assert "generation 1 after 2" in broken([], [status_write(2, 2, 2), status_write(2, 1, 1)])[0]


def test_a_resource_at_rest_with_a_status_of_an_earlier_spec_is_reported() -> None:
    meta = {"name": "m", "generation": 3}
    assert behind([{"metadata": meta, "status": {"observedGeneration": 3}}]) == []
    assert "generation 2" in behind([{"metadata": meta, "status": {"observedGeneration": 2}}])[0]
    assert behind([{"metadata": meta}]) != []
    assert behind([{"metadata": meta | {"deletionTimestamp": "now"}}]) == []
