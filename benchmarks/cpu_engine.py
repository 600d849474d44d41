"""The CPU engine against transformers on one thread: the cost of paging, chunking and penalties,
and the gain of batching.

    python -m benchmarks.cpu_engine
    python -m benchmarks.cpu_engine --model-size large --contexts 32 2048 --no-prefill

Both run the same checkpoint in float32 and take turns. Each row compares the best rounds in seconds
of CPU time (wall time on an idle machine), and shows the ratio by the wall clock too. Exits with 1
if a target is missed. cpu_pipeline.py measures two stages against one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import dataclasses
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine, Tokens
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
)

from medha.messages.fields import Sampling
from medha_worker.model.checkpoint_writer import DEMO, TinyModel, write_checkpoint
from medha_worker.penalties import PenaltyTable
from medha_worker.sampler import SampledRow, sample

# 4, 8 and 20 million parameters. The demo's model is the one to judge by: its weights do not drown
# what paging, chunking and batching cost.
MODELS = {
    "small": TinyModel(
        layers=6,
        hidden=192,
        heads=6,
        kv_heads=2,
        head_dim=32,
        intermediate=576,
        vocab=4096,
    ),
    "demo": DEMO,
    "large": TinyModel(
        layers=10,
        hidden=384,
        heads=6,
        kv_heads=2,
        head_dim=64,
        intermediate=1088,
        vocab=4096,
        max_tokens=131_072,
    ),
}
PROMPT_TOKENS, CHUNK_TOKENS = 8192, 1024
PENALISED_TOKENS, VOCAB = 1_000_000, 262_144
DECODES, CONTEXTS_TOKENS, STEPS = 16, (128, 512, 1024), 24


class Clock(NamedTuple):
    """A moment, or the time between two: seconds of the process's CPU, and of the wall clock."""

    cpu_s: float
    wall_s: float

    @classmethod
    def now(cls) -> Clock:
        return cls(time.process_time(), time.perf_counter())

    def since(self, begin: Clock, steps: int = 1) -> Clock:
        """The time of each of `steps` equal ones from `begin` to here."""
        return Clock((self.cpu_s - begin.cpu_s) / steps, (self.wall_s - begin.wall_s) / steps)


@dataclasses.dataclass(frozen=True)
class Row:
    """Print the times of both sides for `tokens` tokens; the target is the ratio of CPU times."""

    what: str
    tokens: int
    ours: Clock
    theirs: Clock
    target: float

    @property
    def ratio(self) -> float:
        return self.theirs.cpu_s / self.ours.cpu_s

    @property
    def met(self) -> bool:
        return self.ratio >= self.target


def best(rounds: int, *runs: Callable[[], Clock]) -> list[Clock]:
    """The shortest of each run's times, of either clock; runs take turns."""
    times = [[run() for run in runs] for _ in range(rounds)]
    return [
        Clock(min(clock.cpu_s for clock in column), min(clock.wall_s for clock in column))
        for column in zip(*times, strict=True)
    ]


def prefill(engine: SoloEngine, model: Any, rounds: int) -> Row:
    prompt = recalling(PROMPT_TOKENS, engine.config.vocab)

    def ours() -> Clock:
        begin = Clock.now()
        engine.generate([prompt], 1, chunk=CHUNK_TOKENS)
        return Clock.now().since(begin)

    def theirs() -> Clock:
        begin = Clock.now()
        generate(model, [prompt], 1, [])
        return Clock.now().since(begin)

    what = f"prefill of {PROMPT_TOKENS} tokens, pages of 64, chunks of {CHUNK_TOKENS}"
    mine, other = best(rounds, ours, theirs)
    return Row(what, PROMPT_TOKENS, mine, other, 0.9)


def decode(engine: SoloEngine, model: Any, context_tokens: int, rounds: int) -> Row:
    prompts = [recalling(context_tokens, engine.config.vocab, seed) for seed in range(DECODES)]

    def ours() -> Clock:
        stamps: list[Clock] = []
        engine.generate(prompts, STEPS, on_step=lambda: stamps.append(Clock.now()))
        return stamps[-1].since(stamps[0], len(stamps) - 1)

    def theirs() -> Clock:
        stamps: list[Clock] = []
        generate(model, prompts, STEPS, stamps)
        return stamps[-1].since(stamps[0], len(stamps) - 1)

    what = f"decode, batch {DECODES}, contexts of {context_tokens} tokens"
    mine, other = best(rounds, ours, theirs)
    return Row(what, DECODES, mine, other, 1.5)


def penalty(rounds: int) -> Row:
    """Repetition penalty of a token after a prompt that has every id of the vocabulary."""
    prompt = np.resize(np.arange(VOCAB, dtype=np.int32), PENALISED_TOKENS)
    sampling = Sampling(temperature=0.0, repetition_penalty=1.2)
    counts = PenaltyTable(VOCAB).begin(sampling, prompt, PENALISED_TOKENS)
    row = SampledRow(sampling, PENALISED_TOKENS, 0, counts=counts)
    theirs_on = RepetitionPenaltyLogitsProcessor(1.2)
    ids = torch.from_numpy(prompt.astype(np.int64)).view(1, -1)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))

    def ours() -> Clock:
        begin = Clock.now()
        for _ in range(STEPS):
            sample(logits, [row])
        return Clock.now().since(begin, STEPS)

    def theirs() -> Clock:
        begin = Clock.now()
        for _ in range(STEPS):
            theirs_on(ids, logits).argmax(-1).item()
        return Clock.now().since(begin, STEPS)

    mine, other = best(rounds, ours, theirs)
    what = (
        f"penalty after {PENALISED_TOKENS:,} tokens, {VOCAB:,} distinct: {1e3 * mine.cpu_s:.2f} ms"
    )
    return Row(what, 1, mine, other, 5.0)


class _Stamp(LogitsProcessor):  # type: ignore[misc]
    """Notes when each step's logits are there."""

    def __init__(self, stamps: list[Clock]) -> None:
        self.stamps = stamps

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.stamps.append(Clock.now())
        return scores


def generate(
    model: Any, prompts: Sequence[Tokens], count: int, stamps: list[Clock]
) -> list[list[int]]:
    """Return `count` greedy tokens of transformers after each prompt; add each step's end to
    `stamps`."""
    ids = torch.from_numpy(np.stack(prompts).astype(np.int64))
    answers = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([_Stamp(stamps)]),
    )
    tokens: list[list[int]] = answers[:, ids.shape[1] :].tolist()
    return tokens


def show(rows: list[Row]) -> None:
    table = Table(title="CPU engine, float32, one thread, tokens per second of CPU")
    for column in ("what", "medha", "transformers", "ratio", "by wall", "target", "verdict"):
        table.add_column(column)
    for row in rows:
        mine, other = (row.tokens / side.cpu_s for side in (row.ours, row.theirs))
        wall = row.theirs.wall_s / row.ours.wall_s
        table.add_row(
            row.what,
            f"{mine:,.0f}",
            f"{other:,.0f}",
            f"{row.ratio:.2f}",
            f"{wall:.2f}",
            f"≥ {row.target}",
            "met" if row.met else "MISSED",
        )
    Console(width=120).print(table)


def main() -> int:
    given = arguments()
    torch.set_num_threads(1)
    longest = max(*given.contexts, 0 if given.no_prefill else PROMPT_TOKENS // DECODES)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = given.checkpoint
        if checkpoint is None:
            checkpoint = write_checkpoint(pathlib.Path(folder), MODELS[given.model_size])
        engine = SoloEngine(checkpoint, pages=DECODES * (longest // 64 + 1))
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        rows = [decode(engine, model, tokens, given.rounds) for tokens in given.contexts]
        rows.append(penalty(given.rounds))
        if not given.no_prefill:
            rows.append(prefill(engine, model, min(given.rounds, 2)))
    show(rows)
    return 0 if all(row.met for row in rows) else 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds; the best counts")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=CONTEXTS_TOKENS,
        help="tokens of the prompts before decodes",
    )
    parser.add_argument("--model-size", choices=MODELS, default="demo")
    parser.add_argument(
        "--checkpoint",
        type=pathlib.Path,
        help="a folder to read a Llama from instead: config.json and *.safetensors",
    )
    parser.add_argument("--no-prefill", action="store_true", help="decodes only")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
