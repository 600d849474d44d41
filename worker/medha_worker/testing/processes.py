"""A replica of real processes under a test's hand: controller, ranks, and a router's socket.

`Fleet` starts what the controller's /status asks for, as `medha up` does, and plays the router:
answers Hello, beats, submits, and collects what each request was told.
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


class Heard:
    """What a request was told."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.finished: m.Finished | None = None
        self.failed: m.Failed | None = None


class Fleet:
    """One replica's processes; `config` lacks only routers and, unless it names one, rank_bind."""

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
            rank_bind=config.rank_bind or f"ipc://{folder}/ranks",
        )
        self._file = folder / "worker.json"
        self._file.write_bytes(render(self.config))
        self._log = (folder / "log").open("wb")
        self.peer = b""
        self.hello: m.Hello | None = None
        self.load: m.LoadReport | None = None
        self.heard: dict[str, Heard] = {}
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
        """Start the group's ranks that do not run."""
        for at in self.config.topology.group_ranks(group):
            if at not in self.ranks or self.ranks[at].poll() is not None:
                places = [f"--group={at.group}", f"--stage={at.stage}", f"--shard={at.shard}"]
                self.ranks[at] = self._start("medha_worker.rank", *places)

    def close(self) -> None:
        for process in (self.controller, *self.ranks.values()):
            process.kill()
            process.wait(10)
        self.link.close()
        self._log.close()

    @property
    def text(self) -> str:
        """Everything the processes logged."""
        self._log.flush()
        return (self.folder / "log").read_text()

    def ask(self, path: str, method: str = "GET") -> bytes:
        """Talk to the controller's ops port."""
        port = next(
            msgspec.json.decode(line)["ops_port"]
            for line in self.text.splitlines()
            if "ops_port" in line
        )
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=10) as reply:
            return bytes(reply.read())

    def status(self) -> m.ReplicaStatus:
        return msgspec.json.decode(self.ask("/status"), type=m.ReplicaStatus)

    def supervise(self) -> m.ReplicaStatus:
        """Start the groups that the controller wants, and those that it wants anew."""
        status = self.status()
        for group in {*range(status.wanted_groups), *status.restart_groups}:
            self.start_group(group)
        return status

    # --- the router ---------------------------------------------------------------------------

    def turn(self, wait_s: float = 0.2) -> None:
        """Beat once, then take in what comes within `wait_s`."""
        if self.controller.poll() is not None:
            raise AssertionError(f"the controller ended:\n{self.text}")
        if self.peer:
            self.link.send(self.peer, m.RouterBeat())
        taken = self.link.receive(wait_s)
        while taken is not None:
            self.peer, message = taken
            self._hear(message)
            taken = self.link.receive()

    def _hear(self, message: m.ReplicaMessage) -> None:
        match message:
            case m.Hello():
                self.hello = message
                self.link.send(self.peer, m.Welcome("router-1"))
            case m.LoadReport():
                self.load = message
            case m.Tokens() | m.Finished() | m.Failed() if message.id in self._left:
                return
            case m.Tokens():
                heard = self.heard[message.id]
                assert message.first == len(heard.tokens), "a token is missing or came twice"
                heard.tokens += message.tokens
            case m.Finished():
                self.heard[message.id].finished = message
            case m.Failed():
                self.heard[message.id].failed = message

    def until_ready(self) -> m.Hello:
        """Wait for Hello and the first report of load."""
        ends_s = time.monotonic() + LIMIT_S
        while self.hello is None or self.load is None:
            self.turn()
            assert time.monotonic() < ends_s, f"no Hello came:\n{self.text}"
        return self.hello

    def submit(
        self,
        id: str,
        prompt: list[int],
        output_tokens: int,
        sampling: m.Sampling = m.Sampling(temperature=0.0),  # noqa: B008
    ) -> Heard:
        """Ask for an answer, a greedy one unless told otherwise."""
        self.heard[id] = Heard()
        request = m.Submit(
            id=id,
            tokens=m.to_bytes(prompt),
            max_output_tokens=output_tokens,
            sampling=sampling,
        )
        self.link.send(self.peer, request)
        return self.heard[id]

    def abort(self, id: str) -> None:
        """The client leaves, and hears no more."""
        self.link.send(self.peer, m.Abort(id))
        del self.heard[id]
        self._left.add(id)

    def until_over(self, supervised: bool = True) -> None:
        """Wait for the end of every request."""
        ends_s = time.monotonic() + LIMIT_S
        looked_s = 0.0
        while any(not (one.finished or one.failed) for one in self.heard.values()):
            self.turn(0.05)
            if supervised and time.monotonic() - looked_s > 0.5:
                looked_s = time.monotonic()
                self.supervise()
            assert looked_s < ends_s, f"requests hang:\n{self.text}"
