"""The scheduler as the controller sees it: `Scheduler`, or `Recorded` around one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from medha.batch import Batch, BatchResult, Move
from medha.messages import Load
from medha.request import Request


class Admitted(Protocol):
    """What submit answers."""

    @property
    def seq(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def promised(self) -> bool: ...

    @property
    def predicted_ttft_s(self) -> float: ...


class Completed(Protocol):
    """A sequence that a batch finished."""

    @property
    def seq(self) -> int: ...

    @property
    def reason(self) -> str: ...


class Failure(Protocol):
    """A sequence that cannot be finished here."""

    @property
    def seq(self) -> int: ...

    @property
    def code(self) -> str: ...

    @property
    def message(self) -> str: ...


class Decider(Protocol):
    """See `medha.scheduling.scheduler.Scheduler`; `now` is seconds on the controller's clock."""

    def submit(self, request: Request, now: float, hashes: Sequence[bytes] = ()) -> Admitted: ...

    def abort(self, id: str, now: float) -> None: ...

    def next_batch(self, now: float, free_groups: frozenset[int]) -> Batch | None: ...

    def stage_done(self, number: int, stage: int, now: float) -> None: ...

    def complete(self, number: int, result: BatchResult, now: float) -> Sequence[Completed]: ...

    def layout(self, seq: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]: ...

    def load(self, now: float) -> Load: ...

    def displaced(self) -> tuple[int, ...]: ...

    def group_joined(self, group: int, generation: int, now: float) -> None: ...

    def group_lost(self, group: int, generation: int, now: float) -> tuple[int, ...]: ...

    def regenerated(self, generation: int, now: float) -> None: ...

    def group_released(self, group: int, generation: int, now: float) -> None: ...

    def wanted_groups(self, now: float) -> int: ...

    def releasable(self, now: float) -> tuple[int, ...]: ...

    def plan_moves(self, now: float) -> tuple[Move, ...]: ...

    def moved(self, move_id: int, ok: bool, now: float) -> None: ...

    def take_failed(self) -> Sequence[Failure]: ...

    def take_kv_events(
        self,
    ) -> tuple[Sequence[tuple[int, bytes]], Sequence[tuple[int, bytes]]]: ...
