"""Parts of a dashboard: rows of panels, each with queries and a description."""

from __future__ import annotations

from typing import Literal

import msgspec
from dashboards.queries import Query

Kind = Literal["lines", "areas", "heat", "number", "states"]
"""Lines; areas that add up; a histogram's buckets; one number; true or false over time."""


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """Panel. `unit` is Grafana's; `width` in 24ths of the screen, `height` in Grafana's rows.

    States are green if true and red if false. Series whose names end in a word of `faults` are red
    if true and green if false; those of `work` are yellow and green.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    unit: str = "short"
    width: int = 12
    height: int = 8
    faults: tuple[str, ...] = ()
    work: tuple[str, ...] = ()


class Row(msgspec.Struct, frozen=True):
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(msgspec.Struct, frozen=True):
    """Dashboard; its file and its address are named after `name`."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)
