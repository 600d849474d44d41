"""A provider's checker: what gateways that resell models expect of an OpenAI server."""

from __future__ import annotations

import json
from typing import Any

import pytest

WHERE_THE_MODEL_DECIDES = {
    "catalog.declared-v2",  # of a marketplace
    "tools.parallel-deltas",  # two calls
    "tools.round-trip",
}


@pytest.mark.timeout(600)
def test_a_provider_check_finds_nothing_to_mend(fleet: Any) -> None:
    report = fleet.folder / "provider-check.json"
    fleet.run(
        "trustedrouter-provider-check",
        f"--base-url={fleet.url}/v1",
        "--model=tiny",
        "--tier=5",
        f"--json={report}",
        timeout_s=500.0,
    )
    checks = {check["id"]: check for check in json.loads(report.read_text())["checks"]}
    left = {name: check for name, check in checks.items() if check["status"] != "pass"}
    assert left.keys() <= WHERE_THE_MODEL_DECIDES, left
    assert all(check["status"] != "fail" for check in left.values()), left
    assert {name.partition(".")[0] for name in checks} >= {"chat", "stream", "structured", "tools"}
