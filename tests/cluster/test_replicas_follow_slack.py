"""Replicas follow the slack of requests on a whole cluster: more, fewer, none, and again.

A replica is one process on one core, so that the second one has a core of its own. Each decision of
the operator is recorded, shown below the last test (`pytest -rP`), and replayed. The last test
takes a quarter of an hour: for ten minutes of it nothing may happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from demos.load import Load, one
from demos.release import NAMESPACE, Installed
from demos.testbed import until
from rich.console import Console
from rich.table import Table

from medha.cli.open_loop import Target, ask, connect, faults, prompts_from, vocabulary
from medha.cli.scaling import run_scaling
from medha.fleet.autoscaling import Journal, ScalingRecord
from medha.fleet.demand import WINDOW_S
from medha.sim import report
from medha.sim.workload import Arrival

pytestmark = pytest.mark.timeout(2400)  # the images may have to be built

SHORT, LONG = 64, 4096
OVERLOAD = 1.4
"""Work of the long prompts, as a multiple of one replica's capacity."""
CHANGE_S, AFTER_S = 300.0, 25.0
TARGET, NOISY = 1.0, 0.5
NOISE_S, NEAR, LOOK_S = 600.0, 0.15, 2.0
"""Length of the noise; distance of the slack's tenth percentile from the target, on average over
half a minute, before it starts; the operator's interval."""
ALONE: dict[str, object] = {
    "replicas": 1,
    "parallelism": {"spp": 1},
    "slo": {
        "default": {
            "ttft": {"floor": "2s", "multiplier": "4"},
            "tpot": "2s",
            "whenInfeasible": "Relegate",
        }
    },
    "autoscaling": {
        "minReplicas": 1,
        "maxReplicas": 2,
        "targetSlackP10": str(TARGET),
        "scaleDownStabilization": "20s",
    },
}


class Scaled:
    """The resource with autoscaling, and the operator's published decisions."""

    def __init__(self, medha: Installed, folder: Path, table: Table) -> None:
        self.medha, self._folder, self._table = medha, folder, table

    @contextlib.contextmanager
    def url(self) -> Iterator[str]:
        with self.medha.bed.forwarded(NAMESPACE, "service/medha-router", 8000) as url:
            yield url

    @contextlib.contextmanager
    def operator(self) -> Iterator[str]:
        with self.medha.bed.forwarded(NAMESPACE, "deployment/medha-operator", 8081) as url:
            yield url

    def scaling(self, **changes: object) -> None:
        self.medha.patch({"autoscaling": changes})

    def replicas(self) -> int:
        return int(self.medha.resource()["spec"]["replicas"])

    def active(self) -> Mapping[str, Any]:
        """The condition ScalingActive."""
        conditions = [
            condition
            for condition in self.medha.conditions()
            if condition["type"] == "ScalingActive"
        ]
        return conditions[0] if conditions else {"status": "", "reason": "", "message": ""}

    def settled(self, count: int) -> bool:
        """Return true if this many replicas are requested, ready, and the only ones."""
        return (
            self.replicas() == count == self.medha.ready_replicas()
            and len(self.medha.pods()) == count
        )

    def looks(self, since_s: float) -> list[ScalingRecord]:
        """The operator's records since a wall time; each is replayed."""
        path = self._folder / "scaling.json"
        with self.operator() as url:
            kept = journal(url)
        path.write_bytes(msgspec.json.encode({"default/tiny": kept}))
        run_scaling(path, Console(width=140))  # raises if a decision differs
        return [look for look in kept.looks if look.signals.at_s >= since_s]

    def tell(self, what: str, looks: list[ScalingRecord], since_s: float) -> None:
        """Add a row for each record that is unlike the one before it."""
        before: object = None
        for look in looks:
            signals, decision = look.signals, look.decision
            now = (signals.current, signals.ready, decision.replicas, decision.why)
            if now != before:
                slack = "-" if signals.slack_p10 is None else f"{signals.slack_p10:.2f}"
                self._table.add_row(
                    what,
                    f"{signals.at_s - since_s:.0f} s",
                    f"{signals.ready}/{signals.current}",
                    f"{decision.replicas}",
                    decision.why,
                    slack,
                    f"{signals.offered:.2f}",
                    str(signals.held),
                )
            before, what = now, ""

    def say(self, line: str) -> None:
        """Add a line below the table."""
        self._table.caption = f"{self._table.caption or ''}\n{line}".lstrip()


def journal(operator: str) -> Journal:
    """The operator's last records of the resource."""
    page = httpx.get(f"{operator}/scaling", trust_env=False, timeout=30.0).content
    return msgspec.json.decode(page, type=dict[str, Journal])["default/tiny"]


def changes(looks: list[ScalingRecord]) -> list[tuple[int, str]]:
    """Changes to a number of replicas, with the reason; a repeated record counts once."""
    changes: list[tuple[int, str]] = []
    for look in looks:
        count = look.decision.replicas
        if count != look.signals.current and [count] != [last for last, _ in changes[-1:]]:
            changes.append((count, look.decision.why))
    return changes


def slacks(looks: list[ScalingRecord]) -> list[float]:
    return [slack for look in looks if (slack := look.signals.slack_p10) is not None]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    table = Table(
        "what",
        "at",
        "ready",
        "wanted",
        "why",
        "slack P10",
        "offered",
        "held",
        caption_justify="left",
    )
    yield table
    Console(width=140).print(table)


@pytest.fixture(scope="module")
def scaled(
    medha: Installed, table: Table, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scaled]:
    before = medha.resource()["spec"]
    medha.patch(ALONE)
    scaled = Scaled(medha, tmp_path_factory.mktemp("scaling"), table)
    until(lambda: scaled.settled(1), "one replica of one process", CHANGE_S)
    yield scaled
    back: dict[str, object] = {name: before[name] for name in ("slo", "parallelism")}
    medha.patch({**back, "replicas": before["replicas"], "autoscaling": None})
    until(
        lambda: medha.ready_replicas() == 2 and len(medha.pods()) == 4, "as it was before", CHANGE_S
    )


def work_s(url: str) -> float:
    """Seconds that an idle replica takes for a long prompt, on the machine as busy as it is now."""
    answers = [asyncio.run(one(url, "tiny", LONG, 1, f"alone-{number}")) for number in range(4)]
    return statistics.median(answer.ttft_s or float("inf") for answer in answers)


def unserved(*loads: Load) -> dict[str, int]:
    """Number of requests without a complete answer, by their fault."""
    counts: dict[str, int] = {}
    for load in loads:
        load.end()
        counts |= faults(load.records)
        cut = sum(record.finished_s is None and not record.refused for record in load.records)
        counts |= {"cut": cut} if cut else {}
    return counts


def test_long_prompts_add_a_second_replica_that_is_removed_after_the_load(scaled: Scaled) -> None:
    with scaled.url() as url:
        alone_s = work_s(url)
        began_s = time.time()
        with Load(url, "tiny", 1.0, SHORT, output_tokens=8) as trickle:
            rate = 4 * OVERLOAD / alone_s
            with Load(url, "tiny", rate, SHORT, SHORT, SHORT, LONG, output_tokens=4) as load:
                until(lambda: scaled.replicas() == 2, "a second replica is wanted", CHANGE_S)
                until(lambda: scaled.settled(2), "a second replica serves", CHANGE_S)
                time.sleep(AFTER_S)  # until its effect is visible
                ended_s = time.time()
                load.end()
            until(lambda: scaled.replicas() == 1, "one replica is enough", CHANGE_S)
            until(lambda: scaled.settled(1), "the second replica is gone", CHANGE_S)
        looks = scaled.looks(began_s)
    scaled.tell("long prompts", looks, began_s)
    scaled.say(
        f"a long prompt takes {alone_s:.2f} s; load ended after {ended_s - began_s:.0f} s; "
        f"{len(load.records)} + {len(trickle.records)} requests, TTFT p99 "
        f"{load.ttft_p99_s():.1f} s and {trickle.ttft_p99_s():.1f} s",
    )
    assert unserved(load, trickle) == {}
    (more, why), (fewer, _) = changes(looks)
    assert (more, fewer) == (2, 1) and why in ("LittleSlack", "MissedSlo")
    up = next(look for look in looks if look.decision.replicas == 2)
    assert up.signals.slack_p10 is not None and up.signals.slack_p10 < TARGET
    down = next(look for look in looks if look.decision.replicas < look.signals.current)
    assert down.signals.at_s > ended_s


def test_another_writer_of_scale_is_named_and_its_number_stands_for_a_while(scaled: Scaled) -> None:
    medha, began_s = scaled.medha, time.time()
    medha.bed.kubectl("scale", "mr/tiny", "--replicas=2")
    until(lambda: scaled.active()["reason"] == "OutsideWriter", "the condition to report it", 60.0)
    condition = scaled.active()
    assert condition["status"] == "False" and "kubectl" in condition["message"]
    assert "set spec.replicas to 2" in condition["message"] and scaled.replicas() == 2
    until(lambda: scaled.settled(1), "the operator's own number", CHANGE_S)
    until(lambda: scaled.active()["reason"] == "Scaling", "that it scales again", 60.0)
    scaled.tell("kubectl scale", scaled.looks(began_s), began_s)
    events = medha.bed.get("events", "--field-selector", "reason=Scaled")["items"]
    assert any(event["message"].startswith("from 2 to 1 replicas (Surplus)") for event in events)


@pytest.fixture
def zero(scaled: Scaled) -> Iterator[Scaled]:
    """The resource scaled to zero, while there are no requests."""
    scaled.scaling(minReplicas=0)
    until(lambda: scaled.settled(0), "no replica", CHANGE_S)
    yield scaled
    scaled.scaling(minReplicas=1)
    until(lambda: scaled.settled(1), "one replica again", CHANGE_S)


def test_the_first_request_of_a_model_at_zero_is_held_and_answered(zero: Scaled) -> None:
    """Answered by routers that had its replicas, and by routers started at zero."""
    medha = zero.medha
    for routers in ("fresh routers", "the same routers"):
        if routers == "fresh routers":
            for verb in ("restart", "status"):
                medha.bed.kubectl(
                    "-n", NAMESPACE, "rollout", verb, "deployment/medha-router", timeout_s=300.0
                )
            until(lambda: len(routers_of(medha)) == 2, "no router but the fresh ones", 60.0)
        until(lambda: zero.settled(0), "no replica", CHANGE_S)
        began_s = time.time()
        with zero.url() as url:
            models = httpx.get(f"{url}/v1/models", trust_env=False, timeout=30.0).json()["data"]
            assert [model["id"] for model in models] == ["tiny"]
            record = asyncio.run(first(url))
        assert not record.refused and record.finished_s is not None
        looks = zero.looks(began_s)
        zero.tell(f"first request, {routers}", looks, began_s)
        zero.say(f"{routers}: the first token came after {record.ttft_s:.1f} s")
        assert changes(looks)[0] == (1, "FirstRequest")


def routers_of(medha: Installed) -> list[dict[str, Any]]:
    """The routers' pods, those being deleted included."""
    label = "app.kubernetes.io/component=router"
    pods: list[dict[str, Any]] = medha.bed.get("-n", NAMESPACE, "pods", "-l", label)["items"]
    return pods


async def first(url: str) -> report.RequestRecord:
    """Send a request as token ids: without a replica, no router has the vocabulary."""
    target = Target(url=url, model="tiny")
    arrival = Arrival(id="first", arrival_s=0.0, prompt_tokens=SHORT, output_tokens=8)
    async with connect(url) as client:
        return await ask(client, target, arrival, list(range(100, 100 + SHORT)), time.monotonic())


class Noise:
    """Four requests at once every three seconds, so that half of them wait for another.

    The slack of each is drawn at random; for every second four, around a level that keeps the tenth
    percentile, as `looks` shows it, near the target.
    """

    AT_ONCE, EVERY_S, TOKENS = 4, 3.0, 512
    SPREAD, WIDTH, PART = 0.25, 1.0, 0.05

    def __init__(self, url: str, looks: Callable[[], list[ScalingRecord]], work_s: float) -> None:
        self._url, self._looks, self._work_s = url, looks, work_s
        self._dice, self._level = random.Random(0), NOISY
        self.records: list[report.RequestRecord] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="noise")

    def __enter__(self) -> Noise:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    async def _run(self) -> None:
        async with connect(self._url) as client, asyncio.TaskGroup() as tasks:
            prompts = prompts_from(await vocabulary(client, self._target(1.0)), seed=2)
            start, number, drawn = time.monotonic(), 0, 0.0
            watch = tasks.create_task(self._watch())
            while not self._over.is_set():
                burst_s = number // self.AT_ONCE * self.EVERY_S
                await asyncio.sleep(max(0.0, start + burst_s - time.monotonic()))
                if number % (2 * self.AT_ONCE) == 0:
                    drawn = self._dice.gauss(self._level, self.SPREAD)
                for _ in range(self.AT_ONCE):
                    arrival = Arrival(
                        id=f"noise-{number}",
                        arrival_s=burst_s,
                        prompt_tokens=self.TOKENS,
                        output_tokens=1,
                    )
                    works = max(1.1, 2.0 + drawn + self.WIDTH * self._dice.random())
                    target = self._target(works * self._work_s)
                    tasks.create_task(self._one(client, target, arrival, prompts(arrival), start))
                    number += 1
            watch.cancel()

    async def _watch(self) -> None:
        """Follow, apart from the load, the predicted work of a request and the distance from the
        target."""
        while True:
            await asyncio.sleep(self.EVERY_S)
            looks = await asyncio.to_thread(self._looks)
            if looks and (slack_now := slacks(looks[-1:])):
                self._work_s = looks[-1].signals.offered * self.EVERY_S / self.AT_ONCE
                self._level += self.PART * min(1.0, max(-1.0, NOISY - slack_now[0]))

    def _target(self, ttft_s: float) -> Target:
        return Target(url=self._url, model="tiny", ttft_s=ttft_s, tpot_s=2.0)

    async def _one(
        self,
        client: httpx.AsyncClient,
        target: Target,
        arrival: Arrival,
        prompt: list[int],
        start: float,
    ) -> None:
        self.records.append(await ask(client, target, arrival, prompt, start))


def near(looks: list[ScalingRecord]) -> bool:
    """Return true if the slack of the last half minute is near the target, on average."""
    recent = slacks(looks)[-round(WINDOW_S / LOOK_S) :]
    return len(recent) * LOOK_S >= WINDOW_S and abs(statistics.mean(recent) - NOISY) < NEAR


def test_ten_minutes_of_noise_about_the_target_change_nothing(scaled: Scaled) -> None:
    """Start with two replicas; the work needs one, and four are allowed."""
    noisy = {"scaleDownStabilization": "3m", "targetSlackP10": str(NOISY)}
    scaled.scaling(minReplicas=2, maxReplicas=2, **noisy)
    until(lambda: scaled.settled(2), "two replicas", CHANGE_S)
    with scaled.url() as url, scaled.operator() as operator:
        work_s = min(
            asyncio.run(one(url, "tiny", Noise.TOKENS, 1, f"before-{number}")).ttft_s or 9
            for number in range(4)
        )
        began_s = time.time()

        def looks() -> list[ScalingRecord]:
            """Records from when nothing but noise is in the operator's window."""
            full_s = began_s + WINDOW_S
            return [record for record in journal(operator).looks if record.signals.at_s > full_s]

        with Noise(url, looks, work_s) as noise:
            until(lambda: near(looks()), "slack about the target", CHANGE_S)
            scaled.scaling(minReplicas=1, maxReplicas=4)
            since_s = time.time()
            time.sleep(NOISE_S)  # the length of the noise is the subject
            seen = scaled.looks(since_s)
    slack = slacks(seen)
    scaled.tell("noise", seen, since_s)
    alone = [look.signals.alone_p10 or 0.0 for look in seen]
    scaled.say(
        f"{len(noise.records)} requests of noise, {len(seen)} looks, target {NOISY:.2f}, slack P10 "
        f"{min(slack):.2f} to {max(slack):.2f}, mean {statistics.mean(slack):.2f}, spread "
        f"{statistics.pstdev(slack):.2f}; of idle replicas {min(alone):.2f} to {max(alone):.2f}"
    )
    assert faults(noise.records) == {}
    least, most = NOISY - seen[0].policy.band, NOISY + seen[0].policy.band
    assert min(slack) < least < most < max(slack) and min(alone) > most
    assert changes(seen) == []
    scaled.scaling(
        minReplicas=1, maxReplicas=2, targetSlackP10=str(TARGET), scaleDownStabilization="20s"
    )
    until(lambda: scaled.settled(1), "one replica again", CHANGE_S)
