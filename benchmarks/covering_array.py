"""Covering array: few combinations of levels that contain every pair of levels.

Greedy and deterministic. The next combination is the one whose pairs were seen least: a pair seen k
times counts 8^-k, ties go to the first in the order of the full product. So the first rows cover
all pairs that can be had, and each later row evens out how often the pairs were seen.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

Combination = tuple[int, ...]
Pair = tuple[int, int, int, int]


def pairs(combination: Combination) -> Iterator[Pair]:
    """Yield (factor, level, other factor, level) of each two factors."""
    for (factor, level), (other, other_level) in itertools.combinations(enumerate(combination), 2):
        yield factor, level, other, other_level


def covering_array(
    levels: Sequence[int], count: int, feasible: Callable[[Combination], bool] = lambda _: True
) -> list[Combination]:
    """Return at least `count` feasible combinations that cover every feasible pair.

    `levels`: number of levels of each factor. Fewer than `count` only if no more are feasible.
    """
    left = [row for row in itertools.product(*map(range, levels)) if feasible(row)]
    uncovered = {pair for row in left for pair in pairs(row)}
    seen: Counter[Pair] = Counter()
    rows: list[Combination] = []
    while left and (uncovered or len(rows) < count):
        best = max(left, key=lambda row: sum(8.0 ** -seen[pair] for pair in pairs(row)))
        left.remove(best)
        rows.append(best)
        seen.update(pairs(best))
        uncovered.difference_update(pairs(best))
    return rows
