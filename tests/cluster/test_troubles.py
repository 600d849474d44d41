"""Processes, pods and nodes die, hang and go: the fleet comes back by itself, and says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from examples.demo_load import Load
from examples.installed import NAMESPACE, Installed
from examples.testbed import until

from medha.cli.open_loop import faults

pytestmark = pytest.mark.timeout(900)

KILL = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdecimal():
        try:
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if sys.argv[1].encode() in line and b"KILL" not in line and entry.name != str(os.getpid()):
            os.kill(int(entry.name), signal.SIGKILL)
"""
BACK_S = 240.0
PROPER = {"no_replica", "overloaded", "draining", "deadline_infeasible", "poison_request"}
"""What a request may end with whose replica could not be saved; never a cut stream."""


@pytest.fixture
def load(medha: Installed) -> Iterator[Load]:
    """Requests come in at their own times while a test does harm."""
    medha.ready()
    until(lambda: whole(medha), "both replicas", BACK_S)
    with (
        medha.bed.forwarded(NAMESPACE, router_beside(medha, victim(medha)), 8000) as url,
        Load(url, "tiny", rate=1.0, prompt_tokens=64) as playing,
    ):
        until(lambda: len(playing.records) >= 3, "the first answers", 60.0)
        yield playing


def tell(load: Load, took_s: float) -> None:
    """Shown by `pytest -rP`."""
    ended = dict(faults(load.records))
    print(f"back after {took_s:.0f} s; of {len(load.records)} requests failed: {ended}")  # noqa: T201


def victim(medha: Installed) -> str:
    """The node that tests do harm to: one that serves."""
    return str(medha.pods()[0]["spec"]["nodeName"])


def router_beside(medha: Installed, node: str) -> str:
    """A router that is not on that node: clients of one that goes are not what is tested."""
    if not (found := routers_off(medha, node)):  # a drain has brought them all to one node
        for verb in ("restart", "status"):
            medha.bed.kubectl("-n", NAMESPACE, "rollout", verb, "deployment/medha-router")
        until(lambda: routers_off(medha, node), f"a router that is not on {node}", BACK_S)
        found = routers_off(medha, node)
    return f"pod/{found[0]}"


def routers_off(medha: Installed, node: str) -> list[str]:
    """Routers that run elsewhere, by name."""
    label = "app.kubernetes.io/component=router"
    routers = medha.bed.get("-n", NAMESPACE, "pods", "-l", label)["items"]
    return [
        str(each["metadata"]["name"])
        for each in routers
        if each["spec"]["nodeName"] != node and "deletionTimestamp" not in each["metadata"]
    ]


def whole(medha: Installed) -> bool:
    return medha.ready_replicas() == 2 and len(medha.pods()) == 4


def test_a_killed_rank_starts_anew_inside_its_pod(medha: Installed, load: Load) -> None:
    pod = medha.pods()[0]["metadata"]["name"]
    medha.bed.kubectl("exec", pod, "--", "python", "-c", KILL, "medha_worker.gently")
    until(lambda: not whole(medha), "a replica that is not ready", 60.0)
    tell(load, until(lambda: whole(medha), "the replica back", BACK_S))
    assert set(faults(load.records)) <= PROPER


def test_a_pod_that_is_killed_is_made_again(medha: Installed, load: Load) -> None:
    pod = next(each for each in medha.pods() if each["metadata"]["name"].endswith("-s1"))
    medha.bed.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    gone = {pod["metadata"]["uid"]}
    until(lambda: not gone & {each["metadata"]["uid"] for each in medha.pods()}, "it gone", 60.0)
    tell(load, until(lambda: whole(medha), "the replica back", BACK_S))
    assert set(faults(load.records)) <= PROPER


def test_a_node_is_drained_without_a_failed_request(medha: Installed, load: Load) -> None:
    node = victim(medha)
    try:
        medha.bed.kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=300s",
            timeout_s=320.0,
        )  # fmt: skip
        tell(load, until(lambda: whole(medha), "both replicas elsewhere", BACK_S))
        assert node not in {each["spec"]["nodeName"] for each in medha.pods()}
        assert faults(load.records) == {}
        assert all(each.finished_s is not None for each in load.records)
    finally:
        medha.bed.kubectl("uncordon", node)


@pytest.fixture
def harm(medha: Installed) -> Callable[..., str]:
    """The local cluster tool, which can take whole nodes away."""
    if medha.bed.harm is None:
        pytest.skip("only the local cluster tool can do that to a node")
    return medha.bed.harm


def test_a_dead_node_is_left_and_the_fleet_comes_back_elsewhere(
    medha: Installed, load: Load, harm: Callable[..., str]
) -> None:
    node = victim(medha)
    number = node.removeprefix("node")
    harm("kill-node", number)
    try:
        until(lambda: not whole(medha), "a replica that is not ready", 120.0)
        both = until(lambda: medha.ready_replicas() == 2, "both replicas elsewhere", BACK_S)
        tell(load, both)
        assert node not in {each["spec"]["nodeName"] for each in medha.pods()}
        assert set(faults(load.records)) <= PROPER
    finally:
        harm("start-node", number)


def test_a_node_that_is_cut_off_for_half_a_minute_comes_back(
    medha: Installed, load: Load, harm: Callable[..., str]
) -> None:
    number = victim(medha).removeprefix("node")
    harm("partition", number)
    try:
        time.sleep(30.0)  # the length of the cut is what is tested
    finally:
        harm("heal", number)
    tell(load, until(lambda: whole(medha), "both replicas", BACK_S))
    assert set(faults(load.records)) <= PROPER
