"""The surface of a scheduler, as the controller and the simulator drive it.

`Scheduler` decides; `RecordingScheduler` writes a decision log of another one.
"""

from __future__ import annotations

from collections import abc
from typing import NamedTuple, Protocol

import msgspec

from medha.batch import Batch, BatchResult, Move
from medha.config import Scheduling
from medha.messages.fields import Load
from medha.request import Request
from medha.topology import Topology


class Admitted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An accepted request: its number, its cached tokens and the expected time to first token."""

    seq: int
    cached_tokens: int
    promised: bool
    predicted_ttft_s: float


class Ahead(NamedTuple):
    """Work that would run before a most urgent new request: two fields of Load."""

    ahead_s: float
    relegated_ahead_s: float


class Completed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finished sequence; `reason` is `stop` or `length`."""

    seq: int
    request_id: str
    reason: str
    prompt_tokens: int
    output_tokens: int


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request that this replica could not finish; `code` is for the client."""

    seq: int
    request_id: str
    code: str
    message: str


class SchedulerInterface(Protocol):
    """Decisions for one replica. `now` is in seconds on the caller's clock."""

    @property
    def topology(self) -> Topology: ...

    @property
    def settings(self) -> Scheduling: ...

    # --- requests ---------------------------------------------------------------------------------

    def submit(self, request: Request, now: float, hashes: abc.Sequence[bytes] = ()) -> Admitted:
        """Accept a request; `hashes` name its full pages.

        Raises Refusal if the request can never fit, and ProtocolError if its id is in use.
        """
        ...

    def abort(self, id: str, now: float) -> None:
        """Stop a request; unknown ids are ignored. Its pages return once nothing uses them."""
        ...

    # --- batches ----------------------------------------------------------------------------------

    def next_batch(self, now: float, free_groups: frozenset[int]) -> Batch | None:
        """Return the next batch for some of `free_groups`, or None if nothing can run there now.

        Stage 0 of a free group is idle; with `ahead_s` it may also hold one batch. Call until None.
        """
        ...

    def stage_done(self, number: int, stage: int, now: float) -> None:
        """Record that every participant's stage `stage` finished the batch.

        Unknown numbers are ignored.
        """
        ...

    def complete(self, number: int, result: BatchResult, now: float) -> tuple[Completed, ...]:
        """Complete the batch on every participant; return the sequences that finished with it.

        Raises ProtocolError if `result` lacks a yielding chunk of a live sequence.
        """
        ...

    # --- reports ----------------------------------------------------------------------------------

    def layout(self, seq: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Return (group, ((logical page, page id), …)) of a sequence, for a group new to it.

        The layout is that after the newest batch's switches, without the pages which that batch
        itself takes.
        """
        ...

    def load(self, now: float) -> Load:
        """Return the load by which the router places and admits requests."""
        ...

    def ahead(self, now: float) -> Ahead:
        """Return the part of `load` by which requests are granted, in less time."""
        ...

    def cached_pages(self, group: int) -> int:
        """Count the unused pages of a group that the prefix cache can still find."""
        ...

    def displaced(self) -> tuple[int, ...]:
        """Count the requests of each length bucket ever dropped from the promise set."""
        ...

    def take_kv_events(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """Return (stored, removed) pages since the last call, each as (group, hash)."""
        ...

    def take_failed(self) -> tuple[Failure, ...]:
        """Return the requests that could not be finished, since the last call."""
        ...

    # --- groups and moves -------------------------------------------------------------------------

    def group_joined(self, group: int, generation: int, now: float) -> None:
        """Add a running group, which the columns of `generation` include."""
        ...

    def regenerated(self, generation: int, now: float) -> None:
        """Use the columns of a newer generation for shared chunks from now on."""
        ...

    def group_lost(self, group: int, generation: int, now: float) -> tuple[int, ...]:
        """Remove a group that is gone with its pages; return the sequences preempted.

        Its batches are void. Every sequence in them, or with pages in the group, is preempted.
        Shared chunks wait for columns newer than the current ones, unless `generation` is newer
        already.
        """
        ...

    def group_released(self, group: int, generation: int, now: float) -> None:
        """Remove a releasable group that left in good order; `generation` are the columns left."""
        ...

    def wanted_groups(self, now: float) -> int:
        """Return how many groups should run: 0 .. wanted-1."""
        ...

    def releasable(self, now: float) -> tuple[int, ...]:
        """Return the groups, highest first, that were empty for `release_cooldown_s`."""
        ...

    def plan_moves(self, now: float) -> tuple[Move, ...]:
        """Propose copies of pages that even out shards; their target pages are taken at once."""
        ...

    def moved(self, move_id: int, ok: bool, now: float) -> None:
        """End a copy: a later batch switches it, or its target pages return."""
        ...
