"""A fleet whose processes are killed one after another while they serve long and short prompts.

After each kill the other processes continue, the killed one restarts, and a new request is served.
Every request in flight ends: with the same tokens as without faults, or with an error that states
the reason. Only clients of a killed router see a broken connection.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from tests.support.medha_up import Answer, Up, complete, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {name: tiny}
spec:
  model: {name: tiny, source: {hostPath: {path: model}}, maxContextTokens: 12288}
  device: {kind: Cpu}
  parallelism: {tp: 1, spp: 2, kvp: {min: 1, max: 2, tokensPerGroup: 6144}}
  slo: {default: {ttft: {floor: 2s, multiplier: "10"}, tpot: 5s, whenInfeasible: Relegate}}
  # Without a prefix cache the same prompt takes the same work each time.
  scheduling: {prefixCache: Disabled, batchBudget: {min: 20ms, max: 200ms}, releaseCooldown: 10m}
  engine: {kvPages: 256}
"""
SMALL = TinyModel(
    layers=4, hidden=128, heads=4, kv_heads=2, head_dim=32, intermediate=352, max_tokens=16384
)
LIMIT_S = 120.0
EVERY_S = 0.4

pytestmark = pytest.mark.timeout(900)


def tokens(seed: int, count: int) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(8, 500) for _ in range(count)]


LONG, SHORT = tokens(1, 9_000), tokens(2, 64)


class Fleet:
    """A `medha up`, and its responses without faults: `short` and `long`."""

    def __init__(self, file: Path) -> None:
        self.shared = set(os.listdir("/dev/shm"))
        self.up = Up(file)
        self.pool = ThreadPoolExecutor(64)
        self.short = self.long = ""

    def wait(self) -> None:
        """Wait until the fleet serves, and record its responses."""
        until(self.up.serves, LIMIT_S)
        self.short, self.long = self.send_short().text, self.send_long().text

    def send_long(self) -> Answer:
        return complete(self.up.url, LONG, 6, LIMIT_S)

    def send_short(self) -> Answer:
        return complete(self.up.url, SHORT, 4, LIMIT_S)

    def groups(self) -> list[str]:
        """Return the states of the groups; empty while the controller does not respond."""
        status = self.up.status()
        return [] if status is None else [group.state for group in status.groups]

    def ranks(self) -> set[psutil.Process]:
        return {child for name, child in self.up.children().items() if "-t0" in name}

    def wait_for_groups(self, count: int) -> None:
        """Wait until `count` groups run; long prompts make the replica grow."""

        def run() -> bool:
            return self.groups().count("running") >= count or self.send_long() is None

        until(run, LIMIT_S)

    def close(self) -> None:
        self.up.kill()
        self.pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    write_checkpoint(folder / "model", SMALL)
    (folder / "tiny.yaml").write_text(RESOURCE)
    started = Fleet(folder / "tiny.yaml")
    try:
        started.wait()
        yield started
    finally:
        started.close()


class Traffic:
    """A long prompt, and short prompts until `ended`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.long = fleet.pool.submit(fleet.send_long)
        self.shorts: list[Future[Answer]] = []

    def working(self) -> bool:
        """Return True once a request runs, soon after the long prompt was sent."""
        self.send_more()
        status = self._fleet.up.status()
        return status is not None and status.running > 0

    def send_more(self) -> None:
        self.shorts.append(self._fleet.pool.submit(self._fleet.send_short))
        time.sleep(EVERY_S)

    def ended(self) -> tuple[Answer, list[Answer]]:
        """Wait for every result; raises TimeoutError if a request hangs."""
        return self.long.result(LIMIT_S), [short.result(LIMIT_S) for short in self.shorts]


def busy(fleet: Fleet) -> Traffic:
    """Start traffic whose long prompt runs; again if it ended while this process did not run."""
    for _ in range(5):
        traffic = Traffic(fleet)
        until(traffic.working, LIMIT_S)
        if not traffic.long.done():
            return traffic
        traffic.ended()
    raise AssertionError("the long prompt must still run")


VICTIMS = ["tiny-0-g0-s0-t0", "tiny-0-g1-s1-t0", "tiny-0-controller", "router"]


@pytest.mark.parametrize("name", VICTIMS)
def test_a_killed_process_restarts_and_every_request_ends_properly(fleet: Fleet, name: str) -> None:
    fleet.wait_for_groups(2 if "-g1-" in name else 1)
    traffic = busy(fleet)
    victim, ranks = fleet.up.children()[name], fleet.ranks()
    victim.send_signal(signal.SIGKILL)

    def back() -> bool:
        traffic.send_more()
        child = fleet.up.children().get(name)
        return child is not None and child != victim and fleet.send_short().whole

    until(back, LIMIT_S)
    _check(fleet, traffic, may_break=name == "router")
    if victim not in ranks:
        assert ranks <= fleet.ranks(), "no rank was loaded again"


def test_a_hanging_rank_is_replaced_and_its_requests_are_served(fleet: Fleet) -> None:
    fleet.wait_for_groups(1)
    traffic = busy(fleet)
    name = "tiny-0-g0-s1-t0"
    victim = fleet.up.children()[name]
    victim.suspend()

    def back() -> bool:
        traffic.send_more()
        return fleet.up.children().get(name, victim) != victim and fleet.send_short().whole

    until(back, LIMIT_S)
    _check(fleet, traffic, may_break=False)


def test_at_the_end_nothing_is_left(fleet: Fleet) -> None:
    everything = fleet.up.everything()
    assert fleet.up.end(signal.SIGINT) == 0
    assert [process for process in everything if process.is_running()] == []
    assert set(os.listdir("/dev/shm")) <= fleet.shared
    assert not [path for path in fleet.up.run_dir.iterdir() if path.is_socket()]


def _check(fleet: Fleet, traffic: Traffic, *, may_break: bool) -> None:
    long, shorts = traffic.ended()
    for answer, expected in [(long, fleet.long), *((short, fleet.short) for short in shorts)]:
        if answer.whole:
            assert answer.text == expected
        else:
            assert answer.refused or (may_break and answer.broken), answer
