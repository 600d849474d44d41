"""A rank is imported at low priority, in standby too, and then runs at its original priority."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tests.support.medha_up import until

from medha_worker.low_priority_start import PRIORITY, STANDBY, import_at_low_priority


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.skipif(sys.platform != "linux", reason="priority belongs to the process elsewhere")
def test_the_import_yields_and_the_caller_does_not(modules: Path) -> None:
    (modules / "heavy_one.py").write_text(
        "import os, threading\n"
        "priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())\n"
    )
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    import_at_low_priority("heavy_one")
    assert sys.modules["heavy_one"].priority == max(before, PRIORITY)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_an_error_of_the_import_reaches_the_caller(modules: Path) -> None:
    (modules / "heavy_two.py").write_text("raise OSError('no such library')\n")
    with pytest.raises(OSError, match="no such library"):
        import_at_low_priority("heavy_two")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize("released", [True, False])
def test_a_standby_waits_under_its_own_name_for_a_line_or_the_end(released: bool) -> None:
    module = "medha_worker.low_priority_start"
    ours, its = socket.socketpair()
    with (
        ours,
        subprocess.Popen(
            [sys.executable, "-m", module, "--standby", "--config", "/no/such/file"],
            stdin=its.fileno(),
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        its.close()
        until(lambda: psutil.Process(process.pid).name() == STANDBY)
        assert ours.recv(1)
        ours.sendall(b"\n" * released)
        ours.close()
        _, errors = process.communicate()
    assert process.returncode == (2 if released else 0)
    assert ("/no/such/file" in errors) == released
