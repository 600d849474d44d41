"""The best nodes for the pods of a replica, or one sentence that says what is missing.

Pure. The kube-scheduler decides; pods state the domain as a requirement and the node as a
preference. The ranks of a pod share a node (it requests `tp` devices); the stages of a group stand
as close together as the topology allows; all groups of a replica stay inside one `packLevel`
domain, preferably one that can still take `kvp.max` of them. Among equals, replicas of one resource
keep apart, and the fullest node or domain that will do is chosen, so that large gaps stay free.

    packLevel: rack        slots = pods of this kind that still fit

    (root) ── rack r1 ── clique c1 ── node a   slots 2
        │        │           └─────── node b   slots 2
        │        └─ clique c2 ─────── node c   slots 1
        └─── rack r2 ── …

Nothing is reserved for other resources: what they use, or were planned to use, is in `used`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from medha.spec import MedhaReplica
from medha_operator.resources.manifests import HOSTNAME, Place, pod_requests, topology_levels
from medha_operator.resources.views import OVER, NodeView, PodView

COMMON_RESOURCES = {"cpu": 0, "memory": 1, "pods": 2}
"""Resources of every node, by rank; devices rank before them."""


class PodRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one pod of a resource, and how close its pods should stand together."""

    requests: Mapping[str, int]
    stages: int = 1
    upper: tuple[str, ...] = ()
    """Levels that name a packing domain, widest first; empty without `packLevel`."""
    inner: tuple[str, ...] = ()
    """Levels inside a packing domain, above the node."""
    pack_level: str | None = None
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, str], ...] = ()


def pod_requirements(resource: MedhaReplica) -> PodRequirements:
    placement = resource.spec.placement
    upper, inner = topology_levels(placement)
    return PodRequirements(
        requests=pod_requests(resource),
        stages=resource.spec.parallelism.spp,
        upper=upper,
        inner=inner,
        pack_level=placement.pack_level,
        node_selector=placement.node_selector,
        tolerations=placement.tolerations,
    )


def usable(node: NodeView, required: PodRequirements) -> bool:
    return (
        node.ready
        and node.schedulable
        and (not required.node_selector or selected(node, required))
        and (required.pack_level is None or required.pack_level in node.labels)
        and (not node.taints or not repelled(node, required))
    )


def selected(node: NodeView, required: PodRequirements) -> bool:
    labels = node.labels
    return all(labels.get(name) == value for name, value in required.node_selector.items())


def repelled(node: NodeView, required: PodRequirements) -> str:
    """Return the first taint that is not tolerated, "" if there is none."""
    for taint in node.taints:
        if taint.effect == "PreferNoSchedule":
            continue
        if not any(
            _tolerates(toleration, taint.key, taint.value, taint.effect)
            for toleration in required.tolerations
        ):
            return f"{taint.key}={taint.value}:{taint.effect}"
    return ""


def _tolerates(toleration: Mapping[str, str], key: str, value: str, effect: str) -> bool:
    if toleration.get("effect", "") not in ("", effect):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key", "") in ("", key)
    return toleration.get("key", "") == key and toleration.get("value", "") == value


_UNLIMITED = 1 << 30

Nodes = tuple[str, ...]
"""The node of each stage of a group."""
NodeSets = Iterable[Iterable[str]]
"""The nodes of each of several replicas."""


class Placer:
    """Nodes that pods of one resource may use. Every placement takes its slots.

    `own` are the resource's pods as they are: the nodes' `used` does not count them. `settled` are
    the nodes of replicas that stay, by ordinal.
    """

    def __init__(
        self,
        required: PodRequirements,
        nodes: Sequence[NodeView],
        own: Iterable[PodView] = (),
        settled: Mapping[int, Iterable[str]] = {},
    ) -> None:
        self.required, self._nodes = required, nodes
        self._node_sets = {ordinal: set(names) for ordinal, names in settled.items()}
        self._root = Domain("", None)
        self._leaves: dict[str, Domain] = {}
        self._upper, self._inner = required.upper, required.inner
        self._labels = {node.name: node.labels for node in nodes}
        self._build(_held(own, required), (*self._upper, *self._inner))

    def settle(self, ordinal: int, nodes: Iterable[str]) -> None:
        """Keep other replicas away from these nodes of a replica."""
        self._node_sets.setdefault(ordinal, set()).update(nodes)

    def node_sets_of_others(self, ordinal: int) -> NodeSets:
        """The nodes of each settled replica but this one."""
        return [nodes for other, nodes in self._node_sets.items() if other != ordinal]

    def _build(self, own: Mapping[str, Mapping[str, int]], levels: tuple[str, ...]) -> None:
        """Build the tree of usable nodes. Every decision that places reads a thousand nodes: full
        ones without an own pod are left out, and each domain is summed up once."""
        wanted = self.required.requests.items()
        # Devices first: on a busy node they run out first.
        requests = sorted(((name, need) for name, need in wanted if need > 0), key=_is_common)
        parents: dict[tuple[str, ...], Domain] = {}
        for node in self._nodes:
            if not usable(node, self.required):
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
        for parent in parents.values():
            parent.add(sum([leaf.slots for leaf in parent.children.values()]))

    def place_base(
        self,
        groups: int,
        max_groups: int,
        promised: Mapping[str, int] = {},
        avoid: NodeSets = (),
        refused: Collection[str] = (),
    ) -> tuple[Nodes, ...] | Unschedulable:
        """Choose nodes for the first `groups` groups of a new replica that may grow to
        `max_groups`.

        `promised` maps nodes to groups by which the replicas there may still grow: slots to leave
        free if possible. `avoid` are the nodes of each replica to keep away from; `refused` names
        domains where the scheduler found no nodes.
        """
        siblings = self._siblings(avoid)
        stages = self.required.stages
        need, wish = groups * stages, max_groups * stages
        kept: dict[int, int] = {}
        for node, more in promised.items():
            if node in self._leaves:
                packed = id(self._pack(self._leaves[node]))
                kept[packed] = kept.get(packed, 0) + more * stages
        able = [
            domain
            for domain in self._domains()
            if domain.slots >= need and domain.path not in refused
        ]
        if not able:
            return self._unschedulable(need)
        roomy = [domain for domain in able if domain.slots - kept.get(id(domain), 0) >= wish]
        if roomy:
            chosen = min(roomy, key=lambda domain: siblings.rank(domain, need))
        else:
            chosen = min(
                able,
                key=lambda domain: (
                    siblings.crowding(domain, need),
                    kept.get(id(domain), 0) - domain.slots,
                    domain.name,
                ),
            )
        wish = max(wish, need)
        while (inner := chosen.fitting(wish, siblings, need)) is not None and not inner.node:
            chosen = inner
        return tuple(tuple(chosen.take(stages, siblings)) for _ in range(groups))

    def place_group(
        self, near: Iterable[str], pods: int = 0, avoid: NodeSets = ()
    ) -> Nodes | Unschedulable:
        """Choose nodes for one more group (or `pods` of it) of a replica with pods on nodes `near`.

        As close to them as there is room, and never outside their `packLevel` domain; `avoid` as
        for `place_base`.
        """
        siblings = self._siblings(avoid)
        need = pods or self.required.stages
        leaves = [self._leaves[name] for name in sorted(set(near)) if name in self._leaves]
        if not leaves:
            able = [domain for domain in self._domains() if domain.slots >= need]
            if not able:
                return self._unschedulable(need)
            best = min(able, key=lambda domain: siblings.rank(domain, need))
            return tuple(best.take(need, siblings))
        widest = self._pack(leaves[0])
        closest: Domain = leaves[0]
        while closest is not widest and not (
            closest.slots >= need and all(_within(leaf, closest) for leaf in leaves)
        ):
            closest = closest.parent or widest
        if closest.slots < need:
            return self._unschedulable(need, inside=widest)
        return tuple(closest.take(need, siblings))

    def place(self, node: str) -> Place:
        """Require the node's `packLevel` domain, and prefer the node and its closest parts."""
        labels = self._labels.get(node, {})
        levels = (*self._inner, HOSTNAME)
        preferred = {level: labels[level] for level in levels if level in labels}
        return Place(node=node, domain=self.domain([node]), preferred=preferred)

    def open_place(self, near: Iterable[str] = ()) -> Place:
        """Prefer no node: stay in the domain of the nodes `near`, else in that of the first pod."""
        domain = self.domain(near)
        level = self.required.pack_level
        if domain or level is None:
            return Place(domain=domain)
        labels = self._labels.values()
        used = [name for name in self._upper if any(name in labelled for labelled in labels)]
        return Place(shared=tuple(dict.fromkeys((*used, level))))

    def outside_place(self) -> Place:
        """Prefer no node, and keep out of every domain that has room for a part of a replica, so
        that a new domain can take all of it."""
        level = self.required.pack_level
        partial = {domain.name for domain in self._domains() if domain.slots > 0}
        avoided = {level: tuple(sorted(partial))} if level is not None and partial else {}
        return msgspec.structs.replace(self.open_place(), avoided=avoided)

    def domain(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return the labels of the `packLevel` domain in which these nodes lie; none if no node is
        known, or if the resource has no `packLevel`."""
        for node in nodes:
            labels = self._labels.get(node, {})
            if self.required.pack_level in labels:
                return {level: labels[level] for level in self._upper if level in labels}
        return {}

    def domain_name(self, node: str) -> str:
        """Return the name of the node's `packLevel` domain; "" without `packLevel`."""
        labels = self._labels.get(node, {})
        return "/".join(labels.get(level, "") for level in self._upper)

    def _siblings(self, node_sets: NodeSets) -> Siblings:
        return Siblings(
            [self._leaves[node] for node in set(nodes) if node in self._leaves]
            for nodes in node_sets
        )

    def _domains(self) -> list[Domain]:
        """List the domains: a whole replica must stay inside one."""
        if self.required.pack_level is None:
            return [self._root]
        domains = [self._root]
        for _ in self._upper:
            domains = [child for domain in domains for child in domain.children.values()]
        return domains

    def _pack(self, leaf: Domain) -> Domain:
        """Return the domain of `_domains` that the node belongs to."""
        path = list(leaf.chain())
        return path[-1 - len(self._upper)] if self.required.pack_level is not None else path[-1]

    def _unschedulable(self, need: int, inside: Domain | None = None) -> Unschedulable:
        best = inside or max(
            self._domains(), key=lambda domain: (domain.slots, domain.name), default=None
        )
        return explain(self.required, self._nodes, need, best)


def _is_common(request: tuple[str, int]) -> bool:
    return request[0] in COMMON_RESOURCES


def _held(pods: Iterable[PodView], required: PodRequirements) -> dict[str, dict[str, int]]:
    """Sum up what own pods hold of each node, or will hold once they are bound."""
    held: dict[str, dict[str, int]] = {}
    for pod in pods:
        if not pod.place or pod.phase in OVER:
            continue
        amounts = held.setdefault(pod.place, {})
        for name, amount in (pod.requests or required.requests).items():
            amounts[name] = amounts.get(name, 0) + amount
    return held


def _slots(
    node: NodeView, requests: Sequence[tuple[str, int]], held: Mapping[str, int] | None
) -> int:
    """Count the pods that still fit; below 0 if the node is overcommitted."""
    allocatable, used = node.allocatable.get, node.used.get
    slots = _UNLIMITED
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
    return any(part is domain for part in leaf.chain())


# --- the topology tree ----------------------------------------------------------------------------
#
# Of domains that will do, choose the one where a new replica loses least together with the other
# replicas of its resource, and of equals the fullest. Compare, in this order:
#
#     1. crowding   the fewest of them on one node that it comes to share with them
#     2. all_here   not the one zone, rack or clique in which all of them stand
#     3. slots      the least room, so that large gaps stay for pods that need them
#     4. name       so that the same cluster gives the same plan


class Domain:
    """A node, or a part of the topology, with the number of pods that still fit into it."""

    __slots__ = ("children", "name", "node", "parent", "slots")

    def __init__(self, name: str, parent: Domain | None, node: str = "") -> None:
        self.name, self.parent, self.node = name, parent, node
        self.slots = 0
        self.children: dict[str, Domain] = {}

    def child(self, name: str) -> Domain:
        child = self.children.get(name)
        if child is None:
            child = self.children[name] = Domain(name, self)
        return child

    @property
    def path(self) -> str:
        """Names from the widest domain down to this one."""
        return "/".join([domain.name for domain in self.chain()][-2::-1])

    def add(self, count: int) -> None:
        """Add slots here, and so to every domain that contains this one."""
        for domain in self.chain():
            domain.slots += count

    def chain(self) -> Iterator[Domain]:
        """Iterate over this domain and those that contain it, up to the root."""
        domain: Domain | None = self
        while domain is not None:
            yield domain
            domain = domain.parent

    def fitting(self, count: int, siblings: Siblings, need: int = 0) -> Domain | None:
        """Return the best child with `count` slots, for `need` pods (default: `count`)."""
        able = [child for child in self.children.values() if child.slots >= count]
        return min(able, key=lambda child: siblings.rank(child, need or count), default=None)

    def take(self, count: int, siblings: Siblings) -> list[str]:
        """Take nodes for `count` pods, neighbours next to each other; needs `count` slots."""
        if self.node:
            self.add(-count)
            return [self.node] * count
        taken: list[str] = []
        while (left := count - len(taken)) > 0:
            child = self.fitting(left, siblings) or min(
                self.children.values(),
                key=lambda part: (-part.slots, siblings.crowding(part, part.slots), part.name),
            )
            taken += child.take(min(left, child.slots), siblings)
        return taken


class Siblings:
    """The other replicas of a resource that stay: a node that dies takes those that share it.

    `node_sets` are the nodes of each, as far as they are in the tree.
    """

    def __init__(self, node_sets: Iterable[Iterable[Domain]] = ()) -> None:
        self._shared: dict[Domain, dict[Domain, int]] = {}  # domain -> its nodes -> replicas there
        self._count: dict[Domain, int] = {}  # domain -> replicas there
        self._all = 0
        for nodes in node_sets:
            domains = {domain for node in nodes for domain in node.chain()}
            self._all += bool(domains)
            for domain in domains:
                self._count[domain] = self._count.get(domain, 0) + 1
        for node in [domain for domain in self._count if domain.node]:
            for domain in node.chain():
                self._shared.setdefault(domain, {})[node] = self._count[node]

    def rank(self, domain: Domain, count: int) -> tuple[int, bool, int, str]:
        """Rank a domain for `count` pods, best first, in the order given above."""
        if not self._all:
            return 0, False, domain.slots, domain.name
        return (
            self.crowding(domain, count),
            self.all_here(domain),
            domain.slots,
            domain.name,
        )

    def crowding(self, domain: Domain, count: int) -> int:
        """Return the number of siblings on the most crowded node that `count` pods must use.

        node a: 2 siblings, 4 slots     node b: 1 sibling, 2 slots     node c: none, 1 slot
        count 1 -> 0        count 2, 3 -> 1        count 4 -> 2
        """
        shared = self._shared.get(domain, {})
        slots = domain.slots - sum(node.slots for node in shared)
        if slots >= count:
            return 0
        for node in sorted(shared, key=lambda node: shared[node]):
            slots += node.slots
            if slots >= count:
                return shared[node]
        return _UNLIMITED

    def all_here(self, domain: Domain) -> bool:
        """Return whether every sibling stands in this domain."""
        return self._count.get(domain, 0) == self._all > 0


# --- why pods cannot be placed --------------------------------------------------------------------


class Unschedulable(msgspec.Struct, frozen=True):
    """The reason why pods cannot be placed: a word for programs, a sentence for people."""

    reason: str
    message: str


def explain(
    required: PodRequirements, nodes: Sequence[NodeView], need: int, best: Domain | None
) -> Unschedulable:
    """Find what is missing, the most specific cause first."""
    device, count = _device(required)
    if not nodes:
        return Unschedulable("NoNodes", "the cluster has no node; add one")
    for label, value in required.node_selector.items():
        if not any(node.labels.get(label) == value for node in nodes):
            return Unschedulable(
                "NoNodeHasLabel",
                f"no node has the label {label}={value} of spec.placement.nodeSelector; label "
                "nodes so or correct the selector",
            )
    chosen = [node for node in nodes if selected(node, required)]
    level = required.pack_level
    if level is not None and not any(level in node.labels for node in chosen):
        return Unschedulable(
            "NoNodeHasLabel",
            f"no node has the label {level} of spec.placement.packLevel; label the nodes or leave "
            "packLevel out",
        )
    for name, amount in sorted(required.requests.items()):
        most = max((node.allocatable.get(name, 0) for node in chosen), default=0)
        if most < amount:
            offered = f"the largest has {_amount(name, most)}" if most else "none offers any"
            return Unschedulable(
                "NoNodeIsLargeEnough",
                f"a pod needs {_amount(name, amount)} on one node and {offered}; "
                f"{_remedy(name, most)}",
            )
    room = best.slots if best is not None else 0
    where = f" inside one {level}" if level else ""
    named = f", {best.name}," if best is not None and best.name and level else ""
    holds = f"the best{named} has room for {room}" if room else "no node has room for one"
    return Unschedulable(
        "TooFewFree",
        f"{_pods(need, _amount(device, count))} needed{where} and {holds}"
        f"{_unusable(chosen, required)}; add nodes, free some or lower spec.parallelism",
    )


def _unusable(nodes: Sequence[NodeView], required: PodRequirements) -> str:
    """Count the nodes that are unusable for now."""
    states = []
    cordoned = sum(node.ready and not node.schedulable for node in nodes)
    silent = sum(not node.ready for node in nodes)
    open_nodes = [node for node in nodes if node.ready and node.schedulable]
    tainted = [taint for node in open_nodes if (taint := repelled(node, required))]
    if cordoned:
        states.append(f"{cordoned} cordoned")
    if silent:
        states.append(f"{silent} not ready")
    if tainted:
        states.append(f"{len(tainted)} tainted with {tainted[0]}, which is not tolerated")
    return f" (of {len(nodes)} nodes {', '.join(states)})" if states else ""


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


def _device(required: PodRequirements) -> tuple[str, int]:
    """Return the resource that matters most to a person."""
    name = min(required.requests, key=lambda name: (COMMON_RESOURCES.get(name, -1), name))
    return name, required.requests[name]
