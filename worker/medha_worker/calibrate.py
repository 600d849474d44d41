"""Measures one rank of a model on its device: operators of a layer, and whole batches.

    python -m medha_worker.calibrate --checkpoint FOLDER --device cpu …     for `medha calibrate`

Weights and cached keys are drawn at random, so config.json is enough. What is measured is
`medha.measuring`'s plan, round after round until the time is over (so that a pause of the machine
spoils one round and no size), told as JSON lines on stdout. A batch's time is that of the real
path: inputs built, model run, tokens sampled. One thread is timed by its own clock, which stands
still while others have the core: as on an idle machine; a GPU until it is done. An operator's is
that of one layer; products run over the weights of all layers in turn, as a batch does, so that no
cache holds them.
"""

from __future__ import annotations

import argparse
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from torch.nn import functional

from medha.batch import Batch, Chunk
from medha.calibration import Entries, Operator
from medha.errors import SpecError, UserError
from medha.measuring import Begun, Bounds, Chunks, Measured, Plan, Rounds, Told, plan_for
from medha.messages import Sampling, SequenceStart, Step, to_bytes
from medha.profile import ChunkKernel
from medha_worker import sampler, weights
from medha_worker.attention.choice import attention_for
from medha_worker.attention.interface import Attention, Span
from medha_worker.attention.splits import Choice
from medha_worker.calibrate_chunks import chunk_kernels
from medha_worker.device import Device, device_of
from medha_worker.engine import arithmetic_for, dtype_of
from medha_worker.inputs import InputBuilder, seen
from medha_worker.kv.pages import KvPages
from medha_worker.model.config import read_config
from medha_worker.model.decoder import Decoder
from medha_worker.model.dummy import DummyCheckpoint
from medha_worker.model.rope import Rotary
from medha_worker.parallel.interface import SoloColumn, SoloTensorParallel
from medha_worker.seats import Seats
from medha_worker.sequences import PageTable, Sequences

MOST_ROUNDS = 9
GREEDY = Sampling(temperature=0.0)


class Bench:
    """The model of `checkpoint` alone on its device, with a pool of `pages` that is full."""

    def __init__(
        self, checkpoint: pathlib.Path, dtype: torch.dtype, pages: int, page_tokens: int,
        device: Device,
    ) -> None:  # fmt: skip
        self.config = config = read_config(checkpoint)
        layers = range(config.layers)
        self.device, at = device, device.at
        source = DummyCheckpoint(checkpoint, at)
        self.weights = weights.load(source, config, layers, 0, 1, dtype, device=at)
        self.kv = KvPages(layers, pages, config.kv_heads, page_tokens, config.head_dim, dtype, at)
        self.kv.memory.normal_(generator=torch.Generator(at).manual_seed(0))
        alone = at.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.thread_time if alone else time.perf_counter
        self.dtype, self._steps, self._seqs, self._page = dtype, 0, 0, 0
        attention = attention_for(
            config.heads, config.kv_heads, config.head_dim, page_tokens, dtype, dtype, at
        )
        arithmetic = arithmetic_for(attention, config.norm_eps, device)
        self.model = Decoder(config, layers, SoloTensorParallel(), self.weights, arithmetic)
        rotary = Rotary(config.rope, config.head_dim, at, arithmetic.turns)
        self._inputs = InputBuilder(
            Sequences(0, Seats(device)), attention, rotary, self.kv, config.vocab, embeds=True,
            windows=config.windows_in(layers), device=device,
        )  # fmt: skip

    # --- whole batches --------------------------------------------------------------------------

    def batch_s(self, entries: Entries) -> float:
        """Seconds of one batch, whose last rows are sampled; its sequences end with it."""
        step = self._step(entries)

        def run() -> None:
            inputs = self._inputs.build(step)
            hidden = self.model.forward(inputs.tokens, inputs, self.kv, SoloColumn())
            logits = self.model.logits(hidden[inputs.yield_rows])
            draws = [state.draw(at) for _, state, at in inputs.yielding]
            sampler.sample(logits, draws, self.device)

        took_s = self._took(run)
        ends = tuple(chunk.seq for chunk in step.batch.chunks)
        self._steps += 1
        gone = Batch(number=self._steps, generation=0, chunks=())
        self._inputs.sequences.apply(Step(step=self._steps, batch=gone, tokens=b"", ends=ends))
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
        """Pages that no other sequence of the batch has."""
        first, count = self._page, -(-tokens // self.kv.page_tokens)
        self._page += count
        return range(first, first + count)

    # --- operators ------------------------------------------------------------------------------

    @torch.inference_mode()
    def operator_s(self, operator: Operator) -> float:
        """Seconds of one layer's part, the mean over layers."""
        run = {
            "linear": self._linear,
            "elementwise": self._elementwise,
            "attention": self._attention,
            "decode": self._attention,
        }[operator.kind](operator)
        every = operator.kind == "linear" or self.device.at.type != "cpu"
        layers = self.config.layers if every else min(2, self.config.layers)
        return self._took(lambda: [run(layer) for layer in range(layers)]) / layers

    def _took(self, work: Callable[[], object]) -> float:
        """Seconds until the device has done `work`."""
        self.device.fetch().wait()
        began = self._clock()
        work()
        self.device.fetch().wait()
        return self._clock() - began

    def _linear(self, operator: Operator) -> Callable[[int], object]:
        c = self.config
        hidden, attended, inner = (
            self._random(operator.rows, width)
            for width in (c.hidden, c.heads * c.head_dim, c.intermediate)
        )

        def run(layer: int) -> None:
            own = self.weights.layers[layer]
            own.qkv(hidden)
            own.out.onto(attended, hidden)
            own.gate_up(hidden)
            own.down.onto(inner, hidden)

        return run

    def _elementwise(self, operator: Operator) -> Callable[[int], object]:
        c, rows = self.config, operator.rows
        hidden, both = self._random(rows, c.hidden), self._random(rows, 2 * c.intermediate)
        qkv = self._random(rows, c.heads + 2 * c.kv_heads, c.head_dim)
        T, places = self.kv.page_tokens, torch.arange(rows, device=self.device.at)
        turns = self._inputs.rotary.turns(places, [(rows, rows)])
        slots = (places // T, places % T)

        def run(layer: int) -> None:
            own = self.weights.layers[layer]
            for norm in (own.attention_norm, own.mlp_norm):
                hidden.add_(self.model.arithmetic.norm(hidden, norm))
            self.model.arithmetic.rotate(qkv[:, : c.heads + c.kv_heads], c.heads, turns)
            self.kv.write(layer, qkv[:, c.heads :], slots)
            gate, up = both.chunk(2, dim=-1)
            functional.silu(gate).mul_(up)

        return run

    def _attention(self, operator: Operator) -> Callable[[int], object]:
        c, tp = self.config, operator.tp
        heads, kv_heads = c.heads // tp, c.kv_heads // tp
        spans, T = [], self.kv.page_tokens
        self._page = 0
        length, count = (1, operator.rows) if operator.kind == "decode" else (operator.rows, 1)
        for row in range(count):
            pages = np.array(self._pages(operator.keys + length), dtype=np.int64)
            spans.append(Span(row, length, operator.keys, pages, True))
        kernel = attention_for(
            heads, kv_heads, c.head_dim, T, self.dtype, self.dtype, self.device.at
        )
        chunk = Chunk(0, operator.keys, length, (0,), 0)
        plans = {
            window: kernel.plan(
                [seen(s, chunk, PageTable(enumerate(s.pages.tolist())), window, T) for s in spans]
            )
            for window in c.windows_in(range(c.layers))
        }
        q = self._random(operator.rows, heads, c.head_dim)
        k, v = self._random(2, operator.rows, kv_heads, c.head_dim)
        # A shard's pool: as many pages of fewer heads.
        shape = (-1, 2, kv_heads, T, c.head_dim)
        pools = [self.kv.pool(n).view(shape)[: self.kv.pages] for n in range(c.layers)]
        return lambda layer: plans[c.window(layer)].run(q, k, v, pools[layer])

    def chunk_kernels(self) -> tuple[ChunkKernel, ...]:
        """How prefixes are best cut for small chunks, over as many keys as the pool holds."""
        c, T = self.config, self.kv.page_tokens

        def backend(table: Sequence[Choice]) -> Attention:
            return attention_for(
                c.heads, c.kv_heads, c.head_dim, T, self.dtype, self.dtype, self.device.at,
                table=table,
            )  # fmt: skip

        return chunk_kernels(backend, self.kv.pool(0), c.heads, self.dtype)

    def copy_bytes_per_s(self) -> float:
        """A plain copy of the pool's first pages: bytes read and written."""
        source = self.kv.memory.view(-1)[: 1 << (24 if self.device.at.type == "cpu" else 29)]
        target = torch.empty_like(source)
        best_s = min(self._took(lambda: target.copy_(source)) for _ in range(5))
        return 2.0 * source.nbytes / best_s

    def _random(self, *shape: int) -> torch.Tensor:
        dice = torch.Generator().manual_seed(0)
        return torch.randn(shape, generator=dice).to(self.device.at, self.dtype)


def measure(bench: Bench, plan: Plan, seconds: float, tell: Callable[[Told], None]) -> None:
    """All items once, untimed for the first of them, then again while there is time."""
    jobs: list[Callable[[], float]] = [
        *(lambda part=part: bench.operator_s(part) for part in plan.operators),
        *(lambda entries=entries: bench.batch_s(entries) for entries in plan.batches),
        *(lambda entries=entries: bench.batch_s(entries) for entries in plan.unseen),
    ]
    jobs[0](), jobs[-1]()
    began, rounds, done = time.perf_counter(), MOST_ROUNDS, 0
    while done < rounds:
        for index, job in enumerate(jobs):
            tell(Measured(index, job()))
        done += 1
        if done == 1:
            first_s = time.perf_counter() - began
            rounds = max(1, min(MOST_ROUNDS, int(seconds / first_s)))
            tell(Rounds(rounds))


def machine(device: str) -> str:
    """What the device is called; of a CPU, what it says of itself."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    told = pathlib.Path("/proc/cpuinfo")
    for line in told.read_text().splitlines() if told.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _write(told: Told) -> None:
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
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
    """Measure and tell; raises UserError for what a person can mend."""
    device = device_of(given.device)
    torch.set_num_threads(given.threads)
    config, T = read_config(given.checkpoint), given.page_tokens
    if given.keys > config.max_context_tokens:
        raise SpecError(
            "--keys", given.keys, f"must be at most the {config.max_context_tokens} tokens that"
            " the model was made for", f"use {config.max_context_tokens} or less",
        )  # fmt: skip
    pages = 2 * (given.keys // T) + -(-given.rows // T) + 64
    bench = Bench(given.checkpoint, dtype_of("--dtype", given.dtype), pages, T, device)
    item = float(bench.dtype.itemsize)
    shape = config.shape(item, item)
    bounds = Bounds(rows=given.rows, keys=given.keys, page_tokens=T, pool_tokens=pages * T)
    plan = plan_for(shape, bounds)
    _write(
        Begun(
            machine=machine(given.device), shape=shape, plan=plan,
            copy_bytes_per_s=bench.copy_bytes_per_s(),
        )
    )  # fmt: skip
    measure(bench, plan, given.seconds, _write)
    if device.at.type == "cuda":
        _write(Chunks(bench.chunk_kernels()))


def main() -> None:
    try:
        run(_arguments())
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
