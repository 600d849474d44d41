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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from medha.scheduling.lars import Floats, Mask, Places, relative_slack, slack_s, yielded
from medha.scheduling.waiting import Waiting

OWED, ABSORBED, SLACK, DEADLINE, RELEGATED = -1, 0, 1, 2, 3


@dataclass(slots=True)
class View:
    """One group's prefills that may be packed at one moment; arrays of [n] by deadline.

    `rows`: which of the group's they are. `due_in_s` until the first token is due, `work_s`
    remaining work w(t), `allowance_s` what may be done out of deadline order (see `promises`),
    `least_s` the same for whoever is due last of all, `guard_s` the part of it that does not count.
    `owed`: the relegated have their share coming; `owed_to_short`: it is the turn of the short
    ones. `waiting` has what few policies ask for, of all rows of the group.
    """

    rows: Places
    waiting: Waiting
    due_in_s: Floats
    work_s: Floats
    long: Mask
    kept: Mask
    allowance_s: Floats
    least_s: float
    guard_s: float
    owed: bool
    owed_to_short: bool
    max_yield: float


Tier = tuple[int, Places, Floats]


@dataclass(slots=True)
class Order:
    """Tiers ascending, each with its places in the view and a key for each of those; they may come
    lazily, as a batch rarely gets to the last. `yields`: part of the budget that a long one leaves
    to others, for each row.
    """

    tiers: Iterable[Tier]
    yields: Floats | None = None


Policy = Callable[[View], Order]


def lars(view: View) -> Order:
    """Relative slack with the promise set (the tiers above)."""
    return Order(_lars(view))


def _lars(view: View) -> Iterator[Tier]:
    kept, work, long = view.kept, view.work_s, view.long
    room = view.allowance_s - view.guard_s
    absorbed = np.greater(room >= work, long)
    owed = _owed(view) if view.owed else None
    if owed is not None:
        yield OWED, owed, work[owed]
        absorbed[owed] = False
    at: Places = absorbed.nonzero()[0]
    if len(at):
        yield ABSORBED, at, work[at]
    urgent = long & kept
    at = (urgent & (room >= 0.0)).nonzero()[0]
    others = np.greater(kept, absorbed)
    if len(at):
        others[at] = False
        yield (
            SLACK,
            at,
            relative_slack(view.due_in_s[at], work[at], view.waiting.norm_s[view.rows[at]]),
        )
    at = others.nonzero()[0]
    if len(at):
        yield DEADLINE, at, view.due_in_s[at]
    relegated = ~(kept | absorbed)
    if owed is not None:
        relegated[owed] = False
    at = relegated.nonzero()[0]
    if len(at):
        yield RELEGATED, at, work[at]


def _owed(view: View) -> Places | None:
    """The relegated whose turn it is: the short ones, or else whoever is due first."""
    relegated = ~view.kept
    if view.owed_to_short:
        short: Places = np.greater(relegated, view.long).nonzero()[0]
        if len(short):
            return short
    first: Places = relegated.nonzero()[0][:1]
    return first if len(first) else None


def lars_paper(view: View) -> Order:
    """Relative slack; a long prefill yields part of the budget (Algorithms 1 and 2)."""
    rho = relative_slack(view.due_in_s, view.work_s, view.waiting.norm_s[view.rows])
    return Order(_one(rho), np.where(view.long, yielded(rho, view.max_yield), 0.0))


def lars_paper_no_sharing(view: View) -> Order:
    """Relative slack; a long prefill takes the budget whole."""
    return Order(_one(relative_slack(view.due_in_s, view.work_s, view.waiting.norm_s[view.rows])))


def lrs(view: View) -> Order:
    """Least remaining slack."""
    return Order(_one(slack_s(view.due_in_s, view.work_s)))


def edf(view: View) -> Order:
    """Earliest deadline first."""
    return Order(_one(view.due_in_s))


def srpf(view: View) -> Order:
    """Shortest remaining prefill first."""
    return Order(_one(view.work_s))


def fcfs(view: View) -> Order:
    """First come, first served."""
    return Order(_one(view.waiting.arrival_s[view.rows]))


POLICIES: dict[str, Policy] = {
    "lars": lars,
    "lars-paper": lars_paper,
    "lars-paper-no-sharing": lars_paper_no_sharing,
    "lrs": lrs,
    "edf": edf,
    "srpf": srpf,
    "fcfs": fcfs,
}


def _one(keys: Floats) -> tuple[Tier]:
    return ((ABSORBED, np.arange(len(keys)), keys),)
