"""Since when pods are as they are, by the operator's own clock.

The API server's stamps are of another clock, and none says when a pod's gate was lifted: by them
a pod that waited behind its gate for a minute was late at once, and so was each where the clocks
are a minute apart.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from medha_operator.observed import PodView


class Since:
    """When each pod was first seen, and first seen as what it still is; another operator begins to
    count anew."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str, float]] = {}
        """By UID: when it was first seen, as what it was last seen, and since when that."""

    def told(self, pods: Iterable[PodView], now_s: float) -> tuple[PodView, ...]:
        """The same pods, with since when they are known, the scheduler may bind them, or they are
        not ready."""
        return tuple(self._told(pod, now_s) for pod in pods)

    def forget(self, uid: str) -> None:
        """It is gone."""
        self._known.pop(uid, None)

    def _told(self, pod: PodView, now_s: float) -> PodView:
        state = _state(pod)
        seen_s, before, since_s = self._known.get(pod.uid, (now_s, "", now_s))
        if state != before:
            since_s = now_s
            self._known[pod.uid] = seen_s, state, since_s
        since = {"seen_since_s": seen_s}
        if state in ("open", "unready"):
            since[f"{state}_since_s"] = since_s
        return msgspec.structs.replace(pod, **since)


def _state(pod: PodView) -> str:
    if pod.node:
        return "ready" if pod.ready else "unready"
    return "gated" if pod.gated else "open"
