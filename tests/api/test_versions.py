"""Versions of the kind: upgraded, stored again and downgraded under a running fleet."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.api.fleet import Operator, until
from tests.api.operator_forks import ForkServer
from tests.api.server import ApiServer, running_server
from tests.api.stage import Scene, scene

HOUSE = Path(__file__).resolve().parents[2]
KIND = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "medhareplicas.medha.dev"
SHIPPED = yaml.safe_load((HOUSE / "crds/medha.dev_medhareplicas.yaml").read_text())
ALPHA, BETA = "v1alpha1", "v1beta1"

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def server(
    server_programs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiServer]:
    """An API server of its own, as its kind changes."""
    with running_server(tmp_path_factory.mktemp("api-server"), server_programs) as server:
        yield server.where


def kind(*served: str, stored: str) -> dict[str, Any]:
    """The kind as a release has it that serves these versions."""
    document: dict[str, Any] = copy.deepcopy(SHIPPED)
    versions = [version for version in document["spec"]["versions"] if version["name"] in served]
    for version in versions:
        version["storage"] = version["name"] == stored
    document["spec"]["versions"] = versions
    return document


def install(api: httpx.Client, document: dict[str, Any]) -> httpx.Response:
    """Apply a release's kind; once it is accepted, wait until its versions are served."""
    answer = api.patch(
        f"{KIND}/{NAME}?fieldManager=helm&force=true",
        json=document,
        headers={"Content-Type": "application/apply-patch+yaml"},
    )
    wanted = {version["name"] for version in document["spec"]["versions"]}

    def available() -> bool:
        reply = api.get("/apis/medha.dev")
        if not reply.is_success:
            return False
        names = {version["version"] for version in reply.json()["versions"]}
        urls = [f"/apis/medha.dev/{name}/medhareplicas" for name in (ALPHA, BETA)]
        listed = {url.split("/")[3] for url in urls if api.get(url).is_success}
        return names == listed == wanted

    if answer.is_success:
        until(available)
    return answer


def migrate(api: httpx.Client) -> None:
    """Store every object in the storage version, as docs/kubernetes.md says."""
    for item in api.get(f"/apis/medha.dev/{BETA}/medhareplicas").json()["items"]:
        metadata = item["metadata"]
        url = f"/apis/medha.dev/{BETA}/namespaces/{metadata['namespace']}/medhareplicas"
        until(functools.partial(rewritten, api, f"{url}/{metadata['name']}"))
    api.patch(
        f"{KIND}/{NAME}/status",
        json={"status": {"storedVersions": [BETA]}},
        headers={"Content-Type": "application/merge-patch+json"},
    ).raise_for_status()


def rewritten(api: httpx.Client, url: str) -> bool:
    """Write an object as it is; false if another writer came between."""
    return api.put(url, json=api.get(url).json()).is_success


class Life:
    """A fleet whose kind changes; every step starts the operator again and compares the pods."""

    def __init__(self, on: Scene) -> None:
        self.on, self.fleet = on, on.fleet
        self._operator: Operator | None = None
        self._pods: dict[str, str] = {}

    def start(self) -> None:
        if self._operator is not None:
            self._operator.end()
        self._operator = self.on.start()
        self.fleet.rest(self._operator)

    def create(self, name: str, version: str) -> None:
        spec = {
            "model": {
                "name": name,
                "source": {"hostPath": {"path": "/models"}},
                "maxContextTokens": 4096,
            },
            "placement": {"nodeSelector": self.fleet.selector},
            "drainTimeout": "1s",
        }
        api_version = f"medha.dev/{version}"
        body = {"apiVersion": api_version, "kind": "MedhaReplica", "metadata": {"name": name}}
        url = f"/apis/{api_version}/namespaces/{self.fleet.namespace}/medhareplicas"
        reply = self.on.api.post(url, json=body | {"spec": spec})
        assert reply.status_code == 201, reply.text
        self.fleet.played(lambda: self.condition(name, version) == "True")
        self._pods = self.uids()

    def scale(self, name: str, version: str, replicas: int) -> None:
        """Change the number of replicas through a version; running pods stay."""
        url = f"/apis/medha.dev/{version}/namespaces/{self.fleet.namespace}/medhareplicas/{name}"
        headers = {"Content-Type": "application/merge-patch+json"}
        change = {"spec": {"replicas": replicas}}
        until(lambda: self.on.api.patch(url, json=change, headers=headers).is_success)
        mine = f"{name}-"
        self.fleet.played(
            lambda: (
                sum(pod.startswith(mine) for pod in self.fleet.pods()) == replicas
                and self.read(url).get("status", {}).get("readyReplicas") == replicas
            )
        )
        self.check()
        self._pods = self.uids()

    def check(self) -> None:
        """Compare the pods with those of before: none was restarted."""
        assert self._pods.items() <= self.uids().items()

    def read(self, url: str) -> dict[str, Any]:
        """Read an object; empty while the server takes up a changed kind, for which it has no
        handler for a moment."""
        reply = self.on.api.get(url)
        return reply.json() if reply.is_success else {}

    def condition(self, name: str, version: str) -> str:
        url = f"/apis/medha.dev/{version}/namespaces/{self.fleet.namespace}/medhareplicas/{name}"
        conditions = self.read(url).get("status", {}).get("conditions", [])
        return next((entry["status"] for entry in conditions if entry["type"] == "Ready"), "")

    def uids(self) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.fleet.pods().items()}

    def references(self) -> set[str]:
        """Versions by which pods refer to their owner."""
        pods = self.fleet.pods().values()
        return {owner["apiVersion"] for pod in pods for owner in pod["metadata"]["ownerReferences"]}


def test_pods_outlive_an_upgrade_of_the_kind_a_downgrade_and_a_migration_of_its_storage(
    server: ApiServer, tmp_path: Path, fork_server: ForkServer
) -> None:
    with server.client() as api:
        before, now = kind(ALPHA, stored=ALPHA), kind(ALPHA, BETA, stored=ALPHA)
        assert now == SHIPPED
        install(api, before).raise_for_status()
        with scene(server, tmp_path, fork_server) as on:
            life = Life(on)
            life.start()
            life.create("old", ALPHA)

            # The kind first, under an operator that has not been started again; then the operator.
            install(api, now).raise_for_status()
            life.scale("old", BETA, 2)
            life.start()
            life.check()
            life.create("new", BETA)
            assert life.references() == {f"medha.dev/{ALPHA}"}

            # Back, and forth: nothing is stored in the new version yet.
            install(api, before).raise_for_status()
            life.start()
            life.check()
            life.scale("new", ALPHA, 2)
            install(api, now).raise_for_status()

            # A later release stores the new version; there is no way back past it.
            install(api, kind(ALPHA, BETA, stored=BETA)).raise_for_status()
            life.start()
            life.check()
            life.scale("old", ALPHA, 3)
            refused = install(api, before)
            assert refused.status_code == 422 and "storedVersions" in refused.text
            refused = install(api, kind(BETA, stored=BETA))
            assert refused.status_code == 422 and "storedVersions" in refused.text
            migrate(api)
            life.check()

            # A release after it serves the new version alone, and this operator uses that.
            install(api, kind(BETA, stored=BETA)).raise_for_status()
            life.start()
            life.check()
            life.scale("new", BETA, 3)
            assert life.references() == {f"medha.dev/{ALPHA}", f"medha.dev/{BETA}"}
            install(api, kind(ALPHA, BETA, stored=BETA)).raise_for_status()  # the stage reads both
