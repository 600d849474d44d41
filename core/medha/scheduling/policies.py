"""In which order prefills are visited: a pure function of a snapshot, one per policy.

A policy sees one KVP group's waiting prefills as arrays in order of deadline and answers with a
tier and a key for each; the packer visits tiers ascending, in each the smallest key first, ties by
(arrival, id). Nothing else differs between policies, so that comparing them compares order alone.

`lars`, the default, is relative slack with the promise set:

    -1  relegated, while their guaranteed share is owed, by turns: short ones, shortest first, and
        the one of the earliest deadline, so that none starves
     0  short ones that fit into the margin of every kept one due before: shortest first
     1  long kept ones that may run out of deadline order for one more batch: smallest ρ first
     2  other kept ones: earliest deadline first
     3  relegated ones: shortest remaining first
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medha.scheduling.lars import Floats, Mask, relative_slack, slack_s, yielded

OWED, ABSORBED, SLACK, DEADLINE, RELEGATED = -1, 0, 1, 2, 3


@dataclass(slots=True)
class View:
    """One group's prefills that may be packed at one moment; arrays of [n] by deadline.

    `due_in_s` until the first token is due, `work_s` remaining work w(t), `norm_s` what slack is
    divided by, `allowance_s` what may be done out of deadline order (see `promises`), `least_s` the
    same for whoever is due last of all, `guard_s` the part of it that does not count. `owed`: the
    relegated have their share coming; `owed_to_short`: it is the turn of the short ones.
    """

    due_in_s: Floats
    arrival_s: Floats
    work_s: Floats
    norm_s: Floats
    long: Mask
    kept: Mask
    allowance_s: Floats
    least_s: float
    guard_s: float
    owed: bool
    owed_to_short: bool
    max_yield: float


@dataclass(slots=True)
class Order:
    """Tier and key of each row; `yields`: part of the budget that a long one leaves to others."""

    tiers: npt.NDArray[np.int8]
    keys: Floats
    yields: Floats | None = None


Policy = Callable[[View], Order]


def lars(view: View) -> Order:
    """Relative slack with the promise set (the tiers above)."""
    kept, work = view.kept, view.work_s
    room = view.allowance_s - view.guard_s
    slack = view.long & kept & (room >= 0.0)
    absorbed = (room >= work) & ~view.long
    tiers = np.int8(RELEGATED) - kept.astype(np.int8) - slack
    tiers *= ~absorbed
    keys = np.where(kept & ~absorbed, view.due_in_s, work)
    if slack.any():
        keys = np.where(slack, relative_slack(view.due_in_s, work, view.norm_s), keys)
    if view.owed and len(work):
        relegated = ~kept
        place = int(relegated.argmax())
        if relegated[place]:
            short = relegated & ~view.long
            if view.owed_to_short and short.any():
                tiers[short] = OWED
            else:
                tiers[place] = OWED
    return Order(tiers, keys)


def lars_paper(view: View) -> Order:
    """Relative slack; a long prefill yields part of the budget (Algorithms 1 and 2)."""
    rho = relative_slack(view.due_in_s, view.work_s, view.norm_s)
    return Order(_one_tier(view), rho, np.where(view.long, yielded(rho, view.max_yield), 0.0))


def lars_paper_no_sharing(view: View) -> Order:
    """Relative slack; a long prefill takes the budget whole."""
    return Order(_one_tier(view), relative_slack(view.due_in_s, view.work_s, view.norm_s))


def lrs(view: View) -> Order:
    """Least remaining slack."""
    return Order(_one_tier(view), slack_s(view.due_in_s, view.work_s))


def edf(view: View) -> Order:
    """Earliest deadline first."""
    return Order(_one_tier(view), view.due_in_s)


def srpf(view: View) -> Order:
    """Shortest remaining prefill first."""
    return Order(_one_tier(view), view.work_s)


def fcfs(view: View) -> Order:
    """First come, first served."""
    return Order(_one_tier(view), view.arrival_s)


POLICIES: dict[str, Policy] = {
    "lars": lars,
    "lars-paper": lars_paper,
    "lars-paper-no-sharing": lars_paper_no_sharing,
    "lrs": lrs,
    "edf": edf,
    "srpf": srpf,
    "fcfs": fcfs,
}


def _one_tier(view: View) -> npt.NDArray[np.int8]:
    return np.zeros(len(view.work_s), dtype=np.int8)
