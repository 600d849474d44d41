"""In which order prefills are visited: a pure function of a snapshot, one per policy.

A policy sees one KVP group's waiting prefills as arrays in order of deadline and answers with a key
for each; the packer visits the smallest key first, ties by (arrival, id). Nothing else differs
between policies, so that comparing them compares order alone.

`lars`, the default, is relative slack with the promise set. It has tiers, visited one after the
other, and is compiled (lars.c, `medha_order`), for it is what replicas run:

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

from medha.scheduling.lars import Floats, Mask, Places, relative_slack, slack_s, yielded
from medha.scheduling.waiting import Waiting

OWED, ABSORBED, SLACK, DEADLINE, RELEGATED = -1, 0, 1, 2, 3


@dataclass(slots=True)
class View:
    """One group's prefills that may be packed at one moment; arrays of [n] by deadline.

    `rows`: which of the group's they are. `due_in_s` until the first token is due, `work_s`
    remaining work w(t). `waiting` has what few policies ask for, of all rows of the group.
    """

    rows: Places
    waiting: Waiting
    due_in_s: Floats
    work_s: Floats
    long: Mask
    max_yield: float


@dataclass(slots=True)
class Order:
    """A key for each row of the view. `yields`: part of the budget that a long one leaves to
    others, for each row.
    """

    keys: Floats
    yields: Floats | None = None


Policy = Callable[[View], Order]


def lars_paper(view: View) -> Order:
    """Relative slack; a long prefill yields part of the budget (Algorithms 1 and 2)."""
    rho = relative_slack(view.due_in_s, view.work_s, view.waiting.norm_s[view.rows])
    return Order(rho, np.where(view.long, yielded(rho, view.max_yield), 0.0))


def lars_paper_no_sharing(view: View) -> Order:
    """Relative slack; a long prefill takes the budget whole."""
    return Order(relative_slack(view.due_in_s, view.work_s, view.waiting.norm_s[view.rows]))


def lrs(view: View) -> Order:
    """Least remaining slack."""
    return Order(slack_s(view.due_in_s, view.work_s))


def edf(view: View) -> Order:
    """Earliest deadline first."""
    return Order(view.due_in_s)


def srpf(view: View) -> Order:
    """Shortest remaining prefill first."""
    return Order(view.work_s)


def fcfs(view: View) -> Order:
    """First come, first served."""
    return Order(view.waiting.arrival_s[view.rows])


POLICIES: dict[str, Policy] = {
    "lars-paper": lars_paper,
    "lars-paper-no-sharing": lars_paper_no_sharing,
    "lrs": lrs,
    "edf": edf,
    "srpf": srpf,
    "fcfs": fcfs,
}
