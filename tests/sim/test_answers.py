"""Promises when requests have answers: documents alongside chat, with exact predictions."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.config import Scheduling
from medha.fleet.margins import Margins
from medha.fleet.offers import PendingRequest
from medha.fleet.placement import assess
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.messages import Load
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Request, Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import RequestRecord
from medha.sim.scenario import LLAMA_3_8B
from medha.testing import SingleReplicaRouter, request, scheduler
from medha.topology import Topology

DOCUMENT_TOKENS = 60_000

# (arrival, prompt tokens, output tokens)
Wish = tuple[float, int, int]


def served(
    wishes: Sequence[Wish], tpot_s: float, spp: int = 1, deadline_factor: float = 1.0
) -> list[RequestRecord]:
    """Serve all on one replica; deadlines are those of the class, `deadline_factor` times."""
    loop, layout, slo = Loop(), Topology(tp=8, spp=spp), Slo(tpot_s=tpot_s)
    plan_settings = Scheduling(max_running=1024)
    predictor = Predictor(A100, LLAMA_3_8B, layout)
    slo_class = SloClass(slo=slo, when_infeasible="relegate")
    plan = Scheduler(
        layout, LLAMA_3_8B, predictor, plan_settings, 400_000, 64, 1 << 21, (slo_class,)
    )
    clock = PipelineClock(Predictor(A100, LLAMA_3_8B, layout), 64, plan.layout)
    replica, router = SimReplica("r", plan, clock, loop), SingleReplicaRouter(plan)

    def arrive(arriving: Request) -> None:
        replica.submit(router.decide(arriving, loop.now))

    budget_s = plan_settings.reference_budget_s(tpot_s, spp)
    for number, (arrival_s, prompt, output) in enumerate(wishes):
        work_s = predictor.at_budget(budget_s).prefill_s(prompt)
        wish = Request(
            id=f"r{number}",
            arrival_s=arrival_s,
            prompt_tokens=prompt,
            max_output_tokens=output,
            work_s=work_s,
            ttft_deadline_s=deadline_factor * slo.ttft_deadline_s(work_s),
            tpot_s=tpot_s,
        )
        loop.at(arrival_s, ARRIVE, functools.partial(arrive, wish))
    loop.run(most_events=2_000_000)
    return replica.records()


def chat(draw: random.Random, until_s: float, per_second: float) -> list[Wish]:
    wishes, at = [], 0.0
    while (at := at + draw.expovariate(per_second)) < until_s:
        prompt = min(16_000, max(16, int(draw.lognormvariate(6.9, 1.0))))
        wishes.append((at, prompt, max(1, min(2000, int(draw.lognormvariate(5.0, 0.8))))))
    return wishes


def broken(records: Sequence[RequestRecord]) -> list[str]:
    return [record.id for record in records if record.promised and not record.in_time]


@pytest.mark.parametrize("output_tokens", [1, 2, 300])
def test_a_promised_document_keeps_no_chat_waiting(output_tokens: int) -> None:
    talk = chat(random.Random(0), 150.0, 1.5)
    records = served([(0.0, 900_000, output_tokens), *talk], 0.05)
    by_id = {record.id: record for record in records}
    assert by_id["r0"].promised and by_id["r0"].in_time
    assert [record.id for record in records if not record.in_time] == []


@pytest.mark.parametrize("seed", [0, 1])
def test_documents_without_a_promise_leave_a_promised_one_room_for_chat(seed: int) -> None:
    """The margin of a promise of two minutes is for the chat of two minutes."""
    documents = [(0.0, 995_000, 20), (12.0, 408_000, 20), (20.0, 535_000, 20), (30.0, 300_000, 20)]
    talk = chat(random.Random(seed), 150.0, 1.5)
    records = served(sorted(documents + talk), 0.1, spp=2)
    assert broken(records) == []
    assert [r.id for r in records if not r.in_time and r.prompt_tokens <= 16_000] == []


def mixed(seed: int) -> list[Wish]:
    """Half a minute of chat, and documents of up to a million tokens with answers."""
    draw = random.Random(seed)
    wishes = chat(draw, 30.0, draw.choice([0.5, 2.0, 6.0]))
    for _ in range(draw.randint(1, 4)):
        tokens = int(2 ** draw.uniform(16, 20))
        wishes.append((draw.uniform(0.0, 30.0), tokens, draw.choice([1, 20, 300, 2000])))
    return sorted(wishes)


@given(st.integers(0, 10_000), st.sampled_from([0.03, 0.05, 0.1]), st.sampled_from([1, 2]))
@example(1, 0.05, 2)
@settings(max_examples=8, deadline=None)
def test_no_promise_is_broken_with_exact_predictions(seed: int, tpot_s: float, spp: int) -> None:
    records = served(mixed(seed), tpot_s, spp, deadline_factor=random.Random(seed).choice([1, 2]))
    assert broken(records) == []
    assert all(record.finished_s is not None for record in records)


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_a_report_of_many_promises_loses_none_of_their_work(seed: int) -> None:
    draw = random.Random(seed)
    plan = scheduler(settings=Scheduling(max_running=2000), pages=100_000)
    for number in range(600):
        due_s = draw.uniform(0.1, 60.0)
        plan.submit(request(f"r{number}", 500, within_s=due_s, promised=True), 0.0)
    plan._account.try_nothing(0, 0.0)
    (reported,) = plan.load(0.0).margins
    assert len(reported) == 256
    whole, few = Margins(), Margins()
    whole.recount(plan._promises.margins(0, 0.0, 600), 0.0, ())
    few.recount(reported, 0.0, ())
    for _ in range(200):
        due_s = draw.uniform(0.1, 70.0)
        assert few.room_s(due_s, 0.0, 0.0) <= whole.room_s(due_s, 0.0, 0.0) + 1e-9


def test_relegated_work_is_pending_once() -> None:
    estimate = ReplicaEstimate("r", Predictor(A100, LLAMA_3_8B, Topology(tp=8)), 1 << 20)
    estimate.update(Load(pending_s=5.0, relegated_s=3.0, total_pages=(10,)), 0.0)
    assert estimate.pending_s == 5.0


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("tokens", [20_000, 275_000])
@pytest.mark.parametrize("tpot_s", [0.03, 0.1])
def test_a_replica_keeps_a_first_promise_though_its_answer_shortens_batches(
    stages: int, tokens: int, tpot_s: float
) -> None:
    """From the first answer on, the replica counts on batches of the tightest class."""
    classes = tuple(SloClass(name=f"{of_s}", slo=Slo(tpot_s=of_s)) for of_s in (0.03, 0.1))
    layout = Topology(tp=4, spp=stages)
    predictor = Predictor(A100, LLAMA_3_8B, layout)
    plan = Scheduler(layout, LLAMA_3_8B, predictor, Scheduling(), 60_000, 64, 1 << 20, classes)
    plan.group_joined(0, 1, 0.0)
    estimate = ReplicaEstimate("r", predictor, 1 << 20)
    estimate.update(plan.load(0.0), 0.0)
    pending = PendingRequest(
        id="r",
        prompt_tokens=tokens,
        max_output_tokens=200,
        due_s=1e6,
        tpot_s=tpot_s,
        class_tpot_s=0.03,
    )
    due_s = assess(estimate, pending, 0.0).earliest_s
    plan.submit(
        request("r", tokens, within_s=due_s, output_tokens=200, tpot_s=tpot_s, promised=True), 0.0
    )
    # It withdraws a promise that is overrun by a batch.
    assert plan._promises.least_margin_s(0, 0.0) >= -Scheduling().max_batch_s
    alone_s = assess(estimate, msgspec.structs.replace(pending, max_output_tokens=1), 0.0)
    assert alone_s.earliest_s <= due_s
