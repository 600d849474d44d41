"""One resource's pods, sorted into replicas and KVP groups, with what follows from their states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from medha.messages import ReplicaStatus
from medha.spec import MedhaReplica
from medha_operator.observed import Observed, PodView

FRESH_S = 10.0
"""A controller's report counts for so long; after that it is unknown how the replica fares."""
OVER = ("Succeeded", "Failed")


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The pods of one KVP group, those that are being deleted included."""

    index: int
    stages: int
    pods: tuple[PodView, ...]

    @property
    def present(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if not pod.deleting)

    @property
    def attempt(self) -> int:
        return max(pod.attempt for pod in self.pods)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages without a pod, one that is being deleted counting as one."""
        there = {pod.stage for pod in self.pods}
        return tuple(stage for stage in range(self.stages) if stage not in there)

    @property
    def complete(self) -> bool:
        return len({pod.stage for pod in self.present}) == self.stages

    @property
    def held(self) -> bool:
        """Some pod of it was not let to the scheduler yet."""
        return any(pod.gated for pod in self.present)

    @property
    def gated(self) -> bool:
        """No pod of it was let to the scheduler yet."""
        return all(pod.gated for pod in self.present)

    @property
    def bound(self) -> bool:
        return self.complete and all(pod.node for pod in self.present)

    @property
    def ready(self) -> bool:
        return self.complete and all(pod.ready for pod in self.present)


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of the model.

    `outdated`: a pod of it was made from another spec, which may have had other groups and stages;
    then its leader's word counts. `report` is None where the controller's last word is too old;
    `silent`: it was asked for long enough to know that it does not answer.
    """

    ordinal: int
    least: int
    outdated: bool
    groups: Mapping[int, Group]
    report: ReplicaStatus | None
    silent: bool

    @property
    def pods(self) -> Iterator[PodView]:
        for group in self.groups.values():
            yield from group.pods

    @property
    def present(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.pods if not pod.deleting)

    @property
    def leader(self) -> PodView | None:
        found = (pod for pod in self.present if pod.group == 0 and pod.stage == 0)
        return next(found, None)

    @property
    def base(self) -> tuple[Group, ...]:
        """Its first `kvp.min` groups, as far as they are there."""
        return tuple(self.groups[each] for each in range(self.least) if each in self.groups)

    @property
    def ready(self) -> bool:
        """It serves: a leader is ready once its controller has kvp.min groups and a router."""
        if self.outdated:
            return self.leader is not None and self.leader.ready
        return len(self.base) == self.least and all(group.ready for group in self.base)

    @property
    def bound(self) -> bool:
        return len(self.base) == self.least and all(group.bound for group in self.base)

    @property
    def draining(self) -> bool:
        return self.report is not None and self.report.draining

    @property
    def idle(self) -> bool:
        """It takes nothing new, and has nothing left."""
        return (
            self.report is not None
            and self.report.draining
            and not self.report.running
            and not self.report.waiting
        )

    @property
    def load(self) -> int:
        """Requests that would have to move."""
        return self.report.running + self.report.waiting if self.report is not None else 0


def replicas_of(resource: MedhaReplica, observed: Observed, spec_hash: str) -> dict[int, Replica]:
    """Replicas that have a pod, by ordinal; `spec_hash` is that of the present spec."""
    parallelism = resource.spec.parallelism
    sorted_in: dict[int, dict[int, list[PodView]]] = {}
    for pod in observed.pods:
        sorted_in.setdefault(pod.ordinal, {}).setdefault(pod.group, []).append(pod)
    return {
        ordinal: Replica(
            ordinal=ordinal,
            least=parallelism.kvp.min,
            outdated=any(
                pod.spec_hash != spec_hash
                for pods in groups.values()
                for pod in pods
                if not pod.deleting
            ),
            groups={
                index: Group(
                    index=index,
                    stages=parallelism.spp,
                    pods=tuple(sorted(groups[index], key=lambda pod: pod.stage)),
                )
                for index in sorted(groups)
            },
            report=_fresh(observed, ordinal),
            silent=_is_silent(observed, ordinal),
        )
        for ordinal, groups in sorted(sorted_in.items())
    }


def _fresh(observed: Observed, ordinal: int) -> ReplicaStatus | None:
    report = observed.reports.get(ordinal)
    if report is None or observed.now_s - report.at_s > FRESH_S:
        return None
    return report.status


def _is_silent(observed: Observed, ordinal: int) -> bool:
    report = observed.reports.get(ordinal)
    heard_s = report.at_s if report is not None else observed.reports_since_s
    return observed.now_s - heard_s > FRESH_S
