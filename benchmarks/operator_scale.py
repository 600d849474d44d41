"""The operator's load from a large fleet: 200 new MedhaReplicas of 8 pods on two cores.

    python -m benchmarks.operator_scale                    on a cluster of its own
    python -m benchmarks.operator_scale --resources 1000   the larger fleet
    python -m benchmarks.operator_scale --keep             on the cluster of $KUBECONFIG

A cluster of its own needs root and a cluster tool ($MEDHA_CLUSTER_TOOL, or the one next to this
checkout). Its fake nodes run nothing, but pods on them become Running and Ready. The measurement
thus covers the operator with API server, etcd, scheduler and all controllers on the same two
cores. Times count from the first POST of a MedhaReplica. Writes are those that the operator's own
metrics count by the API server's answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demos.run_afterwards import run_afterwards

from medha.cli.local_fleet.child_process import killed_with_parent
from medha_operator.kube.client import NODES, PODS, REPLICAS, ClusterError, Kind, KubeClient
from medha_operator.kube.login import login

HOUSE = Path(__file__).resolve().parents[1]
TOOL = HOUSE.parent / "shared/kubernetes/cluster"
SPACE = "scale"
STAGES = 4
NODES_AT_MOST = 200


class Measured(msgspec.Struct):
    """The results of a run: seconds since the first POST, MiB."""

    pods_s: float = 0.0
    ready_s: float = 0.0
    cpu_s: float = 0.0
    rss_mib: float = 0.0
    pod_writes: float = 0.0
    status_writes: float = 0.0
    idle_writes: float = 0.0


def targets(resources: int) -> dict[str, float]:
    """Targets; a larger fleet has none for times, as there the cores wait for the API server."""
    times = {"pods_s": 40.0, "ready_s": 50.0, "cpu_s": 20.0} if resources <= 200 else {}
    rss_mib = 150.0 if resources <= 200 else 300.0
    writes = {"pod_writes": 3.0, "status_writes": 5.0, "idle_writes": 0.0}
    return times | {"rss_mib": rss_mib} | writes


@contextlib.contextmanager
def cluster(tool: str, nodes: int, grace_s: int) -> Iterator[str]:
    """Start a cluster with fake nodes; yields its kubeconfig."""
    name = ["--name", "scale"]
    up = [tool, "up", *name, "--nodes", "1", "--fake-nodes", str(nodes)]
    up += ["--node-grace", str(grace_s)]
    with run_afterwards(tool, "down", *name):
        subprocess.run(killed_with_parent(*up), check=True)
        shown = subprocess.run([tool, "env", *name], check=True, capture_output=True, text=True)
        yield re.findall(r"KUBECONFIG=(\S+)", shown.stdout)[0].strip("'\"")


class Operator:
    """The operator as a process of its own."""

    def __init__(self, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        environment = os.environ | {
            "MEDHA_NAMESPACE": SPACE,
            "MEDHA_WORKER_IMAGE": "localhost/medha-worker:dev",
            "MEDHA_OPS_HOST": "127.0.0.1",
            "MEDHA_OPS_PORT": str(self._port),
        }
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                killed_with_parent(
                    sys.executable, *os.environ.get("PROFILE", "").split(), "-m", "medha_operator"
                ),
                env=environment,
                stdout=file,
                stderr=file,
            )

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Every sample by name and labels; none while the process starts."""
        try:
            text = httpx.get(f"http://127.0.0.1:{self._port}/metrics").text
        except httpx.HTTPError:
            return {}
        counts = {}
        for name, labels, value in re.findall(r"^(\w+)(\{.*\})? (\S+)$", text, flags=re.M):
            pairs = re.findall(r'(\w+)="([^"]*)"', labels)
            counts[name, frozenset(pairs)] = float(value)
        return counts

    def leads(self) -> bool:
        return self.metrics().get(("medha_operator_leading", frozenset())) == 1.0

    def writes(self, *kinds: str) -> float:
        """Number of writes so far: of these kinds, or of all but the Lease."""
        total = 0.0
        for (name, labels), value in self.metrics().items():
            kind = dict(labels).get("kind", "")
            if name == "medha_operator_writes_total" and kind != "leases":
                total += value if not kinds or kind in kinds else 0.0
        return total

    def writes_by_kind(self) -> str:
        writes = {
            " ".join(dict(labels)[label] for label in ("verb", "kind", "code")): value
            for (name, labels), value in self.metrics().items()
            if name == "medha_operator_writes_total"
        }
        return ", ".join(f"{name}: {value:.0f}" for name, value in sorted(writes.items()))

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def peak_mib(self) -> float:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()


def resource(number: int, pods: int) -> bytes:
    spec = {
        "model": {
            "name": f"model-{number}",
            "source": {"hostPath": {"path": "/models"}},
            "maxContextTokens": 100_000,
        },
        "parallelism": {"spp": STAGES, "kvp": {"min": pods // STAGES, "max": pods // STAGES}},
    }
    metadata = {"name": f"fleet-{number}", "namespace": SPACE}
    document = {"apiVersion": REPLICAS.api_version, "kind": REPLICAS.kind}
    return msgspec.json.encode(document | {"metadata": metadata, "spec": spec})


async def prepare(client: KubeClient) -> None:
    """Install the CRD and create a namespace."""
    definition = yaml.safe_load((HOUSE / "crds/medha.dev_medhareplicas.yaml").read_text())
    kind = Kind("apiextensions.k8s.io", "v1", "customresourcedefinitions", "", namespaced=False)
    name = definition["metadata"]["name"]
    await client.apply(kind, "", name, msgspec.json.encode(definition))
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}}
    spaces = Kind("", "v1", "namespaces", "", namespaced=False)
    await client.apply(spaces, "", SPACE, msgspec.json.encode(space))
    while True:  # until the API server serves the new kind
        with contextlib.suppress(ClusterError):
            [None async for _ in client.pages(REPLICAS, SPACE)].clear()
            break
        await asyncio.sleep(0.2)
    await _await_collector(client)


async def _await_collector(client: KubeClient) -> None:
    """Wait until the garbage collector watches the new kind, which takes it half a minute.

    Until then it asks the API server for each object's owner: on a cluster where the kind has been
    installed for a while there is nothing of it.
    """
    await client.create(REPLICAS, SPACE, resource(0, STAGES))
    path = REPLICAS.path(SPACE, "fleet-0")
    body = msgspec.json.encode({"propagationPolicy": "Foreground"})  # the collector ends it
    await client._call("DELETE", path, body=body, headers={"Content-Type": "application/json"})
    while True:
        try:
            await client.get(REPLICAS, SPACE, "fleet-0")
        except ClusterError as error:
            if error.status == 404:
                return
            raise
        await asyncio.sleep(0.5)


async def widen(client: KubeClient, nodes: int, devices: int) -> None:
    """Give each fake node this many GPUs, and room for as many pods.

    A fake node has 8 GPUs, and one thread renews the leases of all: on two busy cores a thousand
    nodes would fall silent, so a larger fleet gets larger nodes instead of more.
    """
    room = {"nvidia.com/gpu": str(devices), "pods": str(devices + 10)}
    room |= {"cpu": "512", "memory": "4Ti"}
    body = msgspec.json.encode({"status": {"capacity": room, "allocatable": room}})
    headers = {"Content-Type": "application/merge-patch+json"}
    for number in range(1, nodes + 1):
        path = NODES.path("", f"fake{number}") + "/status"
        await client._call("PATCH", path, body=body, headers=headers)


async def _silent_nodes(client: KubeClient) -> int:
    """Count the nodes whose heartbeats have not come in time."""
    silent = 0
    async for page in client.pages(NODES, ""):
        for body in page.items or ():
            conditions = msgspec.json.decode(body)["status"]["conditions"]
            silent += any(c["type"] == "Ready" and c["status"] != "True" for c in conditions)
    return silent


async def create(client: KubeClient, count: int, pods: int) -> None:
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await client.create(REPLICAS, SPACE, resource(number, pods))

    await asyncio.gather(*(some() for _ in range(8)))


async def pods_there(client: KubeClient) -> int:
    """Count the pods with a list of one, which gives the number of the rest."""
    body = await client._call("GET", PODS.path(SPACE), query={"limit": "1"})
    page: dict[str, Any] = msgspec.json.decode(body)
    return len(page["items"]) + int(page["metadata"].get("remainingItemCount", 0))


class Watcher:
    """Watches the MedhaReplicas; repeated lists would load the API server."""

    def __init__(self, client: KubeClient) -> None:
        self._client, self._ready = client, set[str]()
        self._since = ""

    async def begin(self) -> None:
        async for page in self._client.pages(REPLICAS, SPACE):
            self._since = page.metadata.resource_version

    async def run(self) -> None:
        while True:
            async for changes in self._client.watch(REPLICAS, SPACE, since=self._since):
                for change in changes:
                    self._see(msgspec.json.decode(change.object))

    def _see(self, body: dict[str, Any]) -> None:
        self._since = body["metadata"]["resourceVersion"]
        conditions = body.get("status", {}).get("conditions", [])
        if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
            self._ready.add(body["metadata"]["name"])

    def ready(self) -> int:
        return len(self._ready)


async def measure(operator: Operator, count: int, pods: int, idle_s: float) -> Measured:
    client, seen = KubeClient(login), Measured()
    try:
        while not operator.leads():
            await asyncio.sleep(0.2)
        watcher = Watcher(client)
        await watcher.begin()
        watching = asyncio.create_task(watcher.run())
        before_s, began = operator.cpu_s(), time.monotonic()
        creating = asyncio.create_task(create(client, count, pods))
        there = done = 0
        shown_s = began
        while done < count:
            await asyncio.sleep(0.5)
            there = there if seen.pods_s else await pods_there(client)
            if there >= count * pods and not seen.pods_s:
                seen.pods_s = time.monotonic() - began
            done = watcher.ready()
            passed = time.monotonic() - began
            if time.monotonic() - shown_s > 5.0:
                shown_s = time.monotonic()
                print(f"{passed:5.0f} s: {there} pods, {done} of {count} Ready", flush=True)
            if passed > 60.0 + count:
                silent = await _silent_nodes(client)
                why = f"; {silent} nodes fell silent: this machine has no cores left for it"
                raise SystemExit(f"not Ready after {passed:.0f} s{why if silent else ''}")
        seen.ready_s = time.monotonic() - began
        await creating
        watching.cancel()
        seen.cpu_s = operator.cpu_s() - before_s
        await asyncio.sleep(10.0)  # the last events
        statuses = operator.writes(REPLICAS.plural)
        seen.pod_writes = (operator.writes() - statuses) / (count * pods)
        seen.status_writes = statuses / count
        before = operator.writes()
        await asyncio.sleep(idle_s)
        seen.idle_writes = operator.writes() - before
        seen.rss_mib = operator.peak_mib()
        print(f"all writes: {operator.writes_by_kind()}")
    finally:
        await client.close()
    return seen


def show(seen: Measured, wanted: dict[str, float]) -> bool:
    """Print a table with the targets; returns true if all are met."""
    names = {
        "pods_s": "all pods exist after (s)",
        "ready_s": "all Ready after (s)",
        "cpu_s": "operator's processor time (s)",
        "rss_mib": "operator's memory, at most (MiB)",
        "pod_writes": "writes per pod, but for the status",
        "status_writes": "status writes per resource",
        "idle_writes": "writes while idle",
    }
    kept = True
    print(f"{'':34} {'measured':>9} {'target':>9}")
    for name, text in names.items():
        value, limit = getattr(seen, name), wanted.get(name, float("inf"))
        kept &= value <= limit
        limit_text = f"{limit:9.2f}" if name in wanted else f"{'-':>9}"
        print(f"{text:34} {value:9.2f} {limit_text} {'' if value <= limit else ' missed'}")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--resources", type=int, default=200)
    parser.add_argument("--pods", type=int, default=8, help="per resource, in stages of 4")
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to watch it idle")
    parser.add_argument(
        "--node-grace",
        type=int,
        default=240,
        help="seconds until a silent fake node is NotReady, and stays so (default: 240; its "
        "heartbeats wait behind the news of thousands of pods)",
    )
    parser.add_argument("--keep", action="store_true", help="use the cluster of $KUBECONFIG")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / "operator.log")
    args = parser.parse_args()
    tool = os.environ.get("MEDHA_CLUSTER_TOOL", str(TOOL))
    if not args.keep and not Path(tool).exists():
        print(f"not measured: no cluster tool at {tool}; set MEDHA_CLUSTER_TOOL, or use --keep")
        return 0
    nodes = min(-(-args.resources * args.pods // 8), NODES_AT_MOST)
    devices = 0 if args.keep else max(8, -(-args.resources * args.pods // nodes))
    place = contextlib.nullcontext(os.environ.get("KUBECONFIG", ""))
    with place if args.keep else cluster(tool, nodes, args.node_grace) as kubeconfig:
        os.environ["KUBECONFIG"] = kubeconfig
        asyncio.run(_prepared(nodes, devices))
        operator = Operator(args.log)
        try:
            seen = asyncio.run(measure(operator, args.resources, args.pods, args.idle))
        finally:
            operator.end()
    return 0 if show(seen, targets(args.resources)) else 1


async def _prepared(nodes: int, devices: int) -> None:
    client = KubeClient(login)
    try:
        await prepare(client)
        if devices > 8:
            await widen(client, nodes, devices)
    finally:
        await client.close()


if __name__ == "__main__":
    sys.exit(main())
