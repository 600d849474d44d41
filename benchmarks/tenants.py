"""Tenants next to a hostile neighbour, and the shares that weights give, in virtual time.

    python -m benchmarks.tenants            about an hour; `--routers 1`: about 15 minutes

Two replicas (Llama-3-8B, eight A100 each) behind one, two and four routers, all by the code of the
live services. Requests are dealt to the routers in turn.

*Neighbour*: ten tenants offer half of what the replicas compute, in chats. An eleventh sends
nothing, its share, then 100 times its share. TTFT of the ten over several seeds; refusals count as
misses. Of the neighbour, the load that was promised in time and all that was served: documents are
refused at its share when chance brings two at once, at 100 times there is always one that fits.

*Weights*: four tenants of weights 1, 2, 4 and 8 each offer more than all replicas compute. The
share of each in the prefill seconds served, against its weight.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import RequestRecord
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import Arrival
from medha.topology import Topology

REPLICAS, PAGES, PAGE_TOKENS, CONTEXT_TOKENS = 2, 100_000, 64, 400_000
LAYOUT = Topology(tp=8)
CLASSES = {
    kind: SloClass(slo=Slo(tpot_s=0.1), when_infeasible=kind) for kind in ("refuse", "relegate")
}
Lengths = Sequence[tuple[int, int]]
CHATS: Lengths = [(1000, 20), (2000, 40), (4000, 60)]
DOCUMENTS: Lengths = [(32_000, 50), (64_000, 50)]
MIXED: Lengths = [*CHATS, *CHATS, (32_000, 50)]
NEIGHBOURS = {"chats": CHATS, "documents": DOCUMENTS, "mixed": MIXED}
OTHERS, OTHERS_LOAD, TIMES = 10, 0.5, 100.0
SEEDS = range(4)
WARM_S, HOG_S = 20.0, 80.0
"""Next to a neighbour: measured from the first on; length of a run."""
WEIGHTS_WARM_S, WEIGHTS_S = 60.0, 140.0
"""The same of weights: what a tenant had too much of in the first seconds, others get back soon."""
OFFERED_LOAD = 1.2
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
SIZES: dict[str, Mapping[str, Lengths]] = {
    "equal": dict.fromkeys(WEIGHTS, CHATS),
    "different": {
        "a": [(1000, 20)],
        "b": [(16_000, 20)],
        "c": [(4000, 60)],
        "d": [(8000, 20), (1000, 60)],
    },
}


def work_s(lengths: Lengths) -> float:
    """Mean prefill seconds of the prompts on an idle replica."""
    predictor = Predictor(A100, LLAMA_3_8B, LAYOUT)
    return sum(predictor.prefill_s(prompt) for prompt, _ in lengths) / len(lengths)


def arrivals(
    tenant: str, lengths: Lengths, load: float, until_s: float, seed: int
) -> list[Arrival]:
    """Poisson arrivals of one tenant; `load`: prefill seconds per second and replica."""
    rng = np.random.default_rng((seed, *tenant.encode()))
    per_s = load * REPLICAS / work_s(lengths)
    count = rng.poisson(per_s * until_s)
    times, picks = np.sort(rng.uniform(0.0, until_s, count)), rng.integers(0, len(lengths), count)
    return [
        Arrival(
            id=f"{tenant}-{index}",
            arrival_s=float(at_s),
            prompt_tokens=lengths[pick][0],
            output_tokens=lengths[pick][1],
            tenant=tenant,
        )
        for index, (at_s, pick) in enumerate(zip(times, picks, strict=True))
    ]


def play(
    offered: Iterable[Arrival],
    until_s: float,
    routers: int,
    slo_class: SloClass,
    weights: Mapping[str, float] | None = None,
) -> list[RequestRecord]:
    """Play arrivals until a time; returns a record of every request."""
    loop, settings, replicas = Loop(), Scheduling(), []
    for index in range(REPLICAS):
        predictor = Predictor(A100, LLAMA_3_8B, LAYOUT)
        scheduler = Scheduler(
            LAYOUT,
            LLAMA_3_8B,
            predictor,
            settings,
            PAGES,
            PAGE_TOKENS,
            CONTEXT_TOKENS,
            (slo_class,),
        )
        clock = PipelineClock(predictor, PAGE_TOKENS, scheduler.layout)
        replicas.append(SimReplica(f"r{index}", scheduler, clock, loop))
    fleet = SimulatedFleet(
        replicas,
        loop,
        (slo_class,),
        settings,
        PAGE_TOKENS,
        CONTEXT_TOKENS,
        routers=routers,
        weights=weights,
    )
    fleet.play(sorted(offered, key=lambda arrival: arrival.arrival_s))
    loop.run(until_s)
    return fleet.records()


# --- a hostile neighbour --------------------------------------------------------------------------


class Waits(msgspec.Struct, frozen=True):
    """TTFT in ms of the well-behaved tenants, the share of them that missed their deadline or was
    refused, and the load that the neighbour was promised and served."""

    p50: float
    p99: float
    missed: float
    promised: float
    served: float


def waits(kind: str, times: float, routers: int) -> Waits:
    """Play ten tenants next to one that sends `times` its share."""
    others: list[RequestRecord] = []
    served: list[RequestRecord] = []
    for seed in SEEDS:
        offered = [
            arrival
            for index in range(OTHERS)
            for arrival in arrivals(f"t{index}", CHATS, OTHERS_LOAD / OTHERS, HOG_S, seed)
        ]
        if times:
            offered += arrivals("hog", NEIGHBOURS[kind], times / (OTHERS + 1), HOG_S, seed)
        for record in play(offered, HOG_S + 5.0, routers, CLASSES["refuse"]):
            if record.tenant != "hog" and WARM_S < record.arrival_s < HOG_S:
                others.append(record)
            elif record.tenant == "hog" and record.arrival_s > WARM_S and record.ttft_s is not None:
                served.append(record)
    ttfts_ms = [1e3 * record.ttft_s for record in others if record.ttft_s is not None]
    capacity_s = len(SEEDS) * (HOG_S - WARM_S) * REPLICAS
    return Waits(
        float(np.percentile(ttfts_ms, 50)),
        float(np.percentile(ttfts_ms, 99)),
        1.0 - sum(record.in_time for record in others) / len(others),
        sum(record.work_s for record in served if record.promised) / capacity_s,
        sum(record.work_s for record in served) / capacity_s,
    )


def print_neighbours(kinds: Sequence[str], counts: Sequence[int]) -> None:
    print(
        "neighbour  routers  p50 / p99 ms alone   at its share   at 100 x        p99 ratio  missed"
        "  neighbour: promised / served at its share, at 100 x"
    )
    for kind in kinds:
        for routers in counts:
            alone, fair, hostile = (waits(kind, times, routers) for times in (0.0, 1.0, TIMES))
            cells = "  ".join(f"{w.p50:5.0f} / {w.p99:5.0f}" for w in (alone, fair, hostile))
            loads = "  ".join(f"{w.promised:.3f} / {w.served:.3f}" for w in (fair, hostile))
            print(
                f"{kind:10} {routers:7}  {cells}  {hostile.p99 / fair.p99:9.2f}  "
                f"{hostile.missed:.4f}  {loads}",
                flush=True,
            )


# --- weights --------------------------------------------------------------------------------------


def shares(sizes: Mapping[str, Lengths], routers: int, kind: str) -> dict[str, float]:
    """Each tenant's share of the served prefill seconds."""
    offered = [
        arrival
        for tenant, lengths in sizes.items()
        for arrival in arrivals(tenant, lengths, OFFERED_LOAD, WEIGHTS_S, 0)
    ]
    served: dict[str, float] = collections.defaultdict(float)
    for record in play(offered, WEIGHTS_S, routers, CLASSES[kind], WEIGHTS):
        if record.ttft_s is not None and record.arrival_s + record.ttft_s > WEIGHTS_WARM_S:
            served[record.tenant] += record.work_s
    return {tenant: served[tenant] / sum(served.values()) for tenant in sizes}


def print_weights(counts: Sequence[int]) -> None:
    print("sizes      class     routers  share of served work / that of its weight, for 1 2 4 8")
    total = sum(WEIGHTS.values())
    for name, sizes in SIZES.items():
        for kind in CLASSES:
            for routers in counts:
                share = shares(sizes, routers, kind)
                cells = "  ".join(
                    f"{share[tenant] * total / weight:.3f}" for tenant, weight in WEIGHTS.items()
                )
                print(f"{name:10} {kind:9} {routers:7}  {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--routers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", choices=("neighbours", "weights"))
    parser.add_argument("--neighbours", nargs="+", choices=NEIGHBOURS, default=list(NEIGHBOURS))
    args = parser.parse_args()
    if args.only != "weights":
        print_neighbours(args.neighbours, args.routers)
    if args.only != "neighbours":
        print_weights(args.routers)


if __name__ == "__main__":
    main()
