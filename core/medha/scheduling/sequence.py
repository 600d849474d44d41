"""A sequence: one accepted request, its cursors, its pages and the transitions of its state.

    position   0 ...... computed ...... past_stage0 ...... scheduled ........... target
               | every stage | left stage 0   | in stage 0      | not yet in a   |
               | is done     |                |                 | batch          |

    WAITING --allocate--> PREFILL --start_decode--> DECODE --finish--> FINISHED
       ^                     |                        |
       +------reset------ PREEMPTED <----preempt------+         finish is possible in every state

`target_tokens` is the prompt; after a preemption it is the prompt and the output so far. During a
prefill the cursors keep the order of the drawing. Only this module assigns a sequence's fields.
"""

from __future__ import annotations

import enum
from collections import abc
from math import inf
from typing import Final

from medha.batch import Chunk, Move
from medha.request import Request


class Status(enum.Enum):
    """Stage of a sequence's life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# Compiled code reads a constant of the module faster than a member of an enum.
WAITING: Final = Status.WAITING
PREFILL: Final = Status.PREFILL
DECODE: Final = Status.DECODE
PREEMPTED: Final = Status.PREEMPTED
FINISHED: Final = Status.FINISHED
NO_PAGES: Final[tuple[int, ...]] = ()
NO_PAGE: Final = -1


class Sequence:
    """State of one accepted request, from submit until its pages are free again.

    `assigned_groups`: KVP groups in the order in which they become active. `kept`: member of the
    promise set; `promised`: by a promise. `started`: pages are allocated, also while a preempted or
    finished sequence waits for batches in flight. `reserved`: pages per group still to be taken;
    `growth_claim`: pages claimed of groups that do not run yet. `new_pages`: pages that the newest
    chunk brings to the ranks; `unsent_pages`: those that the next one brings in front of its own.
    No page before `first_page` is held. `displaced`: others took its place in the
    promise set. `moving`: page copies under way or not yet switched. `rounds_skipped`,
    `blocked_since_s`: how long it has waited for its groups to be free together;
    `declined_together`: they were, and it was not chosen. `held_s`: its place while it decodes,
    `taken_s`: what its answer takes from prefills, and `charged_s`: what its tenant has been
    charged, in seconds of the replica. `row`: its last known row in a waiting queue. `tail`: the
    group of its newest page; `alone`: it lies in one group. `prepared`: the next decode is ready
    and in no batch; `decode_due_s`: when its token is due; `credit_until_s`: when the first token
    that is in no batch in flight is due; `token_at_s`: when the one in flight is complete, by
    prediction.

    Numbers of the request that each token needs are copied: compiled code reads them faster.
    """

    __slots__ = (
        "_tail_tokens",
        "_tokens_by_group",
        "alone",
        "assigned_groups",
        "blocked_since_s",
        "charged_s",
        "computed_tokens",
        "credit_until_s",
        "declined_together",
        "decode_due_s",
        "displaced",
        "first_page",
        "first_token_s",
        "group_of",
        "groups",
        "growth_claim",
        "hashes",
        "held_s",
        "in_flight",
        "kept",
        "key",
        "max_output_tokens",
        "moving",
        "new_pages",
        "next_groups",
        "norm_s",
        "number",
        "output_tokens",
        "page_of",
        "past_stage0_tokens",
        "paused_since_s",
        "prepared",
        "promised",
        "prompt_tokens",
        "request",
        "reserved",
        "rounds_skipped",
        "row",
        "scheduled_tokens",
        "started",
        "status",
        "switching",
        "tail",
        "taken_s",
        "target_tokens",
        "token_at_s",
        "total_work_s",
        "tpot_s",
        "unsent_pages",
    )

    def __init__(self, number: int, request: Request, hashes: abc.Sequence[bytes] = ()) -> None:
        # First what each token needs: compiled, attributes lie in this order, and with thousands of
        # decodes the time is that of fetching them from memory.
        self.status: Status = WAITING
        self.number, self.in_flight, self.moving = number, 0, 0
        self.prepared = self.alone = False
        self.scheduled_tokens = self.output_tokens = self.tail = self._tail_tokens = 0
        self.new_pages = 0
        self.prompt_tokens = request.prompt_tokens
        self.max_output_tokens = request.max_output_tokens
        self.tpot_s = request.tpot_s
        self.first_token_s = self.decode_due_s = 0.0
        self.credit_until_s, self.token_at_s = inf, 0.0
        self.next_groups: tuple[int, ...] = ()

        self.request, self.hashes = request, tuple(hashes)
        self.key = (request.due_s, request.arrival_s, request.id)
        self.assigned_groups: tuple[int, ...] = ()
        self.kept = self.promised = self.displaced = False
        self.total_work_s = self.norm_s = 0.0
        self.held_s = self.taken_s = self.charged_s = 0.0
        self.growth_claim = self.row = 0
        self.reserved: dict[int, int] = {}
        self.reset()

    def reset(self) -> None:
        """Return to the queue: nothing is computed and no page is held."""
        self.status = WAITING
        self.started = False
        self.scheduled_tokens = self.past_stage0_tokens = self.computed_tokens = 0
        self.target_tokens = self.prompt_tokens + self.output_tokens
        self.first_page = 0
        self.page_of: list[int] = []
        self.group_of: list[int] = []
        self.groups: tuple[int, ...] = ()
        self.alone, self.tail = False, -1
        self._tokens_by_group: dict[int, int] = {}
        self._tail_tokens = 0
        self.new_pages = self.unsent_pages = 0
        self.next_groups, self.prepared = (), False
        self.decode_due_s, self.credit_until_s, self.token_at_s = 0.0, inf, 0.0
        self.rounds_skipped, self.declined_together = 0, False
        self.blocked_since_s: float | None = None
        self.paused_since_s: float | None = None
        self.switching: list[Move] = []

    # --- properties -------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def decoding(self) -> bool:
        return self.status is DECODE

    @property
    def preempted(self) -> bool:
        return self.status is PREEMPTED

    @property
    def finished(self) -> bool:
        return self.status is FINISHED

    @property
    def stopped(self) -> bool:
        """Finished or preempted: no further batch may include the sequence."""
        return self.status is FINISHED or self.status is PREEMPTED

    @property
    def tokens_by_group(self) -> dict[int, int]:
        """Tokens that lie in each of `groups`."""
        self._count_tail()
        return self._tokens_by_group

    @property
    def remaining_tokens(self) -> int:
        """Tokens to prefill that are in no batch yet."""
        return self.target_tokens - self.scheduled_tokens

    @property
    def ready(self) -> bool:
        """The next prompt chunk may be scheduled: the previous one has left stage 0."""
        return self.past_stage0_tokens == self.scheduled_tokens and not self.stopped

    def newest_pages(self) -> tuple[int, ...]:
        """Return the pages that the newest chunk brings to the ranks."""
        return tuple(self.page_of[-self.new_pages :]) if self.new_pages else NO_PAGES

    def layout(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Return (group, ((logical page, page id), …)) without the pages of the newest chunk."""
        by_group: dict[int, list[tuple[int, int]]] = {}
        for logical in range(self.first_page, len(self.page_of) - self.new_pages):
            pair = (logical, self.page_of[logical])
            by_group.setdefault(self.group_of[logical], []).append(pair)
        return tuple((group, tuple(by_group[group])) for group in sorted(by_group))

    # --- waiting ----------------------------------------------------------------------------------

    def set_work(self, total_work_s: float, norm_s: float) -> None:
        self.total_work_s, self.norm_s = total_work_s, norm_s
        self.charged_s = total_work_s

    def taken_soon_s(self, part: float, memory_s: float) -> float:
        """Return what its answer takes in the next seconds, at most `memory_s`, at that part."""
        left_s = (self.max_output_tokens - self.output_tokens) * self.tpot_s
        return part * min(memory_s, left_s)

    def hold(self, place_s: float, taken_s: float) -> float:
        """Count what its answer has held and taken; return what is to be charged for it.

        That is whichever is more: its place, or the time of its prompt and of its answer.
        """
        self.held_s += place_s
        self.taken_s += taken_s
        due_s = max(self.held_s, self.total_work_s + self.taken_s) - self.charged_s
        if due_s <= 0.0:
            return 0.0
        self.charged_s += due_s
        return due_s

    def grant_tpot(self, tpot_s: float) -> None:
        """Set the TPOT by which batches are cut: the request's own, or a longer one."""
        self.tpot_s = tpot_s

    def set_rank(self, kept: bool, promised: bool) -> None:
        self.kept, self.promised = kept, promised

    def set_row(self, row: int) -> None:
        self.row = row

    def displace(self) -> None:
        """Record that others took the sequence's place in the promise set."""
        self.displaced = True

    def assign(self, groups: tuple[int, ...]) -> None:
        """Set the groups in which the sequence lives, in the order in which they become active."""
        self.assigned_groups = groups

    def assign_more(self, group: int) -> None:
        self.assigned_groups = (*self.assigned_groups, group)

    def allocate(self, reserved: dict[int, int]) -> None:
        """Start the prefill: pages are reserved."""
        self.reserved = reserved
        self.started = True
        self.status = PREFILL

    def reuse(self, unseen: int, cached: list[tuple[int, int]], page_tokens: int) -> None:
        """Take over cached pages, as (group, page), after `unseen` ones that it does not need.

        The tokens of all these count as computed.
        """
        self._drop(unseen)
        for group, page in cached:
            self.page_of.append(page)
            self.group_of.append(group)
            self.add_tokens(group, page_tokens)
            self.tail = group
        tokens = len(self.page_of) * page_tokens
        self.scheduled_tokens = self.past_stage0_tokens = tokens
        if not self.in_flight:
            self.computed_tokens = tokens

    def catch_up(self, cached: list[tuple[int, int]], page_tokens: int) -> None:
        """Take over the next pages after the start; the next chunk brings them to the ranks."""
        self.reuse(self.first_page, cached, page_tokens)
        self.unsent_pages += len(cached)

    # --- pages ------------------------------------------------------------------------------------

    def reserve(self, group: int, pages: int) -> None:
        """Count `pages` more (or fewer) as reserved in a group."""
        self.reserved[group] = self.reserved.get(group, 0) + pages

    def take_reserve(self, group: int) -> int:
        """Remove the reservation of a group; return its pages."""
        return self.reserved.pop(group, 0)

    def clear_reserve(self) -> None:
        self.reserved = {}
        self.growth_claim = 0

    def claim(self, pages: int) -> None:
        """Claim `pages` more (or fewer) of groups that do not run yet."""
        self.growth_claim += pages

    def add_tokens(self, group: int, tokens: int) -> None:
        if group in self._tokens_by_group:
            self._tokens_by_group[group] += tokens
        else:
            self._tokens_by_group[group] = tokens
            self._set_groups()

    def remove_tokens(self, group: int, tokens: int) -> None:
        self._tokens_by_group[group] -= tokens
        if not self._tokens_by_group[group]:
            del self._tokens_by_group[group]
            self._set_groups()

    def drop_before(self, logical: int, page_tokens: int) -> list[int]:
        """Drop the pages before `logical`, all in the tail's group; return their ids."""
        first = self.first_page
        pages = self.page_of[first:logical]
        self._count_tail()
        self.remove_tokens(self.tail, len(pages) * page_tokens)
        self._drop(logical)
        return pages

    def _drop(self, logical: int) -> None:
        """Hold no page before `logical`."""
        gone = [NO_PAGE] * (logical - self.first_page)
        self.page_of[self.first_page : logical] = gone
        self.group_of[self.first_page : logical] = gone
        self.first_page = logical

    def drop_group(self, group: int) -> None:
        """Forget a lost group with its pages and reservations."""
        self.assigned_groups = tuple(other for other in self.assigned_groups if other != group)
        self.group_of = [-1 if holder == group else holder for holder in self.group_of]
        self.reserved.pop(group, None)
        if group in self.tokens_by_group:
            self.remove_tokens(group, self.tokens_by_group[group])

    def _set_groups(self) -> None:
        self.groups = tuple(sorted(self._tokens_by_group))
        self.alone = len(self.groups) == 1

    def _count_tail(self) -> None:
        """Count the decodes since the newest page was taken; all lie there."""
        if self._tail_tokens:
            self._tokens_by_group[self.tail] += self._tail_tokens
            self._tail_tokens = 0

    # --- batches ----------------------------------------------------------------------------------

    def schedule(self, tokens: int, group: int, pages: list[int], reserved: int = 0) -> None:
        """Put the next `tokens` into a batch; they lie in `group`, `pages` are new.

        `reserved`: how many of the pages were reserved.
        """
        self._count_tail()
        if pages:
            self.page_of += pages
            self.group_of += [group] * len(pages)
            self.tail = group
        if reserved:
            self.reserved[group] -= reserved
        self.new_pages, self.unsent_pages = self.unsent_pages + len(pages), 0
        self.scheduled_tokens += tokens
        self.add_tokens(group, tokens)
        self.in_flight += 1
        assert self.status is DECODE or self.scheduled_tokens <= self.target_tokens

    def schedule_decode(self) -> None:
        """Put the next token into a batch; it lies in the newest page."""
        self.scheduled_tokens += 1
        self._tail_tokens += 1
        self.new_pages = 0
        self.in_flight += 1

    def land(self) -> bool:
        """A batch with the sequence is complete or void, or a prepared decode is withdrawn.

        Returns `stopped`, because every decode of a batch passes here.
        """
        self.in_flight -= 1
        return self.status is FINISHED or self.status is PREEMPTED

    def leave_stage0(self, position: int) -> None:
        """The tokens up to `position` have left stage 0."""
        assert self.past_stage0_tokens <= position <= self.scheduled_tokens
        self.past_stage0_tokens = position

    def complete(self, position: int) -> None:
        """Every stage has computed the tokens up to `position`."""
        assert self.computed_tokens <= position <= self.past_stage0_tokens
        self.computed_tokens = position

    def count_token(self, now: float) -> None:
        """Count an output token that the client receives."""
        if not self.output_tokens:
            self.first_token_s = now
        self.output_tokens += 1

    # --- groups that must be free together --------------------------------------------------------

    def block(self, now: float) -> None:
        """The sequence waits for its groups to be free together."""
        if self.blocked_since_s is None:
            self.blocked_since_s = now

    def skip_round(self) -> None:
        """Another batch ran on a group for which the sequence waits."""
        self.rounds_skipped += 1

    def decline(self) -> None:
        """The groups were free together, and the batch did not include the sequence."""
        self.rounds_skipped, self.blocked_since_s, self.declined_together = 0, None, True

    def run_together(self, *, prefill: bool) -> None:
        """A batch on the sequence's groups includes it."""
        self.rounds_skipped, self.blocked_since_s = 0, None
        if prefill:
            self.declined_together = False

    def pause(self, now: float) -> None:
        """The prefill waits for another group."""
        if self.paused_since_s is None:
            self.paused_since_s = now

    def resume(self) -> None:
        self.paused_since_s = None

    # --- decodes ----------------------------------------------------------------------------------

    def start_decode(self) -> None:
        self.status = DECODE

    def stop_decode(self) -> None:
        self.status = PREFILL
        self.credit_until_s = inf

    def set_decode_due(self, due_s: float) -> None:
        self.decode_due_s = self.credit_until_s = due_s

    def end_credit(self) -> None:
        """Expect no token after the one in flight."""
        self.credit_until_s = inf

    def prepare_decode(self, groups: tuple[int, ...]) -> None:
        """Hold the next decode, on those groups, ready for a batch."""
        self.next_groups, self.prepared = groups, True

    def expect_token(self, at_s: float) -> None:
        """Record when the decode in flight will be complete by prediction."""
        self.token_at_s = at_s

    def withdraw_decode(self) -> None:
        self.next_groups, self.prepared = (), False

    # --- page moves -------------------------------------------------------------------------------

    def begin_move(self) -> None:
        self.moving += 1

    def end_move(self) -> None:
        self.moving -= 1

    def await_switch(self, move: Move) -> None:
        """A copy is done; a later batch switches its pages."""
        self.switching.append(move)

    def cancel_switches(self) -> None:
        self.moving -= len(self.switching)
        self.switching.clear()

    def switch(self, move: Move, page_tokens: int) -> None:
        """Use the copied pages from now on."""
        self._count_tail()
        for logical, page in zip(move.logical, move.to_pages, strict=True):
            self.page_of[logical], self.group_of[logical] = page, move.target
        self.tail = self.group_of[-1]
        tokens = len(move.logical) * page_tokens
        self.remove_tokens(move.source, tokens)
        self.add_tokens(move.target, tokens)
        self.switching.remove(move)
        self.moving -= 1

    # --- the end ----------------------------------------------------------------------------------

    def preempt(self, due_s: float | None) -> None:
        """Stop; the tokens are recomputed later.

        A decode passes `due_s`: its next token is due as soon as a first one would be.
        """
        self.status = PREEMPTED
        if due_s is not None:
            self.kept = self.promised = False
            self.key = (due_s, self.request.arrival_s, self.request.id)

    def finish(self) -> None:
        """Stop for good: completed, aborted or failed."""
        self.status = FINISHED


def take_decodes(sequences: list[Sequence]) -> list[Chunk]:
    """Return the prepared decodes of the sequences for a batch.

    No later batch delays a token in flight, so that credit counts for the next token.
    """
    chunks, chunk = [], Chunk  # compiled code finds a local name faster
    for sequence in sequences:
        sequence.credit_until_s += sequence.tpot_s
        sequence.prepared = False
        pages = sequence.newest_pages()
        start, groups = sequence.scheduled_tokens - 1, sequence.next_groups
        chunks.append(chunk(sequence.number, start, 1, groups, sequence.tail, pages, True, True))
    return chunks
