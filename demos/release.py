"""Release of Medha on a testbed: charts, a small model, and the state of the cluster.

Used by `make demo-cluster` and tests/cluster.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import msgspec
import yaml
from demos.images import ROOT
from demos.local import MODEL
from demos.testbed import Failed, Testbed, until

from medha_worker.model.checkpoint_writer import write_checkpoint

NAMESPACE = "medha"
RESOURCE = ROOT / "examples" / "kubernetes" / "tiny.yaml"
TOKENS_PER_GROUP = 16_384
READY_S = 300.0
GONE_S = 300.0
"""A namespace is deleted slowly after faults of the cluster."""
DECISIONS = "/tmp/decisions.jsonl"
OURS = "pods,services,configmaps,poddisruptionbudgets,networkpolicies,endpointslices"


class Installed:
    """The release `medha` and the resource `tiny` on one cluster."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self._made: list[tuple[str, ...]] = []  # commands that take away what was brought

    def load(self) -> threading.Thread:
        """Load the images onto the nodes; the worker's, which takes longest, on a thread."""
        for target in ("operator", "router"):
            self.bed.load(target)
        loading = threading.Thread(target=self.bed.load, args=("worker",), name="worker's image")
        loading.start()
        return loading

    def install(self) -> None:
        """Install both charts; raises Failed if the namespace already has a release."""
        if there := self.bed.run("helm", "list", "--namespace", NAMESPACE, "--all", "--short"):
            raise Failed(f"namespace {NAMESPACE} has releases already: {', '.join(there.split())}")
        if not self.bed.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found"):
            self._made.append(("kubectl", "delete", "namespace", NAMESPACE))
        for chart in ("medha-crds", "medha"):
            self._made.append(("helm", "uninstall", chart, "--namespace", NAMESPACE, "--wait"))
            self.bed.run(
                "helm",
                "install",
                chart,
                str(ROOT / "charts" / chart),
                "--namespace",
                NAMESPACE,
                "--create-namespace",
                "--wait",
                "--timeout",
                "5m",
                timeout_s=320.0,
            )

    def uninstall(self) -> None:
        """Remove everything installed, except the CRD, which its chart keeps."""
        while self._made:
            self.bed.run(*self._made.pop(), timeout_s=GONE_S)

    def remove(self) -> None:
        """Remove everything after a failure, ignoring errors."""
        while self._made:
            with contextlib.suppress(Failed):
                self.bed.run(*self._made.pop(), timeout_s=GONE_S)

    def apply(self, replicas: int = 1) -> str:
        """Apply the example resource, with the model's path on this cluster."""
        if self.bed.kind != "given":
            write_checkpoint(self.bed.model, MODEL)
        resource = yaml.safe_load(RESOURCE.read_text())
        spec = resource["spec"]
        spec["replicas"] = replicas
        spec["model"]["source"] = {"hostPath": {"path": str(self.bed.model)}}
        spec.setdefault("scheduling", {})["releaseCooldown"] = "5s"  # shrinks while one watches
        spec["template"]["env"] = [{"name": "MEDHA_DECISION_LOG", "value": DECISIONS}]
        self._made.append(("kubectl", "delete", "mr", "tiny", "--ignore-not-found"))
        return self.bed.kubectl("apply", "-f", "-", text=yaml.safe_dump(resource)).strip()

    def patch(self, spec: dict[str, object]) -> None:
        """Change fields of its spec."""
        change = msgspec.json.encode({"spec": spec}).decode()
        self.bed.kubectl("patch", "mr", "tiny", "--type=merge", "-p", change)

    def ready(self, limit_s: float = READY_S) -> None:
        """Wait until the resource is Ready; raises Failed with its conditions."""
        try:
            self.bed.kubectl(
                "wait",
                "mr/tiny",
                "--for=condition=Ready",
                f"--timeout={limit_s}s",
                timeout_s=limit_s + 10.0,
            )
        except Failed:
            reasons = [
                f"{condition['type']}: {condition['message']}"
                for condition in self.conditions()
                if condition["status"] != "True" and condition["message"]
            ]
            raise Failed(f"not Ready within {limit_s:.0f} s: {'; '.join(reasons)}") from None

    def delete(self, limit_s: float = 120.0) -> float:
        """Delete the resource; returns seconds until all its objects are gone."""
        self.bed.kubectl("delete", "mr", "tiny")
        return until(lambda: not self.left(), "all objects gone", limit_s)

    # --- state ------------------------------------------------------------------------------------

    def resource(self) -> dict[str, Any]:
        return self.bed.get("mr", "tiny")

    def conditions(self) -> list[dict[str, Any]]:
        conditions: list[dict[str, Any]] = self.resource().get("status", {}).get("conditions", [])
        return conditions

    def ready_replicas(self) -> int:
        return int(self.resource().get("status", {}).get("readyReplicas", 0))

    def pods(self) -> list[dict[str, Any]]:
        """Pods of the resource, including terminating ones."""
        pods: list[dict[str, Any]] = self.bed.get("pods", "-l", "medha.dev/replica=tiny")["items"]
        return pods

    def decisions(self, leader: str) -> list[bytes]:
        """Complete lines of the decision log of a replica's controller."""
        log = self.bed.kubectl("exec", leader, "--", "cat", DECISIONS).encode()
        return log[: log.rfind(b"\n")].split(b"\n")

    def updated(self, before: set[str], pods: int) -> bool:
        """True if no pod of `before` (UIDs) is left and all replicas are ready."""
        resource, here = self.resource(), self.pods()
        return (
            not before & {pod["metadata"]["uid"] for pod in here}
            and resource["status"].get("observedGeneration") == resource["metadata"]["generation"]
            and self.ready_replicas() == resource["spec"]["replicas"]
            and len(here) == pods
        )

    def left(self) -> list[str]:
        """Names of existing objects that the operator manages."""
        label = "app.kubernetes.io/managed-by=medha-operator"
        return self.bed.kubectl("get", OURS, "-l", label, "-o", "name").split()

    def diagnosis(self) -> str:
        """State and logs of the cluster after a failure."""
        texts = []
        for command in (
            ["get", "mr,pods", "-A", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["logs", "-n", NAMESPACE, "deployment/medha-operator", "--tail=20"],
            ["logs", "-l", "medha.dev/replica=tiny", "--tail=20", "--prefix"],
        ):
            try:
                texts.append(f"$ kubectl {' '.join(command)}\n{self.bed.kubectl(*command)}")
            except Failed as failure:
                texts.append(str(failure))
        return "\n".join(texts)
