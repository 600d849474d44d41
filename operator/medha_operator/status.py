"""The status of a MedhaReplica: conditions as a tree, counts, and what planning must remember.

    Ready ── ModelAvailable   the checkpoint is there and loads
          ├─ Placed           every pod that serving needs has its node
          ├─ GroupsReady      the pods of the first kvp.min groups of every replica are ready
          └─ KvpReady         as many replicas as asked for serve

    Updated, KvpGrowing, Draining, RestartBudgetExhausted, PlacementUnsatisfiable,
    ScalingActive (of what is scaled)   inform

Pure, and the same for the same world: a status that says nothing new is equal to the one before,
times included, so that nothing is written. Messages hold no counts that change pod by pod.
"""

from __future__ import annotations

from typing import Any

import msgspec

from medha.spec import MedhaReplica
from medha_operator import names, restarts
from medha_operator.memory import (
    Condition,
    GroupsLine,
    Memory,
    RestartLine,
    RetiringLine,
    recall,
)
from medha_operator.moments import rfc3339
from medha_operator.observed import Observed
from medha_operator.plan import Decision, decide
from medha_operator.replicas import Replica
from medha_operator.settings import Settings
from medha_operator.verdicts import Verdict, verdicts
from medha_operator.voices import Scaling

Status = dict[str, Any]


def status(
    resource: MedhaReplica,
    observed: Observed,
    settings: Settings,
    *,
    generation: int,
    decision: Decision | None = None,
    scaling: Scaling | None = None,
) -> Status:
    """The whole status; `decision` saves deciding a second time about the same world. `scaling`
    None: nothing is known of it yet, so that what was told stays."""
    made = decision or decide(resource, observed, settings)
    judged = verdicts(resource, observed, made)
    scaled = scaling or _scaled_before(resource, observed, made.memory)
    if scaled.verdict is not None:
        judged = (*judged, scaled.verdict)
    lines = tuple(_groups_line(each, made.memory) for each in made.replicas.values())
    serving = [
        each
        for ordinal, each in made.replicas.items()
        if each.ready and ordinal not in made.rollout.retiring
    ]
    found: Status = {
        "observedGeneration": generation,
        "replicas": len({*made.replicas, *made.rollout.create}),
        "readyReplicas": len(serving),
        "kvpGroups": sum(line.kvp_groups for line in lines),
        "selector": f"{names.RESOURCE}={resource.name},{names.ROLE}={names.LEADER}",
        "groups": _plain(lines),
        "restarts": _plain(_restarts(made, observed.now_s)),
        "retiring": _plain(_retiring(made, observed.now_s)),
        "conditions": _plain(_conditions(judged, made.memory, observed.now_s, generation)),
    }
    if scaled.line is not None:
        found["scaling"] = _plain((scaled.line,))[0]
    if scaled.slo:
        found["slo"] = scaled.slo
    return found


def _scaled_before(resource: MedhaReplica, observed: Observed, memory: Memory) -> Scaling:
    """What was told of scaling, as long as it is still asked for."""
    verdict = next(
        (
            Verdict(type=each.type, status=each.status, reason=each.reason, message=each.message)
            for each in memory.conditions
            if each.type == "ScalingActive" and resource.spec.autoscaling is not None
        ),
        None,
    )
    slo: Any = observed.previous.get("slo") or {}
    return Scaling(line=memory.scaling, verdict=verdict, slo=slo)


def refused_status(observed: Observed, sentence: str, *, generation: int) -> Status:
    """For a spec that is not acted on: what runs is left alone, and so is what is known of it."""
    memory = recall(observed.previous)
    verdict = Verdict(type="Ready", status="False", reason="SpecRefused", message=sentence)
    judged = _conditions((verdict,), memory, observed.now_s, generation)
    rest = tuple(each for each in memory.conditions if each.type != "Ready")
    return {
        **observed.previous,
        "observedGeneration": generation,
        "conditions": _plain((*judged, *rest)),
    }


def _conditions(
    judged: tuple[Verdict, ...], memory: Memory, now_s: float, generation: int
) -> tuple[Condition, ...]:
    """Each verdict with the moment of its last change."""
    before = {each.type: each for each in memory.conditions}
    found = []
    for verdict in judged:
        old = before.get(verdict.type)
        same = old is not None and old.status == verdict.status
        found.append(
            Condition(
                type=verdict.type,
                status=verdict.status,
                reason=verdict.reason,
                message=verdict.message[:1024],
                last_transition_time=old.last_transition_time
                if old is not None and same
                else rfc3339(now_s),
                observed_generation=generation,
            )
        )
    return tuple(found)


def _groups_line(replica: Replica, memory: Memory) -> GroupsLine:
    """What the controller says, else what it said last; its pods know how many groups run."""
    report, before = replica.report, memory.line(replica.ordinal)
    running = sum(group.ready for group in replica.groups.values())
    if report is not None and report.generation:
        running = sum(group.state == "running" for group in report.groups)
    return GroupsLine(
        replica=replica.ordinal,
        kvp_groups=running,
        wanted=report.wanted_groups if report is not None else before.wanted,
        generation=report.generation if report is not None else before.generation,
    )


def _restarts(made: Decision, now_s: float) -> tuple[RestartLine, ...]:
    """Failures of replicas that are to stay, with those of this look."""
    ordinals = {*made.replicas, *made.rollout.create, *made.rollout.pending}
    ordinals -= set(made.rollout.retiring)
    lines = {
        (line.replica, line.group): line
        for line in made.memory.restarts
        if line.replica in ordinals
    }
    for fault in made.faults:
        place = (fault.ordinal, fault.group)
        lines[place] = restarts.note(lines.get(place), fault, now_s)
    return tuple(lines[place] for place in sorted(lines))


def _retiring(made: Decision, now_s: float) -> tuple[RetiringLine, ...]:
    return tuple(
        made.memory.retirement(ordinal)
        or RetiringLine(replica=ordinal, since=rfc3339(now_s), reason=reason)
        for ordinal, reason in sorted(made.rollout.retiring.items())
    )


def _plain(lines: tuple[msgspec.Struct, ...]) -> list[Any]:
    """As the API gives it back."""
    found: list[Any] = msgspec.json.decode(msgspec.json.encode(lines))
    return found
