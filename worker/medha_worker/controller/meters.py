"""Where the controller's measurements go: names and labels of `medha.metrics`, and three verbs."""

from __future__ import annotations

from typing import Protocol


class Meters(Protocol):
    """A sink of one model's measurements; `labels` follow the catalogue's order after `model`."""

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Count onto a counter."""
        ...

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        ...


class NoMeters:
    """Measures nothing: for drivers that want only the decisions."""

    def add(self, name: str, amount: float, *labels: str) -> None: ...

    def set(self, name: str, value: float, *labels: str) -> None: ...

    def observe(self, name: str, value: float, *labels: str) -> None: ...
