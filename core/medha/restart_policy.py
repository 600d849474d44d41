"""Restart policy: a budget of failures within a window, and a back-off that doubles.

The n-th failure of the last `window_s` delays the next start by

    min(first_backoff_s × 2^(n − 1), longest_backoff_s)

With more than `budget` failures in the window the budget is exhausted. The supervisor of local
processes then gives up; the operator waits until enough failures have left the window.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of restarts. Failures are given as times in seconds, oldest first."""

    first_backoff_s: float
    longest_backoff_s: float
    budget: int = 5
    window_s: float = 600.0

    def recent(self, failed_s: Iterable[float], now_s: float) -> list[float]:
        """Failures within the window that ends now."""
        return [at_s for at_s in failed_s if now_s - at_s < self.window_s]

    def exhausted(self, failed_s: Iterable[float], now_s: float) -> bool:
        return len(self.recent(failed_s, now_s)) > self.budget

    def backoff_s(self, failures: int) -> float:
        """Delay after the given number of recent failures, at least one."""
        return min(self.first_backoff_s * 2.0 ** (failures - 1), self.longest_backoff_s)

    def next_start_s(self, failed_s: Iterable[float], now_s: float) -> float:
        """Earliest time of the next start; 0 without a recent failure."""
        recent = self.recent(failed_s, now_s)
        if not recent:
            return 0.0
        backoff_s = self.backoff_s(len(recent))
        if len(recent) > self.budget:
            return max(recent[-1] + backoff_s, recent[-1 - self.budget] + self.window_s)
        return recent[-1] + backoff_s
