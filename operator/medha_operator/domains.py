"""Parts of a cluster's topology with the pods that still fit, and which part is the better choice.

Pure. Of parts that will do, the one is taken where a new replica loses least together with the
other replicas of its resource, and of equals the fullest:

    1. crowding   the fewest of them on one node that it comes to share with them
    2. all_here   not the one zone, rack or clique in which all of them stand
    3. slots      the least room, so that large gaps stay for those who need them
    4. name       so that the same world gives the same plan
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

_MOST = 1 << 30


class Domain:
    """A node, or a part of the topology: how many pods of the wanted kind still fit into it."""

    __slots__ = ("children", "name", "node", "parent", "slots")

    def __init__(self, name: str, parent: Domain | None, node: str = "") -> None:
        self.name, self.parent, self.node = name, parent, node
        self.slots = 0
        self.children: dict[str, Domain] = {}

    def child(self, name: str) -> Domain:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = Domain(name, self)
        return found

    def add(self, count: int) -> None:
        """`count` more pods fit here, hence into all that this is a part of."""
        for each in self.chain():
            each.slots += count

    def chain(self) -> Iterator[Domain]:
        """This, what it is a part of, and so on."""
        at: Domain | None = self
        while at is not None:
            yield at
            at = at.parent

    def fitting(self, count: int, siblings: Siblings, need: int = 0) -> Domain | None:
        """The best child that holds `count` by itself, `need` (else all) of them being placed."""
        able = [each for each in self.children.values() if each.slots >= count]
        return min(able, key=lambda each: siblings.rank(each, need or count), default=None)

    def take(self, count: int, siblings: Siblings) -> list[str]:
        """Nodes for `count` pods, neighbours side by side; there must be so many slots."""
        if self.node:
            self.add(-count)
            return [self.node] * count
        taken: list[str] = []
        while (left := count - len(taken)) > 0:
            child = self.fitting(left, siblings) or min(
                self.children.values(),
                key=lambda each: (-each.slots, siblings.crowding(each, each.slots), each.name),
            )
            taken += child.take(min(left, child.slots), siblings)
        return taken


class Siblings:
    """The other replicas of a resource that are to stay: what dies with a node they lose together.

    `places` are the nodes of each, as far as they are in the tree.
    """

    def __init__(self, places: Iterable[Iterable[Domain]] = ()) -> None:
        self._shared: dict[Domain, dict[Domain, int]] = {}  # part -> its nodes -> replicas there
        self._count: dict[Domain, int] = {}  # part -> replicas there
        self._all = 0
        for nodes in places:
            parts = {part for node in nodes for part in node.chain()}
            self._all += bool(parts)
            for part in parts:
                self._count[part] = self._count.get(part, 0) + 1
        for node in [each for each in self._count if each.node]:
            for part in node.chain():
                self._shared.setdefault(part, {})[node] = self._count[node]

    def rank(self, domain: Domain, count: int) -> tuple[int, bool, int, str]:
        """How good a choice it is for `count` pods, least first; see the top of this file."""
        if not self._all:
            return 0, False, domain.slots, domain.name
        return (
            self.crowding(domain, count), self.all_here(domain), domain.slots, domain.name,
        )  # fmt: skip

    def crowding(self, domain: Domain, count: int) -> int:
        """With how many siblings `count` pods must share a node at most, on the best nodes of it.

        node a: 2 siblings, 4 slots     node b: 1 sibling, 2 slots     node c: none, 1 slot
        count 1 -> 0        count 2, 3 -> 1        count 4 -> 2
        """
        shared = self._shared.get(domain, {})
        room = domain.slots - sum(node.slots for node in shared)
        if room >= count:
            return 0
        for node in sorted(shared, key=lambda each: shared[each]):
            room += node.slots
            if room >= count:
                return shared[node]
        return _MOST

    def all_here(self, domain: Domain) -> bool:
        """Every one of them stands here."""
        return self._count.get(domain, 0) == self._all > 0
