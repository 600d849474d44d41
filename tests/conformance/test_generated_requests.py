"""Requests that schemathesis generates from the served document: no 5xx, errors of one shape.

`MEDHA_CONFORMANCE=whole` sends at least 20,000; else it is the short form.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import pytest

WHOLE = os.environ.get("MEDHA_CONFORMANCE") == "whole"
LEAST_CASES = 20_000 if WHOLE else 3_000
EXAMPLES = 2_500 if WHOLE else 10  # of each operation, besides those of the coverage phase
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
)


@pytest.mark.timeout(5400 if WHOLE else 900)
def test_no_generated_request_breaks_the_api(fleet: Any) -> None:
    report = fleet.folder / "schemathesis.json"
    printed = fleet.run(
        "schemathesis",
        "run",
        f"{fleet.url}/openapi.json",
        f"--max-examples={EXAMPLES}",
        "--seed=1",
        "--workers=1",  # Python 3.11 parses code in one thread at a time, or raises SystemError
        f"--checks={','.join(CHECKS)}",
        "--phases=coverage,fuzzing",
        "--continue-on-failure",
        "--no-shrink",
        "--suppress-health-check=all",
        f"--report-json-path={report}",
        timeout_s=5000.0 if WHOLE else 800.0,
        SCHEMATHESIS_HOOKS="schemathesis_hooks",
        PYTHONPATH=str(pathlib.Path(__file__).parent),
    )
    summary = json.loads(report.read_text())
    cases = summary["test_cases"]
    assert summary["complete"] and summary["operations"]["tested"] >= 11, printed[-4000:]
    assert cases["with_failures"] == 0 and cases["generated"] >= LEAST_CASES, cases
