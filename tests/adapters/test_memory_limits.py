"""Memory: when to refuse, the limit of a container, and what a family of processes uses."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys

import pytest

from medha.adapters.memory import MemoryGate, collect_seldom, container_limit_bytes, resident_bytes


def test_work_is_refused_above_85_percent_until_memory_falls_below_80() -> None:
    gate = MemoryGate(1000)
    states = []
    for used in (850, 851, 810, 801, 800, 840, 900):
        changed = gate.observe(used, busy=True)
        states.append((gate.refuses, changed))
    assert states == [
        (False, False),
        (True, True),
        (True, False),
        (True, False),
        (False, True),
        (False, False),
        (True, True),
    ]


def test_nothing_is_refused_while_nothing_is_under_way() -> None:
    gate = MemoryGate(1000)
    gate.observe(999, busy=True)
    assert gate.refuses
    gate.observe(999, busy=False)
    assert not gate.refuses


@pytest.mark.parametrize(
    ("line", "files", "limit"),
    [
        ("0::/", {"memory.max": "1000\n"}, 1000),
        ("0::/", {"memory.max": "max\n"}, None),
        ("0::/a/b", {"a/memory.max": "500\n", "a/b/memory.max": "700\n"}, 500),
        ("0::/../outside", {"memory.max": "900\n"}, 900),
        ("5:cpu,memory:/x", {"memory/x/memory.limit_in_bytes": "800\n"}, 800),
        ("5:memory:/gone", {"memory/memory.limit_in_bytes": "600\n"}, 600),
        ("5:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("4:cpu:/", {"memory.max": "700\n"}, None),
    ],
)
def test_the_limit_is_the_least_of_the_containers_cgroups(
    tmp_path: pathlib.Path, line: str, files: dict[str, str], limit: int | None
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(line + "\n")
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    assert container_limit_bytes(proc, cgroups) == limit


def test_without_cgroups_there_is_no_limit(tmp_path: pathlib.Path) -> None:
    assert container_limit_bytes(tmp_path, tmp_path) is None


def test_the_memory_of_children_counts() -> None:
    before = resident_bytes()
    code = "held = b'x' * (50 << 20); print('held', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        assert resident_bytes() - before > 50 << 20
        child.communicate(b"\n")


def test_what_a_process_keeps_is_not_looked_at_again() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom(1234)
        assert gc.get_threshold()[0] == 1234 and gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
