"""Stream pipeline parallelism: hidden states handed from stage to stage, point to point.

    stage i   … compute n, send n, compute n+1 …        sends are asynchronous: nobody waits for
    stage i+1      receive n, compute n, …              the stage behind to take them

A hand-off is [rows + 1, hidden]: the batch's rows and a note row, which says whose they are and
whether the shared rows are broken (their KVP column failed on the way, see `kvp`): those must not
be sampled. The note is read by the host, so a GPU's rank reads it when it must: before shared rows
are computed, else when the batch is over. Buffers live until they have left; at most `depth` are
under way, so a stage that falls behind slows the one before it down. Which batch runs when is the
runner's order, not decided here.
(Medha, stream pipeline parallelism: chunk i+1 enters stage 0 once chunk i has left it.)
"""

from __future__ import annotations

import collections

import numpy as np
import torch

from medha.errors import EngineError
from medha_worker.device import CPU, Arriving, Device
from medha_worker.parallel.communicator import Communicator, Pending

# What the note row can hold exactly in every float format down to bfloat16.
_NUMBERS = 128


class Note:
    """What the stage before says of the rows that it sent."""

    def __init__(self, number: int, stage: int, arriving: Arriving) -> None:
        self._number, self._stage, self._arriving = number, stage, arriving

    @property
    def ready(self) -> bool:
        """Whether `broken` returns at once."""
        return self._arriving.ready

    def broken(self, timeout_s: float | None = None) -> bool:
        """Whether the batch's shared rows are broken; waits for the device.

        Raises EngineError when the rows are those of another batch, PeerLost when none come.
        """
        (told,) = self._arriving.wait(timeout_s)
        broken, said = told.tolist()
        if said != self._number % _NUMBERS:
            raise EngineError(
                f"stage {self._stage} sent batch {said:g} (mod {_NUMBERS}) where {self._number} was"
                " due: the group's stages lost step; restart the group"
            )
        return bool(broken)


class Pipeline:
    """One rank's ends of the pipe: it receives from stage − 1 and sends to stage + 1.

    `communicator` joins the stages of one shard, in stage order; None when there is one stage.
    """

    def __init__(
        self, communicator: Communicator | None, hidden: int, dtype: torch.dtype, depth: int,
        device: Device = CPU,
    ) -> None:  # fmt: skip
        self._communicator, self._hidden, self._dtype = communicator, hidden, dtype
        self._depth, self._device = depth, device
        self.stage = communicator.rank if communicator else 0
        self.stages = communicator.size if communicator else 1
        self._sent: collections.deque[tuple[Pending, torch.Tensor]] = collections.deque()
        self._expected: collections.OrderedDict[int, tuple[Pending, torch.Tensor]]
        self._expected = collections.OrderedDict()

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    def expect(self, number: int, rows: int) -> None:
        """Let batch `number` ([rows, hidden]) arrive while others are computed; in run order."""
        if self._communicator is None or self.first or number in self._expected:
            return
        into = torch.empty(rows + 1, self._hidden, dtype=self._dtype, device=self._device.at)
        pending = self._communicator.receive(into, self.stage - 1)
        self._expected[number] = (pending, into)

    def receive(self, number: int, rows: int) -> tuple[torch.Tensor, Note]:
        """Hidden states [rows, hidden] of batch `number`, and the note that came with them.

        Raises PeerLost when the stage before is gone.
        """
        self.expect(number, rows)
        first = next(iter(self._expected))
        if first != number:
            raise EngineError(f"batch {number} runs while batch {first} is next in the pipe")
        pending, into = self._expected.pop(number)
        pending.wait()
        return into[:rows], Note(number, self.stage - 1, self._device.fetch(into[rows, :2]))

    def send(self, number: int, hidden: torch.Tensor, broken: bool) -> None:
        """Hand `hidden` [rows, hidden] to the next stage; returns before it has arrived."""
        if self._communicator is None or self.last:
            return
        while len(self._sent) >= self._depth:
            self._sent.popleft()[0].wait()
        out = hidden.new_empty(len(hidden) + 1, self._hidden, dtype=self._dtype)
        out[:-1] = hidden
        note = np.zeros(self._hidden, dtype=np.float32)
        note[:2] = float(broken), float(number % _NUMBERS)
        out[-1] = self._device.upload(note)[0]
        self._sent.append((self._communicator.send(out, self.stage + 1), out))

    def drain(self) -> None:
        """Wait until everything sent has left; raises PeerLost."""
        while self._sent:
            self._sent.popleft()[0].wait()
