"""The router places the requests of a lost replica in turns, and serves others in between."""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from medha.adapters.prometheus import Metrics
from medha.config import RouterModel
from medha.fleet.demand import DemandWindow
from medha.fleet.request_queue import QueuedRequest
from medha.messages import Head, Heads, Hello, Load, LoadReport, RouterMessage, Submit
from medha.request import Request, SloClass
from medha_router.models import ModelRegistry
from medha_router.replica_client import ReplicaClient
from medha_router.replica_link import LinkLoop
from medha_router.replicas import ReplicaTable
from medha_router.request_table import RequestTable, RouterState
from medha_router.router_metrics import RouterMetrics
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.tokenizer_files import FileStore
from medha_router.turns import TURN_S

NAMES, WAITING = ("one", "other"), 12
LOAD = Load(free_pages=(6000,), total_pages=(6000,), page_tokens=16)


class Lost(msgspec.Struct, frozen=True):
    """A request whose replica is gone."""

    request: Request
    version: str
    hashes: bytes = b""
    output_tokens: int = 1
    moves: int = 1

    def submit(self, now: float) -> Submit:
        del now
        return Submit(id=self.request.id, tokens=bytes(36), max_output_tokens=1)


class Fleet:
    """Two models with a replica each, on a clock that goes on by a third of a turn when read."""

    def __init__(self, hello: Hello, prompt_tokens: int = 9) -> None:
        ticks = itertools.count()
        self.clock: Callable[[], float] = lambda: next(ticks) * TURN_S / 3.0
        self.heads: dict[str, int] = {}
        classes = (SloClass(when_infeasible="relegate"),)
        models = [
            RouterModel(name=name, max_context_tokens=4096, classes=classes) for name in NAMES
        ]
        self.models = ModelRegistry(models, forget_s=1e9)
        table, demand = ReplicaTable(None, timeout_s=1e9), DemandWindow()
        metrics = RouterMetrics(Metrics("router"), demand)
        requests = RequestTable(self.models, table, metrics, self._send, lambda: None)
        state = RouterState("router", self.models, table, requests, metrics, self._send, self.clock)
        self.client = ReplicaClient(state, FileStore(None), cast(TokenizerPool, None))
        for name in NAMES:
            own = msgspec.structs.replace(hello, replica=name, model=name)
            greeted: Any = table.greet(name.encode(), own, 0.0)
            self.client.receive(name.encode(), LoadReport(LOAD))
            for number in range(WAITING):
                request = Request(id=f"{name}-{number}", arrival_s=0.0, prompt_tokens=prompt_tokens)
                lost: Any = Lost(request, greeted.version)
                self.models[name].dispatcher.resume(lost, 0.0)

    @property
    def placed(self) -> dict[str, int]:
        return {name: len(self.models[name].dispatcher.placed_on(name)) for name in NAMES}

    def _send(self, peer: bytes, message: RouterMessage) -> bool:
        if isinstance(message, Heads):
            self.heads[peer.decode()] = len(message.heads)
        return True


@pytest.fixture
def fleet(make_hello: Callable[..., Hello]) -> Fleet:
    return Fleet(make_hello())


def test_a_publication_places_for_one_turn_and_others_go_on(fleet: Fleet) -> None:
    assert fleet.client.publish()
    turns = 1
    while fleet.client.place():
        turns += 1
        counts = fleet.placed.values()
        assert max(counts) - min(counts) <= 1, "each model has its turn"
    assert turns > 8
    assert not fleet.client.placing
    assert fleet.placed == dict.fromkeys(NAMES, WAITING)
    fleet.client.publish()
    assert fleet.heads == dict.fromkeys(NAMES, WAITING)


def test_a_publication_makes_the_heads_that_have_changed_alone(fleet: Fleet) -> None:
    fleet.client.publish()
    while fleet.client.place():
        pass
    fleet.client.publish()
    counts = collections.Counter[str]()
    for name in NAMES:
        dispatcher: Any = fleet.models[name].dispatcher
        dispatcher.published = counted(dispatcher.published, counts, name)
    fleet.client.publish()
    assert not counts
    fleet.models["one"].dispatcher.drop("one-3", None, 0.0)
    fleet.client.publish()
    assert counts == {"one": WAITING - 1} and fleet.heads == {"one": WAITING - 1, "other": WAITING}


def counted(
    published: Callable[..., tuple[Head, ...]], counts: collections.Counter[str], name: str
) -> Callable[..., tuple[Head, ...]]:
    """Count the heads that are made for the replica of a name."""

    def counting(heads: Sequence[QueuedRequest], now: float) -> tuple[Head, ...]:
        counts[name] += len(heads)
        return published(heads, now)

    return counting


def test_the_loop_serves_others_between_two_turns(fleet: Fleet) -> None:
    async def run() -> int:
        link: Any = Link()
        loop = LinkLoop(link, fleet.client, fleet.clock, lambda: None)
        loop.start()
        served = 0
        while sum(fleet.placed.values()) < 2 * WAITING or fleet.client.placing:
            served += 1
            await asyncio.sleep(0)
        await loop.stop()
        return served

    assert asyncio.run(run()) > 8


def test_requests_that_fit_nowhere_take_a_share_of_the_time(make_hello: Any) -> None:
    fleet = Fleet(make_hello(), prompt_tokens=99_999)
    place, clock, placing_s = fleet.client.place, fleet.clock, 0.0

    def timed() -> bool:
        nonlocal placing_s
        began_s = clock()
        more = place()
        placing_s += clock() - began_s
        return more

    async def run() -> float:
        fleet.client.place = timed  # type: ignore[method-assign]
        link: Any = Link()
        loop = LinkLoop(link, fleet.client, clock, lambda: None)
        loop.start()
        began_s = clock()
        for _ in range(1000):
            clock()
            loop.changed()
            await asyncio.sleep(TURN_S / 9.0)
        await loop.stop()
        return clock() - began_s

    elapsed_s = asyncio.run(run())
    assert 0.0 < placing_s < 0.4 * elapsed_s
    assert not any(fleet.placed.values())


class Link:
    """A link on which nothing arrives."""

    def follow(self, receive: Callable[[bytes, Any], None]) -> None:
        del receive

    def closed(self) -> tuple[bytes, ...]:
        return ()
