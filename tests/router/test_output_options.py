"""Options of an output beyond OpenAI's API, as vLLM spells them: a message that is continued, token
ids, special tokens, the stop, and a cache of its own."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.router.conftest import END, Running, byte_level_tokenizer

from medha.errors import RequestError
from medha.messages import BAD_BIAS, from_bytes
from medha_router.tokenization.chat_template import ChatTemplate
from medha_router.tokenization.detokenizer import OutputStream, Vocabulary
from medha_worker.sampler import History, SampledRow, sample

START = END - 1
QUESTION = {"role": "user", "content": "say abcdef"}
FIRST = {"role": "assistant", "content": "say abc"}
TEMPLATE = b"""{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}\
{% if add_generation_prompt %}<assistant>{% endif %}"""


def ask(served: Running, path: str = "chat/completions", **fields: Any) -> Any:
    prompt = {"prompt": "say abcdef"} if path == "completions" else {"messages": [QUESTION]}
    return served.http.post(f"/v1/{path}", json={"model": "tiny", **prompt, **fields})


def chunks(served: Running, path: str, **fields: Any) -> list[Any]:
    lines = ask(served, path, stream=True, **fields).text.split("\n\n")
    return [json.loads(line[6:]) for line in lines if line[6:7] == "{"]


def seen(served: Running) -> list[int]:
    """Return the prompt that the replica saw last."""
    tokens: list[int] = from_bytes(served.controllers[0].seen[-1].tokens).tolist()
    return tokens


def text_of(byte_level_json: bytes, tokens: list[int]) -> str:
    return str(Vocabulary(byte_level_json).tokenizer.decode(tokens, skip_special_tokens=False))


# --- how a prompt ends ----------------------------------------------------------------------------


def test_the_last_message_is_continued(served: Running, byte_level_json: bytes) -> None:
    answer = ask(served, messages=[QUESTION, FIRST], continue_final_message=True).json()
    assert text_of(byte_level_json, seen(served)).endswith("<|start|>assistant: say abc")
    assert answer["choices"][0]["message"]["content"] == "abc"
    body = {"messages": [QUESTION, FIRST], "continue_final_message": True}
    assert served.http.post("/tokenize", json=body).json()["tokens"] == seen(served)


def test_a_prompt_may_end_after_its_last_message(served: Running, byte_level_json: bytes) -> None:
    ask(served, add_generation_prompt=False)
    assert text_of(byte_level_json, seen(served)) == "<|start|>user: say abcdef\n"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("Sure", "<user>Sure</s><assistant>Sure"),
        (" \nSure, \n", "<user>Sure</s><assistant>Sure,"),
        (["one", "two"], "<user>Sure</s><assistant>one\ntwo"),
        ("s", "<user>Sure</s><assistant>s"),
        ("<", "<user>Sure</s><assistant><"),
    ],
)
def test_a_continued_prompt_ends_with_the_text_as_it_is_printed(content: Any, text: str) -> None:
    messages = [{"role": "user", "content": "Sure"}, {"role": "assistant", "content": content}]
    assert ChatTemplate(TEMPLATE, b"").render(messages, ending="continued") == text


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        ("m.content", " a \n\n"),
        ("' ' + m.content | trim + ' '", " a"),
        ("m.content.strip('\\n')", " a "),
        ("m.content + '|' + m.content", " a \n\n| a \n\n"),
        ("m.content.split('</think>')[-1]", " a \n\n"),
    ],
)
def test_a_continued_prompt_has_the_white_space_of_the_template(printed: str, text: str) -> None:
    template = "{% for m in messages %}{{ " + printed + " }}</s>{% endfor %}"
    messages = [{"role": "assistant", "content": " a \n\n"}]
    assert ChatTemplate(template.encode(), b"").render(messages, ending="continued") == text


@pytest.mark.parametrize(
    "last",
    [
        {"content": ""},
        {"content": " \n"},
        {"content": []},
        {"content": "hidden"},
        {"content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    ],
)
def test_what_a_template_does_not_print_is_not_continued(last: dict[str, Any]) -> None:
    template = (
        b"{% for m in messages %}{% if 'hidden' not in m.content %}{{ m.content }}{% endif %}."
    )
    messages = [{"role": "user", "content": "ask"}, {"role": "assistant", **last}]
    with pytest.raises(RequestError, match="the last message is to be continued"):
        ChatTemplate(template + b"{% endfor %}", b"").render(messages, ending="continued")


def test_a_message_is_not_both_begun_and_continued(served: Running) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    for fields, path in (({"messages": [FIRST]}, "/v1/chat/completions"), ({}, "/tokenize")):
        body = {"messages": [FIRST], **fields, **both}
        response = served.http.post(path, json=body)
        assert response.status_code == 400 and "both true" in response.text
    response = served.http.post("/tokenize", json={"prompt": "a", "continue_final_message": True})
    assert response.status_code == 400 and "continue_final_message" in response.text


def test_anthropics_prefilled_answer_is_continued(served: Running, byte_level_json: bytes) -> None:
    body = {"model": "tiny", "max_tokens": 8, "messages": [QUESTION, FIRST]}
    answer = served.http.post("/v1/messages", json=body).json()
    assert text_of(byte_level_json, seen(served)).endswith("<|start|>assistant: say abc")
    assert answer["content"] == [{"type": "text", "text": "abc"}]
    del body["max_tokens"]
    counted = served.http.post("/v1/messages/count_tokens", json=body).json()
    assert counted == {"input_tokens": len(seen(served))}


# --- what a text shows ----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": ["cd"]}, "abcd"),
        ({"stop_token_ids": ["c"]}, "abc"),
        ({"skip_special_tokens": False}, "abcdef<|end|>"),
        ({}, "abcdef"),
    ],
)
def test_the_stop_is_shown_on_request(
    served: Running, byte_level_json: bytes, fields: dict[str, Any], text: str, stream: bool
) -> None:
    if "stop_token_ids" in fields:
        letter = Vocabulary(byte_level_json).tokenizer.token_to_id("c")
        fields = {"stop_token_ids": [letter]}
    for path in ("chat/completions", "completions"):
        shown = {"include_stop_str_in_output": True, **fields}
        if stream:
            choices = [c["choices"][0] for c in chunks(served, path, **shown) if c["choices"]]
            texts = [c.get("text") or c.get("delta", {}).get("content") or "" for c in choices]
            assert "".join(texts) == text
        else:
            (choice,) = ask(served, path, **shown).json()["choices"]
            assert (choice["text"] if path == "completions" else choice["message"]["content"]) == (
                text
            )


def test_the_special_token_that_ends_an_output_is_not_shown(served: Running) -> None:
    for path in ("chat/completions", "completions"):
        assert "abcdef<" not in ask(served, path, skip_special_tokens=False).text


@pytest.mark.parametrize("together", [False, True])
def test_special_tokens_within_an_output_print_their_text(
    byte_level_json: bytes, together: bool
) -> None:
    vocabulary = Vocabulary(byte_level_json)
    letters = vocabulary.tokenizer.encode("ab", add_special_tokens=False).ids
    tokens = [letters[0], START, letters[1], END]
    for shown, shows_stop, text in (
        ((), False, "ab"),
        (None, False, "a<|start|>b"),
        (None, True, "a<|start|>b<|end|>"),
        ((), True, "ab"),
    ):
        stream = OutputStream(
            vocabulary, stop_tokens=frozenset({END}), shown=shown, shows_stop=shows_stop
        )
        groups = [tokens] if together else [[token] for token in tokens]
        printed = "".join(stream.push(group).text for group in groups)
        assert printed + stream.end("stop").text == text


# --- token ids ------------------------------------------------------------------------------------


def test_whole_answers_have_the_ids_of_all_tokens(served: Running, byte_level_json: bytes) -> None:
    encode = Vocabulary(byte_level_json).tokenizer.encode
    wanted = [*encode("abcdef", add_special_tokens=False).ids, END]
    answer = ask(served, return_token_ids=True, n=2).json()
    assert answer["prompt_token_ids"] == seen(served)
    assert [choice["token_ids"] for choice in answer["choices"]] == [wanted] * 2
    body: dict[str, Any] = {"prompt": ["say abcdef", "say ab"], "n": 2, "return_token_ids": True}
    choices = ask(served, "completions", **body).json()["choices"]
    assert [len(choice["token_ids"]) for choice in choices] == [7, 7, 3, 3]
    prompts = [encode(text).ids for text in ("say abcdef", "say abcdef", "say ab", "say ab")]
    assert [choice["prompt_token_ids"] for choice in choices] == prompts
    assert "token_ids" not in ask(served).text


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_chunks_have_the_ids_of_their_tokens(
    served: Running, byte_level_json: bytes, path: str, logprobs: bool
) -> None:
    wanted = Vocabulary(byte_level_json).tokenizer.encode("abcdef", add_special_tokens=False).ids
    fields: dict[str, Any] = {"stop": ["ef"], "n": 2, "return_token_ids": True}
    if logprobs:
        fields["logprobs"] = path == "chat/completions" or 1
    events = chunks(served, path, **fields)
    ids: dict[int, list[int]] = {0: [], 1: []}
    prompts = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    for choice in [choice for event in events for choice in event["choices"]]:
        ids[choice["index"]] += choice.get("token_ids", [])
        prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert ids == {0: wanted, 1: wanted}
    assert prompts == [seen(served)] * (1 if path == "chat/completions" else 2)


def test_log_probabilities_name_tokens_by_id(served: Running, byte_level_json: bytes) -> None:
    letter = Vocabulary(byte_level_json).tokenizer.token_to_id("a")
    fields: dict[str, Any] = {"top_logprobs": 2, "return_tokens_as_token_ids": True}
    entry = ask(served, logprobs=True, **fields).json()["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{letter}" and entry["bytes"] == [ord("a")]
    assert [top["token"] for top in entry["top_logprobs"]] == ["token_id:65", "token_id:66"]
    fields = {"logprobs": 2, "return_tokens_as_token_ids": True, "max_tokens": 1}
    entry = ask(served, "completions", **fields).json()["choices"][0]["logprobs"]
    names = {f"token_id:{token}" for token in (letter, 65, 66)}
    assert entry["tokens"] == [f"token_id:{letter}"] and set(entry["top_logprobs"][0]) == names


def test_the_ids_of_tokens_have_no_place_in_other_apis(served: Running) -> None:
    for field, neutral in (
        ("return_token_ids", False),
        ("return_tokens_as_token_ids", False),
        ("continue_final_message", False),
        ("add_generation_prompt", True),
    ):
        for path, body in (
            ("/v1/responses", {"input": "say a"}),
            ("/v1/messages", {"messages": [QUESTION], "max_tokens": 4}),
        ):
            for value, status in ((not neutral, 400), (neutral, 200)):
                response = served.http.post(path, json={"model": "tiny", **body, field: value})
                assert response.status_code == status, response.text


# --- caches ---------------------------------------------------------------------------------------


def test_only_requests_with_the_same_salt_share_cached_pages(served: Running) -> None:
    long = "say " + "a" * 64
    names = []
    for salt in ("one", "one", "two", None, None):
        ask(served, messages=[{"role": "user", "content": long}], cache_salt=salt)
        submit = served.controllers[0].seen[-1]
        names.append((submit.salt, submit.hashes))
        assert submit.hashes
    first, again, second, none, still = names
    assert first == again and none == still
    assert len({salt for salt, _ in (first, second, none)}) == 3
    assert len({hashes for _, hashes in (first, second, none)}) == 3
    assert ask(served, cache_salt="").status_code == 400


# --- which tokens an output may have --------------------------------------------------------------


def sampling(served: Running) -> Any:
    return served.controllers[0].seen[-1].sampling


def test_only_allowed_tokens_have_any_weight(served: Running) -> None:
    allowed, scores = [5, 9, 200], torch.randn(1, 259, generator=torch.Generator().manual_seed(3))
    scores[0, 17] = 40.0
    ask(served, allowed_token_ids=[*allowed, 5], temperature=2.0, logit_bias={"9": -1, "17": 100})
    rows = [
        SampledRow(msgspec.structs.replace(sampling(served), seed=seed), seed, 0)
        for seed in range(4000)
    ]
    drawn = [token for token, _ in sample(scores.expand(len(rows), -1), rows)]
    own = scores[0, allowed] - torch.tensor([0.0, 1.0, 0.0])
    expected = (own / 2.0).softmax(0)
    for token, share in zip(allowed, expected.tolist(), strict=True):
        assert drawn.count(token) / len(drawn) == pytest.approx(share, abs=0.03)
    assert set(drawn) == set(allowed)


def test_bad_words_of_one_token_are_forbidden(served: Running, byte_level_json: bytes) -> None:
    letter = Vocabulary(byte_level_json).tokenizer.token_to_id("a")
    ask(served, bad_words=["a", " a"], temperature=2.0, logit_bias={str(letter): 100})
    scores = torch.zeros(1, 259).index_fill_(1, torch.tensor([letter]), 200.0)
    settings = sampling(served)
    rows = [SampledRow(settings, place, 0) for place in range(2000)]
    drawn = {token for token, _ in sample(scores.expand(len(rows), -1), rows)}
    assert len(drawn) > 200 and letter not in drawn

    # A grammar that leaves no other token gets it: a stop token would end the output too early.
    class Grammar:
        def mask(self, output: list[int]) -> Any:
            return np.packbits(np.arange(288) == letter, bitorder="little").view(np.int32)

    grammar: Any = Grammar()
    history = History(np.zeros(0, np.int32), 0)
    row = SampledRow(settings, 0, 0, history=history, constraint=grammar)
    assert [token for token, _ in sample(scores, [row])] == [letter] != [END]


def test_bad_words_of_several_tokens_are_forbidden_after_a_space_too(
    served: Running, running_with: Any
) -> None:
    ask(served, bad_words=["abc", " d", "abc"], logit_bias={"3": 1})
    tokenizer = Vocabulary(byte_level_tokenizer()).tokenizer
    letters = {letter: tokenizer.token_to_id(letter) for letter in "abcdĠ"}
    assert sampling(served).bad_words == (tuple(letters[letter] for letter in "abc"),)
    assert sampling(served).logit_bias == {3: 1.0, letters["d"]: BAD_BIAS}

    merging = json.loads(byte_level_tokenizer())
    words = {"Ġa": merging["model"]["vocab"].pop("Ā"), "bc": merging["model"]["vocab"].pop("ā")}
    merging["model"] |= {
        "vocab": merging["model"]["vocab"] | words,
        "merges": [["Ġ", "a"], ["b", "c"]],
    }
    running: Running = running_with()
    running.open(tokenizer=json.dumps(merging).encode())
    ask(running, bad_words=["abc", " da"])
    assert sampling(running).bad_words == (
        (letters["a"], words["bc"]),
        (words["Ġa"], words["bc"]),
        (letters["d"], letters["a"]),
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [259]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": list(range(1025))}, "allowed_token_ids"),
        ({"allowed_token_ids": [1], "response_format": {"type": "json_object"}}, ""),
        ({"allowed_token_ids": list(range(1024)), "logit_bias": {"2000": 1}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": ["a", " "]}, "bad_words[1]"),
        ({"bad_words": ["a" * 250] * 17}, "bad_words"),
        ({"allowed_token_ids": [64], "bad_words": ["a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [END], "min_tokens": 2}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
    ],
)
def test_what_cannot_hold_is_refused_by_its_name(
    served: Running, fields: dict[str, Any], param: str
) -> None:
    for path in ("chat/completions", "completions"):
        response = ask(served, path, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == (param or "allowed_token_ids")


# --- prompts --------------------------------------------------------------------------------------


def test_a_long_prompt_is_cut_on_request(served: Running) -> None:
    prompt = "x" * 3000 + "say abc"
    assert ask(served, "completions", prompt=prompt).status_code == 400
    for kept, side, tokens in (
        (7, {}, 7),
        (7, {"truncation_side": "left"}, 7),
        (-1, {}, 2048 - 16),
        (4000, {"truncation_side": "right", "prompt": "say abc"}, 8),
    ):
        fields = {"prompt": prompt, "truncate_prompt_tokens": kept, **side}
        answer = ask(served, "completions", **fields).json()
        assert answer["choices"][0]["text"] == "abc"
        assert answer["usage"]["prompt_tokens"] == len(seen(served)) == tokens - (kept == 4000)
    for most in (2060, 9000):
        fields = {"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": most}
        message = ask(served, "completions", **fields).json()["error"]["message"]
        assert f"{most + 2047} tokens (2047 in the prompt, {most} in the completion)" in message
    fields = {"prompt": prompt, "truncate_prompt_tokens": -1, "max_tokens": 2048}
    usage = ask(served, "completions", **fields).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (2047, 1)
    ask(served, "completions", prompt=prompt, truncate_prompt_tokens=5, truncation_side="right")
    assert len(set(seen(served))) == 1 and len(seen(served)) == 5
    response = ask(served, "completions", echo=True, truncate_prompt_tokens=5)
    assert response.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("side", ["left", "right"])
def test_pages_of_a_cut_prompt_have_the_names_of_an_equal_prompt(
    served: Running, side: str
) -> None:
    text = "say " + "abcdefghij" * 30
    fields = {"truncate_prompt_tokens": 100, "truncation_side": side}
    ask(served, "completions", prompt=text, n=2, **fields)
    cut = served.controllers[0].seen[-2:]
    kept = text[-100:] if side == "left" else text[:100]
    ask(served, "completions", prompt=kept)
    equal = served.controllers[0].seen[-1]
    assert len(equal.hashes) == 16 * (100 // 16)
    assert {(submit.tokens, submit.hashes) for submit in (*cut, equal)} == {
        (equal.tokens, equal.hashes)
    }


def test_special_tokens_are_added_on_request(running_with: Any, make_hello: Any) -> None:
    text = json.loads(byte_level_tokenizer())
    start = {"id": "<|start|>", "ids": [START], "tokens": ["<|start|>"]}
    own, pair = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    first = {"SpecialToken": {"id": "<|start|>", "type_id": 0}}
    text["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, own],
        "pair": [first, own, pair],
        "special_tokens": {"<|start|>": start},
    }
    running: Running = running_with()
    running.open(tokenizer=json.dumps(text).encode())
    letters = {
        token: ord(letter) for letter, token in text["model"]["vocab"].items() if letter < "~"
    }
    for path, usual in (("completions", 1), ("chat/completions", 0)):
        prompt = {"prompt": "say abcdef"} if path == "completions" else {"messages": [QUESTION]}
        options: tuple[dict[str, Any], ...] = ({}, {"add_special_tokens": True})
        counts = []
        for fields in (*options, {"add_special_tokens": False}):
            counts.append(ask(running, path, **fields).json()["usage"]["prompt_tokens"])
            tokens = running.http.post("/tokenize", json=fields | prompt).json()
            assert tokens["count"] == counts[-1]
        assert [count - counts[2] for count in counts] == [usual, 1, 0]
    for kept, side, expected in (
        (4, "left", [START, *b"abc"]),
        (1, "left", [*b"c"]),
        (3, "right", [START, *b"sa"]),
    ):
        fields = {"prompt": "say abc", "truncate_prompt_tokens": kept, "truncation_side": side}
        ask(running, "completions", **fields)
        assert [letters.get(token, token) for token in seen(running)] == expected


# --- outputs --------------------------------------------------------------------------------------


def test_a_chat_has_up_to_64_choices(served: Running) -> None:
    assert len(ask(served, n=64, max_tokens=9).json()["choices"]) == 64
    assert ask(served, n=65).json()["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("path", "kind"), [("chat/completions", "chatcmpl"), ("completions", "cmpl")]
)
def test_a_request_may_name_itself(served: Running, path: str, kind: str) -> None:
    response = ask(served, path, request_id="mine")
    assert response.json()["id"] == f"{kind}-mine" and response.headers["x-request-id"] == "mine"
    assert response.json()["x_medha"]["request_id"] == response.headers["x-medha-request-id"]
    (first, *_) = chunks(served, path, request_id="mine")
    assert first["id"] == f"{kind}-mine"
