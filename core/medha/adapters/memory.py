"""Memory of a process and its children: its limit, when to refuse work because of it, and garbage.

The limit is a setting, else that of the container: the least `memory.max` of the process's cgroup
and those above it (cgroup v2), or `memory.limit_in_bytes` (v1).
"""

from __future__ import annotations

import gc
import os
import pathlib
from collections.abc import Iterator

import msgspec

FULL, ENOUGH = 0.85, 0.80
"""Parts of the limit: above the first new work is refused, below the second it is accepted."""
UNLIMITED_BYTES = 1 << 60
"""Lower bound of what cgroup v1 reports without a limit."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
PROC, CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")


class MemoryGate(msgspec.Struct):
    """Decides whether new work is refused for lack of memory.

    `refuses`: what a request checks. Work under way ends and gives memory back. Without any, to
    refuse would free nothing, so that memory which an allocator keeps cannot close the gate.
    """

    limit_bytes: int
    refuses: bool = False

    def observe(self, used_bytes: int, *, busy: bool) -> bool:
        """Take a measurement; returns True if `refuses` has changed."""
        before = self.refuses
        part = ENOUGH if before else FULL
        self.refuses = busy and used_bytes > part * self.limit_bytes
        return self.refuses != before


def resident_bytes(proc: pathlib.Path = PROC) -> int:
    """Return the resident memory of this process and its children.

    Pages that several of them share count in each.
    """
    return sum(_resident_bytes(proc / pid) for pid in ("self", *_children(proc)))


def collect_seldom(objects: int) -> None:
    """Collect garbage after every `objects` new ones, and never look at what exists now.

    For a process that has loaded what it keeps: requests end without cycles of references, and a
    collection that walks all of it, for nothing, stops the process for tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(objects, 50, 100)


def container_limit_bytes(proc: pathlib.Path = PROC, cgroups: pathlib.Path = CGROUPS) -> int | None:
    """Return the limit of the container of this process; None without one."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = [limit for line in lines for limit in _limits(line, cgroups)]
    return min(limits, default=None)


def _limits(line: str, cgroups: pathlib.Path) -> Iterator[int]:
    """Yield the limits that hold for one line, `ID:CONTROLLERS:PATH`, of a process's cgroups.

    A path may lie outside of what a container shows; its root is the container's own cgroup then.
    """
    _, controllers, path = line.split(":", 2)
    if not controllers:
        root, name = cgroups, "memory.max"
    elif "memory" in controllers.split(","):
        root, name = cgroups / "memory", "memory.limit_in_bytes"
    else:
        return
    own = root / path.lstrip("/")
    for folder in (own, *own.parents):
        if folder != root and root not in folder.parents:
            return
        limit = _number(folder / name)
        if limit is not None and limit < UNLIMITED_BYTES:
            yield limit


def _number(file: pathlib.Path) -> int | None:
    """Return the number in a file; None for `max` and for a file that is not there."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _children(proc: pathlib.Path) -> list[str]:
    """Return the ids of the children of all threads; none where the kernel does not list them."""
    pids: list[str] = []
    for thread in (proc / "self/task").glob("*/children"):
        try:
            pids += thread.read_text().split()
        except OSError:
            continue  # the thread has ended
    return pids


def _resident_bytes(process: pathlib.Path) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        return int((process / "statm").read_text().split()[1]) * PAGE_BYTES
    except (OSError, IndexError):
        return 0
