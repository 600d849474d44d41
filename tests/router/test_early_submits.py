"""Requests that go to a replica together with their heads, and begin there without a Grant."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import openai
import pytest

from medha.config import RouterModel
from medha.messages import Accepted, Failed

BODY = {"model": "tiny", "prompt": "please say hello", "max_tokens": 40}


def ask(running: Any) -> str:
    return str(running.client.completions.create(**BODY).choices[0].text)


def test_a_replica_begins_an_early_request_without_a_grant(alone: Any) -> None:
    controller = alone.open()
    controller.takes_early, controller.granting = True, False
    assert [ask(alone) for _ in range(3)] == ["hello"] * 3
    assert len(controller.seen) == 3 and controller.aborted == []


def test_a_long_prompt_goes_only_where_it_is_granted(running_with: Any, eventually: Any) -> None:
    running = running_with(models=(RouterModel(name="tiny", max_context_tokens=1 << 16),))
    controller = running.open(max_context_tokens=1 << 16)
    controller.takes_early, controller.granting = True, False
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = {**BODY, "prompt": "long " * 2000 + "please say hello"}
        answer = pool.submit(running.client.completions.create, **long)
        eventually(lambda: len(controller.heads) == 1)
        assert controller.seen == []
        controller.granting = True
        assert answer.result().choices[0].text == "hello"


def test_a_request_that_moved_is_aborted_where_it_begins_too_late(
    alone: Any, eventually: Any
) -> None:
    late = alone.open("r0")
    late.granting = False
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, alone)
        eventually(lambda: len(late.heads) == 1)
        name = late.heads[0].id
        late.draining = True
        other = alone.open("r1")
        assert answer.result() == "hello"
    late.tell(Accepted(name))
    eventually(lambda: late.aborted == [name])
    assert [submit.id for submit in other.seen] == [name] and late.seen == []


def test_an_early_request_that_fails_is_reported(alone: Any) -> None:
    controller = alone.open()
    controller.takes_early, controller.granting = True, False
    controller.fails = Failed("", "invalid_request", "broken")
    with pytest.raises(openai.InternalServerError):
        ask(alone)
    assert len(controller.seen) == 1
