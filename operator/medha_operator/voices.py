"""Who decides how many replicas there are, and what the status says of it. Pure.

    Builtin    the operator writes /scale, and nobody else should. What somebody else wrote is
               heard: it stands for as long as a scale-down is stabilised, then the operator goes on
    External   the operator exports a number and never writes; an HPA does, by KEDA's hand where
               there is KEDA. A ScaledObject is made after the status says that it may exist, and
               the operator writes again only when it has seen it gone

So there are never two writers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from medha.scaling import Decision
from medha.spec.values import Autoscaling
from medha_operator.authors import Author
from medha_operator.memory import ScalingLine
from medha_operator.moments import rfc3339, unix_s
from medha_operator.verdicts import Verdict


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """For the status of one resource. `line` None: nothing is scaled (any more)."""

    line: ScalingLine | None = None
    verdict: Verdict | None = None
    slo: dict[str, object] = {}


def heard(
    asked: Autoscaling, replicas: int, authors: Sequence[Author], line: ScalingLine | None,
    hold_s: float, now_s: float, written: int | None = None,
) -> ScalingLine:  # fmt: skip
    """The line of the status, given how many replicas are asked for now, who asked, and how many we
    last wrote: the API server forgets who wrote a zero to /scale, and then whoever writes after."""
    if line is None or line.mode != asked.mode:
        kept = line.scaled_object if line is not None else "Absent"
        return ScalingLine(mode=asked.mode, replicas=replicas, scaled_object=kept)
    if replicas != line.replicas:
        line = msgspec.structs.replace(line, replicas=replicas, outside_by="", outside_since="")
        ours = any(each.ours for each in authors) or (not authors and replicas == written)
        if asked.mode == "Builtin" and not ours:
            by = authors[-1].name if authors else "somebody"
            return msgspec.structs.replace(line, outside_by=by, outside_since=rfc3339(now_s))
    if line.outside_by and now_s - unix_s(line.outside_since) >= hold_s:
        return msgspec.structs.replace(line, outside_by="", outside_since="")
    return line


def judged(asked: Autoscaling, line: ScalingLine, decision: Decision, keda: str) -> Verdict:
    """The condition ScalingActive. `keda`: why no ScaledObject can be; empty: nothing is wrong."""

    def says(status: str, reason: str, message: str) -> Verdict:
        return Verdict(type="ScalingActive", status=status, reason=reason, message=message)

    if line.outside_by:
        return says(
            "False", "OutsideWriter",
            f"{line.outside_by} set spec.replicas to {line.replicas}, which stands for "
            "spec.autoscaling.scaleDownStabilization; remove spec.replicas from what it writes, or "
            "set spec.autoscaling.mode to External, or remove spec.autoscaling",
        )  # fmt: skip
    if keda:
        return says("False", "NoScaledObject", keda)
    if decision.why == "NoData":
        return says(
            "False", "NoData",
            "routers or controllers have not reported lately, so the number of replicas stays; see "
            "whether their ops ports are reached from the operator",
        )  # fmt: skip
    if decision.why == "AtMaximum":
        return says(
            "True", "AtMaximum",
            f"more replicas are wanted than spec.autoscaling.maxReplicas, {asked.max_replicas}",
        )  # fmt: skip
    if decision.why == "NoRoom":
        return says("True", "NoRoom", "more replicas are wanted than find a place; see Placed")
    if asked.mode == "External":
        told = "a ScaledObject follows" if line.has_object else "any HPA may follow"
        return says("True", "Exported", f"{told} medha_desired_replicas")
    return says("True", "Scaling", "")
