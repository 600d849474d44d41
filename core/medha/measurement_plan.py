"""Measurement plan of `medha calibrate`, and the messages of the process that measures.

The plan for a model shape within given bounds: operators of a layer, whole batches to fit, and
mixed batches that validate the fit. Sizes are spread evenly over orders of magnitude and are
deterministic. The process with the device (`python -m medha_worker.profiler`) follows the plan and
writes lines of `MeasurementMessage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from medha.calibration import Entries, Operator
from medha.model import ModelShape

# Fractional parts of multiples of these fill a square evenly (Roberts' R2 sequence).
_FIRST, _SECOND = 0.7548776662466927, 0.5698402909980532
UNSEEN = 32
DECODES = (1, 4, 16, 64)


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Upper bounds: `rows` of a batch, `keys` of a context (multiples of `page_tokens`)."""

    rows: int
    keys: int
    page_tokens: int
    pool_tokens: int


class MeasurementPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    operators: tuple[Operator, ...]
    batches: tuple[Entries, ...]
    unseen: tuple[Entries, ...]

    @property
    def items(self) -> int:
        return len(self.operators) + len(self.batches) + len(self.unseen)


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Start of measuring: machine, model and plan. `copy_bytes_per_s`: rate of a memory copy."""

    machine: str
    shape: ModelShape
    plan: MeasurementPlan
    copy_bytes_per_s: float


class Rounds(msgspec.Struct, frozen=True, tag=True):
    """Number of rounds, known after the first round."""

    count: int


class Measured(msgspec.Struct, frozen=True, tag=True):
    """Seconds of item `index` of the plan, counted across its three lists."""

    index: int
    seconds: float


MeasurementMessage = Begun | Rounds | Measured


def plan_for(shape: ModelShape, bounds: Bounds) -> MeasurementPlan:
    """MeasurementPlan for one rank that holds the whole model."""
    seen = tuple(dict.fromkeys(_batches(bounds)))
    unseen = [mixed for mixed in _mixed(bounds) if mixed not in seen]
    return MeasurementPlan(
        operators=tuple(dict.fromkeys(_operators(shape, bounds))),
        batches=seen,
        unseen=tuple(dict.fromkeys(unseen)),
    )


def exchange_sizes(largest_bytes: int) -> Iterator[tuple[int, bool]]:
    """Yield the bytes of exchanged tensors, and whether the fit must not see them."""
    for size in _powers(4 << 10, largest_bytes):
        yield size, False
        if 3 * size // 2 < largest_bytes:
            yield 3 * size // 2, True


def _operators(shape: ModelShape, bounds: Bounds) -> Iterator[Operator]:
    rows = _powers(1, bounds.rows)
    for count in rows:
        yield Operator("linear", count)
    for count in rows:
        if count >= 16:
            yield Operator("elementwise", count)
    shards = [1]
    if shape.heads % 2 == 0 and shape.kv_heads % 2 == 0:
        shards.append(2)
    for tp in shards:
        for keys in _contexts(bounds):
            for count in (16, 64, 256, bounds.rows):
                yield Operator("attention", min(count, bounds.rows), keys, tp)
            for count in DECODES[:-1]:
                if keys and count * (keys + bounds.page_tokens) <= bounds.pool_tokens:
                    yield Operator("decode", count, keys, tp)


def _batches(bounds: Bounds) -> Iterator[Entries]:
    for length in _powers(16, bounds.rows):
        yield ((length, 0, False),)
    for keys in _contexts(bounds):
        for length in (32, 128, bounds.rows):
            yield ((min(length, bounds.rows), keys, False),)
        for count in DECODES:
            if count <= bounds.rows:
                yield from _fitting(((1, keys, True),) * count, bounds)
    small = _whole(bounds.keys // 16, bounds)
    yield from _fitting(((min(128, bounds.rows // 2), 0, False), *((1, small, True),) * 8), bounds)


def _mixed(bounds: Bounds) -> Iterator[Entries]:
    """Mix chunks of one or two prompts with decodes, in all sizes."""
    for index in range(1, UNSEEN + 1):
        u, v = index * _FIRST % 1.0, index * _SECOND % 1.0
        decodes = round(bounds.rows ** (0.5 * v)) - (index % 3 == 0)
        left = max(bounds.rows - decodes, 16)
        length = min(left, round(16 * (left / 16) ** u))
        entries = [(length, _whole(bounds.keys**v, bounds) if index % 4 else 0, False)]
        if index % 2 and left - length >= 16:
            entries.append((round(16 * ((left - length) / 16) ** v), 0, False))
        for number in range(decodes):
            keys = _whole(bounds.keys ** ((u + number * _SECOND) % 1.0), bounds)
            entries.append((1, keys, True))
        while entries and not list(_fitting(tuple(entries), bounds)):
            entries.pop()
        yield tuple(entries)


def _contexts(bounds: Bounds) -> list[int]:
    return [0, *(_whole(bounds.keys // part, bounds) for part in (16, 4, 1))]


def _whole(keys: float, bounds: Bounds) -> int:
    """Round down to full pages."""
    return int(keys) // bounds.page_tokens * bounds.page_tokens


def _fitting(entries: Entries, bounds: Bounds) -> Iterator[Entries]:
    """Yield the batch if it fits into the pool."""
    T = bounds.page_tokens
    if sum(math.ceil((keys + length) / T) * T for length, keys, _ in entries) <= bounds.pool_tokens:
        yield entries


def _powers(least: int, most: int) -> list[int]:
    count = max(0, math.floor(math.log2(max(most, least) / least)))
    return sorted({*(least << index for index in range(count + 1)), max(most, least)})
