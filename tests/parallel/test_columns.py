"""Partial attention merged over groups, and the pipe: exact, bit-equal, and free of deadlock."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

from medha.errors import EngineError
from medha_worker.parallel.collectives import PeerLost, SharedRows
from medha_worker.parallel.communicator import Communicator, join
from medha_worker.parallel.kvp import GroupColumn
from medha_worker.parallel.mesh import Column, dial_store, serve_store
from medha_worker.parallel.pipeline_parallel import Pipeline

HEADS, DIM = 3, 8


class Net:
    """Threads that act as ranks, on a store of their own."""

    def __init__(self) -> None:
        self._store, self._address = serve_store("127.0.0.1:0")
        self._names = 0

    def connect(self, size: int) -> list[Communicator]:
        self._names += 1
        name, members = f"n{self._names}", dict[int, Communicator]()

        def member(rank: int) -> None:
            members[rank] = join(
                dial_store(self._address, 5.0),
                name,
                rank,
                size,
                incarnation=str(rank),
                interface="lo",
                timeout_s=60.0,
            )

        run_all([lambda rank=rank: member(rank) for rank in range(size)])  # type: ignore[misc]
        return [members[rank] for rank in range(size)]


def run_all(calls: list[Callable[[], None]], timeout_s: float = 120.0) -> None:
    errors: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not errors, errors[0]
    assert not any(thread.is_alive() for thread in threads), "deadlock"


@pytest.fixture(scope="module")
def net() -> Net:
    return Net()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Plain attention and its log-sum-exp: q [rows, heads, dim], k and v [n, heads, dim]."""
    scores = torch.einsum("rhd,nhd->rhn", q, k) / DIM**0.5
    return torch.einsum("rhn,nhd->rhd", scores.softmax(-1), v), scores.logsumexp(-1)


def test_shards_merge_to_the_attention_over_all_keys_with_equal_bits(net: Net) -> None:
    """Four rows of groups {0,1,2}, two of {0,2}, one private; group 1's shard is empty."""
    dice = torch.Generator().manual_seed(3)
    members = net.connect(3)
    q = torch.randn(7, HEADS, DIM, generator=dice)
    k, v = (torch.randn(50, HEADS, DIM, generator=dice) for _ in range(2))
    shards = {0: slice(0, 20), 1: slice(0, 0), 2: slice(20, 50)}
    layout = {
        0: (SharedRows(1, 4, (0, 1, 2)), SharedRows(5, 2, (0, 2))),
        1: (SharedRows(0, 4, (0, 1, 2)),),
        2: (SharedRows(0, 4, (0, 1, 2)), SharedRows(4, 2, (0, 2))),
    }
    rows = {0: [6, 0, 1, 2, 3, 4, 5], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3, 4, 5]}
    merged: dict[int, torch.Tensor] = {}

    def rank(group: int) -> None:
        out, lse = attention(q[rows[group]], k[shards[group]], v[shards[group]])
        column = GroupColumn(group, Column(1, (0, 1, 2), members[group]))
        for _ in range(2):  # layers
            merged[group] = column.merge(out.clone(), lse, layout[group])
        if group == 0:
            assert torch.equal(merged[0][:1], out[:1]), "the private row stays as it was"
        assert column.failure is None

    run_all([lambda g=g: rank(g) for g in range(3)])  # type: ignore[misc]
    whole, _ = attention(q, k, v)
    torch.testing.assert_close(merged[1], whole[:4], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(merged[0][1:], whole[:6], atol=2e-6, rtol=1e-5)
    assert torch.equal(merged[0][1:5], merged[1]) and torch.equal(merged[1], merged[2][:4])
    assert torch.equal(merged[0][5:], merged[2][4:])


def test_overlapping_groups_never_deadlock(net: Net) -> None:
    """{0,1}, {1,2}, {0,2} over three stages with random delays; every rank keeps number order."""
    stages, groups, batches, hidden = 3, 3, 40, HEADS * DIM
    dice = random.Random(5)
    sets = [dice.choice([(0, 1), (1, 2), (0, 2), (0, 1, 2), (0,), (2,)]) for _ in range(batches)]
    pipes = {group: net.connect(stages) for group in range(groups)}
    columns = {stage: net.connect(groups) for stage in range(stages)}
    seen: dict[tuple[int, int], list[int]] = {}
    sums: dict[int, dict[int, torch.Tensor]] = {number: {} for number in range(batches)}

    def rank(group: int, stage: int) -> None:
        delay = random.Random(group * 10 + stage)
        pipe = Pipeline(pipes[group][stage], hidden, torch.float32, depth=stages)
        for number, members in enumerate(sets):
            if group not in members:
                continue
            rows = 1 + number % 4
            x = torch.full((rows, hidden), float(number))
            if not pipe.first:
                x, note = pipe.receive(number, rows)
                assert not note.broken()
            shared = (SharedRows(0, rows, members),) if len(members) > 1 else ()
            column = GroupColumn(group, Column(1, (0, 1, 2), columns[stage][group]))
            for _ in range(2):
                time.sleep(delay.random() * 0.003)
                out = x.view(rows, HEADS, DIM) + 0.0
                x = column.merge(out, torch.zeros(rows, HEADS), shared).view(rows, hidden)
            assert column.failure is None
            pipe.send(number, x, broken=False)
            seen.setdefault((group, stage), []).append(number)
            if pipe.last:
                sums[number][group] = x
        pipe.drain()

    run_all([lambda g=g, s=s: rank(g, s) for g in range(groups) for s in range(stages)])  # type: ignore[misc]
    for group in range(groups):
        expected = [number for number, members in enumerate(sets) if group in members]
        assert all(seen[group, stage] == expected for stage in range(stages))
    for number, members in enumerate(sets):
        for group in members:
            assert torch.allclose(sums[number][group], torch.tensor(float(number)))


def test_a_lost_peer_breaks_the_shared_rows_alone(net: Net) -> None:
    members = net.connect(2)
    column = GroupColumn(0, Column(1, (0, 1), members[0]))
    members[1].abort()
    out = torch.randn(3, HEADS, DIM)
    kept = column.merge(out.clone(), torch.zeros(3, HEADS), (SharedRows(1, 2, (0, 1)),))
    assert isinstance(column.failure, PeerLost)
    assert torch.equal(kept, out)
    assert members[0].aborted, "leaving the generation notifies the other members"


def test_rows_of_unknown_groups_are_refused(net: Net) -> None:
    members = net.connect(2)
    column = GroupColumn(0, Column(1, (0, 1), members[0]))
    with pytest.raises(EngineError, match="all must be members"):
        column.merge(torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS), (SharedRows(0, 1, (0, 2)),))


def test_a_column_of_one_breaks_shared_rows() -> None:
    column = GroupColumn(0, Column(1, (0,), None))
    column.merge(torch.zeros(1, HEADS, DIM), torch.zeros(1, HEADS), (SharedRows(0, 1, (0, 1)),))
    assert "form a generation" in str(column.failure)


def test_a_stage_continues_before_the_next_has_taken_its_rows(net: Net) -> None:
    first, second = (Pipeline(member, 4, torch.float32, depth=2) for member in net.connect(2))
    for number in (1, 2):
        first.send(number, torch.full((2, 4), float(number)), broken=number == 2)
    second.expect(1, 2)
    second.expect(2, 2)
    rows, note = second.receive(1, 2)
    assert rows.tolist() == [[1.0] * 4] * 2 and not note.broken()
    rows, note = second.receive(2, 2)
    assert rows.tolist() == [[2.0] * 4] * 2 and note.broken()
    first.drain()


def test_the_pipe_slows_a_stage_that_is_too_far_ahead(net: Net) -> None:
    ends = net.connect(2)
    first, second = (Pipeline(end, 4, torch.float32, depth=1) for end in ends)
    passed = threading.Event()

    def ahead() -> None:
        for number in (1, 2):
            first.send(number, torch.zeros(1, 4), broken=False)
        passed.set()
        first.drain()

    def behind() -> None:
        assert not passed.wait(0.3)
        for number in (1, 2):
            second.receive(number, 1)

    run_all([ahead, behind])
    assert passed.is_set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_batch_than_the_one_due_is_an_error(net: Net, dtype: torch.dtype) -> None:
    first, second = (Pipeline(end, 4, dtype, depth=2) for end in net.connect(2))
    first.send(126, torch.zeros(1, 4, dtype=dtype), broken=False)
    first.send(130, torch.zeros(1, 4, dtype=dtype), broken=False)
    assert second.receive(126, 1)[0].shape == (1, 4)
    with pytest.raises(EngineError, match="out of step"):
        second.receive(129, 1)[1].broken()
    first.drain()
