"""Changes of the operator itself: its settings, its version, and pods of an earlier version."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.api.fleet import Fleet, Operator

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

SETTINGS = {
    "MEDHA_LOG_LEVEL": "debug",
    "MEDHA_PULL_POLICY": "Never",
    "MEDHA_ROUTER": "tcp://127.0.0.1:7801",
    "MEDHA_WORKER_IMAGE": "localhost/medha-worker:next",
}
"""All that differs from the settings of other tests and reaches pods."""
HASH = "medha.dev/spec-hash"


def uids(fleet: Fleet) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}


def gone(fleet: Fleet, before: dict[str, str]) -> bool:
    """Return whether none of these pods is left."""
    return not set(before.values()) & set(uids(fleet).values())


def hashes(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["labels"][HASH] for pod in fleet.pods().values()}


def label_as_predecessor(fleet: Fleet, api: httpx.Client) -> None:
    """Give the pods hashes in which settings were counted, too."""
    headers = {"Content-Type": "application/merge-patch+json"}
    for name in fleet.pods():
        path = f"/api/v1/namespaces/{fleet.namespace}/pods/{name}"
        body = {"metadata": {"labels": {HASH: "0123456789"}}}
        api.patch(path, json=body, headers=headers).raise_for_status()


def test_other_settings_restart_no_model_and_reach_pods_when_it_is_rolled(
    fleet: Fleet, start_operator: Start
) -> None:
    first = start_operator()
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    before = uids(fleet)
    first.end()
    fleet.rest(start_operator("next", **SETTINGS))
    assert uids(fleet) == before
    fleet.change("llama", {"template": {"annotations": {"rolled": "today"}}})
    fleet.played(lambda: gone(fleet, before) and fleet.is_ready("llama"))
    images = {pod["spec"]["containers"][0]["image"] for pod in fleet.pods().values()}
    assert images == {SETTINGS["MEDHA_WORKER_IMAGE"]}


@pytest.mark.parametrize("during", ["nothing", "scaled", "changed"])
def test_an_upgrade_adopts_pods_of_an_earlier_version_unless_their_spec_changed_meanwhile(
    fleet: Fleet, start_operator: Start, api: httpx.Client, during: str
) -> None:
    first = start_operator()
    fleet.create("llama", template={"env": [{"name": "A", "value": "1"}]})
    fleet.played(lambda: fleet.is_ready("llama"))
    before = uids(fleet)
    first.end()
    label_as_predecessor(fleet, api)
    if during == "scaled":
        fleet.change("llama", {"replicas": 2})
    if during == "changed":
        fleet.change("llama", {"template": {"env": [{"name": "A", "value": "2"}]}})
    fleet.rest(start_operator("next", **SETTINGS))
    fleet.played(lambda: fleet.is_ready("llama") and "0123456789" not in hashes(fleet))
    assert len(hashes(fleet)) == 1
    kept = before.items() & uids(fleet).items()
    assert len(kept) == (0 if during == "changed" else len(before))
    fleet.change("llama", {"template": {"image": "localhost/other:1"}})
    fleet.played(lambda: gone(fleet, before) and fleet.is_ready("llama"))
