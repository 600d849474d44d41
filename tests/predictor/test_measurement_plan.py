"""`medha calibrate`: its plan, its validation, and recovery of known machines."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from medha.calibration import Operator, Sample, fit, misses, operator_s
from medha.measurement_plan import DECODES, UNSEEN, Bounds, plan_for
from medha.predictor import Costs, Predictor
from medha.profile import CPU_CORE, SHIPPED
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology

SMALL = Bounds(rows=512, keys=4096, page_tokens=64, pool_tokens=2 * 4096 + 4608)
LARGE = Bounds(rows=8192, keys=900_032, page_tokens=64, pool_tokens=2_000_000)


@pytest.mark.parametrize("bounds", [SMALL, LARGE])
def test_a_plan_stays_within_its_bounds_and_spans_them(bounds: Bounds) -> None:
    plan = plan_for(LLAMA_3_8B, bounds)
    for entries in (*plan.batches, *plan.unseen):
        assert sum(length for length, _, _ in entries) <= bounds.rows
        pages = sum(-(-(keys + length) // 64) for length, keys, _ in entries)
        assert pages * 64 <= bounds.pool_tokens
        for length, keys, decode in entries:
            assert keys % 64 == 0 and keys <= bounds.keys
            assert length == 1 if decode else length >= 16
    rows = [sum(length for length, _, _ in entries) for entries in plan.batches]
    assert max(rows) == bounds.rows
    assert max(keys for entries in plan.batches for _, keys, _ in entries) == bounds.keys
    assert max(part.rows for part in plan.operators) == bounds.rows
    assert {len(entries) for entries in plan.batches} >= set(DECODES[:2])
    for part in plan.operators:
        count = part.rows if part.kind == "decode" else 1
        assert count * (part.keys + part.rows // count) <= bounds.pool_tokens


def test_the_judges_are_mixed_batches_that_the_fit_never_sees() -> None:
    plan = plan_for(LLAMA_3_8B, LARGE)
    assert not set(plan.unseen) & set(plan.batches)
    assert len(plan.unseen) > 0.8 * UNSEEN
    mixed = [e for e in plan.unseen if len({decode for _, _, decode in e}) == 2]
    assert len(mixed) > 0.7 * len(plan.unseen)
    lengths = sorted(max(length for length, _, _ in entries) for entries in plan.unseen)
    assert lengths[0] < 32 and lengths[-1] > 4096
    assert plan == plan_for(LLAMA_3_8B, LARGE)


def judged(noise: float, seed: int) -> tuple[np.ndarray, float]:
    """Errors on unseen batches, and the share of a roofline that was found, of a machine made up
    far from the guess and measured with noise."""
    truth = msgspec.structs.replace(
        SHIPPED["h100"],
        linear_flops_per_s=4.4e14,
        linear_bytes_per_s=2.6e12,
        roofline_power=2.5,
        elementwise_bytes_per_s=1.1e12,
        attention_flops_per_s=3.6e14,
        attention_half_rows=1500.0,
        attention_bytes_per_s=3.3e12,
        layer_s=9e-5,
        batch_s=6e-4,
        sequence_s=2e-5,
    )
    dice, plan = random.Random(seed), plan_for(LLAMA_3_8B, LARGE)
    of = Predictor(truth, LLAMA_3_8B, Topology())

    def measured(seconds: float) -> float:
        return seconds * (1.0 + dice.uniform(-noise, noise))

    operators = [
        (part, measured(1.05 * operator_s(part, Costs(truth, LLAMA_3_8B, Topology(tp=part.tp)))))
        for part in plan.operators
    ]
    batches = [Sample(entries, measured(of.batch_s(entries))) for entries in plan.batches]
    profile = fit(batches, LLAMA_3_8B, Topology(), SHIPPED["h100"], "found", operators)
    assert profile.name == "found" and profile.valid_rows == 8192
    unseen = [Sample(entries, of.batch_s(entries)) for entries in plan.unseen]
    errors = np.abs([miss for _, miss in misses(profile, unseen, LLAMA_3_8B, Topology())])
    return errors, profile.roofline_power


def test_a_machine_measured_without_noise_is_found_again() -> None:
    errors, power = judged(0.0, 0)
    assert np.quantile(errors, 0.95) < 0.02
    assert power == pytest.approx(2.5, abs=0.5)


@pytest.mark.parametrize("seed", range(3))
def test_a_machine_measured_with_noise_is_predicted_within_it(seed: int) -> None:
    errors, _ = judged(0.06, seed)
    assert np.quantile(errors, 0.5) < 0.04 and np.quantile(errors, 0.95) < 0.08


def test_operators_are_parts_of_what_a_batch_costs() -> None:
    costs = Costs(CPU_CORE, LLAMA_3_8B, Topology())
    layer_s = costs.layer(300, costs.attention(300, 1000, True), 0)
    parts = [
        Operator("linear", 300),
        Operator("elementwise", 300),
        Operator("attention", 300, 1000),
    ]
    whole_s = sum(operator_s(part, costs) for part in parts) + CPU_CORE.layer_s
    assert whole_s == pytest.approx(layer_s)
    decodes = costs.decodes(4, 4 * 1001)
    assert operator_s(Operator("decode", 4, 1000), costs) == decodes
