"""Page accounting: free, held, cached and reserved pages of each KVP group.

Page ids only; the tensors belong to the ranks. Every page of a group is in exactly one place:

    free        unused
    held        by one sequence, or by several if the page has a hash
    cached      by no sequence, but found by its hash: a later prompt may share it; oldest go first

`reserved` counts pages that started sequences will still take. `available` excludes them, so that a
started prompt always finds its pages.
"""

from __future__ import annotations

import collections
from array import array
from collections import abc

from medha.model import KeptPages


class GroupPages:
    """The pages of one KVP group.

    `available`: pages that may still be reserved or taken without breaking a reservation.
    `kv_events`: hashes cached or removed since the last report.
    """

    __slots__ = (
        "_cached",
        "_free",
        "_free_count",
        "_hash_of",
        "_held",
        "_page_of",
        "_shared",
        "available",
        "kv_events",
        "reserved",
        "total",
    )

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self.available = total
        # The first `_free_count` are free; memory that grew and shrank would be copied.
        self._free = array("i", range(total - 1, -1, -1))
        self._free_count = total
        self._held = 0
        self._shared: dict[int, int] = {}  # holders of a page that has more than one
        # The first to be evicted first; a dict would scan what was deleted at its front.
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.kv_events: dict[bytes, None] = {}

    @property
    def unused(self) -> int:
        """Pages that no sequence references."""
        return self._free_count + len(self._cached)

    @property
    def cached(self) -> int:
        """Unused pages whose contents a later prompt may share."""
        return len(self._cached)

    def take(self) -> int:
        """Take a page for one holder; if none is free, evict the oldest cached one.

        Raises IndexError if every page is held: callers check `unused` first.
        """
        if self._free_count:
            self._free_count -= 1
            page = self._free[self._free_count]
        elif self._cached:
            page = next(iter(self._cached))
            del self._cached[page]
            self._forget(page)
        else:
            raise IndexError(f"all {self.total} pages of the group are held")
        self._held += 1
        self.available -= 1
        return page

    def take_many(self, count: int, reserved: int = 0) -> list[int]:
        """Take `count` pages for one holder; `reserved` of them were reserved."""
        if reserved:
            self.reserve(-reserved)
        left = self._free_count - count
        if left < 0:
            return [self.take() for _ in range(count)]
        if count == 1:
            pages = [self._free[left]]
        else:
            pages = self._free[left : left + count].tolist()
            pages.reverse()
        self._free_count = left
        self._held += count
        self.available -= count
        return pages

    def reserve(self, pages: int) -> None:
        """Reserve `pages` more (or fewer)."""
        self.reserved += pages
        self.available -= pages

    def share(self, page: int) -> None:
        """Add a holder to a page that is held or cached."""
        if page in self._cached:
            del self._cached[page]
            self._held += 1
            self.available -= 1
        else:
            self._shared[page] = self._shared.get(page, 1) + 1

    def release(self, pages: abc.Iterable[int]) -> None:
        """Remove a holder from each page.

        Pass a sequence's pages last first, so that its tail is evicted first.
        """
        shared, hash_of, cached = self._shared, self._hash_of, self._cached
        pages = list(pages)
        if not shared and not hash_of and len(pages) <= self._held:
            self._held -= len(pages)
            self.available += len(pages)
            self._put_back(pages)
            return
        for page in pages:
            if page in shared:
                shared[page] -= 1
                if shared[page] == 1:
                    del shared[page]
                continue
            if not self._held or page in cached:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._held -= 1
            self.available += 1
            if page in hash_of:
                cached[page] = None
            else:
                self._put_back([page])

    def cache(self, page: int, hash_: bytes) -> None:
        """Make a full page findable by hash; a second page of equal content is not cached."""
        if hash_ not in self._page_of and page not in self._hash_of:
            self._page_of[hash_] = page
            self._hash_of[page] = hash_
            self.kv_events[hash_] = None

    def hash_of(self, page: int) -> bytes | None:
        return self._hash_of.get(page)

    def uncache(self, page: int) -> bytes | None:
        """Remove a held page's hash, because its content moves to another page; return the hash."""
        hash_ = self._hash_of.get(page)
        if hash_ is not None:
            self._forget(page)
        return hash_

    def find(self, hash_: bytes) -> int | None:
        return self._page_of.get(hash_)

    def leading(self, hashes: abc.Sequence[bytes]) -> int:
        """Count the leading hashes that are findable here, without a gap."""
        page_of = self._page_of
        count = 0
        for hash_ in hashes:
            if hash_ not in page_of:
                break
            count += 1
        return count

    def leading_pages(self, group: int, hashes: abc.Sequence[bytes]) -> list[tuple[int, int]]:
        """Find the pages of those hashes, as (group, page)."""
        page_of, pages = self._page_of, list[tuple[int, int]]()
        for hash_ in hashes:
            page = page_of.get(hash_)
            if page is None:
                break
            pages.append((group, page))
        return pages

    def known_hashes(self) -> list[bytes]:
        """Return the hashes that are findable here, or were when they were last reported."""
        return [*self._page_of, *(hash_ for hash_ in self.kv_events if hash_ not in self._page_of)]

    def references(self, page: int) -> int:
        """Count the holders of a page that is not free."""
        return 0 if page in self._cached else self._shared.get(page, 1)

    def check(self) -> None:
        """Raise AssertionError if the accounting is inconsistent (tests call this)."""
        stack = self._free[: self._free_count]
        free, cached, shared = set(stack), set(self._cached), set(self._shared)
        whole = len(free) == len(stack) and not (free & cached or (free | cached) & shared)
        if not whole or len(free) + len(cached) + self._held != self.total:
            raise AssertionError(
                f"pages: {len(free)} free, {len(cached)} cached, {self._held} held"
            )
        if set(self._hash_of) & free or cached - set(self._hash_of):
            raise AssertionError("a free page has a hash, or a cached one has none")
        if len(self._hash_of) != len(self._page_of):
            raise AssertionError("a hash leads to another's page")
        if self.available != self.unused - self.reserved:
            raise AssertionError(f"{self.available} pages available, {self.unused} unused")
        if not 0 <= self.reserved <= self.unused:
            raise AssertionError(f"{self.reserved} pages reserved, {self.unused} unused")

    def _put_back(self, pages: list[int]) -> None:
        count = self._free_count + len(pages)
        self._free[self._free_count : count] = array("i", pages)
        self._free_count = count

    def _forget(self, page: int) -> None:
        hash_ = self._hash_of.pop(page)
        del self._page_of[hash_]
        self.kv_events[hash_] = None


class BlockPool:
    """The pages of every running group, and the claims on groups that do not run yet.

    `kept`: which pages a sequence keeps. If it `slides`, the window moves on and leaves pages
    behind, and each sequence lies in one group.
    """

    def __init__(self, pages_per_group: int, kept: KeptPages, groups_max: int) -> None:
        self.pages_per_group, self.page_tokens = pages_per_group, kept.page_tokens
        self.kept, self.slides = kept, kept.window_tokens > 0
        self.groups_max = groups_max
        self.groups: dict[int, GroupPages] = {}
        self.claimed = 0
        self._gone: list[tuple[int, bytes]] = []

    def __getitem__(self, group: int) -> GroupPages:
        return self.groups[group]

    def join(self, group: int) -> None:
        self.groups[group] = GroupPages(self.pages_per_group)

    def leave(self, group: int) -> None:
        """Remove a group with its pages and their hashes."""
        self._gone.extend((group, hash_) for hash_ in self.groups.pop(group).known_hashes())

    @property
    def claimable(self) -> int:
        """Unclaimed pages of groups that do not run yet."""
        if self.slides:
            return 0
        return (self.groups_max - len(self.groups)) * self.pages_per_group - self.claimed

    def claim(self, pages: int) -> None:
        """Claim `pages` more (or fewer) of groups that do not run yet."""
        self.claimed += pages

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def most_pages(self) -> int:
        """Pages that a sequence can hold if all groups run."""
        return (1 if self.slides else self.groups_max) * self.pages_per_group

    def most_tokens(self, limit: int) -> int:
        """Return the tokens of the longest context that can be computed, at most `limit`."""
        if self.kept.least(limit) <= self.most_pages:
            return limit
        return self.most_pages * self.page_tokens

    def pages_needed(self, tokens: int) -> int:
        """Return the pages that a context of `tokens` reserves, at most those that can exist."""
        pages = self.kept.pages(tokens) if self.slides else self.pages_for(tokens)
        return min(pages, self.most_pages)

    def hit(
        self, hashes: abc.Sequence[bytes], groups: tuple[int, ...]
    ) -> tuple[int, list[tuple[int, int]]]:
        """Find the longest prefix in those groups, as the pages before its window, which nothing
        needs, and the others as (group, page)."""
        if not self.slides:
            return 0, self.leading(hashes, groups)
        longest, here = 0, -1
        for group in groups:
            end = self._longest_hit(hashes, self.groups[group])
            if end > longest:
                longest, here = end, group
        first = self.kept.first_page(longest * self.page_tokens)
        pages = [self.groups[here].find(hash_) for hash_ in hashes[first:longest]]
        return first, [(here, page) for page in pages if page is not None]

    def _longest_hit(self, hashes: abc.Sequence[bytes], pages: GroupPages) -> int:
        return self.kept.longest_hit(len(hashes), lambda page: pages.find(hashes[page]) is not None)

    def leading(
        self, hashes: abc.Sequence[bytes], groups: tuple[int, ...]
    ) -> list[tuple[int, int]]:
        """Find the leading hashes in any of those groups, as (group, page).

        Stays in one group as long as possible, so that a prefix lies in few groups.
        """
        if len(groups) == 1:
            return self.groups[groups[0]].leading_pages(groups[0], hashes)
        pages: list[tuple[int, int]] = []
        order = sorted(groups, key=lambda group: -self.groups[group].leading(hashes))
        here = order[0] if order else -1
        for hash_ in hashes:
            page = self.groups[here].find(hash_) if order else None
            if page is None:
                for group in order:
                    page = self.groups[group].find(hash_)
                    if page is not None:
                        here = group
                        break
                else:
                    break
            pages.append((here, page))
        return pages

    def take_events(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """Return (stored, removed) since the last call, each as (group, hash).

        A hash may be reported twice; the second report changes nothing.
        """
        stored: list[tuple[int, bytes]] = []
        removed, self._gone = self._gone, []
        for group, pages in self.groups.items():
            for hash_ in pages.kv_events:
                (removed if pages.find(hash_) is None else stored).append((group, hash_))
            pages.kv_events.clear()
        return stored, removed
