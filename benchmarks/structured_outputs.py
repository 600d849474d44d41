"""JSON by schema at temperature 1 from a small random checkpoint: how many of COUNT are valid.

    python -m benchmarks.structured_outputs [--count 1000]

Starts `medha up` with two pipeline stages and asks with OpenAI's client. The checks do not use the
grammar library.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from tests.support.medha_up import Up, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {{name: tiny}}
spec:
  replicas: {replicas}
  model: {{name: tiny, source: {{hostPath: {{path: model}}}}, maxContextTokens: 8192}}
  device: {{kind: Cpu}}
  parallelism: {{tp: 1, spp: {stages}, kvp: {{min: 1, max: 1, tokensPerGroup: 8192}}}}
  slo: {{default: {{ttft: {{floor: 60s, multiplier: "10"}}, tpot: 10s, whenInfeasible: Relegate}}}}
  engine: {{kvPages: 1024}}
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "user", None]},
    },
    "required": ["name", "age", "role"],
    "additionalProperties": False,
}
TEAM = {
    "type": "object",
    "properties": {
        "open": {"type": "boolean"},
        "people": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 3},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
    },
    "required": ["open", "people", "score"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        set(value) == {"name", "age", "role"}
        and isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value["role"] in ("admin", "user", None)
    )


def is_team(value: Any) -> bool:
    return (
        set(value) == {"open", "people", "score"}
        and isinstance(value["open"], bool)
        and 1 <= len(value["people"]) <= 3
        and all(map(is_person, value["people"]))
        and isinstance(value["score"], int | float)
        and 0 <= value["score"] <= 1
    )


KINDS: tuple[tuple[dict[str, Any], Callable[[Any], bool]], ...] = (
    (PERSON, is_person),
    (TEAM, is_team),
)


def valid(client: openai.OpenAI, seed: int) -> bool:
    """Ask for one output and check it; the seed decides schema and output."""
    schema, check = KINDS[seed % len(KINDS)]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"Number {seed}, please."}],
        temperature=1.0,
        seed=seed,
        max_tokens=6000,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        },
    )
    choice = answer.choices[0]
    return choice.finish_reason == "stop" and check(json.loads(choice.message.content or ""))


def count_valid(url: str, count: int, at_once: int = 16) -> int:
    """Return how many of `count` outputs fit their schema."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client,
        ThreadPoolExecutor(at_once) as pool,
    ):
        return sum(pool.map(lambda seed: valid(client, seed), range(count)))


def start(folder: pathlib.Path, replicas: int = 1, stages: int = 2) -> Up:
    """Start a fleet with a small random checkpoint in `folder`."""
    write_checkpoint(folder / "model", TinyModel(max_tokens=8192))
    (folder / "tiny.yaml").write_text(RESOURCE.format(replicas=replicas, stages=stages))
    return Up(folder / "tiny.yaml")


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.structured_outputs", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        up = start(pathlib.Path(folder))
        try:
            until(up.serves, 300.0)
            began_s = time.monotonic()
            outputs = count_valid(up.url, count)
            print(f"{outputs} of {count} valid in {time.monotonic() - began_s:.0f} s")
        finally:
            up.kill()


if __name__ == "__main__":
    main()
