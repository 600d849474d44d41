"""What is true of a MedhaReplica, one condition each, in a sentence that says what to do.

Pure. `status` adds the times.
"""

from __future__ import annotations

import msgspec

from medha.spec import MedhaReplica
from medha_operator import names, restarts
from medha_operator.manifests import MODELS_FOLDER
from medha_operator.observed import Observed, PodView
from medha_operator.plan import Decision
from medha_operator.replicas import Replica

GATING = ("ModelAvailable", "Placed", "GroupsReady", "KvpReady")
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
_FETCH = "fetch-model: "
_SETUP = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")

_USUAL = ("Placing", "Loading", "Joining", "NotLoadedYet")
"""Reasons that go away by themselves."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    status: str
    reason: str
    message: str = ""


def verdicts(resource: MedhaReplica, observed: Observed, made: Decision) -> tuple[Verdict, ...]:
    """All conditions, `Ready` first."""
    lately = [each for each in made.memory.restarts if restarts.is_recent(each, observed.now_s)]
    memory = msgspec.structs.replace(made.memory, restarts=tuple(lately))
    made = msgspec.structs.replace(made, memory=memory)
    gating = (
        _model(resource, made),
        _placed(resource, made),
        _groups(resource, made),
        _kvp(resource, made),
    )
    return (
        _ready(resource, gating),
        *gating,
        _updated(resource, made),
        _growing(resource, made),
        _draining(resource, made),
        _exhausted(resource, observed, made),
        _unsatisfiable(made),
    )


def _ready(resource: MedhaReplica, gating: tuple[Verdict, ...]) -> Verdict:
    """The conjunction; of what is missing the worst is told: what somebody may have to mend before
    what only takes its time."""
    missing = [each for each in gating if each.status != "True"]
    if missing:
        worst = min(missing, key=lambda each: (each.reason in _USUAL, each.status == "Unknown"))
        return Verdict(type="Ready", status="False", reason=worst.reason, message=worst.message)
    if resource.spec.replicas == 0:
        return Verdict(type="Ready", status="True", reason="NoneAskedFor",
                       message="spec.replicas is 0: nothing serves; raise it to serve")  # fmt: skip
    return Verdict(type="Ready", status="True", reason="Serving")


def _model(resource: MedhaReplica, made: Decision) -> Verdict:
    trouble = _model_trouble(resource, made)
    if trouble:
        return Verdict(type="ModelAvailable", status="False", reason="ModelMissing",
                       message=trouble)  # fmt: skip
    known = any(each.type == "ModelAvailable" and each.status == "True"
                for each in made.memory.conditions)  # fmt: skip
    if (
        known
        or resource.spec.replicas == 0
        or any(_loaded(each) for each in made.replicas.values())
    ):
        return Verdict(type="ModelAvailable", status="True", reason="Loaded")
    return Verdict(type="ModelAvailable", status="Unknown", reason="NotLoadedYet",
                   message="no pod has loaded the model yet")  # fmt: skip


def _loaded(replica: Replica) -> bool:
    return any(pod.ready for pod in replica.pods)


def _model_trouble(resource: MedhaReplica, made: Decision) -> str:
    """What a pod, or the last failure of one, says about the checkpoint."""
    source = resource.spec.model.source
    for pod in _waiting(made):
        told = f"{pod.why} {pod.message}"
        if source.pvc is not None and "persistentvolumeclaim" in told.lower():
            return (
                f"volume claim {source.pvc.claim_name} of spec.model.source cannot be used by pod "
                f"{pod.name} ({pod.message}); create it in this namespace or correct claimName"
            )
        if source.image is not None and source.image.reference in told:
            return (
                f"model image {source.image.reference} cannot be pulled for pod {pod.name} "
                f"({_short(pod)}); correct "
                "spec.model.source.image.reference or its pull secret"
            )
        if pod.why == "FailedMount" and 'volume "model"' in pod.message:
            what, remedy = _source(resource)
            return (
                f"{what} cannot be mounted into pod {pod.name} on node {pod.node} "
                f"({pod.message[:300]}); {remedy}"
            )
    for line in made.memory.restarts:
        if _well(made, line.replica):
            continue
        what, remedy = _source(resource)
        if _FETCH in line.reason:
            return f"{what} cannot be fetched: {line.reason}; {remedy}"
        if MODELS_FOLDER in line.reason:
            return (
                f"the model does not load: {line.reason}; {MODELS_FOLDER} is {what} there: {remedy}"
            )
    return ""


def _source(resource: MedhaReplica) -> tuple[str, str]:
    """Where the checkpoint comes from in a person's words, and what to do when it is not there."""
    source = resource.spec.model.source
    if source.host_path is not None:
        return (
            f"the directory {source.host_path.path}",
            "put the whole checkpoint there on every node, or correct "
            "spec.model.source.hostPath.path",
        )
    if source.pvc is not None:
        return (
            f"volume claim {source.pvc.claim_name}",
            "put the whole checkpoint into its volume, or correct spec.model.source.pvc",
        )
    if source.image is not None:
        return f"image {source.image.reference}", "correct spec.model.source.image"
    return (
        str(source.uri),
        "correct spec.model.source.uri, or let workers reach it (the chart's "
        "networkPolicy.modelEgress)",
    )


def _well(made: Decision, ordinal: int) -> bool:
    return ordinal in made.replicas and made.replicas[ordinal].ready


def _placed(resource: MedhaReplica, made: Decision) -> Verdict:
    if sum(each.bound or each.ready for each in _needed(made)) >= resource.spec.replicas:
        return Verdict(type="Placed", status="True", reason="Placed")
    if made.misfits:
        worst = made.misfits[0]
        return Verdict(type="Placed", status="False", reason=worst.reason, message=worst.message)
    for pod in _waiting(made):
        if not pod.node and pod.why == "Unschedulable":
            return Verdict(type="Placed", status="False", reason="Unschedulable",
                           message=f"pod {pod.name} finds no node: {pod.message}")  # fmt: skip
    return Verdict(type="Placed", status="False", reason="Placing",
                   message="pods are on their way to their nodes")  # fmt: skip


def _groups(resource: MedhaReplica, made: Decision) -> Verdict:
    ready = sum(each.ready for each in _needed(made))
    if ready >= resource.spec.replicas:
        return Verdict(type="GroupsReady", status="True", reason="GroupsReady")
    reason, message = _trouble(resource, made) or (
        "Loading",
        "pods are starting and load the model",
    )
    return Verdict(type="GroupsReady", status="False", reason=reason, message=message)


def _trouble(resource: MedhaReplica, made: Decision) -> tuple[str, str] | None:
    """What keeps pods of replicas that are not ready from running: a word, and a sentence."""
    for pod in _waiting(made):
        if pod.why in _IMAGE:
            image = resource.spec.template.image or "the worker's image"
            return "ImagePull", (
                f"{image} cannot be pulled for pod {pod.name} ({_short(pod)}); correct "
                "spec.template.image, or make the image available to the nodes"
            )
        if pod.why in _SETUP:
            return pod.why, f"pod {pod.name} cannot be started: {pod.message}"
        if pod.why == "FailedMount":
            return pod.why, (
                f"a volume of pod {pod.name} cannot be mounted on node {pod.node} "
                f"({pod.message[:300]}); make what it names, or correct spec.template.volumes"
            )
    if made.stranded:
        return "NodeLost", (
            f"{made.stranded[0].why} and there is no other place for its pods; bring it back or "
            "add nodes"
        )
    for each in _needed(made):
        if not each.ready and each.report is not None and each.report.refused:
            name = names.replica_name(resource.name, each.ordinal)
            return "RouterRefuses", f"no router takes in {name}: {each.report.refused}"
    for line in made.memory.restarts:
        if not _well(made, line.replica):
            name = names.replica_name(resource.name, line.replica)
            return (
                "GroupFailed",
                f"KVP group {line.group} of {name} is started anew: {line.reason}",
            )
    return None


def _kvp(resource: MedhaReplica, made: Decision) -> Verdict:
    serving = sum(
        each.ready and (each.report is None or each.report.ready or each.report.draining)
        for each in _needed(made)
    )
    if serving >= resource.spec.replicas:
        return Verdict(type="KvpReady", status="True", reason="Serving")
    told = [each.report.message for each in _needed(made) if each.report and each.report.message]
    return Verdict(
        type="KvpReady", status="False", reason="Joining",
        message=told[0] if told else "controllers wait for their first KVP groups and a router",
    )  # fmt: skip


def _updated(resource: MedhaReplica, made: Decision) -> Verdict:
    old = [each for each in made.replicas.values() if each.outdated]
    if not old and len(made.rollout.fresh) >= made.rollout.wanted:
        return Verdict(type="Updated", status="True", reason="Updated")
    if made.misfits:
        worst = made.misfits[0]
        return Verdict(type="Updated", status="False", reason=worst.reason,
                       message=f"replicas of the present spec: {worst.message}")  # fmt: skip
    usual = (
        "RollingUpdate" if old else "Creating",
        "replicas of the present spec are not all there yet",
    )
    reason, message = _trouble(resource, made) or usual
    return Verdict(type="Updated", status="False", reason=reason, message=message)


def _growing(resource: MedhaReplica, made: Decision) -> Verdict:
    if made.stunted:
        worst = made.stunted[0]
        return Verdict(type="KvpGrowing", status="False", reason=worst.reason,
                       message=f"a further KVP group is wanted: {worst.message}")  # fmt: skip
    if made.growing:
        which = ", ".join(names.replica_name(resource.name, each) for each in made.growing)
        for line in made.memory.restarts:
            if line.replica in made.growing and line.group >= resource.spec.parallelism.kvp.min:
                return Verdict(
                    type="KvpGrowing", status="True", reason="GroupFailed",
                    message=f"{which} gets more KVP groups, but group {line.group} failed: "
                    f"{line.reason}",
                )  # fmt: skip
        return Verdict(type="KvpGrowing", status="True", reason="GroupsWanted",
                       message=f"{which} gets more KVP groups for long contexts")  # fmt: skip
    return Verdict(type="KvpGrowing", status="False", reason="AsWanted")


def _draining(resource: MedhaReplica, made: Decision) -> Verdict:
    retiring = made.rollout.retiring
    if not retiring:
        return Verdict(type="Draining", status="False", reason="None")
    told = ", ".join(
        f"{names.replica_name(resource.name, ordinal)} ({why})"
        for ordinal, why in sorted(retiring.items())
    )
    return Verdict(type="Draining", status="True", reason="Retiring",
                   message=f"finishes its work and goes: {told}")  # fmt: skip


def _exhausted(resource: MedhaReplica, observed: Observed, made: Decision) -> Verdict:
    for line in made.memory.restarts:
        if restarts.exhausted(line, observed.now_s) and not _well(made, line.replica):
            name = names.replica_name(resource.name, line.replica)
            return Verdict(
                type="RestartBudgetExhausted", status="True", reason="FailsAgainAndAgain",
                message=f"KVP group {line.group} of {name} failed more than {restarts.BUDGET} "
                f"times within {restarts.WINDOW_S / 60:.0f} minutes and waits: {line.reason}; "
                "see its logs, or change the spec to try at once",
            )  # fmt: skip
    return Verdict(type="RestartBudgetExhausted", status="False", reason="WithinBudget")


def _unsatisfiable(made: Decision) -> Verdict:
    for each in (*made.misfits, *made.stunted):
        return Verdict(type="PlacementUnsatisfiable", status="True", reason=each.reason,
                       message=each.message)  # fmt: skip
    return Verdict(type="PlacementUnsatisfiable", status="False", reason="Satisfiable")


def _needed(made: Decision) -> list[Replica]:
    """Replicas that count: all but those that are on their way out."""
    return [made.replicas[each] for each in sorted((*made.rollout.fresh, *made.rollout.stale))]


def _waiting(made: Decision) -> list[PodView]:
    return [pod for each in _needed(made) for pod in each.present if not pod.ready and pod.why]


def _short(pod: PodView) -> str:
    return (f"{pod.why}: {pod.message}" if pod.message else pod.why)[:300]
