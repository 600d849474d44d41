"""A rolling update to another tokenizer: both versions serve, each with its own tokens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
from tests.router.conftest import HERMES

from medha.messages import Grant

Routers = Callable[..., Any]
Eventually = Callable[..., None]
PATIENT_S = 30.0


def ask(running: Any, word: str) -> str:
    answer = running.client.completions.create(
        model="tiny", prompt=f"say {word}", max_tokens=40, timeout=PATIENT_S
    )
    text: str = answer.choices[0].text
    return text


def ask_in_threads(running: Any, words: list[str]) -> tuple[list[threading.Thread], list[str]]:
    """Start clients on threads; return them and the list of their texts."""
    texts: list[str] = []
    clients = [
        threading.Thread(target=lambda word=word: texts.append(ask(running, word)))
        for word in words
    ]
    for client in clients:
        client.start()
    return clients, texts


def serves(running: Any, name: str) -> bool:
    """Return True if the replica takes requests."""
    page = running.ops.get("/debug/queue").json()["tiny"]
    return name in [replica["name"] for replica in page["replicas"] if replica["open"]]


def joined(running: Any, eventually: Eventually, **changes: Any) -> Any:
    """Start a replica `r1` of another version, and wait until it serves."""
    new = running.join("r1", **changes)
    eventually(lambda: serves(running, "r1"), PATIENT_S)
    return new


@pytest.mark.parametrize("change", ["tokenizer", "page_tokens", "checkpoint"])
def test_both_versions_serve_each_with_its_own_tokens(
    running_with: Routers, eventually: Eventually, turned_json: bytes, change: str
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    values = {"tokenizer": turned_json, "page_tokens": 32, "checkpoint": "other weights"}
    new = joined(running, eventually, **{change: values[change]})
    assert new.rejected == [] and old.rejected == []
    new.emitting.clear()
    clients, texts = ask_in_threads(running, ["first"])  # of two idle versions, the latest
    eventually(lambda: new.running != (), PATIENT_S)
    assert ask(running, "second") == "second"  # the less busy version serves
    assert len(old.seen) == 1
    new.emitting.set()
    clients[0].join(PATIENT_S)
    assert texts == ["first"]
    words = [f"word number {number}" for number in range(24)]
    clients, texts = ask_in_threads(running, words)
    for client in clients:
        client.join(PATIENT_S)
    assert sorted(texts) == sorted(words)


def test_requests_waiting_for_the_last_old_replica_move_to_the_new_version(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    old.granting = False
    clients, texts = ask_in_threads(running, ["one", "two", "three"])
    page = running.ops.get
    eventually(lambda: page("/debug/queue").json()["tiny"]["waiting"] == 3, PATIENT_S)
    new = joined(running, eventually, tokenizer=turned_json)
    old.draining = True
    for client in clients:
        client.join(PATIENT_S)
    assert sorted(texts) == ["one", "three", "two"]
    assert old.seen == [] and len(new.seen) == 3
    old.die()
    assert ask(running, "four") == "four"


def test_calls_are_read_in_the_form_of_the_version_that_writes_them(
    running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0", template=HERMES)
    old.granting = False
    call = "<tool_call><function=f></function></tool_call>"
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"say {call}"}],
    }
    body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    answers: list[Any] = []
    create = running.client.chat.completions.create
    client = threading.Thread(target=lambda: answers.append(create(**body)))
    client.start()
    page = running.ops.get
    eventually(lambda: page("/debug/queue").json()["tiny"]["waiting"] == 1, PATIENT_S)
    joined(running, eventually, template=HERMES.replace(b'{"name": "', b"<function={{ '' }}"))
    old.draining = True
    client.join(PATIENT_S)
    assert [call.function.name for call in answers[0].choices[0].message.tool_calls] == ["f"]


def test_an_output_is_read_as_its_own_version_writes_it_though_another_began_earlier(
    running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0", template=HERMES)
    old.granting = False
    call = "<tool_call><function=f></function></tool_call>"
    chunks: list[Any] = []

    def read() -> None:
        chunks.extend(
            running.client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": f"say {call}"}],
                tools=[{"type": "function", "function": {"name": "f"}}],
                n=2,
                stream=True,
            )
        )

    client = threading.Thread(target=read)
    client.start()
    eventually(lambda: len(old.heads) == 2, PATIENT_S)
    first = old.heads[0].id
    old.tell(Grant((first,)))
    eventually(lambda: chunks, PATIENT_S)
    joined(running, eventually, template=HERMES.replace(b'{"name": "', b"<function={{ '' }}"))
    old.draining = True
    client.join(PATIENT_S)
    deltas = [(chunk.choices[0].index, chunk.choices[0].delta) for chunk in chunks]
    called = {
        index: call.function.name
        for index, delta in deltas
        for call in delta.tool_calls or ()
        if call.function.name
    }
    assert called == {1 - int(first[-1]): "f"}  # the old template teaches another form


def test_a_request_with_output_finishes_on_its_version(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    old.emitting.clear()
    clients, texts = ask_in_threads(running, ["a longer story"])
    eventually(lambda: old.running != (), PATIENT_S)
    new = joined(running, eventually, tokenizer=turned_json)
    old.draining = True
    eventually(lambda: not serves(running, "r0"), PATIENT_S)
    old.emitting.set()
    clients[0].join(PATIENT_S)
    assert texts == ["a longer story"] and new.seen == []


def test_no_output_continues_with_another_tokenizer(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True, no_replica_timeout_s=1.5)
    old = running.open("r0")
    old.burst = 1
    stream = running.client.completions.create(
        model="tiny",
        prompt="say " + "a long story " * 150,
        max_tokens=1950,
        stream=True,
        timeout=PATIENT_S,
    )
    pieces = iter(stream)
    assert next(pieces).choices[0].text == "a"
    old.emitting.clear()
    new = joined(running, eventually, tokenizer=turned_json)
    old.die()
    with pytest.raises(openai.APIError, match="the replicas of this model are gone"):
        list(pieces)
    assert new.seen == []


def test_a_version_with_a_broken_tokenizer_is_rejected_and_the_old_one_serves_on(
    running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True)
    running.open("r0")
    broken = running.join("r1", tokenizer=b'{"not": "a tokenizer"}')
    eventually(lambda: broken.rejected, PATIENT_S)
    assert "the tokenizer of tiny does not load" in broken.rejected[0]
    for _ in range(3):
        count = len(broken.rejected)
        broken.tell(broken.hello)
        eventually(lambda count=count: len(broken.rejected) > count, PATIENT_S)
    assert broken.welcomes == 0  # it never becomes ready, so that no replica is drained for it
    assert ask(running, "hello") == "hello"


def test_log_probabilities_use_the_vocabulary_of_their_version(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    joined(running, eventually, tokenizer=turned_json)
    old.draining = True
    eventually(lambda: not serves(running, "r0"), PATIENT_S)
    answer = running.client.completions.create(
        model="tiny", prompt="say hey", max_tokens=20, logprobs=1, timeout=PATIENT_S
    )
    assert "".join(answer.choices[0].logprobs.tokens) == "hey"
