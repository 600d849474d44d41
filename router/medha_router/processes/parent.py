"""The parent of a router's processes: starts, restarts and stops them, and answers the ops port.

    kernel ── SO_REUSEPORT ──> process 0 … N−1, each a whole router
    parent ── signals, ops pages over Unix sockets ──> processes

Processes share no state: controllers grant the requests of all in one order, and pass on what each
counts of its tenants. A process that exits, or does not answer for HUNG_S, is restarted after a
pause that doubles; the streams of the others go on. The kernel kills all if their parent dies.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import secrets
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from medha.adapters.addresses import family_of, listening
from medha.adapters.keys import write_secret
from medha.adapters.prometheus import OpsServer, Tick, read_token
from medha.cli.local_fleet.child_process import ChildProcess, Launch
from medha.cli.local_fleet.preflight import check_socket_path
from medha.cli.local_fleet.stopping import StopSignals
from medha.cli.local_fleet.supervisor import Supervisor, SupervisorSettings, Unit, UnitState
from medha.config import STALL_S, RouterConfig, render
from medha.errors import SetupError
from medha.restart_policy import RestartPolicy
from medha_router.processes.process_configs import ops_sockets, process_configs
from medha_router.processes.process_pages import ProcessPages

STEP_S = 0.05
POLL_S = 1.0
HUNG_S = 10.0
"""Time without a good answer to /livez, which is bad once the event loop stood still for 10 s."""
START_S = 60.0
GRACE_S = 15.0
"""A process ends its requests when its drain time is over; GRACE_S later it is killed."""
NEVER_GIVEN_UP = 1 << 30


def run_processes(config: RouterConfig) -> None:
    """Run a router of several processes until a signal or a drain request, and until it has
    drained. Raises SetupError or SpecError."""
    folder = _folder(config)
    try:
        with StopSignals() as signals, _reserved(config.host, config.port) as port:
            RouterParent(config, port, folder).run(signals)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class RouterParent:
    """Processes of one router; `folder` takes their configs, sockets and common secret."""

    def __init__(self, config: RouterConfig, port: int, folder: pathlib.Path) -> None:
        salt = folder / "salt.secret"
        write_secret(salt, secrets.token_hex(32).encode())
        configs = process_configs(config, port, str(folder), str(salt))
        self._units = tuple(
            Unit(f"router-{index}", _launches(folder / f"router-{index}.json", process_config))
            for index, process_config in enumerate(configs)
        )
        self._log = logging.getLogger("medha.router")
        self._supervisor = Supervisor(
            self._units,
            (),
            ChildProcess,
            SupervisorSettings(
                restarts=RestartPolicy(
                    first_backoff_s=0.5, longest_backoff_s=30.0, budget=NEVER_GIVEN_UP
                ),
                grace_s=config.drain_timeout_s + GRACE_S,
            ),
        )
        self._pages = ProcessPages(ops_sockets(configs))
        # Threads of its own: pages that clients ask for do not delay it.
        self._answers = _Answers(ProcessPages(ops_sockets(configs)), len(configs))
        self._drains = threading.Event()
        self._excused_s = float("-inf")
        self._tick = Tick()
        token = read_token(config.ops_token) if config.ops_token else b""
        self._ops = OpsServer(
            config.ops_host or config.host,
            config.ops_port,
            self._pages,
            alive=self._tick.alive,
            ready=lambda: not self._drains.is_set() and self._pages.ready,
            routes=self._pages.routes(self._drains.set if token else None),
            token=token,
        )

    def run(self, signals: StopSignals) -> None:
        """Serve until a signal or a drain request, then let running requests finish.

        A second signal ends them, a third kills the processes. A drain request counts as a signal.
        """
        self._answers.start()
        try:
            stepped_s = time.monotonic()
            while not (signals.count or self._drains.is_set()):
                now = time.monotonic()
                if now - stepped_s > STALL_S:  # this process did not run, and maybe none did
                    self._excused_s = now
                stepped_s = now
                self._kill_hung(now)
                self._supervisor.served |= self._answers.complete
                self._step(now)
        finally:
            self._stop(signals)
            self._answers.close()
            self._ops.close()
            self._pages.close()

    def _step(self, now: float) -> None:
        self._supervisor.step(now)
        self._tick()
        time.sleep(STEP_S)

    def _kill_hung(self, now: float) -> None:
        for index, unit in enumerate(self._units):
            answered_s = self._answers.of(index)
            limit_s = HUNG_S if answered_s > unit.started_s else START_S
            silent_s = now - max(answered_s, unit.started_s, self._excused_s)
            if unit.state is UnitState.RUNNING and silent_s > limit_s:
                self._log.error("%s did not answer for %.0f s: killing it", unit.name, silent_s)
                for child in unit.children:
                    child.kill()

    def _stop(self, signals: StopSignals) -> None:
        requested = int(self._drains.is_set())  # counts as a signal
        self._drains.set()
        handled = 1
        self._supervisor.stop(time.monotonic())
        while not self._supervisor.stopped:
            self._step(time.monotonic())  # first: a signal is lost while the same one is pending
            if signals.count + requested > handled:
                handled = signals.count + requested
                for unit in self._units:
                    for child in unit.children:
                        child.terminate()
                if handled > 2:
                    self._supervisor.stop(time.monotonic(), at_once=True)


class _Answers(threading.Thread):
    """Polls the liveness of the processes; `of` is the time of a process's last good answer."""

    def __init__(self, pages: ProcessPages, processes: int) -> None:
        super().__init__(name="liveness", daemon=True)
        self._pages = pages
        self._answered_s = [float("-inf")] * processes
        self._closing = threading.Event()

    def of(self, index: int) -> float:
        return self._answered_s[index]

    @property
    def complete(self) -> bool:
        """True once every process has answered."""
        return min(self._answered_s) > float("-inf")

    def run(self) -> None:
        while not self._closing.wait(POLL_S):
            for index, page in self._pages.get("/livez").items():
                if page is not None:
                    self._answered_s[index] = time.monotonic()

    def close(self) -> None:
        self._closing.set()
        self.join()
        self._pages.close()


def _folder(config: RouterConfig) -> pathlib.Path:
    """Make a folder in the run directory; raises SetupError."""
    parent = pathlib.Path(config.run_dir or tempfile.gettempdir())
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix="medha-router-", dir=parent))
    except OSError as error:
        raise SetupError(
            f"run directory {parent} cannot be used ({error.strerror}): set run_dir to a folder "
            "that this user may write"
        ) from None
    try:
        check_socket_path(f"ipc://{folder}/{config.processes}.sock", f"run directory {parent}")
    except SetupError:
        folder.rmdir()
        raise
    return folder


def _launches(path: pathlib.Path, config: RouterConfig) -> Callable[[int], Iterable[Launch]]:
    """Write the config of a process, and return its launches by generation."""
    path.write_bytes(render(config))
    argv = (sys.executable, "-m", "medha_router", "--config", str(path))
    return lambda _: [Launch(name=path.stem, argv=argv)]


@contextlib.contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Hold a port that the processes can share; raises SetupError if another program has it.

    The socket does not listen, so it takes no connection.
    """
    with socket.socket(family_of(host)) as shared:
        try:
            with listening(host, port, backlog=1) as sole:  # fails where others share it, too
                port = int(sole.getsockname()[1])
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            shared.bind((host, port))
        except OSError as error:
            raise SetupError(
                f"port {host}:{port} cannot be opened ({error.strerror}): free it or choose another"
            ) from None
        yield port
