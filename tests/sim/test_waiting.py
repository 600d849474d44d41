"""Bounds on waiting, with answers of real length and prompts of up to a million tokens."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Request, Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.offered_load import Demand, OfferedLoad
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import SHORT_TOKENS, RequestRecord
from medha.sim.scenario import LLAMA_3_8B
from medha.testing import SingleReplicaRouter
from medha.topology import Topology

SETTINGS = Scheduling(max_running=1024)
LONGEST_S = SETTINGS.max_batch_s
Lengths = tuple[int, int]  # prompt and output tokens


class Server:
    """A replica of eight A100 per stage in virtual time, and its router."""

    def __init__(self, tpot_s: float, spp: int = 1) -> None:
        self.loop, self.slo, layout = Loop(), Slo(tpot_s=tpot_s), Topology(tp=8, spp=spp)
        self.predictor = Predictor(A100, LLAMA_3_8B, layout)
        slo_class = SloClass(slo=self.slo, when_infeasible="relegate")
        plan = Scheduler(
            layout, LLAMA_3_8B, self.predictor, SETTINGS, 400_000, 64, 1 << 21, (slo_class,)
        )
        clock = PipelineClock(Predictor(A100, LLAMA_3_8B, layout), 64, plan.layout)
        self.replica, self.router = (
            SimReplica("r", plan, clock, self.loop),
            SingleReplicaRouter(plan),
        )
        budget_s = SETTINGS.reference_budget_s(tpot_s, spp)
        self.reference = self.predictor.at_budget(budget_s)

    def ask(self, id: str, at_s: float, lengths: Lengths, within_s: float | None = None) -> None:
        work_s = self.reference.prefill_s(lengths[0])
        arriving = Request(
            id=id,
            arrival_s=at_s,
            prompt_tokens=lengths[0],
            max_output_tokens=lengths[1],
            work_s=work_s,
            ttft_deadline_s=within_s or self.slo.ttft_deadline_s(work_s),
            tpot_s=self.slo.tpot_s,
        )
        self.loop.at(at_s, ARRIVE, functools.partial(self._arrive, arriving))

    def _arrive(self, arriving: Request) -> None:
        self.replica.submit(self.router.decide(arriving, self.loop.now))

    def ask_at_load(
        self, name: str, lengths: Sequence[Lengths], load: float, until_s: float, seed: int
    ) -> None:
        """Ask for prompts of those lengths, in turn, at random times that offer this load."""
        demands = [Demand(prompt, 0, output, self.slo.tpot_s) for prompt, output in lengths]
        per_s = OfferedLoad(self.predictor, demands, SETTINGS.min_batch_s).per_second(load)
        draw, at_s, number = random.Random(seed), 0.0, 0
        while (at_s := at_s + draw.expovariate(per_s)) < until_s:
            self.ask(f"{name}{number}", at_s, lengths[number % len(lengths)])
            number += 1

    def records(self, until_s: float) -> dict[str, RequestRecord]:
        self.loop.run(until_s, most_events=2_000_000)
        return {record.id: record for record in self.replica.records()}


class RelegatedShare:
    """The part of a replica's time that its relegated prompts got while they waited."""

    def __init__(self, replica: SimReplica) -> None:
        self.replica, self.waited_s, self.got_s = replica, 0.0, 0.0
        replica.keep_log, replica.watch = True, self._count

    def _count(self, replica: SimReplica) -> None:
        state = replica.scheduler._state
        waits = any(queue.kept_count < len(queue) for queue in state.queues.by_group.values())
        for _, batch in replica.log:
            chunks = [chunk for chunk in batch.chunks if not chunk.decode]
            kept = sum(chunk.length for chunk in chunks if state.sequences[chunk.seq].kept)
            tokens = sum(chunk.length for chunk in chunks)
            if waits or kept < tokens:
                self.waited_s += batch.predicted_s
                self.got_s += batch.predicted_s * (1.0 - kept / tokens) if tokens else 0.0
        replica.log.clear()


def chat(draw: random.Random, count: int, most: int = 2000) -> list[Lengths]:
    return [
        (
            min(SHORT_TOKENS, max(16, int(draw.lognormvariate(6.9, 1.0)))),
            max(1, min(most, int(draw.lognormvariate(5.0, 0.8)))),
        )
        for _ in range(count)
    ]


def mix(draw: random.Random, long_share: float, count: int = 200) -> list[Lengths]:
    """Draw chat, and a share of prompts of up to a million tokens with answers."""
    lengths = chat(draw, count)
    for place in range(count):
        if draw.random() < long_share:
            lengths[place] = int(2 ** draw.uniform(16, 20)), draw.choice([1, 20, 300, 2000])
    return lengths


def most_overdue_s(records: dict[str, RequestRecord], end_s: float) -> float:
    """Return the longest wait of a short request beyond its deadline."""
    return max(
        record.waited_s(end_s) - record.ttft_deadline_s
        for record in records.values()
        if record.prompt_tokens <= SHORT_TOKENS
    )


@given(
    seed=st.integers(0, 1 << 20),
    tpot_s=st.sampled_from([0.03, 0.05, 0.1, 0.3]),
    load=st.sampled_from([0.5, 0.7, 0.9]),
    long_share=st.sampled_from([0.02, 0.05, 0.1]),
)
@example(12, 0.1, 0.5, 0.05)  # a promise without room for a short prompt
@settings(max_examples=8)
def test_a_short_request_waits_no_longer_than_its_part_of_the_relegated_share_needs(
    seed: int, tpot_s: float, load: float, long_share: float
) -> None:
    server = Server(tpot_s)
    server.ask_at_load("r", mix(random.Random(seed), long_share), load, 300.0, seed)
    records = server.records(500.0)
    short = [record for record in records.values() if record.prompt_tokens <= SHORT_TOKENS]
    late = [record for record in short if not record.in_time]
    assert len(late) <= 1 + len(short) // 500
    for record in short:
        overdue_s = record.waited_s(500.0) - record.ttft_deadline_s
        most_s = 0.0 if record.in_time else record.work_s / (0.5 * SETTINGS.relegated_share)
        assert overdue_s <= most_s + 2.0 * LONGEST_S


@pytest.mark.parametrize("load", [1.5, 3.0])
@pytest.mark.parametrize("answers, long_share", [(True, 0.0), (False, 0.0), (True, 0.01)])
def test_the_relegated_get_their_share_and_no_promise_breaks(
    load: float, answers: bool, long_share: float
) -> None:
    # Promises of chat are due within half a second: their share of that is less than a batch.
    server, lengths = Server(0.05), mix(random.Random(1), long_share, 300)
    if not answers:
        lengths = [(prompt, 1) for prompt, _ in lengths]
    server.ask_at_load("r", lengths, load, 60.0, 1)
    share = RelegatedShare(server.replica)
    records = server.records(60.0)
    assert share.waited_s > 30.0
    assert share.got_s >= 0.09 * share.waited_s
    promised = [record for record in records.values() if record.promised]
    assert len(promised) > 500 * (1.0 - 20.0 * long_share)
    assert [
        record.id for record in promised if record.waited_s(60.0) > record.ttft_deadline_s
    ] == []


@pytest.mark.parametrize("tpot_s, load", [(0.05, 0.9), (0.03, 1.3)])
def test_a_document_without_a_promise_is_served_under_an_endless_stream_of_chat(
    tpot_s: float, load: float
) -> None:
    server = Server(tpot_s)
    server.ask_at_load("s", chat(random.Random(1), 500), load, 100.0, 1)
    server.ask("late", 5.0, (60_000, 200), within_s=1.0)
    late = server.records(100.0)["late"]
    assert not late.promised
    assert late.first_token_s is not None


@pytest.mark.parametrize("tpot_s", [0.03, 0.1])
def test_chat_is_in_time_under_an_endless_stream_of_documents(tpot_s: float) -> None:
    server, draw = Server(tpot_s), random.Random(1)
    documents = [(int(2 ** draw.uniform(17, 20)), 300) for _ in range(50)]
    server.ask_at_load("l", documents, 1.5, 150.0, 1)
    for number in range(50):
        prompt, output = draw.choice([200, 2000, 8000]), draw.choice([1, 200, 2000])
        server.ask(f"s{number}", 1.0 + 3.0 * number, (prompt, output))
    server.ask("late", 30.0, (4000, 200), within_s=0.001)
    records = server.records(150.0)
    late = records.pop("late")
    assert not late.promised and late.waited_s(150.0) < 1.0
    assert most_overdue_s(records, 150.0) <= 0.0
    assert any(record.promised for name, record in records.items() if name.startswith("l"))


def test_documents_are_promised_alongside_chat_in_a_pipeline_of_two_stages() -> None:
    promised = in_time = count = 0
    for seed in range(3):
        server = Server(0.05, spp=2)
        server.ask_at_load("r", mix(random.Random(seed), 0.05), 0.2, 1500.0, seed)
        records = server.records(2000.0).values()
        assert not [record.id for record in records if record.promised and not record.in_time]
        long = [record for record in records if record.prompt_tokens > SHORT_TOKENS]
        promised += sum(record.promised for record in long)
        in_time += sum(record.in_time for record in long)
        count += len(long)
    assert promised >= 0.8 * count
    assert in_time >= 0.9 * count > 20


def test_no_promise_is_broken_when_chat_alone_offers_twice_the_capacity() -> None:
    server = Server(0.1)
    server.ask_at_load("s", chat(random.Random(1), 500), 2.0, 12.0, 1)
    records = server.records(60.0).values()
    promised = [record for record in records if record.promised]
    assert len(promised) > 500
    assert [record.id for record in promised if not record.in_time] == []
