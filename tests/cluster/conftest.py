"""A real cluster with Medha installed and the small model served, for the tests of this folder.

Slow by nature (minutes), so they run when they are named: `make test-cluster`. Which cluster it is
says examples/testbed.py. They are skipped, with the reason, where the machine has none, cannot
start it, or cannot get what the images are made from.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import images
from examples.installed import Installed
from examples.testbed import NoCluster, built, missing, opened


def pytest_configure() -> None:
    """Asked to end, clean up like at Ctrl-C. Whoever is not asked: see examples/afterwards.py."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def medha() -> Iterator[Installed]:
    """Two replicas of the small model on two nodes, ready."""
    if lacking := missing():
        pytest.skip(lacking)
    with contextlib.ExitStack() as stack:
        try:
            list(built())
            bed = stack.enter_context(opened("tests", nodes=2))
        except (images.Unreachable, NoCluster) as lacking_after_all:
            pytest.skip(str(lacking_after_all))
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
