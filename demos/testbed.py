"""Kubernetes cluster for demos and tests: a given one, kind's, or the local cluster tool's.

MEDHA_TEST_KUBECONFIG=1    the cluster of $KUBECONFIG; it must have the images localhost/medha-*:dev
                           and the small model's folder on every node ($MEDHA_TEST_MODEL names
                           it) and no release of Medha; everything installed is removed, but the CRD
kind on PATH               a cluster of its own, removed at the end
$MEDHA_CLUSTER_TOOL        likewise; default: the tool next to this checkout, if there is one
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from demos.images import ROOT, TARGETS, archive, build, image
from demos.images import missing as missing_for_images
from demos.run_afterwards import run_afterwards

from medha.cli.local_fleet.child_process import killed_with_parent
from medha.cli.local_fleet.preflight import free_ports

TOOL = ROOT.parent / "shared" / "kubernetes" / "cluster"
ARCHIVES = ROOT / "build" / "images"
MODEL = ROOT / "build" / "cluster-model"
NO_MODEL = "MEDHA_TEST_MODEL is not set: name the model's folder on the cluster's nodes"
MINUTE_S = 60.0


class Failed(Exception):
    """A command failed, or an awaited state was not reached in time."""


class NoCluster(Failed):
    """A cluster does not start."""


class Testbed:
    """A cluster and the commands that speak to it. `load` brings an image to its nodes; `harm`
    calls the local cluster tool, where that made the cluster: `kill-node N`, `partition N` …,
    and `kill-api-server`, which the tool starts again. On that cluster, Services are reachable
    from here, and `load` takes another name for the image."""

    __test__ = False  # no test of pytest's, whatever the name looks like

    def __init__(
        self,
        kind: str,
        environ: dict[str, str],
        load: Callable[..., None],
        model: pathlib.Path,
        harm: Callable[..., str] | None = None,
    ) -> None:
        self.kind, self.environ, self.load, self.model = kind, environ, load, model
        self.harm = harm

    def run(self, *command: str, text: str | None = None, timeout_s: float = 2 * MINUTE_S) -> str:
        """Run a program against the cluster; returns its output or raises Failed."""
        try:
            done = subprocess.run(
                killed_with_parent(*command),
                env=self.environ,
                input=text,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(command)}: not done after {timeout_s:.0f} s") from None
        if done.returncode:
            raise Failed(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
        return done.stdout

    def kubectl(self, *arguments: str, text: str | None = None, timeout_s: float = 120.0) -> str:
        return self.run("kubectl", *arguments, text=text, timeout_s=timeout_s)

    def get(self, *what: str) -> dict[str, Any]:
        """Get an object, or a list of objects under `items`."""
        document: dict[str, Any] = json.loads(self.kubectl("get", *what, "-o", "json"))
        return document

    @contextlib.contextmanager
    def forwarded(self, namespace: str, to: str, port: int) -> Iterator[str]:
        """Local URL of a port of a pod or service."""
        (here,) = free_ports("127.0.0.1", 1)
        with self._door(here, "-n", namespace, "port-forward", to, f"{here}:{port}"):
            yield f"http://127.0.0.1:{here}"

    @contextlib.contextmanager
    def proxied(self) -> Iterator[str]:
        """Local URL of the API server, without credentials."""
        (here,) = free_ports("127.0.0.1", 1)
        with self._door(here, "proxy", f"--port={here}"):
            yield f"http://127.0.0.1:{here}"

    @contextlib.contextmanager
    def _door(self, here: int, *arguments: str) -> Iterator[None]:
        """Run a kubectl that listens on a local port."""
        with subprocess.Popen(
            killed_with_parent("kubectl", *arguments),
            env=self.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                until(lambda: _listens(here), f"kubectl {' '.join(arguments)}", MINUTE_S)
                yield
            finally:
                process.terminate()


def until(true: Callable[[], object], what: str, limit_s: float) -> float:
    """Wait for a condition; returns the seconds waited, raises Failed after the limit."""
    began_s = time.monotonic()
    while not true():
        if time.monotonic() - began_s > limit_s:
            raise Failed(f"{what}: not within {limit_s:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - began_s


def given() -> bool:
    """True if the user gave a cluster, which has images and model already."""
    return os.environ.get("MEDHA_TEST_KUBECONFIG") == "1"


def missing() -> str:
    """Reason why this machine can have no cluster or images; empty if none."""
    if given():
        return "" if os.environ.get("MEDHA_TEST_MODEL") else NO_MODEL
    if lacking := missing_for_images():
        return lacking
    if shutil.which("kind"):
        return ""
    tool = pathlib.Path(os.environ.get("MEDHA_CLUSTER_TOOL", TOOL))
    if not tool.is_file():
        return "no cluster here: install kind, or set MEDHA_TEST_KUBECONFIG=1 and KUBECONFIG"
    return "" if os.geteuid() == 0 else f"{tool} needs root"


def built() -> Iterator[str]:
    """Build the images for the cluster, one by one; raises Unreachable."""
    for target in () if given() else TARGETS:
        name = build(target, "cpu")
        archive(target, ARCHIVES)
        yield name


@contextlib.contextmanager
def opened(name: str, nodes: int = 2) -> Iterator[Testbed]:
    """Open the cluster of this machine; removes it at the end, even if this process is killed."""
    if given():
        yield _given()
    elif shutil.which("kind"):
        with _kind(name, nodes) as testbed:
            yield testbed
    else:
        with from_tool(name, nodes) as testbed:
            yield testbed


def _given() -> Testbed:
    model = os.environ.get("MEDHA_TEST_MODEL") or sys.exit(NO_MODEL)
    return Testbed("given", dict(os.environ), lambda target: None, pathlib.Path(model))


@contextlib.contextmanager
def _kind(name: str, nodes: int) -> Iterator[Testbed]:
    kubeconfig = ROOT / "build" / f"kind-{name}.kubeconfig"
    kubeconfig.parent.mkdir(exist_ok=True)
    environ = {**os.environ, "KUBECONFIG": str(kubeconfig)}
    MODEL.mkdir(parents=True, exist_ok=True)
    mount = [{"hostPath": str(MODEL), "containerPath": str(MODEL)}]
    roles = ["control-plane", *["worker"] * nodes]
    cluster = {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [{"role": role, "extraMounts": mount} for role in roles],
    }
    named = ["--name", name]

    def load(target: str) -> None:
        path = str(archive(target, ARCHIVES))
        subprocess.run(
            killed_with_parent("kind", "load", "image-archive", path, *named), check=True
        )

    with run_afterwards("kind", "delete", "cluster", *named, "--kubeconfig", str(kubeconfig)):
        created = subprocess.run(
            killed_with_parent(
                "kind", "create", "cluster", *named, "--wait", "3m", "--config", "-"
            ),
            input=json.dumps(cluster),
            text=True,
            env=environ,
        )
        if created.returncode:
            raise NoCluster(f"kind starts no cluster here: it ended with {created.returncode}")
        yield Testbed("kind", environ, load, MODEL)


@contextlib.contextmanager
def from_tool(name: str, nodes: int) -> Iterator[Testbed]:
    """Start a cluster of the local cluster tool; raises NoCluster."""
    tool = os.environ.get("MEDHA_CLUSTER_TOOL", str(TOOL))
    if not pathlib.Path(tool).is_file():
        sys.exit("no cluster: install kind, or set MEDHA_TEST_KUBECONFIG=1 and KUBECONFIG")
    named = ["--name", name]

    def call(*arguments: str) -> str:
        done = subprocess.run(killed_with_parent(tool, *arguments), capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{tool} {' '.join(arguments)}: {(done.stdout + done.stderr)[-2000:]}")
        return done.stdout

    def load(target: str, name: str = "") -> None:
        call("load", *named, "--image", name or image(target), str(archive(target, ARCHIVES)))

    with run_afterwards(tool, "down", *named):
        try:
            call("up", *named, "--nodes", str(nodes))
        except Failed as failure:
            raise NoCluster(f"no cluster starts here: {failure}") from None
        exports = dict(re.findall(r"^export (\w+)=(\S+)$", call("env", *named), flags=re.M))
        path = exports["PATH"].replace('"', "").replace("$PATH", os.environ["PATH"])
        environ = {**os.environ, "KUBECONFIG": exports["KUBECONFIG"], "PATH": path}
        harm = functools.partial(_harm, call, named)
        yield Testbed("local", environ, load, MODEL, harm)


def _harm(call: Callable[..., str], named: list[str], what: str, *arguments: str) -> str:
    if what == "kill-api-server":
        return _kill_api_server(pathlib.Path(call("kubeconfig", *named).strip()))
    return call(what, *named, *arguments)


def _kill_api_server(kubeconfig: pathlib.Path) -> str:
    """SIGKILL; returns the process's number. Each cluster's has an address of its own."""
    match = re.search(r"https://([\d.]+):", kubeconfig.read_text())
    address = f"--advertise-address={match[1] if match else '?'}".encode()
    for entry in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # one that has just ended
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
            if words and words[0].endswith(b"kube-apiserver") and address in words:
                os.kill(int(entry.name), signal.SIGKILL)
                return entry.name
    raise Failed(f"no API server of {kubeconfig} runs here")


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
        return True
    return False
