"""A rolling update to another tokenizer: both kinds of replicas serve, and nothing is mixed up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest

Routers = Callable[..., Any]
Eventually = Callable[..., None]
PATIENT_S = 30.0


def ask(running: Any, word: str) -> str:
    answer = running.client.completions.create(
        model="tiny", prompt=f"say {word}", max_tokens=40, timeout=PATIENT_S
    )
    text: str = answer.choices[0].text
    return text


def asked_by_others(running: Any, words: list[str]) -> tuple[list[threading.Thread], list[str]]:
    """Clients on threads of their own, and the answers as they come."""
    found: list[str] = []
    clients = [
        threading.Thread(target=lambda each=each: found.append(ask(running, each)))
        for each in words
    ]
    for client in clients:
        client.start()
    return clients, found


def serves(running: Any, name: str) -> bool:
    """The replica may be placed upon, its tokenizer known."""
    page = running.ops.get("/debug/queue").json()["tiny"]
    return name in [each["name"] for each in page["replicas"] if each["open"]]


def joined(running: Any, eventually: Eventually, **changes: Any) -> Any:
    """A second replica `r1` of another edition, once it serves."""
    new = running.join("r1", **changes)
    eventually(lambda: serves(running, "r1"), PATIENT_S)
    return new


@pytest.mark.parametrize("change", ["tokenizer", "page_tokens", "checkpoint"])
def test_both_editions_serve_each_with_tokens_of_its_own(
    running_with: Routers, eventually: Eventually, turned_json: bytes, change: str
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    values = {"tokenizer": turned_json, "page_tokens": 32, "checkpoint": "of other weights"}
    new = joined(running, eventually, **{change: values[change]})
    assert new.rejected == [] and old.rejected == []
    new.emitting.clear()
    clients, found = asked_by_others(running, ["first"])  # of two that are idle, the latest
    eventually(lambda: new.running != (), PATIENT_S)
    assert ask(running, "second") == "second"  # who is busier waits its turn
    assert len(old.seen) == 1
    new.emitting.set()
    clients[0].join(PATIENT_S)
    assert found == ["first"]
    words = [f"word number {each}" for each in range(24)]
    clients, found = asked_by_others(running, words)
    for client in clients:
        client.join(PATIENT_S)
    assert sorted(found) == sorted(words)


def test_what_waits_for_the_last_of_the_old_edition_goes_on_in_the_new_one(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    old.granting = False
    clients, found = asked_by_others(running, ["one", "two", "three"])
    page = running.ops.get
    eventually(lambda: page("/debug/queue").json()["tiny"]["waiting"] == 3, PATIENT_S)
    new = joined(running, eventually, tokenizer=turned_json)
    old.draining = True
    for client in clients:
        client.join(PATIENT_S)
    assert sorted(found) == ["one", "three", "two"]
    assert old.seen == [] and len(new.seen) == 3
    old.die()
    assert ask(running, "four") == "four"


def test_what_has_begun_is_finished_where_it_began(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True)
    old = running.open("r0")
    old.emitting.clear()
    clients, found = asked_by_others(running, ["a longer story"])
    eventually(lambda: old.running != (), PATIENT_S)
    new = joined(running, eventually, tokenizer=turned_json)
    old.draining = True
    eventually(lambda: not serves(running, "r0"), PATIENT_S)
    old.emitting.set()
    clients[0].join(PATIENT_S)
    assert found == ["a longer story"] and new.seen == []


def test_no_answer_goes_on_in_another_tokenizer(
    running_with: Routers, eventually: Eventually, turned_json: bytes
) -> None:
    running = running_with(models=(), learn=True, no_replica_timeout_s=1.5)
    old = running.open("r0")
    old.burst = 1
    stream = running.client.completions.create(
        model="tiny", prompt="say " + "a long story " * 150, max_tokens=1950, stream=True,
        timeout=PATIENT_S,
    )  # fmt: skip
    pieces = iter(stream)
    assert next(pieces).choices[0].text == "a"
    old.emitting.clear()
    new = joined(running, eventually, tokenizer=turned_json)
    old.die()
    with pytest.raises(openai.APIError, match="the replicas of this model are gone"):
        list(pieces)
    assert new.seen == []


def test_an_edition_whose_tokenizer_does_not_load_is_refused_and_the_old_one_serves_on(
    running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True)
    running.open("r0")
    broken = running.join("r1", tokenizer=b'{"not": "a tokenizer"}')
    eventually(lambda: broken.rejected, PATIENT_S)
    assert "the tokenizer of tiny does not load" in broken.rejected[0]
    for _ in range(3):
        said = len(broken.rejected)
        broken.tell(broken.hello)
        eventually(lambda said=said: len(broken.rejected) > said, PATIENT_S)
    assert broken.welcomes == 0  # no word makes it ready, so that nothing is drained for it
    assert ask(running, "hello") == "hello"


def test_log_probabilities_are_spelt_by_the_edition_that_made_them(
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
