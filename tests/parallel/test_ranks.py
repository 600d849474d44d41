"""A rank process: its life, the order of its steps, and its behaviour when others fail."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.support.driver import Driver
from tests.support.rank_rig import Rig
from tests.support.recalling_prompts import recalling

from medha.adapters.sockets import Listener
from medha.config import WorkerConfig, render
from medha.messages import (
    Codec,
    Form,
    Gap,
    Leave,
    RankCommand,
    RankFailed,
    RankReport,
    Resend,
    Step,
)
from medha.topology import Coordinate, Topology
from medha_worker.controller.kv_moves import LEASE_S
from medha_worker.engine import RankEngine
from medha_worker.parallel.collectives import PeerLost
from medha_worker.rank_link import RankLink, StepOrder
from medha_worker.runner import kind_of

VOCAB, PAGE_TOKENS, PAGES = 512, 16, 700
PATIENCE_S = 120.0

Oracle = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]
MakeRig = Callable[..., Rig]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def ended(rig: Rig, at: Coordinate) -> bool:
    """True once the rank's process ends, while the rig keeps sending heartbeats."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        rig.pump(0.02)
        if gone(rig.pids[at]):
            return True
    return False


def driven(rig: Rig, kvp: int) -> Driver:
    rig.start(range(kvp))
    rig.form(1, tuple(range(kvp)))
    return Driver(rig, PAGE_TOKENS, PAGES, generation=1)


def greedy(oracle: Oracle, tokens: npt.NDArray[np.int32], count: int) -> list[int]:
    """The last `count` tokens as transformers would have chosen them."""
    return [int(row.argmax()) for row in oracle(tokens)[-count - 1 : -1]]


def test_sigterm_ends_a_rank(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.start([0])
    rig.kill(Coordinate(0, 0, 0), signal.SIGTERM)
    assert ended(rig, Coordinate(0, 0, 0))


REJOINING = """
import sys
from medha.topology import Coordinate
from medha_worker.rank_link import RankLink

for incarnation in ("a", "b"):
    link = RankLink(sys.argv[1], Coordinate(0, 0, 0), incarnation, print, timeout_s=60.0)
    link.start()
    link.loaded()
    print(link.commands.get().reason, flush=True)
    input()
    link.close()
"""


def test_sigterm_during_a_rejoin_ends_the_rank_after_it(tmp_path: pathlib.Path) -> None:
    address = f"ipc://{tmp_path}/ranks.sock"
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # others block no signal
    ranks: Listener[RankCommand, RankReport] = Listener(
        address, sends=Codec(RankCommand), receives=Codec(RankReport)
    )
    with subprocess.Popen(
        [sys.executable, "-c", REJOINING, address],
        env={**os.environ, **one_thread},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        taken = ranks.receive(PATIENCE_S)
        assert taken is not None
        ranks.send(taken[0], Leave("its controller was replaced", rejoin=True))
        assert process.stdout.readline() == "its controller was replaced\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)  # the link polls signals each 0.25 s
        process.stdin.write("\n")
        process.stdin.flush()
        try:
            assert process.stdout.readline() == "SIGTERM received\n"
        finally:
            process.kill()
            ranks.close()


@pytest.mark.parametrize("rejoin", [True, False])
def test_a_rank_that_loads_obeys_an_order_to_rejoin_once_it_has_its_weights(
    rejoin: bool, tmp_path: pathlib.Path
) -> None:
    """An order to leave for good does not wait: the process ends within its grace."""
    ranks: Listener[RankCommand, RankReport] = Listener(
        f"ipc://{tmp_path}/ranks.sock", sends=Codec(RankCommand), receives=Codec(RankReport)
    )
    exits = list[int]()
    link = RankLink(
        f"ipc://{tmp_path}/ranks.sock",
        Coordinate(0, 0, 0),
        "a",
        lambda command: None,
        timeout_s=60.0,
        grace_s=0.1,
        exit=exits.append,
    )
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    link.start()  # blocks signals in this thread, which the tests to come need
    try:
        taken = ranks.receive(PATIENCE_S)
        assert taken is not None
        order = Leave("its controller was replaced", rejoin=rejoin)
        ranks.send(taken[0], order)
        assert link.commands.get(timeout=PATIENCE_S) == order
        time.sleep(1.0)  # ten times the grace, and the link looks each 0.25 s
        assert bool(exits) is not rejoin
        link.loaded()
        end = time.monotonic() + PATIENCE_S
        while not exits and time.monotonic() < end:
            time.sleep(0.05)
        assert exits and set(exits) == {1}
    finally:
        link.close()
        ranks.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def loads_once_told() -> None:
    """Change ranks: they load once there is a file `go` in their rig's folder."""
    load = RankEngine.__init__

    def told(self: RankEngine, config: WorkerConfig, *arguments: Any) -> None:
        go = pathlib.Path(config.rank_bind.removeprefix("ipc://")).with_name("go")
        while not go.exists():
            time.sleep(0.05)
        load(self, config, *arguments)

    RankEngine.__init__ = told  # type: ignore[method-assign, assignment]


def test_a_rank_whose_controller_is_replaced_while_it_loads_serves_the_next(
    make_rig: MakeRig, oracle: Oracle
) -> None:
    rig, at = make_rig(change=f"{__file__}:{loads_once_told.__name__}"), Coordinate(0, 0, 0)
    rig.launch([0])
    former = rig.incarnations[at]
    form = Form(generation=0, members=(0,), store=f"{rig.store}/former", controller="former")
    rig.send([at], form)
    rig.send([at], Leave("its controller was replaced", rejoin=True))
    end = time.monotonic() + 4.0  # a rank that is blocked after the order ends within 2 s
    while time.monotonic() < end:
        rig.pump(0.02)
    assert not gone(rig.pids[at])
    (rig.folder / "go").touch()
    rig.until(lambda: rig.incarnations[at] != former, "another Hello")
    rig.wire([0])
    answers(rig, oracle, 1, 1)
    assert not gone(rig.pids[at]) and not rig.failed


def answers(rig: Rig, oracle: Oracle, generation: int, kvp: int) -> list[int]:
    """Prefill and decode over all groups, and return the tokens, which equal the oracle's."""
    rig.form(generation, tuple(range(kvp)))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=generation)
    driver.start(1, recalling(300, VOCAB, seed=generation), groups=tuple(range(kvp)))
    driver.prefill(1, (100,) * 3)
    driver.decode([1], 4)
    run = driver.running[1]
    assert run.output == greedy(oracle, run.tokens, len(run.output))
    return run.output


@pytest.mark.parametrize("tp, spp, kvp", [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_ranks_of_a_replaced_controller_rejoin_with_their_weights(
    make_rig: MakeRig, oracle: Oracle, tp: int, spp: int, kvp: int
) -> None:
    rig = make_rig(tp, spp, kvp)
    rig.start(range(kvp))
    first, loads = rig.incarnations.copy(), rig.loads.copy()
    answers(rig, oracle, 1, kvp)
    for _ in range(2):
        rig.replace_controller()
        answers(rig, oracle, 1, kvp)
    assert not any(map(gone, rig.pids.values())) and not rig.failed
    assert not set(first.values()) & set(rig.incarnations.values())
    assert rig.loads == loads, "weights are read once"


def test_a_rank_whose_controller_is_silent_waits_for_another(
    make_rig: MakeRig, oracle: Oracle
) -> None:
    rig = make_rig(rank_timeout_s=2.0)
    rig.start([0])
    (former,) = rig.incarnations.values()
    time.sleep(4.0)  # the rank's own clock runs
    rig.until(lambda: former not in rig.incarnations.values(), "another Hello")
    rig.wire([0])
    answers(rig, oracle, 1, 1)


def test_a_missing_step_is_requested_and_no_step_runs_twice(
    make_rig: MakeRig, oracle: Oracle
) -> None:
    rig = make_rig()
    driver = driven(rig, 1)
    sent: list[Step] = []
    send = rig.send

    def send_with_loss(ranks: object, message: RankCommand) -> None:
        """Lose the second step."""
        if isinstance(message, Step):
            sent.append(message)
            if len(sent) == 2:
                return
        send(ranks, message)  # type: ignore[arg-type]

    rig.send = send_with_loss  # type: ignore[method-assign]
    driver.start(1, recalling(60, VOCAB), groups=(0,))
    batches = [driver.send((1, 20)) for _ in range(3)]
    rig.until(lambda: rig.done(batches[0]), "the first batch")
    rig.until(lambda: bool(rig.gaps), "a gap")
    assert rig.gaps == [Gap(2)]
    send(rig.pids, Resend(2))
    for step in (sent[0], sent[1], sent[2], sent[1]):
        send(rig.pids, step)
    driver.finish(batches[2])
    assert driver.running[1].output == greedy(oracle, driver.running[1].tokens, 1)
    assert sorted(rig.stages) == [1, 2, 3]


def test_the_order_of_steps_is_kept_through_gaps() -> None:
    order, step = (
        StepOrder(),
        msgspec.json.decode(b'{"type":"Step","step":1,"batch":[1,1,[]],"tokens":""}', type=Step),
    )
    numbered = [msgspec.structs.replace(step, step=n) for n in range(5)]
    assert order.take(numbered[1]) is numbered[1]
    assert order.take(numbered[3]) == Gap(2)
    assert order.take(numbered[4]) is None, "the rank reports a gap once"
    order.resent()
    assert order.take(numbered[1]) is None, "the step ran already"
    assert order.take(numbered[3]) == Gap(2), "the resent steps have a gap too"
    order.resent()
    assert [order.take(numbered[n]) for n in (2, 3, 4)] == numbered[2:]


def test_a_lost_rank_ends_the_others_of_its_group(make_rig: MakeRig) -> None:
    rig = make_rig(1, 2, 1, collective_timeout_s=60.0)
    driver = driven(rig, 1)
    driver.start(1, recalling(40, VOCAB), groups=(0,))
    driver.prefill(1, (20,))
    rig.kill(Coordinate(0, 0, 0))
    assert ended(rig, Coordinate(0, 0, 0))
    run = driver.running[1]
    driver.send((1, len(run.tokens) - run.done))
    assert ended(rig, Coordinate(0, 1, 0))
    (where, failure), *_ = rig.failed
    assert where == Coordinate(0, 1, 0) and failure.kind == "group"


def test_a_group_joins_while_the_others_compute(make_rig: MakeRig, oracle: Oracle) -> None:
    """The group starts, loads and joins generation 2 while generation 1 runs batches."""
    rig = make_rig(1, 2, 3)
    driver = driven(rig, 2)
    driver.start(1, recalling(900, VOCAB, seed=4), groups=(0, 1))
    in_flight = [driver.send((1, 48)) for _ in range(6)]
    rig.start([2])
    rig.begin_form(2, (0, 1, 2))
    in_flight += [driver.send((1, 48)) for _ in range(6)]
    rig.until(lambda: rig.formed(2, (0, 1, 2)), "generation 2")
    driver.generation = 2
    driver.grow(1, 2)
    in_flight += [driver.send((1, 100)) for _ in range(3)]
    for batch in in_flight:
        driver.finish(batch)
    rig.dissolve(1, (0, 1))
    driver.prefill(1, (24,))
    driver.decode([1], 3)
    run = driver.running[1]
    assert run.output == greedy(oracle, run.tokens, 4)
    assert set(run.pages) == {0, 2} and not rig.failed


def test_a_rank_that_cannot_load_reports_it_and_exits_with_two(tmp_path: pathlib.Path) -> None:
    bind = f"ipc://{tmp_path}/r"
    config = WorkerConfig(
        replica="r",
        model="m",
        checkpoint=str(tmp_path / "nothing"),
        max_context_tokens=64,
        topology=Topology(),
        rank_bind=bind,
    )
    (tmp_path / "w.json").write_bytes(render(config))
    listener: Listener[RankCommand, RankReport] = Listener(
        bind, sends=Codec(RankCommand), receives=Codec(RankReport)
    )
    rank = subprocess.Popen(
        [sys.executable, "-m", "medha_worker.rank", "--config", str(tmp_path / "w.json")],
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.closing(listener):
        assert rank.wait(timeout=90) == 2
        reports = []
        while (taken := listener.receive(0.2)) is not None:
            reports.append(taken[1])
    failures = [report for report in reports if isinstance(report, RankFailed)]
    assert [failure.kind for failure in failures] == ["model"]
    assert "config.json" in failures[0].message
    assert rank.stderr is not None and "config.json" in rank.stderr.read()
    rank.stderr.close()


@pytest.mark.parametrize("tp, spp", [(1, 1), (1, 2), (2, 1)])
def test_a_lost_group_costs_the_shared_chunks_alone(
    make_rig: MakeRig, oracle: Oracle, tp: int, spp: int
) -> None:
    """Batches with a shared and a private sequence run on without a token for the shared one.

    The next generation serves without the lost group.
    """
    rig = make_rig(tp, spp, 3, collective_timeout_s=60.0)
    driver = driven(rig, 3)
    driver.start(1, recalling(50, VOCAB, seed=1), groups=(0, 1, 2))
    driver.start(2, recalling(50, VOCAB, seed=2), groups=(0,))
    driver.start(3, recalling(40, VOCAB, seed=3), groups=(0, 1))
    driver.prefill(1, (50,))
    driver.prefill(2, (50,))
    rig.kill(Coordinate(2, spp - 1, 0))
    assert ended(rig, Coordinate(2, spp - 1, 0))
    ends_s = time.monotonic() + PATIENCE_S
    batch = driver.send((1, 1), (2, 1))
    survivors = {at for group in (0, 1) for at in rig.topology.group_ranks(group)}
    done = {at for at in survivors if at.shard == 0}
    broken = {at for at in survivors if at.stage == spp - 1}  # the lost rank's column
    while not (rig.stages[batch.number].keys() >= done and broken <= {a for a, _ in rig.failed}):
        rig.pump(0.02)
        if spp > 1 and rig.failed:
            rig.dissolve(1, (0, 1))  # what the controller does when a group is lost
        assert time.monotonic() < ends_s
    assert set(rig.tokens[batch.number]) == {2}, "the private sequence alone has a token"
    failures = {failure.kind for at, failure in rig.failed if at.group < 2}
    assert failures == {"column"}
    rig.forget(2)
    rig.form(2, (0, 1))
    driver.generation = 2
    private = driver.running[2]
    private.tokens = np.append(private.tokens, np.int32(rig.tokens[batch.number][2].token))
    known = len(rig.failed)
    driver.prefill(3, (33,))
    driver.decode([2, 3], 3)
    assert private.output == greedy(oracle, private.tokens, len(private.output))
    shared = driver.running[3]
    assert shared.output == greedy(oracle, shared.tokens, len(shared.output))
    assert len(rig.failed) == known


@pytest.mark.parametrize("end", ["source", "target"])
def test_killing_either_end_of_moves_leaves_no_move_open(
    make_rig: MakeRig, oracle: Oracle, end: str
) -> None:
    """The survivor answers each of many moves at once, keeps serving, and loses no page."""
    rig = make_rig(1, 1, 2)
    driver = driven(rig, 2)
    for seq in range(1, 7):
        driver.start(seq, recalling(320, VOCAB, seed=seq), groups=(0,))
        driver.prefill(seq, (320,))
    victim = Coordinate(0 if end == "source" else 1, 0, 0)
    moves = {driver.move(seq, (page,), 0, 1) for page in range(19) for seq in range(1, 7)}
    if end == "source":  # a target that has answered some moves soon answers all
        rig.until(lambda: len(rig.copied) > 5, "copies")
    rig.kill(victim)
    started_s = time.monotonic()
    assert ended(rig, victim)
    rig.forget(victim.group)
    if end == "source":
        rig.until(lambda: rig.ordered <= rig.copied.keys(), "answers")
        assert time.monotonic() - started_s < LEASE_S, "no hang"
        free_again(driver, rig, Coordinate(1, 0, 0))
    else:
        for move in moves:
            rig.withdraw(move)
        rig.until(lambda: rig.withdrawn.keys() >= moves, "withdrawals")
        assert all(rig.withdrawn.values())
        driver.forget_moves()
        driver.decode(range(1, 7), 2)
        for run in driver.running.values():
            assert run.output == greedy(oracle, run.tokens, len(run.output))
    assert len(rig.copied) < len(moves) or end == "source"
    assert not rig.failed


def free_again(driver: Driver, rig: Rig, survivor: Coordinate) -> None:
    """Run new work on the survivor with the pages of the failed moves."""
    driver.forget_moves()
    group = survivor.group
    driver.free[group] = list(range(PAGES))[::-1]
    rig.form(2, (group,))
    driver.generation = 2
    driver.start(9, recalling(90, VOCAB, seed=9), groups=(group,))
    driver.prefill(9, (41,))
    assert len(driver.running[9].output) == 1


def test_a_stopped_rank_sends_no_heartbeats_and_a_busy_one_does(make_rig: MakeRig) -> None:
    """The link's thread sends heartbeats while main computes: a long chunk is no silence."""
    rig = make_rig()
    driver = driven(rig, 1)
    driver.start(1, recalling(3000, VOCAB), groups=(0,))
    rig.beats.clear()
    batch = driver.send((1, 3000))
    started_s = time.monotonic()
    rig.until(lambda: rig.done(batch), "the batch")
    assert sum(rig.beats.values()) >= int((time.monotonic() - started_s) / 2.0)
    rig.kill(Coordinate(0, 0, 0), signal.SIGSTOP)

    def silent() -> bool:
        rig.beats.clear()
        end = time.monotonic() + 1.0  # two beats
        while time.monotonic() < end:
            rig.pump(0.05)
        return not rig.beats

    rig.until(silent, "silence")
    rig.kill(Coordinate(0, 0, 0), signal.SIGCONT)


@pytest.mark.parametrize(
    "error, kind",
    [
        (PeerLost("x"), "group"),
        (MemoryError(), "memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "model"),
        (Exception("?"), "internal"),
    ],
)
def test_failures_have_kinds(error: Exception, kind: str) -> None:
    assert kind_of(error) == kind
