"""The operator and a queueing system that holds its pods behind a gate."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.kueue import GATE, QUEUE, Queue, install

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(600)


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
