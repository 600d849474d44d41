"""Running KVP groups: where a sequence lives, and when it grows into the next group.

    tokens of a sequence    | g0: tokens_per_group | g1: tokens_per_group | g2 … newest, tail |

A short sequence lives in one group. A long one is assigned several groups when it is accepted. The
next of them becomes active at a chunk border, when the sequence exceeds what the active groups
should hold (Medha, section 3.3: the iteration time stays constant, whatever the context), or when
their pages run out. Pages that no running group can hold are claimed of groups that may come. If
every layer has a window, a sequence stays in one group and drops the pages that no layer sees any
more; it keeps what it needs for the next chunk reserved. This module takes and returns pages; it
knows no order and no deadlines.
"""

from __future__ import annotations

from collections.abc import Callable

from medha.scheduling.block_pool import BlockPool
from medha.scheduling.native import Spans
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting_queue import WaitingQueues

MOST_CACHED = 8
"""Prompts that better stay with their cached pages, after which an idle group looks no further."""


class KvGroups:
    """The running groups of a replica, and the sequences that live in them.

    `ranked`: prompts are kept or relegated. `shared`: sequences that hold, are assigned or claim
    more than one group; `large`: those that need several when they start; `holders`: those that
    have started, until their pages are free.
    """

    def __init__(self, pool: BlockPool, queues: WaitingQueues, *, ranked: bool) -> None:
        self.pool, self.queues, self.ranked = pool, queues, ranked
        self.tokens_per_group = queues.tokens_per_group
        self.running = queues.by_group
        self.last_used_s: dict[int, float] = {}
        self.shared: dict[int, Sequence] = {}
        self.large: dict[int, Sequence] = {}
        self.holders: dict[int, Sequence] = {}
        self._spans: Spans | None = None

    def __contains__(self, group: int) -> bool:
        return group in self.running

    def join(self, group: int, now: float) -> None:
        self.pool.join(group)
        self.queues.join(group)
        self.last_used_s[group] = now
        self._spans = None

    def leave(self, group: int) -> None:
        self.pool.leave(group)
        self.queues.leave(group)
        del self.last_used_s[group]
        self._spans = None

    def mark_used(self, groups: tuple[int, ...], now: float) -> None:
        for group in groups:
            self.last_used_s[group] = now

    # --- where a sequence lives -------------------------------------------------------------------

    def groups_needed(self, sequence: Sequence) -> int:
        """Count the groups that the sequence needs in the end, by tokens and by pages."""
        most = self.pool.groups_max
        by_tokens = -(-sequence.target_tokens // self.tokens_per_group)
        by_pages = -(-self.queues.pages_needed(sequence) // self.pool.pages_per_group)
        return max(1, min(most, max(by_tokens, by_pages)))

    def most_needed(self) -> int:
        """Return the most groups that a large sequence needs; 1 without any.

        As output is produced, a sequence needs no more groups than when it started.
        """
        most = 1
        for sequence in self.large.values():
            most = max(most, self.groups_needed(sequence))
            if most == self.pool.groups_max:
                break
        return most

    def measure(self, sequence: Sequence) -> None:
        """Update `large`: the sequence is new, or its output became a part of its prompt."""
        if self.groups_needed(sequence) > 1:
            self.large[sequence.number] = sequence

    def assign(self, sequence: Sequence, room_s: Callable[[int, int], float] | None = None) -> int:
        """Assign groups to the sequence; return how many of its tokens they have cached.

        Groups where its prefill would end earliest come first (kept work that is due sooner, and
        its own behind the cached tokens), then those with least pending work and most free pages.
        If no group runs, none is assigned. `room_s(group, cached tokens)`: what is left to promises
        in a group with the sequence among them. A sequence of one group goes where that is most, if
        there are pages.
        """
        cached = self._cached_tokens(sequence) if len(self.running) > 1 else {}
        due_s = sequence.request.due_s
        needed, pages = self.groups_needed(sequence), self.queues.pages_needed(sequence)

        def cost(group: int) -> tuple[float, float, int, int]:
            here, free = cached.get(group, 0), self.pool[group].available
            if room_s is not None and needed == 1:
                lacks = pages > free and pages - self._held_pages(sequence, group) > free
                return lacks, -room_s(group, here), -free, group
            own_s = (
                self.queues.times.alongside_s(here, sequence.target_tokens, 0.0) if cached else 0.0
            )
            pending_s = self.queues.pending_s(group)
            ahead_s = self.queues.ahead_s(group, due_s) if self.ranked else pending_s
            return ahead_s + own_s, pending_s, -free, group

        order = sorted(self.running, key=cost) if len(self.running) > 1 else [*self.running]
        sequence.assign(tuple(order[:needed]))
        self.update_shared(sequence)
        return self._cached_in(sequence, sequence.assigned_groups)

    def find_cached(
        self, sequence: Sequence, groups: tuple[int, ...]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Find the prefix that those groups have cached: see `BlockPool.hit`.

        Never the whole prompt: the last token is always computed.
        """
        if not sequence.hashes:
            return 0, []
        usable = (sequence.target_tokens - 1) // self.pool.page_tokens
        return self.pool.hit(sequence.hashes[:usable], groups)

    def _cached_tokens(self, sequence: Sequence) -> dict[int, int]:
        """Return the tokens of the sequence that running groups have cached, by group."""
        size, cached = self.pool.page_tokens, dict[int, int]()
        if self.pool.slides:
            for group in self.running if sequence.hashes else ():
                unseen, pages = self.find_cached(sequence, (group,))
                if pages:
                    cached[group] = (unseen + len(pages)) * size
            return cached
        for group, _ in self.find_cached(sequence, tuple(self.running))[1]:
            cached[group] = cached.get(group, 0) + size
        return cached

    def _held_pages(self, sequence: Sequence, group: int) -> int:
        """Count the sequence's cached pages in a group that others hold: they need no free page."""
        own = self.pool[group]
        _, pages = self.find_cached(sequence, tuple(self.running))
        return sum([at == group and own.references(page) > 0 for at, page in pages])

    def update_shared(self, sequence: Sequence) -> None:
        """Update `shared` after the sequence's groups changed."""
        if sequence.growth_claim or len({*sequence.assigned_groups, *sequence.groups}) > 1:
            self.shared[sequence.number] = sequence
            self._spans = None
        else:
            self._unshare(sequence)

    @property
    def spans(self) -> Spans:
        """Sequences that are assigned more than one group."""
        if self._spans is None:
            self._spans = Spans(
                {group: queue.rows for group, queue in self.running.items()},
                [
                    (sequence.key, number, sequence.assigned_groups)
                    for number, sequence in self.shared.items()
                    if len(sequence.assigned_groups) > 1
                ],
            )
        return self._spans

    def allocate(self, sequence: Sequence) -> bool:
        """Reserve the sequence's pages and share its cached ones; False if it does not fit.

        Each assigned group gets pages up to `tokens_per_group`, the last one the rest, as far as
        there is room. The remainder is claimed of groups that may come; what these cannot hold
        either goes where there is room.
        """
        pool = self.pool
        need = self.queues.pages_needed(sequence)
        if len(sequence.assigned_groups) == 1 and not sequence.hashes:
            group = sequence.assigned_groups[0]
            own = pool.groups[group]
            if need <= min(own.available, pool.pages_for(self.tokens_per_group)):
                own.reserve(need)
                sequence.allocate({group: need})
                self.holders[sequence.number] = sequence
                return True
            if need > own.available + max(0, pool.claimable):
                return False
        unseen, cached = self.find_cached(sequence, sequence.assigned_groups)
        revived: dict[int, int] = {}
        for group, page in cached:
            if not pool[group].references(page):
                revived[group] = revived.get(group, 0) + 1
        if pool.slides:  # what it shares with others is not free when it drops it
            rest = pool.pages_for(self.queues.tokens_planned(sequence)) - unseen - len(cached)
            need = min(rest, need - sum(revived.values()))
        else:
            need -= len(cached)
        wanted: dict[int, int] = {}
        for turn, group in enumerate(sequence.assigned_groups):
            room = max(0, pool[group].available - revived.get(group, 0))
            last = turn == len(sequence.assigned_groups) - 1
            whole = last and len(sequence.assigned_groups) == self.groups_needed(sequence)
            most = need if whole else min(need, pool.pages_for(self.tokens_per_group))
            wanted[group] = min(room, most)
            need -= wanted[group]
        for group in sequence.assigned_groups if need > max(0, pool.claimable) else ():
            room = max(0, pool[group].available - revived.get(group, 0) - wanted[group])
            more = min(room, need)
            wanted[group] += more
            need -= more
        if any(pool[group].available < count for group, count in revived.items()):
            return False
        if need > max(0, pool.claimable):
            return False
        for group, page in cached:
            pool[group].share(page)
        for group, pages in wanted.items():
            pool[group].reserve(pages)
        sequence.allocate(wanted)
        self.holders[sequence.number] = sequence
        sequence.claim(need)
        pool.claim(need)
        sequence.reuse(unseen, cached, pool.page_tokens)
        if sequence.number not in self.shared:
            self.update_shared(sequence)
        return True

    def catch_up(self, sequence: Sequence) -> int:
        """Take over the next pages if others have computed them since the sequence started.

        Returns how many tokens its next chunk may have: as far as it must compute itself. A page
        that it has begun it ends first; a promised one does not, as that may take a batch more.
        """
        left, groups = sequence.remaining_tokens, sequence.assigned_groups
        if not sequence.hashes or len(groups) != 1 or self.pool.slides:
            return left
        size, pages = self.pool.page_tokens, self.pool.groups[groups[0]]
        page, filled = len(sequence.page_of), sequence.scheduled_tokens % size
        usable = min(len(sequence.hashes), (sequence.target_tokens - 1) // size)
        if page >= usable or pages.find(sequence.hashes[page]) is None:
            return left
        if filled:
            return left if sequence.promised else size - filled
        most = min(usable, page + sequence.reserved.get(groups[0], 0))
        cached = pages.leading_pages(groups[0], sequence.hashes[page:most])
        self._return_reserve(sequence, len(cached))
        for _, shared in cached:
            pages.share(shared)
        sequence.catch_up(cached, size)
        self.queues.update_work(sequence)
        return sequence.remaining_tokens

    def steal_work(self, group: int) -> Sequence | None:
        """Move an unstarted prompt from the busiest group to an idle one; return the prompt.

        What a prompt finds cached stays where it is: it moves if it ends sooner all the same.
        """
        queues = self.running
        if len(queues) == 1 or len(queues[group]):
            return None
        busiest = max(
            (other for other in queues if other != group),
            key=lambda other: (self.queues.pending_s(other), -other),
        )
        most_cached = MOST_CACHED
        for row, sequence in enumerate(queues[busiest].sequences):
            movable = len(sequence.assigned_groups) == 1 and not sequence.started
            movable = movable and not sequence.preempted and self.groups_needed(sequence) == 1
            needed = self.queues.pages_needed(sequence) if movable else 0
            if not movable or needed > self.pool[group].available:
                continue
            cached = self._cached_in(sequence, (group,))
            if self._ends_sooner(sequence, busiest, row, cached):
                self.queues.transfer(sequence, group, cached)
                return sequence
            most_cached -= 1
            if not most_cached:
                break
        return None

    def _ends_sooner(self, sequence: Sequence, source: int, row: int, there: int) -> bool:
        """Return whether a row of a group ends sooner in an idle one, which has `there` cached.

        It does if its own group has no pages for it.
        """
        if not sequence.hashes:
            return True
        here = self._cached_in(sequence, (source,))
        missing = self.queues.pages_needed(sequence) - here // self.pool.page_tokens
        if missing > self.pool[source].available:
            return True
        times, tokens = self.queues.times, sequence.target_tokens
        before_s = self.running[source].rows.work_before_s(row)
        there_s = times.alongside_s(there, tokens, 0.0)
        return there_s <= before_s + times.alongside_s(here, tokens, 0.0)

    def _cached_in(self, sequence: Sequence, groups: tuple[int, ...]) -> int:
        """Return how many of the tokens those groups have cached together."""
        unseen, pages = self.find_cached(sequence, groups)
        return (unseen + len(pages)) * self.pool.page_tokens

    def releasable(self, least: int, before_s: float) -> tuple[int, ...]:
        """Return the topmost groups from `least` on that are empty and unused since `before_s`."""
        empty_groups = []
        for group in sorted(self.running, reverse=True):
            pages = self.pool[group]
            empty = pages.unused == pages.total and not pages.reserved
            if group < least or not empty or len(self.running[group]):
                break
            if self.last_used_s[group] > before_s:
                break
            empty_groups.append(group)
        return tuple(empty_groups)

    # --- the next chunk ---------------------------------------------------------------------------

    def obtainable(self, sequence: Sequence, group: int) -> int:
        """Count the pages that the sequence may still take in `group`."""
        available = self.pool.groups[group].available
        return sequence.reserved.get(group, 0) + (available if available > 0 else 0)

    def next_tail(self, sequence: Sequence) -> tuple[int, int]:
        """Return (group, tokens): where the next tokens go and how many fit there; 0: no room.

        A partial last page binds the tail. At a page border the newest group takes over if the
        active ones hold what they should, else the one with the fewest tokens (ties: the highest).
        """
        size = self.pool.page_tokens
        filled = sequence.scheduled_tokens % size
        held = sequence.tokens_by_group
        if len(sequence.assigned_groups) == 1 and len(held) <= 1 and not filled:
            tail = sequence.assigned_groups[0]
            room = self.obtainable(sequence, tail)
            if room and (not held or tail in held):
                return tail, size * room
        if filled:
            tail = sequence.group_of[-1]
            return tail, size - filled + size * self.obtainable(sequence, tail)
        if self.pool.slides:
            return (sequence.assigned_groups or (-1,))[0], 0
        active = len(held)
        tail = -1
        if sequence.scheduled_tokens >= active * self.tokens_per_group or not active:
            tail = next((group for group in sequence.assigned_groups if group not in held), -1)
        if tail >= 0 and self.obtainable(sequence, tail):
            return tail, size * self.obtainable(sequence, tail)
        if not active:
            active_groups: list[int] = list(sequence.assigned_groups[:1])
        else:
            active_groups = sorted(held, key=lambda group: (held[group], -group))
        others = [group for group in sequence.assigned_groups if group not in held]
        others += sorted(
            (group for group in self.running if group not in held and group not in others),
            key=lambda group: (self.queues.pending_s(group), -self.pool[group].available, group),
        )
        for group in active_groups + others:
            room = self.obtainable(sequence, group)
            if room:
                return group, size * room
        return active_groups[0] if active_groups else -1, 0

    def overhang(self, sequence: Sequence, length: int, tail: int) -> int:
        """Count the tokens to cut off a chunk, so that the next group takes over at a page border.

        0 if no group takes over, or if the prompt ends with the chunk.
        """
        end, size = sequence.scheduled_tokens + length, self.pool.page_tokens
        active = len(sequence.tokens_by_group) + (tail not in sequence.tokens_by_group)
        full = end >= active * self.tokens_per_group and len(sequence.assigned_groups) > active
        if not full or end == sequence.target_tokens:
            return 0
        return end % size if end % size < length else 0

    def reserve(self, sequence: Sequence, length: int, tail: int) -> None:
        """Reserve the pages of a drafted chunk in `tail` beyond those reserved there already.

        Nothing else in the draft may count on them; as many fewer are reserved elsewhere.
        """
        pages = -(-(sequence.scheduled_tokens + length) // self.pool.page_tokens)
        extra = pages - len(sequence.page_of) - sequence.reserved.get(tail, 0)
        if extra > 0:
            own = sequence.take_reserve(tail)
            self._return_reserve(sequence, extra)
            sequence.reserve(tail, own + extra)
            self.pool.groups[tail].reserve(extra)

    def extend(self, sequence: Sequence, length: int, tail: int) -> None:
        """Schedule `length` more tokens in `tail`, with the pages that they need."""
        pages = self.pool.groups[tail]
        scheduled = sequence.scheduled_tokens + length
        count = -(-scheduled // self.pool.page_tokens) - len(sequence.page_of)
        own = sequence.reserved.get(tail, 0)
        if own:
            own = min(count, own)
        new = pages.take_many(count, own)
        active = tail in sequence.tokens_by_group
        sequence.schedule(length, tail, new, own)
        if count > own:
            self._return_reserve(sequence, count - own)
        if active:
            return
        if tail not in sequence.assigned_groups:
            sequence.assign_more(tail)
            if not sequence.decoding:
                self.queues.enqueue(sequence)
        self.update_shared(sequence)

    def slide(self, sequence: Sequence, position: int) -> None:
        """Drop the pages that no token from `position` on sees: all before it are computed.

        As many stay reserved as the sequence still needs beyond those that it holds.
        """
        kept = self.pool.kept
        end, first = kept.first_page(position), sequence.first_page
        if end <= first:
            return
        group, size = sequence.tail, self.pool.page_tokens
        pages = self.pool.groups[group]
        pages.release(sequence.drop_before(end, size))
        tokens = sequence.prompt_tokens + sequence.max_output_tokens
        taken, held = len(sequence.page_of), len(sequence.page_of) - end
        needed = min(self.pool.pages_needed(tokens) - held, self.pool.pages_for(tokens) - taken)
        more = min(needed - sequence.reserved.get(group, 0), end - first, pages.available)
        if more > 0:
            pages.reserve(more)
            sequence.reserve(group, more)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pages (the tail is evicted first), reservations and claim."""
        for group, pages in sequence.reserved.items():
            if group in self.pool.groups:
                self.pool[group].reserve(-pages)
        self.pool.claim(-sequence.growth_claim)
        sequence.clear_reserve()
        by_group: dict[int, list[int]] = {}
        held_pages = sequence.page_of[sequence.first_page :]
        if sequence.group_of.count(sequence.tail) == len(held_pages):
            by_group[sequence.tail] = held_pages[::-1]
        else:
            for logical in range(len(sequence.page_of) - 1, sequence.first_page - 1, -1):
                held = by_group.setdefault(sequence.group_of[logical], [])
                held.append(sequence.page_of[logical])
        for group, page_ids in by_group.items():
            if group in self.pool.groups:
                self.pool[group].release(page_ids)
        self._unshare(sequence)
        self.large.pop(sequence.number, None)
        self.holders.pop(sequence.number, None)

    def take_claims(self, group: int, sequences: list[Sequence]) -> list[Sequence]:
        """Give the pages of a new group to sequences that claimed some, oldest first.

        Returns the sequences that live in the group from now on.
        """
        taking = []
        pool = self.pool[group]
        share = self.pool.pages_for(self.tokens_per_group)
        for sequence in sequences:
            moved = min(sequence.growth_claim, share, max(0, pool.available))
            if moved > 0:
                sequence.claim(-moved)
                self.pool.claim(-moved)
                pool.reserve(moved)
                sequence.reserve(group, moved)
            if moved > 0 or len(sequence.assigned_groups) < self.groups_needed(sequence):
                sequence.assign_more(group)
                self.update_shared(sequence)
                taking.append(sequence)
        return taking

    def _unshare(self, sequence: Sequence) -> None:
        if self.shared.pop(sequence.number, None) is not None:
            self._spans = None

    def _return_reserve(self, sequence: Sequence, pages: int) -> None:
        """Reserve fewer pages where none were taken, after a chunk took them elsewhere.

        The growth claim shrinks last.
        """
        reserved = sequence.reserved
        if not sequence.growth_claim and not any(reserved.values()):
            return
        for group in sorted(reserved, key=lambda group: -reserved[group]):
            fewer = min(pages, reserved[group])
            sequence.reserve(group, -fewer)
            self.pool.groups[group].reserve(-fewer)
            pages -= fewer
        fewer = min(pages, sequence.growth_claim)
        sequence.claim(-fewer)
        self.pool.claim(-fewer)
