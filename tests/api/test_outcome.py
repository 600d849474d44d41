"""Two outcomes are the same if they differ only where two equal fleets may."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.api.courses import differences
from tests.api.outcome import created, deleted, plain
from tests.api.proxy import Call, Done

Objects = dict[str, list[dict[str, Any]]]


def pod(ordinal: int, spec_hash: str, uid: str) -> dict[str, Any]:
    labels = {"medha.dev/ordinal": str(ordinal), "medha.dev/spec-hash": spec_hash}
    labels["medha.dev/attempt"] = "1"
    environment = [{"name": "MEDHA_REPLICA", "value": f"llama-{ordinal}"}]
    config = {"name": "config", "configMap": {"name": f"llama-{ordinal}-{uid}"}}
    others = {"key": "medha.dev/ordinal", "operator": "NotIn", "values": [str(ordinal)]}
    return {
        "metadata": {"name": f"llama-{ordinal}-g0-s0", "uid": uid, "labels": labels},
        "spec": {
            "nodeName": f"node-{uid}",
            "containers": [{"env": environment}],
            "volumes": [config],
            "topologySpreadConstraints": [{"labelSelector": {"matchExpressions": [others]}}],
        },
    }


def fleet(ordinal: int, spec_hash: str, uid: str) -> Objects:
    """A fleet of one replica; its number, hash and identity do not matter."""
    configs = [{"metadata": {"name": f"llama-{ordinal}-{uid}"}, "data": {"worker.json": "{}"}}]
    budget = {"metadata": {"name": f"llama-{ordinal}", "generation": ordinal + 1}}
    groups = [{"replica": ordinal, "kvpGroups": 1, "wanted": ordinal, "generation": 1}]
    resource = {"metadata": {"name": "llama", "generation": 2}, "status": {"groups": groups}}
    return {
        "pods": [pod(ordinal, spec_hash, uid)],
        "configmaps": configs,
        "poddisruptionbudgets": [budget],
        "secrets": [{"metadata": {"name": "medha-keys"}, "data": {"rank.secret": uid}}],
        "medhareplicas": [resource],
    }


FLEET = fleet(0, "0123456789", "one")


def test_two_equal_fleets_are_the_same() -> None:
    assert plain(FLEET, "here") == plain(fleet(3, "abcdef0123", "two"), "there")


def restarts(reason: str) -> Objects:
    objects = copy.deepcopy(FLEET)
    (resource,) = objects["medhareplicas"]
    resource["status"]["restarts"] = [{"replica": 0, "group": 0, "reason": reason}]
    return objects


def test_a_deleted_pod_may_be_seen_before_it_is_gone_or_not() -> None:
    seen, gone, ended = (
        plain(restarts(reason), "here")
        for reason in (
            "pod llama-0-g0-s1 is being deleted",
            "the pod of stage 1 is gone",
            "pod llama-0-g0-s1 ended (Error)",
        )
    )
    assert seen == gone != ended


def orphan(objects: Objects) -> None:
    objects["configmaps"].append({"metadata": {"name": "llama-0-fedcba9876"}, "data": {}})


def restarted(objects: Objects) -> None:
    objects["pods"][0]["metadata"]["labels"]["medha.dev/attempt"] = "2"


def changed_config(objects: Objects) -> None:
    objects["configmaps"][0]["data"]["worker.json"] = "[]"


def changed_environment(objects: Objects) -> None:
    objects["pods"][0]["spec"]["containers"][0]["env"][0]["value"] = "llama-1"


def later_generation(objects: Objects) -> None:
    objects["medhareplicas"][0]["metadata"]["generation"] = 3


def missing_key(objects: Objects) -> None:
    objects["secrets"][0]["data"] = {}


@pytest.mark.parametrize(
    "change",
    [orphan, restarted, changed_config, changed_environment, later_generation, missing_key],
)
def test_every_other_difference_is_reported(change: Callable[[Objects], None]) -> None:
    changed = copy.deepcopy(FLEET)
    change(changed)
    assert len(differences(plain(FLEET, "here"), plain(changed, "here"))) == 1


def done(verb: str, path: str, status: int, name: str = "") -> Done:
    answer = msgspec.json.encode({"metadata": {"name": name}})
    return Done(Call(verb, f"/api/v1/namespaces/a/{path}", {}, ""), status, answer, 0.0)


def test_objects_are_counted_as_created_and_deleted_by_post_and_apply_alike() -> None:
    calls = [
        done("POST", "pods", 201, "llama-0-g0-s1"),
        done("POST", "pods", 409),
        done("POST", "pods", 201, "llama-1-g0-s1"),
        done("POST", "events", 201, "event"),
        done("PATCH", "configmaps/llama-0-0123456789", 201),
        done("PATCH", "configmaps/llama-0-0123456789", 200),
        done("DELETE", "pods/llama-0-g0-s1", 200),
        done("DELETE", "pods/llama-0-g0-s1", 404),
    ]
    assert created(calls) == {"configmaps": 1, "pods 0-s1": 2}
    assert deleted(calls) == {"pods 0-s1": 1}
