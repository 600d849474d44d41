"""Pages that a long prompt holds and the time of its decodes, with a window in every layer.

    python -m benchmarks.windows

A model of 11 M parameters in float32 on one thread, with a window of 4,096 tokens and without. A
prompt's keys are not computed but taken as the pool holds them; its decodes are.
"""

from __future__ import annotations

import pathlib
import statistics
import tempfile
from collections.abc import Sequence

import torch
from tests.support.served import Served, Story, Wish

from medha.profile import CPU_CORE
from medha_worker.device import CPU
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

WINDOW, PAGES, OUTPUT_TOKENS = 4096, 1600, 48
DEPTHS = (1_000, 10_000, 100_000)


def serve(folder: pathlib.Path, depth: int) -> tuple[int, float]:
    """Return the most pages held and reserved, and the median seconds of a decode after `depth`
    tokens, in the best of three rounds."""
    served = Served(folder, CPU, profile=CPU_CORE, dtype="float32", pages=PAGES)
    pool, most = served.scheduler._state.pool[0], 0

    def look(_: Sequence[Story]) -> bool:
        nonlocal most
        most = max(most, pool.total - pool.available)
        return False

    wish = Wish(prompt_tokens=depth, output_tokens=OUTPUT_TOKENS, filled=True)
    times = [statistics.median(served.play([wish], look)[0].gaps_s()) for _ in range(3)]
    return most, min(times)


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'window':>8} {'depth':>8} {'pages':>6} {'ms a token':>10}")
    with tempfile.TemporaryDirectory() as folder:
        for window in (0, WINDOW):
            model = TinyModel(
                family="mistral",
                window=window,
                hidden=512,
                heads=8,
                kv_heads=4,
                head_dim=64,
                intermediate=1024,
                layers=4,
                max_tokens=131_072,
            )
            checkpoint = write_checkpoint(pathlib.Path(folder) / str(window), model)
            for depth in DEPTHS:
                pages, seconds = serve(checkpoint, depth)
                print(f"{window:8} {depth:8} {pages:6} {1e3 * seconds:10.2f}", flush=True)


if __name__ == "__main__":
    main()
