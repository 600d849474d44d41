"""What an HPA makes of the number that the operator exports, by the HPA's documented arithmetic.

An HPA of external metrics with an average target wants `ceil(current * average / target)` replicas,
where the average is the metric over the current replicas, and does nothing while `average / target`
is within a tenth of 1.
"""

from __future__ import annotations

import math

import pytest

from medha.spec.values import Autoscaling
from medha_operator.keda import scaled_object
from medha_operator.testing import resource

TOLERANCE = 0.1
MOST = 60


def trigger() -> dict[str, str]:
    """How the operator's own ScaledObject has its number read."""
    made = scaled_object(resource(), Autoscaling(max_replicas=MOST), "http://prometheus:9090")
    (found,) = made["spec"]["triggers"]
    assert found["metricType"] == "AverageValue"
    metadata: dict[str, str] = found["metadata"]
    return metadata


def desired(current: int, exported: float) -> int:
    target = float(trigger()["threshold"])
    ratio = exported / current / target
    return current if abs(1.0 - ratio) <= TOLERANCE else math.ceil(current * ratio - 1e-9)


@pytest.mark.parametrize("current", range(1, 10))
def test_below_ten_replicas_an_hpa_wants_exactly_what_is_exported(current: int) -> None:
    assert [desired(current, wanted) for wanted in range(MOST)] == [*range(MOST)]


@pytest.mark.parametrize("current", [11, 15, 20, 40])
def test_above_ten_replicas_steps_of_less_than_a_tenth_wait_and_others_are_exact(
    current: int,
) -> None:
    for wanted in range(MOST):
        far = abs(wanted - current) > TOLERANCE * current
        near = abs(wanted - current) < TOLERANCE * current
        if far or near:  # a tenth itself is a matter of rounding
            assert desired(current, wanted) == (wanted if far else current)
    assert desired(current, current + 1) == desired(current, current - 1) == current


def test_what_was_put_off_is_made_good_once_enough_has_come_together() -> None:
    assert [desired(20, wanted) for wanted in (21, 23)] == [20, 23]
