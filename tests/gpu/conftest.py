"""Setup of the GPU tests: their kernels, compiled in one build before the first test."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.compiling import Need, compile_kernels

# Of one test, which may be the first to load a kernel and to fill a pool.
TIMEOUT_S = 560


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels(*head_dims): head sizes of what the test attends")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = pathlib.Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile what the chosen tests need, outside the time of any of them."""
    wanted = needs(session.items)
    if wanted and torch.cuda.is_available() and not session.config.option.collectonly:
        reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        reporter.write_line(f"compiles kernels (head size, FP8 too): {wanted}")
        reporter.write_line(f"compiled in {compile_kernels(wanted):.0f} s")


def needs(items: Sequence[pytest.Item]) -> list[Need]:
    """Return the needs in the tests' marks; tests with fp8 in their names need FP8 pages too."""
    return sorted(
        {
            (head_dim, "fp8" in item.name)
            for item in items
            for mark in item.iter_markers("kernels")
            for head_dim in mark.args
        }
    )
