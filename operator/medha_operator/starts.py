"""How long replicas of a resource take to start. Pure.

A pod tells since when it is ready, which is when it became so lately: days after it started, where
it was not ready for a moment. So what was seen first is kept, and what looks like days is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medha_operator.observed import PodView

LONGEST_START_S = 3600.0


def starts_of(pods: Iterable[PodView], before: Mapping[str, float]) -> dict[str, float]:
    """By the UID of each leader, the seconds until it was ready; `before`: as seen so far."""
    found: dict[str, float] = {}
    for pod in pods:
        if pod.group or pod.stage:
            continue
        if pod.uid in before:
            found[pod.uid] = before[pod.uid]
        elif pod.ready_since_s is not None:
            took_s = max(0.0, pod.ready_since_s - pod.created_s)
            if took_s <= LONGEST_START_S:
                found[pod.uid] = took_s
    return found
