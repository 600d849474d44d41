"""Log probabilities of prompts: `echo` with `logprobs`, `prompt_logprobs`, and no output at all."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from medha.messages import Logprob
from medha_router.dialects.http_response import _turns
from medha_router.dialects.openai_answer import ResponseBuilder, Timing, TokenUsage
from medha_router.service import MAX_SCORED_TOKENS
from medha_router.tokenization.detokenizer import Delta, TokenLogprob, Vocabulary
from medha_router.turns import SLICE, TURN_S, in_turns

TIMING = Timing(
    request_id="1", slo_class="c", promise_ttft_ms=None, predicted_ttft_ms=None, ttft_ms=None
)


def merged(chunks: Any) -> tuple[str, dict[str, list[Any]], str]:
    """Join a stream of completions."""
    text, finish = "", ""
    logprobs: dict[str, list[Any]] = {}
    for chunk in chunks:
        choice = chunk.choices[0]
        text += choice.text
        finish = choice.finish_reason or finish
        if choice.logprobs is not None:
            for name, values in choice.logprobs.to_dict().items():
                logprobs.setdefault(name, []).extend(values)
    return text, logprobs, finish


@pytest.mark.parametrize("prompt", ["say abé", [82, 64, 88, 220, 64, 65]])
def test_echo_with_logprobs_covers_prompt_and_output(served: Any, prompt: Any) -> None:
    choice = served.client.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=2
    ).choices[0]
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == (8 if isinstance(prompt, str) else 6) + 2
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert logprobs.token_logprobs[1:4] == [-0.125, -0.25, -0.375]
    assert logprobs.top_logprobs[1] == {"a": -0.125}
    assert logprobs.token_logprobs[-2:] == [-0.25, -0.25]
    printed = [
        choice.text[start:end]
        for start, end in zip(
            logprobs.text_offset, [*logprobs.text_offset[1:], len(choice.text)], strict=True
        )
    ]
    for token, text in zip(logprobs.tokens, printed, strict=True):
        assert text in (token, "", "é") and (text == token or token.startswith("bytes:"))
    assert "".join(printed) == choice.text


@pytest.mark.parametrize(("limit", "letters"), [(0, 3), (1, 3), (3, 3), (0, 700), (300, 700)])
def test_a_stream_with_echo_and_logprobs_is_the_whole_answer(
    served: Any, limit: int, letters: int
) -> None:
    prompt = "say " + ("abc" * letters)[:letters]
    request = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 2}
    create = served.client.completions.create
    whole = create(**request, max_tokens=limit).choices[0]
    text, logprobs, finish = merged(create(**request, max_tokens=limit, stream=True))
    assert (text, finish) == (whole.text, whole.finish_reason)
    assert logprobs == whole.logprobs.to_dict() and len(logprobs["tokens"]) >= 4 + letters


def test_no_output_is_asked_for_by_zero_tokens(served: Any, eventually: Any) -> None:
    controller = served.controllers[0]
    answer = served.client.completions.create(
        model="tiny", prompt="say abc", echo=True, logprobs=0, max_tokens=0
    )
    choice = answer.choices[0]
    assert choice.text == "say abc" and choice.finish_reason == "length"
    assert len(choice.logprobs.tokens) == 7 == len(choice.logprobs.token_logprobs)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 0)
    assert controller.seen[-1].max_output_tokens == 1
    assert (
        served.client.completions.create(model="tiny", prompt="say a", max_tokens=0).choices[0].text
        == ""
    )


def test_no_output_needs_room_for_one_token(served: Any) -> None:
    most = served.client.models.retrieve("tiny").max_model_len
    create = served.client.completions.create
    request = {"model": "tiny", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = create(**request, prompt=[64] * (most - 1))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (most - 1, 0)
    with pytest.raises(openai.BadRequestError) as refused:
        create(**request, prompt=[64] * most)
    assert refused.value.code == "context_length_exceeded" and refused.value.param == "prompt"
    assert "A limit of 0 output tokens needs room for one." in refused.value.message


def test_each_of_several_prompts_has_its_own(served: Any) -> None:
    request = {"model": "tiny", "prompt": ["say ab", "say cde"], "echo": True, "logprobs": 1}
    choices = served.client.completions.create(**request, max_tokens=1).choices
    assert [choice.text for choice in choices] == ["say aba", "say cdec"]
    assert [len(choice.logprobs.tokens) for choice in choices] == [7, 8]


def test_a_scored_prompt_is_computed_whole(served: Any) -> None:
    prompt = "say " + "x" * 100
    create = served.client.completions.create
    create(model="tiny", prompt=prompt, max_tokens=1)
    assert served.controllers[0].seen[-1].hashes
    create(model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=1)
    submit = served.controllers[0].seen[-1]
    assert submit.hashes == b"" and submit.sampling.prompt_logprobs == 1


def test_prompt_logprobs_have_the_form_of_vllm(served: Any) -> None:
    body = {"model": "tiny", "prompt": "say a", "max_tokens": 1, "prompt_logprobs": 2}
    answer = served.http.post("/v1/completions", json=body).json()
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None and len(entries) == 5 and answer["choices"][0]["logprobs"] is None
    assert entries[1] == {
        "64": {"logprob": -0.125, "rank": 1, "decoded_token": "a"},
        "65": {"logprob": -9.0, "rank": 2, "decoded_token": "b"},
    }
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "say a"}]}
    answer = served.http.post("/v1/chat/completions", json={**chat, "prompt_logprobs": 0}).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


@pytest.mark.parametrize("chat", [False, True])
def test_long_answers_have_every_log_probability(served: Any, chat: bool) -> None:
    text = "say " + "abcdefgh" * 60
    if chat:
        body = {"messages": [{"role": "user", "content": text}], "logprobs": True}
        body |= {"top_logprobs": 3, "max_tokens": 400, "n": 2, "prompt_logprobs": 2}
        answer = served.http.post("/v1/chat/completions", json=body).json()
        assert [len(choice["logprobs"]["content"]) for choice in answer["choices"]] == [400, 400]
        assert answer["choices"][0]["logprobs"]["refusal"] is None
        scores = answer["prompt_logprobs"]
    else:
        body = {"prompt": text, "logprobs": 3, "echo": True, "max_tokens": 400}
        answer = served.http.post("/v1/completions", json=body | {"prompt_logprobs": 2}).json()
        logprobs = answer["choices"][0]["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(text) + 400}
        assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
        scores = answer["choices"][0]["prompt_logprobs"]
    assert len(scores) == answer["usage"]["prompt_tokens"] > 480 and None not in scores[1:]


def test_no_part_of_an_answer_takes_long_to_encode(byte_level_json: bytes) -> None:
    """Others are served between two parts, and none has over 64 log probabilities."""
    vocabulary = Vocabulary(byte_level_json)
    top = tuple((token, -1.0) for token in range(20))
    entries = [TokenLogprob(7, at, Logprob(-1.0, top), vocabulary) for at in range(5000)]
    for chat in (False, True):
        builder = ResponseBuilder(chat=chat, id="1", model="m", created=0)
        outputs = [("text", list(entries), "stop", None) for _ in range(2)]
        parts = list(builder.whole(outputs, TokenUsage(1, 2), TIMING, logprobs=True))
        assert len(json.loads(b"".join(parts))["choices"]) == 2
        assert max(map(len, parts)) < SLICE * 2500 and len(parts) > 2 * 5000 / SLICE
    turns = list(_turns([(0, Delta("t", tuple(entries), "stop")), (1, Delta("u"))]))
    assert all(sum(1 + len(delta.logprobs) for _, delta in turn) <= 2 * SLICE for turn in turns)
    deltas = [delta for turn in turns for index, delta in turn if index == 0]
    assert [entry for delta in deltas for entry in delta.logprobs] == entries
    assert "".join(delta.text for delta in deltas) == "t"
    assert [delta.finish for delta in deltas if delta.finish] == [deltas[-1].finish] == ["stop"]


def test_others_are_served_while_an_answer_is_made() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def parts() -> Iterator[int]:
        for part in range(10):
            until_s = time.perf_counter() + 2 * TURN_S
            while time.perf_counter() < until_s:
                pass
            yield part

    async def scene() -> list[int]:
        task = asyncio.create_task(others())
        results = await in_turns(parts())
        task.cancel()
        return results

    assert asyncio.run(scene()) == list(range(10)) and turns >= 10


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": ["a"] * 33, "n": 2}, "33 prompts with n 2 make 66 outputs: at most 64"),
        ({"prompt": ["x" * 1800] * 20, "prompt_logprobs": 20}, "log probabilities, of all outputs"),
        ({"prompt": "x" * 1800, "n": 8, "echo": True, "logprobs": 5}, ""),
    ],
)
def test_the_outputs_and_scores_of_a_request_are_bounded(
    served: Any, fields: dict[str, Any], message: str
) -> None:
    response = served.http.post("/v1/completions", json={"max_tokens": 1, **fields})
    if not message:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "prompt") and message in error["message"]


def test_prompt_logprobs_are_refused_in_a_stream(served: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        served.client.completions.create(
            model="tiny", prompt="x", stream=True, extra_body={"prompt_logprobs": 1}
        )
    assert refused.value.param == "prompt_logprobs"


def test_a_prompt_too_long_to_be_scored_is_refused(running_with: Any) -> None:
    running = running_with(models=(), learn=True)
    running.open(max_context_tokens=1 << 20)
    response = running.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": [1] * (MAX_SCORED_TOKENS + 1), "prompt_logprobs": 0},
    )
    error = response.json()["error"]
    assert response.status_code == 400 and str(MAX_SCORED_TOKENS) in error["message"]
