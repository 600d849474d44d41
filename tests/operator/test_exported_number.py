"""An HPA follows the number that the operator exports, by the HPA's documented arithmetic.

An HPA of external metrics with an average target wants `ceil(current * average / target)` replicas,
where the average is the metric over the current replicas, and does nothing while `average / target`
is within a tenth of 1.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from medha.spec.values import AutoscalingSpec
from medha_operator.resources.scaled_object import scaled_object
from medha_operator.testing import resource

TOLERANCE = 0.1
MAX_REPLICAS = 60


def spec() -> dict[str, Any]:
    """Return the spec of the operator's own ScaledObject."""
    autoscaling = AutoscalingSpec(max_replicas=MAX_REPLICAS)
    manifest = scaled_object(resource(), autoscaling, "http://prometheus:9090")
    spec: dict[str, Any] = manifest["spec"]
    return spec


def trigger() -> dict[str, str]:
    """Return the ScaledObject's trigger."""
    (trigger,) = spec()["triggers"]
    assert trigger["metricType"] == "AverageValue"
    metadata: dict[str, str] = trigger["metadata"]
    return metadata


def desired(current: int, exported: float) -> int:
    target = float(trigger()["threshold"])
    ratio = exported / current / target
    return current if abs(1.0 - ratio) <= TOLERANCE else math.ceil(current * ratio - 1e-9)


@pytest.mark.parametrize("current", range(1, 10))
def test_below_ten_replicas_an_hpa_wants_exactly_the_exported_number(current: int) -> None:
    assert [desired(current, wanted) for wanted in range(MAX_REPLICAS)] == [*range(MAX_REPLICAS)]


@pytest.mark.parametrize("current", [11, 15, 20, 40])
def test_above_ten_replicas_steps_within_the_tolerance_wait_and_larger_ones_are_exact(
    current: int,
) -> None:
    for wanted in range(MAX_REPLICAS):
        far = abs(wanted - current) > TOLERANCE * current
        near = abs(wanted - current) < TOLERANCE * current
        if far or near:  # exactly a tenth depends on rounding
            assert desired(current, wanted) == (wanted if far else current)
    assert desired(current, current + 1) == desired(current, current - 1) == current


def test_small_steps_apply_once_they_add_up_to_more_than_the_tolerance() -> None:
    assert [desired(20, wanted) for wanted in (21, 23)] == [20, 23]


def test_a_smaller_number_that_has_waited_already_waits_neither_for_the_hpa_nor_for_keda() -> None:
    behavior = spec()["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 0
    assert spec()["cooldownPeriod"] == 0
