"""Requests that lose the last replica of their model are held for the next one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tests.support.generations import new_generation

from medha.adapters.prometheus import Metrics
from medha.config import RouterConfig, RouterModel
from medha.errors import MedhaError, Refusal, RequestError
from medha.fleet.demand import DemandWindow
from medha.messages import Load, LoadReport, ModelDemand, RouterDemand
from medha.request import Slo, SloClass
from medha_router.api_errors import StreamBroken
from medha_router.generation import ClientRequest, Generation
from medha_router.models import ServedModel
from medha_router.replicas import ConnectedReplica, ReplicaTable
from medha_router.request_table import RequestTable
from medha_router.router_metrics import RouterMetrics
from medha_router.tokenization.detokenizer import Vocabulary

EVENTUALLY_S = 30.0
CLASSES = (SloClass(name="default", slo=Slo(ttft_floor_s=20.0, tpot_s=5.0)),)


def model(hold_s: float) -> RouterModel:
    return RouterModel(name="tiny", max_context_tokens=2048, classes=CLASSES, hold_s=hold_s)


def demand_of(running: Any) -> ModelDemand:
    content = running.ops.get("/demand").content
    return msgspec.json.decode(content, type=RouterDemand).models[0]


class StreamReader(threading.Thread):
    """Reads a stream to its end."""

    def __init__(self, running: Any, words: str) -> None:
        super().__init__(daemon=True)
        self._running, self._words, self.text = running, words, ""
        self.start()

    def run(self) -> None:
        stream = self._running.client.completions.create(
            model="tiny", prompt="say " + self._words, max_tokens=80, stream=True, timeout=60
        )
        for chunk in stream:
            self.text += chunk.choices[0].text


def test_waiting_requests_are_held_when_the_last_replica_drains(
    running_with: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    running = running_with(models=(model(hold_s=60.0),), no_replica_timeout_s=0.05)
    last = running.open("r0")
    last.granting = False
    clients = [StreamReader(running, "hi") for _ in range(3)]
    eventually(lambda: len(last.heads) == 3, EVENTUALLY_S)
    assert (demand_of(running).waiting, demand_of(running).held) == (3, 0)
    last.draining = True
    eventually(lambda: demand_of(running).held == 3, EVENTUALLY_S)
    assert demand_of(running).waiting == 3
    running.open("r1")
    for client in clients:
        client.join(EVENTUALLY_S)
    assert [client.text for client in clients] == ["hi"] * 3
    assert demand_of(running).held == 0


def test_running_requests_are_held_when_the_last_replica_dies(
    running_with: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    running = running_with(models=(model(hold_s=60.0),), no_replica_timeout_s=0.05)
    last = running.open("r0")
    client = StreamReader(running, "a" * 60)
    eventually(lambda: len(client.text) > 10, EVENTUALLY_S)
    last.emitting.clear()
    last.die()
    eventually(lambda: demand_of(running).held == 1, EVENTUALLY_S)
    running.open("r1")
    client.join(EVENTUALLY_S)
    assert client.text == "a" * 60


class Waiting:
    """A generation that waits since 0 s for the only replica, which opens and closes, in virtual
    time: at most 120 s for room, and 30 s for a replica."""

    def __init__(self, hello: Any, tokenizer: bytes, hold_s: float) -> None:
        self.model, replicas = ServedModel(model(hold_s)), ReplicaTable(None, timeout_s=5.0)
        replica = replicas.greet(b"r0", hello, 0.0)
        assert isinstance(replica, ConnectedReplica)
        load = Load(free_pages=(64,), total_pages=(64,), page_tokens=16)
        replica.take(LoadReport(load), 0.0)
        self._replica, vocabulary = replica, Vocabulary(tokenizer)
        self._vocabulary = vocabulary
        self.model.version_for(replica).vocabulary = vocabulary
        self.demand = DemandWindow()
        metrics = RouterMetrics(Metrics("router"), self.demand)
        self._requests = RequestTable(
            {"tiny": self.model}, replicas, metrics, lambda peer, message: True, lambda: None
        )
        generation = new_generation(CLASSES, vocabulary, replica.version)
        self.client_request = generation.client_request
        self.generation = generation
        self.model.dispatcher.resume(generation, 0.0)
        self._requests.add(self.client_request)
        self.opens(0.0)

    def opens(self, now: float) -> None:
        self.model.update_replicas([self._replica], now)

    def closes(self, now: float) -> None:
        self.model.update_replicas([], now)

    def another(self, name: str) -> ClientRequest:
        """Add a request that waits as long."""
        generation = new_generation(CLASSES, self._vocabulary, self.generation.version)
        generation.request = msgspec.structs.replace(generation.request, id=f"{name}.0")
        generation.client_request.id = name
        self.model.dispatcher.resume(generation, 0.0)
        self._requests.add(generation.client_request)
        return generation.client_request

    def add_output(self) -> Generation:
        """Add another output to the request."""
        generation = new_generation(CLASSES, self._vocabulary, self.generation.version)
        self.client_request.generations.append(generation)
        return generation

    def cancels(self, client_request: ClientRequest) -> None:
        self._requests.cancel(client_request, 0.0)

    def fails(self, error: MedhaError) -> None:
        self._requests.fail(self.client_request, error, 0.0)

    def moves(self, emitted: int, *, died: bool) -> None:
        """Move after some tokens: the replica died, or may hang."""
        self.generation.output.push((97,) * emitted, ())
        self._requests.requeue(self.generation, 0.0, failed=died, died=died)

    def expire(self, now: float) -> Iterator[None]:
        config = RouterConfig(fleet_bind="", queue_timeout_s=120.0, recovery_timeout_s=30.0)
        return self._requests.expire(now, config)

    def refused(self, now: float) -> str:
        """Return the code of the refusal; empty while the request waits."""
        for _ in self.expire(now):
            pass
        if len(self._requests):
            return ""
        with pytest.raises(Refusal) as refusal:
            asyncio.run(self.client_request.next(0.0))
        return refusal.value.code


@pytest.fixture
def waiting(make_hello: Callable[..., Any], byte_level_json: bytes) -> Callable[[float], Waiting]:
    return lambda hold_s: Waiting(make_hello(), byte_level_json, hold_s)


def test_requests_expire_one_by_one_and_those_that_ended_in_between_do_not(
    waiting: Callable[[float], Waiting],
) -> None:
    request = waiting(600.0)
    cancelled, last = request.another("b"), request.another("c")
    steps, ended = request.expire(121.0), []
    for _ in steps:
        ended.append([waiter.done for waiter in (request.client_request, cancelled, last)])
        if len(ended) == 1:
            request.cancels(cancelled)
    assert ended == [[True, False, False], [True, False, False], [True, False, True]]


def test_a_request_waits_for_the_hold_time_of_its_model(
    waiting: Callable[[float], Waiting],
) -> None:
    request = waiting(600.0)
    assert request.refused(100.0) == ""
    request.closes(100.0)
    assert request.refused(131.0) == request.refused(699.0) == ""
    assert request.refused(701.0) == "no_replica"


def test_a_move_away_from_a_replica_that_may_hang_does_not_count(
    waiting: Callable[[float], Waiting],
) -> None:
    request = waiting(0.0)
    request.moves(20, died=True)
    for _ in range(4):
        request.moves(10, died=False)
    request.moves(0, died=True)
    assert request.refused(0.0) == ""
    request.moves(10, died=True)
    with pytest.raises(StreamBroken, match="2 replicas died"):
        asyncio.run(request.client_request.next(0.0))


def test_the_wait_for_a_replica_and_the_wait_for_room_count_separately(
    waiting: Callable[[float], Waiting],
) -> None:
    request = waiting(0.0)
    request.closes(100.0)
    assert request.refused(129.0) == ""
    request.opens(129.0)
    assert request.refused(248.0) == ""
    assert request.refused(250.0) == "overloaded"


def test_an_output_may_wait_for_room_as_long_as_others_of_its_request_go_on(
    waiting: Callable[[float], Waiting],
) -> None:
    request = waiting(0.0)
    running = request.add_output()
    running.peer = b"r0"
    assert request.refused(1000.0) == ""
    running.peer, running.done, running.last_token_s = None, True, 1000.0
    assert request.refused(1119.0) == ""
    assert request.refused(1121.0) == "overloaded"


def test_a_request_held_for_the_first_replica_is_no_preventable_miss(
    waiting: Callable[[float], Waiting],
) -> None:
    request = waiting(600.0)
    request.closes(1.0)
    assert request.refused(100.0) == ""
    request.opens(101.0)
    assert request.refused(300.0) == "overloaded"
    assert request.demand.of("tiny", 300.0).classes == ()


def test_a_request_that_cannot_be_encoded_again_is_logged_without_its_text(
    waiting: Callable[[float], Waiting], caplog: pytest.LogCaptureFixture
) -> None:
    """A chat template that refuses messages may quote them."""
    waiting(0.0).fails(RequestError("messages refused: quokka", code="invalid_value"))
    assert "failed: invalid_value" in caplog.text and "quokka" not in caplog.text
