"""Log probabilities of prompts: `echo` with `logprobs`, `prompt_logprobs`, and no output at all."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from medha_router.service import MAX_SCORED_TOKENS


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


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_stream_with_echo_and_logprobs_is_the_whole_answer(served: Any, limit: int) -> None:
    request = {"model": "tiny", "prompt": "say abc", "echo": True, "logprobs": 2}
    create = served.client.completions.create
    whole = create(**request, max_tokens=limit).choices[0]
    text, logprobs, finish = merged(create(**request, max_tokens=limit, stream=True))
    assert (text, finish) == (whole.text, whole.finish_reason)
    assert logprobs == whole.logprobs.to_dict()


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
