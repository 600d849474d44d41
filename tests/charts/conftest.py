"""Charts rendered by Helm itself; skipped, with the reason, if Helm is missing."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

HOUSE = Path(__file__).resolve().parents[2]
# Helm reads the version from a cluster; here there is none.
KUBERNETES = "--kube-version=1.36.0"

Objects = list[dict[str, Any]]
Render = Callable[..., Objects]


@pytest.fixture(scope="session")
def run_helm(helm: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `helm` with these arguments, in the charts' folder."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(helm), *words], cwd=HOUSE / "charts", capture_output=True, text=True, timeout=100
        )

    return run


@pytest.fixture(scope="session")
def render(run_helm: Callable[..., subprocess.CompletedProcess[str]]) -> Render:
    """The objects of the chart `medha` for some values, on a cluster that has some APIs."""

    def rendered(
        values: dict[str, Any] | None = None, *, apis: Sequence[str] = (), release: str = "medha"
    ) -> Objects:
        words = ["template", release, "medha", "--namespace=medha-system", KUBERNETES]
        words += [f"--api-versions={api}" for api in apis]
        words += [f"--set-json={key}={json.dumps(value)}" for key, value in (values or {}).items()]
        done = run_helm(*words)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    return rendered


@pytest.fixture(scope="session")
def objects(render: Render) -> Objects:
    """The chart's objects with its default values."""
    return render()
