"""Why pods have no place: one sentence that names what is missing and says what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from medha_operator.domains import Domain
from medha_operator.observed import NodeView
from medha_operator.wants import PLAIN, Want, repelled, selected


class Misfit(msgspec.Struct, frozen=True):
    """Why it cannot be placed: a word for programs, a sentence for people."""

    reason: str
    message: str


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
    chosen = [node for node in nodes if selected(node, want)]
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
    tainted = [taint for node in nodes if (taint := repelled(node, want))]
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
    name = min(want.requests, key=lambda each: (PLAIN.get(each, -1), each))
    return name, want.requests[name]
