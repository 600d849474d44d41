"""Liveness of the process at the other end of a link, by its messages and its connection.

    in doubt   silent for QUIET_S          or   no connection for GONE_S
    dead       silent for its timeout      or   no connection for CLOSED_S

What is in doubt gets no new work, and work that can soon be done again elsewhere leaves it.
"""

from __future__ import annotations

QUIET_S = 1.25
"""A peer that gave no sign of life for so long, two beats and a half, may hang."""
GONE_S = 0.25
"""A peer without a connection for so long is probably dead: a live one dials again after 0.05 s to
0.1 s, and after 0.15 s more if that fails."""
CLOSED_S = 1.0
"""A peer without a connection for so long is dead."""


class PeerLiveness:
    """Signs of life of one peer."""

    def __init__(self, now: float) -> None:
        self._seen_s, self._closed_s = now, float("inf")

    def seen(self, now: float) -> None:
        """Note a message of the peer."""
        self._seen_s, self._closed_s = now, float("inf")

    def connected(self) -> None:
        """Note that the peer has a connection, which alone is no sign that it runs."""
        self._closed_s = float("inf")

    def disconnected(self, now: float) -> None:
        """Note the end of a connection: the peer has another one soon, or is dead."""
        self._closed_s = now

    def excuse(self, pause_s: float) -> None:
        """Do not count a time in which this process did not run."""
        self._seen_s += pause_s
        self._closed_s += pause_s

    def quiet(self, now: float) -> bool:
        """Return True if the peer is silent for so long that it may hang."""
        return now - self._seen_s > QUIET_S

    def gone(self, now: float) -> bool:
        """Return True if the peer has no connection for so long that it is probably dead."""
        return now - self._closed_s > GONE_S

    def death(self, now: float, timeout_s: float) -> str:
        """Return why the peer counts as dead, `timeout_s` being allowed for silence; else empty."""
        if now - self._closed_s > CLOSED_S:
            return "its connection has ended"
        silent_s = now - self._seen_s
        return f"silent for {silent_s:.1f} s" if silent_s > timeout_s else ""
