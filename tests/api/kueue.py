"""Kueue, played after its documentation and its source: plain pod groups in one queue.

A policy of the API server stands for its webhook: queued pods get Kueue's gate, label and
finalizer. `Queue.admit` removes the gates of whole groups within a number of pods; `evict` deletes
an admitted group with the condition that Kueue writes. A pod that has ended keeps its finalizer
until the group has another one in its place, as in Kueue.
"""

from __future__ import annotations

from typing import Any

import httpx
from tests.api.fleet import Fleet, until

QUEUE = "kueue.x-k8s.io/queue-name"
GROUP, COUNT = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
GATE, MANAGED = "kueue.x-k8s.io/admission", "kueue.x-k8s.io/managed"
_STRATEGIC = {"Content-Type": "application/strategic-merge-patch+json"}

_POLICY = {
    "metadata": {"name": "kueue"},
    "spec": {
        "matchConstraints": {
            "resourceRules": [
                {
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE"],
                    "resources": ["pods"],
                }
            ]
        },
        "matchConditions": [
            {
                "name": "queued",
                "expression": f"has(object.metadata.labels) && '{QUEUE}' in object.metadata.labels",
            }
        ],
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "mutations": [
            {
                "patchType": "ApplyConfiguration",
                "applyConfiguration": {
                    "expression": "Object{"
                    f'metadata: Object.metadata{{labels: {{"{MANAGED}": "true"}}, '
                    f'finalizers: ["{MANAGED}"]}}, '
                    "spec: Object.spec{schedulingGates: "
                    f'[Object.spec.schedulingGates{{name: "{GATE}"}}]}}}}'
                },
            }
        ],
    },
}
_BINDING = {"metadata": {"name": "kueue"}, "spec": {"policyName": "kueue"}}


def install(api: httpx.Client, namespace: str) -> None:
    """Make the API server treat queued pods as Kueue's webhook does; wait until it does."""
    path = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolic"
    for kind, body in (("ies", _POLICY), ("ybindings", _BINDING)):
        reply = api.post(f"{path}{kind}", json=body)
        assert reply.status_code in (201, 409), reply.text
    pods = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    probe = {
        "metadata": {"name": "probe", "labels": {QUEUE: "q"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    until(lambda: GATE in api.post(pods, json=probe).text, "queued pods are gated")


class Queue:
    """A queue with room for `room` pods."""

    def __init__(self, fleet: Fleet, room: int) -> None:
        self._fleet, self.room = fleet, room
        self.admitted: set[str] = set()

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """The pods of each group that are not being deleted."""
        groups: dict[str, list[dict[str, Any]]] = {}
        for pod in self._fleet.pods().values():
            groups.setdefault(pod["metadata"]["labels"][GROUP], []).append(pod)
        return groups

    def admit(self) -> None:
        """Admit the groups that are whole and fit, the oldest first; ungate admitted groups."""
        groups = self.groups()
        self.admitted &= {pod["metadata"]["labels"][GROUP] for pod in self._fleet.list("pods")}
        for name, pods in sorted(groups.items()):
            total = int(pods[0]["metadata"]["annotations"][COUNT])
            used = sum(len(groups.get(other, ())) for other in self.admitted - {name})
            if len(pods) == total and used + total <= self.room:
                self.admitted.add(name)
            for pod in pods if name in self.admitted else ():
                if GATE in [gate["name"] for gate in pod["spec"].get("schedulingGates", ())]:
                    gate = {"name": GATE, "$patch": "delete"}
                    self._patch(pod, {"spec": {"schedulingGates": [gate]}})

    def evict(self, name: str) -> None:
        """Preempt a group."""
        self.admitted.discard(name)
        target = {
            "type": "TerminationTarget",
            "status": "True",
            "reason": "WorkloadEvictedDueToPreempted",
            "message": "Preempted to accommodate a workload",
        }
        for pod in self.groups()[name]:
            self._patch(pod, {"status": {"conditions": [target]}}, "/status")
            reply = self._fleet.api.delete(self._path(pod))
            assert reply.status_code in (200, 404), reply.text  # 404: the operator was faster

    def _patch(self, pod: dict[str, Any], change: dict[str, Any], part: str = "") -> None:
        reply = self._fleet.api.patch(f"{self._path(pod)}{part}", json=change, headers=_STRATEGIC)
        assert reply.status_code in (200, 404), reply.text

    def _path(self, pod: dict[str, Any]) -> str:
        return f"/api/v1/namespaces/{self._fleet.namespace}/pods/{pod['metadata']['name']}"
