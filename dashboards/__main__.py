"""Writes dashboards/*.json, and the copies of them and of the alerts that the chart mounts."""

from __future__ import annotations

import pathlib

from dashboards import fleet, operations, scheduling, slo
from dashboards.grafana import as_json

HERE = pathlib.Path(__file__).resolve().parent
CHART = HERE.parent / "charts" / "medha"
BOARDS = (slo.BOARD, scheduling.BOARD, fleet.BOARD, operations.BOARD)

# Metrics that no dashboard draws, and why not.
UNDRAWN = {
    "vllm:": "repeats a metric of ours for other systems' dashboards and pickers",
}


def files() -> dict[pathlib.Path, str]:
    """What is written, by path."""
    made = {f"dashboards/{board.name}.json": as_json(board) for board in BOARDS}
    made["alerts.yaml"] = (HERE / "alerts.yaml").read_text()
    here = {HERE.parent / name: text for name, text in made.items() if name.endswith(".json")}
    return here | {CHART / "files" / name: text for name, text in made.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
