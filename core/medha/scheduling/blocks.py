"""Page accounting: which pages are free, held, kept for a later prompt, or spoken for.

Ids only; the tensors belong to the ranks. Every page of a group is in exactly one place:

    free        nobody's
    held        by one sequence, or by several if it has a name
    cached      no reference, but named by its hash: a later prompt may share it; oldest go first

`reserved` counts pages that started sequences will still take: they are not yet anybody's, and
`available` leaves them out, so a prompt once started always finds its pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class GroupPages:
    """The pages of one KVP group.

    `touched` collects hashes that became findable or ceased to be.
    """

    __slots__ = (
        "_cached", "_free", "_hash_of", "_held", "_page_of", "_shared", "reserved", "total",
        "touched",
    )  # fmt: skip

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self._free = array("i", range(total - 1, -1, -1))
        self._held = 0
        self._shared: dict[int, int] = {}  # holders of a page that has more than one
        self._cached: dict[int, None] = {}
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self.touched: dict[bytes, None] = {}

    @property
    def unused(self) -> int:
        """Pages that no sequence references."""
        return len(self._free) + len(self._cached)

    @property
    def available(self) -> int:
        """Pages that may still be reserved or taken without breaking a reservation."""
        return len(self._free) + len(self._cached) - self.reserved

    @property
    def cached(self) -> int:
        """Pages that no sequence references, and of which a later prompt may use what they hold."""
        return len(self._cached)

    def take(self) -> int:
        """A page for one holder; evicts the oldest cached one when none is free.

        Raises IndexError when every page is held: callers check `unused` first.
        """
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page = next(iter(self._cached))
            del self._cached[page]
            self._forget(page)
        else:
            raise IndexError(f"all {self.total} pages of the group are held")
        self._held += 1
        return page

    def take_many(self, count: int) -> list[int]:
        """`count` pages for one holder, as `take` would give them."""
        free = self._free
        if count > len(free):
            return [self.take() for _ in range(count)]
        pages = free[-1 : -count - 1 : -1].tolist()
        del free[len(free) - count :]
        self._held += count
        return pages

    def share(self, page: int) -> None:
        """One more holder of a page that is held or cached."""
        if page in self._cached:
            del self._cached[page]
            self._held += 1
        else:
            self._shared[page] = self._shared.get(page, 1) + 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder fewer of each; pass a sequence's pages last first, so that its tail goes first
        when room is needed."""
        shared, hash_of, cached = self._shared, self._hash_of, self._cached
        for page in pages:
            if page in shared:
                shared[page] -= 1
                if shared[page] == 1:
                    del shared[page]
                continue
            if not self._held or page in cached:
                raise ValueError(f"page {page} is released more often than it was taken")
            self._held -= 1
            if page in hash_of:
                cached[page] = None
            else:
                self._free.append(page)

    def name(self, page: int, hash_: bytes) -> None:
        """Make a complete page findable; a second page of equal content stays unnamed."""
        if hash_ not in self._page_of and page not in self._hash_of:
            self._page_of[hash_] = page
            self._hash_of[page] = hash_
            self.touched[hash_] = None

    def hash_of(self, page: int) -> bytes | None:
        return self._hash_of.get(page)

    def rename(self, page: int) -> bytes | None:
        """Take a held page's name off it (its content moves elsewhere)."""
        hash_ = self._hash_of.get(page)
        if hash_ is not None:
            self._forget(page)
        return hash_

    def find(self, hash_: bytes) -> int | None:
        return self._page_of.get(hash_)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of the first hashes are findable here, without a gap."""
        page_of = self._page_of
        count = 0
        for hash_ in hashes:
            if hash_ not in page_of:
                break
            count += 1
        return count

    def names(self) -> list[bytes]:
        """Every hash that is findable here, or was since it was last told."""
        return [*self._page_of, *(name for name in self.touched if name not in self._page_of)]

    def references(self, page: int) -> int:
        """Holders of a page that is not free."""
        return 0 if page in self._cached else self._shared.get(page, 1)

    def check(self) -> None:
        """Every page is in one place only, and reservations are covered (tests call it)."""
        free, cached, shared = set(self._free), set(self._cached), set(self._shared)
        whole = len(free) == len(self._free) and not (free & cached or (free | cached) & shared)
        if not whole or len(free) + len(cached) + self._held != self.total:
            raise AssertionError(
                f"pages: {len(free)} free, {len(cached)} cached, {self._held} held"
            )
        if set(self._hash_of) & free or cached - set(self._hash_of):
            raise AssertionError("a free page has a name, or a cached one has none")
        if len(self._hash_of) != len(self._page_of):
            raise AssertionError("a name leads to another's page")
        if not 0 <= self.reserved <= self.unused:
            raise AssertionError(f"{self.reserved} pages reserved, {self.unused} unused")

    def _forget(self, page: int) -> None:
        hash_ = self._hash_of.pop(page)
        del self._page_of[hash_]
        self.touched[hash_] = None


class Pool:
    """The pages of every running group, and the claims on groups that may still come."""

    def __init__(self, pages_per_group: int, page_tokens: int, groups_max: int) -> None:
        self.pages_per_group, self.page_tokens = pages_per_group, page_tokens
        self.groups_max = groups_max
        self.groups: dict[int, GroupPages] = {}
        self.claimed = 0
        self._gone: list[tuple[int, bytes]] = []

    def __getitem__(self, group: int) -> GroupPages:
        return self.groups[group]

    def join(self, group: int) -> None:
        self.groups[group] = GroupPages(self.pages_per_group)

    def leave(self, group: int) -> None:
        """The group's pages are gone, and whatever was findable there."""
        self._gone.extend((group, hash_) for hash_ in self.groups.pop(group).names())

    @property
    def claimable(self) -> int:
        """Pages of groups that do not run yet and that nobody has claimed."""
        return (self.groups_max - len(self.groups)) * self.pages_per_group - self.claimed

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def leading(self, hashes: Sequence[bytes], groups: tuple[int, ...]) -> list[tuple[int, int]]:
        """(group, page) of the first hashes, as far as any of those groups has them.

        Stays in one group as long as it can, so that a prefix touches few groups.
        """
        found: list[tuple[int, int]] = []
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
            found.append((here, page))
        return found

    def take_events(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """(stored, removed) since the last call, as (group, hash): findable now or no more.

        A hash may be told again; telling it twice changes nothing.
        """
        stored: list[tuple[int, bytes]] = []
        removed, self._gone = self._gone, []
        for group, pages in self.groups.items():
            for hash_ in pages.touched:
                (removed if pages.find(hash_) is None else stored).append((group, hash_))
            pages.touched.clear()
        return stored, removed
