"""Who may be dropped from the promise set: of each length bucket only a part, over the last while.

Dropping the largest keeps the most deadlines, and always at the cost of the longest prompts. Hence
a cap: a bucket (of prompt tokens, as in reports and metrics) that has lost its part is spared.

    displaced + 1 ≤ most × decided        requests of the bucket, old ones fading with `MEMORY_S`

Victims then come from other buckets, and no promise is given that would cost a spared one its
place. Two things stand above the cap: a promise that was given, where nobody else can give way to
it, and arithmetic: who cannot make the deadline even alone is nobody's loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from medha.metrics import LENGTH_LABELS, length_bucket
from medha.scheduling.lars import Floats, Mask, Places
from medha.scheduling.promises import largest_feasible
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting import Waiting

MEMORY_S = 600.0
FREE = len(LENGTH_LABELS)
"""The bucket of those that may go at no loss."""
ROUNDING = 1e-9


class Losses:
    """What was decided and displaced by length bucket. `most` is the part that may be displaced, 1:
    any. `displaced`: how many were, ever, by bucket; a request counts once."""

    def __init__(self, most: float) -> None:
        self.most, self.capped = most, most < 1.0
        self.displaced = [0] * FREE
        self._decided = [0.0] * FREE
        self._lost = [0.0] * FREE
        self._as_of_s = 0.0

    def decide(self, sequence: Sequence, now: float) -> None:
        """A request was taken; whether it keeps its place is being decided from now on."""
        self._fade(now)
        self._decided[length_bucket(sequence.request.prompt_tokens)] += 1.0

    def lose(self, sequence: Sequence, now: float) -> None:
        """A request was displaced by others."""
        if sequence.displaced:
            return
        self._fade(now)
        sequence.displaced = True
        bucket = length_bucket(sequence.request.prompt_tokens)
        self._lost[bucket] += 1.0
        self.displaced[bucket] += 1

    def left(self, now: float) -> list[float]:
        """How many more each bucket may lose now; without end for `FREE`."""
        self._fade(now)
        pairs = zip(self._decided, self._lost, strict=True)
        return [*(math.floor(self.most * n - lost + ROUNDING) for n, lost in pairs), math.inf]

    def buckets(self, waiting: Waiting, due_in_s: Floats, cost_s: Floats) -> Places:
        """The bucket of each row: FREE once it was displaced, or when it is too late for it."""
        found = np.fromiter(
            (
                FREE if one.displaced else length_bucket(one.request.prompt_tokens)
                for one in waiting.sequences
            ),
            dtype=np.intp,
            count=len(waiting),
        )
        found[cost_s > due_in_s] = FREE
        return found

    def spared(self, waiting: Waiting, due_in_s: Floats, cost_s: Floats, now: float) -> Mask:
        """Rows whose bucket has lost its part."""
        full: Mask = np.array(self.left(now)) < 1.0
        return full[self.buckets(waiting, due_in_s, cost_s)]

    def drop(
        self, waiting: Waiting, terms: Callable[[], tuple[Floats, Floats]], now: float, most: int,
        lower: Callable[[Sequence], None], victims: Callable[[int, Mask | None], list[int]],
    ) -> int:  # fmt: skip
        """`lower` whom `victims(at most, spared)` names, one at a time where each may spare the
        next; at most so many in all. Returns how many. `terms`: (due in, cost) of the rows."""
        count, step = 0, 1 if self.capped else most
        while count < most:
            spared = self.spared(waiting, *terms(), now) if self.capped else None
            places = victims(step, spared)
            due_in_s, cost_s = terms() if places else (waiting.due_s, waiting.work_s)
            for place in places:
                lower(waiting.sequences[place])
                if cost_s[place] <= due_in_s[place]:
                    self.lose(waiting.sequences[place], now)
            count += len(places)
            if len(places) < step:
                break
        return count

    def largest(self, waiting: Waiting, due_in_s: Floats, cost_s: Floats, now: float) -> Mask:
        """The largest set that can be done in time, as far as the cap allows; who is not in it is
        displaced."""
        if self.capped:
            bucket = self.buckets(waiting, due_in_s, cost_s)
            kept = largest_feasible(due_in_s, cost_s, bucket, self.left(now))
        else:
            kept = largest_feasible(due_in_s, cost_s)
        for place in np.flatnonzero(~kept & (cost_s <= due_in_s)).tolist():
            self.lose(waiting.sequences[place], now)
        return kept

    def _fade(self, now: float) -> None:
        if now > self._as_of_s:
            faded = math.exp((self._as_of_s - now) / MEMORY_S)
            self._as_of_s = now
            self._decided = [faded * count for count in self._decided]
            self._lost = [faded * count for count in self._lost]
