"""Builders for test suites, and a small cluster that carries out plans as a real one would.

`Cluster` is a model of everything around the planner, for properties over long histories; the API
server's own behaviour is tested on a real one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from medha.config import CONTROLLER_OPS_PORT
from medha.messages import GroupStatus, ReplicaStatus
from medha.spec import API_VERSION, MedhaReplica, parse
from medha_operator.planning.node_placement import pod_requirements
from medha_operator.planning.planner import PlanDecision, decide
from medha_operator.planning.resource_status import status
from medha_operator.resources import labels as names
from medha_operator.resources.actions import (
    Action,
    ApplyObject,
    CreatePod,
    DeleteObject,
    DeletePod,
    Drain,
    ReleasePod,
    RemoveSchedulingGate,
    RequeueAt,
)
from medha_operator.resources.manifests import content_hash, key, replica_name
from medha_operator.resources.views import (
    UNREACHABLE,
    NodeView,
    Observed,
    PodTimers,
    PodView,
    QuotaRefusal,
    ReportView,
    Taint,
    TakenName,
)
from medha_operator.settings import Settings

SETTINGS = Settings(namespace="medha", worker_image="worker:1")
NOW_S = 1_800_000_000.0


def resource(name: str = "tiny", generation: int = 1, **spec: Any) -> MedhaReplica:
    """Build a small MedhaReplica; `spec` is written as in YAML."""
    plain = {
        "model": {
            "name": "m",
            "source": {"pvc": {"claimName": "models"}},
            "maxContextTokens": 4096,
        },
        "device": {"kind": "Cuda"},
    }
    metadata = {"name": name, "namespace": "team", "uid": f"uid-{name}", "generation": generation}
    return parse(
        {
            "apiVersion": API_VERSION,
            "kind": "MedhaReplica",
            "metadata": metadata,
            "spec": {**plain, **spec},
        }
    )


def node(name: str, gpus: int = 8, **changes: Any) -> NodeView:
    """Build a node with devices and plenty of the rest; `labels` by keyword."""
    labels = {"kubernetes.io/hostname": name, **changes.pop("labels", {})}
    room = {"nvidia.com/gpu": gpus, "cpu": 64_000, "memory": 1 << 40, "pods": 110}
    return NodeView(name=name, labels=labels, allocatable=room, **changes)


def rack(name: str, nodes: int, gpus: int = 8, **changes: Any) -> tuple[NodeView, ...]:
    """Build nodes `<name>-0`, … of one rack."""
    labels = {"topology.kubernetes.io/rack": name}
    return tuple(node(f"{name}-{index}", gpus, labels=labels, **changes) for index in range(nodes))


REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def _matches(node: NodeView, term: Mapping[str, Any]) -> bool:
    return all(
        (node.labels.get(rule["key"]) in rule["values"]) == (rule["operator"] == "In")
        for rule in term["matchExpressions"]
    )


class Cluster:
    """Nodes, pods and controllers; `reconcile` is an operator step, `turn` one of the rest."""

    def __init__(
        self, resource: MedhaReplica, nodes: Iterable[NodeView], settings: Settings = SETTINGS
    ) -> None:
        self.resource, self.settings = resource, settings
        self.nodes = {node.name: node for node in nodes}
        self.pods: dict[str, PodView] = {}
        self.specs: dict[str, Mapping[str, Any]] = {}
        """The spec of each pod, as it was created."""
        self.objects: dict[tuple[str, str], str] = {}
        self.status: dict[str, Any] = {}
        self.taken: dict[tuple[str, str], str] = {}
        """By kind and name, sentences about objects of another owner."""
        self.now_s = NOW_S
        self.reports_since_s = 0.0
        self.wanted: dict[int, int] = {}
        self.load: dict[int, int] = {}
        self.draining: set[str] = set()
        self.hung: set[str] = set()
        """UIDs of pods whose controller gave up on their ranks, which do not recover."""
        self.left: set[str] = set()
        """UIDs of pods whose ranks were released; they join again when they are wanted."""
        self.refused = ""
        """The reason why the router refuses replicas."""
        self.pods_allowed: int | None = None
        """The namespace's quota of pods."""
        self.quota: QuotaRefusal | None = None
        self.bound_to = ""
        """Beginning of the names of nodes outside which the scheduler binds no pod, e.g. because a
        volume lies there; the operator does not see why."""
        self.unseen: set[str] = set()
        """Nodes that exist and that the operator does not know yet."""
        self.done: list[Action] = []
        self._formed: set[str] = set()
        self._timers = PodTimers()
        self._uids = itertools.count(1)

    # --- the operator ---------------------------------------------------------------------------

    def observed(self) -> Observed:
        return Observed(
            now_s=self.now_s,
            pods=self._timers.with_times(
                (self.pods[name] for name in sorted(self.pods)), self.now_s
            ),
            objects=dict(self.objects),
            reports=self.reports(),
            polled_since_s=self.reports_since_s,
            nodes=tuple(node for node in self.nodes.values() if node.name not in self.unseen),
            previous_status=self.status,
            quota=self.quota,
            taken={
                place: TakenName(message, self.now_s + 20.0)
                for place, message in self.taken.items()
            },
        )

    def reconcile(self) -> PlanDecision:
        """Plan, execute and write the status; returns the decision."""
        observed = self.observed()
        decision = decide(self.resource, observed, self.settings)
        for action in decision.actions:
            if isinstance(action, CreatePod) and self._is_over_quota():
                self.quota = QuotaRefusal("exceeded quota: q, limited: pods", self.now_s)
                break
            self.execute(action)
        after = status(
            self.resource,
            observed,
            decision,
            generation=self.resource.generation,
        )
        self.status = msgspec.json.decode(msgspec.json.encode(after))
        assert self.status == after
        self.done += decision.actions
        return decision

    def execute(self, action: Action) -> None:
        match action:
            case ApplyObject(manifest):
                self.objects[key(manifest)] = content_hash(manifest)
            case DeleteObject(kind, name):
                del self.objects[kind, name]
            case CreatePod(manifest):
                self._create(manifest)
            case RemoveSchedulingGate(pod, uid):
                assert self.pods[pod].uid == uid
                self.change(pod, gated=False)
            case ReleasePod(pod, uid):
                assert self.pods[pod].uid == uid and self.pods[pod].deleting
                del self.pods[pod]
            case DeletePod(pod, uid, _, grace_s, if_lost):
                assert self.pods[pod].uid == uid
                if not if_lost or self._is_lost(if_lost):
                    self._delete(pod, grace_s)
            case Drain(ordinal, address):
                leader = self.pods[self._leader(ordinal)]
                assert address == f"{leader.ip}:{CONTROLLER_OPS_PORT}"
                self.draining.add(leader.uid)

    def _is_over_quota(self) -> bool:
        return self.pods_allowed is not None and len(self.pods) >= self.pods_allowed

    def _create(self, manifest: Mapping[str, Any]) -> None:
        metadata, spec = manifest["metadata"], manifest["spec"]
        name, labels = metadata["name"], metadata["labels"]
        assert name not in self.pods, f"pod {name} exists already"
        self.specs[name] = spec
        self.pods[name] = PodView(
            name=name,
            uid=f"{name}#{next(self._uids)}",
            ordinal=int(labels[names.ORDINAL]),
            group=int(labels[names.GROUP]),
            stage=int(labels[names.STAGE]),
            attempt=int(labels[names.ATTEMPT]),
            spec_hash=labels[names.SPEC_HASH],
            target=metadata.get("annotations", {}).get(names.TARGET, ""),
            gated="schedulingGates" in spec,
            image=spec["containers"][0]["image"],
            config=spec["volumes"][0]["configMap"]["name"],
            created_s=self.now_s,
        )

    def _is_lost(self, node: str) -> bool:
        return node not in self.nodes or self.nodes[node].silent

    def _delete(self, pod: str, grace_s: int | None) -> None:
        if grace_s == 0 or not self.pods[pod].node:
            del self.pods[pod]
        else:
            self.change(pod, deleting=True)

    # --- nodes, pods and controllers --------------------------------------------------------------

    def change(self, pod: str, **fields: Any) -> None:
        self.pods[pod] = msgspec.structs.replace(self.pods[pod], **fields)

    def change_node(self, name: str, **fields: Any) -> None:
        self.nodes[name] = msgspec.structs.replace(self.nodes[name], **fields)

    def power(self, name: str, on: bool) -> None:
        """Switch a node off, or on again."""
        taints = () if on else (Taint(UNREACHABLE, effect="NoExecute"),)
        self.change_node(name, ready=on, taints=taints)

    def turn(self, seconds: float = 1.0) -> None:
        """Let time pass: the scheduler binds, kubelets start and end pods, requests finish."""
        self.now_s += seconds
        for name, pod in list(self.pods.items()):
            if pod.node:
                self._tend(name, pod)
            elif not pod.gated and not pod.held:
                self._schedule(name, pod)
        for ordinal in self.load:
            self.load[ordinal] = max(0, self.load[ordinal] - 1)

    def _tend(self, name: str, pod: PodView) -> None:
        """Act as the kubelet of the pod's node, if that runs."""
        home = self.nodes.get(pod.node)
        leads = pod.group == pod.stage == 0
        if home is None or not home.ready:
            self.change(name, ready=False, ready_since_s=None)
        elif pod.deleting and pod.kept:
            self.change(name, phase="Failed")
        elif pod.deleting:
            del self.pods[name]
        elif pod.phase == "Pending":
            self.change(name, phase="Running", ip=f"10.0.0.{len(name)}")
        elif pod.uid in self.hung:
            return
        elif pod.uid in self.left:
            if self.wanted.get(pod.ordinal, 1) > pod.group:
                self.left.remove(pod.uid)
        elif pod.phase == "Running" and not pod.ready and not (self.refused and leads):
            self.change(name, ready=True, ready_since_s=self.now_s)

    def _schedule(self, name: str, pod: PodView) -> None:
        """Bind a pod as the kube-scheduler does, by its own spec, or report why not."""
        spec = self.specs[name]
        affinity = spec["affinity"].get("nodeAffinity", {})
        required = affinity.get(REQUIRED, {"nodeSelectorTerms": []})["nodeSelectorTerms"]
        near = spec["affinity"].get("podAffinity", {})
        able = [
            node
            for node in self.nodes.values()
            if node.ready
            and node.schedulable
            and node.name.startswith(self.bound_to)
            and spec.get("nodeSelector", {}).items() <= node.labels.items()
            and all(_matches(node, term) for term in required)
            and all(self._joins(pod, node, term) for term in near.get(REQUIRED, ()))
            and self._has_room(node)
        ]
        if not able:
            message = f"0/{len(self.nodes)} nodes are available"
            self.change(name, why="Unschedulable", message=message)
            return

        def score(node: NodeView) -> int:
            wanted = affinity.get(PREFERRED, ())
            points: int = sum(
                term["weight"] * _matches(node, term["preference"]) for term in wanted
            )
            for term in near.get(PREFERRED, ()):
                level = term["podAffinityTerm"]["topologyKey"]
                points += term["weight"] * (node.labels.get(level) in self._domains(pod, level))
            return points

        best = min(able, key=lambda node: (-score(node), self._siblings(pod, node), node.name))
        self.change(name, node=best.name, why="", message="")

    def _has_room(self, node: NodeView) -> bool:
        there = sum(
            pod.node == node.name and pod.phase in ("Pending", "Running")
            for pod in self.pods.values()
        )
        return all(
            node.allocatable.get(name, 0) - node.used.get(name, 0) >= need * (there + 1)
            for name, need in pod_requirements(self.resource).requests.items()
        )

    def _domains(self, pod: PodView, level: str) -> set[str | None]:
        """The domains in which pods of the same replica stand."""
        return {
            self.nodes[other.node].labels.get(level)
            for other in self.pods.values()
            if other.ordinal == pod.ordinal and other.node in self.nodes
        } - {None}

    def _joins(self, pod: PodView, node: NodeView, term: Mapping[str, Any]) -> bool:
        level = term["topologyKey"]
        domains = self._domains(pod, level)
        return level in node.labels and (not domains or node.labels[level] in domains)

    def _siblings(self, pod: PodView, node: NodeView) -> int:
        return sum(
            other.node == node.name and other.ordinal != pod.ordinal for other in self.pods.values()
        )

    def reports(self) -> dict[int, ReportView]:
        """Report as the controllers of running leader pods on living nodes."""
        reports = {}
        for pod in self.pods.values():
            alive = pod.node in self.nodes and self.nodes[pod.node].ready
            alive = alive and self.now_s >= self.reports_since_s + 2.0
            if pod.group == pod.stage == 0 and pod.phase == "Running" and pod.ip and alive:
                reports[pod.ordinal] = ReportView(status=self._report(pod), at_s=self.now_s)
        return reports

    def _report(self, leader: PodView) -> ReplicaStatus:
        groups: dict[int, list[PodView]] = {}
        for pod in self.pods.values():
            if pod.ordinal == leader.ordinal:
                groups.setdefault(pod.group, []).append(pod)
        lines = tuple(
            GroupStatus(group=index, state=self._state(groups.get(index, [])))
            for index in range(self.resource.spec.parallelism.kvp.max)
        )
        running = sum(line.state == "running" for line in lines)
        if running >= self.resource.spec.parallelism.kvp.min:
            self._formed.add(leader.uid)  # the first generation has the whole base
        draining = leader.uid in self.draining
        return ReplicaStatus(
            replica=replica_name(self.resource.name, leader.ordinal),
            ready=leader.ready and not draining,
            draining=draining,
            generation=running if leader.uid in self._formed else 0,
            wanted_groups=self.wanted.get(leader.ordinal, 1),
            groups=lines,
            routers=0 if self.refused else 1,
            refused=self.refused,
            running=self.load.get(leader.ordinal, 0),
            restart_groups=tuple(
                index
                for index in sorted(groups)
                if any(pod.uid in self.hung for pod in groups[index])
            ),
        )

    def _state(self, pods: list[PodView]) -> str:
        if not pods or all(pod.uid in self.left or not pod.ip for pod in pods):
            return "absent"
        return "running" if all(pod.ready for pod in pods) else "starting"

    def release(self, ordinal: int, group: int) -> None:
        """Release a group that holds nothing, as the controller does."""
        self.wanted[ordinal] = group
        for pod in self.pods.values():
            if (pod.ordinal, pod.group) == (ordinal, group):
                self.left.add(pod.uid)
                self.change(pod.name, ready=False, ready_since_s=None)

    def _leader(self, ordinal: int) -> str:
        return f"{self.resource.name}-{ordinal}-g0-s0"

    # --- assertions and steps of tests -----------------------------------------------------------

    @property
    def places(self) -> dict[str, str]:
        """Map pods to nodes."""
        return {name: pod.node for name, pod in sorted(self.pods.items())}

    def condition(self, type: str) -> dict[str, Any]:
        condition: dict[str, Any]
        (condition,) = [entry for entry in self.status["conditions"] if entry["type"] == type]
        return condition

    def update(self, **spec: Any) -> None:
        """Apply a spec as a person does."""
        self.resource = resource(generation=self.resource.generation + 1, **spec)

    @property
    def ordinals(self) -> set[int]:
        return {pod.ordinal for pod in self.pods.values()}

    def settle(self, turns: int = 60) -> None:
        """Alternate `reconcile` and `turn` until nothing changes, back-off included."""
        for _ in range(turns):
            before = (dict(self.pods), dict(self.objects), self.status, dict(self.load))
            actions = self.reconcile().actions
            self.turn()
            waits = [action.at_s for action in actions if isinstance(action, RequeueAt)]
            if before != (self.pods, self.objects, self.status, self.load):
                continue
            if not actions:
                return
            if waits and len(actions) == 1:
                self.now_s = max(self.now_s, waits[0])
        raise AssertionError(f"still busy after {turns} turns: {actions}")
