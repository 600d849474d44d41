"""What the pods of a resource ask of nodes, and which nodes they may be put on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from medha.spec import MedhaReplica
from medha_operator.observed import NodeView
from medha_operator.pods import pod_requests

PLAIN = {"cpu": 0, "memory": 1, "pods": 2}
"""What every node has; devices come before."""


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What one pod of a resource asks of a node, and how its pods should stand together."""

    requests: Mapping[str, int]
    stages: int = 1
    levels: tuple[str, ...] = ()
    pack_level: str | None = None
    node_selector: Mapping[str, str] = {}
    tolerations: tuple[Mapping[str, str], ...] = ()


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


def usable(node: NodeView, want: Want) -> bool:
    return (
        node.ready
        and node.schedulable
        and (not want.node_selector or selected(node, want))
        and (want.pack_level is None or want.pack_level in node.labels)
        and (not node.taints or not repelled(node, want))
    )


def selected(node: NodeView, want: Want) -> bool:
    labels = node.labels
    return all(labels.get(name) == value for name, value in want.node_selector.items())


def repelled(node: NodeView, want: Want) -> str:
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
