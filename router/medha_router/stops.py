"""Stop strings over streamed text: what might still become one is held back.

    released text | held: the longest tail that is a proper prefix of a stop string | not yet here

The stop string that is complete first wins, whatever pieces the text came in. Nothing of it, nor
of what follows it, is ever released.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Releases text as soon as no stop string can begin in it.

    `released` counts the characters let through so far; `found` is the stop string that ended the
    text, None while there is none.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.released = 0
        self.found: str | None = None

    def feed(self, text: str) -> str:
        """Text that may be shown now that `text` has followed; empty once a stop was found."""
        if self.found is not None or not text:
            return ""
        if not self._stops:
            self.released += len(text)
            return text
        whole = self._held + text
        at, self.found = self._first(whole)
        if self.found is None:
            at = len(whole) - self._tail(whole)
        self._held = "" if self.found else whole[at:]
        self.released += at
        return whole[:at]

    def end(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        self.released += len(held)
        return held

    def _first(self, text: str) -> tuple[int, str | None]:
        """Where the stop string that is complete first begins; of two, the longer one."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = text.find(stop)
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return (best[1], best[2]) if best else (-1, None)

    def _tail(self, text: str) -> int:
        """Length of the longest tail of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
