"""Room that owners share: bytes of bodies, or requests that wait."""

from __future__ import annotations


class SharedRoom:
    """Room for `most` of something; what each owner holds.

    An owner, a tenant or an address without API keys, holds all of it if it is alone, and counts
    for the others with a quarter at most. Once half of it is held by several, each holds at most a
    quarter. Every operation takes constant time.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held = most, 0
        self._quarter = most // 4
        self._held_by: dict[str, int] = {}
        self._counted = 0  # a quarter of an owner at most

    def fits(self, owner: str, more: int) -> bool:
        """True if an owner may hold `more` than it does."""
        own = self._held_by.get(owner, 0)
        others = self._counted - min(own, self._quarter)
        held = others + own + more
        shared = others > 0 and held > self.most // 2
        return held <= self.most and not (shared and own + more > self._quarter)

    def hold(self, owner: str, more: int) -> None:
        """Count what an owner holds from now on; less than 0 for what it gives back."""
        before = self._held_by.get(owner, 0)
        own = before + more
        self.held += more
        self._counted += min(own, self._quarter) - min(before, self._quarter)
        if own:
            self._held_by[owner] = own
        else:
            self._held_by.pop(owner, None)
