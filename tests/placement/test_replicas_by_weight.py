"""Several replicas and routers together share their time by weight, whatever tenants send."""

from __future__ import annotations

import collections
import itertools
import random

import msgspec
import pytest

from medha.fleet.dispatcher import Dispatcher
from medha.fleet.grants import GrantQueue
from medha.messages import Head, Load
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Request, Slo, SloClass
from medha.scheduling.interface import Ahead
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 8.0}
TOTAL = sum(WEIGHTS.values())
RELEGATING = SloClass(slo=Slo(), when_infeasible="relegate")
IDLE = Ahead(0.0, 0.0)


class Replica:
    """A replica that serves one prompt at a time, and grants the next when it is free."""

    version, open = "", True
    max_context_tokens, min_batch_s, max_batch_s, max_running = 200_000, 0.01, 0.1, 256

    def __init__(self, name: str, predictor: Predictor) -> None:
        self.name, self.predictor = name, predictor
        pages = (10_000,)
        self.load = Load(free_pages=pages, total_pages=pages, page_tokens=64, share=0.9)
        self.grants = GrantQueue(0.2)
        self.free_s = 0.0


class Item(msgspec.Struct):
    request: Request
    version: str = ""
    hashes: bytes = b""
    output_tokens: int = 0
    moves: int = 0


def backlog(seed: int, seconds: float, predictor: Predictor) -> list[Request]:
    """Late requests at time 0, more of each tenant than replicas can serve by its weight.

    Each tenant has prompts of another length, from 1,000 to 20,000 tokens.
    """
    draw = random.Random(seed)
    requests: list[Request] = []
    for tenant, weight in WEIGHTS.items():
        typical, work_s = 10 ** draw.uniform(3.0, 4.3), 0.0
        while work_s < 1.3 * seconds * weight / TOTAL:
            prompt_tokens = int(typical * draw.uniform(0.5, 1.5))
            own_s = predictor.prefill_s(prompt_tokens)
            work_s += own_s
            requests.append(
                Request(
                    id=f"{tenant}-{len(requests)}",
                    arrival_s=0.0,
                    prompt_tokens=prompt_tokens,
                    max_output_tokens=1,
                    ttft_deadline_s=0.001,
                    tpot_s=1.0,
                    work_s=own_s,
                    tenant=tenant,
                    weight=weight,
                )
            )
    return requests


def served(
    requests: list[Request], replicas: list[Replica], routers: int, until_s: float
) -> dict[str, float]:
    """Serve a backlog dealt to the routers in turn; returns seconds by tenant."""
    dispatchers: dict[str, Dispatcher[Item]] = {
        f"router-{index}": Dispatcher([RELEGATING]) for index in range(routers)
    }
    for dispatcher in dispatchers.values():
        for replica in replicas:
            dispatcher.update_replica(replica, 0.0)
    for request, dispatcher in zip(requests, itertools.cycle(dispatchers.values()), strict=False):
        weighted = msgspec.structs.replace(RELEGATING, weight=request.weight)
        assert not dispatcher.admit(Item(request), weighted, 0.0).promised
    seconds: dict[str, float] = collections.defaultdict(float)
    while True:
        replica = min(replicas, key=lambda replica: (replica.free_s, replica.name))
        now = replica.free_s
        if now > until_s:
            return seconds
        for router, dispatcher in dispatchers.items():
            for reporting in replicas:
                dispatcher.update_replica(reporting, now)
            dispatcher.place_waiting(now)
            heads = dispatcher.published(dispatcher.heads(now)[replica.name], now)
            replica.grants.heads(router, heads, now)
        granted = replica.grants.grantable(IDLE, now)[0]
        item = dispatchers[granted.replica].take(granted.id, replica.name, now)
        assert item is not None
        replica.grants.submitted(granted.id, now)
        dispatchers[granted.replica].accepted(granted.id, replica.name)
        seconds[granted.tenant] += item.request.work_s
        replica.free_s += item.request.work_s


@pytest.mark.parametrize("routers", [1, 2])
@pytest.mark.parametrize("seed", [1, 3])
def test_replicas_together_serve_tenants_by_weight(seed: int, routers: int) -> None:
    predictor, until_s = Predictor(A100, LLAMA_3_8B, Topology(tp=8)), 40.0
    replicas = [Replica(name, predictor) for name in ("r0", "r1")]
    requests = backlog(seed, len(replicas) * until_s, predictor)
    seconds = served(requests, replicas, routers, until_s)
    for tenant, weight in WEIGHTS.items():
        due_s = sum(seconds.values()) * weight / TOTAL
        largest_s = max(request.work_s for request in requests if request.tenant == tenant)
        assert abs(seconds[tenant] - due_s) <= 0.03 * due_s + largest_s, tenant


def head(tenant: str, elsewhere_s: float) -> Head:
    return Head(tenant, 0.0, -1.0, 1.0, False, tenant=tenant, charge_s=1.0, elsewhere_s=elsewhere_s)


def test_a_replica_counts_what_routers_had_served_elsewhere() -> None:
    grants = GrantQueue(10.0)

    def order(now: float) -> list[str]:
        return [queued.id for queued in grants.grantable(IDLE, now)]

    grants.heads("a", (head("much", 3.0), head("little", 0.5)), 0.0)
    assert order(0.0) == ["little", "much"]
    grants.heads("b", (head("little", 3.0),), 1.0)
    assert order(1.0) == ["much", "little"], "of all routers together"
    grants.forget("b")
    grants.heads("a", (head("much", 3.0), head("little", 0.5)), 2.0)
    assert order(2.0) == ["little", "much"]
