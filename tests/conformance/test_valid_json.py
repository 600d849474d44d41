"""JSON by schema at temperature 1, through OpenAI's client; `MEDHA_CONFORMANCE=whole`: 1,000."""

from __future__ import annotations

import os
import pathlib

import pytest
from benchmarks.structured_outputs import count_valid, start
from tests.support.medha_up import until

WHOLE = os.environ.get("MEDHA_CONFORMANCE") == "whole"
COUNT = 1_000 if WHOLE else 50


@pytest.mark.timeout(3600 if WHOLE else 600)
def test_every_output_fits_its_schema(tmp_path: pathlib.Path) -> None:
    up = start(tmp_path)
    try:
        until(up.serves, 300.0)
        assert count_valid(up.url, COUNT) == COUNT
    finally:
        up.kill()
