"""A replica in one process on the wall clock: the real scheduler, and a rank's runner.

For benchmarks that do not measure sockets and processes. It plays a list of wishes and records the
time of each token. A wish may be `filled`: its prompt's keys are whatever the pool holds, nothing
is computed for them, and its first token is made up, so long contexts exist at once. Every other
row is really scheduled, computed and sampled.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from medha.batch import Batch, BatchResult, Chunk, Sampled
from medha.config import AHEAD_S, Scheduling, WorkerConfig
from medha.errors import EngineError
from medha.messages import Sampling, SequenceStart, StageDone, Step, to_bytes
from medha.predictor import Predictor
from medha.profile import Profile
from medha.request import Request, Slo
from medha.scheduling.scheduler import Scheduler
from medha.topology import Coordinate, Topology
from medha_worker import sampler
from medha_worker.device import ComputeDevice
from medha_worker.engine import RankEngine
from medha_worker.parallel.mesh import Mesh, Wiring
from medha_worker.runner import LaunchedBatch

AT = Coordinate(0, 0, 0)
# An idle replica looks for arrivals so often.
_LOOK_S = 0.0005
# Between two looks at a device that is busy.
_GLANCE_S = 20e-6


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A request that arrives `arrival_s` after the start of the play."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    filled: bool = False
    sampling: Sampling = Sampling(temperature=0.0)


@dataclasses.dataclass(slots=True)
class Story:
    """Course of a wish: its arrival and the times of its tokens, on one clock."""

    wish: Wish
    arrived_s: float
    token_s: list[float] = dataclasses.field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.arrived_s

    def gaps_s(self, since: float = float("-inf"), until: float = float("inf")) -> list[float]:
        """Times between two tokens, for second tokens that arrived in the interval."""
        pairs = zip(self.token_s, self.token_s[1:], strict=False)
        return [b - a for a, b in pairs if since <= b <= until]


@dataclasses.dataclass(slots=True)
class _Live:
    story: Story
    drawn: bool = False


@dataclasses.dataclass(slots=True)
class _Running:
    """A batch in flight; `launched` is None if all its chunks are filled ones."""

    batch: Batch
    launched: LaunchedBatch | None
    whole: bool


class Served:
    """A replica of one rank with `pages` pages and random weights of the shape in `folder`."""

    def __init__(
        self,
        folder: pathlib.Path,
        device: ComputeDevice,
        *,
        profile: Profile,
        dtype: str = "bfloat16",
        kv_dtype: str = "auto",
        pages: int,
        page_tokens: int = 64,
        slo: Slo = Slo(),  # noqa: B008
        settings: Scheduling = Scheduling(ahead_s=AHEAD_S),  # noqa: B008
        clock: Callable[[], float] = time.perf_counter,
        deterministic: bool = False,
    ) -> None:
        topology = Topology()
        config = WorkerConfig(
            replica="served",
            model="served",
            checkpoint=str(folder),
            topology=topology,
            max_context_tokens=pages * page_tokens,
            device=device.at.type,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_pages=pages,
            page_tokens=page_tokens,
            dummy_weights=True,
            rank_bind="ipc://unused",
            deterministic=deterministic,
        )
        self.engine = RankEngine(config, AT, device, lambda *_: None)
        mesh = Mesh(AT, topology, incarnation="served", interface="lo", timeout_s=1.0)
        sample = functools.partial(sampler.draw, alone=self.engine.blocked)
        self.runner = self.engine.runner(Wiring(None, None), mesh, sample)
        self.shape = self.engine.model_config.shape(
            float(self.engine.dtype.itemsize), float(self.engine.kv.memory.dtype.itemsize)
        )
        self.predictor = Predictor(profile, self.shape, topology)
        self.scheduler = Scheduler(
            topology,
            self.shape,
            self.predictor,
            settings,
            pages,
            page_tokens,
            config.max_context_tokens,
        )
        self.slo, self.clock = slo, clock
        self.scheduler.group_joined(0, 1, clock())
        self._most = 1 + int(settings.lead_s(topology.spp) > 0.0)
        self._running: collections.deque[_Running] = collections.deque()
        self._live: dict[int, _Live] = {}
        self._known: set[int] = set()
        self._ends: list[int] = []
        self._steps = self._ids = 0

    def play(
        self,
        wishes: Sequence[Wish],
        until: Callable[[Sequence[Story]], bool] = lambda _: False,
    ) -> list[Story]:
        """Serve the wishes and return their stories once all are over.

        If `until` returns True for the stories that have arrived, the rest is aborted.
        """
        began = self.clock()
        coming = collections.deque(sorted(wishes, key=lambda wish: wish.arrival_s))
        stories: list[Story] = []
        while coming or self._live or self._running:
            now = self.clock()
            while coming and coming[0].arrival_s <= now - began:
                stories.append(self._submit(coming.popleft(), began))
            ran = self._turn()
            if ran and until(stories):
                coming.clear()
                self._abort_all()
            if not ran and not coming and self._live:
                raise EngineError(f"nothing runs while {len(self._live)} requests wait")
            if not ran and coming:
                time.sleep(_LOOK_S)
        return stories

    # --- requests -------------------------------------------------------------------------------

    def _submit(self, wish: Wish, began: float) -> Story:
        self._ids += 1
        work_s = self.predictor.prefill_s(wish.prompt_tokens)
        story = Story(wish, began + wish.arrival_s)
        request = Request(
            id=f"r{self._ids}",
            arrival_s=story.arrived_s,
            prompt_tokens=wish.prompt_tokens,
            max_output_tokens=wish.output_tokens,
            tpot_s=self.slo.tpot_s,
            work_s=work_s,
            ttft_deadline_s=self.slo.ttft_deadline_s(work_s),
        )
        seq = self.scheduler.submit(request, self.clock()).seq
        self._live[seq] = _Live(story)
        return story

    def _abort_all(self) -> None:
        """Abort all requests; the scheduler's last pass frees their pages."""
        for number in range(1, self._ids + 1):
            self.scheduler.abort(f"r{number}", self.clock())
        self._live.clear()

    # --- batches --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """Launch a batch if possible and complete one that is done; False when nothing runs."""
        launched = len(self._running) < self._most and self._launch()
        if not self._running:
            return False
        oldest = self._running[0].launched
        if len(self._running) == self._most or oldest is None or oldest.ready:
            self._finish()
        elif not launched:
            time.sleep(_GLANCE_S)
        return True

    def _launch(self) -> bool:
        batch = self.scheduler.next_batch(self.clock(), frozenset({0}))
        if batch is None:
            return False
        self._ends.extend(self._known.intersection(batch.ended))
        chunks = tuple(chunk for chunk in batch.chunks if not self._filled(chunk))
        step = self._step(batch, chunks) if chunks else None
        if step is not None and self.runner.needs_host_tokens(step):
            while self._running:
                self._finish()
        launched = None if step is None else self.runner.begin(step)
        self._running.append(_Running(batch, launched, len(chunks) == len(batch.chunks)))
        for chunk in batch.chunks:
            if chunk.yields:
                self._live[chunk.seq].drawn = not self._filled(chunk)
        return True

    def _finish(self) -> None:
        """Wait for the oldest batch and complete it."""
        running = self._running.popleft()
        elapsed_s = None
        if running.launched is not None:
            reports = self.runner.finish(running.launched)
            elapsed_s = next((r.elapsed_s for r in reports if isinstance(r, StageDone)), None)
        now, batch = self.clock(), running.batch
        self.scheduler.stage_done(batch.number, 0, now)
        sampled = tuple(self._sampled(chunk, now) for chunk in batch.chunks if chunk.yields)
        result = BatchResult(sampled, elapsed_s if running.whole else None)
        for done in self.scheduler.complete(batch.number, result, now):
            self._live.pop(done.seq, None)

    def _filled(self, chunk: Chunk) -> bool:
        live = self._live.get(chunk.seq)
        return live is not None and live.story.wish.filled and not chunk.decode

    def _sampled(self, chunk: Chunk, now: float) -> Sampled:
        if chunk.seq in self._live:
            self._live[chunk.seq].story.token_s.append(now)
        return Sampled(chunk.seq, False)

    def _step(self, batch: Batch, chunks: tuple[Chunk, ...]) -> Step:
        self._known.difference_update(self._ends)
        new = [chunk.seq for chunk in chunks if chunk.seq not in self._known]
        starts = tuple(map(self._introduction, new))
        self._known.update(new)
        self._steps += 1
        ends, self._ends = tuple(self._ends), []
        return Step(
            step=self._steps,
            batch=msgspec.structs.replace(batch, chunks=chunks),
            tokens=b"".join(map(self._rows, chunks)),
            starts=starts,
            ends=ends,
        )

    def _rows(self, chunk: Chunk) -> bytes:
        """Return a prompt's tokens; for a decode the one that the rank drew, or a made-up one."""
        if chunk.decode and self._live[chunk.seq].drawn:
            return to_bytes(np.array([-1]))
        positions = np.arange(chunk.start, chunk.end, dtype=np.int64)
        return to_bytes((positions * 7919 + chunk.seq) % self.shape.vocab)

    def _introduction(self, seq: int) -> SequenceStart:
        cached = dict(self.scheduler.layout(seq)).get(0, ())
        wish = self._live[seq].story.wish
        return SequenceStart(
            seq,
            wish.sampling,
            wish.prompt_tokens,
            cached,
            rope_tokens=wish.prompt_tokens + wish.output_tokens,
        )
