"""The dashboards and alerts as they are committed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

HOUSE = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def drawn() -> dict[str, dict[str, Any]]:
    """Every committed dashboard by the name of its file."""
    return {
        path.stem: json.loads(path.read_text()) for path in (HOUSE / "dashboards").glob("*.json")
    }


@pytest.fixture(scope="session")
def rules() -> list[dict[str, Any]]:
    """Every rule of the alerts' file, recording rules too."""
    groups = yaml.safe_load((HOUSE / "dashboards" / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]
