"""Fits a profile to measured batches, from a guess: a dozen noisy samples are enough.

For the controller's warm-up on a CPU and for `medha calibrate`, which measures single operators
too. Every coefficient is fitted as guess × e^θ, so none can become zero or negative; what the
samples say nothing of stays at the guess, as a weak prior holds every θ. Residuals are relative
(log measured − log predicted), of the median of equal batches, with Huber's weights: one sample
that a pause of the machine spoiled moves little. It measures nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from medha.costs import Costs
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import CPU_CORE, Profile
from medha.topology import Topology

RATES = (
    "linear_flops_per_s", "linear_bytes_per_s", "attention_flops_per_s", "attention_bytes_per_s",
)  # fmt: skip
LATENCIES = ("batch_s", "layer_s", "sequence_s")
# What only operators tell apart; the power of the roofline moves as power − 1.
SHAPES = ("elementwise_bytes_per_s", "attention_half_rows", "roofline_power")
FLOORS = ("elementwise_s", "product_s")  # the same, where the guess has them
NOISE = 0.05  # relative error of one measurement
ROUGH = 0.15  # how far an operator alone may be from what it takes in a batch
DOUBT = 2.0  # of the guess, in powers of e

Floats = npt.NDArray[np.float64]


Entries = tuple[tuple[int, int, bool], ...]
K = TypeVar("K", bound=Hashable)


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured batch in one group: (length, keys held before, decode) entries, and its seconds.

    `seconds`: of the slowest stage.
    """

    entries: Entries
    seconds: float


class Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of one layer, as one of `tp` shards runs it.

    `linear`: its matrix products over `rows`; `elementwise`: norms, rotation, activation, sums and
    what else moves through memory; `attention`: of `rows` of one prompt after `keys`; `decode`: of
    `rows` sequences that each hold `keys`.
    """

    kind: Literal["linear", "elementwise", "attention", "decode"]
    rows: int
    keys: int = 0
    tp: int = 1


def operator_s(operator: Operator, costs: Costs) -> float:
    """Predicted seconds of an operator; `costs` with its `tp`."""
    match operator.kind:
        case "elementwise":
            return costs.small(operator.rows)
        case "attention":
            return costs.attention(operator.rows, operator.keys, tail=True)
        case "decode":
            return costs.decodes(operator.rows, operator.rows * (operator.keys + 1))
        case "linear":
            return costs.products.layer(operator.rows)


def fit(
    samples: Sequence[Sample], shape: ModelShape, topology: Topology,
    guess: Profile = CPU_CORE, name: str = "measured",
    operators: Sequence[tuple[Operator, float]] = (),
) -> Profile:  # fmt: skip
    """The profile that explains the samples, and seconds of operators, best; the guess, renamed,
    when there are no samples."""
    batches, seconds = _medians((sample.entries, sample.seconds) for sample in samples)
    if not batches:
        return msgspec.structs.replace(guess, name=name)
    parts, parts_s = _medians(operators)
    floors = tuple(field for field in FLOORS if getattr(guess, field))
    fields = RATES + LATENCIES + ((*SHAPES, *floors) if parts else ())
    target = np.log(np.array(seconds + parts_s))
    noise = np.repeat([NOISE, ROUGH], [len(batches), len(parts)])

    def predicted(theta: Floats) -> Floats:
        moved = _moved(guess, fields, theta, name)
        of = Predictor(moved, shape, topology)
        by_tp = {part.tp: Costs(moved, shape, Topology(tp=part.tp)) for part in parts}
        found = [of.batch_s(entries) for entries in batches]
        found += [operator_s(part, by_tp[part.tp]) for part in parts]
        logs: Floats = np.log(np.array(found))
        return logs

    theta = np.zeros(len(fields))
    cost, residual = _cost(predicted(theta), target, theta, noise)
    damping = 1e-2
    for _ in range(60):
        step = _step(predicted, theta, residual, noise, damping)
        after, remaining = _cost(predicted(theta + step), target, theta + step, noise)
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
        _moved(guess, fields, theta, name),
        valid_rows=max(lengths),
        valid_keys=max(keys),
        error=float(np.sqrt(np.mean(residual[: len(batches)] ** 2))),
    )


def misses(
    profile: Profile, samples: Iterable[Sample], shape: ModelShape, topology: Topology
) -> list[tuple[Sample, float]]:
    """Each different batch with the median of what it took, and predicted / measured − 1."""
    of = Predictor(profile, shape, topology)
    batches, seconds = _medians((sample.entries, sample.seconds) for sample in samples)
    return [
        (Sample(entries, took_s), of.batch_s(entries) / took_s - 1.0)
        for entries, took_s in zip(batches, seconds, strict=True)
    ]


def _medians(measured: Iterable[tuple[K, float]]) -> tuple[list[K], list[float]]:
    """What was measured, once each, and the median of what it took; nonsense is left out."""
    found: dict[K, list[float]] = {}
    for what, seconds in measured:
        if what and math.isfinite(seconds) and seconds > 0.0:
            found.setdefault(what, []).append(seconds)
    return list(found), [float(np.median(times)) for times in found.values()]


def _moved(guess: Profile, fields: Sequence[str], theta: Floats, name: str) -> Profile:
    """The guess with its `fields` changed by e^θ."""
    values: dict[str, float] = {}
    for field, power in zip(fields, theta.tolist(), strict=True):
        by = math.exp(max(-12.0, min(12.0, power)))
        if field == "roofline_power":
            values[field] = min(16.0, 1.0 + max(0.01, guess.roofline_power - 1.0) * by)
            continue
        floor = 1e-9 if field in LATENCIES else 1.0
        values[field] = max(floor, getattr(guess, field)) * by
    return msgspec.structs.replace(guess, name=name, **values)


def _cost(predicted: Floats, target: Floats, theta: Floats, noise: Floats) -> tuple[float, Floats]:
    """Huber's loss of the residuals plus the prior, and the residuals."""
    residual = target - predicted
    scaled = np.abs(residual) / noise
    loss = np.where(scaled <= 2.0, 0.5 * scaled**2, 2.0 * scaled - 2.0)
    return float(loss.sum() + 0.5 * np.sum((theta / DOUBT) ** 2)), residual


def _step(
    predicted: Callable[[Floats], Floats], theta: Floats, residual: Floats, noise: Floats,
    damping: float,
) -> Floats:  # fmt: skip
    """One damped Gauss-Newton step (Levenberg-Marquardt) with a numerical Jacobian."""
    here = predicted(theta)
    columns = []
    for index in range(len(theta)):
        aside = theta.copy()
        aside[index] += 1e-4
        columns.append((predicted(aside) - here) / 1e-4)
    jacobian = np.stack(columns, axis=1)
    scaled = np.abs(residual) / noise
    weight = np.where(scaled <= 2.0, 1.0, 2.0 / np.maximum(scaled, 1e-9)) / noise**2
    normal = (jacobian.T * weight) @ jacobian + np.eye(len(theta)) / DOUBT**2
    gradient = jacobian.T @ (weight * residual) - theta / DOUBT**2
    step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
    return np.clip(step.astype(np.float64), -2.0, 2.0)
