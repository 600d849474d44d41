"""The API as seen by OpenAI's own client, with a router on loopback and a fake controller."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from medha.messages import Logprob
from medha_router.dialects.openai_answer import ResponseBuilder
from medha_router.tokenization.detokenizer import Delta, TokenLogprob, Vocabulary


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def events(served: Any, path: str, body: dict[str, Any]) -> list[str]:
    with served.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [block for block in "".join(response.iter_text()).split("\n\n") if block]


def test_a_chat_completion_returns_the_generated_text(served: Any) -> None:
    answer = served.client.chat.completions.create(
        model="tiny", messages=ask("say héllo wörld 🙂"), max_tokens=64
    )
    choice = answer.choices[0]
    assert choice.message.content == "héllo wörld 🙂"
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion" and answer.model == "tiny"
    assert answer.usage.completion_tokens == len("héllo wörld 🙂".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_prompt_is_the_models_own_template(served: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *ask("say x")]
    served.client.chat.completions.create(model="tiny", messages=messages)
    response = served.http.post("/tokenize", json={"model": "tiny", "messages": messages}).json()
    text = served.http.post(
        "/detokenize", json={"model": "tiny", "tokens": response["tokens"]}
    ).json()["prompt"]
    assert text == "<|start|>system: Be brief.\n<|start|>user: say x\n<|start|>"
    assert response["tokens"].count(257) == 3
    assert response["count"] == len(response["tokens"]) and response["max_model_len"] == 2048


def test_a_stream_opens_with_the_role_and_ends_with_one_done(served: Any) -> None:
    body = {"model": "tiny", "messages": ask("say héé🙂!"), "stream": True}
    blocks = events(served, "/v1/chat/completions", body)
    assert blocks[-1] == "data: [DONE]" and blocks.count("data: [DONE]") == 1
    chunks = [json.loads(event.removeprefix("data: ")) for event in blocks[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == "héé🙂!" and not any("\ufffd" in text for text in texts)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["x_medha"]["ttft_ms"] > 0


@pytest.mark.parametrize(("continuous", "first"), [(False, None), (True, 0)])
def test_the_chunk_with_the_role_has_the_usage_so_far(
    served: Any, continuous: bool, first: int | None
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "say a"}], "stream": True}
    reply = served.http.post("/v1/chat/completions", json=body | {"stream_options": options})
    chunk = json.loads(reply.text.partition("\n")[0].removeprefix("data: "))
    assert chunk["choices"][0]["delta"]["role"] == "assistant" and "usage" in chunk
    assert (chunk["usage"] or {}).get("completion_tokens") == first


def test_requested_usage_comes_in_a_last_chunk_without_choices(served: Any) -> None:
    stream = served.client.chat.completions.create(
        model="tiny",
        messages=ask("say abc"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert all(len(chunk.choices) == 1 for chunk in chunks[:-1])


def test_continuous_usage_counts_up_in_every_chunk(served: Any) -> None:
    stream = served.client.chat.completions.create(
        model="tiny",
        messages=ask("say abcdefghi"),
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    usages = [chunk.usage for chunk in stream][1:]  # after the role
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 10
    assert len({usage.prompt_tokens for usage in usages}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("END", "alpha ", "stop"),
        (["zz", "ta"], "alpha ENDbe", "stop"),
        ("no", "alpha ENDbeta", "stop"),
    ],
)
def test_stop_strings_are_never_sent(
    served: Any, stream: bool, stop: Any, expected: str, reason: str
) -> None:
    response = served.client.completions.create(
        model="tiny", prompt="say alpha ENDbeta", stop=stop, max_tokens=40, stream=stream
    )
    if not stream:
        assert (response.choices[0].text, response.choices[0].finish_reason) == (expected, reason)
        return
    chunks = list(response)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == reason


def test_a_stop_string_aborts_the_request_at_its_replica(served: Any, eventually: Any) -> None:
    controller = served.controllers[0]
    served.client.completions.create(
        model="tiny", prompt="say " + "a" * 100 + "STOP" + "b" * 600, stop="STOP", max_tokens=800
    )
    eventually(lambda: controller.aborted[-1:] == [controller.seen[-1].id])


def test_max_tokens_ends_an_output_with_length(served: Any) -> None:
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = served.client.chat.completions.create(
            model="tiny", messages=ask("say abcdef"), **limit
        )
        assert answer.choices[0].message.content == "abc"
        assert answer.choices[0].finish_reason == "length"


def test_completions_default_to_sixteen_tokens(served: Any) -> None:
    response = served.client.completions.create(model="tiny", prompt="say " + "x" * 40)
    assert response.choices[0].text == "x" * 16 and response.choices[0].finish_reason == "length"


def test_n_choices_share_a_prompt_and_have_their_own_seeds(served: Any) -> None:
    answer = served.client.chat.completions.create(
        model="tiny", messages=ask("say abc"), n=3, seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert all(choice.message.content == "abc" for choice in answer.choices)
    mine = served.controllers[0].seen[-3:]
    assert sorted(submit.sampling.seed for submit in mine) == [7, 8, 9]
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens == len(mine[0].tokens) // 4


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("say one", ["one"]),
        (["say one", "say two"], ["one", "two"]),
        ([82, 64, 88, 220, 65], None),
        ([[82, 64, 88, 220, 65], [82, 64, 88, 220, 66]], None),
    ],
)
def test_prompts_have_four_forms(served: Any, prompt: Any, texts: list[str] | None) -> None:
    response = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=20)
    if texts is None:
        rows = prompt if isinstance(prompt[0], list) else [prompt]
        sent = [
            list(memoryview(submit.tokens).cast("i"))
            for submit in served.controllers[0].seen[-len(rows) :]
        ]
        assert sorted(sent) == sorted(rows)
    else:
        assert [choice.text for choice in response.choices] == texts
    assert [choice.index for choice in response.choices] == list(range(len(response.choices)))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_before_the_completion(served: Any, stream: bool) -> None:
    response = served.client.completions.create(
        model="tiny", prompt="say one", echo=True, max_tokens=20, stream=stream
    )
    if stream:
        assert "".join(chunk.choices[0].text for chunk in response) == "say oneone"
    else:
        assert response.choices[0].text == "say oneone"


def test_chat_logprobs_name_each_token_and_its_alternatives(served: Any) -> None:
    answer = served.client.chat.completions.create(
        model="tiny", messages=ask("say hé"), logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[104], [0xC3], [0xA9]]
    assert content[0].token == "h" and content[0].logprob == -0.25
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]


def test_streamed_logprobs_are_those_of_the_whole_answer(served: Any) -> None:
    def content(stream: bool) -> list[str]:
        response = served.client.chat.completions.create(
            model="tiny", messages=ask("say hé!"), logprobs=True, stream=stream
        )
        chunks = [response] if not stream else list(response)
        return [
            entry.token
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for entry in choice.logprobs.content
        ]

    assert content(True) == content(False) and len(content(True)) == 4


def test_completion_logprobs_count_their_offsets_in_characters(served: Any) -> None:
    response = served.client.completions.create(model="tiny", prompt="say éab", logprobs=2)
    logprobs = response.choices[0].logprobs
    assert logprobs.text_offset == [0, 0, 1, 2]
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.tokens == ["bytes:\\xc3", "bytes:\\xa9", "a", "b"]
    assert logprobs.top_logprobs[2] == {"b": -0.5, "c": -1.5, "a": -0.25}
    assert [len(top) for top in logprobs.top_logprobs] == [3, 3, 3, 2]


def test_alternatives_of_equal_text_stay_apart(byte_level_json: bytes) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(byte_level_json.decode())
    tokenizer.add_special_tokens([" "])
    vocabulary = Vocabulary(tokenizer.to_str().encode())
    plain, added = tokenizer.token_to_id("Ġ"), tokenizer.token_to_id(" ")
    assert plain is not None and added is not None and plain != added
    assert vocabulary.bytes_of(plain) == vocabulary.bytes_of(added) == b" "
    logprob = Logprob(-1.0, ((added, -0.5), (64, -0.75), (plain, -1.0)))
    shape = ResponseBuilder(chat=False, id="x", model="tiny", created=0)
    delta = Delta(" ", (TokenLogprob(plain, 0, logprob, vocabulary),), "stop")
    event = shape.chunk(0, delta, logprobs=True, extra={})
    choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
    assert choice["logprobs"]["tokens"] == [" "]
    expected = {f"token_id:{added}": -0.5, "a": -0.75, " ": -1.0}
    assert choice["logprobs"]["top_logprobs"] == [expected]


@given(st.text(min_size=1), st.integers(0, 127))
def test_a_chunk_of_text_alone_has_the_fields_of_every_chunk(text: str, index: int) -> None:
    shape = ResponseBuilder(chat=True, id="x", model="tiny", created=0)
    plain, other = (
        json.loads(shape.chunk(index, Delta(text), logprobs=False, extra=extra)[6:])
        for extra in ({}, {"usage": None})
    )
    assert other.pop("usage") is None
    assert plain == other and [*plain["choices"][0]] == [*other["choices"][0]]
    assert plain["choices"][0]["delta"] == {"content": text}


def test_sampling_fields_reach_the_replica(served: Any) -> None:
    served.client.chat.completions.create(
        model="tiny",
        messages=ask("say a"),
        temperature=0.3,
        top_p=0.9,
        seed=-2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"65": -100, "66": 5},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "stop_token_ids": [9],
        },
    )
    sampling = served.controllers[0].seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.3, 0.9, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert (sampling.min_p, sampling.repetition_penalty, sampling.min_tokens) == (0.1, 1.1, 1)
    assert sampling.logit_bias == {65: -100.0, 66: 5.0}
    assert sampling.seed == (1 << 63) - 2 and sampling.stop_tokens == (258, 9)


def test_ignore_eos_sends_no_stop_tokens_to_the_replica(served: Any) -> None:
    served.client.completions.create(
        model="tiny", prompt="say ab", max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert served.controllers[0].seen[-1].sampling.stop_tokens == ()


def test_requests_without_a_seed_get_different_ones(served: Any) -> None:
    for _ in range(2):
        served.client.completions.create(model="tiny", prompt="say a")
    first, second = served.controllers[0].seen[-2:]
    assert first.sampling.seed != second.sampling.seed


def test_unknown_fields_are_ignored(served: Any) -> None:
    answer = served.client.chat.completions.create(
        model="tiny",
        messages=ask("say a"),
        extra_body={"no_such_field": {"deep": [1]}},
        user="someone",
        store=False,
    )
    assert answer.choices[0].message.content == "a"


def test_text_parts_are_lines(served: Any) -> None:
    parts = [{"type": "text", "text": "say a"}, {"type": "text", "text": "bc"}]
    answer = served.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}]
    )
    assert answer.choices[0].message.content == "a\nbc"


def test_models_are_listed_and_looked_up(served: Any) -> None:
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").object == "model"


def test_a_response_has_its_request_id_promise_and_times(served: Any) -> None:
    raw = served.client.chat.completions.with_raw_response.create(
        model="tiny", messages=ask("say a"), extra_headers={"x-medha-slo-ttft-ms": "15000"}
    )
    answer = raw.parse()
    assert raw.headers["x-medha-request-id"] == answer.id.removeprefix("chatcmpl-")
    assert raw.headers["x-medha-promise-ttft-ms"] == "15000"
    assert float(raw.headers["x-medha-predicted-ttft-ms"]) < 15000
    assert float(raw.headers["x-medha-ttft-ms"]) < 15000
    assert answer.x_medha["promise_ttft_ms"] == 15000.0


@pytest.mark.parametrize(
    "name", ["x-medha-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-dynamo-slo-ttft-ms"]
)
def test_every_alias_of_the_ttft_header_sets_the_deadline(served: Any, name: str) -> None:
    served.client.completions.create(
        model="tiny", prompt="say a", extra_headers={name: "12345", "x-slo-tpot-ms": "4321"}
    )
    submit = served.controllers[0].seen[-1]
    assert submit.ttft_deadline_s == pytest.approx(12.345)
    assert submit.tpot_s == pytest.approx(4.321)
    assert submit.promised is True


def test_a_long_prompt_arrives_complete_with_its_page_names(served: Any) -> None:
    text = "say " + "word " * 350
    served.client.completions.create(model="tiny", prompt=text, max_tokens=2)
    submit = served.controllers[0].seen[-1]
    assert len(submit.tokens) == 4 * len(text)
    assert len(submit.hashes) == 16 * (len(text) // 16)
