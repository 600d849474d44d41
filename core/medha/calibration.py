"""Fits a profile to measured batches, from a guess: a dozen noisy samples are enough.

For the controller's warm-up on a CPU and for `medha calibrate`. Every coefficient is fitted as
guess × e^θ, so none can become zero or negative; what the samples say nothing of stays at the
guess, as a weak prior holds every θ. Residuals are relative (log measured − log predicted), of the
median of equal batches, with Huber's weights: one sample that a pause of the machine spoiled moves
little. It measures nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import CPU_CORE, Profile
from medha.topology import Topology

RATES = (
    "linear_flops_per_s", "linear_bytes_per_s", "attention_flops_per_s", "attention_bytes_per_s",
)  # fmt: skip
LATENCIES = ("batch_s", "layer_s", "sequence_s")
NOISE = 0.05  # relative error of one measurement
DOUBT = 2.0  # of the guess, in powers of e

Floats = npt.NDArray[np.float64]


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured batch in one group: (length, keys held before, decode) entries, and its seconds.

    `seconds`: of the slowest stage.
    """

    entries: tuple[tuple[int, int, bool], ...]
    seconds: float


def fit(
    samples: Sequence[Sample], shape: ModelShape, topology: Topology,
    guess: Profile = CPU_CORE, name: str = "measured",
) -> Profile:  # fmt: skip
    """The profile that explains the samples best; the guess, renamed, when there are none."""
    batches, seconds = _medians(samples)
    if not batches:
        return msgspec.structs.replace(guess, name=name)
    target = np.log(np.array(seconds))

    def predicted(theta: Floats) -> Floats:
        of = Predictor(_moved(guess, theta, name), shape, topology)
        logs: Floats = np.log(np.array([of.batch_s(entries) for entries in batches]))
        return logs

    theta = np.zeros(len(RATES) + len(LATENCIES))
    cost, residual = _cost(predicted(theta), target, theta)
    damping = 1e-2
    for _ in range(60):
        step = _step(predicted, theta, residual, damping)
        after, remaining = _cost(predicted(theta + step), target, theta + step)
        if after < cost:
            done = cost - after < 1e-6 * cost
            theta, cost, residual = theta + step, after, remaining
            damping = max(damping / 5.0, 1e-6)
            if done:
                break
        else:
            damping *= 4.0
            if damping > 1e6:
                break
    lengths = [sum(length for length, _, _ in entries) for entries in batches]
    keys = [keys + length for entries in batches for length, keys, _ in entries]
    return msgspec.structs.replace(
        _moved(guess, theta, name),
        valid_rows=max(lengths),
        valid_keys=max(keys),
        error=float(np.sqrt(np.mean(residual**2))),
    )


def _medians(
    samples: Sequence[Sample],
) -> tuple[list[tuple[tuple[int, int, bool], ...]], list[float]]:
    """Distinct batches and the median of what each took; nonsense measurements are left out."""
    found: dict[tuple[tuple[int, int, bool], ...], list[float]] = {}
    for sample in samples:
        if sample.entries and math.isfinite(sample.seconds) and sample.seconds > 0.0:
            found.setdefault(sample.entries, []).append(sample.seconds)
    return list(found), [float(np.median(times)) for times in found.values()]


def _moved(guess: Profile, theta: Floats, name: str) -> Profile:
    """The guess with its rates and latencies changed by e^θ."""
    values: dict[str, float] = {}
    for field, power in zip(RATES + LATENCIES, theta.tolist(), strict=True):
        floor = 1e-9 if field in LATENCIES else 1.0
        values[field] = max(floor, getattr(guess, field)) * math.exp(max(-12.0, min(12.0, power)))
    return msgspec.structs.replace(guess, name=name, **values)


def _cost(predicted: Floats, target: Floats, theta: Floats) -> tuple[float, Floats]:
    """Huber's loss of the residuals plus the prior, and the residuals."""
    residual = target - predicted
    scaled = np.abs(residual) / NOISE
    loss = np.where(scaled <= 2.0, 0.5 * scaled**2, 2.0 * scaled - 2.0)
    return float(loss.sum() + 0.5 * np.sum((theta / DOUBT) ** 2)), residual


def _step(
    predicted: Callable[[Floats], Floats], theta: Floats, residual: Floats, damping: float
) -> Floats:
    """One damped Gauss-Newton step (Levenberg-Marquardt) with a numerical Jacobian."""
    here = predicted(theta)
    columns = []
    for index in range(len(theta)):
        aside = theta.copy()
        aside[index] += 1e-4
        columns.append((predicted(aside) - here) / 1e-4)
    jacobian = np.stack(columns, axis=1)
    scaled = np.abs(residual) / NOISE
    weight = np.where(scaled <= 2.0, 1.0, 2.0 / np.maximum(scaled, 1e-9)) / NOISE**2
    normal = (jacobian.T * weight) @ jacobian + np.eye(len(theta)) / DOUBT**2
    gradient = jacobian.T @ (weight * residual) - theta / DOUBT**2
    step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
    return np.clip(step.astype(np.float64), -2.0, 2.0)
