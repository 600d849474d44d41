"""Which KVP groups run, which of them a sequence lives in, and when it grows into the next.

    tokens of a sequence    | g0: tokens_per_group | g1: tokens_per_group | g2 … newest, tail |

A short sequence lives in one group; a long one gets a plan of groups when it is accepted, and the
next of them becomes active at a chunk border when its tokens exceed what the active ones should
hold (Medha, section 3.3: the time of an iteration stays, whatever the context), or when their pages
run out. What no running group can hold is claimed of groups that may still come. This module takes
and returns pages; it orders nothing and knows no deadlines.
"""

from __future__ import annotations

from medha.predictor import Predictor
from medha.scheduling.blocks import Pool
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting import Waiting


class Groups:
    """The running groups of a replica, with their waiting prefills.

    `shared`: sequences that hold, plan or claim more than one group.
    """

    def __init__(self, pool: Pool, predictor: Predictor, spp: int, output_reserve: float) -> None:
        self.pool, self.predictor, self.spp = pool, predictor, spp
        self.tokens_per_group = predictor.tokens_per_group
        self.output_reserve = output_reserve
        self.generation: dict[int, int] = {}
        self.waiting: dict[int, Waiting] = {}
        self.last_used_s: dict[int, float] = {}
        self.shared: dict[int, Sequence] = {}

    def __contains__(self, group: int) -> bool:
        return group in self.generation

    def join(self, group: int, generation: int, now: float) -> None:
        self.pool.join(group)
        self.generation[group] = generation
        self.waiting[group] = Waiting()
        self.last_used_s[group] = now

    def leave(self, group: int) -> None:
        self.pool.leave(group)
        del self.generation[group], self.waiting[group]
        del self.last_used_s[group]

    # --- rows of waiting prefills -----------------------------------------------------------------

    def pending_s(self, group: int) -> float:
        """Prefill seconds that wait in `group`; exactly 0 when nothing does."""
        return float(self.waiting[group].work_s.sum())

    def works(self, sequence: Sequence, cached: int = 0) -> dict[int, float]:
        """Seconds that each running planned group will be busy with what is not handed out yet.

        `cached`: tokens that it will find when it starts. The k-th planned group works from
        k × tokens_per_group on. Without the pipeline's drain, which delays the request and nobody
        else: T(n) = Σ t + (spp − 1) · max t.
        """
        works: dict[int, float] = {}
        if sequence.packed >= sequence.goal:
            return {group: 0.0 for group in sequence.plan if group in self.generation}
        for turn, group in enumerate(sequence.plan):
            if group in self.generation:
                start = max(sequence.packed, cached, turn * self.tokens_per_group)
                works[group] = self._busy_s(sequence.goal, min(start, sequence.goal))
        return works

    def _busy_s(self, goal: int, cached: int) -> float:
        """With a pipeline a batch waits for the longer one ahead of it: chunks are whole steps, so
        that batches differ by up to one, and half of one is lost with each."""
        busy_s = self.predictor.busy_s(goal, cached)
        budget_s = self.predictor.budget_s
        if self.spp == 1 or busy_s <= budget_s:
            return busy_s
        return busy_s * (1.0 + 0.5 * min(1.0, self.predictor.step_s(goal) / budget_s))

    def enlist(self, sequence: Sequence, cached: int = 0) -> None:
        """Let it wait in every group of its plan."""
        alone = len(sequence.plan) == 1
        need = self.pages_needed(sequence) if alone and not sequence.started else 0
        for group, work_s in self.works(sequence, cached).items():
            if sequence not in self.waiting[group]:
                self.waiting[group].add(sequence, work_s, need)

    def strike(self, sequence: Sequence) -> None:
        """It waits no more."""
        for group in sequence.plan:
            if group in self.generation and sequence in self.waiting[group]:
                self.waiting[group].remove(sequence)

    def refresh(self, sequence: Sequence) -> None:
        """Its cursors moved."""
        if len(sequence.plan) == 1:
            busy_s = 0.0
            if sequence.packed < sequence.goal:
                busy_s = self._busy_s(sequence.goal, sequence.packed)
            self.waiting[sequence.plan[0]].update(sequence, busy_s)
            return
        for group, work_s in self.works(sequence).items():
            self.waiting[group].update(sequence, work_s)

    def mark(self, sequence: Sequence) -> None:
        """Its readiness or its rank changed."""
        for group in sequence.plan:
            waiting = self.waiting.get(group)
            if waiting is not None and sequence in waiting:
                waiting.mark(sequence)

    # --- where a sequence lives -------------------------------------------------------------------

    def pages_needed(self, sequence: Sequence) -> int:
        """Pages of the whole prompt and of a share of its output, but no more than there can be:
        what is waited for must come."""
        pool, output = self.pool, sequence.request.max_output_tokens - sequence.emitted
        pages = pool.pages_for(sequence.goal + int(self.output_reserve * max(0, output)))
        return min(pages, pool.groups_max * pool.pages_per_group)

    def groups_needed(self, sequence: Sequence) -> int:
        """Groups that the sequence wants in the end, by tokens and by pages."""
        most = self.pool.groups_max
        by_tokens = -(-sequence.goal // self.tokens_per_group)
        by_pages = -(-self.pages_needed(sequence) // self.pool.pages_per_group)
        return max(1, min(most, max(by_tokens, by_pages)))

    def plan(self, sequence: Sequence) -> int:
        """Choose its groups, and return how many of its tokens they have cached.

        Those come first where its prefill would end earliest: pending work, and its own behind
        what the group has cached; then free pages. With no group running the plan is empty.
        """
        size = self.pool.page_tokens
        cached: dict[int, int] = {}
        for group, _ in self.found(sequence, tuple(self.generation)):
            cached[group] = cached.get(group, 0) + size

        def cost(group: int) -> tuple[float, int, int]:
            own_s = self._busy_s(sequence.goal, cached.get(group, 0)) if cached else 0.0
            return self.pending_s(group) + own_s, -self.pool[group].available, group

        order = sorted(self.generation, key=cost)
        sequence.plan = tuple(order[: self.groups_needed(sequence)])
        self.note(sequence)
        return len(self.found(sequence, sequence.plan)) * size

    def found(self, sequence: Sequence, groups: tuple[int, ...]) -> list[tuple[int, int]]:
        """(group, page) of the leading pages that those groups have cached; never all of it, as
        the last token is always computed."""
        if not sequence.hashes:
            return []
        usable = (sequence.goal - 1) // self.pool.page_tokens
        found = self.pool.leading(sequence.hashes[:usable], groups)
        return found

    def note(self, sequence: Sequence) -> None:
        """Keep `shared` in step with the sequence's groups."""
        if sequence.claim or len({*sequence.plan, *sequence.groups}) > 1:
            self.shared[sequence.number] = sequence
        else:
            self.shared.pop(sequence.number, None)

    def start(self, sequence: Sequence) -> bool:
        """Reserve its pages and take over what the cache holds of it; False when it does not fit.

        Pages per planned group up to `tokens_per_group`, the rest in the last planned one, as far
        as they have room; what is left is claimed of groups that may come, and what they cannot
        hold either goes where there is room.
        """
        pool = self.pool
        need = self.pages_needed(sequence)
        if len(sequence.plan) == 1 and not sequence.hashes:
            own = pool[sequence.plan[0]]
            if need <= min(own.available, pool.pages_for(self.tokens_per_group)):
                own.reserved += need
                sequence.reserved = {sequence.plan[0]: need}
                sequence.started = True
                return True
            if need > own.available + max(0, pool.claimable):
                return False
        found = self.found(sequence, sequence.plan)
        revived: dict[int, int] = {}
        for group, page in found:
            if not pool[group].references(page):
                revived[group] = revived.get(group, 0) + 1
        need -= len(found)
        wanted: dict[int, int] = {}
        for turn, group in enumerate(sequence.plan):
            room = max(0, pool[group].available - revived.get(group, 0))
            last = turn == len(sequence.plan) - 1
            whole = last and len(sequence.plan) == self.groups_needed(sequence)
            most = need if whole else min(need, pool.pages_for(self.tokens_per_group))
            wanted[group] = min(room, most)
            need -= wanted[group]
        for group in sequence.plan if need > max(0, pool.claimable) else ():
            room = max(0, pool[group].available - revived.get(group, 0) - wanted[group])
            more = min(room, need)
            wanted[group] += more
            need -= more
        if any(pool[group].available < count for group, count in revived.items()):
            return False
        if need > max(0, pool.claimable):
            return False
        for group, page in found:
            pool[group].share(page)
            sequence.page_of.append(page)
            sequence.group_of.append(group)
            sequence.hold(group, pool.page_tokens)
        for group, pages in wanted.items():
            pool[group].reserved += pages
        sequence.reserved = wanted
        sequence.claim = need
        pool.claimed += need
        sequence.packed = sequence.left = sequence.done = len(found) * pool.page_tokens
        sequence.started = True
        self.note(sequence)
        return True

    def forget_group(self, sequence: Sequence, group: int) -> None:
        """The group is gone with its pages: nothing of the sequence is there any more."""
        sequence.plan = tuple(one for one in sequence.plan if one != group)
        sequence.group_of = [-1 if one == group else one for one in sequence.group_of]
        sequence.reserved.pop(group, None)
        if group in sequence.held:
            sequence.let_go(group, sequence.held[group])

    def steal(self, group: int) -> Sequence | None:
        """An idle group takes over a prompt that has not begun, from the group with most to do."""
        if len(self.generation) == 1 or len(self.waiting[group]):
            return None
        busiest = max(
            (one for one in self.generation if one != group),
            key=lambda one: (self.pending_s(one), -one),
        )
        for sequence in self.waiting[busiest].sequences:
            alone = len(sequence.plan) == 1 and not sequence.started and not sequence.taken_back
            alone = alone and self.groups_needed(sequence) == 1
            if alone and self.pages_needed(sequence) <= self.pool[group].available:
                work_s = self.waiting[busiest].work_of(sequence)
                self.strike(sequence)
                sequence.plan = (group,)
                self.waiting[group].add(sequence, work_s, self.pages_needed(sequence))
                return sequence
        return None

    def releasable(self, least: int, before_s: float) -> tuple[int, ...]:
        """Topmost groups from `least` on that hold nothing and were last used before then."""
        found = []
        for group in sorted(self.generation, reverse=True):
            pages = self.pool[group]
            empty = pages.unused == pages.total and not pages.reserved
            if group < least or not empty or len(self.waiting[group]):
                break
            if self.last_used_s[group] > before_s:
                break
            found.append(group)
        return tuple(found)

    # --- the next chunk ---------------------------------------------------------------------------

    def obtainable(self, sequence: Sequence, group: int) -> int:
        """Pages that the sequence may still take in `group`."""
        available = self.pool.groups[group].available
        return sequence.reserved.get(group, 0) + (available if available > 0 else 0)

    def next_tail(self, sequence: Sequence) -> tuple[int, int]:
        """(group, tokens) where its next tokens go and how many fit there; tokens 0: no room.

        The partial last page binds the tail; at a page border the newest group takes over when the
        active ones hold what they should, else the one with the fewest tokens (ties: the highest).
        """
        size = self.pool.page_tokens
        filled = sequence.packed % size
        if len(sequence.plan) == 1 and len(sequence.held) <= 1 and not filled:
            tail = sequence.plan[0]
            room = self.obtainable(sequence, tail)
            if room and (not sequence.held or tail in sequence.held):
                return tail, size * room
        if filled:
            tail = sequence.group_of[-1]
            return tail, size - filled + size * self.obtainable(sequence, tail)
        held = sequence.held
        active = len(held)
        tail = -1
        if sequence.packed >= active * self.tokens_per_group or not active:
            tail = next((group for group in sequence.plan if group not in held), -1)
        if tail >= 0 and self.obtainable(sequence, tail):
            return tail, size * self.obtainable(sequence, tail)
        if not active:
            active_groups: list[int] = list(sequence.plan[:1])
        else:
            active_groups = sorted(held, key=lambda group: (held[group], -group))
        others = [group for group in sequence.plan if group not in held]
        others += sorted(
            (group for group in self.generation if group not in held and group not in others),
            key=lambda group: (self.pending_s(group), -self.pool[group].available, group),
        )
        for group in active_groups + others:
            room = self.obtainable(sequence, group)
            if room:
                return group, size * room
        return active_groups[0] if active_groups else -1, 0

    def overhang(self, sequence: Sequence, length: int, tail: int) -> int:
        """Tokens to leave off a chunk so that it ends at a page border, where the next group can
        take over; 0 where none is to, or where the prompt ends."""
        end, size = sequence.packed + length, self.pool.page_tokens
        active = len(sequence.held) + (tail not in sequence.held)
        full = end >= active * self.tokens_per_group and len(sequence.plan) > active
        if not full or end == sequence.goal:
            return 0
        return end % size if end % size < length else 0

    def bespeak(self, sequence: Sequence, length: int, tail: int) -> None:
        """A plan puts `length` tokens into `tail`: pages beyond those reserved there are reserved
        now, so that nothing else in the plan counts on them; as many fewer elsewhere."""
        count = self.pool.pages_for(sequence.packed + length) - len(sequence.page_of)
        extra = count - sequence.reserved.get(tail, 0)
        if extra > 0:
            own = sequence.reserved.pop(tail, 0)
            self._return_reserve(sequence, extra)
            sequence.reserved[tail] = own + extra
            self.pool[tail].reserved += extra

    def extend(self, sequence: Sequence, length: int, tail: int) -> tuple[int, ...]:
        """Take the pages for `length` more tokens in `tail`; returns the new page ids."""
        pages, packed = self.pool.groups[tail], sequence.packed + length
        count = -(-packed // self.pool.page_tokens) - len(sequence.page_of)
        new = pages.take_many(count)
        own = sequence.reserved.get(tail, 0)
        if own:
            own = min(count, own)
            sequence.reserved[tail] -= own
            pages.reserved -= own
        if count > own:
            self._return_reserve(sequence, count - own)
        sequence.page_of += new
        sequence.group_of += [tail] * count
        sequence.fresh, sequence.packed = count, packed
        if tail in sequence.held:
            sequence.held[tail] += length
            return tuple(new)
        sequence.hold(tail, length)
        if tail not in sequence.plan:
            sequence.plan = (*sequence.plan, tail)
            if not sequence.decoding:
                self.enlist(sequence)
        self.note(sequence)
        return tuple(new)

    def release(self, sequence: Sequence) -> None:
        """Give back its pages, reservations and claim; its tail is forgotten first."""
        for group, pages in sequence.reserved.items():
            if group in self.pool.groups:
                self.pool[group].reserved -= pages
        sequence.reserved = {}
        self.pool.claimed -= sequence.claim
        sequence.claim = 0
        by_group: dict[int, list[int]] = {}
        for group, page in zip(
            reversed(sequence.group_of), reversed(sequence.page_of), strict=True
        ):
            by_group.setdefault(group, []).append(page)
        for group, held in by_group.items():
            if group in self.pool.groups:
                self.pool[group].release(held)
        self.shared.pop(sequence.number, None)

    def claim_in(self, group: int, sequences: list[Sequence]) -> list[Sequence]:
        """A group came: sequences that claimed pages take them there, oldest first."""
        taking = []
        pool = self.pool[group]
        share = self.pool.pages_for(self.tokens_per_group)
        for sequence in sequences:
            moved = min(sequence.claim, share, max(0, pool.available))
            if moved > 0:
                sequence.claim -= moved
                self.pool.claimed -= moved
                pool.reserved += moved
                sequence.reserved[group] = sequence.reserved.get(group, 0) + moved
            if moved > 0 or len(sequence.plan) < self.groups_needed(sequence):
                sequence.plan = (*sequence.plan, group)
                self.note(sequence)
                taking.append(sequence)
        return taking

    def _return_reserve(self, sequence: Sequence, pages: int) -> None:
        """Pages were taken elsewhere than reserved: reserve as many fewer, the claim last."""
        for group in sorted(sequence.reserved, key=lambda one: -sequence.reserved[one]):
            fewer = min(pages, sequence.reserved[group])
            sequence.reserved[group] -= fewer
            self.pool[group].reserved -= fewer
            pages -= fewer
        fewer = min(pages, sequence.claim)
        sequence.claim -= fewer
        self.pool.claimed -= fewer
