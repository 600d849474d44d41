"""Medha on a testbed: the charts, the small model, and what the cluster says of it.

For `make demo-cluster` and tests/cluster: both do the same things to the same model.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import msgspec
import yaml
from examples.demo import MODEL
from examples.images import HOUSE
from examples.testbed import Failed, Testbed, until

from medha_worker.testing.checkpoint import write_checkpoint

NAMESPACE = "medha"
RESOURCE = HOUSE / "examples" / "kubernetes" / "tiny.yaml"
TOKENS_PER_GROUP = 16_384
READY_S = 300.0
GONE_S = 300.0
"""A namespace takes its time after a cluster was harmed."""
DECISIONS = "/tmp/decisions.jsonl"
OURS = "pods,services,configmaps,poddisruptionbudgets,networkpolicies,endpointslices"


class Installed:
    """The release `medha` and the resource `tiny` on one cluster."""

    def __init__(self, bed: Testbed) -> None:
        self.bed = bed
        self._made: list[tuple[str, ...]] = []  # commands that take away what was brought

    def load(self) -> threading.Thread:
        """Bring the images to the nodes; the worker's, which takes longest, on a thread."""
        for target in ("operator", "router"):
            self.bed.load(target)
        loading = threading.Thread(target=self.bed.load, args=("worker",), name="worker's image")
        loading.start()
        return loading

    def install(self) -> None:
        """Both charts; raises Failed where there is a release already, which is somebody's."""
        if there := self.bed.run("helm", "list", "--namespace", NAMESPACE, "--all", "--short"):
            raise Failed(f"namespace {NAMESPACE} has releases already: {', '.join(there.split())}")
        if not self.bed.kubectl("get", "namespace", NAMESPACE, "--ignore-not-found"):
            self._made.append(("kubectl", "delete", "namespace", NAMESPACE))
        for chart in ("medha-crds", "medha"):
            self._made.append(("helm", "uninstall", chart, "--namespace", NAMESPACE, "--wait"))
            self.bed.run(
                "helm", "install", chart, str(HOUSE / "charts" / chart), "--namespace", NAMESPACE,
                "--create-namespace", "--wait", "--timeout", "5m", timeout_s=320.0,
            )  # fmt: skip

    def uninstall(self) -> None:
        """Take away what was brought, but for the kind, which stays by its chart's will."""
        while self._made:
            self.bed.run(*self._made.pop(), timeout_s=GONE_S)

    def remove(self) -> None:
        """Likewise after a failure, as far as it goes."""
        while self._made:
            with contextlib.suppress(Failed):
                self.bed.run(*self._made.pop(), timeout_s=GONE_S)

    def apply(self, replicas: int = 1) -> str:
        """The newcomer's resource, with the model where this cluster has it."""
        if self.bed.kind != "given":
            write_checkpoint(self.bed.model, MODEL)
        found = yaml.safe_load(RESOURCE.read_text())
        spec = found["spec"]
        spec["replicas"] = replicas
        spec["model"]["source"] = {"hostPath": {"path": str(self.bed.model)}}
        spec.setdefault("scheduling", {})["releaseCooldown"] = "5s"  # shrinks while one watches
        spec["template"]["env"] = [{"name": "MEDHA_DECISION_LOG", "value": DECISIONS}]
        self._made.append(("kubectl", "delete", "mr", "tiny", "--ignore-not-found"))
        return self.bed.kubectl("apply", "-f", "-", text=yaml.safe_dump(found)).strip()

    def patch(self, spec: dict[str, object]) -> None:
        """Change fields of its spec."""
        change = msgspec.json.encode({"spec": spec}).decode()
        self.bed.kubectl("patch", "mr", "tiny", "--type=merge", "-p", change)

    def ready(self, limit_s: float = READY_S) -> None:
        """Wait until it is; raises Failed with what its conditions say."""
        try:
            self.bed.kubectl("wait", "mr/tiny", "--for=condition=Ready", f"--timeout={limit_s}s",
                             timeout_s=limit_s + 10.0)  # fmt: skip
        except Failed:
            told = [f"{each['type']}: {each['message']}" for each in self.conditions()
                    if each["status"] != "True" and each["message"]]  # fmt: skip
            raise Failed(f"not Ready within {limit_s:.0f} s: {'; '.join(told)}") from None

    def delete(self, limit_s: float = 120.0) -> float:
        """Delete it; seconds until nothing of it was left."""
        self.bed.kubectl("delete", "mr", "tiny")
        return until(lambda: not self.left(), "nothing left of it", limit_s)

    # --- looking ----------------------------------------------------------------------------------

    def resource(self) -> dict[str, Any]:
        return self.bed.get("mr", "tiny")

    def conditions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.resource().get("status", {}).get("conditions", [])
        return found

    def ready_replicas(self) -> int:
        return int(self.resource().get("status", {}).get("readyReplicas", 0))

    def pods(self) -> list[dict[str, Any]]:
        """Its pods, those that are being deleted too."""
        found: list[dict[str, Any]] = self.bed.get("pods", "-l", "medha.dev/replica=tiny")["items"]
        return found

    def decisions(self, leader: str) -> list[bytes]:
        """The decision log of a replica's controller, line by line; the last one is whole."""
        log = self.bed.kubectl("exec", leader, "--", "cat", DECISIONS).encode()
        return log[: log.rfind(b"\n")].split(b"\n")

    def updated(self, before: set[str], pods: int) -> bool:
        """None of the pods of `before` (UIDs) is there any more, and all new ones serve."""
        found, here = self.resource(), self.pods()
        return (
            not before & {each["metadata"]["uid"] for each in here}
            and found["status"].get("observedGeneration") == found["metadata"]["generation"]
            and self.ready_replicas() == found["spec"]["replicas"]
            and len(here) == pods
        )

    def left(self) -> list[str]:
        """Names of what the operator made and what is still there."""
        label = "app.kubernetes.io/managed-by=medha-operator"
        return self.bed.kubectl("get", OURS, "-l", label, "-o", "name").split()

    def tell_why(self) -> str:
        """After a failure: what the cluster says of it."""
        said = []
        for command in (
            ["get", "mr,pods", "-A", "-o", "wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["logs", "-n", NAMESPACE, "deployment/medha-operator", "--tail=20"],
            ["logs", "-l", "medha.dev/replica=tiny", "--tail=20", "--prefix"],
        ):
            try:
                said.append(f"$ kubectl {' '.join(command)}\n{self.bed.kubectl(*command)}")
            except Failed as failure:
                said.append(str(failure))
        return "\n".join(said)
