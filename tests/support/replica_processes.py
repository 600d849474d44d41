"""A replica of real processes for tests: controller, ranks, and a router's socket.

`ReplicaProcesses` starts what the controller wants in /status, as `medha up` does. As the router,
it answers Hello, sends beats and requests, and collects the replies to each request.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
import urllib.request

import msgspec

from medha import messages as m
from medha.adapters.sockets import Listener
from medha.config import Curve, WorkerConfig, render
from medha.topology import Coordinate

LIMIT_S = 180.0


class Replies:
    """Replies to a request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: m.Finished | None = None
        self.failed: m.Failed | None = None


class ReplicaProcesses:
    """Processes of a replica; `config` lacks routers, and rank_bind unless set."""

    def __init__(
        self, folder: pathlib.Path, config: WorkerConfig, router_curve: Curve | None = None
    ) -> None:
        self.folder = folder
        self.link: Listener[m.RouterMessage, m.ReplicaMessage] = Listener(
            "tcp://127.0.0.1:0",
            sends=m.Codec(m.RouterMessage),
            receives=m.Codec(m.ReplicaMessage),
            curve=router_curve,
        )
        self.config = msgspec.structs.replace(
            config,
            routers=(self.link.address,),
            router_timeout_s=LIMIT_S,  # the test that plays the router may be slow
            rank_bind=config.rank_bind or f"ipc://{folder}/ranks",
        )
        self._file = folder / "worker.json"
        self._file.write_bytes(render(self.config))
        self._log = (folder / "log").open("wb")
        self.peer = b""
        self.hello: m.Hello | None = None
        self.load: m.LoadReport | None = None
        self.replies: dict[str, Replies] = {}
        self._left: set[str] = set()
        self.ranks: dict[Coordinate, subprocess.Popen[bytes]] = {}
        self.controller = self._start("medha_worker.controller")
        for group in range(config.topology.kvp_min):
            self.start_group(group)

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(self._file), *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=self._log,
        )

    def start_group(self, group: int) -> None:
        """Start the group's ranks that are not running."""
        for at in self.config.topology.group_ranks(group):
            if at not in self.ranks or self.ranks[at].poll() is not None:
                places = [f"--group={at.group}", f"--stage={at.stage}", f"--shard={at.shard}"]
                self.ranks[at] = self._start("medha_worker.rank", *places)

    def close(self) -> None:
        for process in (self.controller, *self.ranks.values()):
            process.kill()
            process.wait(60)
        self.link.close()
        self._log.close()

    @property
    def text(self) -> str:
        """Log of all processes."""
        self._log.flush()
        return (self.folder / "log").read_text()

    def ask(self, path: str, method: str = "GET") -> bytes:
        """Query the controller's ops port."""
        port = next(
            msgspec.json.decode(line)["ops_port"]
            for line in self.text.splitlines()
            if "ops_port" in line
        )
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=60) as reply:
            return bytes(reply.read())

    def status(self) -> m.ReplicaStatus:
        return msgspec.json.decode(self.ask("/status"), type=m.ReplicaStatus)

    def supervise(self) -> m.ReplicaStatus:
        """Start the groups that the controller wants or wants restarted."""
        status = self.status()
        for group in {*range(status.wanted_groups), *status.restart_groups}:
            self.start_group(group)
        return status

    # --- the router ---------------------------------------------------------------------------

    def turn(self, wait_s: float = 0.2) -> None:
        """Send a beat, then process messages that arrive within `wait_s`."""
        if self.controller.poll() is not None:
            raise AssertionError(f"the controller ended:\n{self.text}")
        if self.peer:
            self.link.send(self.peer, m.RouterBeat())
        taken = self.link.receive(wait_s)
        while taken is not None:
            self.peer, message = taken
            self._receive(message)
            taken = self.link.receive()

    def _receive(self, message: m.ReplicaMessage) -> None:
        match message:
            case m.Hello():
                self.hello = message
                self.link.send(self.peer, m.Welcome("router-1"))
            case m.LoadReport():
                self.load = message
            case m.Tokens() | m.Finished() | m.Failed() if message.id in self._left:
                return
            case m.Tokens():
                replies = self.replies[message.id]
                assert message.first == len(replies.tokens), "a token is missing or repeated"
                replies.tokens += message.tokens
            case m.Finished():
                self.replies[message.id].finished = message
            case m.Failed():
                self.replies[message.id].failed = message

    def until_ready(self) -> m.Hello:
        """Wait for Hello and the first report of load."""
        ends_s = time.monotonic() + LIMIT_S
        while self.hello is None or self.load is None:
            self.turn()
            assert time.monotonic() < ends_s, f"no Hello arrived:\n{self.text}"
        return self.hello

    def submit(
        self,
        id: str,
        prompt: list[int],
        output_tokens: int,
        sampling: m.Sampling = m.Sampling(temperature=0.0),  # noqa: B008
    ) -> Replies:
        """Submit a request, greedy by default."""
        self.replies[id] = Replies()
        request = m.Submit(
            id=id,
            tokens=m.to_bytes(prompt),
            max_output_tokens=output_tokens,
            sampling=sampling,
        )
        self.link.send(self.peer, request)
        return self.replies[id]

    def abort(self, id: str) -> None:
        """Abort a request and ignore its later replies."""
        self.link.send(self.peer, m.Abort(id))
        del self.replies[id]
        self._left.add(id)

    def until_over(self, supervised: bool = True) -> None:
        """Wait for the end of every request."""
        ends_s = time.monotonic() + LIMIT_S
        polled_s = 0.0
        while any(not (r.finished or r.failed) for r in self.replies.values()):
            self.turn(0.05)
            if supervised and time.monotonic() - polled_s > 0.5:
                polled_s = time.monotonic()
                self.supervise()
            assert polled_s < ends_s, f"requests hang:\n{self.text}"
