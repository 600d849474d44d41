"""Offered load: seconds of a replica that requests take, and a replica that is full at load 1."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.sim.arrivals import Workload
from medha.sim.offered_load import Demand, OfferedLoad
from medha.sim.scenario import LLAMA_3_8B, Scenario, simulate
from medha.topology import Topology

TP8 = Predictor(A100, LLAMA_3_8B, Topology(tp=8))
DOCUMENT, CHAT = Demand(600_000, 0, 1, 0.05), Demand(1_000, 0, 200, 0.05)


def seconds_of(predictor: Predictor, *requests: Demand, per_second: float = 1e9) -> list[float]:
    """Seconds of each request, by default at a rate at which decodes always run."""
    seconds: list[float] = OfferedLoad(predictor, requests).request_s(per_second).tolist()
    return seconds


def test_a_request_of_one_token_takes_its_prefill_without_the_drain() -> None:
    piped = Predictor(A100, LLAMA_3_8B, Topology(tp=8, spp=2))
    prefill = Demand(600_000, 0, 1, 0.03)
    assert seconds_of(piped, prefill) == [pytest.approx(piped.busy_s(600_000))]
    assert piped.busy_s(600_000) < piped.prefill_s(600_000)


def test_only_uncached_tokens_are_counted() -> None:
    cached = seconds_of(TP8, Demand(600_000, 599_000, 1, 0.05))
    assert cached == [pytest.approx(TP8.busy_s(600_000, 599_000))]


def test_every_output_token_takes_time_and_more_of_it_after_a_long_prompt() -> None:
    def token_s(prompt: int) -> float:
        few, many = (seconds_of(TP8, Demand(prompt, 0, n, 0.1))[0] for n in (2, 102))
        return (many - few) / 100

    assert 0.0 < token_s(100) < token_s(1_000) < token_s(900_000) / 100


def test_a_prefill_beside_decodes_takes_longer_the_smaller_their_tpot() -> None:
    patient, slow, fast = (
        seconds_of(TP8, DOCUMENT, CHAT._replace(tpot_s=tpot_s))[0] for tpot_s in (1.0, 0.05, 0.03)
    )
    assert TP8.busy_s(600_000) == pytest.approx(patient)
    assert patient < slow < fast
    rarely = seconds_of(TP8, DOCUMENT, CHAT, per_second=1e-6)[0]
    assert rarely == pytest.approx(patient, rel=1e-3)


def test_the_least_tpot_in_force_decides_in_proportion_to_its_time() -> None:
    fast, slow = CHAT._replace(tpot_s=0.03), CHAT._replace(tpot_s=0.1)
    only_slow, both, only_fast = (
        seconds_of(TP8, DOCUMENT, *others, per_second=0.3)[0]
        for others in ((slow, slow), (fast, slow), (fast, fast))
    )
    assert only_slow < both < only_fast


def test_kvp_groups_work_side_by_side() -> None:
    layout = Topology(tp=8, kvp_min=2, kvp_max=2, tokens_per_group=300_000)
    two = Predictor(A100, LLAMA_3_8B, layout)
    assert seconds_of(two, CHAT)[0] == pytest.approx(seconds_of(TP8, CHAT)[0] / 2)
    first_half, whole = (seconds_of(two, Demand(n, 0, 1, 0.05))[0] for n in (300_000, 600_000))
    assert first_half == pytest.approx(two.busy_s(300_000) / 2)
    assert whole - first_half == pytest.approx(two.busy_s(600_000, 300_000))


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.builds(
            Demand,
            st.integers(1, 900_000),
            st.just(0),
            st.integers(1, 2_000),
            st.sampled_from((0.03, 0.05, 0.3)),
        ),
        min_size=1,
        max_size=8,
    ),
    load=st.floats(0.05, 3.0),
)
def test_a_load_and_the_rate_that_offers_it_are_inverse_to_each_other(
    requests: list[Demand], load: float
) -> None:
    offered = OfferedLoad(TP8, requests)
    rate = offered.per_second(load)
    assert offered.at(rate) == pytest.approx(load, rel=1e-6)
    assert offered.at(2 * rate) >= 2 * load * (1 - 1e-6)


@pytest.mark.parametrize("output_tokens", [1, None])
@pytest.mark.parametrize(
    "topology", [Topology(tp=8), Topology(tp=8, kvp_min=2, kvp_max=2)], ids=["tp8", "kvp2"]
)
def test_a_replica_is_busy_at_load_1_and_does_as_much_at_load_2(
    output_tokens: int | None, topology: Topology
) -> None:
    scenario = Scenario(
        workload=Workload(mix=0.0, requests=600, load=1.0, output_tokens=output_tokens),
        topology=topology,
        scheduling=Scheduling(policy="srpf"),
        classes=(SloClass(slo=Slo(tpot_s=0.05)),),
        admission=False,
    )
    full = simulate(scenario)
    assert full.report.offered == pytest.approx(1.0, rel=0.01)
    assert full.busy > 0.85
    workload = msgspec.structs.replace(scenario.workload, load=2.0)
    last_s = max(record.arrival_s for record in full.records) / 2
    twice = simulate(msgspec.structs.replace(scenario, workload=workload, until_s=last_s))
    waiting_s = sum(r.offered_s for r in twice.records if r.first_token_s is None)
    assert twice.report.offered == pytest.approx(2.0, rel=0.05)
    assert waiting_s == pytest.approx(last_s, rel=0.15)
