"""Requests leave a replica whose connection ended at once, and stay if it has another one soon.

The router's tables and replica client run in virtual time. Links deliver at once; a link that was
cut delivers nothing, in either direction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from tests.support.generations import new_generation

from medha.adapters.prometheus import Metrics
from medha.config import RouterModel
from medha.fleet.demand import DemandWindow
from medha.messages import Grant, Heads, Hello, Load, LoadReport, RouterMessage, Submit
from medha.peer_liveness import CLOSED_S, GONE_S
from medha.request import Slo, SloClass
from medha_router.api_errors import StreamBroken
from medha_router.models import ModelRegistry
from medha_router.replica_client import ReplicaClient
from medha_router.replica_link import TICK_S
from medha_router.replicas import ConnectedReplica, ReplicaTable
from medha_router.request_table import RequestTable, RouterState
from medha_router.router_metrics import RouterMetrics
from medha_router.tokenization.detokenizer import Vocabulary
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.tokenizer_files import FileStore

CLASSES = (SloClass(name="default", slo=Slo(ttft_floor_s=20.0, tpot_s=5.0)),)
LOAD = Load(free_pages=(64,), total_pages=(64,), page_tokens=16)
BEAT_S = 0.5  # between two reports of a replica in a long prefill


class Fleet:
    """A router that ticks each TICK_S, and replicas r0, r1 … that grant every head.

    `submits` holds the time and replica of each hand-over of the only request.
    """

    def __init__(self, hello: Hello, tokenizer: bytes, replicas: int) -> None:
        self.now = 0.0
        self.submits: list[tuple[float, str]] = []
        self._cut: set[bytes] = set()
        self._ended: list[bytes] = []
        model = RouterModel(name="tiny", max_context_tokens=2048, classes=CLASSES)
        models = ModelRegistry([model], forget_s=1e9)
        table = ReplicaTable(None, timeout_s=3.0)
        metrics = RouterMetrics(Metrics("router"), DemandWindow())
        requests = RequestTable(models, table, metrics, self._send, lambda: None)
        state = RouterState(
            "router", models, table, requests, metrics, self._send, lambda: self.now
        )
        self._client = ReplicaClient(state, FileStore(None), cast(TokenizerPool, None))
        vocabulary = Vocabulary(tokenizer)
        for number in range(replicas):
            peer = f"r{number}".encode()
            replica = table.greet(peer, msgspec.structs.replace(hello, replica=peer.decode()), 0.0)
            assert isinstance(replica, ConnectedReplica)
            models["tiny"].version_for(replica).vocabulary = vocabulary
            version = replica.version
        generation = new_generation(CLASSES, vocabulary, version)
        self.request = generation.client_request
        models["tiny"].dispatcher.resume(generation, 0.0)
        requests.add(self.request)
        self._table, self._ticks_s, self._beats_s = table, 0.0, 0.0

    @property
    def holder(self) -> str:
        return self.submits[-1][1]

    def open(self) -> set[str]:
        return {replica.name for replica in self._table if replica.open}

    def run(self, until_s: float) -> None:
        while (due_s := min(self._ticks_s, self._beats_s)) <= until_s:
            self.now = due_s
            if self._beats_s == due_s:
                self._beats_s += BEAT_S
                for replica in list(self._table):
                    if replica.peer not in self._cut:
                        self._client.receive(replica.peer, LoadReport(LOAD))
            else:
                self._ticks_s += TICK_S
                self._client.tick()
                while self._ended:
                    self._client.closed(self._ended.pop())
            self._client.publish()
        self.now = until_s

    def cut(self, name: str) -> None:
        self._cut.add(name.encode())
        self._ended.append(name.encode())

    def restore(self, name: str) -> None:
        self._cut.discard(name.encode())

    def _send(self, peer: bytes, message: RouterMessage) -> bool:
        if peer in self._cut:
            return False
        match message:
            case Heads(heads) if heads:
                self._client.receive(peer, Grant(tuple(head.id for head in heads)))
            case Submit():
                self.submits.append((self.now, peer.decode()))
        return True


@pytest.fixture
def fleet_of(make_hello: Callable[..., Any], byte_level_json: bytes) -> Callable[[int], Fleet]:
    def make(replicas: int) -> Fleet:
        fleet = Fleet(make_hello(), byte_level_json, replicas)
        fleet.run(2.0)
        assert len(fleet.submits) == 1 and len(fleet.open()) == replicas
        return fleet

    return make


Make = Callable[[int], Fleet]
PHASES_S = [0.0, 0.07, 0.13, 0.2, 0.25, 0.31, 0.44]


@pytest.mark.parametrize("phase_s", PHASES_S)
def test_a_request_leaves_a_replica_whose_connection_ended_at_once(
    fleet_of: Make, phase_s: float
) -> None:
    fleet = fleet_of(2)
    fleet.run(2.0 + phase_s)
    first, cut_s = fleet.holder, fleet.now
    fleet.cut(first)
    fleet.run(cut_s + 3.0)
    moved_s, second = fleet.submits[-1]
    assert second != first and len(fleet.submits) == 2
    assert cut_s + GONE_S < moved_s < cut_s + 2 * TICK_S + 0.001 < cut_s + CLOSED_S


@pytest.mark.parametrize("phase_s", PHASES_S)
def test_a_short_reset_of_a_connection_moves_nothing(fleet_of: Make, phase_s: float) -> None:
    fleet = fleet_of(2)
    fleet.run(2.0 + phase_s)
    fleet.cut(fleet.holder)
    fleet.run(fleet.now + 0.24)
    assert len(fleet.open()) == 2
    fleet.restore(fleet.holder)
    while fleet.now < 8.0:
        fleet.run(fleet.now + 0.1)
        assert len(fleet.open()) == 2
    assert len(fleet.submits) == 1


def test_a_late_notice_of_a_reset_moves_nothing(fleet_of: Make) -> None:
    fleet = fleet_of(2)
    fleet.run(2.01)
    fleet.cut(fleet.holder)
    fleet.restore(fleet.holder)  # before the router looks
    fleet.run(8.0)
    assert len(fleet.submits) == 1 and len(fleet.open()) == 2


def test_a_request_whose_replicas_lose_their_connections_is_not_tried_on_a_third(
    fleet_of: Make,
) -> None:
    fleet = fleet_of(3)
    for _ in range(2):
        fleet.cut(fleet.holder)
        fleet.run(fleet.now + 0.6)
    with pytest.raises(StreamBroken, match="2 replicas died"):
        asyncio.run(fleet.request.next(0.0))
    assert len(fleet.submits) == 2
