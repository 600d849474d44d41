"""The simulated fleet and the live router hand over the same requests at the same times.

Two drivers of the same dispatcher and grants, written apart: `sim.virtual_fleet` calls them
directly; here the router's service, request table and replica client exchange messages with
controllers over links without latency. A difference would be a bug in one of the two.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from medha.adapters.prometheus import Metrics
from medha.batch import Batch
from medha.config import RouterConfig, RouterModel, Scheduling
from medha.errors import Refusal
from medha.fleet.demand import DemandWindow
from medha.fleet.dispatcher import split_names
from medha.fleet.grants import GrantQueue
from medha.messages import (
    Abort,
    Accepted,
    Heads,
    Hello,
    KvEvents,
    LoadReport,
    ReplicaMessage,
    RouterMessage,
    Submit,
)
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import Arrival
from medha.topology import Topology
from medha_router.auth import Client
from medha_router.generation import ClientRequest
from medha_router.models import ModelRegistry
from medha_router.protocol import SloOverride, read_completion
from medha_router.replica_client import ReplicaClient
from medha_router.replicas import ConnectedReplica, ReplicaTable
from medha_router.request_table import RequestTable, RouterState
from medha_router.router_metrics import RouterMetrics
from medha_router.service import Service
from medha_router.structured.checker_process import GrammarChecker
from medha_router.tokenization.detokenizer import Vocabulary
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.tokenizer_files import FileStore
from medha_router.tokenization.wire import Prompt

CLASSES = (
    SloClass(name="default", slo=Slo(tpot_s=0.1), reserved=0.2),
    SloClass(name="soft", slo=Slo(tpot_s=0.1), when_infeasible="relegate", weight=2.0),
    SloClass(name="tight", slo=Slo(ttft_multiplier=1.1, tpot_s=0.1), when_infeasible="relegate"),
)
CONTEXT_TOKENS, PAGE_TOKENS, PAGES = 400_000, 64, 12_000
LAYOUTS = (Topology(tp=8), Topology(tp=8, kvp_min=2, kvp_max=2, tokens_per_group=100_000))
HAND_OVER = tuple[float, str, str]


class Draw(msgspec.Struct, frozen=True):
    """A request of one client. `leaves_s`: when the client cancels it."""

    arrival: Arrival
    leaves_s: float | None


def workload(seed: int, groups: int) -> list[Draw]:
    """Bursts of requests, more than `groups` KVP groups can serve in time."""
    rng = np.random.default_rng(seed)
    draws, at_s = [], 0.1
    for index in range(60 + 40 * groups):
        gap_s = 0.02 if rng.random() < 0.7 else 0.5
        at_s += float(rng.exponential(gap_s / groups))
        long = rng.random() < 0.12
        blocks = int(rng.integers(0, 6))
        arrival = Arrival(
            id=f"{index}.0",
            arrival_s=at_s,
            prompt_tokens=int(rng.integers(50_000, 200_000) if long else rng.integers(3, 9_000)),
            output_tokens=int(rng.integers(1, 12) if rng.random() < 0.8 else 150),
            blocks=tuple(1000 * int(rng.integers(0, 3)) + block for block in range(blocks)),
            tenant=f"tenant-{rng.integers(0, 3)}",
            slo_class=CLASSES[int(rng.integers(0, len(CLASSES)))].name,
        )
        leaves_s = at_s + float(rng.exponential(1.0)) if rng.random() < 0.2 else None
        draws.append(Draw(arrival, leaves_s))
    return draws


class Outcome(msgspec.Struct):
    """The decisions of a fleet: hand-overs, refusals by code, and the batches of each replica."""

    hand_overs: list[HAND_OVER]
    refused: dict[str, str]
    batches: dict[str, list[tuple[float, Batch]]]


def make_replicas(
    loop: Loop, topology: Topology, count: int, settings: Scheduling
) -> list[SimReplica]:
    replicas = []
    for index in range(count):
        predictor = Predictor(A100, LLAMA_3_8B, topology, settings.max_batch_s)
        scheduler = Scheduler(
            topology, LLAMA_3_8B, predictor, settings, PAGES, PAGE_TOKENS, CONTEXT_TOKENS, CLASSES
        )
        clock = PipelineClock(predictor, PAGE_TOKENS, scheduler.layout)
        replicas.append(SimReplica(f"r{index}", scheduler, clock, loop, keep_log=True))
    return replicas


def simulated(
    draws: Sequence[Draw], topology: Topology, count: int, settings: Scheduling
) -> Outcome:
    loop = Loop()
    replicas = make_replicas(loop, topology, count, settings)
    fleet = SimulatedFleet(replicas, loop, CLASSES, settings, PAGE_TOKENS, CONTEXT_TOKENS)
    for draw in draws:
        loop.at(draw.arrival.arrival_s, ARRIVE, functools.partial(fleet.arrive, draw.arrival))
        if draw.leaves_s is not None:
            loop.at(draw.leaves_s, ARRIVE, functools.partial(fleet.cancel, draw.arrival.id))
    loop.run(most_events=500_000)
    refused = {record.id: record.refused for record in fleet.refused}
    return Outcome(fleet.hand_overs, refused, {replica.name: replica.log for replica in replicas})


class VirtualController:
    """A controller's conversation with one router: reports, grants and submits."""

    def __init__(self, replica: SimReplica, send: Callable[[bytes, ReplicaMessage], None]) -> None:
        self.replica, self._send = replica, send
        self.peer = replica.name.encode()
        settings = replica.scheduler.settings
        window_s = settings.dispatch_budgets * settings.max_batch_s
        self._grants = GrantQueue(window_s, settings.queue_order)
        self._published: tuple[tuple[str, bool], ...] = ()
        self._kv_events = 0
        self.submits: list[HAND_OVER] = []

    def report(self) -> None:
        """Send cache changes and the load, as they are now."""
        replica, now = self.replica, self.replica.loop.now
        stored, removed = replica.scheduler.take_kv_events()
        if stored or removed:
            self._kv_events += 1
            events = KvEvents(
                self._kv_events,
                b"".join(name for _, name in stored),
                b"".join(name for _, name in removed),
                snapshot=self._kv_events == 1,
            )
            self._send(self.peer, events)
        learned = replica.scheduler.predictor.learned()
        self._send(self.peer, LoadReport(replica.scheduler.load(now), learned=learned))

    def grant(self) -> None:
        now = self.replica.loop.now
        if self._grants.waiting:
            load = self.replica.scheduler.load(now)
            for grant in self._grants.grant(load, now).values():
                self._send(self.peer, grant)

    def receive(self, message: RouterMessage) -> None:
        now = self.replica.loop.now
        match message:
            case Heads():
                self._grants.heads("router", message.heads, now)
                heads = tuple((head.id, head.promised) for head in message.heads)
                if heads != self._published:
                    self._published = heads
                    self.grant()
            case Submit():
                self._grants.submitted(message.id, now)
                self._published = tuple(head for head in self._published if head[0] != message.id)
                self._submit(message, now)
                self._send(self.peer, Accepted(message.id, 0))
                self.report()
            case Abort() if self.replica.serves(message.id):
                self.replica.abort(message.id)

    def _submit(self, submit: Submit, now: float) -> None:
        hashes = tuple(split_names(submit.hashes))
        self.submits.append((now, submit.id, self.replica.name))
        self.replica.submit(submit.request(now), hashes)


class FakeTokenizer:
    """Encodes the next request as the prompt of its arrival."""

    def __init__(self) -> None:
        self.prompt = Prompt(b"", b"")

    async def encode(self, job: object, tenant: str) -> tuple[Prompt, ...]:
        return (self.prompt,)


def run_at_once(coroutine: Coroutine[Any, Any, ClientRequest]) -> ClientRequest:
    """The result of a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return cast(ClientRequest, end.value)
    raise AssertionError("the router waits, although every replica serves")


class VirtualRouter:
    """The router's own objects on a virtual clock, linked to controllers without latency."""

    def __init__(
        self, replicas: Sequence[SimReplica], loop: Loop, hello: Hello, tokenizer: bytes
    ) -> None:
        self.loop, self.refused = loop, cast(dict[str, str], {})
        self._messages: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = False
        self._requests: dict[str, ClientRequest] = {}
        self._tokenizer = FakeTokenizer()
        config = RouterModel(
            name=hello.model, max_context_tokens=CONTEXT_TOKENS, classes=hello.classes
        )
        models = ModelRegistry([config], forget_s=1e9)
        table = ReplicaTable(None, timeout_s=1e9)
        demand = DemandWindow()
        metrics = RouterMetrics(Metrics("router"), demand)
        requests = RequestTable(models, table, metrics, self._send, self._mark_changed)
        state = RouterState("router", models, table, requests, metrics, self._send, self._clock)
        tokens = cast(TokenizerPool, self._tokenizer)
        self._client = ReplicaClient(state, FileStore(None), tokens)
        self._service = Service(
            RouterConfig(fleet_bind="unused"),
            state,
            tokens,
            demand,
            grammars=GrammarChecker(),
            salt_secret=b"",
            wall_s=self._clock,
            draw_bits=lambda bits: 0,
        )
        self._model = hello.model
        self.controllers = {
            replica.name.encode(): VirtualController(replica, self._receive) for replica in replicas
        }
        for peer, controller in self.controllers.items():
            named = msgspec.structs.replace(hello, replica=controller.replica.name)
            replica = table.greet(peer, named, 0.0)
            assert isinstance(replica, ConnectedReplica), replica
            models.learn(named, others=True)
            models[hello.model].version_for(replica).vocabulary = Vocabulary(tokenizer)
            controller.report()
            controller.replica.watch = self._on_round
        self._drain()

    def arrive(self, arrival: Arrival) -> None:
        for controller in self.controllers.values():
            controller.report()
        self._drain()
        tokens = bytes(4 * arrival.prompt_tokens)
        self._tokenizer.prompt = Prompt(tokens, b"".join(arrival.page_names(PAGE_TOKENS)))
        body = {"model": self._model, "prompt": "-", "max_tokens": arrival.output_tokens}
        try:
            self._requests[arrival.id] = run_at_once(
                self._service.begin(
                    arrival.id.removesuffix(".0"),
                    read_completion(msgspec.json.encode(body)),
                    SloOverride(slo_class=arrival.slo_class),
                    Client(tenant=arrival.tenant),
                )
            )
        except Refusal as refusal:
            self.refused[arrival.id] = refusal.code
        self._drain()

    def cancel(self, id: str) -> None:
        if id in self._requests:
            self._service.cancel(self._requests[id])
            self._drain()

    def _on_round(self, replica: SimReplica) -> None:
        controller = self.controllers[replica.name.encode()]
        controller.report()
        self._drain()
        controller.grant()
        self._drain()

    def _drain(self) -> None:
        """Deliver messages, and publish heads after changes, until nothing is left to do."""
        while self._messages or self._changed:
            while self._messages:
                self._messages.popleft()()
            self._changed = False
            self._client.publish()

    def _send(self, peer: bytes, message: RouterMessage) -> bool:
        self._messages.append(functools.partial(self.controllers[peer].receive, message))
        return True

    def _receive(self, peer: bytes, message: ReplicaMessage) -> None:
        self._messages.append(functools.partial(self._client.receive, peer, message))

    def _mark_changed(self) -> None:
        self._changed = True

    def _clock(self) -> float:
        return self.loop.now


def served(
    draws: Sequence[Draw],
    topology: Topology,
    count: int,
    settings: Scheduling,
    hello: Hello,
    tokenizer: bytes,
) -> Outcome:
    loop = Loop()
    replicas = make_replicas(loop, topology, count, settings)
    router = VirtualRouter(replicas, loop, hello, tokenizer)
    for draw in draws:
        loop.at(draw.arrival.arrival_s, ARRIVE, functools.partial(router.arrive, draw.arrival))
        if draw.leaves_s is not None:
            loop.at(draw.leaves_s, ARRIVE, functools.partial(router.cancel, draw.arrival.id))
    loop.run(most_events=500_000)
    submits = [
        submit for controller in router.controllers.values() for submit in controller.submits
    ]
    return Outcome(submits, router.refused, {replica.name: replica.log for replica in replicas})


def rounded(hand_overs: Sequence[HAND_OVER]) -> list[HAND_OVER]:
    """Hand-overs in order; ages cross the link, so that times differ in their last bits."""
    return sorted((round(at_s, 6), request_id, name) for at_s, request_id, name in hand_overs)


@pytest.mark.parametrize(
    ("seed", "policy"),
    [
        *((seed, "lars") for seed in range(6)),  # each layout with each number of replicas
        *((seed, policy) for policy in ("edf", "srpf", "fcfs") for seed in range(3)),
        (5, "lrs"),  # two page moves to one full group
    ],
)
def test_router_and_simulator_hand_over_the_same_requests(
    seed: int, policy: str, make_hello: Callable[..., Hello], byte_level_json: bytes
) -> None:
    settings = Scheduling(policy=policy)
    topology, count = LAYOUTS[seed % len(LAYOUTS)], 1 + seed % 3
    hello = make_hello(
        shape=LLAMA_3_8B,
        topology=topology,
        page_tokens=PAGE_TOKENS,
        max_context_tokens=CONTEXT_TOKENS,
        classes=CLASSES,
        profile=msgspec.json.encode(A100),
        max_batch_s=settings.max_batch_s,
        min_batch_s=settings.min_batch_s,
        order=settings.queue_order,
    )
    draws = workload(seed, count * topology.kvp_min)
    ours = simulated(draws, topology, count, settings)
    theirs = served(draws, topology, count, settings, hello, byte_level_json)
    assert ours.refused == theirs.refused
    assert ours.refused or policy != "lars"
    arrivals_s = {draw.arrival.id: draw.arrival.arrival_s for draw in draws}
    waited = [
        request_id for at_s, request_id, _ in ours.hand_overs if at_s > arrivals_s[request_id]
    ]
    assert waited or topology.kvp_max > 1  # one group per replica: requests wait for room
    assert rounded(ours.hand_overs) == rounded(theirs.hand_overs)
    for name, log in ours.batches.items():
        assert [batch for _, batch in log] == [batch for _, batch in theirs.batches[name]]
