"""Promises of a router when requests come at once, mostly to pipelines, with exact predictions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from benchmarks.bursts import KINDS, Burst, Wish, drawn, late
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.sim.report import RequestRecord
from medha.topology import Topology


def served(
    profile: str,
    layout: Topology,
    tpot_s: float,
    wishes: Sequence[Wish],
    histories: Sequence[int] = (),
    deadlines_s: dict[int, float] | None = None,
    when_infeasible: str = "refuse",
) -> list[RequestRecord]:
    """Serve requests on one replica that is idle and has the histories in its cache."""
    return Burst(
        profile=profile,
        tp=layout.tp,
        spp=layout.spp,
        kvp=layout.kvp_max,
        tpot_s=tpot_s,
        wishes=tuple(wishes),
        histories=tuple(histories),
        deadlines_s=deadlines_s or {},
        when_infeasible=when_infeasible,
    ).play()


def test_a_promise_waits_for_the_batches_in_flight_in_every_stage() -> None:
    # The short prompt comes when two batches of 0.1 s fill both stages: it cannot have 0.1 s.
    wishes = [(0.0, 43_847, 1, -1), (0.2897, 2002, 1, -1)]
    records = served("a100", Topology(tp=8, spp=2), 0.15, wishes, deadlines_s={1: 0.1})
    assert late(records) == {}
    assert [record.id for record in records if record.promised] == ["r0"]
    records = served("a100", Topology(tp=8, spp=2), 0.15, wishes, deadlines_s={1: 0.15})
    assert late(records) == {} and all(record.promised for record in records)


def test_prompts_that_come_at_once_count_the_answers_of_those_before() -> None:
    # No batch ends between the arrivals. With an answer at 218,000 tokens in every third batch,
    # 2,190 tokens at that depth take half as long again.
    wishes = [(0.0, 218_924, 200, 0), (0.0, 257_145, 1, -1), (0.0, 221_113, 1, 0)]
    records = served("a100", Topology(tp=1, spp=3), 0.05, wishes, [218_923])
    assert late(records) == {}
    assert next(record for record in records if record.id == "r0").promised


def test_the_first_answer_of_a_replica_takes_no_time_from_earlier_promises() -> None:
    # From then on promises count on batches as short as answers make them.
    wishes = [
        (0.0, 31_769, 1, -1),
        (0.0, 98_800, 1, -1),
        (0.0, 71_049, 1, -1),
        (0.0, 28_405, 2, -1),
    ]
    records = served("a100", Topology(tp=4, spp=3, kvp_min=2, kvp_max=2), 0.02, wishes)
    assert late(records) == {}


@pytest.mark.parametrize("kvp", [1, 2])
def test_batches_are_short_before_an_answer_begins(kvp: int) -> None:
    # Batches of 0.1 s ahead of the second token would hold stage 0 up, three times.
    layout = Topology(tp=1, spp=4, kvp_min=kvp, kvp_max=kvp)
    wishes = [(0.0, 65_525, 1, -1), (0.0, 59_521, 54, 0), (0.0, 16_086, 1, -1)]
    wishes += [(0.0148, 109_902, 49, 1)]
    records = served("h100", layout, 0.075, wishes, [54_521, 108_813], when_infeasible="relegate")
    assert late(records) == {}
    assert any(record.promised for record in records)


@pytest.mark.parametrize(("spp", "output_tokens"), [(2, 2), (3, 2), (3, 3), (4, 3), (4, 5)])
def test_the_second_token_of_a_short_answer_is_in_time_in_a_pipeline(
    spp: int, output_tokens: int
) -> None:
    # It waits for stage 0 and behind all batches in flight, and has no time to catch up.
    layout = Topology(tp=4, spp=spp)
    wishes = [(0.0, 4_000, output_tokens, -1), (0.0, 60_000, 1, -1), (0.001, 2_000, 1, -1)]
    records = served("a100", layout, 0.1, wishes)
    answers = [record for record in records if record.output_tokens > 1]
    assert [record.promised for record in answers] == [True]
    assert not any(record.tpot_missed for record in answers)
    assert late(records) == {}


def test_batches_do_not_pile_up_behind_a_longer_one_in_which_short_answers_begin() -> None:
    # Behind the batch of all short prompts, those of the long one are a third as long.
    wishes = [(0.0, 4_000, 2, -1)] * 3 + [(0.0, 60_000, 1, -1)] + [(0.0, 2_000, 200, -1)] * 4
    records = served("a100", Topology(tp=4, spp=3), 0.1, wishes)
    answers = [record for record in records if record.output_tokens == 2]
    assert [record.promised for record in answers] == [True] * 3
    assert not any(record.tpot_missed for record in answers)
    assert late(records) == {}


def test_a_turn_on_a_deep_history_is_not_slowed_by_its_own_answer() -> None:
    # The answer takes a quarter of the decode capacity, and counted as soon as its prompt started.
    wishes = [(0.0, 1394, 209, -1), (0.009, 39_816, 71, -1), (0.012, 10_134, 101, 1)]
    wishes += [(0.083, 109_313, 31, 0)]
    records = served("a100", Topology(tp=1, spp=3), 0.02, wishes, [109_312, 7617])
    assert late(records) == {}
    assert next(record for record in records if record.id == "r3").promised


def test_prompts_that_start_between_two_batches_count_the_answers_of_each_other() -> None:
    # A promise bears one of those answers, not all of them.
    wishes = [(0.0, 45_155, 274, -1), (0.0, 134_688, 93, 0), (0.0, 135_068, 67, 0)]
    wishes += [(0.0, 136_084, 82, 0), (0.0, 175_201, 63, 1)]
    layout, histories = Topology(tp=4), [134_687, 175_200]
    records = served("a100", layout, 0.02, wishes, histories, when_infeasible="relegate")
    assert late(records) == {}
    assert any(record.promised for record in records)


def test_an_answer_takes_more_from_prefills_where_weights_take_most_of_a_batch() -> None:
    # In batches of 10 ms prefills have 3 ms: decodes that take a tenth of that slow them by more
    # than a tenth of a third.
    wishes = [(0.0, 29_324, 37, -1), (0.011, 10_463, 82, -1), (0.053, 1639, 549, -1)]
    wishes += [(0.133, 483, 92, -1), (0.98, 4966, 203, -1)]
    records = served("a100", Topology(tp=1, spp=2), 0.02, wishes, [83_964, 155_172])
    assert late(records) == {}
    assert any(record.promised for record in records)


@given(kind=st.sampled_from([*KINDS]), seed=st.integers(0, 10_000))
@settings(max_examples=20)
def test_no_promise_is_broken_with_exact_predictions(kind: str, seed: int) -> None:
    records = drawn(kind, seed).play()
    assert late(records) == {}
    assert all(record.finished_s is not None or record.refused for record in records)
