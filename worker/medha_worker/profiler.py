"""Measure a model on a device: the operators of a layer, and whole batches.

    python -m medha_worker.profiler --checkpoint FOLDER --device cpu …     for `medha calibrate`

Weights and cached keys are random, so config.json is enough. The `medha.measurement_plan` runs in
rounds until the time is over, so that a pause of the machine spoils one round only. Results go to
stdout as JSON lines. Batches run as when serving: in the rank's runner, with its graphs. A single
CPU thread is timed by its own clock, which excludes other processes. A GPU batch is launched behind
another, and its time is the one that the runner reports. An operator's time is that of one layer,
from recorded launches on a GPU; products run over all layers' weights in turn, so caches stay cold.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import torch

from medha.batch import Batch, Chunk
from medha.calibration import Entries, Operator
from medha.checkpoints.decoder_config import read_config
from medha.config import WorkerConfig
from medha.errors import SpecError, UserError
from medha.measurement_plan import (
    Begun,
    Bounds,
    Measured,
    MeasurementMessage,
    MeasurementPlan,
    Rounds,
    plan_for,
)
from medha.messages import Sampling, SequenceStart, StageDone, Step, to_bytes
from medha.topology import Coordinate, Topology
from medha_worker import sampler
from medha_worker.attention.backend import attention_for
from medha_worker.attention.kernel_interface import Attention, Span
from medha_worker.device import ComputeDevice, device_of
from medha_worker.engine import RankEngine, arithmetic_for, dtype_of
from medha_worker.graphs import CudaGraphRecorder, GraphRecorder
from medha_worker.inputs import seen
from medha_worker.model.layers import GatedMlp, Linear
from medha_worker.model.rope import Rotary
from medha_worker.parallel.mesh import Mesh, Wiring
from medha_worker.sequences import PageTable

MOST_ROUNDS = 9
GREEDY = Sampling(temperature=0.0)


AT = Coordinate(0, 0, 0)
# Rows of a batch that is launched twice before a timed one: 0.1 s on an H200, since a slow host may
# take 50 ms to launch the timed one.
BEFORE_ROWS = 2048


class TimedBench(Protocol):
    """The interface that `measure` needs."""

    def operator_s(self, operator: Operator) -> float: ...

    def batch_s(self, entries: Entries) -> float: ...


class ModelBench:
    """The model of `checkpoint` alone on its device, with a full pool of `pages`."""

    def __init__(
        self,
        checkpoint: pathlib.Path,
        dtype: str,
        pages: int,
        page_tokens: int,
        device: ComputeDevice,
        *,
        overlap: bool | None = None,
        record: GraphRecorder | None = None,
    ) -> None:
        """`overlap` times batches behind others and `record` replays recorded operators; by default
        both are on for a GPU."""
        self.config, self.device, at = read_config(checkpoint), device, device.at
        config = WorkerConfig(
            replica="calibrate",
            model="calibrate",
            checkpoint=str(checkpoint),
            topology=Topology(),
            max_context_tokens=pages * page_tokens,
            device=at.type,
            dtype=dtype,
            kv_pages=pages,
            page_tokens=page_tokens,
            dummy_weights=True,
            rank_bind="ipc://unused",
        )
        engine = RankEngine(config, AT, device, lambda *_: None)
        self.dtype, self.kv, self.weights = engine.dtype, engine.kv, engine.weights
        self.kv.memory.normal_(generator=torch.Generator(at).manual_seed(0))
        mesh = Mesh(AT, Topology(), incarnation="calibrate", interface="lo", timeout_s=1.0)
        self.runner = engine.runner(Wiring(None, None), mesh, sampler.draw)
        cuda = at.type == "cuda"
        self._overlap = cuda if overlap is None else overlap
        self._record = CudaGraphRecorder() if record is None and cuda else record
        alone = at.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self._steps, self._seqs, self._page = 0, 0, 0
        self.arithmetic = arithmetic_for(self._kernel(1), self.config.norm_eps, device)

    # --- whole batches --------------------------------------------------------------------------

    def batch_s(self, entries: Entries) -> float:
        """Return the seconds of a batch whose last rows are sampled; its sequences end with it."""
        if self._overlap:
            before = ((min(BEFORE_ROWS, self.kv.pages * self.kv.page_tokens), 0, False),)
            steps = [self._step(batch) for batch in (before, before, entries)]
            in_flight = [self.runner.begin(step) for step in steps]
            *_, reports = [self.runner.finish(launched) for launched in in_flight]
            took_s = sum(r.elapsed_s for r in reports if isinstance(r, StageDone))
            chunks = tuple(chunk for step in steps for chunk in step.batch.chunks)
        else:
            step = self._step(entries)
            took_s = self._took(lambda: self.runner.run(step))
            chunks = step.batch.chunks
        self._steps += 1
        gone = Batch(number=self._steps, generation=0, chunks=())
        ends = tuple(chunk.seq for chunk in chunks)
        self.runner.run(Step(step=self._steps, batch=gone, tokens=b"", ends=ends))
        return took_s

    def _step(self, entries: Entries) -> Step:
        chunks, starts, rows = [], [], 0
        self._page = 0
        for length, keys, decode in entries:
            self._seqs += 1
            held = self._pages(keys)
            taken = tuple(self._pages(length))
            chunks.append(
                Chunk(self._seqs, keys, length, (0,), 0, taken, yields=True, decode=decode)
            )
            starts.append(SequenceStart(self._seqs, GREEDY, keys + length, tuple(enumerate(held))))
            rows += length
        self._steps += 1
        tokens = np.arange(rows, dtype=np.int64) * 7919 % self.config.vocab
        batch = Batch(number=self._steps, generation=0, chunks=tuple(chunks))
        return Step(step=self._steps, batch=batch, tokens=to_bytes(tokens), starts=tuple(starts))

    def _pages(self, tokens: int) -> range:
        """Return pages that no other sequence of the batch uses."""
        first, count = self._page, -(-tokens // self.kv.page_tokens)
        self._page += count
        return range(first, first + count)

    # --- operators ------------------------------------------------------------------------------

    @torch.inference_mode()
    def operator_s(self, operator: Operator) -> float:
        """Return the seconds of an operator in one layer, the mean over layers."""
        run = {
            "linear": self._linear,
            "elementwise": self._elementwise,
            "attention": self._attention,
            "decode": self._attention,
        }[operator.kind](operator)
        every = operator.kind == "linear" or self.device.at.type != "cpu"
        layers = self.config.layers if every else min(2, self.config.layers)

        def work() -> torch.Tensor:
            for layer in range(layers):
                run(layer)
            return self.kv.memory[:0]

        return self._took(work if self._record is None else self._record(work)[1]) / layers

    def _took(self, work: Callable[[], object]) -> float:
        """Return the seconds until the device has done `work`."""
        self.device.fetch().wait()
        began = self._clock()
        work()
        self.device.fetch().wait()
        return self._clock() - began

    def _linear(self, operator: Operator) -> Callable[[int], object]:
        c = self.config
        state = c.latent.rank if c.latent else c.head_dim
        widths = (c.hidden, c.heads * state, c.intermediate)
        hidden, attended, inner = (self._random(operator.rows, width) for width in widths)
        turns = self._turns(operator.rows)

        def run(layer: int) -> None:
            own = self.weights.layers[layer]
            product = own.qkv(hidden)
            if own.latent is None:
                own.out.onto(attended, hidden)
            else:
                own.latent.rows(product, turns, self.arithmetic)
                own.out.onto(own.latent.values(attended), hidden)
            if isinstance(own.mlp, GatedMlp):
                own.mlp.gate_up(hidden)
                own.mlp.down.onto(inner, hidden)
            else:  # gathering, gating and adding count as part of the products of experts
                own.mlp(hidden, self.arithmetic)

        return run

    def _elementwise(self, operator: Operator) -> Callable[[int], object]:
        c, rows = self.config, operator.rows
        hidden, both = self._random(rows, c.hidden), self._random(rows, 2 * c.intermediate)
        qkv = self._random(rows, c.heads + c.planes * c.kv_heads, c.head_dim)
        T, places = self.kv.page_tokens, torch.arange(rows, device=self.device.at)
        turns = self._turns(rows)
        slots, given = (places // T, places % T), _Given(both)

        def run(layer: int) -> None:
            own = self.weights.layers[layer]
            for norm in (own.attention_norm, own.mlp_norm):
                self.arithmetic.norm(hidden, norm)
            if c.latent is None:  # otherwise part of the products
                self.arithmetic.rotate(qkv[:, : c.heads + c.kv_heads], c.heads, turns)
            self.kv.write(layer, self.kv.kept(layer, qkv[:, c.heads :]), slots)
            if c.experts_in(layer) is None:
                self.arithmetic.gated(given, both)

        return run

    def _turns(self, rows: int) -> torch.Tensor:
        """Return rotary factors of positions 0, 1, …"""
        c, at = self.config, self.device.at
        rotary = Rotary(c.rope, c.rotated_dim, at, self.arithmetic.turns)
        return rotary.turns(torch.arange(rows, device=at), [(rows, rows)])

    def _attention(self, operator: Operator) -> Callable[[int], object]:
        c, tp = self.config, operator.tp
        heads, kv_heads = c.heads // tp, c.kv_heads // tp
        spans, T = [], self.kv.page_tokens
        self._page = 0
        length, count = (1, operator.rows) if operator.kind == "decode" else (operator.rows, 1)
        for row in range(count):
            pages = np.array(self._pages(operator.keys + length), dtype=np.int64)
            spans.append(Span(row, length, operator.keys, pages, True))
        kernel = self._kernel(tp)
        chunk = Chunk(0, operator.keys, length, (0,), 0)
        plans = {
            window: kernel.plan(
                [seen(s, chunk, PageTable(enumerate(s.pages.tolist())), window, T) for s in spans]
            )
            for window in c.windows_in(range(c.layers))
        }
        q = self._random(operator.rows, heads, c.head_dim)
        own = self._random(c.planes, operator.rows, kv_heads, c.head_dim)
        k, v = own[0], own[-1]
        # A shard's pool: the same number of pages with fewer heads.
        shape = (-1, c.planes, kv_heads, T, c.head_dim)
        pools = [self.kv.pool(n).view(shape)[: self.kv.pages] for n in range(c.layers)]
        return lambda layer: plans[c.window(layer)].run(q, k, v, pools[layer])

    def _kernel(self, tp: int) -> Attention:
        """Return the attention of one of `tp` shards."""
        c = self.config
        return attention_for(
            c.heads // tp,
            c.kv_heads // tp,
            c.head_dim,
            self.kv.page_tokens,
            self.dtype,
            self.dtype,
            self.device.at,
            latent=c.latent,
        )

    def copy_bytes_per_s(self) -> float:
        """Return the rate of a plain copy of the pool's first pages: bytes read and written."""
        source = self.kv.memory.view(-1)[: 1 << (24 if self.device.at.type == "cpu" else 29)]
        target = torch.empty_like(source)
        best_s = min(self._took(lambda: target.copy_(source)) for _ in range(5))
        return 2.0 * source.nbytes / best_s

    def _random(self, *shape: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=dice).to(self.device.at, self.dtype)


class _Given(Linear):
    """A product whose result is precomputed, to time what follows it alone."""

    def __init__(self, product: torch.Tensor) -> None:
        super().__init__(product)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def measure(
    bench: TimedBench,
    plan: MeasurementPlan,
    seconds: float,
    report: Callable[[MeasurementMessage], None],
    *,
    cold: bool = False,
) -> None:
    """Time all items in rounds for about `seconds`.

    The first and last item run once untimed. With `cold`, all items do (kernels are loaded or
    compiled then), and every item is timed at least twice.
    """
    jobs: list[Callable[[], float]] = [
        *(lambda part=part: bench.operator_s(part) for part in plan.operators),
        *(lambda entries=entries: bench.batch_s(entries) for entries in plan.batches),
        *(lambda entries=entries: bench.batch_s(entries) for entries in plan.unseen),
    ]
    for job in jobs if cold else (jobs[0], jobs[-1]):
        job()
    began, rounds, done = time.perf_counter(), MOST_ROUNDS, 0
    while done < rounds:
        for index, job in enumerate(jobs):
            report(Measured(index, job()))
        done += 1
        if done == 1:
            first_s = time.perf_counter() - began
            rounds = max(1 + cold, min(MOST_ROUNDS, int(seconds / first_s)))
            report(Rounds(rounds))


def machine(device: str) -> str:
    """Return the name of the device or CPU model."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _write(report: MeasurementMessage) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("threads", "rows", "keys", "page-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    return parser.parse_args()


def run(given: argparse.Namespace) -> None:
    """Measure and write results. Raises UserError for wrong arguments."""
    device = device_of(given.device)
    torch.set_num_threads(given.threads)
    config, T = read_config(given.checkpoint), given.page_tokens
    if given.keys > config.max_context_tokens:
        raise SpecError(
            "--keys",
            given.keys,
            f"must be at most the {config.max_context_tokens} tokens that the model supports",
            f"use {config.max_context_tokens} or less",
        )
    pages = 2 * (given.keys // T) + -(-given.rows // T) + 64
    dtype_of("--dtype", given.dtype)
    bench = ModelBench(given.checkpoint, given.dtype, pages, T, device)
    item = float(bench.dtype.itemsize)
    shape = config.shape(item, item)
    bounds = Bounds(rows=given.rows, keys=given.keys, page_tokens=T, pool_tokens=pages * T)
    plan = plan_for(shape, bounds)
    _write(
        Begun(
            machine=machine(given.device),
            shape=shape,
            plan=plan,
            copy_bytes_per_s=bench.copy_bytes_per_s(),
        )
    )
    cuda = device.at.type == "cuda"
    measure(bench, plan, given.seconds, _write, cold=cuda)


def main() -> None:
    try:
        run(_arguments())
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
