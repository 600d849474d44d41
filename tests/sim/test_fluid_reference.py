"""The fluid reference, on cases small enough to compute by hand.

The hand's machine computes 10,000 tokens a second, whatever their depth: a decode costs 0.1 ms.
"""

from __future__ import annotations

import pytest
from benchmarks.fluid import DECODE_FREE, FluidPrompt, FluidReplica, first_tokens
from benchmarks.policy_cells import CellWorkload
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import A100, Profile
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.workload import Arrival
from medha.topology import Topology

RATE, FREE = 10_000.0, 1e30
SHAPE = ModelShape(layers=1, hidden=64, heads=1, kv_heads=1, head_dim=64, intermediate=64, vocab=1)
LINEAR = Profile(
    name="linear",
    linear_flops_per_s=RATE * SHAPE.linear_flops(1),
    linear_bytes_per_s=FREE,
    roofline_power=1.0,
    elementwise_bytes_per_s=FREE,
    attention_flops_per_s=FREE,
    attention_bytes_per_s=FREE,
    all_reduce_bytes_per_s=FREE,
    p2p_bytes_per_s=FREE,
    kvp_bytes_per_s=FREE,
)
# (arrival, prompt tokens, output tokens, deadline)
Case = tuple[float, int, int, float]


def replica(
    order: str = "promises", tpot_s: float = 0.05, topology: Topology | None = None
) -> FluidReplica:
    predictor = Predictor(LINEAR, SHAPE, topology or Topology(), 0.1)
    return FluidReplica(predictor, tpot_s, Scheduling(), order)


def serve(of: FluidReplica | list[FluidReplica], *cases: Case) -> dict[str, tuple[float, bool]]:
    """Serve cases named a, b, c …: (end of the prefill, in time)."""
    arrivals = tuple(
        Arrival(id="abcdefgh"[at], arrival_s=when, prompt_tokens=prompt, output_tokens=output)
        for at, (when, prompt, output, _) in enumerate(cases)
    )
    load = CellWorkload(
        arrivals=arrivals,
        cached={arrival.id: 0 for arrival in arrivals},
        work_s={arrival.id: arrival.prompt_tokens / RATE for arrival in arrivals},
        deadlines_s={arrival.id: case[3] for arrival, case in zip(arrivals, cases, strict=True)},
        load=1.0,
    )
    replicas = of if isinstance(of, list) else [of]
    in_time, ends = first_tokens(replicas, load)
    return {name: (round(end_s, 3), name in in_time) for name, end_s in ends.items()}


def test_a_prompt_alone_takes_its_tokens_over_the_rate() -> None:
    assert serve(replica(), (0.0, 5000, 1, 0.6)) == {"a": (0.5, True)}


def test_the_worked_example_of_the_papers_meets_all_three_deadlines() -> None:
    long, short = (0.0, 10_000, 1, 1.6), (0.5, 500, 1, 0.12)
    ends = serve(replica(), long, short, short)
    assert ends == {"a": (1.1, True), "b": (0.55, True), "c": (0.6, True)}


def test_the_largest_prompt_of_an_overrun_waits_for_the_others() -> None:
    ends = serve(replica(), (0.0, 10_000, 1, 2.0), (0.0, 11_000, 1, 2.0), (0.0, 5000, 1, 2.0))
    assert ends["a"][1] and ends["c"][1]
    assert "b" not in ends  # it would end at 2.6 s, after the last deadline


def test_only_the_reference_that_keeps_promises_serves_a_promised_prompt_first() -> None:
    cases: tuple[Case, ...] = ((0.0, 10_000, 1, 1.1), (0.1, 1500, 1, 0.3), (0.2, 1500, 1, 0.3))
    ends = serve(replica("promises"), *cases)
    assert "a" not in ends and ends["b"] == (0.25, True) and ends["c"] == (0.4, True)
    assert serve(replica("kept"), *cases) == {"a": (1.0, True)}


def test_the_shortest_first_order_misses_a_deadline_that_promises_meet() -> None:
    cases: tuple[Case, ...] = ((0.0, 10_000, 1, 1.1), (0.0, 5000, 1, 5.0))
    assert serve(replica("shortest"), *cases) == {"a": (1.5, False), "b": (0.5, True)}
    assert serve(replica("promises"), *cases) == {"a": (1.0, True), "b": (1.5, True)}


def test_a_decode_takes_its_row_of_each_batch() -> None:
    # a's 20 tokens after the first: a batch of 50 ms each, 499 rows of 500 for b.
    ends = serve(replica(), (0.0, 1000, 21, 1.0), (0.1, 4990, 1, 2.0))
    assert ends["b"][0] == pytest.approx(0.1 + 4990 / (RATE * 499 / 500), abs=1e-3)


def test_decodes_without_prompts_run_at_their_own_pace() -> None:
    of = replica()
    of.submit(FluidPrompt(0, 1000, 0, 101), 1.0)
    of.advance(0.1 + 50 * 1e-4)
    assert of.pools[0].count == 1 and of.pools[0].clock == pytest.approx(50.0, rel=0.01)
    of.advance(0.1 + 102 * 1e-4)
    assert of.pools[0].count == 0


def test_decodes_leave_prompts_their_part_of_a_batch() -> None:
    of = replica()
    for number in range(1000):  # 0.1 s of decodes for batches of 0.05 s
        of.pools[0].add(number, 100.0, 1_000_000, 1)
        of._decoding[number] = FluidPrompt(number, 100, 0, 1_000_000)
    of.submit(FluidPrompt(1000, 2000, 0, 1), 10.0)
    of.advance(2000 / (RATE * DECODE_FREE) - 0.05)
    assert 1000 not in of.finished_s
    of.advance(2000 / (RATE * DECODE_FREE) + 0.05)
    assert 1000 in of.finished_s


def test_the_drain_of_a_pipeline_counts_before_the_deadline() -> None:
    # Two stages of half a layer's time each are not possible with one layer: two layers, twice
    # the flops, so a stage computes 10,000 tokens a second.
    shape = ModelShape(
        layers=2, hidden=64, heads=1, kv_heads=1, head_dim=64, intermediate=64, vocab=1
    )
    predictor = Predictor(LINEAR, shape, Topology(spp=2), 0.1)
    for deadline_s, in_time in ((0.5 + 0.02, False), (0.5 + 0.03, True)):
        of = FluidReplica(predictor, 0.05, Scheduling(), "promises")
        # The prompt ends after 0.5 s; its last batch of 25 ms passes the second stage.
        assert serve(of, (0.0, 5000, 1, deadline_s)).get("a", (0.0, False))[1] is in_time


def test_groups_serve_their_own_prompts_at_once_and_a_shared_one_together() -> None:
    topology = Topology(kvp_min=2, kvp_max=2, tokens_per_group=4000)
    ends = serve(replica(topology=topology), (0.0, 2000, 1, 1.0), (0.0, 2000, 1, 1.0))
    assert ends == {"a": (0.2, True), "b": (0.2, True)}
    # c spans both groups: its last 2,000 tokens wait for d, whose deadline is earlier.
    ends = serve(replica(topology=topology), (0.0, 6000, 1, 9.0), (0.1, 6000, 1, 0.65))
    assert ends["b"] == (0.7, True) and ends["a"] == (1.2, True)


def test_a_prompt_goes_to_the_replica_with_the_least_work() -> None:
    ends = serve([replica(), replica()], (0.0, 5000, 1, 1.0), (0.1, 3000, 1, 1.0))
    assert ends == {"a": (0.5, True), "b": (0.4, True)}


def test_a_prompt_goes_where_it_makes_nothing_late() -> None:
    tight, loose = (0.0, 10_000, 1, 1.05), (0.0, 20_000, 1, 9.0)
    ends = serve([replica(), replica()], tight, loose, (0.1, 5000, 1, 0.6))
    assert ends == {"a": (1.0, True), "b": (2.5, True), "c": (0.6, True)}


@pytest.mark.parametrize("tokens", [100_000, 300_000, 900_000])
@pytest.mark.parametrize("spp", [1, 2])
def test_a_long_prompt_alone_takes_as_long_as_the_predictor_says(tokens: int, spp: int) -> None:
    predictor = Predictor(A100, LLAMA_3_8B, Topology(tp=8, spp=spp), 0.1)
    of = FluidReplica(predictor, 0.1, Scheduling(), "promises")
    of.submit(FluidPrompt(0, tokens, 0, 1), 1e6)
    of.advance(1e4)
    # The reference loses nothing to chunks of whole steps.
    expected_s = predictor.busy_s(tokens)
    assert 0.98 * expected_s < of.finished_s[0] < 1.02 * expected_s


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 2.0), st.integers(1, 20_000), st.integers(1, 200), st.floats(0.1, 9.0)
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(["promises", "shortest"]),
    st.sampled_from([1, 2]),
)
@settings(max_examples=40, deadline=None)
def test_everything_ends_and_nothing_is_faster_than_the_machine(
    cases: list[Case], order: str, groups: int
) -> None:
    of = replica(order, topology=Topology(kvp_min=groups, kvp_max=groups, tokens_per_group=8192))
    serve(of, *sorted(cases))
    of.advance(of.now + 1e4)
    assert not of.waiting and len(of.finished_s) == len(cases)
    for pool in of.pools:
        assert pool.rows == 0 and pool.keys == pytest.approx(0.0, abs=1e-3)
    total = sum(case[1] for case in cases)
    first_s = min(case[0] for case in cases)
    assert max(of.finished_s.values()) >= first_s + total / RATE / groups - 1e-6
