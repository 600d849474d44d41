"""Waiting requests are placed one by one, so that a router can serve others in between."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from medha.fleet.dispatcher import MAX_RELEGATED_PLACED, Dispatcher
from medha.messages import Load
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Request, SloClass
from medha.sim.scenario import LLAMA_3_8B
from medha.topology import Topology

LOAD = Load(free_pages=(2000,), total_pages=(2000,), page_tokens=64)
RELEGATING = SloClass(when_infeasible="relegate")


@dataclasses.dataclass
class Item:
    """A request as a dispatcher reads it."""

    request: Request
    version: str = "1"
    hashes: bytes = b""
    output_tokens: int = 0
    moves: int = 0


@dataclasses.dataclass
class Replica:
    """A replica as a dispatcher reads it."""

    name: str
    predictor: Predictor
    version: str = "1"
    max_context_tokens: int = 100_000
    min_batch_s: float = 0.01
    max_batch_s: float = 0.1
    max_running: int = 256
    load: Load = LOAD
    open: bool = True


def dispatcher_of(seed: int, replicas: int = 3) -> Dispatcher[Item]:
    """A dispatcher whose replicas closed for a moment: all its requests are unplaced.

    Some were promised, some relegated, some had begun on a replica that is lost, and one is too
    long for any.
    """
    draw, dispatcher = random.Random(seed), Dispatcher[Item]([RELEGATING])
    serving = [Replica(f"r{at}", Predictor(A100, LLAMA_3_8B, Topology())) for at in range(replicas)]
    for replica in serving:
        dispatcher.update_replica(replica, 0.0)
    for at in range(120):
        request = Request(
            id=f"{draw.randrange(10**6)}-{at}",
            arrival_s=draw.uniform(-1.0, 0.0),
            prompt_tokens=draw.choice((100, 5000, 40_000)),
            max_output_tokens=draw.choice((1, 300)),
            ttft_deadline_s=draw.uniform(0.5, 20.0),
            tpot_s=1.0,
            work_s=draw.uniform(0.01, 5.0),
            tenant=draw.choice("ab"),
        )
        if at % 4:
            dispatcher.admit(Item(request), RELEGATING, 0.0)
        else:
            dispatcher.resume(Item(request, output_tokens=at, moves=1), 0.0)
    lost = Request(id="long", arrival_s=0.0, prompt_tokens=99_999_999, work_s=9.0)
    dispatcher.resume(Item(lost, moves=1), -5.0)
    for is_open in (False, True):
        for replica in serving:
            replica.open = is_open
            dispatcher.update_replica(replica, 0.0)
    return dispatcher


def placed(dispatcher: Dispatcher[Item]) -> list[tuple[str, bool, str]]:
    return [(queued.id, queued.promised, queued.replica) for queued in dispatcher.waiting(1.0)]


def test_forecasts_are_prepared_in_steps_once_for_each_budget() -> None:
    dispatcher = Dispatcher[Item]([RELEGATING])
    serving = [Replica(f"r{at}", Predictor(A100, LLAMA_3_8B, Topology())) for at in range(3)]

    def report(budget_s: float, decodes: float = 0.4) -> None:
        for replica in serving:
            of_budget = {"budget_s": budget_s, "decode_capacity_s": decodes * budget_s}
            replica.load = msgspec.structs.replace(LOAD, **of_budget)
            dispatcher.update_replica(replica, 0.0)

    def steps(tokens: int, class_tpot_s: float = 0.03, tpot_s: float = 0.03) -> int:
        return sum(1 for _ in dispatcher.extend_forecasts(tokens, "1", class_tpot_s, tpot_s))

    report(0.1)
    assert steps(2000) == 3 and steps(1000) == 0  # a step of each replica
    assert steps(50_000) > 9 and steps(50_000) == steps(2000) == 0
    report(0.05)
    assert steps(2000) == 3
    report(0.1)
    assert steps(50_000) == 0, "budgets come back"
    assert steps(2000, 0.02) == 3, "another class has other deadlines by default"
    assert steps(99_999_999) > 0 == steps(100_000), "no longer than a request can be"
    assert steps(2000, tpot_s=0.02) == 0, "the TPOT is in force anyway"
    report(0.1, decodes=0.0)
    assert steps(2000) == 3
    assert steps(2000, tpot_s=0.02) == 3, "a first answer brings batches of its own TPOT"
    assert steps(2000, tpot_s=0.02) == steps(2000) == 0


def test_forecasts_that_lack_are_steps_of_placing() -> None:
    dispatcher = Dispatcher[Item]([RELEGATING])
    for at in range(9):
        replica = Replica(f"r{at}", Predictor(A100, LLAMA_3_8B, Topology()))
        dispatcher.update_replica(replica, 0.0)
    lost = Request(id="lost", arrival_s=0.0, prompt_tokens=1000, work_s=0.1)
    dispatcher.resume(Item(lost, moves=1), 0.0)
    assert dispatcher.place_next(0.0)  # computes its work
    for _ in range(9):
        assert dispatcher.place_next(0.0) and not placed(dispatcher)[0][2]
    assert dispatcher.place_next(0.0) and placed(dispatcher)[0][2]


@pytest.mark.parametrize("seed", range(6))
def test_requests_are_placed_most_urgent_first(seed: int) -> None:
    dispatcher = dispatcher_of(seed)
    promised: list[str] = []
    relegated: list[str] = []
    unplaced = {key for key, _, replica in placed(dispatcher) if not replica}
    while dispatcher.place_next(1.0):
        for key, is_promised, replica in placed(dispatcher):
            if replica and key in unplaced:
                unplaced.remove(key)
                (promised if is_promised else relegated).append(key)
                assert is_promised or len(promised) + 1 == sum(
                    is_promised for _, is_promised, _ in placed(dispatcher)
                ), "the promised ones come first, all but the one that fits nowhere"
    order = [key for key, _, _ in placed(dispatcher)]
    assert promised == [key for key in order if key in promised] and promised
    assert relegated == [key for key in order if key in relegated]
    assert len(relegated) <= 3 * MAX_RELEGATED_PLACED
    at_once = dispatcher_of(seed)
    at_once.place_waiting(1.0)
    assert placed(at_once) == placed(dispatcher)


def test_a_request_that_fits_nowhere_does_not_stop_others() -> None:
    dispatcher = dispatcher_of(0)
    assert placed(dispatcher)[0] == ("long", True, "")
    dispatcher.place_waiting(1.0)
    assert [key for key, promised, replica in placed(dispatcher) if promised and not replica] == [
        "long"
    ]
    assert not dispatcher.place_next(1.0) or not dispatcher.place_next(1.0)


def test_requests_that_end_between_two_turns_are_not_placed() -> None:
    dispatcher = dispatcher_of(0)
    for _ in range(60):
        dispatcher.place_next(1.0)
    ended = {key for key, _, replica in placed(dispatcher) if not replica}
    assert len(ended) > 10
    for key in ended:
        dispatcher.drop(key, None, 1.0)
    while dispatcher.place_next(1.0):
        pass
    assert not ended.intersection(key for key, _, _ in placed(dispatcher))
    held = [key for estimate in dispatcher.estimates for key in estimate.held]
    assert not ended.intersection(held)


def test_requests_that_come_back_between_two_turns_are_placed_in_the_next_round() -> None:
    dispatcher = dispatcher_of(0)
    for _ in range(60):
        assert dispatcher.place_next(1.0)
    lost = Request(id="lost", arrival_s=0.0, prompt_tokens=100, work_s=0.1)
    dispatcher.resume(Item(lost, moves=1), 1.0)
    for _ in range(2):
        while dispatcher.place_next(1.0):
            pass
    assert {key: replica for key, _, replica in placed(dispatcher)}["lost"]
