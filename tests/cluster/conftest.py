"""A real cluster with Medha installed and the small model served, for the tests of this folder.

They take minutes, so they run only if named: `make test-cluster`. demos/testbed.py chooses the
cluster. The tests are skipped, with the reason, if the machine cannot start one or cannot get
what the images are built from.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from demos import images
from demos.release import Installed
from demos.testbed import NoCluster, Testbed, built, missing, opened


def pytest_configure() -> None:
    """Clean up on SIGTERM as on Ctrl-C; for SIGKILL see demos/run_afterwards.py."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@contextlib.contextmanager
def cluster(name: str) -> Iterator[Testbed]:
    """Build the images and open a cluster of two nodes; skips, with the reason, where that cannot
    be done."""
    if lacking := missing():
        pytest.skip(lacking)
    with contextlib.ExitStack() as stack:
        try:
            list(built())
            bed = stack.enter_context(opened(name, nodes=2))
        except (images.Unreachable, NoCluster) as lacking_after_all:
            pytest.skip(str(lacking_after_all))
        yield bed


@pytest.fixture(scope="session")
def medha() -> Iterator[Installed]:
    """Two ready replicas of the small model on two nodes."""
    with cluster("tests") as bed, contextlib.ExitStack() as stack:
        installed = Installed(bed)
        stack.callback(installed.remove)
        loading = installed.load()
        installed.install()
        loading.join()
        installed.apply(replicas=2)
        installed.ready()
        yield installed
        installed.delete()
        installed.uninstall()
