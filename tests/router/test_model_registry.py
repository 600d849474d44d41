"""A router without configured models learns them from replicas, and forgets them again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from tests.router.conftest import PATIENT_S

from medha.config import QueueOrder, RouterConfig, RouterModel
from medha.errors import SpecError
from medha.messages import Hello
from medha.request import Request, Slo, SloClass
from medha_router.app import opened
from medha_router.models import ModelRegistry
from medha_router.tokenization.pool import TokenizerPool

Routers = Callable[..., Any]
Hellos = Callable[..., Hello]


def names_of(running: Any) -> list[str]:
    return [entry.id for entry in running.client.models.list()]


def test_a_model_is_served_once_a_replica_of_it_joins(running_with: Routers) -> None:
    running = running_with(models=(), learn=True, learn_s=0.0)
    assert running.ops.get("/readyz").status_code == 200 and names_of(running) == []
    with pytest.raises(openai.NotFoundError, match="this server has none yet"):
        running.client.completions.create(model="tiny", prompt="say hello")
    running.open()
    assert names_of(running) == ["tiny"]
    answer = running.client.completions.create(model="tiny", prompt="say hello", max_tokens=20)
    assert answer.choices[0].text == "hello"
    assert running.http.get("/v1/models/tiny").json()["max_model_len"] == 4096


def test_a_router_that_just_started_holds_requests_for_models_to_come(
    running_with: Routers,
) -> None:
    running = running_with(models=(), learn=True, learn_s=60.0)
    texts: list[str] = []

    def ask() -> None:
        answer = running.client.completions.create(model="tiny", prompt="say hi", max_tokens=9)
        texts.append(answer.choices[0].text)

    client = threading.Thread(target=ask)
    client.start()
    running.open()
    client.join(PATIENT_S)
    assert texts == ["hi"]


def test_the_latest_classes_and_the_lowest_context_limit_hold(
    running_with: Routers, eventually: Callable[..., None]
) -> None:
    running = running_with(models=(), learn=True)
    running.open("r0")
    fresh = (SloClass(name="default"), SloClass(name="gold", slo=Slo(ttft_floor_s=20.0)))
    newer = running.join("r1", classes=fresh, max_context_tokens=1000)
    page = running.ops.get

    def has_load() -> bool:
        replicas = {
            entry["name"]: entry for entry in page("/debug/queue").json()["tiny"]["replicas"]
        }
        return "r1" in replicas and replicas["r1"]["load"] is not None

    eventually(has_load, 20.0)
    assert newer.rejected == []

    def limit() -> int:
        return int(running.http.get("/v1/models/tiny").json()["max_model_len"])

    eventually(lambda: limit() == 1000, 20.0)
    answer = running.client.completions.create(
        model="tiny", prompt="say ok", max_tokens=9, extra_headers={"x-medha-class": "gold"}
    )
    assert answer.choices[0].text == "ok"
    newer.die()
    eventually(lambda: limit() == 4096, 20.0)


def test_a_model_is_forgotten_some_time_after_its_last_replica(
    running_with: Routers, eventually: Callable[..., None]
) -> None:
    running = running_with(models=(), learn=True, learn_s=0.0, forget_model_s=0.5)
    running.open("r0").die()
    assert names_of(running) == ["tiny"]  # it may come back
    eventually(lambda: names_of(running) == [], 30.0)
    running.open("r0")
    assert names_of(running) == ["tiny"]


def test_a_configured_model_is_neither_changed_nor_forgotten(make_hello: Hellos) -> None:
    models = ModelRegistry((RouterModel(name="tiny", max_context_tokens=100),), forget_s=1.0)
    models.learn(make_hello(), others=False)
    models.learn(make_hello(model="other"), others=False)
    assert models["tiny"].config.max_context_tokens == 100 and set(models) == {"tiny", "other"}
    for now in (0.0, 5.0):
        models.forget(frozenset(), now)
    assert set(models) == {"tiny"}


class Lost(msgspec.Struct, frozen=True):
    """A request whose replica is gone."""

    request: Request
    version: str = ""
    hashes: bytes = b""
    output_tokens: int = 0
    moves: int = 1


def request_of(id: str, deadline_s: float, work_s: float) -> Request:
    return Request(id=id, arrival_s=0.0, prompt_tokens=9, ttft_deadline_s=deadline_s, work_s=work_s)


def test_the_latest_hello_decides_on_the_order_of_the_queue(make_hello: Hellos) -> None:
    configured = RouterModel(name="tiny", max_context_tokens=4096)
    for models in (ModelRegistry((configured,), forget_s=1.0), ModelRegistry((), forget_s=1.0)):
        for policy, first in (("edf", "due"), ("srpf", "small"), ("edf", "due")):
            models.learn(make_hello(order=QueueOrder(policy=policy)), others=True)
            dispatcher: Any = models["tiny"].dispatcher
            for name, deadline_s, work_s in (("due", 10.0, 5.0), ("small", 20.0, 1.0)):
                dispatcher.resume(Lost(request_of(name, deadline_s, work_s)), now=100.0)
            assert dispatcher.waiting(100.0)[0].id == first


def test_a_model_without_a_default_class_takes_its_first(make_hello: Hellos) -> None:
    models = ModelRegistry((), forget_s=1.0)
    hello = make_hello()
    models.learn(msgspec.structs.replace(hello, classes=hello.classes[1:]), others=False)
    assert models["tiny"].config.default_class == "eager"


def test_a_router_without_any_model_does_not_start(tokens: TokenizerPool) -> None:
    config = RouterConfig(port=0, ops_port=0, fleet_bind="tcp://127.0.0.1:0")

    async def start() -> None:
        async with opened(config, tokens):
            raise AssertionError("it started")

    with pytest.raises(SpecError, match="models is empty: must name a model where"):
        asyncio.run(start())


def test_the_first_names_are_those_of_the_whole_list() -> None:
    adapters: dict[str, tuple[str, ...]] = {"b": (), "a": ("z", "c"), "a-b": ("y",), "a:c": ()}
    models = ModelRegistry(
        [
            RouterModel(name=name, max_context_tokens=9, adapters=held)
            for name, held in adapters.items()
        ],
        forget_s=1.0,
    )
    names = models.names
    assert names == ("a", "a-b", "a-b:y", "a:c", "a:z", "b")
    assert models.first_names(3) == (["a", "a-b", "a-b:y"], 6)
    assert models.first_names(20) == (list(names), 6)
