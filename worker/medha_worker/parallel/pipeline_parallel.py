"""Stream pipeline parallelism: hidden states sent from stage to stage, point to point.

    stage i   … compute n, send n, compute n+1 …        sends are asynchronous: a stage does not
    stage i+1      receive n, compute n, …              wait for the next one to receive

A message is [rows + 1, hidden]: the batch's rows and a note row with the batch number and whether
its shared rows are broken (see `kvp`); broken rows must not be sampled. Only the host needs the
note, so a GPU rank reads it late: before shared rows are computed, else when the batch is done.
Buffers live until they are sent; at most `depth` are in flight, so a slow stage slows the previous
one down. The runner decides the order of batches. (Medha, stream pipeline parallelism: chunk i+1
enters stage 0 once chunk i has left it.)
"""

from __future__ import annotations

import collections

import numpy as np
import torch

from medha.errors import EngineError
from medha_worker.device import CPU, ComputeDevice, PendingFetch
from medha_worker.parallel.communicator import Communicator, Pending

# Batch numbers modulo this are exact in every float format down to bfloat16.
_NUMBERS = 128


class Note:
    """The note row that the stage before sent with a batch."""

    def __init__(self, number: int, stage: int, pending: PendingFetch) -> None:
        self._number, self._stage, self._pending = number, stage, pending

    @property
    def ready(self) -> bool:
        """True if `broken` would return at once."""
        return self._pending.ready

    def broken(self, timeout_s: float | None = None) -> bool:
        """Return True if the batch's shared rows are broken; waits for the device.

        Raises EngineError if the rows belong to another batch, PeerLost if none arrive.
        """
        (note,) = self._pending.wait(timeout_s)
        broken, number = note.tolist()
        if number != self._number % _NUMBERS:
            raise EngineError(
                f"stage {self._stage} sent batch {number:g} (mod {_NUMBERS}), expected"
                f" {self._number}: the group's stages are out of step; restart the group"
            )
        return bool(broken)


class Pipeline:
    """The receiving and sending end of a rank: from stage − 1, to stage + 1.

    `communicator` joins the stages of one shard, in stage order; None with a single stage.
    """

    def __init__(
        self,
        communicator: Communicator | None,
        hidden: int,
        dtype: torch.dtype,
        depth: int,
        device: ComputeDevice = CPU,
    ) -> None:
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
        """Post the receive for batch `number` ([rows, hidden]); call in run order."""
        if self._communicator is None or self.first or number in self._expected:
            return
        into = torch.empty(rows + 1, self._hidden, dtype=self._dtype, device=self._device.at)
        pending = self._communicator.receive(into, self.stage - 1)
        self._expected[number] = (pending, into)

    def receive(self, number: int, rows: int) -> tuple[torch.Tensor, Note]:
        """Return hidden states [rows, hidden] of batch `number` and their note.

        Raises PeerLost if the stage before is gone.
        """
        self.expect(number, rows)
        first = next(iter(self._expected))
        if first != number:
            raise EngineError(f"batch {number} runs while batch {first} is next in the pipe")
        pending, into = self._expected.pop(number)
        pending.wait()
        return into[:rows], Note(number, self.stage - 1, self._device.fetch(into[rows, :2]))

    def send(self, number: int, hidden: torch.Tensor, broken: bool) -> None:
        """Send `hidden` [rows, hidden] to the next stage, without waiting for its arrival."""
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
        """Wait until all sends are complete. Raises PeerLost."""
        while self._sent:
            self._sent.popleft()[0].wait()
