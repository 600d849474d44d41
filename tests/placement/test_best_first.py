"""Offers by rank, computed one after the other: the same as if all were computed and sorted."""

from __future__ import annotations

import random

import pytest

from medha.fleet.offers import PendingRequest, PlacementOption
from medha.fleet.placement import assess, best_first, place
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.messages import Load
from medha.predictor import Predictor
from medha.prefill_times import PrefillTimes
from medha.profile import A100
from medha.sim.scenario import LLAMA_3_8B
from medha.tenants import TenantWork
from medha.topology import Topology


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the replicas whose offers were completed, in that order."""
    names: list[str] = []

    class Noted(PlacementOption, frozen=True, kw_only=True):
        def __post_init__(self) -> None:
            names.append(self.replica)

    monkeypatch.setattr("medha.fleet.placement.PlacementOption", Noted)
    return names


def estimate(name: str, load: Load, **topology: int) -> ReplicaEstimate:
    predictor = Predictor(A100, LLAMA_3_8B, Topology(tp=8, **topology))
    replica = ReplicaEstimate(name, predictor, 1 << 20)
    replica.update(load, 0.0)
    return replica


def random_load(rng: random.Random, groups: int) -> Load:
    total = (rng.choice((400, 20_000)),) * groups
    bands = ((0.0, rng.choice((0.0, 0.2))), (1.0, rng.uniform(0.0, 1.0)), (9.0, 0.3))
    budget_s = rng.choice((0.03, 0.1))
    return Load(
        free_pages=tuple(rng.randrange(of + 1) for of in total),
        total_pages=total,
        claimable_pages=rng.choice((0, 20_000)),
        margins=tuple(
            tuple((0.4 * i + 0.4, rng.uniform(0.0, 0.4 * i + 0.3)) for i in range(rng.randrange(5)))
            for _ in range(groups)
        ),
        lead_s=(rng.choice((0.0, 0.04)),) * groups,
        pending_bands=bands,
        pending_s=sum(seconds for _, seconds in bands),
        ahead_s=rng.choice((0.0, 0.0, 0.1, 0.4)),
        budget_s=budget_s,
        decode_capacity_s=rng.choice((0.0, 0.5 * budget_s)),
        decode_room_s=rng.choice((0.0, 0.4 * budget_s)),
        decode_parts=((1.0, rng.uniform(0.0, 1.0)), (8.0, 0.2)),
        predicted_tpot_s=rng.choice((0.0, 0.01, 0.03)),
        share=rng.choice((1.0, 0.8)),
        long_factor=rng.choice((1.0, 1.3)),
        promised_work=(TenantWork("", 1.0, rng.choice((0.0, 1.0))), TenantWork("a", 9.0, 2.0)),
        free_places=rng.choice((0, 100)),
    )


def random_request(rng: random.Random, id: str) -> PendingRequest:
    return PendingRequest(
        id=id,
        prompt_tokens=int(rng.choice((20, 300, 4000, 60_000, 400_000)) * rng.uniform(0.5, 2.0)),
        max_output_tokens=rng.choice((1, 50, 400)),
        due_s=rng.choice((-1.0, 0.3, 2.0, 9.0, 100.0)),
        tpot_s=rng.choice((0.02, 0.05)),
        beyond_share=rng.random() < 0.2,
    )


@pytest.mark.parametrize("seed", range(40))
def test_offers_come_in_the_order_of_all_of_them_sorted(seed: int) -> None:
    rng = random.Random(seed)
    groups, spp = rng.choice((1, 1, 2)), rng.choice((1, 2))
    replicas = [
        estimate(
            f"r{i}",
            random_load(rng, groups),
            spp=spp,
            kvp_max=groups,
            **({"tokens_per_group": 300_000} if groups > 1 else {}),
        )
        for i in range(rng.randrange(1, 8))
    ]
    for turn in range(12):
        request, now = random_request(rng, str(turn)), rng.choice((0.0, 0.02, 0.4))
        cached = {f"r{i}": rng.randrange(request.prompt_tokens) for i in range(0, 8, 3)}
        inflation = rng.choice((1.0, 1.2))
        able = [replica for replica in replicas if replica.can_ever(request)]
        assessed = [
            assess(replica, request, now, cached.get(replica.name, 0), inflation)
            for replica in able
        ]
        assessed.sort(
            key=lambda offer: (
                not offer.fits,
                not offer.roomy,
                offer.clear_s,
                offer.answer_s,
                -offer.free_pages,
                offer.replica,
            )
        )
        assert list(best_first(request, replicas, cached, now, inflation)) == assessed
        if assessed:  # later ones find it there
            chosen = next(replica for replica in able if replica.name == assessed[0].replica)
            chosen.hold(request, assessed[0], now, promised=assessed[0].fits)


def test_of_idle_replicas_one_offer_is_completed(completed: list[str]) -> None:
    load = Load(free_pages=(20_000,), total_pages=(20_000,))
    replicas = [estimate(f"r{i}", load) for i in range(64)]
    request = PendingRequest(id="n", prompt_tokens=1000, max_output_tokens=100, due_s=9.0)
    chosen = place(request, replicas, {}, 0.0)
    assert chosen is not None and chosen.replica == "r0"
    assert len(completed) == 1


def test_of_replicas_that_only_the_answer_overfills_one_offer_is_completed(
    completed: list[str],
) -> None:
    load = Load(
        free_pages=(20_000,),
        total_pages=(20_000,),
        margins=(((9.0, 0.2),),),
        budget_s=0.05,
        decode_capacity_s=0.025,
        decode_room_s=0.025,
    )
    replicas = [estimate(f"r{i}", load) for i in range(8)]
    brief, lasting = (
        PendingRequest(id="n", prompt_tokens=1000, max_output_tokens=tokens, due_s=3.0)
        for tokens in (1, 4000)
    )
    chosen, unkept = place(brief, replicas, {}, 0.0), place(lasting, replicas, {}, 0.0)
    assert chosen is not None and chosen.fits and unkept is not None and not unkept.fits
    assert completed == ["r0", "r0"]


def test_a_request_that_is_late_already_is_placed_by_one_offer(completed: list[str]) -> None:
    load = Load(free_pages=(20_000,), total_pages=(20_000,))
    replicas = [estimate(f"r{i}", load) for i in range(8)]
    late = PendingRequest(id="n", prompt_tokens=1000, max_output_tokens=100, due_s=-1.0)
    assert place(late, replicas, {}, 0.0) is not None
    assert len(completed) == 1


@pytest.mark.parametrize("seed", range(12))
def test_bounds_of_a_length_hold_while_corrections_change_little(seed: int) -> None:
    rng = random.Random(seed)
    spp, budget_s = rng.choice((1, 2)), rng.choice((0.02, 0.05, 0.1))
    predictor = Predictor(A100, LLAMA_3_8B, Topology(tp=rng.choice((1, 8)), spp=spp))
    times = PrefillTimes(predictor, budget_s, rng.choice((0.0, 0.5)) * budget_s)
    if seed % 2:
        times.alongside_s(0, 200_000, 0.0)  # the tables are longer
    lengths = sorted({int(2 ** rng.uniform(0.0, 17.0)) for _ in range(60)})
    bounds_s = {length: times.bounds_s(length) for length in lengths}
    assert bounds_s[lengths[0]][0] > 0.0
    sample = predictor.load_alongside() if seed % 3 else predictor.load()
    sample.add_chunk(2000, 0)
    predictor.observe(sample, 1.0, rng.choice((0.99, 1.01)))
    assert not times.outdated
    actual_s = [times.by_level(0, length) for length in lengths]
    for at, length in enumerate(lengths):
        least_s, most_s = bounds_s[length]
        assert least_s <= min(map(min, actual_s[at:]))
        assert most_s >= max(actual_s[at])
        if seed % 2:
            assert least_s >= 0.5 * min(actual_s[at])
            assert most_s <= 4.0 * max(actual_s[at])
