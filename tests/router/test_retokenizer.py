"""Requests whose version is gone are encoded again, a few at the same time."""

from __future__ import annotations

import asyncio
import dataclasses
import types
from collections.abc import Callable
from typing import Any, cast

import pytest

from medha.config import RouterModel
from medha.errors import MedhaError, Refusal, RequestError
from medha.messages import Hello
from medha.request import Request
from medha_router.models import ServedModel
from medha_router.request_table import RouterState
from medha_router.service import Service
from medha_router.tokenization.retokenize import LANES, RECONNECT_S, Retokenizer


@dataclasses.dataclass(frozen=True)
class Replica:
    """A replica as a model reads it."""

    version: str
    open: bool


@dataclasses.dataclass(eq=False)
class Generation:
    """A generation as the retokenizer reads it."""

    client_request: ClientRequest
    request: Request
    version: str = "old"
    hashes: bytes = b""
    output_tokens: int = 0
    moves: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        self.output = types.SimpleNamespace(tokens=[])

    @property
    def id(self) -> str:
        return self.request.id


class ClientRequest:
    """A client request of two outputs."""

    adapter = ""
    params = types.SimpleNamespace(n=2)

    def __init__(self, name: str) -> None:
        self.id = name
        requests = [
            Request(id=f"{name}.{index}", arrival_s=0.0, prompt_tokens=4) for index in range(2)
        ]
        self.generations = [Generation(self, request) for request in requests]


class Fleet:
    """Requests that wait for a closed version, a version that serves, and a slow tokenizer."""

    def __init__(self, hello: Hello, count: int) -> None:
        self.encoding = self.most_encoding = 0
        self.encoded: list[str] = []
        self.failed: list[str] = []
        self.refused: set[str] = set()
        self.fault: MedhaError | None = None
        model = ServedModel(RouterModel(name="tiny", max_context_tokens=4096))
        for key in ("old", "new"):
            version: Any = model.version_for(
                cast(Any, types.SimpleNamespace(version=key, hello=hello))
            )
            version.vocabulary = object()
        serving: Any = [Replica("old", True), Replica("new", True)]
        model.update_replicas(serving, 0.0)
        self.requests = [ClientRequest(f"r{number}") for number in range(count)]
        for request in self.requests:
            for generation in request.generations:
                model.dispatcher.resume(cast(Any, generation), 0.0)
        model.update_replicas(cast(Any, [Replica("old", False), Replica("new", True)]), 0.0)
        self.dispatcher = model.dispatcher
        state = types.SimpleNamespace(
            models={"tiny": model}, requests=self, clock=lambda: 2.0 * RECONNECT_S
        )
        self.retokenizer = Retokenizer(cast(RouterState, state), cast(Service, self))

    async def encode_for(self, request: ClientRequest, model: Any, version: Any) -> list[str]:
        assert version.key == "new"
        self.encoding += 1
        self.most_encoding = max(self.most_encoding, self.encoding)
        await asyncio.sleep(0)
        self.encoding -= 1
        self.encoded.append(request.id)
        if self.fault is not None:
            raise self.fault
        if request.id in self.refused:
            raise RequestError("too long", code="context_length_exceeded", param="prompt")
        return ["prompt"]

    def change_version(self, generation: Generation, model: Any, version: Any, prompt: str) -> None:
        generation.version = version.key

    def changed(self) -> None:
        pass

    def fail(self, request: ClientRequest, error: Exception, now: float) -> None:
        self.failed.append(request.id)
        for generation in request.generations:
            self.dispatcher.drop(generation.id, None, now)

    async def tick(self) -> None:
        self.retokenizer.tick()
        for _ in range(len(self.requests) + 9):
            await asyncio.sleep(0)


@pytest.fixture
def fleet(make_hello: Callable[..., Hello]) -> Fleet:
    return Fleet(make_hello(), 5 * LANES)


def test_all_stranded_requests_move_a_few_at_the_same_time(fleet: Fleet) -> None:
    asyncio.run(fleet.tick())
    names = [request.id for request in fleet.requests]
    assert sorted(fleet.encoded) == sorted(names)
    assert fleet.most_encoding == LANES
    assert fleet.dispatcher.waiting_for("new") == 2 * len(names)
    assert not fleet.dispatcher.waiting_for("old")


def test_requests_that_ended_before_their_turn_are_not_encoded(fleet: Fleet) -> None:
    async def run() -> None:
        fleet.retokenizer.tick()
        for request in fleet.requests[LANES:]:
            for generation in request.generations:
                fleet.dispatcher.drop(generation.id, None, 1.0)
            request.generations = []
        await fleet.tick()

    asyncio.run(run())
    assert len(fleet.encoded) == LANES
    assert len(fleet.dispatcher) == 2 * LANES


def test_a_request_that_no_longer_fits_fails_and_the_others_move(fleet: Fleet) -> None:
    fleet.refused = {"r3", "r30"}
    asyncio.run(fleet.tick())
    assert sorted(fleet.failed) == ["r3", "r30"]
    assert fleet.dispatcher.waiting_for("new") == 2 * (len(fleet.requests) - 2)


def test_a_second_tick_encodes_nothing_twice(fleet: Fleet) -> None:
    async def run() -> None:
        fleet.retokenizer.tick()
        await asyncio.sleep(0)
        await fleet.tick()
        await fleet.tick()

    asyncio.run(run())
    assert len(fleet.encoded) == len(fleet.requests)


def test_a_cause_that_holds_requests_back_is_logged_once_with_their_number(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        for fault in ("no replica", "no replica", "no tokenizer", "", "no replica"):
            fleet.fault = Refusal("no_replica", fault) if fault else None
            fleet.refused = {request.id for request in fleet.requests[1:]} if not fault else set()
            await fleet.tick()

    asyncio.run(run())
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert messages == [
        f"{len(fleet.requests)} requests of tiny cannot move to another version yet: {cause}"
        for cause in ("no replica", "no tokenizer")
    ]
