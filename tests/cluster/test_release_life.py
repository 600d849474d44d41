"""A release's life on a fresh cluster, in a namespace that admits restricted pods only.

helm install, a chat, helm upgrade of every value with a chat after each section, helm rollback and
helm uninstall leave the kind and nothing else of what they brought; its deletion leaves nothing.

The checkpoint lies on a volume, since restricted pods may not have hostPath. This cluster does not
act on some of the values: there is no Gateway API (without it the chart renders no HTTPRoute), no
controller of Ingresses, no network that enforces policies, and of the Prometheus operator the kinds
alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from demos import images
from demos.image_contents import read_manifest
from demos.load import one
from demos.local import MODEL
from demos.release import RESOURCE
from demos.testbed import ARCHIVES, Failed, Testbed, given, until
from tests.charts.changed_values import CHANGED, FIRST
from tests.charts.test_chart_values import DESCRIBED
from tests.cluster.conftest import cluster

from medha_worker.model.checkpoint_writer import write_checkpoint

pytestmark = pytest.mark.timeout(2400)  # the images may have to be built

HOUSE = Path(__file__).resolve().parents[2]
NAMESPACE = "models"
LIMIT_S, HELM_S, KEYS_S = 120.0, 330.0, 240.0
LONG_TOKENS = 20_000
"""More than a group of the example holds."""
KEY = "sk-of-the-users-own-secret"
KIND = {
    "apiextensions.k8s.io/v1/CustomResourceDefinition medhareplicas.medha.dev",
    "apiregistration.k8s.io/v1/APIService v1alpha1.medha.dev",
    "apiregistration.k8s.io/v1/APIService v1beta1.medha.dev",
}
MONITORS = sorted((HOUSE / "tests" / "api").glob("monitoring.coreos.com_*.yaml"))
UNFIT = {
    "image.pullPolicy": "Never",  # Always would pull, and there is no registry
    "operator.namespaces": [NAMESPACE],  # another one would leave the model without an operator
}
"""Values of CHANGED that cannot be on this cluster, with others in their place."""
NAMED = {"image.registry", "image.tag", "image.digests", "operator.image", "router.image"}
"""Values that name images anew: only the local cluster tool loads an image under another name."""


class Life:
    """The release `medha` in NAMESPACE and the resource `tiny` next to it.

    `digests`: of the images, by component; empty if the cluster cannot rename images.
    """

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self.digests: dict[str, str] = {}

    def load(self) -> None:
        """Load the images, and those of the release again under the other names of CHANGED."""
        for target in images.TARGETS:
            self.bed.load(target)
            if self.bed.harm:
                self.digests[target], _ = read_manifest(ARCHIVES / f"{target}.tar")
        for target in ("operator", "router") if self.bed.harm else ():
            digest = self.digests[target]
            for name in (
                f"localhost/medha-{target}@{digest}",
                f"r.example/medha-{target}:2",
                CHANGED[target]["image"],
            ):
                self.bed.load(target, name)

    def helm(self, *words: str) -> str:
        return self.bed.run("helm", *words, "--namespace", NAMESPACE, timeout_s=HELM_S)

    def upgrade(self, values: dict[str, Any]) -> None:
        """Install or upgrade both charts, and wait until all pods of the release are ready."""
        crds = str(HOUSE / "charts" / "medha-crds")
        self.bed.run("helm", "upgrade", "--install", "medha-crds", crds, "--namespace=default")
        chart = str(HOUSE / "charts" / "medha")
        words = [f"--set-json={path}={json.dumps(value)}" for path, value in values.items()]
        how = ("--install", "--wait", "--timeout=5m", "--history-max=0")
        self.helm("upgrade", "medha", chart, *how, *words)

    def serve(self) -> None:
        """Apply the example, with its checkpoint on a volume, and wait until it is Ready."""
        resource = yaml.safe_load(RESOURCE.read_text())
        resource["metadata"]["namespace"] = NAMESPACE
        resource["spec"]["model"]["source"] = {"pvc": {"claimName": "checkpoints"}}
        self.bed.kubectl("apply", "-f", "-", text=yaml.safe_dump(resource))
        limit = ("--for=condition=Ready", f"--timeout={HELM_S:.0f}s")
        self.bed.kubectl("-n", NAMESPACE, "wait", "mr/tiny", *limit, timeout_s=HELM_S + 10)

    def pods(self) -> dict[str, int]:
        """Restarts of the containers of each pod of the resource, by the pod's UID."""
        label = "medha.dev/replica=tiny"
        return {
            pod["metadata"]["uid"]: sum(
                container["restartCount"] for container in pod["status"]["containerStatuses"]
            )
            for pod in self.bed.get("-n", NAMESPACE, "pods", "-l", label)["items"]
        }

    def rolled(self) -> bool:
        """Return true if no router is terminating."""
        label = "app.kubernetes.io/component=router"
        routers = self.bed.get("-n", NAMESPACE, "pods", "-l", label)["items"]
        return all("deletionTimestamp" not in pod["metadata"] for pod in routers)

    @contextlib.contextmanager
    def url(self) -> Iterator[str]:
        """URL of the Service of the routers."""
        service = self.bed.get("-n", NAMESPACE, "service", "medha-router")["spec"]
        port = service["ports"][0]["port"]
        if self.bed.harm:
            yield f"http://{service['clusterIP']}:{port}"
        else:
            with self.bed.forwarded(NAMESPACE, "service/medha-router", port) as url:
                yield url

    def chat(self, key: str = "none") -> httpx.Response:
        """Send a chat once, as soon as a connection to the Service of the routers is possible:
        kube-proxy needs a moment for another port."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Who is first in the queue?"}],
            "max_tokens": 8,
        }
        transport = httpx.HTTPTransport(retries=5)
        with self.url() as url, httpx.Client(timeout=60.0, transport=transport) as client:
            headers = {"Authorization": f"Bearer {key}"}
            return client.post(f"{url}/v1/chat/completions", json=body, headers=headers)

    def answers(self, key: str = "none") -> None:
        """Check that a chat is answered."""
        reply = self.chat(key)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 8

    def objects(self) -> set[str]:
        """Every object of the cluster but Events, which the cluster deletes after an hour."""
        kinds = self.bed.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        kinds = [kind for kind in kinds if kind not in ("events", "events.events.k8s.io")]
        line = '{.apiVersion}/{.kind} {.metadata.namespace}{"/"}{.metadata.name}{"\\n"}'
        form = f"jsonpath={{range .items[*]}}{line}{{end}}"
        listed = self.bed.kubectl("get", ",".join(kinds), "--all-namespaces", "-o", form)
        return {name.replace(" /", " ") for name in listed.splitlines()}

    def left(self, before: set[str]) -> set[str]:
        """New objects of the cluster, once they are the kind alone or the limit has passed."""
        left: set[str] = set()

        def only_the_kind() -> bool:
            nonlocal left
            left = self.objects() - before
            return left <= KIND

        with contextlib.suppress(Failed):
            until(only_the_kind, "the kind alone", LIMIT_S)
        return left

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Add the state of the namespace to a failure."""
        try:
            yield
        except (AssertionError, Failed) as failure:
            failure.add_note(self._diagnosis())
            raise

    def _diagnosis(self) -> str:
        texts = []
        for command in (
            ["get", "mr,pods,jobs", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["logs", "deployment/medha-operator", "--tail=20"],
            ["logs", "-l", "medha.dev/replica=tiny", "--tail=20", "--prefix"],
        ):
            try:
                texts.append(self.bed.kubectl("-n", NAMESPACE, *command))
            except Failed as failure:
                texts.append(str(failure))
        return "\n".join(texts)


def brought(bed: Testbed) -> list[dict[str, Any]]:
    """Objects that are the user's own: the namespace, its Secrets and the volume of checkpoints."""
    enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
    volume = {
        "accessModes": ["ReadOnlyMany"],
        "storageClassName": "",
    }
    login = {"auths": {"r.example": {"auth": "YTpi"}}}
    keys = f"me:{hashlib.sha256(KEY.encode()).hexdigest()}\n"
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": enforced},
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": "checkpoints"},
            "spec": {
                **volume,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(bed.model)},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": "checkpoints", "namespace": NAMESPACE},
            "spec": {
                **volume,
                "volumeName": "checkpoints",
                "resources": {"requests": {"storage": "1Gi"}},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "a", "namespace": NAMESPACE},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": json.dumps(login)},
        },
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys", "namespace": NAMESPACE},
            "stringData": {"keys": keys},
        },
    ]


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    """A fresh cluster with the images, and with objects of the user's own."""
    if given():
        pytest.skip("a release's life is lived on a cluster of its own, not on a given one")
    with cluster("life") as bed:
        life = Life(bed)
        life.load()
        for path in MONITORS:
            bed.kubectl("apply", "--server-side", "-f", str(path))
        bed.kubectl("label", "nodes", "--all", "pool=system")
        write_checkpoint(bed.model, MODEL)
        bed.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(brought(bed)))
        yield life


@pytest.fixture(scope="module")
def before(life: Life) -> set[str]:
    """Objects of the cluster without Medha."""
    return life.objects()


def sections(life: Life) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all values of the chart by section, with another value for each."""
    changed: dict[str, dict[str, Any]] = {
        "first": FIRST,
        "router.apiKeys.enabled": {"router.apiKeys.enabled": True},
    }
    changed |= {
        part: {f"{part}.{name}": value for name, value in changes.items()}
        for part, changes in CHANGED.items()
    }
    for part, changes in changed.items():
        values = changes | {path: value for path, value in UNFIT.items() if path in changes}
        if "image.digests" in values and life.digests:
            values["image.digests"] = life.digests
        if not life.digests:
            values = {path: value for path, value in values.items() if path not in NAMED}
        yield part, values


def test_only_the_kind_is_left_after_every_value_was_upgraded(life: Life, before: set[str]) -> None:
    with life.explained():
        life.upgrade({})
        life.serve()
        life.answers()
        life.helm("test", "medha")
        pods = life.pods()
        assert len(pods) == 2

        values: dict[str, Any] = {}
        key = "none"
        for part, changes in sections(life):
            values |= changes
            life.upgrade(values)
            if part == "router.apiKeys.enabled":
                path = (
                    "secret",
                    "medha-router-api-keys",
                    "--template={{.data.key | base64decode}}",
                )
                key = life.bed.kubectl("-n", NAMESPACE, "get", *path)
            elif part == "router.apiKeys":
                # Replaced routers know the former key for as long as proxies send to them.
                until(life.rolled, "no router of the former values", LIMIT_S)
                assert life.chat(key).status_code == 401
                key = KEY
            life.answers(key)
            assert life.pods() == pods, f"{part} restarted pods of the model"
        assert {*DESCRIBED} - NAMED <= values.keys()

        life.helm("rollback", "medha", "1", "--wait", "--timeout=5m")
        until(life.rolled, "no router that wants a key", LIMIT_S)
        life.answers()
        assert life.pods() == pods
        on = {path: True for path, value in values.items() if value is False}
        life.upgrade({**values, **on})
        life.answers(KEY)
        life.helm("test", "medha")
        assert life.pods() == pods

        life.bed.kubectl("-n", NAMESPACE, "delete", "mr", "tiny")
        until(lambda: not life.pods(), "no pod of the model", LIMIT_S)
        life.helm("uninstall", "medha", "--wait", "--timeout=5m")
        life.bed.run("helm", "uninstall", "medha-crds", "--namespace=default")
        assert life.left(before) == KIND


def test_models_that_outlive_their_release_leave_nothing_either(
    life: Life, before: set[str]
) -> None:
    """The kind of the first release is there still; its chart takes it back."""
    with life.explained():
        life.upgrade({})
        life.serve()
        life.answers()
        pods = life.pods()
        life.helm("uninstall", "medha", "--wait", "--timeout=5m")
        assert life.pods() == pods
        assert not life.bed.get("-n", NAMESPACE, "poddisruptionbudgets")["items"]

        # The next release's routers have another key, which kubelet's next sync brings to pods.
        life.upgrade({})
        until(lambda: life.chat().status_code == 200, "an answer of the same pods", KEYS_S)
        assert life.pods() == pods
        with life.url() as url:
            record = asyncio.run(one(url, "tiny", LONG_TOKENS, 16, "a second group"))
        assert not record.refused
        events = life.bed.get("-n", NAMESPACE, "events", "--field-selector=reason=GroupJoined")
        assert events["items"], "no second group joined the running controller"
        assert life.pods().items() >= pods.items()
        life.helm("uninstall", "medha", "--wait", "--timeout=5m")

        life.bed.kubectl("-n", NAMESPACE, "delete", "mr", "tiny")
        until(lambda: not life.pods(), "no pod of the model", LIMIT_S)
        life.bed.run("helm", "uninstall", "medha-crds", "--namespace=default")
        assert life.left(before) == KIND
        life.bed.kubectl("delete", "crd", "medhareplicas.medha.dev")
        until(lambda: not life.objects() - before, "nothing left of the kind", LIMIT_S)
