"""What is taken of each node, and by whom: the sum over pods, kept as pods come and go.

Pure bookkeeping. A pod that was only just asked for counts from that moment on, so that two
resources planned in the same breath are not promised the same devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from medha_operator.observed import NodeView
from medha_operator.projections import Key

Amounts = Mapping[str, int]


class Load(msgspec.Struct, frozen=True):
    """A pod's share of a node, and the MedhaReplica that it belongs to."""

    node: str
    resource: Key
    requests: Amounts


class Usage:
    """Nodes with what everybody takes of them."""

    def __init__(self) -> None:
        self._nodes: dict[str, NodeView] = {}
        self._foreign: dict[str, Amounts] = {}
        self._loads: dict[Key, Load] = {}
        self._by_node: dict[str, dict[Key, Load]] = {}
        self._views: dict[str, NodeView] = {}
        self._all: tuple[NodeView, ...] | None = None

    def put_node(self, name: str, view: NodeView | None) -> None:
        """A node as it is now; None: it is gone."""
        if view is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = view
        self._stale(name)

    def put_foreign(self, taken: Mapping[str, Amounts]) -> bool:
        """What pods that are not ours take, by node; True when a node has more room than before."""
        freed = False
        for name in self._foreign.keys() | taken.keys():
            old, new = self._foreign.get(name, {}), taken.get(name, {})
            if old != new:
                self._stale(name)
                freed = freed or any(new.get(each, 0) < amount for each, amount in old.items())
        self._foreign = dict(taken)
        return freed

    def put(self, pod: Key, load: Load | None) -> None:
        """A pod of ours takes this; None: nothing (any more)."""
        old = self._loads.get(pod)
        if old == load:
            return
        if old is not None:
            del self._loads[pod], self._by_node[old.node][pod]
            self._stale(old.node)
        if load is not None:
            self._loads[pod] = load
            self._by_node.setdefault(load.node, {})[pod] = load
            self._stale(load.node)

    def owners(self, node: str) -> set[Key]:
        """MedhaReplicas with pods on a node."""
        return {load.resource for load in self._by_node.get(node, {}).values()}

    def nodes(self, resource: Key, own: Iterable[Key]) -> tuple[NodeView, ...]:
        """All nodes as `resource`, whose pods are `own`, sees them: with what others take."""
        if self._all is None:
            self._all = tuple(self._view(name) for name in sorted(self._nodes))
        mine = {self._loads[pod].node for pod in own if pod in self._loads}
        if not mine:
            return self._all
        return tuple(self._sum(view, resource) if view.name in mine else view for view in self._all)

    def _view(self, name: str) -> NodeView:
        """A node with everybody's share."""
        if name not in self._views:
            self._views[name] = self._sum(self._nodes[name], None)
        return self._views[name]

    def _sum(self, view: NodeView, without: Key | None) -> NodeView:
        used = dict(self._foreign.get(view.name, {}))
        for load in self._by_node.get(view.name, {}).values():
            if load.resource != without:
                for name, amount in load.requests.items():
                    used[name] = used.get(name, 0) + amount
        return msgspec.structs.replace(view, used=used)

    def _stale(self, name: str) -> None:
        self._views.pop(name, None)
        self._all = None
