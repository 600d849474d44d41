"""Autoscaling: the number of replicas that a model needs, from reports of routers and controllers.

`decide` takes the signals of one look and the memory of earlier looks, and returns both a decision
and the new memory. The operator acts on it; the simulator and `medha scaling` repeat it.

    up     relative slack at arrival (P10 over all offered requests, refused ones included) is below
           the target, or a class misses its SLO, too far and too long for noise (see SHORT): add at
           least one replica, or as many as the offered work fills. Do not add more for a lack that
           replicas still starting may end
    down   to the number that the work needs, at most by half, once no look of the stabilisation
           window needed more. The window is at least the start-up time of a replica, and doubles
           each time a smaller fleet turned out too small
    hold   between the two, and while a source has not reported: silence is not idleness

An empty queue with fresh reports is no pressure. A request that waits for a model without replicas
starts the first one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

FULL, ROOMY = 0.8, 0.6
"""Planned utilisation of a replica; a fleet shrinks only if the rest is at most ROOMY utilised."""
ATTAINED = 0.9
"""A class misses its SLO if a smaller share of its requests met it."""
ENOUGH_ARRIVED, ENOUGH_ENDED = 4, 10
"""Requests for a full signal. Fewer requests count in proportion."""
BAND = 0.25
"""Share of the target (and at least 0.05) within which slack counts as on target."""
SHORT, MISSED = 20.0, 0.5
"""SHORT: missing slack times seconds until replicas are added, e.g. 20 s of refusals, or 45 s at a
slack of -0.3. MISSED: a missed SLO counts as this much missing slack."""
SETTLES_S, STUCK_S = 30.0, 300.0
"""SETTLES_S: window of the signals; they describe a changed fleet only after it. STUCK_S: replicas
that have not started after this time, or after twice the usual time, are no longer waited for."""
MOST_REGRETS = 3
"""The stabilisation window doubles at most this many times."""
LONG_AGO_S = 1e12
MODEST = 0.1
"""The target is at most the slack of an idle replica, less this share."""
GAP_S = 60.0
"""After a gap this long between two looks, the memory is discarded."""

Why = Literal[
    "Enough",
    "NoData",
    "FirstRequest",
    "LittleSlack",
    "MissedSlo",
    "Starting",
    "Stabilising",
    "Surplus",
    "AtMaximum",
    "NoRoom",
    "Bounds",
]


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Autoscaling policy of a resource: bounds, target, and seconds that a surplus must last."""

    least: int
    most: int
    target_slack: float
    down_after_s: float

    @property
    def band(self) -> float:
        return max(0.05, BAND * abs(self.target_slack))


class ClassShare(msgspec.Struct, frozen=True):
    """Recently ended requests of one class."""

    name: str
    met: int
    missed: int

    @property
    def misses(self) -> float:
        """Evidence that the class misses its SLO, 0 to 1."""
        ended = self.met + self.missed
        return min(1.0, ended / ENOUGH_ENDED) if self.met < ATTAINED * ended else 0.0


class ScalingSignals(msgspec.Struct, frozen=True, kw_only=True):
    """Signals of one look: `current` replicas are requested and `ready` ones serve.

    `slack_p10`: relative slack of `arrived` requests; None without arrivals. `alone_p10`: the slack
    that an idle replica would have left them; None if unknown. `offered`: prefill seconds that
    arrive per second, refused ones included, so the number of replicas that they fill. `backlog_s`:
    queued prefill seconds. `held`: requests without a replica. `busy`: queued and running requests.
    `kv_filled`: number of ready replicas that the used pages fill. `fresh` False: a source has not
    reported recently. `room` False: the cluster has no room for a replica.
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


class ScalingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of earlier looks, without a gap since `since_s`.

    `short`: missing slack times seconds so far. `needs`: (time, need) with falling needs, so that
    the first one in a window is its maximum. `current`: requested replicas; `most`: the most of
    them ready at once. Times: `waits_s`, start of the wait for starting replicas; `whole_s`, since
    when all are ready (None: not all are); `fewer_s`, last scale-down; `came_s`, last sign of a
    client. `regrets`: recent scale-downs that turned out too small.
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


class ScalingDecision(msgspec.Struct, frozen=True):
    """Number of replicas and the reason. `message` has the numbers for people."""

    replicas: int
    why: Why
    message: str = ""


class ScalingRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A saved look, so that its decision can be repeated."""

    policy: Policy
    signals: ScalingSignals
    decision: ScalingDecision


def decide(
    policy: Policy, memory: ScalingMemory, signals: ScalingSignals
) -> tuple[ScalingDecision, ScalingMemory]:
    """Decide the number of replicas; also returns the memory for the next look."""
    policy = _attainable(policy, signals)
    memory = _seen(policy, memory, signals)
    if signals.held and not signals.current and policy.most:
        first = ScalingDecision(max(1, policy.least), "FirstRequest", _summary(signals))
        return first, _needs(policy, memory, signals, first.replicas)
    wanted = _wanted(policy, memory, signals)
    need = wanted.replicas
    memory = _needs(policy, memory, signals, need)
    if need < signals.current:
        wanted = _down(policy, memory, signals)
    return _bounded(policy, wanted, signals), memory


class Journal(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive looks and the memory before the first."""

    memory: ScalingMemory = ScalingMemory()
    looks: tuple[ScalingRecord, ...] = ()

    def noted(self, look: ScalingRecord, most: int) -> Journal:
        """The journal with one more look, of at most `most`."""
        memory, looks = self.memory, (*self.looks, look)
        while len(looks) > most:
            _, memory = decide(looks[0].policy, memory, looks[0].signals)
            looks = looks[1:]
        return Journal(memory=memory, looks=looks)


def replay(journal: Journal) -> list[ScalingDecision]:
    """Repeat the decisions of a journal."""
    memory, decisions = journal.memory, []
    for record in journal.looks:
        decision, memory = decide(record.policy, memory, record.signals)
        decisions.append(decision)
    return decisions


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


def _attainable(policy: Policy, now: ScalingSignals) -> Policy:
    """Cap the target at the slack that an idle replica can reach."""
    return msgspec.structs.replace(policy, target_slack=min(policy.target_slack, _best(now)))


def _best(now: ScalingSignals) -> float:
    """The most slack that any number of replicas can reach."""
    if now.alone_p10 is None:
        return math.inf
    return now.alone_p10 - MODEST * abs(now.alone_p10)


def _seen(policy: Policy, memory: ScalingMemory, now: ScalingSignals) -> ScalingMemory:
    """The memory with this look."""
    passed_s = now.at_s - memory.last_s
    if not 0.0 <= passed_s <= GAP_S:
        memory, passed_s = _afresh(now), 0.0
    memory = _readiness(_changed(policy, memory, now), now)
    short = memory.short
    if not _settled(memory, now):
        short = 0.0  # the reports still describe the fleet before the change
    elif now.fresh:
        short = max(0.0, min(SHORT, short + passed_s * _missing(policy, now)))
    came_s = now.at_s if now.busy or now.slack_p10 is not None else memory.came_s
    return msgspec.structs.replace(memory, last_s=now.at_s, short=short, came_s=came_s)


def _afresh(now: ScalingSignals) -> ScalingMemory:
    """A memory without earlier looks. Replicas that are not ready count as starting."""
    lacks = now.ready < now.current
    return ScalingMemory(
        since_s=now.at_s,
        current=now.current,
        most=now.ready,
        waits_s=now.at_s if lacks else -LONG_AGO_S,
        whole_s=None if lacks else -LONG_AGO_S,
    )


def _changed(policy: Policy, memory: ScalingMemory, now: ScalingSignals) -> ScalingMemory:
    """Record a change of the requested replicas, and whether it undoes the last one."""
    if now.current == memory.current:
        return memory
    fewer_s, regrets = memory.fewer_s, memory.regrets
    if now.current < memory.current:
        fewer_s = now.at_s
    elif memory.current:  # growth from zero is not a regret
        soon = now.at_s - fewer_s <= 2.0 * _window_s(policy, memory, now)
        regrets = min(MOST_REGRETS, regrets + 1) if soon else max(0, regrets - 1)
    return msgspec.structs.replace(
        memory,
        current=now.current,
        most=now.ready,
        waits_s=now.at_s,
        fewer_s=fewer_s,
        regrets=regrets,
    )


def _readiness(memory: ScalingMemory, now: ScalingSignals) -> ScalingMemory:
    """Record since when all replicas are ready.

    A replica that flaps restarts the wait only if all have been ready for SETTLES_S before.
    """
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


def _settled(memory: ScalingMemory, now: ScalingSignals) -> bool:
    """True if reports describe the current replicas and no others will be ready soon."""
    waited_s = now.at_s - memory.waits_s
    if memory.whole_s is not None and now.at_s - memory.whole_s >= SETTLES_S <= waited_s:
        return True
    return waited_s >= max(STUCK_S, 2.0 * now.cold_start_s)


def _missing(policy: Policy, now: ScalingSignals) -> float:
    """Slack missing to the band of the target; negative if there is more than enough."""
    missing, missed = -MISSED, MISSED * max((share.misses for share in now.classes), default=0.0)
    if now.slack_p10 is not None:
        missing = max(-1.0, min(1.0, policy.target_slack - policy.band - now.slack_p10))
    if missing > 0.0:
        missing *= min(1.0, now.arrived / ENOUGH_ARRIVED)
    return max(missing, missed) if missed else missing


def _wanted(policy: Policy, memory: ScalingMemory, now: ScalingSignals) -> ScalingDecision:
    """Decide from this look alone, before bounds and stabilisation."""
    if not now.fresh:
        return ScalingDecision(
            now.current, "NoData", "routers or controllers have not reported recently"
        )
    load = now.offered + now.backlog_s / max(60.0, now.cold_start_s)
    if memory.short >= SHORT:
        missed = [share.name for share in now.classes if share.misses]
        about = f"class {', '.join(missed)} misses its SLO; " if missed else ""
        more = min(2 * now.current, max(now.current + 1, math.ceil(load / FULL)))
        short = now.slack_p10 is not None and now.slack_p10 < policy.target_slack - policy.band
        why: Why = "MissedSlo" if missed and not short else "LittleSlack"
        return ScalingDecision(max(1, more), why, about + _summary(now))
    if _missing(policy, now) > 0.0:
        why = "Enough" if _settled(memory, now) else "Starting"
        return ScalingDecision(now.current, why, _summary(now))
    need = max(math.ceil(load / ROOMY), math.ceil(now.kv_filled / FULL))
    need = max(need, 1 if now.busy or now.held or load > 0.0 else 0)
    easy = now.slack_p10 is None or now.slack_p10 >= min(
        policy.target_slack + policy.band, _best(now)
    )
    if need < now.current and easy:
        return ScalingDecision(need, "Surplus", _summary(now))
    return ScalingDecision(now.current, "Enough", _summary(now))


def _needs(policy: Policy, memory: ScalingMemory, now: ScalingSignals, need: int) -> ScalingMemory:
    """Add a need. Drop needs that it exceeds: they cannot be the maximum of a later window."""
    window_s = _window_s(policy, memory, now)
    kept = [
        (at_s, earlier)
        for at_s, earlier in memory.needs
        if earlier > need and now.at_s - at_s <= window_s
    ]
    return msgspec.structs.replace(memory, needs=(*kept, (now.at_s, need)))


def _down(policy: Policy, memory: ScalingMemory, now: ScalingSignals) -> ScalingDecision:
    """Shrink to the largest need in the window, at most by half at once."""
    window_s = _window_s(policy, memory, now)
    most = max(need for _, need in memory.needs)
    if now.at_s - max(memory.since_s, memory.fewer_s) < window_s or most >= now.current:
        return ScalingDecision(now.current, "Stabilising", _summary(now))
    return ScalingDecision(max(most, now.current // 2), "Surplus", _summary(now))


def _window_s(policy: Policy, memory: ScalingMemory, now: ScalingSignals) -> float:
    """Length of the stabilisation window. Regrets do not count for a model without clients."""
    window_s = max(policy.down_after_s, now.cold_start_s)
    if now.at_s - memory.came_s >= window_s:
        return window_s
    return window_s * 2.0**memory.regrets


def _bounded(policy: Policy, wanted: ScalingDecision, now: ScalingSignals) -> ScalingDecision:
    """Apply the bounds of the resource and the room in the cluster."""
    count, current = wanted.replicas, now.current
    if current < policy.least:
        return ScalingDecision(policy.least, "Bounds", f"minReplicas is {policy.least}")
    if current > policy.most:
        return ScalingDecision(policy.most, "Bounds", f"maxReplicas is {policy.most}")
    if count > current and not now.room:
        return ScalingDecision(
            current, "NoRoom", f"{count} are wanted and no place is left; {_summary(now)}"
        )
    if count > policy.most:
        return ScalingDecision(policy.most, "AtMaximum", wanted.message)
    return msgspec.structs.replace(wanted, replicas=max(count, policy.least))


def _summary(now: ScalingSignals) -> str:
    """The numbers of a look, for people."""
    parts = [f"{now.ready} of {now.current} ready", f"offered work fills {now.offered:.2f}"]
    slack = "no arrivals" if now.slack_p10 is None else f"P10 of slack {now.slack_p10:.2f}"
    if now.alone_p10 is not None:
        slack += f" (of an idle replica {now.alone_p10:.2f})"
    return ", ".join((*parts, slack, *([f"{now.held} wait for a replica"] if now.held else [])))
