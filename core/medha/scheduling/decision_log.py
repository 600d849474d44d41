"""The decision log: every call of a scheduler as one JSON line, and the replay that checks it.

    {"version": 1, "settings": …, "topology": …, "shape": …, "profile": …, …}
    {"call": "submit", "args": […], "outcome": …}
    {"call": "next_batch", "args": [now, [0]], "outcome": […]}

`RecordingScheduler` passes calls on and writes them; `replay` runs the same calls against a new
scheduler and stops at the first line that differs by a byte. Same inputs, same batches: a fleet's
decision can be studied on a laptop. Calls that decide nothing (`layout`, `load`, `cached_pages`,
`displaced`, `wanted_groups`, `releasable`) are passed on and not written.
"""

from __future__ import annotations

from collections import abc
from typing import Any

import msgspec

from medha.batch import Batch, BatchResult, Move
from medha.config import Scheduling
from medha.corrections import Learned
from medha.errors import MedhaError, ProtocolError, SpecError
from medha.messages.fields import Load
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile
from medha.request import Request, SloClass
from medha.scheduling.interface import Admitted, Ahead, Completed, Failure
from medha.scheduling.scheduler import Scheduler
from medha.topology import Topology

VERSION = 2


class LogHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line: everything needed to construct the scheduler."""

    settings: Scheduling
    topology: Topology
    shape: ModelShape
    profile: Profile
    budget_s: float
    step_tokens: int
    learned: Learned
    pages_per_group: int
    page_tokens: int
    max_context_tokens: int
    classes: tuple[SloClass, ...]
    version: int = VERSION


class LogEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A call with its arguments and its outcome, or the error that it raised."""

    call: str
    args: msgspec.Raw
    outcome: msgspec.Raw


class RecordingScheduler:
    """Implements `SchedulerInterface` around a scheduler.

    `write` receives one line per decision, newline included.
    """

    def __init__(self, scheduler: Scheduler, write: abc.Callable[[bytes], object]) -> None:
        self.scheduler, self._write = scheduler, write
        self.topology, self.settings = scheduler.topology, scheduler.settings
        write(msgspec.json.encode(header(scheduler)) + b"\n")

    def submit(self, request: Request, now: float, hashes: abc.Sequence[bytes] = ()) -> Admitted:
        outcome: Admitted = self._call("submit", request, now, tuple(hashes))
        return outcome

    def abort(self, id: str, now: float) -> None:
        self._call("abort", id, now)

    def next_batch(self, now: float, free_groups: frozenset[int]) -> Batch | None:
        batch: Batch | None = self._call("next_batch", now, tuple(sorted(free_groups)))
        return batch

    def stage_done(self, number: int, stage: int, now: float) -> None:
        self._call("stage_done", number, stage, now)

    def complete(self, number: int, result: BatchResult, now: float) -> tuple[Completed, ...]:
        done: tuple[Completed, ...] = self._call("complete", number, result, now)
        return done

    def take_failed(self) -> tuple[Failure, ...]:
        failed: tuple[Failure, ...] = self._call("take_failed")
        return failed

    def take_kv_events(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        events: tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]
        events = self._call("take_kv_events")
        return events

    def group_joined(self, group: int, generation: int, now: float) -> None:
        self._call("group_joined", group, generation, now)

    def regenerated(self, generation: int, now: float) -> None:
        self._call("regenerated", generation, now)

    def group_lost(self, group: int, generation: int, now: float) -> tuple[int, ...]:
        lost: tuple[int, ...] = self._call("group_lost", group, generation, now)
        return lost

    def group_released(self, group: int, generation: int, now: float) -> None:
        self._call("group_released", group, generation, now)

    def plan_moves(self, now: float) -> tuple[Move, ...]:
        moves: tuple[Move, ...] = self._call("plan_moves", now)
        return moves

    def moved(self, move_id: int, ok: bool, now: float) -> None:
        self._call("moved", move_id, ok, now)

    def layout(self, seq: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        return self.scheduler.layout(seq)

    def load(self, now: float) -> Load:
        return self.scheduler.load(now)

    def ahead(self, now: float) -> Ahead:
        return self.scheduler.ahead(now)

    def cached_pages(self, group: int) -> int:
        return self.scheduler.cached_pages(group)

    def displaced(self) -> tuple[int, ...]:
        return self.scheduler.displaced()

    def wanted_groups(self, now: float) -> int:
        return self.scheduler.wanted_groups(now)

    def releasable(self, now: float) -> tuple[int, ...]:
        return self.scheduler.releasable(now)

    def _call(self, name: str, *args: Any) -> Any:
        try:
            outcome = getattr(self.scheduler, name)(*_arguments(name, args))
        except MedhaError as error:
            self._write(line(name, args, {"error": str(error)}))
            raise
        self._write(line(name, args, outcome))
        return outcome


def header(scheduler: Scheduler) -> LogHeader:
    """Return the settings and sizes of a scheduler, before its first call."""
    predictor = scheduler.predictor
    return LogHeader(
        settings=scheduler.settings,
        topology=scheduler.topology,
        shape=scheduler.shape,
        profile=predictor.profile,
        budget_s=predictor.budget_s,
        step_tokens=predictor.step_tokens,
        learned=predictor.learned(),
        pages_per_group=scheduler.pages_per_group,
        page_tokens=scheduler.page_tokens,
        max_context_tokens=scheduler.max_context_tokens,
        classes=scheduler.classes,
    )


def line(name: str, args: tuple[Any, ...], outcome: Any) -> bytes:
    """Encode a line of the log."""
    call = LogEntry(
        name, msgspec.Raw(msgspec.json.encode(args)), msgspec.Raw(msgspec.json.encode(outcome))
    )
    return msgspec.json.encode(call) + b"\n"


def replay(lines: abc.Iterable[bytes]) -> int:
    """Run a log again; return how many calls had the same outcome.

    Raises ProtocolError at the first line whose outcome differs, SpecError at one that cannot be
    read.
    """
    rows = iter(lines)
    scheduler = _new_scheduler(next(rows, b""))
    count = 0
    for row in rows:
        try:
            call = msgspec.json.decode(row, type=LogEntry)
            args = msgspec.json.decode(call.args, type=_ARGUMENTS[call.call])
        except (msgspec.MsgspecError, KeyError) as error:
            raise _unreadable(count + 2, f"a decision ({error})") from None
        written: list[bytes] = []
        try:
            outcome = getattr(scheduler, call.call)(*_arguments(call.call, args))
            written.append(line(call.call, args, outcome))
        except MedhaError as error:
            written.append(line(call.call, args, {"error": str(error)}))
        if written[0].rstrip() != row.rstrip():
            raise ProtocolError(
                f"line {count + 2} comes out differently: logged {row.decode()[:400]!r},"
                f" now {written[0].decode()[:400]!r}"
            )
        count += 1
    return count


def _new_scheduler(row: bytes) -> Scheduler:
    try:
        top = msgspec.json.decode(row, type=LogHeader)
    except msgspec.MsgspecError as error:
        raise _unreadable(1, f"the heading of a decision log ({error})") from None
    if top.version != VERSION:
        raise _unreadable(1, f"of version {VERSION}, not {top.version}")
    predictor = Predictor(top.profile, top.shape, top.topology, top.budget_s, top.step_tokens)
    predictor.restore(top.learned)
    return Scheduler(
        top.topology,
        top.shape,
        predictor,
        top.settings,
        top.pages_per_group,
        top.page_tokens,
        top.max_context_tokens,
        top.classes,
    )


def _unreadable(line: int, expected: str) -> SpecError:
    return SpecError("LOG", f"line {line}", f"must be {expected}", "name the file that was logged")


def _arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments as the scheduler takes them: JSON has no sets."""
    return (args[0], frozenset(args[1])) if name == "next_batch" else args


_ARGUMENTS: dict[str, Any] = {
    "submit": tuple[Request, float, tuple[bytes, ...]],
    "abort": tuple[str, float],
    "next_batch": tuple[float, tuple[int, ...]],
    "stage_done": tuple[int, int, float],
    "complete": tuple[int, BatchResult, float],
    "take_failed": tuple[()],
    "take_kv_events": tuple[()],
    "group_joined": tuple[int, int, float],
    "regenerated": tuple[int, float],
    "group_lost": tuple[int, int, float],
    "group_released": tuple[int, int, float],
    "plan_moves": tuple[float],
    "moved": tuple[int, bool, float],
}
