"""Online corrections of the predictor: per regime, a factor for attention and one for the rest.

    seconds = factor · (rest + skew · attention)      per regime

A single factor cannot fit small and large batches at once: small ones are mostly linear layers and
fixed costs, large ones mostly attention over the context, and a machine can deviate from its
profile in only one of them. The error of a batch is split between both factors in proportion to
their share of its time. A regime without measurements follows the nearest measured one.
"""

from __future__ import annotations

import math

REGIMES = ("decode", "decode-shared", "mixed", "mixed-shared", "prefill", "prefill-shared")
MIXED, PREFILL = 2, 4
# (regime, the regime that it follows until it is measured), in order of update.
_FOLLOWERS = ((1, 0), (MIXED, PREFILL), (3, MIXED), (5, PREFILL))

# Factors, skews, batches seen, relative errors: each by regime.
Row = tuple[float, ...]
Learned = tuple[Row, Row, Row, Row]

# Weight of a batch in a settled regime is 1 / SETTLED; the first batches weigh more.
SETTLED = 10
# Ratio at which a sample is clipped, so that a pause of the machine changes little.
MOST_RATIO = 2.0
LOWEST, HIGHEST = 1.0 / 1024.0, 1024.0


class Corrections:
    """Factors by regime, changed in place: `Costs` reads the same lists."""

    __slots__ = ("errors", "factors", "seen", "skews")

    def __init__(self, error: float) -> None:
        count = len(REGIMES)
        self.factors, self.skews = [1.0] * count, [1.0] * count
        self.seen, self.errors = [0.0] * count, [error] * count

    def observe(self, regime: int, predicted_s: float, measured_s: float, attention: float) -> None:
        """Learn from a batch; `attention` is the share of attention in `predicted_s`, in [0, 1].

        The logarithm of the ratio is distributed along its gradient, so a settled regime's
        prediction moves by at least a tenth of the miss and each factor by at most 7 % of itself.
        """
        if predicted_s <= 0.0 or measured_s <= 0.0:
            return
        miss = math.log(measured_s / predicted_s)
        most = math.log(MOST_RATIO)
        rest = 1.0 - attention
        step = max(1.0 / SETTLED, 1.0 / (2.0 + self.seen[regime])) * min(most, max(-most, miss))
        step /= attention * attention + rest * rest
        self._set(
            regime,
            self.factors[regime] * math.exp(step * rest),
            self.factors[regime] * self.skews[regime] * math.exp(step * attention),
        )
        self.seen[regime] += 1.0
        for follower, leader in _FOLLOWERS:
            if not self.seen[follower]:
                self.factors[follower] = self.factors[leader]
                self.skews[follower] = self.skews[leader]
        self.errors[regime] += 0.05 * (min(1.0, abs(miss)) - self.errors[regime])

    def learned(self) -> Learned:
        """State that observation changed."""
        return tuple(self.factors), tuple(self.skews), tuple(self.seen), tuple(self.errors)

    def restore(self, learned: Learned) -> None:
        """Replace the state by another predictor's."""
        self.factors[:], self.skews[:], self.seen[:], self.errors[:] = learned

    def _set(self, regime: int, factor: float, attention_factor: float) -> None:
        factor, other = (min(HIGHEST, max(LOWEST, value)) for value in (factor, attention_factor))
        self.factors[regime], self.skews[regime] = factor, other / factor
