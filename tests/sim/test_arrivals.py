"""Arrivals of a scenario: the load that it states, from tenants and classes as it says."""

from __future__ import annotations

import collections
import itertools
import json
import math
import pathlib
import statistics

import msgspec
import pytest

from medha.errors import SpecError
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import SloClass
from medha.sim.arrivals import OfferedTo, Tenant, Workload, arrivals_of, prefix_hits
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.workload import Arrival, LogNormal
from medha.topology import Topology

CLASSES = {name: SloClass(name=name) for name in ("default", "batch")}
FLEET = OfferedTo(
    Predictor(A100, LLAMA_3_8B, Topology(tp=8)), 2, CLASSES, LLAMA_3_8B.max_context_tokens, 0.01
)


def drawn(seed: int = 0, **workload: object) -> list[Arrival]:
    fields: dict[str, object] = {"mix": 0.05, "requests": 400, "load": 0.8} | workload
    return arrivals_of(Workload(**fields), FLEET, seed)  # type: ignore[arg-type]


def offered(arrivals: list[Arrival]) -> float:
    rate = len(arrivals) / arrivals[-1].arrival_s / FLEET.replicas
    return FLEET.load_of(arrivals, prefix_hits(arrivals)).at(rate)


def gap_cv(arrivals: list[Arrival]) -> float:
    gaps = [b.arrival_s - a.arrival_s for a, b in itertools.pairwise(arrivals)]
    return statistics.stdev(gaps) / statistics.mean(gaps)


@pytest.mark.parametrize("mix", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("load", [0.5, 1.4])
def test_a_mix_offers_the_load_and_the_share_that_are_stated(mix: float, load: float) -> None:
    arrivals = drawn(seed=7, mix=mix, load=load)
    assert offered(arrivals) == pytest.approx(load, rel=1e-6)
    assert sum(a.prompt_tokens > 100_000 for a in arrivals) == pytest.approx(400 * mix, abs=2)


def test_a_seed_is_a_workload() -> None:
    assert drawn(3) == drawn(3) != drawn(4)


def test_outputs_of_a_mix_have_the_median_and_tail_that_are_stated() -> None:
    arrivals = drawn(
        mix=0.5,
        requests=4000,
        short_output=LogNormal(median=300, p95=900),
        long_output=LogNormal(median=40, p95=40),
    )
    short = sorted(a.output_tokens for a in arrivals if a.prompt_tokens < 100_000)
    assert short[len(short) // 2] == pytest.approx(300, rel=0.08)
    assert short[int(0.95 * len(short))] == pytest.approx(900, rel=0.15)
    assert {a.output_tokens for a in arrivals if a.prompt_tokens > 100_000} == {40}


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_vary_as_stated_and_the_rate_stays(cv: float) -> None:
    arrivals = drawn(mix=0.0, requests=4000, gap_cv=cv, load=None, per_second=4.0)
    assert gap_cv(arrivals) == pytest.approx(cv, rel=0.15, abs=1e-6)
    assert arrivals[-1].arrival_s == pytest.approx(1000.0)


def test_tenants_send_their_shares_and_one_that_sends_more_changes_no_other() -> None:
    tenants = (Tenant(name="a", share=3), Tenant(name="b", mix=0.5, slo_class="batch"))
    fair = drawn(tenants=tenants)
    hog = msgspec.structs.replace(tenants[1], rate=5.0, gap_cv=4.0)
    greedy = drawn(tenants=(tenants[0], hog))
    assert offered(fair) == pytest.approx(0.8, rel=1e-3)

    def of(arrivals: list[Arrival], name: str) -> list[Arrival]:
        return [arrival for arrival in arrivals if arrival.tenant == name]

    assert of(fair, "a") == of(greedy, "a") and len(of(fair, "a")) == 300
    assert (len(of(fair, "b")), len(of(greedy, "b"))) == (100, 500)
    assert sum(a.prompt_tokens > 100_000 for a in of(fair, "b")) == pytest.approx(50, abs=3)
    assert {a.slo_class for a in of(fair, "b")} == {"batch"}
    assert gap_cv(of(greedy, "b")) > 2.5
    assert len({arrival.id for arrival in greedy}) == len(greedy)


def test_classes_are_drawn_by_share() -> None:
    counts = collections.Counter(
        a.slo_class for a in drawn(requests=2000, classes={"default": 3.0, "batch": 1.0})
    )
    assert counts["batch"] / 2000 == pytest.approx(0.25, abs=0.03)
    only = msgspec.structs.replace(FLEET, classes={"gold": SloClass(name="gold")})
    arrivals = arrivals_of(Workload(mix=0.0, per_second=1.0, requests=3), only)
    assert {arrival.slo_class for arrival in arrivals} == {"gold"}


def test_clients_set_limits_as_stated() -> None:
    for arrival in drawn(mix=0.0, max_tokens="4x"):
        assert arrival.max_output_tokens == 4 * arrival.output_tokens
    exact, fixed = drawn(mix=0.0), drawn(mix=0.0, max_tokens=100)
    assert {arrival.max_output_tokens for arrival in fixed} == {100}
    assert all(arrival.max_output_tokens == arrival.output_tokens for arrival in exact)
    # An answer ends at the limit.
    assert [a.output_tokens for a in fixed] == [min(100, a.output_tokens) for a in exact]
    context = LLAMA_3_8B.max_context_tokens
    limits = [a.prompt_tokens + a.max_output_tokens for a in drawn(mix=1.0, max_tokens=1 << 20)]
    assert limits and max(limits) < context


@pytest.fixture
def traces(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder with a small trace of each format."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:{n % 60:02d}.000000,{500 + 40 * n},{n + 1}" for n in range(60)]
    (tmp_path / "azure.csv").write_text("\n".join(lines) + "\n")
    rows = [
        {"timestamp": 500 * n, "input_length": 30_000, "output_length": 90, "hash_ids": blocks}
        for n, blocks in enumerate([list(range(58)) if n % 2 else [99 + n] * 58 for n in range(40)])
    ]
    (tmp_path / "mooncake.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "trace", [Workload(azure="azure.csv"), Workload(mooncake="mooncake.jsonl")]
)
@pytest.mark.parametrize("load", [0.3, 1.4])
def test_a_trace_is_stretched_to_the_load_in_its_own_rhythm(
    traces: pathlib.Path, trace: Workload, load: float
) -> None:
    recorded = arrivals_of(trace, FLEET, base=traces)
    arrivals = arrivals_of(msgspec.structs.replace(trace, load=load), FLEET, base=traces)
    assert offered(arrivals) == pytest.approx(load, rel=1e-6)
    stretch = arrivals[-1].arrival_s / recorded[-1].arrival_s
    assert [a.arrival_s for a in arrivals] == pytest.approx(
        [stretch * a.arrival_s for a in recorded]
    )


def test_a_trace_at_a_rate_has_that_rate(traces: pathlib.Path) -> None:
    arrivals = arrivals_of(Workload(azure="azure.csv", per_second=3.0), FLEET, base=traces)
    assert arrivals[-1].arrival_s == pytest.approx(20.0)


def test_tenants_of_a_trace_are_drawn_by_share(traces: pathlib.Path) -> None:
    workload = Workload(azure="azure.csv", tenants=(Tenant(name="a", share=2), Tenant(name="b")))
    counts = collections.Counter(a.tenant for a in arrivals_of(workload, FLEET, base=traces))
    assert counts["a"] + counts["b"] == 60 and counts["a"] > counts["b"] > 5


def test_prefixes_that_came_before_are_hits() -> None:
    arrivals = [
        Arrival(id=f"r{n}", arrival_s=float(n), prompt_tokens=1_300, blocks=blocks)
        for n, blocks in enumerate([(1, 2, 3), (1, 2, 4), (5, 2, 3), (1, 2, 4)])
    ]
    assert prefix_hits(arrivals) == [0, 1024, 0, 1299]
    assert prefix_hits([Arrival(id="x", arrival_s=0.0, prompt_tokens=9)]) == [0]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"load": 0.5, "per_second": 1.0}, "exactly one of the two"),
        ({"speed": 2.0}, r"workload\.speed is 2\.0.*leave it out"),
        ({"max_tokens": "many"}, r"max_tokens is many.*factor of 1 to"),
        ({"max_tokens": "0.5x"}, r"max_tokens is 0\.5x"),
        ({"max_tokens": "nanx"}, r"max_tokens is nanx"),
        ({"classes": {"gold": 1.0}}, r"classes is gold: must be one of default, batch"),
        ({"tenants": (Tenant(name="a", slo_class="gold"),)}, "gold"),
        ({"tenants": (Tenant(name="a"), Tenant(name="a"))}, "must have different names"),
        ({"mix": None, "azure": "none.csv"}, r"workload\.azure is none\.csv: must be a file"),
        ({"mix": None, "azure": "a.csv", "gap_cv": 2.0}, r"gap_cv is 2\.0.*traces"),
        ({"mix": None, "azure": "a.csv", "tenants": (Tenant(name="a", rate=2.0),)}, "rate is 2"),
        ({"mix": None, "lengths": "l.csv", "tenants": (Tenant(name="a", mix=0.5),)}, "mix is 0.5"),
    ],
)
def test_contradictions_are_named(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        drawn(0, **settings)


@pytest.mark.parametrize(("median", "p95"), [(0.5, 2.0), (5.0, 4.0), (5.0, math.inf)])
def test_a_distribution_that_is_none_is_named(median: float, p95: float) -> None:
    with pytest.raises(ValueError, match=f"median {median:g} and p95 {p95:g}"):
        LogNormal(median=median, p95=p95)
