"""Which node each pod of a replica goes to, or one sentence that says what is missing.

Pure. The ranks of a pod share a node (their pod asks for `tp` devices); the stages of a group stand
as close together as the topology allows; all groups of a replica stay inside one `packLevel`
domain, rather one that can still take `kvp.max` of them. What is left to choose goes by `domains`:
replicas of one resource keep apart, and the fullest node or part that will do is taken, so that
large gaps stay for those who need them.

    packLevel: rack        slots = pods of this kind that still fit

    (root) ── rack r1 ── clique c1 ── node a   slots 2
        │        │           └─────── node b   slots 2
        │        └─ clique c2 ─────── node c   slots 1
        └─── rack r2 ── …

It reserves nothing for others: what other resources use, or were planned to, is in `used`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from medha_operator.domains import Domain, Siblings
from medha_operator.misfits import Misfit, misfit
from medha_operator.observed import NodeView, PodView
from medha_operator.wants import PLAIN, Want, usable

HOSTNAME = "kubernetes.io/hostname"
_MOST = 1 << 30

Nodes = tuple[str, ...]
"""The node of each stage of a group."""
Places = Iterable[Iterable[str]]
"""Nodes of each of several replicas."""


class Room:
    """The nodes that pods of one resource may use; what is placed is taken from it.

    `own` are the resource's pods as they are: the nodes' `used` does not count them.
    """

    def __init__(self, want: Want, nodes: Sequence[NodeView], own: Iterable[PodView] = ()) -> None:
        self.want, self._nodes = want, nodes
        self._root = Domain("", None)
        self._leaves: dict[str, Domain] = {}
        self._free: dict[str, int] = {}  # pods that fit beside ours, below 0 where they do not
        upper, inner = _levels(want)
        self._depth = len(upper)
        self._build(_held(own, want), (*upper, *inner))

    def _build(self, own: Mapping[str, Mapping[str, int]], levels: tuple[str, ...]) -> None:
        """The tree of what can be used. A thousand nodes are read for every decision: full ones
        without a pod of ours are left out, and each part is summed up once."""
        wanted = self.want.requests.items()
        # The device first: of a busy node it is what has run out.
        requests = sorted(((name, need) for name, need in wanted if need > 0), key=_is_plain)
        parents: dict[tuple[str, ...], Domain] = {}
        for node in self._nodes:
            if not usable(node, self.want):
                continue
            held = own.get(node.name)
            slots = _slots(node, requests, held)
            if slots <= 0 and held is None:
                continue
            label = node.labels.get
            path = tuple([label(level, "") for level in levels])
            parent = parents.get(path)
            if parent is None:
                parent = self._root
                for name in path:
                    parent = parent.child(name)
                parents[path] = parent
            leaf = parent.children[node.name] = Domain(node.name, parent, node.name)
            leaf.slots = max(slots, 0)
            self._leaves[node.name] = leaf
            self._free[node.name] = slots
        for parent in parents.values():
            parent.add(sum([leaf.slots for leaf in parent.children.values()]))

    def place_base(
        self, groups: int, most: int, promised: Mapping[str, int] = {}, apart: Places = ()
    ) -> tuple[Nodes, ...] | Misfit:
        """Nodes for the first `groups` groups of a new replica that may grow to `most`.

        `promised` maps nodes to groups that the replicas there may still grow by: room that this
        one had rather leave alone. `apart` are the nodes of each replica to keep away from.
        """
        siblings = self._siblings(apart)
        stages = self.want.stages
        need, wish = groups * stages, most * stages
        kept: dict[int, int] = {}
        for node, more in promised.items():
            if node in self._leaves:
                there = id(self._pack(self._leaves[node]))
                kept[there] = kept.get(there, 0) + more * stages
        able = [each for each in self._domains() if each.slots >= need]
        if not able:
            return self._misfit(need)
        roomy = [each for each in able if each.slots - kept.get(id(each), 0) >= wish]
        if roomy:
            domain = min(roomy, key=lambda each: siblings.rank(each, need))
        else:
            domain = min(
                able,
                key=lambda each: (
                    siblings.crowding(each, need), kept.get(id(each), 0) - each.slots, each.name,
                ),
            )  # fmt: skip
        wish = max(wish, need)
        while (inner := domain.fitting(wish, siblings, need)) is not None and not inner.node:
            domain = inner
        return tuple(tuple(domain.take(stages, siblings)) for _ in range(groups))

    def place_group(
        self, beside: Iterable[str], pods: int = 0, apart: Places = ()
    ) -> Nodes | Misfit:
        """Nodes for one more group (or `pods` of it) of a replica with pods on the nodes `beside`.

        As near to them as there is room, and never outside their `packLevel` domain; `apart` as
        for `place_base`.
        """
        siblings = self._siblings(apart)
        need = pods or self.want.stages
        leaves = [self._leaves[name] for name in sorted(set(beside)) if name in self._leaves]
        if not leaves:
            able = [each for each in self._domains() if each.slots >= need]
            if not able:
                return self._misfit(need)
            best = min(able, key=lambda each: siblings.rank(each, need))
            return tuple(best.take(need, siblings))
        widest = self._pack(leaves[0])
        near: Domain = leaves[0]
        while near is not widest and not (
            near.slots >= need and all(_within(leaf, near) for leaf in leaves)
        ):
            near = near.parent or widest
        if near.slots < need:
            return self._misfit(need, inside=widest)
        return tuple(near.take(need, siblings))

    def holds(self, nodes: Iterable[str]) -> bool:
        """Whether each node can be used and has room for all that was planned to it, ours too."""
        return all(self._free.get(name, -1) >= 0 for name in nodes)

    def _siblings(self, places: Places) -> Siblings:
        return Siblings(
            [self._leaves[node] for node in set(nodes) if node in self._leaves] for nodes in places
        )

    def _domains(self) -> list[Domain]:
        """Every domain that a whole replica must stay in."""
        if self.want.pack_level is None:
            return [self._root]
        found = [self._root]
        for _ in range(self._depth):
            found = [child for each in found for child in each.children.values()]
        return found

    def _pack(self, leaf: Domain) -> Domain:
        """The domain of `_domains` that the node stands in."""
        path = [leaf]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return path[-1 - self._depth] if self.want.pack_level is not None else path[-1]

    def _misfit(self, need: int, inside: Domain | None = None) -> Misfit:
        best = inside or max(
            self._domains(), key=lambda each: (each.slots, each.name), default=None
        )
        return misfit(self.want, self._nodes, need, best)


def _is_plain(request: tuple[str, int]) -> bool:
    return request[0] in PLAIN


def _levels(want: Want) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels that name a packing domain, widest first, and those that divide it further."""
    levels = want.levels
    if want.pack_level is None:
        return (), tuple(level for level in levels if level != HOSTNAME)
    cut = levels.index(want.pack_level) + 1
    return levels[:cut], tuple(level for level in levels[cut:] if level != HOSTNAME)


def _held(pods: Iterable[PodView], want: Want) -> dict[str, dict[str, int]]:
    """What our own pods hold of each node, or will once they are bound."""
    held: dict[str, dict[str, int]] = {}
    for pod in pods:
        node = pod.node or pod.target
        if not node or pod.phase in ("Succeeded", "Failed"):
            continue
        there = held.setdefault(node, {})
        for name, amount in (pod.requests or want.requests).items():
            there[name] = there.get(name, 0) + amount
    return held


def _slots(
    node: NodeView, requests: Sequence[tuple[str, int]], held: Mapping[str, int] | None
) -> int:
    """How many more pods fit; below 0 where more was planned than there is."""
    allocatable, used = node.allocatable.get, node.used.get
    slots = _MOST
    for name, need in requests:
        left = allocatable(name, 0) - used(name, 0)
        if held is not None:
            left -= held.get(name, 0)
        if left < slots * need:
            slots = left // need
            if slots <= 0 and held is None:
                break
    return slots


def _within(leaf: Domain, domain: Domain) -> bool:
    at: Domain | None = leaf
    while at is not None and at is not domain:
        at = at.parent
    return at is domain
