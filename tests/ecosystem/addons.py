"""Other people's programs of a cluster, built from their Go modules by a tool.

$MEDHA_ADDON_TOOL names the tool; default: `addon` next to the cluster tool. `addon build NAME`
builds a program once, `addon path NAME` names it with its version, and `addon crds NAME` lists the
folders of its CRDs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from demos.testbed import Testbed
from tests.conftest import cluster_tool

from medha.cli.local_fleet.child_process import killed_with_parent

VERSIONS = {
    "karpenter": "v1.14.0",
    "kwok": "v0.7.0",
    "keda-operator": "v2.21.0",
    "keda-adapter": "v2.21.0",
}
BUILD_S = 3600.0


def built(name: str) -> Path:
    """Build a program, unless that has been done; skips the test where it cannot be."""
    tool = _tool()
    program = Path(_call(tool, "path", name))
    if not program.name.endswith(VERSIONS[name]):
        pytest.skip(f"{tool} has {program.name}, but these tests need {name} {VERSIONS[name]}")
    if program.is_file():
        return program
    if not shutil.which("go"):
        pytest.skip(f"{name} is not built, and Go is not here to build it: install Go")
    return Path(_call(tool, "build", name).splitlines()[-1])


def install_crds(bed: Testbed, name: str) -> None:
    """Install a program's kinds."""
    for folder in _call(_tool(), "crds", name).splitlines():
        for path in sorted(Path(folder).glob("*_*.yaml")):
            bed.kubectl("apply", "--server-side", "-f", str(path))
            bed.kubectl("wait", "--for=condition=Established", "--timeout=60s", "-f", str(path))


def _tool() -> Path:
    cluster = cluster_tool()
    neighbour = cluster.with_name("addon") if cluster else Path("addon")
    tool = Path(os.environ.get("MEDHA_ADDON_TOOL") or neighbour)
    if not tool.is_file():
        pytest.skip("nothing here builds Karpenter, KWOK and KEDA: set MEDHA_ADDON_TOOL")
    return tool


def _call(tool: Path, *words: str) -> str:
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode:
        pytest.skip(f"{tool} {' '.join(words)}: {done.stderr[-500:]}")
    return done.stdout.strip()


class Addon:
    """A running program outside the cluster; `log` has its output."""

    def __init__(self, bed: Testbed, log: Path, command: list[str], **environ: str) -> None:
        self.log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                killed_with_parent(*command),
                env={**bed.environ, **environ},
                stdout=file,
                stderr=file,
                cwd=log.parent,
            )

    def check(self) -> None:
        """Fail with the last lines of the log if the program has ended."""
        assert self._process.poll() is None, self.log.read_text()[-3000:]

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
