"""Processes, pods and nodes die, hang and leave: the fleet recovers by itself and reports it."""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from demos.load import Load
from demos.release import NAMESPACE, Installed
from demos.testbed import Failed, until
from rich.console import Console
from rich.table import Table

from medha.cli.open_loop import faults
from medha.messages import ReplicaStatus

pytestmark = pytest.mark.timeout(1500)  # the images may have to be built

KILL = """
import os, pathlib, signal, sys
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdecimal():
        try:
            line, name = ((entry / part).read_bytes() for part in ("cmdline", "comm"))
        except OSError:
            continue
        if b"KILL" in line or b"standby" in name or entry.name == str(os.getpid()):
            continue
        if sys.argv[1].encode() in line:
            os.kill(int(entry.name), signal.SIGKILL)
"""
BACK_S = 240.0
CUT_S = 30.0
OUTAGE_S = 600.0
PROPER = {"no_replica", "overloaded", "draining", "deadline_infeasible", "poison_request"}
"""Faults with which a request may end if its replica could not be saved; never a cut stream."""


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """The table that `pytest -rP` shows below the last test."""
    table = Table(
        "harm",
        "whole again after",
        "under way there",
        "requests",
        "failed",
        "TTFT p99",
        "largest gap",
    )
    yield table
    Console(width=140).print(table)


class Trouble:
    """Two replicas on two nodes under a load of requests, while harm is done to `node`.

    The clients' router is on another node. It starts once requests run on `node` (`under_way`).
    """

    def __init__(self, medha: Installed, load: Load, node: str, table: Table) -> None:
        self.medha, self.load, self.node = medha, load, node
        self.under_way = 0
        until(self._met, f"requests that run on {node}", 60.0)
        self._table, self._began_s = table, time.monotonic()

    def _met(self) -> bool:
        self.under_way = status(self.medha, self.node).running
        return self.under_way > 0

    @property
    def number(self) -> str:
        """The node's number in the cluster tool."""
        return self.node.removeprefix("node")

    def back(self, harm: str, true: Callable[[], object] | None = None) -> dict[str, int]:
        """Wait until the fleet is whole and all requests have ended; record it, and return the
        number of requests by fault."""
        until(true or (lambda: whole(self.medha)), f"{harm}: both replicas", BACK_S)
        took_s = time.monotonic() - self._began_s
        self.load.end()
        records = self.load.records
        failed = dict(faults(records))
        cut = [record.id for record in records if record.finished_s is None and not record.refused]
        assert cut == [], "answers that ended without a word"
        gap_s = max(record.worst_gap_s for record in records)
        self._table.add_row(
            harm,
            f"{took_s:.0f} s",
            str(self.under_way),
            str(len(records)),
            str(failed or 0),
            f"{self.load.ttft_p99_s():.1f} s",
            f"{gap_s:.1f} s",
        )
        return failed


@pytest.fixture
def trouble(medha: Installed, table: Table) -> Iterator[Trouble]:
    set_apart(medha)
    node = serving_node(medha)
    router = router_off(medha, node)
    with reached(medha, router) as url, answers(url) as load:
        until(lambda: len(load.records) >= 3, "the first answers", 60.0)
        yield Trouble(medha, load, node, table)


def answers(url: str) -> Load:
    """Return requests whose answers take seconds, so that some are always under way."""
    return Load(url, "tiny", 1.0, 64, output_tokens=512)


def reached(medha: Installed, router: dict[str, Any]) -> contextlib.AbstractContextManager[str]:
    """URL of a router, not through the API server if the cluster's pods are reached from here."""
    if medha.bed.harm:
        return contextlib.nullcontext(f"http://{router['status']['podIP']}:8000")
    return medha.bed.forwarded(NAMESPACE, f"pod/{router['metadata']['name']}", 8000)


def serving_node(medha: Installed) -> str:
    """Return the node of a replica that requests go to.

    Of two that keep a promise, routers choose the one that expects to be sooner, which may always
    be the same.
    """
    homes = [str(pod["spec"]["nodeName"]) for pod in medha.pods()]
    busy: list[str] = []

    def found() -> bool:
        busy[:] = [node for node in homes if status(medha, node).running]
        return bool(busy)

    with reached(medha, routers_off(medha, "")[0]) as url, answers(url):
        until(found, "a replica that requests go to", 60.0)
    return busy[0]


def leader_on(medha: Installed, node: str) -> str:
    """The pod with the controller of the replica on the node."""
    (pod,) = (
        str(pod["metadata"]["name"])
        for pod in medha.pods()
        if pod["spec"].get("nodeName") == node
        and pod["metadata"]["labels"]["medha.dev/role"] == "leader"
    )
    return pod


def status(medha: Installed, node: str) -> ReplicaStatus:
    """Return the status of the replica on the node, by its controller."""
    path = f"/api/v1/namespaces/default/pods/{leader_on(medha, node)}:8091/proxy/status"
    return msgspec.json.decode(medha.bed.kubectl("get", "--raw", path), type=ReplicaStatus)


def whole(medha: Installed) -> bool:
    return medha.ready_replicas() == 2 and len(medha.pods()) == 4


def nodes(medha: Installed) -> dict[str, set[str]]:
    """The nodes of each replica's pods."""
    homes: dict[str, set[str]] = {}
    for pod in medha.pods():
        ordinal = pod["metadata"]["labels"]["medha.dev/ordinal"]
        homes.setdefault(ordinal, set()).add(pod["spec"].get("nodeName", ""))
    return homes


def apart(medha: Installed) -> bool:
    return whole(medha) and not set.intersection(*nodes(medha).values())


def set_apart(medha: Installed) -> None:
    """Running pods are not moved: if both replicas are on one node, place one of them again."""
    until(lambda: whole(medha), "both replicas", BACK_S)
    if not apart(medha):
        label = f"medha.dev/replica=tiny,medha.dev/ordinal={max(nodes(medha))}"
        medha.bed.kubectl("delete", "pods", "-l", label, "--wait")
        until(lambda: apart(medha), "replicas on different nodes", BACK_S)


def router_off(medha: Installed, node: str) -> dict[str, Any]:
    """Move the router elsewhere: its clients are not the subject of the test."""
    if not routers_off(medha, node):  # a drain has moved them all to one node
        for verb in ("restart", "status"):
            medha.bed.kubectl("-n", NAMESPACE, "rollout", verb, "deployment/medha-router")
        until(lambda: routers_off(medha, node), f"a router that is not on {node}", BACK_S)
    return routers_off(medha, node)[0]


def routers_off(medha: Installed, node: str) -> list[dict[str, Any]]:
    """Routers that serve on other nodes."""
    label = "app.kubernetes.io/component=router"
    return [
        pod
        for pod in medha.bed.get("-n", NAMESPACE, "pods", "-l", label)["items"]
        if pod["spec"].get("nodeName", node) != node
        and "deletionTimestamp" not in pod["metadata"]
        and all(
            container["ready"]
            for container in pod["status"].get("containerStatuses", [{"ready": False}])
        )
    ]


def test_a_killed_rank_is_restarted_in_its_pod(trouble: Trouble) -> None:
    medha = trouble.medha
    pod = leader_on(medha, trouble.node)
    before = status(medha, trouble.node).generation
    medha.bed.kubectl("exec", pod, "--", "python", "-c", KILL, "medha_worker.low_priority_start")
    # A standby takes over within seconds, so the replica's readiness need not be seen to change.
    until(lambda: status(medha, trouble.node).generation > before, "a new generation", 60.0)
    assert set(trouble.back("SIGKILL of the ranks of a pod")) <= PROPER


def test_a_killed_pod_is_created_again(trouble: Trouble) -> None:
    medha = trouble.medha
    pod = next(pod for pod in medha.pods() if pod["metadata"]["name"].endswith("-s1"))
    medha.bed.kubectl("delete", "pod", pod["metadata"]["name"], "--grace-period=0", "--force")
    gone = {pod["metadata"]["uid"]}
    until(lambda: not gone & {pod["metadata"]["uid"] for pod in medha.pods()}, "it gone", 60.0)
    assert set(trouble.back("a pod deleted by force")) <= PROPER


def test_a_killed_leader_is_created_again(trouble: Trouble) -> None:
    medha = trouble.medha
    leader = leader_on(medha, trouble.node)
    before = medha.bed.get("pod", leader)["metadata"]["uid"]
    medha.bed.kubectl("delete", "pod", leader, "--grace-period=0", "--force")
    until(lambda: before not in {pod["metadata"]["uid"] for pod in medha.pods()}, "it gone", 60.0)
    assert set(trouble.back("a leader deleted by force")) <= PROPER


def test_a_node_is_drained_without_a_failed_request(trouble: Trouble) -> None:
    medha, node = trouble.medha, trouble.node
    try:
        medha.bed.kubectl(
            "drain",
            node,
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--timeout=300s",
            timeout_s=320.0,
        )
        assert trouble.back("kubectl drain of a node") == {}
        assert node not in {pod["spec"]["nodeName"] for pod in medha.pods()}
    finally:
        medha.bed.kubectl("uncordon", node)


@pytest.fixture
def harm(medha: Installed) -> Callable[..., str]:
    """The local cluster tool, which can take whole nodes away."""
    if medha.bed.harm is None:
        pytest.skip("only the local cluster tool can do that to a cluster")
    return medha.bed.harm


def test_the_fleet_recovers_elsewhere_after_a_node_died(
    trouble: Trouble, harm: Callable[..., str]
) -> None:
    medha = trouble.medha
    harm("kill-node", trouble.number)
    try:
        until(lambda: not whole(medha), "a replica that is not ready", 120.0)
        failed = trouble.back("the power of a node", lambda: medha.ready_replicas() == 2)
        assert trouble.node not in {
            pod["spec"]["nodeName"]
            for pod in medha.pods()
            if "deletionTimestamp" not in pod["metadata"]
        }
        assert set(failed) <= PROPER
    finally:
        harm("start-node", trouble.number)


def test_a_node_that_is_cut_off_for_half_a_minute_comes_back(
    trouble: Trouble, harm: Callable[..., str]
) -> None:
    harm("partition", trouble.number)
    try:
        time.sleep(CUT_S)  # the length of the cut is the subject
    finally:
        harm("heal", trouble.number)
    assert set(trouble.back(f"the cable of a node, for {CUT_S:.0f} s")) <= PROPER


def test_requests_are_served_while_the_api_server_is_away(
    trouble: Trouble, harm: Callable[..., str]
) -> None:
    """The API server is killed and started again; the operator keeps or retakes the Lease."""
    before = datetime.datetime.now(datetime.UTC)
    harm("kill-api-server")
    failed = trouble.back("SIGKILL of the API server", lambda: renewed_since(trouble.medha, before))
    assert failed == {}
    until(lambda: whole(trouble.medha), "both replicas", BACK_S)


def test_requests_are_served_for_ten_minutes_without_an_api_server(
    trouble: Trouble, harm: Callable[..., str]
) -> None:
    medha = trouble.medha
    pods = lives(medha)
    over_s = time.monotonic() + OUTAGE_S  # the length of the outage is the subject
    while time.monotonic() < over_s:
        with contextlib.suppress(Failed):  # between two starts
            harm("kill-api-server")
        time.sleep(0.1)
    after = datetime.datetime.now(datetime.UTC)
    failed = trouble.back(
        f"{OUTAGE_S:.0f} s without API server", lambda: renewed_since(medha, after)
    )
    assert failed == {}
    until(lambda: whole(medha), "both replicas", BACK_S)
    assert lives(medha) == pods


def lives(medha: Installed) -> dict[str, int]:
    """Restarts of each pod's container, by the pod's UID."""
    return {
        pod["metadata"]["uid"]: sum(
            container["restartCount"] for container in pod["status"]["containerStatuses"]
        )
        for pod in medha.pods()
    }


def renewed_since(medha: Installed, moment: datetime.datetime) -> bool:
    """Return true if an operator has renewed its Lease since then."""
    try:
        lease = medha.bed.get("-n", NAMESPACE, "lease", "medha-operator")
    except Failed:
        return False
    return datetime.datetime.fromisoformat(lease["spec"]["renewTime"]) > moment
