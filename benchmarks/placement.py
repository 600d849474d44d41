"""Time that planning takes: a large cluster from cold, and one look at a replica that is fine.

1,000 nodes of 8 GPUs in 125 racks, 200 replicas of 8 pods (tp 4, spp 8), each resource placed
on what the others have left; to be planned within a second.
"""

from __future__ import annotations

import time

import msgspec

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


def main() -> None:
    seconds, racks = min(from_cold() for _ in range(3))
    print(f"{REPLICAS} replicas of 8 pods on {NODES} nodes: {seconds:.2f} s, in {racks} racks")
    print(f"as replicas of one resource: {min(apart_from_cold() for _ in range(3)):.2f} s")
    decide_s, status_s = one_decision()
    print(f"a converged resource: decide {decide_s * 1e3:.2f} ms, status {status_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
