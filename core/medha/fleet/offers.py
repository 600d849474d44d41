"""Offers: what a replica can do for a request, and the order among replicas.

`placement.py` computes them; `Outline` is the cheap part, from which the rank is bounded.
"""

from __future__ import annotations

import math

import msgspec

ALL_GROUPS = -1
"""The group of an offer that counts in the margins of all groups."""

Rank = tuple[bool, bool, float, float, float, str]


class PendingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to place. `due_s`: deadline of its first token on the caller's clock.

    `class_tpot_s`: the tightest TPOT of all classes, in force from a replica's first answer on.
    """

    id: str
    prompt_tokens: int
    max_output_tokens: int = 1
    due_s: float
    tpot_s: float = 0.03
    class_tpot_s: float = math.inf
    slo_class: str = "default"
    tenant: str = ""
    beyond_share: bool = False


class AnswerTime(msgspec.Struct, frozen=True):
    """Time that an answer takes from prefills, from `first_s` for `lasts_s`.

    Meanwhile they take longer by `part` of their time. `first_s` is the earliest first token, on
    the caller's clock.
    """

    part: float = 0.0
    first_s: float = 0.0
    lasts_s: float = 0.0

    def delay_s(self, done_s: float) -> float:
        """Return by how much a prefill that is done at `done_s` ends later."""
        return self.part * max(0.0, min(self.longest_s, done_s - self.first_s))

    @property
    def longest_s(self) -> float:
        """Seconds of prefills that the answer can run alongside."""
        return self.lasts_s / (1.0 + self.part)


NO_ANSWER = AnswerTime()


class PlacementOption(msgspec.Struct, frozen=True, kw_only=True):
    """Offer of one replica for a request; times are seconds from now.

    `fits`: a promise for the deadline breaks no other promise. `earliest_s`: the earliest TTFT that
    could be promised, `needed_s` the same on an idle replica. `finish_s`: the expected time of the
    first token. `work_s`: prefill seconds after `cached_tokens`, `cost_s` as promises count them.
    `decode_s`: what the decode takes of a batch. `firm`: all its groups run, so that it may be
    promised: one to come may not come.
    `roomy`: the pages of the request are free now. `group`: which list of margins in the Load a
    promise is counted in, or ALL_GROUPS. `clear_s`: of a long prompt, when the replica would have
    done it and all else that it has, or its deadline if that is sooner; 0 of a short one.
    `answer_s`: `finish_s` and by how much the decodes of the replica delay the answer. `answer`:
    what it takes from prefills, `taken_s` of this what counts for its tenant at once; `elsewhere`:
    the part by which they take longer in other groups, whose batches its TPOT shortens, too.
    """

    replica: str
    cached_tokens: int
    work_s: float
    cost_s: float
    needed_s: float
    finish_s: float
    earliest_s: float
    fits: bool
    roomy: bool
    pages: int
    free_pages: int
    firm: bool = True
    decode_s: float = 0.0
    group: int = ALL_GROUPS
    clear_s: float = 0.0
    answer_s: float = 0.0
    answer: AnswerTime = NO_ANSWER
    elsewhere: float = 0.0
    taken_s: float = 0.0

    def first_s(self, promised: bool) -> float:
        """Expected time of the first token, for the slack of the request at arrival.

        Requests with less relative slack run first. A promised short prompt never waits for a long
        one, so the earliest possible promise counts if it is sooner. A request without a promise
        waits for all promised ones. It does not wait for the guard that a promise would need,
        because an idle replica has to keep that guard as well.
        """
        if promised:
            return min(self.finish_s, self.earliest_s)
        return max(self.finish_s, self.earliest_s - (self.needed_s - self.work_s))

    @property
    def rank(self) -> Rank:
        """Order among offers; the least is best.

        Offers that keep the promise, then those with free pages, then by `clear_s`, `answer_s`,
        free pages and name. The order is total. A long prompt may be first anywhere, but delays
        what waits there.
        """
        return (
            not self.fits,
            not self.roomy,
            self.clear_s,
            self.answer_s,
            -self.free_pages,
            self.replica,
        )


class Held(msgspec.Struct, frozen=True):
    """A placed request that no Load counts yet: work in seconds, pages of its whole length.

    `charge_s`: what the Load will count for its tenant; `decode_s`: what its decode takes of a
    batch. `answer`, `elsewhere`, `group`: as in PlacementOption.
    """

    due_s: float
    work_s: float
    pages: int
    promised: bool
    tenant: str = ""
    charge_s: float = 0.0
    decode_s: float = 0.0
    beyond_share: bool = False
    group: int = ALL_GROUPS
    answer: AnswerTime = NO_ANSWER
    elsewhere: float = 0.0


class Cost(msgspec.Struct, frozen=True, gc=False):
    """Seconds of a prefill alongside decodes.

    `work_s`: in all; `cost_s`: of stage 0, as promises count it; `own_s`: what delays only the
    prompt itself, behind stage 0 and before a batch that the Load does not know ends. `others`:
    part of the work before it that is left for others.
    """

    work_s: float
    cost_s: float
    own_s: float
    is_long: bool
    others: float = 0.0


class Outline(msgspec.Struct, frozen=True):
    """The part of an offer that limits its rank; see PlacementOption.

    It takes a quarter of the time of the offer. `may_fit`: False if the promise certainly cannot be
    kept. `part` of the decode capacity runs alongside the prompt. `answer`: what its decode takes
    of a batch, and the answer from prefills; `rooms`: work that fits with it, for each list of
    margins; None until that is needed. `free_pages`: the offer may count fewer, of one group.
    """

    cached_tokens: int
    tokens: int
    groups: int
    part: float
    cost: Cost
    answer: tuple[float, AnswerTime] | None
    rooms: list[float] | None
    may_fit: bool
    pages: int
    free_pages: int
    finish_s: float
    clear_s: float
    answer_s: float

    def rank(self, replica: str) -> Rank:
        """Least rank that the offer can have."""
        return (
            not self.may_fit,
            self.pages > self.free_pages,
            self.clear_s,
            self.answer_s,
            -self.free_pages,
            replica,
        )
