"""A real cluster with Medha installed and the small model served, for the tests of this folder.

Slow by nature (minutes), so they run when they are named: `make test-cluster`. Which cluster it is
says examples/testbed.py; without one they are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples import images
from examples.installed import Installed
from examples.testbed import ARCHIVES, missing, opened


@pytest.fixture(scope="session")
def medha() -> Iterator[Installed]:
    """Two replicas of the small model on two nodes, ready."""
    if lacking := missing():
        pytest.skip(lacking)
    for target in images.TARGETS:
        images.build(target, "cpu")
        images.archive(target, ARCHIVES)
    with opened("tests", nodes=2) as bed:
        installed = Installed(bed)
        loading = installed.load()
        installed.install()
        loading.join()
        installed.apply(replicas=2)
        installed.ready()
        yield installed
        installed.delete()
        installed.uninstall()
