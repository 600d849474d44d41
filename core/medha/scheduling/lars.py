"""Length-aware relative slack: how urgent a prefill is, in proportion to its work.

    slack(t) = a + D − t − w(t)        w(t) = (T(n) − T(c0) + drain) / share
    ρ(t)     = slack(t) / max(W, w_min)

(Medha, section 4.1.) `a` arrival, `D` deadline after arrival, `W = w(a)`, `c0` the tokens that were
handed to stage 0, `share` the part of time that prefills get beside decodes. Smaller is more
urgent. `normaliser: work` divides by W (the later paper), `deadline` by D (the earlier one and the
public code). A slack that changes with time never sits in a heap: keys are computed for a whole
snapshot, once per round. Ties are broken by whoever sorts, by (arrival, id).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Places = npt.NDArray[np.intp]


def slack_s(due_in_s: Floats, work_s: Floats) -> Floats:
    """Seconds that may pass before work must start; arrays of [n], negative when too late."""
    return due_in_s - work_s


def normaliser_s(normaliser: str, total_work_s: float, deadline_s: float, floor_s: float) -> float:
    """What slack is divided by: total work W or deadline D, at least `floor_s` (w_min)."""
    return max(total_work_s if normaliser == "work" else deadline_s, floor_s)


def relative_slack(due_in_s: Floats, work_s: Floats, normaliser_s: Floats) -> Floats:
    """ρ of each request: arrays of [n]; smaller is more urgent."""
    return (due_in_s - work_s) / normaliser_s


def yielded(rho: Floats, most: float) -> Floats:
    """Part of the budget that a long prefill leaves to others: clamp(ρ, 0, ρ_max) (Algorithm 2)."""
    return np.clip(rho, 0.0, most)
