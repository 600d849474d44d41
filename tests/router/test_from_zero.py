"""What waits when the last replica of a model goes is held for the next one, and asks for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from medha.adapters.prometheus import Metrics
from medha.config import RouterModel
from medha.demand import Demand
from medha.errors import MedhaError, Refusal, RequestError
from medha.messages import Load, LoadReport, ModelDemand, RouterDemand
from medha.request import Request, Slo, SloClass
from medha_router.detokenizer import Vocabulary
from medha_router.encoding import Prompt
from medha_router.fleet import Fleet, Replica
from medha_router.ledger import Ledger
from medha_router.metering import Meter
from medha_router.models import ServedModel
from medha_router.openai import read_completion
from medha_router.runs import Answer, Run
from medha_router.streams import Output

EVENTUALLY_S = 30.0
CLASSES = (SloClass(name="default", slo=Slo(ttft_floor_s=20.0, tpot_s=5.0)),)


def model(hold_s: float) -> RouterModel:
    return RouterModel(name="tiny", max_context_tokens=2048, classes=CLASSES, hold_s=hold_s)


def demand_of(running: Any) -> ModelDemand:
    content = running.ops.get("/demand").content
    return msgspec.json.decode(content, type=RouterDemand).models[0]


class Client(threading.Thread):
    """Reads one stream to its end."""

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


def test_what_waits_when_the_last_replica_drains_is_held_for_another(
    running_with: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    running = running_with(models=(model(hold_s=60.0),), no_replica_timeout_s=0.05)
    last = running.open("r0")
    last.granting = False
    clients = [Client(running, "hi") for _ in range(3)]
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


def test_what_ran_when_the_last_replica_died_is_held_for_another(
    running_with: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    running = running_with(models=(model(hold_s=60.0),), no_replica_timeout_s=0.05)
    last = running.open("r0")
    client = Client(running, "a" * 60)
    eventually(lambda: len(client.text) > 10, EVENTUALLY_S)
    last.emitting.clear()
    last.die()
    eventually(lambda: demand_of(running).held == 1, EVENTUALLY_S)
    running.open("r1")
    client.join(EVENTUALLY_S)
    assert client.text == "a" * 60


class Waiting:
    """One run that waits since 0 s in a router whose only replica opens and closes, in virtual
    time: at most 120 s for room, and 30 s for a replica."""

    def __init__(self, hello: Any, tokenizer: bytes, hold_s: float) -> None:
        self.model, fleet = ServedModel(model(hold_s)), Fleet(None, timeout_s=5.0)
        replica = fleet.greet(b"r0", hello, 0.0)
        assert isinstance(replica, Replica)
        load = Load(free_pages=(64,), total_pages=(64,), page_tokens=16)
        fleet.report(replica, LoadReport(load), 0.0)
        self._replica, vocabulary = replica, Vocabulary(tokenizer)
        self.model.met(replica).vocabulary = vocabulary
        self.demand = Demand()
        meter = Meter(Metrics("router"), self.demand)
        self._ledger = Ledger(
            {"tiny": self.model}, fleet, meter, lambda peer, message: True, lambda: None
        )
        ask = read_completion(b'{"model": "tiny", "prompt": "say ok"}')
        self.answer = Answer(
            id="a", ask=ask, slo_class=CLASSES[0], tenant="", arrival_s=0.0, created=0
        )
        run = Run(
            answer=self.answer, index=0, prompt=Prompt(bytes(16), b""), salt=b"",
            request=Request(id="a.0", arrival_s=0.0, prompt_tokens=4), sampling=ask.sampling,
            output=Output(vocabulary), edition=replica.edition,
            idle_tpot_s=0.0,
        )  # fmt: skip
        self.answer.runs.append(run)
        self.model.dispatch.resume(run, 0.0)
        self._ledger.add(self.answer)
        self.opens(0.0)

    def opens(self, now: float) -> None:
        self.model.opened([self._replica], now)

    def closes(self, now: float) -> None:
        self.model.opened([], now)

    def fails(self, error: MedhaError) -> None:
        self._ledger.fail(self.answer, error, 0.0)

    def refused(self, now: float) -> str:
        """Why it waits no longer; empty while it does."""
        self._ledger.expire(now, 120.0, 30.0)
        if len(self._ledger):
            return ""
        with pytest.raises(Refusal) as refusal:
            asyncio.run(self.answer.next(0.0))
        return refusal.value.code


@pytest.fixture
def waiting(make_hello: Callable[..., Any], byte_level_json: bytes) -> Callable[[float], Waiting]:
    return lambda hold_s: Waiting(make_hello(), byte_level_json, hold_s)


def test_it_waits_as_long_as_the_model_says_for_a_replica_from_zero(
    waiting: Callable[[float], Waiting],
) -> None:
    one = waiting(600.0)
    assert one.refused(100.0) == ""
    one.closes(100.0)
    assert one.refused(131.0) == one.refused(699.0) == ""
    assert one.refused(701.0) == "no_replica"


def test_time_without_a_replica_is_no_time_in_the_queue_nor_the_other_way_round(
    waiting: Callable[[float], Waiting],
) -> None:
    one = waiting(0.0)
    one.closes(100.0)
    assert one.refused(129.0) == ""
    one.opens(129.0)
    assert one.refused(248.0) == ""
    assert one.refused(250.0) == "overloaded"


def test_who_waited_for_a_replica_from_zero_had_to_be_late(
    waiting: Callable[[float], Waiting],
) -> None:
    one = waiting(600.0)
    one.closes(1.0)
    assert one.refused(100.0) == ""
    one.opens(101.0)
    assert one.refused(300.0) == "overloaded"
    assert one.demand.of("tiny", 300.0).classes == ()


def test_of_a_request_that_cannot_be_made_into_tokens_anew_no_word_is_logged(
    waiting: Callable[[float], Waiting], caplog: pytest.LogCaptureFixture
) -> None:
    """A chat template that refuses messages may repeat them."""
    waiting(0.0).fails(RequestError("messages refused: quokka", code="invalid_value"))
    assert "failed: invalid_value" in caplog.text and "quokka" not in caplog.text
