"""How many replicas a model wants, from what its routers and controllers said lately.

Decides from signals, one look after another; what it must remember it is given and gives back. The
operator acts on it, the simulator repeats it from the same signals: no clock, no client.

    up     relative slack at arrival (P10 over all offered requests, refused ones included) is below
           the target, or a class misses its SLO, by so much for so long that noise is no reason
           (a sum of what is missing, see SHORT): one more at least, as many as the offered work
           fills. Never a second time for what replicas that are still starting may relieve
    down   to what the work needs, by half at the most, once nothing more was needed for the whole
           stabilisation, and never sooner than it takes to start a replica again. Where fewer
           turned out to be too few, the next time takes twice as long
    hold   between the two, and whenever a source has not been heard of: no news is no idleness

An empty queue with fresh reports is no pressure. A request that waits while there is no replica
brings the first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

FULL, ROOMY = 0.8, 0.6
"""Share of its time that a replica is planned to be filled with; a fleet is made smaller only when
what remains is filled to ROOMY at most."""
ATTAINED = 0.9
"""A class that met less of its SLO asks for more."""
ENOUGH_ARRIVED, ENOUGH_ENDED = 4, 10
"""So many requests say what the load is; what fewer say counts for less, by their number."""
BAND = 0.25
"""Share of the target (and at least 0.05) within which slack counts as on target."""
SHORT, MISSED = 20.0, 0.5
"""What is missing to the target, times the seconds for which it is, until replicas are added: 20 s
of refusals, 45 s at a slack of -0.3. A missed SLO counts as so much of slack."""
SETTLES_S, STUCK_S = 30.0, 300.0
"""Signals look back so far: what they say of a fleet that changed counts from then on. Replicas
that do not start for STUCK_S, or twice their usual time, are waited for no longer."""
MOST_REGRETS = 3
"""A fleet that was made too small again and again is left alone for eight times as long."""
LONG_AGO_S = 1e12
MODEST = 0.1
"""A tenth less slack than an idle replica would leave is as good as can be asked for."""
GAP_S = 60.0
"""Nobody looked for so long: what was seen before says nothing of the time between."""

Why = Literal[
    "Enough", "NoData", "FirstRequest", "LittleSlack", "MissedSlo", "Starting", "Stabilising",
    "Surplus", "AtMaximum", "NoRoom", "Bounds",
]  # fmt: skip


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a resource asks for: bounds, target, and for how long a surplus must last (seconds)."""

    least: int
    most: int
    target_slack: float
    down_after_s: float

    @property
    def band(self) -> float:
        return max(0.05, BAND * abs(self.target_slack))


class ClassShare(msgspec.Struct, frozen=True):
    """Requests of one class that ended lately."""

    name: str
    met: int
    missed: int

    @property
    def misses(self) -> float:
        """How much it says that the class misses its SLO, 0 to 1."""
        ended = self.met + self.missed
        return min(1.0, ended / ENOUGH_ENDED) if self.met < ATTAINED * ended else 0.0


class Signals(msgspec.Struct, frozen=True, kw_only=True):
    """One look. `current` replicas are asked for and `ready` serve.

    `slack_p10` None: nobody arrived, else it is that of `arrived` requests. `alone_p10`: what an
    idle replica would have left to the same ones; None: not known. `offered`: prefill seconds that
    arrive in a second, refused ones included, so how many replicas they fill; `backlog_s`: those
    that wait; `held`: requests that find no replica; `busy`: that wait or run; `kv_filled`: how
    many ready replicas the pages in use fill, each counted by its own.
    `fresh` False: a source was not heard of lately. `room` False: a replica finds no place.
    """

    at_s: float
    current: int
    ready: int
    fresh: bool = True
    slack_p10: float | None = None
    arrived: int = 0
    alone_p10: float | None = None
    offered: float = 0.0
    backlog_s: float = 0.0
    held: int = 0
    busy: int = 0
    kv_filled: float = 0.0
    classes: tuple[ClassShare, ...] = ()
    cold_start_s: float = 60.0
    room: bool = True


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of former looks: since when without a gap, `short` so far, and the highest need of each later
    moment (falling).

    `current`: replicas asked for, of which `most` were ready at once. Times: `waits_s`, from when
    replicas that start are waited for; `whole_s`, since when all are ready (None: they are not);
    `fewer_s`, when there were last made fewer; `came_s`, when somebody was last there. `regrets`:
    how often, lately, fewer were too few.
    """

    since_s: float = 0.0
    last_s: float = -LONG_AGO_S
    short: float = 0.0
    needs: tuple[tuple[float, int], ...] = ()
    current: int = 0
    most: int = 0
    waits_s: float = -LONG_AGO_S
    whole_s: float | None = -LONG_AGO_S
    fewer_s: float = -LONG_AGO_S
    came_s: float = -LONG_AGO_S
    regrets: int = 0


class Decision(msgspec.Struct, frozen=True):
    """As many replicas, and why; `message` tells a person the numbers."""

    replicas: int
    why: Why
    message: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A look as it is kept, to be decided again elsewhere."""

    policy: Policy
    signals: Signals
    decision: Decision


def decide(policy: Policy, memory: Memory, signals: Signals) -> tuple[Decision, Memory]:
    """The replicas that are wanted now, and what to remember for the next look."""
    policy = _attainable(policy, signals)
    memory = _seen(policy, memory, signals)
    if signals.held and not signals.current and policy.most:
        first = Decision(max(1, policy.least), "FirstRequest", _told(signals))
        return first, _needs(policy, memory, signals, first.replicas)
    wanted = _wanted(policy, memory, signals)
    need = wanted.replicas
    memory = _needs(policy, memory, signals, need)
    if need < signals.current:
        wanted = _down(policy, memory, signals)
    return _bounded(policy, wanted, signals), memory


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Looks, one after another, and what was remembered before the first."""

    memory: Memory = Memory()
    looks: tuple[Record, ...] = ()

    def noted(self, look: Record, most: int) -> Journal:
        """With one look more, of at most so many."""
        memory, looks = self.memory, (*self.looks, look)
        while len(looks) > most:
            _, memory = decide(looks[0].policy, memory, looks[0].signals)
            looks = looks[1:]
        return Journal(memory=memory, looks=looks)


def replay(journal: Journal) -> list[Decision]:
    """What is decided about the same signals."""
    memory, found = journal.memory, []
    for record in journal.looks:
        decision, memory = decide(record.policy, memory, record.signals)
        found.append(decision)
    return found


def quantile(edges: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which `share` of a histogram's observations lie, linear within a bucket.

    `counts` has one bucket more than `edges` (beyond the last); None for an empty one.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0.0
    for place, count in enumerate(counts):
        if count and below + count >= rank:
            if place == 0 or place == len(edges):
                return edges[min(place, len(edges) - 1)]
            low, high = edges[place - 1], edges[place]
            return low + (high - low) * (rank - below) / count
        below += count
    return edges[-1]


def _attainable(policy: Policy, now: Signals) -> Policy:
    """No load is to blame for a slack that not even an idle replica would have left."""
    return msgspec.structs.replace(policy, target_slack=min(policy.target_slack, _best(now)))


def _best(now: Signals) -> float:
    """The most slack that may be asked of any number of replicas."""
    if now.alone_p10 is None:
        return math.inf
    return now.alone_p10 - MODEST * abs(now.alone_p10)


def _seen(policy: Policy, memory: Memory, now: Signals) -> Memory:
    """The memory with this look in it."""
    passed_s = now.at_s - memory.last_s
    if not 0.0 <= passed_s <= GAP_S:
        memory, passed_s = _afresh(now), 0.0
    memory = _readiness(_changed(policy, memory, now), now)
    short = memory.short
    if not _settled(memory, now):
        short = 0.0  # what is heard was said of another fleet
    elif now.fresh:
        short = max(0.0, min(SHORT, short + passed_s * _missing(policy, now)))
    came_s = now.at_s if now.busy or now.slack_p10 is not None else memory.came_s
    return msgspec.structs.replace(memory, last_s=now.at_s, short=short, came_s=came_s)


def _afresh(now: Signals) -> Memory:
    """Nothing is known of the time before this look, but that replicas that start are new."""
    lacks = now.ready < now.current
    return Memory(
        since_s=now.at_s,
        current=now.current,
        most=now.ready,
        waits_s=now.at_s if lacks else -LONG_AGO_S,
        whole_s=None if lacks else -LONG_AGO_S,
    )


def _changed(policy: Policy, memory: Memory, now: Signals) -> Memory:
    """Another number of replicas is asked for: what it says of the change before."""
    if now.current == memory.current:
        return memory
    fewer_s, regrets = memory.fewer_s, memory.regrets
    if now.current < memory.current:
        fewer_s = now.at_s
    elif memory.current:  # from none, a first request is no regret
        soon = now.at_s - fewer_s <= 2.0 * _window_s(policy, memory, now)
        regrets = min(MOST_REGRETS, regrets + 1) if soon else max(0, regrets - 1)
    return msgspec.structs.replace(
        memory, current=now.current, most=now.ready, waits_s=now.at_s, fewer_s=fewer_s,
        regrets=regrets,
    )  # fmt: skip


def _readiness(memory: Memory, now: Signals) -> Memory:
    """One that comes and goes, never all of them ready for as long as signals look back, does not
    make us wait anew each time."""
    whole_s, waits_s = memory.whole_s, memory.waits_s
    if now.ready >= now.current:
        whole_s = now.at_s if whole_s is None else whole_s
    else:
        if whole_s is not None and now.at_s - whole_s >= SETTLES_S:
            waits_s = now.at_s
        whole_s = None
    if now.ready > memory.most:
        waits_s = now.at_s
    return msgspec.structs.replace(
        memory, whole_s=whole_s, waits_s=waits_s, most=max(memory.most, now.ready)
    )


def _settled(memory: Memory, now: Signals) -> bool:
    """What is heard was said of the replicas that there are, and no more will come soon."""
    waited_s = now.at_s - memory.waits_s
    if memory.whole_s is not None and now.at_s - memory.whole_s >= SETTLES_S <= waited_s:
        return True
    return waited_s >= max(STUCK_S, 2.0 * now.cold_start_s)


def _missing(policy: Policy, now: Signals) -> float:
    """Slack that is missing to the target's band; negative: there is more than enough."""
    missing, missed = -MISSED, MISSED * max((each.misses for each in now.classes), default=0.0)
    if now.slack_p10 is not None:
        missing = max(-1.0, min(1.0, policy.target_slack - policy.band - now.slack_p10))
    if missing > 0.0:
        missing *= min(1.0, now.arrived / ENOUGH_ARRIVED)
    return max(missing, missed) if missed else missing


def _wanted(policy: Policy, memory: Memory, now: Signals) -> Decision:
    """What this look alone asks for, before bounds and stabilisation."""
    if not now.fresh:
        return Decision(now.current, "NoData", "routers or controllers have not reported lately")
    load = now.offered + now.backlog_s / max(60.0, now.cold_start_s)
    if memory.short >= SHORT:
        missed = [each.name for each in now.classes if each.misses]
        about = f"class {', '.join(missed)} misses its SLO; " if missed else ""
        more = min(2 * now.current, max(now.current + 1, math.ceil(load / FULL)))
        short = now.slack_p10 is not None and now.slack_p10 < policy.target_slack - policy.band
        why: Why = "MissedSlo" if missed and not short else "LittleSlack"
        return Decision(max(1, more), why, about + _told(now))
    if _missing(policy, now) > 0.0:
        why = "Enough" if _settled(memory, now) else "Starting"
        return Decision(now.current, why, _told(now))
    need = max(math.ceil(load / ROOMY), math.ceil(now.kv_filled / FULL))
    need = max(need, 1 if now.busy or now.held or load > 0.0 else 0)
    easy = now.slack_p10 is None or now.slack_p10 >= min(
        policy.target_slack + policy.band, _best(now)
    )
    if need < now.current and easy:
        return Decision(need, "Surplus", _told(now))
    return Decision(now.current, "Enough", _told(now))


def _needs(policy: Policy, memory: Memory, now: Signals, need: int) -> Memory:
    """Only what no later look exceeds can still be the most of a window that ends later."""
    window_s = _window_s(policy, memory, now)
    kept = [each for each in memory.needs if each[1] > need and now.at_s - each[0] <= window_s]
    return msgspec.structs.replace(memory, needs=(*kept, (now.at_s, need)))


def _down(policy: Policy, memory: Memory, now: Signals) -> Decision:
    """To the most that any look of the window asked for, by half at once at the most."""
    window_s = _window_s(policy, memory, now)
    most = max(need for _, need in memory.needs)
    if now.at_s - max(memory.since_s, memory.fewer_s) < window_s or most >= now.current:
        return Decision(now.current, "Stabilising", _told(now))
    return Decision(max(most, now.current // 2), "Surplus", _told(now))


def _window_s(policy: Policy, memory: Memory, now: Signals) -> float:
    """For how long no more may have been needed; where nobody comes any more there is no regret."""
    window_s = max(policy.down_after_s, now.cold_start_s)
    if now.at_s - memory.came_s >= window_s:
        return window_s
    return window_s * 2.0**memory.regrets


def _bounded(policy: Policy, wanted: Decision, now: Signals) -> Decision:
    """Within the resource's bounds, whatever was heard, and no more than finds a place."""
    count, current = wanted.replicas, now.current
    if current < policy.least:
        return Decision(policy.least, "Bounds", f"minReplicas is {policy.least}")
    if current > policy.most:
        return Decision(policy.most, "Bounds", f"maxReplicas is {policy.most}")
    if count > current and not now.room:
        return Decision(current, "NoRoom", f"{count} are wanted and no place is left; {_told(now)}")
    if count > policy.most:
        return Decision(policy.most, "AtMaximum", wanted.message)
    return msgspec.structs.replace(wanted, replicas=max(count, policy.least))


def _told(now: Signals) -> str:
    """The numbers of a look, for a person."""
    told = [f"{now.ready} of {now.current} ready", f"offered work fills {now.offered:.2f}"]
    slack = "nobody arrives" if now.slack_p10 is None else f"P10 of slack {now.slack_p10:.2f}"
    if now.alone_p10 is not None:
        slack += f" (of an idle replica {now.alone_p10:.2f})"
    return ", ".join((*told, slack, *([f"{now.held} wait for a replica"] if now.held else [])))
