"""What the tests of the operator share: the process itself, and a hand that plays the kubelets.

There is neither scheduler nor kubelet here. `Kubelets` binds the pods that may be bound to the
nodes that they name and says that they run; everything else is the API server's own doing.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tests.api.nursery import Born, Nursery

from medha.cli.children import bound
from medha.spec import API_VERSION

T = TypeVar("T")
PATIENCE_S = 120.0
NOW = "2026-01-01T00:00:00Z"
ROOM = {"cpu": "8", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "8"}
LEASE_S = 4.0
HOUSE = Path(__file__).resolve().parents[2]


def until(what: Callable[[], T], why: str = "", within_s: float = PATIENCE_S) -> T:
    """The first true value of `what`."""
    end = time.monotonic() + within_s
    while not (found := what()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:.0f} s: {why or what}; last was {found!r}")
        time.sleep(0.05)
    return found


class Operator:
    """A process of its own, serving one namespace."""

    def __init__(
        self, kubeconfig: Path, namespace: str, log: Path, name: str = "one",
        nursery: Nursery | None = None, hurry: float = 1.0, **settings: str,
    ) -> None:  # fmt: skip
        self.name, self.log = name, log
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MEDHA_")}
        environment |= {
            "KUBECONFIG": str(kubeconfig),
            "MEDHA_NAMESPACE": namespace,
            "MEDHA_NAMESPACES": namespace,
            "MEDHA_WORKER_IMAGE": "localhost/medha-worker:dev",
            "MEDHA_IDENTITY": name,
            "MEDHA_OPS_HOST": "127.0.0.1",
            "MEDHA_OPS_PORT": "0",
            "MEDHA_RESYNC_S": "2",
            "MEDHA_REPORT_S": "0.2",
            "MEDHA_LEASE_S": str(LEASE_S),
            **settings,
        }
        self.process: Born | subprocess.Popen[bytes]
        if nursery is not None:
            self.process = nursery.bear(environment, log)
            return
        program = ("medha_operator",) if hurry == 1.0 else ("tests.api.hurried", str(hurry))
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                bound(sys.executable, "-m", *program), cwd=HOUSE,
                env=environment, stdout=file, stderr=file,
            )  # fmt: skip

    @property
    def port(self) -> int:
        told = self.log.read_text() if self.log.exists() else ""
        found = re.search(r'"ops_port":(\d+)', told)
        return int(found.group(1)) if found else 0

    def alive(self) -> bool:
        return self._ask("/healthz").status_code == 200

    def ready(self) -> bool:
        return bool(self.port) and self._ask("/readyz").status_code == 200

    def leads(self) -> bool:
        return self.ready() and "medha_operator_leading 1.0" in self._ask("/metrics").text

    def metric(self, name: str) -> float | None:
        """The value of a metric, whatever its labels; None while it is not shown."""
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", self._ask("/metrics").text, flags=re.M)
        return float(found.group(1)) if found else None

    def scaling(self) -> bytes:
        """The looks at each resource, as it shows them."""
        return self._ask("/scaling").content

    def writes(self) -> float:
        """Answers to its writes so far, those to the Lease left out."""
        lines = re.findall(
            r"^medha_operator_writes_total\{(.*)\} (\S+)$", self._ask("/metrics").text, flags=re.M
        )
        return sum(float(count) for labels, count in lines if 'kind="leases"' not in labels)

    def shown(self, name: str) -> dict[str, float]:
        """A metric's values by their labels, as they are written."""
        found = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", self._ask("/metrics").text, flags=re.M)
        return {labels: float(value) for labels, value in found}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def end(self) -> int:
        """The politest way; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def _ask(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", trust_env=False, timeout=30)


class Fleet:
    """One namespace of an API server, its nodes, and the pods in it."""

    def __init__(self, api: httpx.Client, namespace: str, nodes: int = 2) -> None:
        self.api, self.namespace = api, namespace
        self.selector = {"test": namespace}
        self.nodes = [f"{namespace}-node-{number}" for number in range(nodes)]
        self.address: Callable[[str], str] = lambda pod: "127.0.0.1"
        self._seen: list[dict[str, Any]] = []
        for name in self.nodes:
            self._make_node(name)

    def close(self) -> None:
        for name in self.nodes:
            self.api.delete(f"/api/v1/nodes/{name}")

    def add_node(self) -> str:
        """One more."""
        self.nodes.append(f"{self.namespace}-node-{len(self.nodes)}")
        self._make_node(self.nodes[-1])
        return self.nodes[-1]

    def change_node(self, name: str, spec: Mapping[str, Any], ready: str = "True") -> None:
        """Its spec, and what its condition Ready says."""
        self._merge(f"/api/v1/nodes/{name}", {"spec": spec})
        self._merge(f"/api/v1/nodes/{name}/status", {"status": {"conditions": _ready(ready)}})

    def _make_node(self, name: str) -> None:
        labels = {**self.selector, "kubernetes.io/hostname": name}
        labels |= {"topology.kubernetes.io/rack": "r", "topology.kubernetes.io/zone": "z"}
        made = self.api.post("/api/v1/nodes", json={"metadata": {"name": name, "labels": labels}})
        made.raise_for_status()
        status = {"allocatable": ROOM, "capacity": ROOM, "conditions": _ready("True")}
        self._merge(f"/api/v1/nodes/{name}/status", {"status": status})
        self._merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    # --- MedhaReplicas --------------------------------------------------------------------------

    def path(self, name: str = "", part: str = "") -> str:
        end = "".join(f"/{each}" for each in (name, part) if each)
        return f"/apis/{API_VERSION}/namespaces/{self.namespace}/medhareplicas{end}"

    def create(self, name: str, **spec: Any) -> dict[str, Any]:
        plain = {
            "model": {
                "name": name,
                "source": {"hostPath": {"path": "/models"}},
                "maxContextTokens": 4096,
            },
            "parallelism": {"spp": 2},
            "placement": {"nodeSelector": self.selector},
            "drainTimeout": "1s",
        }
        document = {"apiVersion": API_VERSION, "kind": "MedhaReplica", "metadata": {"name": name}}
        made = self.api.post(self.path(), json=document | {"spec": plain | spec})
        assert made.status_code == 201, made.text
        found: dict[str, Any] = made.json()
        return found

    def change(self, name: str, spec: Mapping[str, Any]) -> None:
        self._merge(self.path(name), {"spec": spec})

    def owned(self, name: str) -> set[str]:
        """Fields of its spec of which the API server knows who wrote them."""
        metadata = self.api.get(self.path(name)).json()["metadata"]
        return {
            field
            for entry in metadata["managedFields"]
            for field in entry["fieldsV1"].get("f:spec", {})
        }

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(self.path(name)).json().get("status", {})
        return found

    def condition(self, name: str, kind: str = "Ready") -> dict[str, Any]:
        """With the generation that the status was made from."""
        status = self.status(name)
        found = [each for each in status.get("conditions", []) if each["type"] == kind]
        return found[0] if found else {}

    def is_ready(self, name: str) -> bool:
        found = self.api.get(self.path(name)).json()
        told = found.get("status", {})
        return (
            told.get("observedGeneration") == found["metadata"]["generation"]
            and told.get("readyReplicas") == found["spec"].get("replicas", 1)
            and self.condition(name).get("status") == "True"
        )

    # --- pods -----------------------------------------------------------------------------------

    def list(self, kind: str, group: str = "api/v1") -> list[dict[str, Any]]:
        found = self.api.get(f"/{group}/namespaces/{self.namespace}/{kind}")
        items: list[dict[str, Any]] = found.json()["items"]
        return items

    def pods(self) -> dict[str, dict[str, Any]]:
        """Pods that are not about to go."""
        return {
            each["metadata"]["name"]: each
            for each in self.list("pods")
            if "deletionTimestamp" not in each["metadata"]
        }

    def list_of_pods_of(self, name: str) -> Callable[[], bool]:
        """Whether a resource has any pod."""
        return lambda: any(pod.startswith(f"{name}-") for pod in self.pods())

    def play(self) -> None:
        """Do once what scheduler and kubelets would do now."""
        self._seen = self.list("pods")
        for pod in self._seen:
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                self.remove(name)
            elif pod["spec"].get("schedulingGates") or "ownerReferences" not in pod["metadata"]:
                continue
            elif "nodeName" not in pod["spec"]:
                self._bind(pod)
            elif pod["status"]["phase"] == "Pending":
                self.run(name)

    def groups_beside(self, leader: str) -> int:
        """KVP groups that a leader's replica had when last played."""
        replica = leader.removesuffix("g0-s0")
        names = [each["metadata"]["name"] for each in self._seen]
        return len({each.rpartition("-")[0] for each in names if each.startswith(replica)})

    def remove(self, name: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.api.request("DELETE", path, json={"gracePeriodSeconds": 0})

    def run(self, name: str) -> None:
        """The pod runs and is ready, unless somebody has deleted it meanwhile."""
        kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": NOW} for kind in kinds]
        address = self.address(name)
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        status["podIPs"] = [{"ip": address}]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
        try:
            self._merge(path, {"status": status})
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404:
                raise

    def tell(self, name: str, status: Mapping[str, Any]) -> None:
        """The pod's status has this, and it is not ready any more."""
        conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": NOW}]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
        self._merge(path, {"status": {"conditions": conditions, **status}})

    def played(self, what: Callable[[], T], why: str = "", within_s: float = PATIENCE_S) -> T:
        """`until`, with the kubelets at work."""

        def look() -> T:
            self.play()
            return what()

        try:
            return until(look, why, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.shown()}") from None

    def shown(self) -> str:
        """How things are, for a test that failed."""
        lines = [f"{name}: {pod['status']}" for name, pod in self.pods().items()]
        lines += [
            f"{each['metadata']['name']}: {each.get('status')}"
            for each in self.api.get(self.path()).json()["items"]
        ]
        return "\n".join(lines)

    def _bind(self, pod: dict[str, Any]) -> None:
        affinity = pod["spec"]["affinity"]["nodeAffinity"]
        terms = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        node = terms[0]["matchFields"][0]["values"][0]
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/binding"
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        self.api.post(path, json={"metadata": {"name": name}, "target": target})

    def _merge(self, path: str, change: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        self.api.patch(path, json=change, headers=headers).raise_for_status()


def _ready(status: str) -> list[dict[str, str]]:
    """The conditions of a node."""
    condition = {"type": "Ready", "status": status, "reason": "Test", "message": ""}
    return [condition | {"lastHeartbeatTime": NOW, "lastTransitionTime": NOW}]
