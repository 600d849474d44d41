"""`medha doctor`: can this machine run a fleet? One line per check, with the remedy of a fault."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from contextlib import closing

from rich.console import Console
from rich.text import Text

from medha.adapters.sockets import Dialer, Listener
from medha.adapters.transports import rdma_ports
from medha.cli.local_fleet import preflight
from medha.cli.local_fleet.checkpoint_check import check_resources, local_transports
from medha.cli.local_fleet.run_dir import RunDir, check_unused
from medha.cli.resource_file import read_resources
from medha.cli.up import HOST
from medha.errors import MedhaError, SetupError
from medha.messages import Codec, LoadReport, RouterBeat
from medha.messages.fields import Load
from medha.messages.routing import ReplicaMessage, RouterMessage

DELIVERY_S = 5.0


def diagnose(
    file: pathlib.Path | None,
    port: int,
    ops_port: int,
    console: Console,
    run_dir: pathlib.Path | None = None,
) -> bool:
    """Run every check, print one line for each and for each fault, and return whether all
    passed."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("services installed", _programs),
        ("shared memory", _shared_memory),
        ("GPUs", lambda: f"{preflight.gpu_count()} found"),
        ("RDMA", _rdma),
        (f"port {port}", lambda: _port(port, "--port")),
        (f"port {ops_port}", lambda: _port(ops_port, "--ops-port")),
        ("run directory and keys", lambda: _link(encrypted=False)),
        ("encrypted link", lambda: _link(encrypted=True)),
    ]
    if run_dir is not None:
        checks.append((f"run directory {run_dir}", lambda: _unused(run_dir)))
    if file is not None:
        checks.append((f"resource {file.name}", lambda: _resource(file)))
    passed = [_told(name, check, console) for name, check in checks]
    return all(passed)


def _told(name: str, check: Callable[[], str], console: Console) -> bool:
    try:
        lines, style = check(), "green"
    except MedhaError as error:
        lines, style = str(error), "bold red"
    mark = "ok " if style == "green" else "no "
    for line in lines.splitlines():
        console.print(Text(mark, style) + Text(f"{name}: {line}"), soft_wrap=True)
    return style == "green"


def _programs() -> str:
    preflight.check_programs()
    return "router and worker"


def _shared_memory() -> str:
    preflight.check_shared_memory()
    return "enough"


def _rdma() -> str:
    ports = rdma_ports()
    lines = (f"{port.name} ({port.link}) {port.fault or 'can be used'}" for port in ports)
    return "\n".join(lines) or "no device: ranks of different machines use TCP"


def _port(port: int, flag: str) -> str:
    preflight.check_port(HOST, port, flag)
    return "free"


def _unused(run_dir: pathlib.Path) -> str:
    check_unused(run_dir)
    return "free"


def _link(*, encrypted: bool) -> str:
    """A message through a link like the fleet's, over a fresh run directory."""
    with tempfile.TemporaryDirectory(prefix="medha-doctor-") as folder:
        run_dir = RunDir.make(pathlib.Path(folder))
        router, controller = run_dir.write_keys()
        down: Codec[RouterMessage] = Codec(RouterMessage)
        up: Codec[ReplicaMessage] = Codec(ReplicaMessage)
        bind = f"tcp://{HOST}:0" if encrypted else f"ipc://{folder}/x.sock"
        curves = (router, controller) if encrypted else (None, None)
        here = Listener(bind, sends=down, receives=up, curve=curves[0])
        there = Dialer(here.address, b"doctor", sends=up, receives=down, curve=curves[1])
        with closing(here), closing(there):
            there.send(LoadReport(Load()))
            if here.receive(DELIVERY_S) is None:
                raise SetupError("a message did not arrive: look for a firewall on this machine")
            here.send(b"doctor", RouterBeat())
            if there.receive(DELIVERY_S) is None:
                raise SetupError("an answer did not arrive: look for a firewall on this machine")
    return "delivers"


def _resource(file: pathlib.Path) -> str:
    """Check the resources, and describe what each pair of ranks on this machine uses."""
    resources = read_resources(file)
    check_resources(resources, preflight.gpu_count())
    count = len(resources)
    lines = [f"{count} resource{'s' if count > 1 else ''}, checkpoints fit"]
    for resource in resources:
        sentences = local_transports(resource).sentences()
        lines += [f"{resource.name}: {line}" for line in sentences]
    return "\n".join(lines)
