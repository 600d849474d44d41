"""Which node each pod of a replica goes to, or one sentence that says what is missing.

Pure. The ranks of a pod share a node (their pod asks for `tp` devices); the stages of a group stand
as close together as the topology allows; all groups of a replica stay inside one `packLevel`
domain, rather one that can still take `kvp.max` of them. Among domains that will do, the fullest is
taken, so that large gaps stay for those who need them.

    packLevel: rack        slots = pods of this kind that still fit

    (root) ── rack r1 ── clique c1 ── node a   slots 2
        │        │           └─────── node b   slots 2
        │        └─ clique c2 ─────── node c   slots 1
        └─── rack r2 ── …

It reserves nothing for others: what other resources use, or were planned to, is in `used`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from medha.spec import MedhaReplica
from medha_operator.observed import NodeView, PodView
from medha_operator.pods import pod_requests

HOSTNAME = "kubernetes.io/hostname"
_MOST = 1 << 30
_ORDER = {"cpu": 0, "memory": 1, "pods": 2}  # what every node has; devices come before


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod of a resource asks of a node, and how its pods should stand together."""

    requests: Mapping[str, int]
    stages: int = 1
    levels: tuple[str, ...] = ()
    pack_level: str | None = None
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, str], ...] = ()


class Misfit(msgspec.Struct, frozen=True):
    """Why it cannot be placed: a word for programs, a sentence for people."""

    reason: str
    message: str


Nodes = tuple[str, ...]
"""The node of each stage of a group."""


def want_of(resource: MedhaReplica) -> Want:
    placement = resource.spec.placement
    return Want(
        requests=pod_requests(resource),
        stages=resource.spec.parallelism.spp,
        levels=placement.topology_levels,
        pack_level=placement.pack_level,
        node_selector=placement.node_selector,
        tolerations=placement.tolerations,
    )


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
        at: Domain | None = self
        while at is not None:
            at.slots += count
            at = at.parent

    def fitting(self, count: int) -> Domain | None:
        """The fullest child that holds `count` by itself."""
        best: Domain | None = None
        for each in self.children.values():
            if each.slots >= count and (best is None or _fuller(each, best)):
                best = each
        return best

    def take(self, count: int) -> list[str]:
        """Nodes for `count` pods, neighbours side by side; there must be so many slots."""
        if self.node:
            self.add(-count)
            return [self.node] * count
        taken: list[str] = []
        while (left := count - len(taken)) > 0:
            child = self.fitting(left) or min(
                self.children.values(), key=lambda each: (-each.slots, each.name)
            )
            taken += child.take(min(left, child.slots))
        return taken


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
            if not _usable(node, self.want):
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
        self, groups: int, most: int, promised: Mapping[str, int] = {}
    ) -> tuple[Nodes, ...] | Misfit:
        """Nodes for the first `groups` groups of a new replica that may grow to `most`.

        `promised` maps nodes to groups that the replicas there may still grow by: room that this
        one had rather leave alone.
        """
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
            domain = min(roomy, key=lambda each: (each.slots, each.name))
        else:
            domain = min(able, key=lambda each: (kept.get(id(each), 0) - each.slots, each.name))
        while (narrower := domain.fitting(max(wish, need))) is not None and not narrower.node:
            domain = narrower
        return tuple(tuple(domain.take(stages)) for _ in range(groups))

    def place_group(self, beside: Iterable[str], pods: int = 0) -> Nodes | Misfit:
        """Nodes for one more group (or `pods` of it) of a replica with pods on the nodes `beside`.

        As near to them as there is room, and never outside their `packLevel` domain.
        """
        need = pods or self.want.stages
        leaves = [self._leaves[name] for name in sorted(set(beside)) if name in self._leaves]
        if not leaves:
            able = [each for each in self._domains() if each.slots >= need]
            if not able:
                return self._misfit(need)
            return tuple(min(able, key=lambda each: (each.slots, each.name)).take(need))
        widest = self._pack(leaves[0])
        near: Domain = leaves[0]
        while near is not widest and not (
            near.slots >= need and all(_within(leaf, near) for leaf in leaves)
        ):
            near = near.parent or widest
        if near.slots < need:
            return self._misfit(need, inside=widest)
        return tuple(near.take(need))

    def holds(self, nodes: Iterable[str]) -> bool:
        """Whether each node can be used and has room for all that was planned to it, ours too."""
        return all(self._free.get(name, -1) >= 0 for name in nodes)

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


def misfit(want: Want, nodes: Sequence[NodeView], need: int, best: Domain | None) -> Misfit:
    """What is missing, the most particular cause first."""
    what, count = _device(want)
    if not nodes:
        return Misfit("NoNodes", "the cluster has no node; add one")
    for label, value in want.node_selector.items():
        if not any(node.labels.get(label) == value for node in nodes):
            return Misfit(
                "NoNodeHasLabel",
                f"no node has the label {label}={value} of spec.placement.nodeSelector; label "
                "nodes so or correct the selector",
            )
    chosen = [node for node in nodes if _selected(node, want)]
    level = want.pack_level
    if level is not None and not any(level in node.labels for node in chosen):
        return Misfit(
            "NoNodeHasLabel",
            f"no node has the label {level} of spec.placement.packLevel; label the nodes or leave "
            "packLevel out",
        )
    for name, amount in sorted(want.requests.items()):
        most = max((node.allocatable.get(name, 0) for node in chosen), default=0)
        if most < amount:
            offered = f"the largest has {_amount(name, most)}" if most else "none offers any"
            return Misfit(
                "NoNodeIsLargeEnough",
                f"a pod needs {_amount(name, amount)} on one node and {offered}; "
                f"{_remedy(name, most)}",
            )
    room = best.slots if best is not None else 0
    where = f" inside one {level}" if level else ""
    named = f", {best.name}," if best is not None and best.name and level else ""
    holds = f"the best{named} has room for {room}" if room else "no node has room for one"
    return Misfit(
        "TooFewFree",
        f"{_pods(need, _amount(what, count))} needed{where} and {holds}"
        f"{_lost(chosen, want)}; add nodes, free some or lower spec.parallelism",
    )


def _lost(nodes: Sequence[NodeView], want: Want) -> str:
    """Nodes that would count but for their state."""
    told = []
    cordoned = sum(node.ready and not node.schedulable for node in nodes)
    silent = sum(not node.ready for node in nodes)
    tainted = [taint for node in nodes if (taint := _repelled(node, want))]
    if cordoned:
        told.append(f"{cordoned} cordoned")
    if silent:
        told.append(f"{silent} not ready")
    if tainted:
        told.append(f"{len(tainted)} tainted with {tainted[0]}, which is not tolerated")
    return f" (of {len(nodes)} nodes {', '.join(told)})" if told else ""


def _remedy(resource: str, most: int) -> str:
    if resource in ("cpu", "memory", "pods"):
        return "lower spec.template.resources or add a larger node"
    if most:
        return "lower spec.parallelism.tp or add a larger node"
    return "install its device plugin, correct spec.device.resource, or set spec.device.kind to Cpu"


def _amount(resource: str, amount: int) -> str:
    if resource == "cpu":
        return f"{amount}m of cpu"
    if resource == "memory":
        return f"{-(-amount // (1 << 20))}Mi of memory"
    return f"{amount} {resource}"


def _pods(count: int, amount: str) -> str:
    return f"a pod with {amount} is" if count == 1 else f"{count} pods with {amount} each are"


def _device(want: Want) -> tuple[str, int]:
    """The resource that matters most to a person."""
    name = min(want.requests, key=lambda each: (_ORDER.get(each, -1), each))
    return name, want.requests[name]


def _is_plain(request: tuple[str, int]) -> bool:
    return request[0] in _ORDER


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


def _usable(node: NodeView, want: Want) -> bool:
    return (
        node.ready
        and node.schedulable
        and (not want.node_selector or _selected(node, want))
        and (want.pack_level is None or want.pack_level in node.labels)
        and (not node.taints or not _repelled(node, want))
    )


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


def _selected(node: NodeView, want: Want) -> bool:
    labels = node.labels
    return all(labels.get(name) == value for name, value in want.node_selector.items())


def _repelled(node: NodeView, want: Want) -> str:
    """The taint that keeps our pods away, "" if none does."""
    for taint in node.taints:
        told = taint.key.startswith("node.kubernetes.io/")  # its state says the same
        if taint.effect == "PreferNoSchedule" or told:
            continue
        if not any(_tolerates(each, taint.key, taint.value, taint.effect)
                   for each in want.tolerations):  # fmt: skip
            return f"{taint.key}={taint.value}:{taint.effect}"
    return ""


def _tolerates(toleration: Mapping[str, str], key: str, value: str, effect: str) -> bool:
    if toleration.get("effect", "") not in ("", effect):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key", "") in ("", key)
    return toleration.get("key", "") == key and toleration.get("value", "") == value


def _fuller(one: Domain, other: Domain) -> bool:
    return (one.slots, one.name) < (other.slots, other.name)


def _within(leaf: Domain, domain: Domain) -> bool:
    at: Domain | None = leaf
    while at is not None and at is not domain:
        at = at.parent
    return at is domain
