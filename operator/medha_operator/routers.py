"""Which routers there are, what each said last, and whom to wait for. Pure.

A model's demand is the sum over all of them, so one that is silent leaves it unknown: its share may
be anything. But one that never answers (it crashes as it starts, say) must not keep all models from
being scaled for ever: while others answer, one that was silent for GIVEN_UP_S is left out, until it
answers again.
"""

from __future__ import annotations

from collections.abc import Iterable

from medha.messages import RouterDemand
from medha_operator.signals import STALE_S, Demand

GIVEN_UP_S = 120.0
NEVER_S = float("-inf")


class Routers:
    """By address; all times are of one clock, whichever."""

    def __init__(self) -> None:
        self._found_s: dict[str, float] = {}
        self._heard: dict[str, tuple[float, RouterDemand]] = {}
        self._last_s = NEVER_S
        self._since_s = NEVER_S
        """Since when some router answers: silence of all of them is nobody's fault."""

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(self._found_s)

    def found(self, addresses: Iterable[str], now_s: float) -> None:
        """Those that there are; others have left."""
        self._found_s = {each: self._found_s.get(each, now_s) for each in sorted(set(addresses))}
        self._heard = {each: self._heard[each] for each in self._found_s if each in self._heard}

    def said(self, address: str, demand: RouterDemand, now_s: float) -> None:
        """One answered."""
        if now_s - self._last_s > STALE_S:
            self._since_s = now_s
        self._last_s = now_s
        self._heard[address] = now_s, demand

    def demand(self, model: str, now_s: float) -> Demand:
        """What they said of a model."""
        counted = [each for each in self._found_s if not self._given_up(each, now_s)]
        fresh = {
            each: self._heard[each][1]
            for each in counted
            if each in self._heard and now_s - self._heard[each][0] <= STALE_S
        }
        return Demand(
            window_s=max((each.window_s for each in fresh.values()), default=1.0),
            fresh=0 < len(fresh) == len(counted),
            models=tuple(
                each for one in fresh.values() for each in one.models if each.model == model
            ),
        )

    def _given_up(self, address: str, now_s: float) -> bool:
        heard_s = self._heard[address][0] if address in self._heard else self._found_s[address]
        others = now_s - self._last_s <= STALE_S
        return others and now_s - max(heard_s, self._since_s) > GIVEN_UP_S
