"""Random histories of a cluster: it converges to the spec, and no invariant breaks on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha_operator.planning.planner import PlanDecision, decide
from medha_operator.planning.restarts import is_lost
from medha_operator.planning.rollout import SCALED_DOWN, SURGE
from medha_operator.resources.actions import Action, CreatePod, DeletePod, RequeueAt
from medha_operator.testing import REQUIRED, SETTINGS, Cluster, rack, resource

ZONE, RACK = "topology.kubernetes.io/zone", "topology.kubernetes.io/rack"


class Histories(RuleBasedStateMachine):
    """People, machines and time act on a cluster in any order, and the operator reconciles."""

    @initialize(
        tp=st.sampled_from([2, 4, 8]),
        spp=st.integers(1, 3),
        least=st.integers(1, 2),
        more=st.integers(0, 2),
        packed=st.booleans(),
    )
    def begin(self, tp: int, spp: int, least: int, more: int, packed: bool) -> None:
        self.spec: dict[str, Any] = {
            "replicas": 1,
            "parallelism": {"tp": tp, "spp": spp, "kvp": {"min": least, "max": least + more}},
            "placement": {"packLevel": RACK} if packed else {},
            "template": {"image": "worker:0"},
            "drainTimeout": "5m",
        }
        self.images = 0
        self.cluster = Cluster(resource(**self.spec), [*rack("r1", 5), *rack("r2", 4)])
        for _ in range(20):  # a gang that fits nowhere comes and goes: there is no end to wait for
            self.cluster.reconcile()
            self.cluster.turn()

    # --- people ---------------------------------------------------------------------------------

    def change(self, **spec: Any) -> None:
        self.spec |= spec
        generation = self.cluster.resource.generation + 1
        self.cluster.resource = resource(generation=generation, **self.spec)

    @rule(replicas=st.integers(0, 3))
    def scale(self, replicas: int) -> None:
        self.change(replicas=replicas)

    @rule()
    def update_the_image(self) -> None:
        self.images += 1
        self.change(template={"image": f"worker:{self.images}"})

    @rule(stages=st.integers(1, 3))
    def repartition(self, stages: int) -> None:
        self.change(parallelism={**self.spec["parallelism"], "spp": stages})

    @rule(which=st.integers(0, 50))
    def delete_a_pod_by_hand(self, which: int) -> None:
        if names := sorted(self.cluster.pods):
            name = names[which % len(names)]
            if self.cluster.pods[name].node:
                self.cluster.change(name, deleting=True)
            else:
                del self.cluster.pods[name]

    @rule(which=st.integers(0, 8), schedulable=st.booleans())
    def cordon(self, which: int, schedulable: bool) -> None:
        self.cluster.change_node(sorted(self.cluster.nodes)[which], schedulable=schedulable)

    # --- machines -------------------------------------------------------------------------------

    @rule(which=st.integers(0, 50))
    def fail_a_pod(self, which: int) -> None:
        running = [name for name, pod in self.cluster.pods.items() if pod.phase == "Running"]
        if running:
            name = sorted(running)[which % len(running)]
            self.cluster.change(name, phase="Failed", ready=False, ready_since_s=None)

    @rule(which=st.integers(0, 8), ready=st.booleans())
    def change_power(self, which: int, ready: bool) -> None:
        self.cluster.power(sorted(self.cluster.nodes)[which], ready)

    @rule(which=st.integers(0, 8), used=st.sampled_from([0, 4, 8]))
    def others_use_devices(self, which: int, used: int) -> None:
        """Never the devices of own pods: the scheduler would not bind such a pod."""
        name = sorted(self.cluster.nodes)[which]
        if not any(pod.node == name for pod in self.cluster.pods.values()):
            self.cluster.change_node(name, used={"nvidia.com/gpu": used})

    @rule(ordinal=st.integers(0, 3), groups=st.integers(1, 4), load=st.integers(0, 20))
    def requests_come(self, ordinal: int, groups: int, load: int) -> None:
        self.cluster.wanted[ordinal], self.cluster.load[ordinal] = groups, load

    @rule(ordinal=st.integers(0, 3))
    def a_group_is_let_go(self, ordinal: int) -> None:
        least = self.spec["parallelism"]["kvp"]["min"]
        mine = [pod for pod in self.cluster.pods.values() if pod.ordinal == ordinal]
        last = max((pod.group for pod in mine), default=0)
        if last >= least and all(pod.ready for pod in mine if pod.group == last):
            self.cluster.release(ordinal, last)

    # --- time -----------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.2, 1.0, 15.0, 120.0, 900.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.turn(seconds)

    @rule(steps=st.integers(0, 12))
    def the_operator_dies_while_it_acts(self, steps: int) -> None:
        """Execute some of the actions, and write no status."""
        cluster = self.cluster
        actions = decide(cluster.resource, cluster.observed(), SETTINGS).actions
        assert actions == decide(cluster.resource, cluster.observed(), SETTINGS).actions
        before = Before(cluster)
        for action in actions[:steps]:
            cluster.execute(action)
        before.check_gangs(actions[:steps])

    @precondition(lambda self: hasattr(self, "cluster"))
    @rule(times=st.integers(1, 4), lost_status=st.booleans())
    def the_operator_looks(self, times: int, lost_status: bool) -> None:
        for _ in range(times):
            before = Before(self.cluster)
            decision = self.cluster.reconcile()
            before.check(decision)
            if lost_status:  # it died before it wrote
                self.cluster.status = before.status

    @invariant()
    def nothing_is_overcommitted(self) -> None:
        if not hasattr(self, "cluster"):
            return
        taken: dict[str, int] = {}
        for pod in self.cluster.pods.values():
            if pod.node and pod.phase in ("Pending", "Running"):
                tp = pod.requests.get("nvidia.com/gpu", self.spec["parallelism"]["tp"])
                taken[pod.node] = taken.get(pod.node, 0) + tp
        assert all(count <= 8 for count in taken.values()), taken

    @invariant()
    def an_autoscaler_can_make_a_node_for_every_pod(self) -> None:
        """No pod requires more of a node than its labels above the host name."""
        for name in self.cluster.pods if hasattr(self, "cluster") else ():
            spec = self.cluster.specs[name]
            node = spec["affinity"].get("nodeAffinity", {}).get(REQUIRED, {})
            keys = {
                rule["key"]
                for term in node.get("nodeSelectorTerms", ())
                for rule in term["matchExpressions"]
            }
            assert "nodeName" not in spec and keys <= {ZONE, RACK}

    def teardown(self) -> None:
        """Leave the cluster alone: it converges to the spec and stays so."""
        if not hasattr(self, "cluster"):
            return
        cluster = self.cluster
        for name in cluster.nodes:
            cluster.power(name, True)
            cluster.change_node(name, schedulable=True, used={})
        for node in (*rack("r1", 50), *rack("r2", 50)):  # there is room for all that may be asked
            cluster.nodes.setdefault(node.name, node)
        cluster.settle(turns=400)
        wanted = self.spec["replicas"]
        assert len(cluster.ordinals) == wanted
        assert cluster.status["readyReplicas"] == wanted
        assert all(pod.ready for pod in cluster.pods.values())
        assert len({pod.spec_hash for pod in cluster.pods.values()}) <= 1
        kvp, spp = self.spec["parallelism"]["kvp"], self.spec["parallelism"]["spp"]
        for ordinal in cluster.ordinals:
            pods = [pod for pod in cluster.pods.values() if pod.ordinal == ordinal]
            groups = {pod.group for pod in pods}
            wanted = min(max(cluster.wanted.get(ordinal, 1), kvp["min"]), kvp["max"])
            assert len(groups) >= wanted
            assert len(pods) == len(groups) * spp
            if self.spec["placement"]:
                assert len({pod.node.partition("-")[0] for pod in pods}) == 1
        (ready,) = [
            condition for condition in cluster.status["conditions"] if condition["type"] == "Ready"
        ]
        assert ready["status"] == "True"
        assert cluster.reconcile().actions == ()


class Before:
    """The state before a decision, and what the decision may do."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.pods = dict(cluster.pods)
        self.status = cluster.status
        self.ordinals = cluster.ordinals

    def check(self, decision: PlanDecision) -> None:
        actions = [action for action in decision.actions if not isinstance(action, RequeueAt)]
        self.check_surge(decision)
        for action in actions:
            if isinstance(action, DeletePod):
                self.check_deletion(action, decision)
        self.check_gangs(actions)

    def check_surge(self, decision: PlanDecision) -> None:
        created = self.cluster.ordinals - self.ordinals
        left = {ordinal for ordinal, why in decision.rollout.retiring.items() if why == SCALED_DOWN}
        most = self.cluster.resource.spec.replicas + SURGE
        assert not created or len(self.cluster.ordinals - left) <= most, decision

    def check_deletion(self, deleted: DeletePod, decision: PlanDecision) -> None:
        """Only failed, finished, lost, unserving or drained pods are deleted."""
        pod = self.pods[deleted.pod]
        replica = decision.replicas[pod.ordinal]
        group = replica.groups[pod.group]
        faulty = any((f.ordinal, f.group) == (pod.ordinal, pod.group) for f in decision.failures)
        lost = is_lost(pod, self.cluster.nodes)
        released = all(pod.uid in self.cluster.left or not pod.ip for pod in group.present)
        retired = pod.ordinal in decision.rollout.retiring and (
            not replica.ready or replica.idle or "retired" in deleted.why
        )
        moves = group.gated or not replica.ready
        assert faulty or lost or released or retired or moves, (deleted, pod)
        if retired and replica.ready and not replica.idle:
            line = decision.persisted.retirement(pod.ordinal)
            assert line is not None  # its time to drain has run, and is over

    def check_gangs(self, actions: Sequence[Action]) -> None:
        """Check that no pod is ungated before its whole group exists."""
        created = {
            action.manifest["metadata"]["name"]
            for action in actions
            if isinstance(action, CreatePod)
        }
        for pod in self.cluster.pods.values():
            if pod.gated or pod.deleting or pod.name in created:
                continue
            before = self.pods.get(pod.name)
            if before is not None and before.gated:
                family = [
                    other
                    for other in self.cluster.pods.values()
                    if (other.ordinal, other.group) == (pod.ordinal, pod.group)
                ]
                assert len(family) == self.cluster.resource.spec.parallelism.spp


TestHistories = Histories.TestCase
TestHistories.settings = hypothesis.settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
