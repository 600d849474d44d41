"""The pictures of the documentation are drawn from what Prometheus answered, panel by panel.

With MEDHA_PICTURES=FOLDER they are kept there; that is how docs/dashboards came to be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest
from dashboards.pictures import Line, drawn
from tests.scraped.conftest import Scraped
from tests.scraped.test_expressions import BOARDS

pytestmark = pytest.mark.timeout(1500)

MOST_BYTES = 200_000


def filled(legend: str, labels: Mapping[str, str]) -> str:
    """A legend with the labels' values in it."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_of_a_dashboard_is_drawn_with_its_data(name: str, scraped: Scraped) -> None:
    if name == "operator" and scraped.missing:
        pytest.skip(scraped.missing)

    def ask(expr: str, legend: str) -> list[Line]:
        results = scraped.prometheus.range(expr, scraped.start, scraped.end)
        return [Line(filled(legend, result.labels), result.points) for result in results]

    board = BOARDS[name]
    picture = drawn(board, ask, (scraped.start, scraped.end))
    assert "no data here" not in picture
    ElementTree.fromstring(picture)
    assert len(picture.encode()) < MOST_BYTES
    if folder := os.environ.get("MEDHA_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, f"{name}.svg").write_text(picture)
