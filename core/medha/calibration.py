"""Fit of a profile to measured batches, starting from a guess; a dozen noisy samples suffice.

For the controller's warm-up on a CPU and for `medha calibrate`, which also measures single
operators. Every coefficient is fitted as guess × e^θ and stays positive. A weak prior on θ keeps a
coefficient at the guess if the samples do not constrain it. Residuals are relative (log measured −
log predicted), of the median of equal batches, with Huber's weights against outliers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from medha.model import ModelShape
from medha.predictor import Costs, Predictor, all_reduce_share
from medha.profile import CPU_CORE, Profile
from medha.topology import Topology

RATES = (
    "linear_flops_per_s",
    "linear_bytes_per_s",
    "attention_flops_per_s",
    "attention_bytes_per_s",
)
LATENCIES = ("batch_s", "layer_s", "sequence_s")
# Fitted only with operators; the power of the roofline is fitted as power − 1.
SHAPES = ("elementwise_bytes_per_s", "attention_half_rows", "roofline_power")
FLOORS = ("elementwise_s", "product_s", "attention_s")  # likewise, if the guess has them
NOISE = 0.05  # relative error of one measurement
ROUGH = 0.15  # relative difference of an operator alone and within a batch
DOUBT = 2.0  # of the guess, in powers of e

Floats = npt.NDArray[np.float64]


Entries = tuple[tuple[int, int, bool], ...]
K = TypeVar("K", bound=Hashable)
ExchangeKind = Literal["all-reduce", "point-to-point"]
EXCHANGES: tuple[ExchangeKind, ...] = ("all-reduce", "point-to-point")


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A measured batch of one group: entries (length, keys held before, decode) and seconds.

    `seconds`: of the slowest stage.
    """

    entries: Entries
    seconds: float


class Operator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of one layer, as one of `tp` shards runs it.

    `linear`: the matrix products over `rows`; `elementwise`: norms, rotation, activation, sums and
    other memory-bound work; `attention`: of `rows` of one prompt after `keys`; `decode`: of `rows`
    sequences that each hold `keys`.
    """

    kind: Literal["linear", "elementwise", "attention", "decode"]
    rows: int
    keys: int = 0
    tp: int = 1


class TimedExchange(msgspec.Struct, frozen=True):
    """Seconds of an exchange of a tensor: summed over `ranks`, or sent from one to another.

    `unseen`: for validation only.
    """

    kind: ExchangeKind
    ranks: int
    size_bytes: int
    seconds: float
    unseen: bool = False

    @property
    def moved_bytes(self) -> float:
        """Bytes that a rank sends, as the predictor's law counts them."""
        share = all_reduce_share(self.ranks) if self.kind == "all-reduce" else 1.0
        return share * self.size_bytes


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
    samples: Sequence[Sample],
    shape: ModelShape,
    topology: Topology,
    guess: Profile = CPU_CORE,
    name: str = "measured",
    operators: Sequence[tuple[Operator, float]] = (),
) -> Profile:
    """Fit a profile to samples and operator times; without samples, return the renamed guess."""
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
        times_s = [of.batch_s(entries) for entries in batches]
        times_s += [operator_s(part, by_tp[part.tp]) for part in parts]
        logs: Floats = np.log(np.array(times_s))
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


class Link(msgspec.Struct, frozen=True):
    """Law of an exchange: `latency_s` + bytes / `bytes_per_s`. `errors`: relative, of sizes that
    the fit has not seen."""

    kind: ExchangeKind
    ranks: int
    latency_s: float
    bytes_per_s: float
    errors: tuple[float, ...]


def fit_link(exchanges: Sequence[TimedExchange]) -> Link:
    """Fit the law of one kind of exchange by least squares of relative errors.

    Huber's weights, recomputed in each round, bound the influence of sizes that miss the law.
    """
    moved = np.array([own.moved_bytes for own in exchanges])
    took = np.array([own.seconds for own in exchanges])
    seen = np.array([not own.unseen for own in exchanges])
    rows: Floats = np.stack((1.0 / took, moved / took), axis=1)
    weight: Floats = np.ones(int(seen.sum()))
    law = _positive_law(rows[seen], weight)
    for _ in range(20):
        law = _positive_law(rows[seen], weight)
        weight[:] = NOISE / np.maximum(np.abs(rows[seen] @ law - 1.0), NOISE)
    errors = rows[~seen] @ law - 1.0
    first = exchanges[0]
    return Link(first.kind, first.ranks, float(law[0]), float(1.0 / law[1]), tuple(errors.tolist()))


def _positive_law(rows: Floats, weight: Floats) -> Floats:
    """Return (seconds, seconds per byte) that minimise Σ weight · (rows · law − 1)²; the first is
    at least 0, the second above it."""
    root = np.sqrt(weight)
    law: Floats = np.linalg.lstsq(rows * root[:, None], root, rcond=None)[0].astype(np.float64)
    if law[0] >= 0.0 and law[1] > 0.0:
        return law
    alone = 0 if law[1] <= 0.0 else 1
    column = rows[:, alone]
    only = np.array([0.0, 1e-15])
    only[alone] = float((weight * column).sum() / (weight * column * column).sum())
    return only


def with_links(profile: Profile, links: Iterable[Link]) -> Profile:
    """Return the profile with measured exchanges in the place of its own."""
    for link in links:
        field = "all_reduce" if link.kind == "all-reduce" else "p2p"
        values = {f"{field}_latency_s": link.latency_s, f"{field}_bytes_per_s": link.bytes_per_s}
        profile = msgspec.structs.replace(profile, **values)
    return profile


def misses(
    profile: Profile, samples: Iterable[Sample], shape: ModelShape, topology: Topology
) -> list[tuple[Sample, float]]:
    """Distinct batches with their median seconds, each with predicted / measured − 1."""
    of = Predictor(profile, shape, topology)
    batches, seconds = _medians((sample.entries, sample.seconds) for sample in samples)
    return [
        (Sample(entries, took_s), of.batch_s(entries) / took_s - 1.0)
        for entries, took_s in zip(batches, seconds, strict=True)
    ]


def _medians(measured: Iterable[tuple[K, float]]) -> tuple[list[K], list[float]]:
    """Distinct items and the median of their seconds, without invalid measurements."""
    times_of: dict[K, list[float]] = {}
    for item, seconds in measured:
        if item and math.isfinite(seconds) and seconds > 0.0:
            times_of.setdefault(item, []).append(seconds)
    return list(times_of), [float(np.median(times)) for times in times_of.values()]


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
    predicted: Callable[[Floats], Floats],
    theta: Floats,
    residual: Floats,
    noise: Floats,
    damping: float,
) -> Floats:
    """A damped Gauss-Newton step (Levenberg-Marquardt) with a numerical Jacobian."""
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
