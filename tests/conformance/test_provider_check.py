"""A provider's checker: what gateways that resell models expect of an OpenAI server."""

from __future__ import annotations

import json
from typing import Any

import pytest

UNDECIDED = {
    "catalog.declared-v2": "skip",  # of a marketplace
    "chat.pong": "fail",  # the small model misspells
    "tools.parallel-deltas": "fail",  # the small model ends no string
    "tools.round-trip": "skip",
    "structured.json-object": "skip",
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
        worst=1,  # for PONG
    )
    checks = {check["id"]: check for check in json.loads(report.read_text())["checks"]}
    assert {name.partition(".")[0] for name in checks} >= {"chat", "stream", "structured", "tools"}
    for name, check in checks.items():
        assert check["status"] in ("pass", UNDECIDED.get(name)), check
    calls = checks["tools.parallel-deltas"]["measured"]
    assert calls["tool_delta_count"] > 0 and calls["capability_discovered"]
    assert calls["missing_index_count"] == calls["invalid_delta_count"] == 0
    assert calls["late_name_indices"] == []
