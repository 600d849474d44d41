"""Time that placing takes: pods of a large cluster from cold, one look at a replica that is fine,
and the admission of a request by the router.

1,000 nodes of 8 GPUs in 125 racks, 200 replicas of 8 pods (tp 4, spp 8), each resource placed
on what the others have left; to be planned within a second. Admission asks four replicas with 64
promises each, with one to 4,096 active tenants; to be decided within 200 µs.
"""

from __future__ import annotations

import time

import msgspec

from medha.fleet.admission import TenantUsage, admit
from medha.fleet.offers import PendingRequest
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.messages import Load
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import SloClass
from medha.sim.scenario import LLAMA_3_8B
from medha.tenants import TenantWork
from medha.topology import Topology
from medha_operator.planning.node_placement import Placer, Unschedulable, pod_requirements
from medha_operator.planning.planner import decide
from medha_operator.planning.resource_status import status
from medha_operator.resources.views import NodeView, Observed
from medha_operator.testing import SETTINGS, Cluster, node, resource

NODES, RACKS, REPLICAS = 1000, 125, 200
LABELS = ("topology.kubernetes.io/zone", "topology.kubernetes.io/rack", "nvidia.com/gpu.clique")


def nodes() -> list[NodeView]:
    return [
        node(
            f"n{index:04}",
            labels=dict(
                zip(
                    LABELS,
                    (f"z{index // 8 % 2}", f"r{index // 8:03}", f"c{index // 4:03}"),
                    strict=True,
                )
            ),
        )
        for index in range(NODES)
    ]


def apart_from_cold() -> float:
    """Measure processor seconds to place all as replicas of one resource, which keep apart."""
    required = pod_requirements(resource("mr", parallelism={"tp": 4, "spp": 8}))
    placer = Placer(required, nodes())
    node_sets: list[tuple[str, ...]] = []
    began_s = time.process_time()
    for _ in range(REPLICAS):
        placed = placer.place_base(1, 1, avoid=node_sets)
        if isinstance(placed, Unschedulable):
            raise SystemExit(placed.message)
        node_sets.append(placed[0])
    return time.process_time() - began_s


def from_cold() -> tuple[float, int]:
    """Measure processor seconds to place all replicas in turn; returns their racks' number, too."""
    current = {node.name: node for node in nodes()}
    parallelism = {"tp": 4, "spp": 8, "kvp": {"min": 1, "max": 2}}
    requirements = [
        pod_requirements(
            resource(f"mr-{index}", parallelism=parallelism, placement={"packLevel": LABELS[1]})
        )
        for index in range(REPLICAS)
    ]
    racks = set()
    began_s = time.process_time()
    for required in requirements:
        placer = Placer(required, list(current.values()))
        placed = placer.place_base(1, 2)
        if isinstance(placed, Unschedulable):
            raise SystemExit(placed.message)
        for name in placed[0]:
            before = current[name]
            used = {
                resource_name: before.used.get(resource_name, 0) + amount
                for resource_name, amount in required.requests.items()
            }
            current[name] = msgspec.structs.replace(before, used=used)
            racks.add(before.labels[LABELS[1]])
    return time.process_time() - began_s, len(racks)


def one_decision(count: int = 200) -> tuple[float, float]:
    """Measure processor seconds of `decide` and of `status` for a converged resource of 8 pods."""
    cluster = Cluster(resource(parallelism={"tp": 4, "spp": 8}), nodes())
    cluster.settle()
    observed: Observed = cluster.observed()
    began_s = time.process_time()
    for _ in range(count):
        assert not decide(cluster.resource, observed, SETTINGS).actions
    decision = decide(cluster.resource, observed, SETTINGS)
    decided_s = time.process_time()
    for _ in range(count):
        status(cluster.resource, observed, decision, generation=1)
    return (decided_s - began_s) / count, (time.process_time() - decided_s) / count


def one_admission(tenants: int, count: int = 2000) -> tuple[float, float]:
    """Measure median and 99th percentile of the processor seconds of an admission."""
    slo_class = SloClass(when_infeasible="relegate")
    usage = TenantUsage((slo_class,))
    for index in range(tenants):
        usage.ask(f"tenant-{index}", 1.0, 0.0)
    load = Load(
        margins=(tuple((1.0 + 0.1 * index, 0.5) for index in range(64)),),
        free_pages=(100_000,),
        total_pages=(100_000,),
        promised_work=tuple(
            TenantWork(f"tenant-{index}", 0.1, 0.1) for index in range(min(64, tenants))
        ),
    )
    replicas = [
        ReplicaEstimate(f"r{index}", Predictor(A100, LLAMA_3_8B, Topology(tp=8)), 1 << 20)
        for index in range(4)
    ]
    by_name = {replica.name: replica for replica in replicas}
    for replica in replicas:
        replica.update(load, 0.0)
    taken_s = []
    for index in range(count):
        request = PendingRequest(
            id=f"{index}",
            prompt_tokens=1000 + index % 64,
            max_output_tokens=100,
            due_s=5.0,
            tenant=f"tenant-{index * 61 % tenants}",
        )
        began_s = time.process_time()
        decision = admit(request, replicas, {}, slo_class, usage, now=1e-3 * index)
        by_name[decision.option.replica].hold(request, decision.option, 0.0, decision.promised)
        usage.add(slo_class.name, decision.option.work_s, 1e-3 * index)
        taken_s.append(time.process_time() - began_s)
        by_name[decision.option.replica].release(request.id, 0.0)
    taken_s.sort()
    return taken_s[count // 2], taken_s[count * 99 // 100]


def main() -> None:
    seconds, racks = min(from_cold() for _ in range(3))
    print(f"{REPLICAS} replicas of 8 pods on {NODES} nodes: {seconds:.2f} s, in {racks} racks")
    print(f"as replicas of one resource: {min(apart_from_cold() for _ in range(3)):.2f} s")
    decide_s, status_s = one_decision()
    for tenants in (1, 100, 4096):
        median_s, late_s = one_admission(tenants)
        row = f"p50 {median_s * 1e6:.0f}, p99 {late_s * 1e6:.0f} µs"
        print(f"an admission by 4 replicas, {tenants:,} tenants: {row}")
    print(f"a converged resource: decide {decide_s * 1e3:.2f} ms, status {status_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
