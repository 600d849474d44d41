"""The operator and a queueing system that holds its pods behind a gate."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.kueue import GATE, QUEUE, Queue, install

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

SPEED, GANG_S = 4.0, 60.0
"""Seconds of the operator's own time in one, and those that a gang may take to get its nodes."""


def queue_up(fleet: Fleet, name: str, queue: str = "models") -> None:
    """Name the queue of a MedhaReplica."""
    merge = {"Content-Type": "application/merge-patch+json"}
    labels = {"metadata": {"labels": {QUEUE: queue}}}
    fleet.api.patch(fleet.path(name), json=labels, headers=merge).raise_for_status()


def test_two_replicas_in_a_queue_for_one_run_in_turn_and_resume_after_a_preemption(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    install(api, fleet.namespace)
    queue = Queue(fleet, room=2)
    start_operator()
    for name in ("one", "two"):
        fleet.create(name, replicas=0)
        queue_up(fleet, name)
        fleet.change(name, {"replicas": 1})

    def ready() -> list[str]:
        queue.admit()
        return [name for name in ("one", "two") if fleet.is_ready(name)]

    (first,) = fleet.played(ready)
    (second,) = {"one", "two"} - {first}
    until(lambda: fleet.condition(second, "Placed").get("reason") == "Queued")
    assert GATE in fleet.condition(second, "Placed")["message"]
    (running,) = queue.admitted
    former = {pod["metadata"]["uid"] for pod in queue.groups()[running]}
    queue.room = 0
    queue.evict(running)

    def replaced() -> bool:
        pods = queue.groups().get(running, [])
        return len(pods) == 2 and former.isdisjoint(pod["metadata"]["uid"] for pod in pods)

    fleet.played(replaced)
    until(lambda: fleet.condition(first).get("reason") == "Queued")
    queue.room = 2
    queue.admitted.add(running)
    assert fleet.played(ready) == [first]
    attempts = {pod["metadata"]["labels"]["medha.dev/attempt"] for pod in queue.groups()[running]}
    assert attempts == {"2"}
    fleet.change(first, {"replicas": 0})
    fleet.played(lambda: second in ready())
    for name in (first, second):
        assert fleet.status(name).get("restarts", []) == []
    fleet.change(second, {"replicas": 0})
    fleet.played(lambda: fleet.list("pods") == [])


def test_a_group_that_waits_for_its_queue_stays_as_it_is_and_is_no_fault(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    install(api, fleet.namespace)
    queue = Queue(fleet, room=0)
    operator = start_operator(speed=SPEED)
    fleet.create("llama", replicas=0)
    queue_up(fleet, "llama")
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: len(queue.groups()) == 2)
    fleet.played(lambda: fleet.condition("llama").get("reason") == "Queued")
    waiting = uids(queue)
    began_s = operator.time_s()
    # Longer than a gang may take to get its nodes.
    fleet.played(lambda: operator.time_s() - began_s > 1.25 * GANG_S)
    assert uids(queue) == waiting
    assert fleet.status("llama").get("restarts", []) == []
    queue.room = 4
    fleet.played(lambda: ready_once_admitted(fleet, queue))
    assert uids(queue) == waiting


def test_replicas_that_preempt_each_other_take_turns_until_there_is_room_for_both(
    fleet: Fleet, start_operator: Start, api: httpx.Client
) -> None:
    install(api, fleet.namespace)
    queue = Queue(fleet, room=2)
    start_operator()
    fleet.create("llama", replicas=0)
    queue_up(fleet, "llama")
    fleet.change("llama", {"replicas": 2})

    def running() -> str:
        """Return the group whose replica serves, once it is the only admitted one."""
        queue.admit()
        if len(queue.admitted) != 1 or fleet.status("llama").get("readyReplicas") != 1:
            return ""
        (name,) = queue.admitted  # its pods run: the status may still count those of the other
        pods = queue.groups().get(name, [])
        return name if pods and all(pod["status"]["phase"] == "Running" for pod in pods) else ""

    first = fleet.played(running)
    queue.evict(first)
    (second,) = {*queue.groups()} - {first}
    fleet.played(lambda: running() == second, "the other runs in its place")
    queue.evict(second)
    fleet.played(lambda: running() == first, "the first one resumes")
    queue.room = 4
    fleet.played(lambda: ready_once_admitted(fleet, queue), "both resume")
    attempts = {
        name: {pod["metadata"]["labels"]["medha.dev/attempt"] for pod in pods}
        for name, pods in queue.groups().items()
    }
    assert attempts == {first: {"2"}, second: {"2"}}
    assert fleet.status("llama").get("restarts", []) == []


def uids(queue: Queue) -> set[str]:
    """The pods that exist, whatever their names."""
    return {pod["metadata"]["uid"] for pods in queue.groups().values() for pod in pods}


def ready_once_admitted(fleet: Fleet, queue: Queue) -> bool:
    """Admit what fits; return true if the resource is Ready."""
    queue.admit()
    return fleet.is_ready("llama")
