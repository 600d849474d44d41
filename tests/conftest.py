"""Settings and finds that every suite shares."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# Same examples everywhere, and no deadline: a busy machine is slow, not wrong.
settings.register_profile("medha", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("medha")

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def unchanged_signals() -> Iterator[None]:
    """Fail a test that leaves signals blocked or handled: processes started later inherit both."""

    def state() -> tuple[object, ...]:
        return signal.pthread_sigmask(signal.SIG_BLOCK, ()), *map(signal.getsignal, HANDLED)

    before = state()
    yield
    assert state() == before, "this test leaves signals blocked or handled: restore them"


CLUSTER_TOOL = Path(__file__).resolve().parents[2] / "shared" / "kubernetes" / "cluster"


def cluster_tool() -> Path | None:
    """The program that starts clusters on this machine, where there is one."""
    tool = Path(os.environ.get("MEDHA_CLUSTER_TOOL") or CLUSTER_TOOL)
    return tool if tool.is_file() else None


@functools.cache
def programs() -> Path | None:
    """Folder of Kubernetes' programs: KUBEBUILDER_ASSETS, or the cluster tool's assets."""
    if folder := os.environ.get("KUBEBUILDER_ASSETS"):
        return Path(folder)
    if tool := cluster_tool():
        assets = subprocess.run([tool, "assets"], capture_output=True, text=True, timeout=100)
        return Path(assets.stdout.strip()) if assets.returncode == 0 else None
    return None


def program(name: str) -> Path:
    """Path of a program of that folder or of PATH; skips the test if there is none."""
    folder = programs()
    if folder is not None and (folder / name).is_file():
        return folder / name
    if path := shutil.which(name):
        return Path(path)
    pytest.skip(
        f"{name} is not here: put it on PATH, or name the folder of Kubernetes' programs in "
        "KUBEBUILDER_ASSETS"
    )


def of_prometheus(name: str) -> Path:
    """Path of `prometheus` or `promtool`; skips the test if neither PATH nor the cache has it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    unpacked = cache / "medha-prometheus" / "usr" / "bin" / name
    if unpacked.is_file():
        return unpacked
    if path := shutil.which(name):
        return Path(path)
    pytest.skip(
        f"{name} is not here: put it on PATH, or run `make prometheus`, which takes Debian's"
    )


@pytest.fixture(scope="session")
def prometheus() -> Path:
    return of_prometheus("prometheus")


@pytest.fixture(scope="session")
def promtool() -> Path:
    return of_prometheus("promtool")


@pytest.fixture(scope="session")
def helm() -> Path:
    return program("helm")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return program("kubectl")


@pytest.fixture(scope="session")
def server_programs() -> tuple[Path, Path]:
    """etcd and kube-apiserver."""
    return program("etcd"), program("kube-apiserver")
