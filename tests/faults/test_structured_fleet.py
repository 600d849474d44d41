"""Grammars and scored prompts in fleets whose ranks and replicas die."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest
from benchmarks.structured_outputs import TEAM, count_valid, is_team, start
from tests.support.medha_up import Up, until

from medha_router.tokenization.detokenizer import Vocabulary

pytestmark = pytest.mark.timeout(400)

MANY = {
    "type": "array",
    "items": TEAM,
    "minItems": 1,
    "maxItems": 1,
}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = start(tmp_path_factory.mktemp("structured"))
    try:
        until(started.serves, 120.0)
        yield started
    finally:
        started.kill()


def test_outputs_at_temperature_one_fit_their_schema(up: Up) -> None:
    assert count_valid(up.url, 5) == 5


def stream(up: Up, kill: Callable[[], object] = lambda: None) -> str:
    """Return an output of many tokens; call `kill` in the middle."""
    with openai.OpenAI(
        base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        chunks = client.completions.create(
            model="tiny",
            prompt="teams",
            seed=5,
            temperature=1.0,
            max_tokens=6000,
            stream=True,
            extra_body={"structured_outputs": {"json": MANY}},
        )
        texts = []
        for number, chunk in enumerate(chunks):
            texts.append(chunk.choices[0].text)
            if number == 20:
                kill()
    return "".join(texts)


def test_a_grammar_survives_the_rank_that_applied_it(up: Up) -> None:
    whole = stream(up)
    assert all(map(is_team, json.loads(whole))) and len(json.loads(whole)) == 1
    victim = up.children()["tiny-0-g0-s1-t0"]
    assert stream(up, victim.kill) == whole


@pytest.fixture
def pair(tmp_path: pathlib.Path) -> Iterator[Up]:
    """Two replicas of one rank each."""
    started = start(tmp_path, replicas=2, stages=1)
    try:
        until(started.serves, 120.0)
        yield started
    finally:
        started.kill()


def test_a_grammar_survives_the_death_of_its_replica(pair: Up) -> None:
    killed: list[str] = []

    def kill() -> None:
        statuses = {name: pair.status(name) for name in ("tiny-0", "tiny-1")}
        busy = [name for name, status in statuses.items() if status and status.running]
        for name, process in pair.children().items():
            if name.startswith(busy[0]):
                process.kill()
                killed.append(name)

    whole = stream(pair)
    assert all(map(is_team, json.loads(whole))) and len(json.loads(whole)) == 1
    assert stream(pair, kill) == whole
    left = ("probably dead: moving 1", "is lost: ")  # the latter if the controller restarts first
    assert len(killed) == 2 and any(reason in pair.said for reason in left)


def test_a_grammar_that_fails_while_it_runs_is_an_error_of_its_own(up: Up) -> None:
    with openai.OpenAI(
        base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(
                model="tiny",
                prompt="x",
                max_tokens=400,
                extra_body={"guided_grammar": "start: s\ns: s s | /[a-z]/", "min_tokens": 400},
            )
        assert failed.value.code == "grammar_failed" and "its grammar" in str(failed.value)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices


def spelled(token: bytes) -> str:
    """Return the text of a token in log probabilities of completions."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def test_a_scored_prompt_has_the_log_probabilities_with_which_it_was_generated(up: Up) -> None:
    random = np.random.default_rng(3)
    prompt = random.integers(8, 500, 700).tolist()
    with openai.OpenAI(
        base_url=f"{up.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:

        def complete(tokens: list[int], **fields: Any) -> Any:
            return client.completions.create(
                model="tiny", prompt=tokens, temperature=0, logprobs=3, **fields
            ).choices[0]

        written = complete(prompt, max_tokens=6, extra_body={"ignore_eos": True}).logprobs
        vocabulary = Vocabulary((up.log.parent / "model" / "tokenizer.json").read_bytes())
        ids = {spelled(vocabulary.bytes_of(token)): token for token in range(8, 512)}
        continuation = [ids[text] for text in written.tokens]
        scored = complete(prompt + continuation, max_tokens=0, echo=True)
    assert len(scored.logprobs.tokens) == len(prompt) + 6
    tail = slice(len(prompt), None)
    assert scored.logprobs.token_logprobs[tail] == pytest.approx(written.token_logprobs, abs=1e-4)
    for token, top in zip(
        scored.logprobs.tokens[tail], scored.logprobs.top_logprobs[tail], strict=True
    ):
        assert token == max(top, key=lambda text: top[text])
