"""One look at a resource's world: what is seen, the room that is left, and the steps taken so far.

The parts of planning share it; each adds its steps. It lives for one decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from medha.spec import MedhaReplica
from medha.topology import Coordinate
from medha_operator import names, restarts
from medha_operator.actions import Action, CreatePod, DeletePod, Tell
from medha_operator.memory import recall
from medha_operator.misfits import Misfit
from medha_operator.observed import NodeView, Observed, PodView
from medha_operator.placement import Nodes, Places, Room
from medha_operator.pods import Start, pod, spec_hash
from medha_operator.replicas import Replica, replicas_of
from medha_operator.restarts import Fault
from medha_operator.settings import Settings
from medha_operator.wants import want_of


class Look:
    """`misfits`: what has no place of replicas and their first groups; `stunted`: of further ones;
    `growing`: replicas with fewer groups than wanted; `stranded`: groups that wait for a node that
    may come back; `places`: by ordinal the nodes of replicas that are to stay; `again_s`: when to
    look again."""

    def __init__(self, resource: MedhaReplica, observed: Observed, settings: Settings) -> None:
        self.resource, self.observed, self.settings = resource, observed, settings
        self.hash = spec_hash(resource, settings)
        self.now_s = observed.now_s
        self.memory = recall(observed.previous)
        self.nodes: dict[str, NodeView] = {node.name: node for node in observed.nodes}
        self.replicas = replicas_of(resource, observed, self.hash)
        self.actions: list[Action] = []
        self.faults: list[Fault] = []
        self.stranded: list[Fault] = []
        self.misfits: list[Misfit] = []
        self.stunted: list[Misfit] = []
        self.growing: list[int] = []
        self.places: dict[int, set[str]] = {}
        self.again_s: list[float] = []
        self._room: Room | None = None

    @property
    def room(self) -> Room:
        """Made when first needed: most looks place nothing."""
        if self._room is None:
            self._room = self.space(self.observed.pods)
        return self._room

    def space(self, own: Iterable[PodView]) -> Room:
        return Room(want_of(self.resource), self.observed.nodes, own)

    def stay(self, ordinals: Iterable[int]) -> None:
        """These replicas are to stay: others had rather not share their nodes."""
        for ordinal in ordinals:
            pods = self.replicas[ordinal].present
            self.places[ordinal] = {each.node or each.target for each in pods}

    def apart(self, ordinal: int) -> Places:
        """The nodes of each replica that this one had rather keep away from."""
        return [nodes for each, nodes in self.places.items() if each != ordinal]

    def name(self, replica: Replica) -> str:
        """As people know it."""
        return names.replica_name(self.resource.name, replica.ordinal)

    def tell(self, reason: str, message: str, *, warning: bool = False) -> None:
        self.actions.append(Tell(reason, message, warning))

    def fits_without(self, ordinal: int) -> bool:
        """Whether a replica's base would have a place if this replica were not there."""
        kvp = self.resource.spec.parallelism.kvp
        left = [each for each in self.observed.pods if each.ordinal != ordinal]
        return not isinstance(self.space(left).place_base(kvp.min, kvp.max), Misfit)

    def attempt(self, ordinal: int, index: int) -> int:
        """The attempt of a group that may be started now; 0 while it has to wait."""
        line = self.memory.restart(ordinal, index)
        due_s = restarts.not_before_s(line, self.now_s)
        if due_s > self.now_s:
            self.again_s.append(due_s)
            return 0
        return restarts.next_attempt(line)

    def start(
        self,
        ordinal: int,
        places: dict[int, Nodes],
        attempts: Mapping[int, int] = {},
        wanted: int = 0,
    ) -> None:
        """The pods of these groups; alone, a pod needs no gate."""
        name = names.replica_name(self.resource.name, ordinal)
        what = ", ".join(f"group {index} on {', '.join(dict.fromkeys(nodes))}"
                         for index, nodes in places.items())  # fmt: skip
        told = f" ({wanted} groups are wanted)" if wanted else ""
        gated = sum(len(nodes) for nodes in places.values()) > 1
        self.places.setdefault(ordinal, set()).update(*places.values())
        for index, nodes in places.items():
            attempt = attempts.get(index, 1)
            for stage, node in enumerate(nodes):
                self.create_pod(ordinal, index, stage, node, attempt, gated)
        self.tell("GroupWanted" if wanted else "Placed", f"{name}: {what}{told}")

    def create_pod(
        self, ordinal: int, group: int, stage: int, node: str, attempt: int, gated: bool
    ) -> None:
        start = Start(
            ordinal=ordinal,
            at=Coordinate(group, stage, 0),
            node=node,
            spec_hash=self.hash,
            attempt=attempt,
            gated=gated,
        )
        self.actions.append(CreatePod(pod(self.resource, start, self.settings)))

    def delete(
        self, pods: Iterable[PodView], why: str, grace_s: int | None = None, lost: str = ""
    ) -> None:
        """By force where nobody would confirm the end; `lost` is the node that all this is for."""
        for each in pods:
            forced = restarts.is_lost(each, self.nodes)
            within_s, node = (0, each.node) if forced else (grace_s, lost)
            self.actions.append(DeletePod(each.name, each.uid, why, within_s, node))
