"""vLLM's side of cpu_peers.py, run by the interpreter of vLLM's own environment.

    VENV/bin/python -P benchmarks/vllm_worker.py CHECKPOINT

Reads a JSON object a line with `prompts` (token ids) and `count`, and writes one a line with the
greedy `answers` and the `steps`: tokens computed, and seconds of CPU and of the wall clock. A step
is what a rank does: inputs, forward pass and sampling. The scheduler, the detokenizer and messages
between processes do not count. Exit status 2: vLLM is not installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# One process, in which the engine's threads are this one; the budget that is fastest in prefills.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
SEQUENCES, BATCH_TOKENS, KV_BYTES = 16, 2048, 1 << 30


class TimedExecutor:
    """The steps of an engine's executor, timed."""

    def __init__(self, executor: Any) -> None:
        self.steps: list[list[float]] = []
        self._execute, self._sample = executor.execute_model, executor.sample_tokens
        executor.execute_model, executor.sample_tokens = self.execute, self.sample

    def execute(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        """Run the forward pass of a step."""
        self.steps.append([scheduled.total_num_scheduled_tokens, 0.0, 0.0])
        return self._timed(self._execute, scheduled, *args, **options)

    def sample(self, *args: Any, **options: Any) -> Any:
        """Sample the tokens of the step that ran last."""
        return self._timed(self._sample, *args, **options)

    def _timed(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        result = call(*args, **options)
        self.steps[-1][1] += time.process_time() - cpu_s
        self.steps[-1][2] += time.perf_counter() - wall_s
        return result


def serve(given: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to stdout
    from vllm import LLM, SamplingParams

    engine = LLM(
        str(given.checkpoint),
        dtype="float32",
        enforce_eager=not given.compiled,
        enable_prefix_caching=False,
        max_model_len=given.max_model_len,
        max_num_batched_tokens=BATCH_TOKENS,
        max_num_seqs=SEQUENCES,
        kv_cache_memory_bytes=KV_BYTES,
        distributed_executor_backend="uni",
    )
    executor = TimedExecutor(engine.llm_engine.engine_core.engine_core.model_executor)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        executor.steps.clear()
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in work["prompts"]],
            SamplingParams(
                temperature=0.0, max_tokens=work["count"], ignore_eos=True, detokenize=False
            ),
            use_tqdm=False,
        )
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"answers": tokens, "steps": executor.steps}), file=answers, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a folder with config.json and *.safetensors")
    parser.add_argument("--compiled", action="store_true", help="by torch.compile, not eager")
    parser.add_argument("--max-model-len", type=int, default=16_384)
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    try:
        serve(given)
    except ModuleNotFoundError as error:
        print(f"{error}: run it by the interpreter of vLLM's environment", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
