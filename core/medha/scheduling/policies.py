"""The order of prefills: one pure function of a snapshot per policy.

A policy takes one KVP group's waiting prefills as arrays in order of deadline and returns a key for
each. The batch builder visits the smallest key first; ties go by (arrival, id). Policies differ in
nothing else, so that a comparison compares order alone.

`lars`, the default, is relative slack with the promise set. It has tiers, visited one after the
other, and is compiled (rows.c, `medha_order`), because replicas run it:

    -1  relegated, while they are owed time, in alternation: short ones, shortest first, and the one
        with the earliest deadline, so that none starves
     0  short ones that fit into the margin of every kept one due before: shortest first
     1  long kept ones that may run out of deadline order for one more batch: smallest ρ first
     2  other kept ones: earliest deadline first
     3  relegated ones: shortest remaining first

Relative slack (Medha, section 4.1): how urgent a prefill is, in proportion to its work.

    slack(t) = a + D − t − w(t)        w(t) = (T(n) − T(c0) + drain) / share
    ρ(t)     = slack(t) / max(W, w_min)

`a` arrival, `D` deadline after arrival, `W = w(a)`, `c0` the tokens that were handed to stage 0,
`share` the part of time that prefills get alongside decodes. `normaliser: work` divides by W (the
later paper), `deadline` by D (the earlier one and the public code). A slack that changes with time
never sits in a heap: keys are computed for a whole snapshot, once per round.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

import numpy as np

from medha.scheduling.native import ARRIVAL, Floats, Mask
from medha.scheduling.waiting_queue import Places, WaitingQueue

GUARANTEED, ABSORBED, SLACK, DEADLINE, RELEGATED = -1, 0, 1, 2, 3


def slack_s(due_in_s: Floats, work_s: Floats) -> Floats:
    """Return the seconds until work must start: arrays of [n], negative if it is too late."""
    return due_in_s - work_s


def normaliser_s(normaliser: str, total_work_s: float, deadline_s: float, floor_s: float) -> float:
    """Return the divisor of slack: total work W or deadline D, at least `floor_s` (w_min)."""
    return max(total_work_s if normaliser == "work" else deadline_s, floor_s)


def relative_slack(due_in_s: Floats, work_s: Floats, normaliser_s: Floats) -> Floats:
    """Return ρ of each request: arrays of [n]; smaller is more urgent."""
    return (due_in_s - work_s) / normaliser_s


def yielded(rho: Floats, most: float) -> Floats:
    """Return the part of the budget left to others: clamp(ρ, 0, ρ_max) (Algorithm 2)."""
    return np.clip(rho, 0.0, most)


@dataclass(slots=True)
class PrefillView:
    """The prefills of one group that may run at one moment; arrays of [n] by deadline.

    `rows`: their rows in `waiting`, which has columns that few policies need. `due_in_s`: time
    until the first token is due; `work_s`: remaining work w(t).
    """

    rows: Places
    waiting: WaitingQueue
    due_in_s: Floats
    work_s: Floats
    long: Mask
    max_yield: float


@dataclass(slots=True)
class PolicyKeys:
    """A key for each row of the view.

    `yields`: part of the budget that a long row leaves to others, per row.
    """

    keys: Floats
    yields: Floats | None = None


Policy = abc.Callable[[PrefillView], PolicyKeys]


def lars_paper(view: PrefillView) -> PolicyKeys:
    """Relative slack; a long prefill yields part of the budget (Algorithms 1 and 2)."""
    rho = relative_slack(view.due_in_s, view.work_s, view.waiting.norm_s[view.rows])
    return PolicyKeys(rho, np.where(view.long, yielded(rho, view.max_yield), 0.0))


def lars_paper_no_sharing(view: PrefillView) -> PolicyKeys:
    """Relative slack; a long prefill takes the budget whole."""
    return PolicyKeys(relative_slack(view.due_in_s, view.work_s, view.waiting.norm_s[view.rows]))


def lrs(view: PrefillView) -> PolicyKeys:
    """Least remaining slack."""
    return PolicyKeys(slack_s(view.due_in_s, view.work_s))


def edf(view: PrefillView) -> PolicyKeys:
    """Earliest deadline first."""
    return PolicyKeys(view.due_in_s)


def srpf(view: PrefillView) -> PolicyKeys:
    """Shortest remaining prefill first."""
    return PolicyKeys(view.work_s)


def fcfs(view: PrefillView) -> PolicyKeys:
    """First come, first served."""
    return PolicyKeys(view.waiting.values(ARRIVAL, view.rows))


POLICIES: dict[str, Policy] = {
    "lars-paper": lars_paper,
    "lars-paper-no-sharing": lars_paper_no_sharing,
    "lrs": lrs,
    "edf": edf,
    "srpf": srpf,
    "fcfs": fcfs,
}
