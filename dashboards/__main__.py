"""Write dashboards/*.json, and the chart's copies of the dashboards and alerts."""

from __future__ import annotations

import pathlib

from dashboards import fleet, operations, scheduling, slo
from dashboards.grafana import as_json

HERE = pathlib.Path(__file__).resolve().parent
CHART = HERE.parent / "charts" / "medha"
BOARDS = (slo.BOARD, scheduling.BOARD, fleet.BOARD, operations.BOARD)

# Metrics that no dashboard shows, with the reason.
UNDRAWN = {
    "vllm:": "repeats a Medha metric for other systems' dashboards and pickers",
}


def files() -> dict[pathlib.Path, str]:
    """Text of each generated file, by path."""
    texts = {f"dashboards/{board.name}.json": as_json(board) for board in BOARDS}
    texts["alerts.yaml"] = (HERE / "alerts.yaml").read_text()
    here = {HERE.parent / name: text for name, text in texts.items() if name.endswith(".json")}
    return here | {CHART / "files" / name: text for name, text in texts.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
