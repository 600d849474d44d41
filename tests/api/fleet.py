"""Shared by the tests of the operator: the operator as a process, and a fleet's nodes and pods.

There is neither a scheduler nor a kubelet here. `Fleet.play` binds pods to the nodes they prefer,
or to others with room, and marks them as running; the API server is real.
"""

from __future__ import annotations

import datetime
import json
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
from tests.api.fast_clock import MOMENT
from tests.api.operator_forks import ForkedOperator, ForkServer

from medha.cli.local_fleet.child_process import killed_with_parent
from medha.spec import API_VERSION

T = TypeVar("T")
PATIENCE_S = 300.0
POLL_S = 0.1
"""Interval of polls: each computes here and in the API server while others wait."""
NOW = "2026-01-01T00:00:00Z"
ROOM = {"cpu": "8", "memory": "64Gi", "pods": "110", "nvidia.com/gpu": "8"}
DURING = "DuringSchedulingIgnoredDuringExecution"
LEASE_S = 15.0
"""The default of the operator's setting: a starved machine does not end a leader's term."""
SHORT_LEASE = {"MEDHA_LEASE_S": "4"}
"""Settings of operators of which one is killed and one of another name takes over."""
RESYNC_S = 2
HOUSE = Path(__file__).resolve().parents[2]


def until(what: Callable[[], T], why: str = "", within_s: float = PATIENCE_S) -> T:
    """Poll `what` and return its first true value."""
    end = time.monotonic() + within_s
    while not (value := what()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:.0f} s: {why or what}; last was {value!r}")
        time.sleep(POLL_S)
    return value


class Operator:
    """An operator in a process of its own, serving one namespace."""

    def __init__(
        self,
        kubeconfig: Path,
        namespace: str,
        log: Path,
        name: str = "one",
        fork_server: ForkServer | None = None,
        speed: float = 1.0,
        **settings: str,
    ) -> None:
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
            "MEDHA_RESYNC_S": str(RESYNC_S),
            "MEDHA_REPORT_S": "0.2",
            "MEDHA_LEASE_S": str(LEASE_S),
            **settings,
        }
        self.process: ForkedOperator | subprocess.Popen[bytes]
        if fork_server is not None:
            self.process = fork_server.start(environment, log)
            return
        program = ("medha_operator",) if speed == 1.0 else ("tests.api.fast_clock", str(speed))
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                killed_with_parent(sys.executable, "-m", *program),
                cwd=HOUSE,
                env=environment,
                stdout=file,
                stderr=file,
            )

    @property
    def port(self) -> int:
        text = self.log.read_text() if self.log.exists() else ""
        match = re.search(r'"ops_port":(\d+)', text)
        return int(match.group(1)) if match else 0

    def alive(self) -> bool:
        return self._ask("/healthz").status_code == 200

    def ready(self) -> bool:
        return bool(self.port) and self._ask("/readyz").status_code == 200

    def leads(self) -> bool:
        return self.ready() and "medha_operator_leading 1.0" in self._ask("/metrics").text

    def metric(self, name: str) -> float | None:
        """The value of a metric, whatever its labels; None if it is not exported."""
        match = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", self._ask("/metrics").text, flags=re.M)
        return float(match.group(1)) if match else None

    def scaling(self) -> bytes:
        """The journals that `GET /scaling` returns."""
        return self._ask("/scaling").content

    def writes(self) -> float:
        """Number of its writes that were answered, without those to the Lease."""
        lines = re.findall(
            r"^medha_operator_writes_total\{(.*)\} (\S+)$", self._ask("/metrics").text, flags=re.M
        )
        return sum(float(count) for labels, count in lines if 'kind="leases"' not in labels)

    def shown(self, name: str) -> dict[str, float]:
        """Values of a metric by their labels, as text."""
        rows = re.findall(rf"^{name}\{{(.*)\}} (\S+)$", self._ask("/metrics").text, flags=re.M)
        return {labels: float(value) for labels, value in rows}

    def logged(self, message: str) -> list[tuple[float, str]]:
        """Log lines that contain this pattern, and the operator's time of each."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return [
            (datetime.datetime.fromisoformat(line["time"]).timestamp(), line["message"])
            for line in lines
            if re.search(message, line["message"])
        ]

    def time_s(self) -> float:
        """Read the operator's own clock; it must run on `tests.api.fast_clock`."""
        moments = len(self.logged(MOMENT))
        self.process.send_signal(signal.SIGUSR1)
        return until(lambda: self.logged(MOMENT)[moments:])[-1][0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def end(self) -> int:
        """End it with SIGTERM; returns its exit code."""
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
    """A namespace of an API server, its nodes, and the pods in it."""

    def __init__(self, api: httpx.Client, namespace: str, nodes: int = 2) -> None:
        self.api, self.namespace = api, namespace
        self.selector = {"test": namespace}
        self.scheduled = False
        """A real scheduler binds the pods."""
        self.nodes = [f"{namespace}-node-{number}" for number in range(nodes)]
        self.address: Callable[[str], str] = lambda pod: "127.0.0.1"
        self._seen: list[dict[str, Any]] = []
        for name in self.nodes:
            self._make_node(name)

    def close(self) -> None:
        for name in self.nodes:
            self.api.delete(f"/api/v1/nodes/{name}")

    def add_node(self, rack: str = "r", **labels: str) -> str:
        """Add a node; returns its name."""
        self.nodes.append(f"{self.namespace}-node-{len(self.nodes)}")
        self._make_node(self.nodes[-1], rack, labels)
        return self.nodes[-1]

    def change_node(self, name: str, spec: Mapping[str, Any], ready: str = "True") -> None:
        """Change the node's spec and the status of its condition Ready."""
        self._merge(f"/api/v1/nodes/{name}", {"spec": spec})
        self._merge(f"/api/v1/nodes/{name}/status", {"status": {"conditions": _ready(ready)}})

    def _make_node(self, name: str, rack: str = "r", more: Mapping[str, str] = {}) -> None:
        labels = {**self.selector, "kubernetes.io/hostname": name, **more}
        labels |= {"topology.kubernetes.io/rack": rack, "topology.kubernetes.io/zone": "z"}
        reply = self.api.post("/api/v1/nodes", json={"metadata": {"name": name, "labels": labels}})
        reply.raise_for_status()
        status = {"allocatable": ROOM, "capacity": ROOM, "conditions": _ready("True")}
        self._merge(f"/api/v1/nodes/{name}/status", {"status": status})
        self._merge(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})

    # --- MedhaReplicas --------------------------------------------------------------------------

    def path(self, name: str = "", part: str = "") -> str:
        end = "".join(f"/{segment}" for segment in (name, part) if segment)
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
        reply = self.api.post(self.path(), json=document | {"spec": plain | spec})
        assert reply.status_code == 201, reply.text
        resource: dict[str, Any] = reply.json()
        return resource

    def change(self, name: str, spec: Mapping[str, Any]) -> None:
        self._merge(self.path(name), {"spec": spec})

    def owned(self, name: str) -> set[str]:
        """Fields of the resource's spec that have a field manager."""
        metadata = self.api.get(self.path(name)).json()["metadata"]
        return {
            field
            for entry in metadata["managedFields"]
            for field in entry["fieldsV1"].get("f:spec", {})
        }

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = self.api.get(self.path(name)).json().get("status", {})
        return status

    def condition(self, name: str, kind: str = "Ready") -> dict[str, Any]:
        """The condition of this type; empty if there is none."""
        return condition_of(self.status(name), kind)

    def is_ready(self, name: str) -> bool:
        resource = self.api.get(self.path(name)).json()
        status = resource.get("status", {})
        return (
            status.get("observedGeneration") == resource["metadata"]["generation"]
            and status.get("readyReplicas") == resource["spec"].get("replicas", 1)
            and condition_of(status).get("status") == "True"
        )

    # --- pods -----------------------------------------------------------------------------------

    def list(self, kind: str, group: str = "api/v1") -> list[dict[str, Any]]:
        reply = self.api.get(f"/{group}/namespaces/{self.namespace}/{kind}")
        items: list[dict[str, Any]] = reply.json()["items"]
        return items

    def pods(self) -> dict[str, dict[str, Any]]:
        """The pods that are not being deleted, by name."""
        return {
            pod["metadata"]["name"]: pod
            for pod in self.list("pods")
            if "deletionTimestamp" not in pod["metadata"]
        }

    def has_pods(self, name: str) -> Callable[[], bool]:
        """Make a function that returns true if the resource has any pod."""
        return lambda: any(pod.startswith(f"{name}-") for pod in self.pods())

    def play(self) -> None:
        """Do once what scheduler and kubelets would do now."""
        self._seen = self.list("pods")
        rooms: Rooms | None = None
        for pod in self._seen:
            name = pod["metadata"]["name"]
            if "deletionTimestamp" in pod["metadata"]:
                if pod["metadata"].get("finalizers") and "nodeName" in pod["spec"]:
                    self._set_status(name, {"phase": "Failed"})  # its containers have ended
                self.remove(name)
            elif pod["spec"].get("schedulingGates") or "ownerReferences" not in pod["metadata"]:
                continue
            elif "nodeName" not in pod["spec"]:
                if not self.scheduled:
                    rooms = rooms or self._rooms()
                    self._schedule(pod, rooms)
            elif pod["status"]["phase"] == "Pending":
                self.run(name)

    def group_count(self, leader: str) -> int:
        """Number of KVP groups of a leader's replica at the last `play`."""
        replica = leader.removesuffix("g0-s0")
        names = [pod["metadata"]["name"] for pod in self._seen]
        return len({pod.rpartition("-")[0] for pod in names if pod.startswith(replica)})

    def remove(self, name: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        self.api.request("DELETE", path, json={"gracePeriodSeconds": 0})

    def run(self, name: str) -> None:
        """Mark the pod as running and ready, unless it was deleted."""
        kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": NOW} for kind in kinds]
        address = self.address(name)
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        status["podIPs"] = [{"ip": address}]
        self._set_status(name, status)

    def _set_status(self, name: str, status: Mapping[str, Any]) -> None:
        """Merge `status` into the pod's status, unless the pod was deleted."""
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
        try:
            self._merge(path, {"status": status})
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404:
                raise

    def set_not_ready(self, name: str, status: Mapping[str, Any]) -> None:
        """Merge `status` into the pod's status and mark the pod as not ready."""
        conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": NOW}]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}/status"
        self._merge(path, {"status": {"conditions": conditions, **status}})

    def played(self, what: Callable[[], T], why: str = "", within_s: float = PATIENCE_S) -> T:
        """Poll as `until` does, with scheduler and kubelets played."""

        def look() -> T:
            self.play()
            return what()

        try:
            return until(look, why, within_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.shown()}") from None

    def rest(self, operator: Operator) -> None:
        """Play on for four resyncs of an operator, once it leads."""
        until(operator.leads)
        end_s = time.monotonic() + 4 * RESYNC_S
        self.played(lambda: time.monotonic() > end_s)

    def shown(self) -> str:
        """The state of pods and resources, for the message of a failed test."""
        lines = [f"{name}: {pod['status']}" for name, pod in self.pods().items()]
        lines += [
            f"{resource['metadata']['name']}: {resource.get('status')}"
            for resource in self.api.get(self.path()).json()["items"]
        ]
        return "\n".join(lines)

    def _schedule(self, pod: dict[str, Any], rooms: Rooms) -> None:
        """Bind the pod to the node that it prefers, else to any that has room; or refuse it."""
        usable = rooms.usable(pod)
        affinity = pod["spec"]["affinity"].get("nodeAffinity", {})
        wanted = affinity.get(f"preferred{DURING}", ())
        names = [term["preference"]["matchExpressions"][0]["values"][0] for term in wanted]
        node = next((name for name in (*names, *usable) if name in usable), "")
        name = pod["metadata"]["name"]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
        if node:
            target = {"apiVersion": "v1", "kind": "Node", "name": node}
            self.api.post(f"{path}/binding", json={"metadata": {"name": name}, "target": target})
            rooms.take(node, pod)
            return
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
        conditions = [refused | {"message": f"0/{len(self.nodes)} nodes are available"}]
        if pod["status"].get("conditions") != conditions:
            self._merge(f"{path}/status", {"status": {"conditions": conditions}})

    def _rooms(self) -> Rooms:
        """The room that the pods just listed leave on this fleet's nodes."""
        nodes = self.api.get("/api/v1/nodes").json()["items"]
        return Rooms([node for node in nodes if node["metadata"]["name"] in self.nodes], self._seen)

    def _merge(self, path: str, change: Mapping[str, Any]) -> None:
        headers = {"Content-Type": "application/merge-patch+json"}
        answer = self.api.patch(path, json=change, headers=headers)
        if answer.status_code != httpx.codes.NOT_FOUND:  # deleted since it was read
            answer.raise_for_status()


class Rooms:
    """Devices that are left on nodes which are ready and schedulable."""

    def __init__(self, nodes: list[dict[str, Any]], pods: list[dict[str, Any]]) -> None:
        self._labels: dict[str, dict[str, str]] = {}
        self._left: dict[str, int] = {}
        for node in nodes:
            conditions = {entry["type"]: entry["status"] for entry in node["status"]["conditions"]}
            if conditions["Ready"] == "True" and not node["spec"].get("unschedulable"):
                name = node["metadata"]["name"]
                self._labels[name] = node["metadata"]["labels"]
                self._left[name] = int(node["status"]["allocatable"]["nvidia.com/gpu"])
        for pod in pods:
            if pod["status"]["phase"] not in ("Succeeded", "Failed"):
                self.take(pod["spec"].get("nodeName", ""), pod)

    def usable(self, pod: dict[str, Any]) -> list[str]:
        """Names of the nodes that match the pod's selector and have its devices left."""
        selector, wanted = pod["spec"].get("nodeSelector", {}), _devices(pod)
        return sorted(
            name
            for name, left in self._left.items()
            if left >= wanted and selector.items() <= self._labels[name].items()
        )

    def take(self, node: str, pod: dict[str, Any]) -> None:
        """Count the pod's devices on a node."""
        if node in self._left:
            self._left[node] -= _devices(pod)


def condition_of(status: Mapping[str, Any], kind: str = "Ready") -> dict[str, Any]:
    """Return the condition of this type; empty if there is none."""
    conditions = status.get("conditions", ())
    return next((condition for condition in conditions if condition["type"] == kind), {})


def _devices(pod: dict[str, Any]) -> int:
    """The devices that a pod requests."""
    containers = pod["spec"]["containers"]
    return sum(
        int(container["resources"].get("requests", {}).get("nvidia.com/gpu", 0))
        for container in containers
    )


def _ready(status: str) -> list[dict[str, str]]:
    """The conditions of a node."""
    condition = {"type": "Ready", "status": status, "reason": "Test", "message": ""}
    return [condition | {"lastHeartbeatTime": NOW, "lastTransitionTime": NOW}]
