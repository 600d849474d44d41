"""Times of prefills alongside decodes.

While decodes run, no batch may be longer than a budget b, and the decodes take D of it:

    batch    | decodes D |  prefill b − D  |        b: what the TPOT targets allow

Every batch reads the whole prefix again, so that a deep prompt progresses far more slowly in short
batches than in proportion. So there are tables instead of a factor: seconds of wall time per token
at a prefix, for a few D between 0 and the decode capacity, summed up over the prefix. Between those
D the rate is interpolated. Each D is that of decodes of `TYPICAL_KEYS` that stand in the batch: a
chunk shares the tiles of its products with their rows.

The decode capacity C is the D at which prefills still run at `prefill_share` of their rate.

What the predictor has learned of batches with decodes and of those without differs. Prefills run in
both, so that the slower counts while anything decodes.
"""

from __future__ import annotations

import bisect
import math

from medha.predictor import BatchLoad, Predictor

LEVELS = 6
FRACTIONS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
"""Decode times for which there is a table, as parts of C."""
FIRST_KNOT, KNOT_RATIO = 1024, 1.08
TYPICAL_KEYS = 1024
LEAST_S = 1e-300  # no division by zero where nothing is left to do
MAX_STARVED_ROUNDS = 16  # a smallest chunk runs after this number of batches without a prefill
REMEMBERED = 4096
LONG_KEYS, LEAST_RATE = 1 << 17, 1.0
"""Depth at which the rates of two budgets are compared, and tokens per second that count at least.
"""
STALE = 0.02
"""Change of the predictor's correction after which the tables are built again."""
CERTAIN = 0.95
"""Part of a time that is left after corrections change by STALE, up and down."""


def decode_capacity_s(predictor: Predictor, budget_s: float, prefill_share: float) -> float:
    """C: decode seconds of a batch alongside which prefills keep `prefill_share` of their rate."""
    empty = predictor.load_alongside()
    chunk = predictor.largest_chunk(empty, 0, 1 << 20, budget_s, 1)
    if not chunk:
        return 0.0
    return max(0.0, budget_s - empty.seconds_with(max(1, int(prefill_share * chunk)), 0))


def slowed(predictor: Predictor, budget_s: float, shorter_s: float) -> float:
    """Return by which factor a long prefill takes longer in batches of a shorter budget."""
    if shorter_s >= budget_s:
        return 1.0
    return max(1.0, _rate(predictor, budget_s) / max(_rate(predictor, shorter_s), LEAST_RATE))


def _rate(predictor: Predictor, budget_s: float) -> float:
    """Return the tokens per second of a prefill after LONG_KEYS in batches of that budget."""
    return predictor.largest_chunk(predictor.load(), LONG_KEYS, 1 << 20, budget_s, 1) / budget_s


def between(levels: list[float], part: float) -> float:
    """Interpolate the seconds of all levels at a part of the decode capacity.

    A rate falls evenly as decodes take more of a batch, and time is its inverse. Beyond C time
    grows evenly.
    """
    upper = min(max(1, bisect.bisect_right(FRACTIONS, part)), LEVELS - 1)
    start, low, high = FRACTIONS[upper - 1], levels[upper - 1], levels[upper]
    way = (part - start) / (FRACTIONS[upper] - start)
    inside = min(way, 1.0)
    slowed = high / max(high - (high - low) * inside, LEAST_S)
    return low * slowed + (high - low) * (way - inside)


class PrefillTimes:
    """Seconds that a prefill takes in batches of `budget_s`, for LEVELS amounts of decodes.

    `capacity_s`: C, decode seconds of each batch and stage. `extended_tokens`: length of prompts up
    to which no table has to grow.
    """

    def __init__(self, predictor: Predictor, budget_s: float, capacity_s: float) -> None:
        self.predictor, self.budget_s, self.capacity_s = predictor, budget_s, capacity_s
        self.step = predictor.step_tokens
        self._corrections = predictor.prefill_corrections()
        self._limits = [budget_s - self.capacity_s * fraction for fraction in FRACTIONS]
        typical_s = predictor.decode_s(TYPICAL_KEYS)
        self._decodes = [int(self.capacity_s * fraction / typical_s) for fraction in FRACTIONS]
        self._knots: list[int] = []
        self._rates: list[list[float]] = []  # at each knot: seconds per token, by level
        self._sums: list[list[float]] = []  # up to each knot
        self._chunks = [[0, 0] for _ in range(LEVELS)]  # at the last knot, of `_loads`
        self.extended_tokens = 0
        self._known: dict[int, list[float]] = {}
        self._bounds: dict[int, tuple[float, float]] = {}
        self._add_knot(0)

    @property
    def outdated(self) -> bool:
        """The predictor has learned too much since the tables were built."""
        pairs = zip(self._corrections, self.predictor.prefill_corrections(), strict=True)
        changes = [abs(after - before) / before for before, after in pairs]
        return max(changes[0] + changes[1], changes[2] + changes[3]) > STALE

    def extend(self, tokens: int) -> None:
        """Extend the tables to the length of a prompt, unless it is one batch."""
        self.by_level(0, tokens)
        self.extended_tokens = max(self.extended_tokens, tokens)

    def by_level(self, start: int, end: int) -> list[float]:
        """Seconds for tokens `start` .. `end` of a prompt, for each level of decodes.

        A prompt of one chunk takes the time of its own batch, longer by the part of the decodes.
        """
        if end <= start:
            return [0.0] * LEVELS
        predictor, length = self.predictor, end - start
        keys, groups = predictor.shard(start)
        loads = self._loads()
        if length <= max(self.step, min(load.most(keys, self.budget_s)[0] for load in loads)):
            seconds = max(load.seconds_with(length, keys, groups, yields=True) for load in loads)
            if length <= self.step or seconds <= self.budget_s:
                return [seconds * self.budget_s / limit for limit in self._limits]
        ends, starts = self._up_to(end), self._up_to(start)
        return [ends[level] - starts[level] for level in range(LEVELS)]

    def alongside_s(self, start: int, end: int, part: float) -> float:
        """Seconds for the same tokens alongside decodes that take that part of the capacity."""
        return between(self.by_level(start, end), part)

    def bounds_s(self, tokens: int) -> tuple[float, float]:
        """Return what a prompt of that length takes at least and at most; the least if longer, too.

        In a fraction of the time of `by_level`: from lengths with the same first four binary
        digits, in a batch of their own and by the tables. (0, inf) if these would have to grow.
        """
        shift = max(0, tokens.bit_length() - 4)
        first = tokens >> shift << shift
        bounds = self._bounds.get(first)
        if bounds is None:
            last, loads = first + (1 << shift) - 1, self._loads()
            keys, groups = self.predictor.shard(0)
            least = min(load.seconds_with(first, keys, groups) for load in loads)
            most = max(load.seconds_with(last, keys, groups, yields=True) for load in loads)
            fit = CERTAIN * min(load.most(keys, self.budget_s)[0] for load in loads)
            one_batch = last <= fit and most <= CERTAIN * self.budget_s
            limit_s, bounds = self._limits[-1], (0.0, math.inf)
            if limit_s > 0.0 and (one_batch or self._knots[-1] >= last):
                most *= self.budget_s / limit_s
                if not one_batch:
                    least, most = min(least, *self._up_to(first)), max(most, *self._up_to(last))
                bounds = CERTAIN * least, most / CERTAIN
            self._bounds[first] = bounds
        return bounds

    def _up_to(self, tokens: int) -> list[float]:
        known = self._known.get(tokens)
        if known is not None:
            return known
        while self._knots[-1] < tokens:
            self._extend()
        at = bisect.bisect_left(self._knots, tokens)
        if self._knots[at] == tokens:
            sums = self._sums[at]
        else:
            low, high = self._knots[at - 1], self._knots[at]
            more, width = tokens - low, high - low
            before, rates, after = self._sums[at - 1], self._rates[at - 1], self._rates[at]
            sums = [
                before[level]
                + more * (rates[level] + 0.5 * more / width * (after[level] - rates[level]))
                for level in range(LEVELS)
            ]
        if len(self._known) >= REMEMBERED:
            self._known.clear()
        self._known[tokens] = sums
        return sums

    def _extend(self) -> None:
        """Add a knot; where another KVP group joins, one on either side."""
        last, size = self._knots[-1], self.predictor.tokens_per_group
        tokens = max(FIRST_KNOT, int(last * KNOT_RATIO))
        joins = (last // size + 1) * size
        if last % size == 0 and 0 < last < size * self.predictor.topology.kvp_max:
            tokens = last + 1
        elif last < joins < tokens and joins < size * self.predictor.topology.kvp_max:
            tokens = joins
        self._add_knot(tokens)

    def _add_knot(self, tokens: int) -> None:
        keys, groups = self.predictor.shard(tokens)
        if self.capacity_s:
            rates = [self._rate_s(keys, groups, level) for level in range(LEVELS)]
        else:
            rates = [self._rate_s(keys, groups, 0)] * LEVELS
        sums = [0.0] * LEVELS
        if self._knots:
            width, before, earlier = tokens - self._knots[-1], self._sums[-1], self._rates[-1]
            sums = [
                before[level] + 0.5 * width * (earlier[level] + rates[level])
                for level in range(LEVELS)
            ]
        self._bounds.clear()
        self._knots.append(tokens)
        self._rates.append(rates)
        self._sums.append(sums)

    def _rate_s(self, keys: int, groups: int, level: int) -> float:
        """Seconds of wall time per token, alongside the decodes of that level.

        Chunks are whole steps, so that batches are shorter than the budget. In a pipeline a batch
        waits for a longer one ahead: half of what it is shorter is lost.
        """
        slowest_s, count, chunks = 0.0, self._decodes[level], self._chunks[level]
        for at, load in enumerate(self._loads()):
            limit_s = self._limits[level]
            if count and load.decodes:
                load.add_decodes(count, count * TYPICAL_KEYS)
                limit_s = self.budget_s
            chunk = self.predictor.largest_chunk(
                load, keys, 1 << 20, limit_s, self.step, groups, near=chunks[at]
            )
            chunks[at] = chunk  # the next knot's is little shorter
            slowest_s = max(slowest_s, self._rate_of(chunk, load, keys, groups, limit_s))
        return slowest_s

    def _loads(self) -> list[BatchLoad]:
        """Return empty loads: alongside decodes if there may be any, and without."""
        predictor = self.predictor
        if not self.capacity_s:
            return [predictor.load()]
        alone = self._corrections[:2] != self._corrections[2:]  # else it is never slower
        return [predictor.load_alongside(), *([predictor.load()] if alone else [])]

    def _rate_of(
        self, chunk: int, load: BatchLoad, keys: int, groups: int, limit_s: float
    ) -> float:
        """Return the same in batches that hold `load` and a chunk."""
        predictor, step = self.predictor, self.step
        starved_s = MAX_STARVED_ROUNDS * self.budget_s / step
        if chunk < step:
            return starved_s
        short_s = limit_s - load.seconds_with(chunk, keys, groups)
        if predictor.topology.spp > 1:
            short_s = 0.5 * short_s
        return min(starved_s, (self.budget_s - short_s) / chunk)
