"""Real rank processes of a replica under manual control: the controller's side of the wire.

The rig takes the controller's place: it serves the store and the ranks' socket, wires groups, forms
generations, sends Steps, drives moves through their phases, and records reports. It makes no
decision: the caller defines each batch (`driver.Driver` keeps the pages). Ranks are forks of a
`ForkServer`.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from tests.support.fork_server import RankStart

from medha.adapters.sockets import Listener
from medha.batch import Batch, Move
from medha.config import WorkerConfig, render
from medha.messages import (
    BatchTokens,
    Codec,
    ControllerBeat,
    Dissolve,
    Fetched,
    FetchPages,
    Forget,
    Form,
    Formed,
    Gap,
    Leave,
    Loading,
    Offered,
    OfferPages,
    Peer,
    RankBeat,
    RankCommand,
    RankFailed,
    RankHello,
    RankReady,
    RankReport,
    SequenceStart,
    StageDone,
    Step,
    TokenOut,
    Withdraw,
    Withdrawn,
)
from medha.topology import Coordinate
from medha_worker.controller.process import coordinate_of
from medha_worker.parallel.mesh import serve_store

T = TypeVar("T")

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


class RigError(Exception):
    """A rank failed or did not answer; the message holds the end of its log."""


class ForkServer:
    """The process that forks ranks, for any number of rigs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server"],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def start(self, order: RankStart) -> int:
        """Start a rank and return its pid."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(order).decode() + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process, and with it every remaining rank."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self._process.wait(timeout=60)


class Rig:
    """Ranks of `config`'s topology, up to kvp_max groups; `start` selects which run.

    `folder` gets config, sockets, logs and recorded logits. `change` injects a fault into ranks
    (see `fork_server.RankStart`).
    """

    def __init__(
        self,
        config: WorkerConfig,
        folder: pathlib.Path,
        fork_server: ForkServer,
        *,
        vocab: int,
        record: bool = True,
        change: str = "",
        patience_s: float = 180.0,
    ) -> None:
        self.topology, self.folder, self.vocab = config.topology, folder, vocab
        self._fork_server, self._record, self._change = fork_server, record, change
        self._patience_s = patience_s
        bind = f"ipc://{folder}/ranks"
        self._path = folder / "worker.json"
        self._path.write_bytes(render(msgspec.structs.replace(config, rank_bind=bind)))
        self._listener: Listener[RankCommand, RankReport] = Listener(
            bind, sends=Codec(RankCommand), receives=Codec(RankReport)
        )
        self._store, self.store = serve_store("127.0.0.1:0")
        self.pids: dict[Coordinate, int] = {}
        self.ready: dict[Coordinate, RankReady] = {}
        self.failed: list[tuple[Coordinate, RankFailed]] = []
        self._gone: set[int] = set()
        self.stages: dict[int, dict[Coordinate, float]] = collections.defaultdict(dict)
        self.tokens: dict[int, dict[int, TokenOut]] = collections.defaultdict(dict)
        self.logits: dict[int, dict[int, npt.NDArray[np.float32]]] = collections.defaultdict(dict)
        self.copied: dict[int, Fetched] = {}
        self.withdrawn: dict[int, bool] = {}
        self.ordered: set[int] = set()
        self.gaps: list[Gap] = []
        self.beats: collections.Counter[Coordinate] = collections.Counter()
        self.incarnations: dict[Coordinate, str] = {}
        self.loads: collections.Counter[Coordinate] = collections.Counter()
        self._formed: dict[int, dict[Coordinate, str]] = collections.defaultdict(dict)
        self._moves: dict[int, tuple[Move, set[Coordinate], set[Coordinate]]] = {}
        self._steps: collections.Counter[int] = collections.Counter()
        self._read_rows: collections.Counter[int] = collections.Counter()
        self._wirings = self._controller = 0
        self._beat_s = 0.0

    # --- life -----------------------------------------------------------------------------------

    def start(self, groups: Iterable[int]) -> None:
        """Start these groups' ranks, wire each group, and introduce all groups to each other."""
        groups = sorted(set(groups))
        self.launch(groups)
        self.wire(groups)

    def launch(self, groups: Iterable[int]) -> None:
        """Start these groups' ranks and wait for their Hello."""
        new = [at for group in groups for at in self.topology.group_ranks(group)]
        for at in new:
            self.pids[at] = self._fork_server.start(self._order(at))
        self.until(lambda: self.incarnations.keys() >= set(new), "hello")

    def wire(self, groups: Iterable[int]) -> None:
        """Wire each of these groups, whose ranks sent Hello, and introduce them to all others."""
        new = [at for group in groups for at in self.topology.group_ranks(group)]
        for at in new:
            self.ready.pop(at, None)
        for group in sorted({at.group for at in new}):
            self._wirings += 1
            self._steps[group] = 0
            form = Form(
                generation=0,
                members=(group,),
                store=f"{self.store}/w{self._wirings}",
                controller=f"rig{self._controller}",
            )
            self.send(self.topology.group_ranks(group), form)
        self.until(lambda: self.ready.keys() >= set(new), "ready")
        for at in self.ready:
            for other in self.ready:
                same = (at.stage, at.shard) == (other.stage, other.shard)
                if same and at.group != other.group and (at in new or other in new):
                    self.send([at], self._peer(other))

    def replace_controller(self) -> None:
        """Take the place of another controller: all ranks rejoin and are wired again."""
        former, self._controller = self.incarnations.copy(), self._controller + 1
        self.send(former, Leave("its controller was replaced", rejoin=True))
        self.until(
            lambda: all(self.incarnations[at] != former[at] for at in former), "another hello"
        )
        for record in (self.stages, self.tokens, self.logits, self._formed):
            record.clear()
        self.wire(sorted({at.group for at in former}))

    def form(self, generation: int, members: tuple[int, ...]) -> None:
        """Form a generation of KVP columns among these groups and wait for it."""
        self.begin_form(generation, members)
        self.until(lambda: self.formed(generation, members), f"generation {generation}")

    def begin_form(self, generation: int, members: tuple[int, ...]) -> None:
        self._gone.difference_update(members)
        order = Form(
            generation=generation,
            members=members,
            store=f"{self.store}/c{self._controller}",
            controller=f"rig{self._controller}",
        )
        self.send([at for group in members for at in self.topology.group_ranks(group)], order)

    def formed(self, generation: int, members: tuple[int, ...]) -> bool:
        """Return True once all ranks report Formed. Raises RigError if one could not form."""
        answers = self._formed[generation]
        for at, error in answers.items():
            if error:
                raise RigError(f"{at} did not join generation {generation}: {error}")
        return len(answers) == len(members) * self.topology.ranks_per_group

    def dissolve(self, generation: int, groups: Iterable[int]) -> None:
        for group in groups:
            self.send(self.topology.group_ranks(group), Dissolve(generation))

    def kill(self, at: Coordinate, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        os.kill(self.pids[at], number)

    def forget(self, group: int) -> None:
        """Remove a lost group: inform the others, and expect nothing from it."""
        self._gone.add(group)
        for at in self.topology.group_ranks(group):
            self.ready.pop(at, None)
        self.send(list(self.ready), Forget(group))

    def close(self) -> None:
        """Order every rank to leave, and kill those that do not."""
        self.send(list(self.pids), Leave("the rig is done"))
        end = time.monotonic() + 3.0
        while time.monotonic() < end and any(map(_alive, self.pids.values())):
            self.pump(0.02)
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._listener.close()

    # --- steps and moves ------------------------------------------------------------------------

    def step(
        self,
        batch: Batch,
        group: int,
        tokens: bytes,
        *,
        starts: tuple[SequenceStart, ...] = (),
        ends: tuple[int, ...] = (),
        switches: tuple[Move, ...] = (),
    ) -> None:
        """Send one group's part of a batch to all its ranks."""
        self._steps[group] += 1
        step = Step(
            step=self._steps[group],
            batch=batch,
            tokens=tokens,
            starts=starts,
            ends=ends,
            switches=switches,
        )
        self.send(self.topology.group_ranks(group), step)

    def done(self, batch: Batch) -> bool:
        """Return True once all stages of all participants have run the batch and its tokens
        arrived."""
        needed = len(batch.groups) * self.topology.spp
        yielding = sum(chunk.yields for chunk in batch.chunks)
        return len(self.stages[batch.number]) == needed and (
            len(self.tokens[batch.number]) == yielding
        )

    def move(self, move: Move) -> None:
        """Start a move; `copied` and `withdrawn` hold the outcome."""
        sources = set(self.topology.group_ranks(move.source))
        targets = set(self.topology.group_ranks(move.target))
        self._moves[move.id] = (move, sources, targets)
        self.send(sources, OfferPages(move))

    def withdraw(self, id: int) -> None:
        self.send(self._moves[id][1], Withdraw(id))

    # --- the wire -------------------------------------------------------------------------------

    def send(self, ranks: Iterable[Coordinate], message: RankCommand) -> None:
        for at in ranks:
            self._listener.send(str(at).encode(), message)

    def until(self, happened: Callable[[], bool], what: str) -> None:
        """Pump until the condition holds. Raises RigError if a rank fails or patience ends."""
        end = time.monotonic() + self._patience_s
        known = len(self.failed)
        while not happened():
            self.pump(0.05)
            if len(self.failed) > known:
                at, failure = self.failed[-1]
                raise RigError(f"{at} failed: {failure.kind}: {failure.message}{self._log(at)}")
            if time.monotonic() > end:
                raise RigError(f"no {what} after {self._patience_s:g} s{self._logs()}")

    def pump(self, timeout_s: float) -> None:
        """Send a beat when due, and process arrived reports."""
        now = time.monotonic()
        if now - self._beat_s > 0.4:
            self._beat_s = now
            self.send(list(self.pids), ControllerBeat())
        taken = self._listener.receive(timeout_s)
        while taken is not None:
            at = coordinate_of(taken[0])
            if at is not None:  # an old link of a rank that dialed again has no name
                self._take(at, taken[1])
            taken = self._listener.receive()

    def _take(self, at: Coordinate, report: RankReport) -> None:
        match report:
            case RankHello():
                self.incarnations[at] = report.incarnation
            case Loading() if report.done_bytes == report.total_bytes:
                self.loads[at] += 1
            case RankReady():
                self.ready[at] = report
            case RankFailed() if at.group in self._gone:
                pass  # what is left of a lost group may notice late
            case RankFailed():
                self.failed.append((at, report))
            case StageDone():
                self.stages[report.number][at] = report.elapsed_s
            case BatchTokens():
                rows = self._rows(at, len(report.tokens))
                for out, row in zip(report.tokens, rows, strict=True):
                    self.tokens[report.number][out.seq] = out
                    self.logits[report.number][out.seq] = row
            case Formed():
                self._formed[report.generation][at] = report.error
            case Offered():
                self._offered(at, report)
            case Fetched():
                self._fetched(at, report)
            case Withdrawn():
                self.withdrawn[report.move] = (
                    self.withdrawn.get(report.move, True) and report.intact
                )
            case Gap():
                self.gaps.append(report)
            case RankBeat():
                self.beats[at] += 1
            case _:
                return

    def _offered(self, at: Coordinate, report: Offered) -> None:
        move, _, _ = self._moves[report.move]
        if report.error:
            self.copied[report.move] = Fetched(report.move, False, error=report.error)
            return
        twin = Coordinate(move.target, at.stage, at.shard)
        self.ordered.add(move.id)
        self.send([twin], FetchPages(move, report.epochs, report.digests))

    def _fetched(self, at: Coordinate, report: Fetched) -> None:
        _, _, targets = self._moves[report.move]
        targets.discard(at)
        if not report.ok or not targets:
            self.copied.setdefault(report.move, report)

    def _rows(self, at: Coordinate, count: int) -> list[npt.NDArray[np.float32]]:
        """Return the logits that this group's last stage recorded for its latest tokens."""
        if not self._record:
            return [np.empty(0, np.float32)] * count
        first = self._read_rows[at.group]
        self._read_rows[at.group] += count
        whole = np.memmap(self._logits_file(at), np.float32, "r").reshape(-1, self.vocab)
        return [np.array(row) for row in whole[first : first + count]]

    def _order(self, at: Coordinate) -> RankStart:
        recorded = self._record and at.stage == self.topology.spp - 1 and at.shard == 0
        return RankStart(
            config=str(self._path),
            group=at.group,
            stage=at.stage,
            shard=at.shard,
            logits=str(self._logits_file(at)) if recorded else "",
            log=str(self.folder / f"{at}.log"),
            change=self._change,
        )

    def _logits_file(self, at: Coordinate) -> pathlib.Path:
        return self.folder / f"{at}.logits"

    def _peer(self, at: Coordinate) -> Peer:
        ready = self.ready[at]
        return Peer(
            group=at.group,
            agent=ready.agent,
            metadata=ready.metadata,
            bases=ready.bases,
            page_bytes=ready.page_bytes,
            pages=ready.pages,
        )

    def _log(self, at: Coordinate) -> str:
        path = self.folder / f"{at}.log"
        text = path.read_text(errors="replace") if path.exists() else ""
        return f"\n{at} wrote:\n{text[-1500:]}"

    def _logs(self) -> str:
        return "".join(map(self._log, self.pids))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
