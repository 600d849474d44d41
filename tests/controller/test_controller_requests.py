"""Requests through the controller in virtual time: every stream is as its prompt implies."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from tests.support.virtual_ranks import expected_tokens
from tests.support.virtual_replica import NoMetrics, VirtualReplica

from medha import messages as m
from medha.config import AdapterFolder
from medha.fleet.prefix_index import chain
from medha.topology import Topology

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]
Judge = Callable[[VirtualReplica, m.Submit], None]
Idle = Callable[[VirtualReplica], None]

VOCAB = 50_000


class Counted(NoMetrics):
    """Totals of counters, by name and labels."""

    def __init__(self) -> None:
        self.totals: dict[str, dict[tuple[str, ...], float]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        of = self.totals.setdefault(name, {})
        if amount:
            of[labels] = of.get(labels, 0.0) + amount


def test_a_prompt_is_answered_token_by_token(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica, submit = make_replica(), make_submit("one", 100, outputs=7)
    replica.submit_at(1.0, submit)
    replica.run(10.0)
    judge(replica, submit)
    finished = replica.clients["one"].finished
    assert finished == m.Finished("one", "length", 100, 7, 0)
    idle(replica)


def test_a_request_for_an_adapter_needs_a_replica_that_has_it(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(adapters=(AdapterFolder(name="legal", folder="/nowhere"),))
    known, unknown = make_submit("one", adapter="legal"), make_submit("two", adapter="prose")
    replica.submit_at(1.0, known)
    replica.submit_at(1.0, unknown)
    replica.run(10.0)
    judge(replica, known)
    failed = replica.clients["two"].failed
    assert failed is not None and failed.code == "invalid_request" and not failed.retriable
    assert "names the adapter 'prose': this replica has legal" in failed.message
    idle(replica)


def test_many_requests_share_batches_and_pages(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(topology=Topology(spp=2), key_s=1e-9)
    many = [make_submit(f"r{i}", 20 + 97 * i % 700, outputs=1 + i % 9) for i in range(60)]
    for place, submit in enumerate(many):
        replica.submit_at(1.0 + 0.01 * place, submit)
    replica.run(60.0)
    for submit in many:
        judge(replica, submit)
    idle(replica)


def test_a_stop_token_ends_the_answer_and_is_its_last(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    plain = make_submit("one", 50, outputs=20)
    fourth = expected_tokens(m.from_bytes(plain.tokens).tolist(), 4, VOCAB)[3]
    sampling = m.Sampling(temperature=0.0, stop_tokens=(fourth,))
    replica, submit = make_replica(), make_submit("one", 50, outputs=20, sampling=sampling)
    replica.submit_at(1.0, submit)
    replica.run(10.0)
    judge(replica, submit)
    finished = replica.clients["one"].finished
    assert finished is not None and (finished.reason, finished.output_tokens) == ("stop", 4)
    idle(replica)


def test_a_stop_token_before_min_tokens_does_not_end_the_answer(
    make_replica: Make, make_submit: Submit
) -> None:
    plain = make_submit("one", 50)
    second = expected_tokens(m.from_bytes(plain.tokens).tolist(), 2, VOCAB)[1]
    sampling = m.Sampling(temperature=0.0, stop_tokens=(second,), min_tokens=3)
    replica = make_replica()
    replica.submit_at(1.0, make_submit("one", 50, outputs=6, sampling=sampling))
    replica.run(10.0)
    finished = replica.clients["one"].finished
    assert finished is not None and (finished.reason, finished.output_tokens) == ("length", 6)


def test_a_resumed_request_continues_after_its_emitted_tokens(
    make_replica: Make, make_submit: Submit, idle: Idle
) -> None:
    submit = make_submit("one", 50)
    prompt = m.from_bytes(submit.tokens).tolist()
    answer = expected_tokens(prompt, 10, VOCAB)
    resumed = msgspec.structs.replace(
        submit, tokens=m.to_bytes(prompt + answer[:6]), emitted=6, max_output_tokens=10
    )
    replica = make_replica()
    replica.submit_at(1.0, resumed)
    client = replica.client("one", emitted=answer[:6])
    replica.run(10.0)
    assert client.tokens == answer
    assert client.finished == m.Finished("one", "length", 50, 10, 0)
    idle(replica)


def test_a_second_turn_finds_the_pages_of_the_first_prompt_and_answer(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    salt, page_tokens = b"tenant", 16
    first = make_submit("one", 64, outputs=40, salt=salt)
    prompt = m.from_bytes(first.tokens)
    first = msgspec.structs.replace(first, hashes=b"".join(chain(prompt, page_tokens, salt)))
    turn = np.concatenate([prompt, expected_tokens(prompt.tolist(), 40, VOCAB), [7, 8, 9]])
    second = msgspec.structs.replace(
        first,
        id="two",
        tokens=m.to_bytes(turn),
        hashes=b"".join(chain(turn.astype(np.int32), page_tokens, salt)),
    )
    replica = make_replica()
    replica.submit_at(1.0, first)
    replica.submit_at(5.0, second)
    replica.run(10.0)
    judge(replica, first)
    judge(replica, second)
    finished = replica.clients["two"].finished
    assert finished is not None and finished.cached_tokens == (64 + 39) // 16 * 16
    stored = b"".join(event.stored for _, event in replica.news)
    assert len(stored) % 16 == 0 and second.hashes[:96] == stored[:96]
    idle(replica)


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"tokens": b""}, "invalid_request"),
        ({"tokens": b"abc"}, "invalid_request"),
        ({"tokens": m.to_bytes([VOCAB])}, "invalid_request"),
        ({"tokens": m.to_bytes([3, -1])}, "invalid_request"),
        ({"hashes": b"123"}, "invalid_request"),
        ({"tokens": m.to_bytes([1] * 17_000)}, "context_length_exceeded"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once_with_its_reason(
    make_replica: Make, make_submit: Submit, idle: Idle, fields: dict[str, bytes], code: str
) -> None:
    replica = make_replica(pages=1000)
    bad = msgspec.structs.replace(make_submit("bad"), **fields)
    replica.submit_at(1.0, bad)
    replica.run(3.0)
    failed = replica.clients["bad"].failed
    assert failed is not None and failed.code == code and not failed.retriable
    idle(replica)


def test_an_abort_in_flight_stops_the_stream_and_frees_every_page(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(topology=Topology(spp=3))
    left, stayed = make_submit("left", 3000, outputs=50), make_submit("stayed", 500, outputs=50)
    replica.submit_at(1.0, left)
    replica.submit_at(1.01, stayed)
    replica.send_at(1.0551, m.Abort("left"))
    replica.run(20.0)
    assert not replica.clients["left"].over
    judge(replica, stayed)
    idle(replica)


@pytest.mark.parametrize("spp", [1, 3])
def test_a_thousand_requests_of_which_a_third_disconnect_leave_nothing_behind(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle, spp: int
) -> None:
    rng = np.random.default_rng(spp)
    replica = make_replica(pages=600, topology=Topology(spp=spp), key_s=1e-9)
    stayed, at_s = [], 1.0
    for place in range(1000):
        at_s += float(rng.exponential(0.02))
        tokens, outputs = int(rng.integers(1, 900)), int(rng.integers(1, 12))
        submit = make_submit(f"r{place}", tokens, outputs=outputs)
        replica.submit_at(at_s, submit)
        if rng.random() < 0.3:
            replica.send_at(at_s + float(rng.exponential(0.1)), m.Abort(submit.id))
        else:
            stayed.append(submit)
    replica.run(200.0)
    for submit in stayed:
        judge(replica, submit)
    idle(replica)


def test_a_lost_step_is_sent_again_and_no_token_changes(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(topology=Topology(spp=3))
    many = [make_submit(f"r{i}", 300, outputs=5) for i in range(6)]
    replica.drop_step = (0, 3)
    for submit in many:
        replica.submit_at(1.0, submit)
    replica.run(20.0)
    assert replica.dropped, "no step was dropped: the test shows nothing"
    for submit in many:
        judge(replica, submit)
    idle(replica)


def test_displaced_requests_are_counted_by_length(make_replica: Make, make_submit: Submit) -> None:
    metrics = Counted()
    settings = {"commit": False, "max_batch_s": 0.05}
    replica = make_replica(metrics=metrics, settings=settings, pages=4000)
    long = make_submit("long", 4000, outputs=1, ttft_deadline_s=0.5)
    replica.submit_at(1.0, long)
    for number in range(8):  # 0.1 s each, and the long one's slack is 0.1 s
        short = make_submit(f"s{number}", 1000, outputs=1, ttft_deadline_s=0.35 + 0.1 * number)
        replica.submit_at(1.01, short)
    replica.run(10.0)
    decided = metrics.totals["medha_scheduler_decided_total"]
    assert decided == {("1k",): 8.0, ("8k",): 1.0}
    assert metrics.totals["medha_scheduler_displaced_total"] == {("8k",): 1.0}
