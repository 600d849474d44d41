"""How long planning takes: a large cluster from cold, and one look at a replica that is fine.

1,000 nodes of 8 GPUs in 125 racks, 200 replicas of 8 pods (tp 4, spp 8), each resource placed
on what the others have left; to be planned within a second.
"""

from __future__ import annotations

import time

import msgspec

from medha_operator.misfits import Misfit
from medha_operator.observed import NodeView, Observed
from medha_operator.placement import Room
from medha_operator.plan import plan
from medha_operator.status import status
from medha_operator.testing import SETTINGS, Cluster, node, resource
from medha_operator.wants import want_of

NODES, RACKS, REPLICAS = 1000, 125, 200
LABELS = ("topology.kubernetes.io/zone", "topology.kubernetes.io/rack", "nvidia.com/gpu.clique")


def nodes() -> list[NodeView]:
    return [
        node(f"n{each:04}", labels=dict(zip(LABELS, (
            f"z{each // 8 % 2}", f"r{each // 8:03}", f"c{each // 4:03}"), strict=True)))
        for each in range(NODES)
    ]  # fmt: skip


def apart_from_cold() -> float:
    """Processor seconds to place them all as replicas of one resource, which keep apart."""
    want = want_of(resource("mr", parallelism={"tp": 4, "spp": 8}))
    room = Room(want, nodes())
    places: list[tuple[str, ...]] = []
    began_s = time.process_time()
    for _ in range(REPLICAS):
        placed = room.place_base(1, 1, apart=places)
        if isinstance(placed, Misfit):
            raise SystemExit(placed.message)
        places.append(placed[0])
    return time.process_time() - began_s


def from_cold() -> tuple[float, int]:
    """Processor seconds to place all replicas in turn, and how many racks they came to lie in."""
    every = {each.name: each for each in nodes()}
    parallelism = {"tp": 4, "spp": 8, "kvp": {"min": 1, "max": 2}}
    wants = [
        want_of(resource(f"mr-{index}", parallelism=parallelism,
                         placement={"packLevel": LABELS[1]}))
        for index in range(REPLICAS)
    ]  # fmt: skip
    racks = set()
    began_s = time.process_time()
    for want in wants:
        room = Room(want, list(every.values()))
        placed = room.place_base(1, 2)
        if isinstance(placed, Misfit):
            raise SystemExit(placed.message)
        for name in placed[0]:
            before = every[name]
            used = {each: before.used.get(each, 0) + amount
                    for each, amount in want.requests.items()}  # fmt: skip
            every[name] = msgspec.structs.replace(before, used=used)
            racks.add(before.labels[LABELS[1]])
    return time.process_time() - began_s, len(racks)


def one_look(count: int = 200) -> tuple[float, float]:
    """Processor seconds of `plan` and of `status` for a converged resource of 8 pods there."""
    cluster = Cluster(resource(parallelism={"tp": 4, "spp": 8}), nodes())
    cluster.settle()
    seen: Observed = cluster.observed()
    began_s = time.process_time()
    for _ in range(count):
        assert plan(cluster.resource, seen, SETTINGS) == []
    planned_s = time.process_time()
    for _ in range(count):
        status(cluster.resource, seen, SETTINGS, generation=1)
    return (planned_s - began_s) / count, (time.process_time() - planned_s) / count


def main() -> None:
    seconds, racks = min(from_cold() for _ in range(3))
    print(f"{REPLICAS} replicas of 8 pods on {NODES} nodes: {seconds:.2f} s, in {racks} racks")
    print(f"as replicas of one resource: {min(apart_from_cold() for _ in range(3)):.2f} s")
    planned_s, told_s = one_look()
    print(f"one look at a converged resource: plan {planned_s * 1e3:.2f} ms, "
          f"plan and status {told_s * 1e3:.2f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
