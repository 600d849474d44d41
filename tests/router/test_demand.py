"""Demand that a router reports, and requests held for a model without replicas."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from medha.config import RouterModel
from medha.errors import Refusal
from medha.fleet.demand import REFUSED_RATIO, UNSERVED_S, WINDOW_S, DemandWindow
from medha.messages import ClassDemand, Failed, Load, LoadReport, ModelDemand, RouterDemand
from medha.metrics import RATIO
from medha.request import Request, Slo, SloClass
from medha_router.models import ModelRegistry
from medha_router.replicas import ConnectedReplica, ReplicaTable
from medha_router.tokenization.detokenizer import Vocabulary

Routers = Callable[..., Any]
EVENTUALLY_S = 20.0


def demand_of(running: Any, model: str = "tiny") -> ModelDemand:
    report = msgspec.json.decode(running.ops.get("/demand").content, type=RouterDemand)
    assert report.window_s == WINDOW_S
    (of,) = [entry for entry in report.models if entry.model == model]
    return of


def reported_misses(running: Any) -> float:
    lines = running.ops.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("medha_slo_missed_total{")
    )


def above(counts: tuple[int, ...], ratio: float) -> int:
    return sum(counts[sum(edge <= ratio for edge in RATIO) :])


def test_slack_at_arrival_counts_admitted_and_refused_requests(
    running_with: Routers, eventually: Callable[..., None]
) -> None:
    running = running_with()
    controller = running.open()
    running.client.completions.create(model="tiny", prompt="say ok", max_tokens=4)
    report = demand_of(running)
    assert sum(report.slack_counts) == above(report.slack_counts, 1.0) == 1
    assert [(entry.name, entry.met, entry.missed) for entry in report.classes] == [
        ("default", 1, 0)
    ]
    assert report.work_s > 0.0 and report.held == 0
    controller.load = msgspec.structs.replace(controller.load, free_pages=(0,))

    def refused() -> bool:
        """Return True once the replica's load has arrived."""
        body = {"model": "tiny", "prompt": "say no", "max_tokens": 4}
        return bool(running.http.post("/v1/completions", json=body).status_code == 503)

    eventually(refused, EVENTUALLY_S)
    report = demand_of(running)
    assert sum(report.slack_counts) > above(report.slack_counts, 0.0)
    assert sum(entry.missed for entry in report.classes) == 1


def test_a_deadline_that_no_idle_replica_meets_is_no_demand(
    running_with: Routers,
) -> None:
    running = running_with()
    running.open()
    with pytest.raises(openai.RateLimitError, match="earliest that can be promised"):
        running.client.completions.create(
            model="tiny", prompt="say ok", max_tokens=4, extra_headers={"x-medha-class": "eager"}
        )
    report = demand_of(running)
    assert sum(report.slack_counts) == 0 and report.classes == ()


def test_a_deadline_that_no_idle_replica_meets_is_no_miss() -> None:
    demand = DemandWindow()
    hopeless = Request(id="h", arrival_s=0.0, prompt_tokens=9, ttft_deadline_s=1.0, work_s=2.0)
    demand.over("m", hopeless, False, 1.0)
    assert demand.of("m", 1.0).classes == ()
    demand.over("m", msgspec.structs.replace(hopeless, work_s=0.5), False, 1.0)
    demand.over("m", hopeless, True, 1.0)
    assert demand.of("m", 1.0).classes == (ClassDemand(name="default", met=1, missed=1),)


def test_a_time_per_token_that_no_idle_replica_meets_is_no_miss() -> None:
    demand = DemandWindow()
    fast = Request(
        id="f",
        arrival_s=0.0,
        prompt_tokens=9,
        max_output_tokens=9,
        ttft_deadline_s=1.0,
        work_s=0.5,
        tpot_s=0.01,
    )
    demand.over("m", fast, False, 1.0, least_tpot_s=0.02)
    assert demand.refused("m", fast, Refusal("overloaded", ""), 1.0, least_tpot_s=0.02) is None
    assert demand.of("m", 1.0) == ModelDemand(model="m")
    late = Refusal("deadline_infeasible", "", earliest_ttft_s=2.0, idle_ttft_s=0.6)
    assert demand.refused("m", fast, late, 1.0, least_tpot_s=0.02) == -2.0
    report = demand.of("m", 1.0)
    assert report.classes == () and sum(report.slack_counts) == 1  # of the first token
    demand.over("m", fast, True, 1.0, least_tpot_s=0.02)
    demand.over("m", fast, False, 1.0, least_tpot_s=0.005)
    single = msgspec.structs.replace(fast, max_output_tokens=1)
    demand.over("m", single, False, 1.0, least_tpot_s=0.02)
    assert demand.of("m", 1.0).classes == (ClassDemand(name="default", met=1, missed=2),)


def test_a_tpot_faster_than_any_replica_adds_no_replicas(running_with: Routers) -> None:
    running = running_with()
    running.open()
    hurried = {"x-medha-slo-tpot-ms": "0.0001"}
    with pytest.raises(openai.BadRequestError):
        running.client.completions.create(
            model="tiny", prompt="say hello", max_tokens=20, extra_headers=hurried
        )
    report = demand_of(running)
    assert report.classes == () and sum(report.slack_counts) == 0


@pytest.mark.parametrize(("code", "missed"), [("memory", 0), ("overloaded", 1)])
def test_only_failures_for_lack_of_room_count_as_preventable_misses(
    running_with: Routers, code: str, missed: int
) -> None:
    running = running_with()
    running.open().fails = Failed("x", code, "the request failed")
    with pytest.raises(openai.InternalServerError):
        running.client.completions.create(model="tiny", prompt="say hello", max_tokens=20)
    assert reported_misses(running) == 1
    assert sum(entry.missed for entry in demand_of(running).classes) == missed


def test_slack_is_counted_next_to_the_slack_on_an_idle_replica() -> None:
    demand = DemandWindow()
    request = Request(id="a", arrival_s=0.0, prompt_tokens=9, ttft_deadline_s=4.0, work_s=1.0)
    assert demand.taken("m", request, 2.0, 1.0, 1.0) == 2.0
    assert demand.taken("m", request, 6.0, 1.2, 1.0) == -2.0
    hopeless = msgspec.structs.replace(request, work_s=5.0)
    assert demand.taken("m", hopeless, 6.0, 6.0, 1.0) is None
    report = demand.of("m", 1.0)
    assert (
        sum(report.slack_counts) == sum(report.alone_counts) == above(report.alone_counts, 2.0) == 2
    )
    assert above(report.slack_counts, 0.0) == 1 and report.work_s == 7.0


def test_a_refusal_that_an_idle_replica_would_repeat_is_no_demand() -> None:
    demand = DemandWindow()
    request = Request(id="a", arrival_s=0.0, prompt_tokens=9, ttft_deadline_s=4.0, work_s=1.0)

    def refused(idle_ttft_s: float, earliest_ttft_s: float) -> float | None:
        refusal = Refusal(
            "deadline_infeasible", "", earliest_ttft_s=earliest_ttft_s, idle_ttft_s=idle_ttft_s
        )
        return demand.refused("m", request, refusal, 1.0)

    assert refused(4.5, 4.5) is None and refused(4.5, 9.0) is None
    assert demand.of("m", 1.0) == ModelDemand(model="m")
    assert refused(3.0, 6.0) == -2.0 and refused(3.0, 3.5) == 0.0
    assert demand.refused("m", request, Refusal("overloaded", ""), 1.0) == REFUSED_RATIO
    report = demand.of("m", 1.0)
    assert report.work_s == 3.0 and report.classes == (ClassDemand(name="default", missed=3),)


def test_a_window_drops_older_requests() -> None:
    demand = DemandWindow()
    brought = Request(id="a", arrival_s=0.0, prompt_tokens=9, ttft_deadline_s=5.0, work_s=2.0)
    demand.taken("m", brought, 4.9, 2.0, 100.0)
    demand.arrived("m", msgspec.structs.replace(brought, work_s=3.0), 100.9)
    demand.ended("m", "a", True, 101.0)
    report = demand.of("m", 102.0)
    assert report.work_s == 5.0 and sum(report.slack_counts) == 1
    assert above(report.alone_counts, 1.0) == 1 and above(report.slack_counts, 0.1) == 0
    assert demand.of("m", 100.0 + WINDOW_S + 2.0) == ModelDemand(model="m")


def test_an_unserved_request_demands_a_replica_a_while_longer() -> None:
    demand = DemandWindow()
    with demand.holding("m"), demand.holding("m"):
        assert demand.of("m", 0.0).held == 2
    assert demand.of("m", 0.0).held == 0
    demand.unserved("m", 5.0)
    assert demand.of("m", 6.0).held == 1
    assert demand.of("m", 5.0 + UNSERVED_S).held == 0
    demand.forget([])
    assert demand.of("m", 6.0).held == 0


def published(path: Path, **changes: Any) -> None:
    model = RouterModel(
        name="tiny",
        max_context_tokens=2048,
        hold_s=60.0,
        classes=(SloClass(name="default", slo=Slo(ttft_floor_s=0.05)),),
    )
    fresh = path.with_suffix(".new")
    fresh.write_bytes(msgspec.json.encode([msgspec.structs.replace(model, **changes)]))
    fresh.replace(path)


def test_a_new_router_holds_requests_for_a_model_without_replicas(
    running_with: Routers, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """The deadline passes long before the first replica joins; the request is served anyway."""
    published(tmp_path / "models.json")
    running = running_with(
        models=(),
        learn=True,
        learn_s=0.0,
        no_replica_timeout_s=0.1,
        models_file=str(tmp_path / "models.json"),
    )
    assert [entry.id for entry in running.client.models.list()] == ["tiny"]
    texts: list[str] = []

    def ask() -> None:
        answer = running.client.completions.create(model="tiny", prompt="say hi", max_tokens=9)
        texts.append(answer.choices[0].text)

    client = threading.Thread(target=ask)
    client.start()
    eventually(lambda: demand_of(running).held == 1, EVENTUALLY_S)
    running.open()
    client.join(EVENTUALLY_S)
    assert texts == ["hi"]
    assert demand_of(running).held == 0
    assert sum(demand_of(running).slack_counts) == 0


def test_a_model_published_later_is_served_and_a_removed_one_is_forgotten(
    tmp_path: Path, make_hello: Callable[..., Any]
) -> None:
    path = tmp_path / "models.json"
    models = ModelRegistry((), forget_s=1.0, file=path)
    assert not models
    published(path)
    models.refresh()
    assert models["tiny"].config.hold_s == 60.0
    models.learn(make_hello(), others=False)
    assert models["tiny"].config.max_context_tokens == 4096
    assert models["tiny"].config.hold_s == 60.0
    models.forget(frozenset(), 0.0)
    models.forget(frozenset(), 100.0)
    assert "tiny" in models
    published(path, name="other")
    models.refresh()
    models.forget(frozenset(), 200.0)
    models.forget(frozenset(), 300.0)
    assert set(models) == {"other"}


def serving(models: ModelRegistry, hello: Any, tokenizer: bytes) -> None:
    """Serve the model by a replica with this Hello."""
    fleet = ReplicaTable(None, timeout_s=5.0)
    replica = fleet.greet(b"r0", hello, 0.0)
    assert isinstance(replica, ConnectedReplica)
    load = Load(free_pages=(64,), total_pages=(64,), page_tokens=16)
    replica.take(LoadReport(load), 0.0)
    model = models[hello.model]
    model.version_for(replica).vocabulary = Vocabulary(tokenizer)
    model.update_replicas([replica], 0.0)
    assert model.ready


def test_the_hold_time_of_the_file_holds_while_replicas_serve(
    tmp_path: Path, make_hello: Callable[..., Any], byte_level_json: bytes
) -> None:
    """A controller may join before the file appears, and the file may change."""
    path = tmp_path / "models.json"
    models = ModelRegistry((), forget_s=1.0, file=path)
    models.learn(make_hello(), others=False)
    serving(models, make_hello(), byte_level_json)
    learned = models["tiny"].config
    for hold_s in (60.0, 0.0, 600.0):
        published(path, hold_s=hold_s)
        models.refresh()
        assert models["tiny"].config == msgspec.structs.replace(learned, hold_s=hold_s)
    published(path, name="other")
    models.refresh()
    assert models["tiny"].config.hold_s == 0.0


def test_without_replicas_the_published_model_holds_again(
    tmp_path: Path, make_hello: Callable[..., Any]
) -> None:
    """The classes changed while replicas with the former classes served."""
    path = tmp_path / "models.json"
    models = ModelRegistry((), forget_s=1.0, file=path)
    models.learn(make_hello(), others=False)
    published(path)
    models.refresh()
    models.forget(frozenset({"tiny"}), 1.0)
    assert set(models["tiny"].classes) == {"default", "eager", "patient"}
    models.forget(frozenset(), 2.0)
    assert set(models["tiny"].classes) == {"default"}
    assert models["tiny"].config.hold_s == 60.0


def test_a_file_written_twice_within_a_clock_tick_is_read_twice(tmp_path: Path) -> None:
    """The clock of a file system ticks every few milliseconds."""
    path = tmp_path / "models.json"
    published(path)
    models, seen = ModelRegistry((), forget_s=1.0, file=path), path.stat()
    path.write_text(path.read_text().replace('"hold_s":60.0', '"hold_s":600.0'))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    models.refresh()
    assert models["tiny"].config.hold_s == 600.0


def test_an_invalid_file_leaves_the_models_unchanged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "models.json"
    published(path)
    models = ModelRegistry((), forget_s=1.0, file=path)
    path.write_text("[{}]")
    models.refresh()
    assert set(models) == {"tiny"} and "kept the former models" in caplog.text
