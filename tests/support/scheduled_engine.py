"""The real scheduler and a whole engine in one process, in virtual time.

The scheduler's batches run in a `SoloEngine` in the order in which they are decided. Pages that no
sequence holds and no prompt can find are filled with NaN, so that a row which reads one is seen.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from tests.support.solo_engine import GREEDY, SoloEngine

from medha import testing
from medha.batch import Batch, BatchResult, Chunk, Sampled
from medha.config import Scheduling
from medha.fleet.prefix_index import chain
from medha.messages import SequenceStart, Step, to_bytes
from medha.predictor import Predictor
from medha.request import Request
from medha.scheduling.scheduler import Scheduler
from medha.topology import Topology
from medha_worker.parallel.collectives import SoloColumn

Tokens = npt.NDArray[np.int32]
STEP_S = 0.01


@dataclasses.dataclass(slots=True)
class Answer:
    """A prompt with its output so far, and the logits [vocab] of each token of the output.

    `cached_tokens` were found when it arrived; it is `gone` once its client left.
    """

    tokens: list[int]
    prompt_tokens: int
    logits: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    cached_tokens: int = 0
    done: bool = False
    gone: bool = False


class ScheduledEngine:
    """A replica of one rank. A batch holds up to `chunk` tokens of a prompt.

    `most_held`: the most pages that one sequence held; `caught_up`: chunks that follow tokens which
    another sequence has computed since the last one.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        pages: int,
        page_tokens: int = 16,
        chunk: int = 128,
        settings: Scheduling = Scheduling(),  # noqa: B008
    ) -> None:
        self.engine = SoloEngine(folder, pages=pages, page_tokens=page_tokens)
        shape = self.engine.config.shape(4.0, 4.0)
        settings = msgspec.structs.replace(
            settings,
            budget="tokens",
            batch_tokens=chunk + 64,
            long_prefill_threshold_tokens=chunk,
            chunk_step_tokens=1,
        )
        times = Predictor(testing.profile(), shape, Topology())
        self.scheduler = Scheduler(
            Topology(), shape, times, settings, pages, page_tokens, shape.max_context_tokens
        )
        self.scheduler.group_joined(0, 1, 0.0)
        self.most_held, self.caught_up, self.now = 0, 0, 0.0
        self._in_flight_max = 1 + int(settings.ahead_s > 0.0)
        self._answers: dict[int, Answer] = {}
        self._known: set[int] = set()
        self._ends: dict[int, int] = {}
        self._steps = 0

    def submit(self, name: str, prompt: Tokens, outputs: int) -> Answer:
        """Submit a request that takes `outputs` tokens, greedily."""
        answer = Answer(prompt.tolist(), len(prompt))
        request = Request(
            id=name,
            arrival_s=self.now,
            prompt_tokens=len(prompt),
            max_output_tokens=outputs,
            ttft_deadline_s=60.0,
            tpot_s=1.0,
        )
        names = tuple(chain(prompt, self.engine.kv.page_tokens, b"salt"))
        admitted = self.scheduler.submit(request, self.now, names)
        self._answers[admitted.seq], answer.cached_tokens = answer, admitted.cached_tokens
        return answer

    def run(self, steps: int = 1_000_000) -> None:
        """Run batches until none is left, or that many."""
        in_flight: collections.deque[Batch] = collections.deque()
        while steps > 0 or in_flight:
            batch = None
            if steps > 0 and len(in_flight) < self._in_flight_max:
                batch = self.scheduler.next_batch(self.now, frozenset({0}))
            if batch is not None:
                self._compute(batch)
                in_flight.append(batch)
                steps -= 1
            if batch is None or len(in_flight) == self._in_flight_max:
                if not in_flight:
                    return
                self._complete(in_flight.popleft())

    def _complete(self, batch: Batch) -> None:
        self.now += STEP_S
        self.scheduler.stage_done(batch.number, 0, self.now)
        sampled = tuple(Sampled(chunk.seq, False) for chunk in batch.chunks if chunk.yields)
        for done in self.scheduler.complete(batch.number, BatchResult(sampled), self.now):
            self._answers[done.seq].done = True
        self._spoil()

    def _spoil(self) -> None:
        """Fill unused pages with NaN, and check that all others have an owner."""
        state = self.scheduler._state
        for sequence in state.sequences.values():
            held = sum(page >= 0 for page in sequence.page_of)
            self.most_held = max(self.most_held, held)
        pool = state.pool[0]
        pool.check()
        free = torch.tensor(pool._free[: pool._free_count].tolist(), dtype=torch.int64)
        self.engine.kv.memory.index_fill_(1, free, float("nan"))

    @torch.inference_mode()
    def _compute(self, batch: Batch) -> None:
        engine, chunks = self.engine, batch.chunks
        ends = tuple(self._known.intersection(batch.ended))
        self._known.difference_update(ends)
        new = [chunk.seq for chunk in chunks if chunk.seq not in self._known]
        self._known.update(new)
        self._steps += 1
        self.caught_up += sum(c.start > self._ends.get(c.seq, c.start) for c in chunks)
        self._ends.update((chunk.seq, chunk.end) for chunk in chunks)
        step = Step(
            step=self._steps,
            batch=batch,
            tokens=b"".join(self._rows(chunk) for chunk in chunks),
            starts=tuple(self._introduction(seq) for seq in new),
            ends=ends,
        )
        inputs = engine.inputs.build(step)
        hidden = engine.model.forward(inputs.tokens, inputs, engine.kv, SoloColumn())
        yielding = [chunk for chunk in chunks if chunk.yields]
        if not yielding:
            return
        logits = engine.model.logits(hidden[inputs.yield_rows])
        for chunk, row in zip(yielding, logits, strict=True):
            answer = self._answers[chunk.seq]
            answer.logits[chunk.end] = row
            del answer.tokens[chunk.end :]
            answer.tokens.append(int(row.argmax()))

    def _rows(self, chunk: Chunk) -> bytes:
        tokens: Sequence[int] = self._answers[chunk.seq].tokens[chunk.start : chunk.end]
        assert len(tokens) == chunk.length
        return to_bytes(np.array(tokens))

    def _introduction(self, seq: int) -> SequenceStart:
        answer = self._answers[seq]
        cached = dict(self.scheduler.layout(seq)).get(0, ())
        return SequenceStart(
            seq, GREEDY, answer.prompt_tokens, cached, rope_tokens=len(answer.tokens)
        )
