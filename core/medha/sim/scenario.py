"""Scenarios: simulations described by TOML files.

    seed = 0                                  [workload]        (see `Workload`)
    replicas = 2                              mix = 0.05        # share of long prompts, or
    profile = "a100"                          # lengths = "lengths.csv" / azure = … / mooncake = …
    page_tokens = 64                          requests = 2000
    pages_per_group = 60000                   load = 0.8        # or per_second = 1.25
    prediction_error = 0.2                    max_tokens = "4x"
    [model]     layers, hidden, heads, …      classes = { chat = 0.9, batch = 0.1 }
    [topology]  tp = 8, spp = 1, …            [[workload.tenants]]  name, share, rate, …
    [[lost]]    at_s, replica, group          [scheduling]      policy = "lars", …
    [[classes]] name, slo, …                  [autoscaling]     least, most, target_slack, …

`load` is offered work over capacity (ρ, see `offered_load`). With `admission = true`, requests pass
admission and one queue for all replicas. Without it, each goes to the replica with the least
pending work; no router refuses or promises anything.
"""

from __future__ import annotations

import functools
import math
import pathlib
import tomllib
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

from medha import profile as profiles
from medha.config import Scheduling
from medha.errors import SpecError
from medha.fleet.admission import least_tpot_ms
from medha.fleet.autoscaling import Journal, Policy
from medha.fleet.prefix_index import PrefixIndex
from medha.fleet.replica_estimate import least_tpot_s
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile
from medha.request import Request, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.arrivals import OfferedTo, Workload, arrivals_of
from medha.sim.loop import ARRIVE, DONE, Loop
from medha.sim.pipeline_clock import Misprediction, PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import Report, RequestRecord, summarise
from medha.sim.virtual_autoscaler import SimulatedAutoscaler
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import MOST_TOKENS, Arrival
from medha.topology import Topology

Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
MOST_REPLICAS = 10_000
MOST_RANKS = 64  # in one direction
MOST_NUMBER = 10_000_000_000
LAYOUT = ("tp", "spp", "kvp_min", "kvp_max")
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab")
Replicas = Annotated[int, msgspec.Meta(ge=1, le=MOST_REPLICAS)]
LLAMA_3_8B = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=128256,
    max_context_tokens=1 << 20,
)


class GroupLoss(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss of a KVP group with its pages; it may rejoin after the scenario's cold start."""

    at_s: Annotated[float, msgspec.Meta(ge=0.0)]
    replica: Annotated[int, msgspec.Meta(ge=0)] = 0
    group: Annotated[int, msgspec.Meta(ge=0)] = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workload, fleet and settings of a simulation. `profile`: a shipped name or a JSON file.

    `until_s` None: until all requests are served. `replicas`: number at the start. With admission,
    requests are dealt to `routers` in turn. `autoscaling` is as in `spec.autoscaling` of a
    resource; an added replica serves after `cold_start_s`.
    `prediction_error` e: batches take 1 − e to 1 + e times as long as predicted (`Misprediction`).
    """

    workload: Workload
    model: ModelShape = LLAMA_3_8B
    topology: Topology = Topology(tp=8)
    profile: str = "a100"
    replicas: Replicas = 1
    routers: Replicas = 1
    pages_per_group: Positive = 60_000
    page_tokens: Positive = 64
    scheduling: Scheduling = Scheduling()
    classes: tuple[SloClass, ...] = (SloClass(),)
    admission: bool = True
    autoscaling: Policy | None = None
    cold_start_s: float = 60.0
    until_s: float | None = None
    prediction_error: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.0
    lost: tuple[GroupLoss, ...] = ()
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


class SimulationResult(msgspec.Struct, frozen=True):
    """Result of a simulation. `scaling`: the looks of the autoscaler.

    `busy`: share of the time that stages ran batches, of all groups that may run.
    """

    report: Report
    records: tuple[RequestRecord, ...]
    batches: int
    busy: float
    events: int
    scaling: Journal = Journal()


BUDGETS, WHEN_INFEASIBLE = ("slack", "fixed", "tokens"), ("refuse", "relegate")
PARTS = ("relegated_share", "tbt_guard", "plan_guard", "prefill_share", "decode_room")
MOST_PART = 0.9


def read_scenario(path: pathlib.Path) -> Scenario:
    """Decode a scenario file; raises SpecError naming the file and the broken field."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
        _check_numbers(document, "")
        return msgspec.convert(document, type=Scenario)
    except OSError as error:
        raise SpecError(
            "scenario", str(path), f"must be readable ({error.strerror})", "name a TOML file"
        ) from None
    except (msgspec.ValidationError, RecursionError, ValueError) as error:  # also TOML's, Unicode's
        raise SpecError(
            "scenario", str(path), f"must be a scenario ({error})", "see examples/scenarios"
        ) from None


def _check_numbers(value: object, name: str) -> None:
    """Raise SpecError for an infinity, a NaN, and numbers too large, or below 0 without sense."""
    if isinstance(value, float) and not math.isfinite(value):
        raise SpecError(name, value, "must be a finite number", "write it in digits")
    if isinstance(value, int | float) and value < 0 and name != "autoscaling.target_slack":
        raise SpecError(name, value, "must be 0 or more", "leave out the sign")
    if isinstance(value, int | float) and value > MOST_NUMBER and name != "seed":
        raise SpecError(name, value, f"must be at most {MOST_NUMBER:,}", "lower it")
    if isinstance(value, dict):
        for key, item in value.items():
            _check_numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_numbers(item, f"{name}[{index}]")


def _check_sizes(scenario: Scenario) -> None:
    """Raise SpecError for a layout or a model without ranks, layers, heads or batches."""
    layout, model, scheduling = scenario.topology, scenario.model, scenario.scheduling
    sizes = {
        **{f"topology.{name}": getattr(layout, name) for name in LAYOUT},
        **{f"model.{name}": getattr(model, name) for name in SIZES},
        "scheduling.max_running": scheduling.max_running,
        "scheduling.chunk_step_tokens": scheduling.chunk_step_tokens,
        "scheduling.batch_tokens": scheduling.batch_tokens,
    }
    for name, size in sizes.items():
        most = MOST_RANKS if name.startswith("topology.") else MOST_TOKENS
        if not 1 <= size <= most:
            raise SpecError(name, size, f"must be 1 to {most:,}", "correct it")
    if layout.kvp_min > layout.kvp_max:
        raise SpecError(
            "topology.kvp_min",
            layout.kvp_min,
            f"must be at most kvp_max, {layout.kvp_max}",
            "lower it, or raise kvp_max",
        )
    if not 0.0 < scheduling.min_batch_s <= scheduling.max_batch_s:
        raise SpecError(
            "scheduling.min_batch_s",
            scheduling.min_batch_s,
            f"must be above 0 and at most max_batch_s, {scheduling.max_batch_s:g}",
            "lower it, or raise max_batch_s",
        )
    if layout.tokens_per_group is not None and layout.tokens_per_group < 1:
        raise SpecError(
            "topology.tokens_per_group",
            layout.tokens_per_group,
            "must be at least 1",
            "raise it, or leave it out",
        )
    if model.heads % layout.tp:
        raise SpecError(
            "topology.tp",
            layout.tp,
            f"must divide the model's {model.heads} heads",
            "take a number that divides them",
        )


def _check_settings(scenario: Scenario) -> None:
    """Raise SpecError for parts of more than the whole, and for names that nothing has."""
    scheduling = scenario.scheduling
    if scheduling.budget not in BUDGETS:
        raise SpecError(
            "scheduling.budget",
            scheduling.budget,
            f"must be one of {', '.join(BUDGETS)}",
            f"use {BUDGETS[0]}",
        )
    for name in PARTS:
        part = getattr(scheduling, name)
        if part > MOST_PART:
            raise SpecError(
                f"scheduling.{name}", part, f"must be a part of 0 to {MOST_PART}", "lower it"
            )
    if scheduling.fixed_s <= 0.0:
        raise SpecError("scheduling.fixed_s", scheduling.fixed_s, "must be above 0", "raise it")
    if scheduling.long_prefill_threshold_tokens == 0:
        raise SpecError(
            "scheduling.long_prefill_threshold_tokens",
            0,
            "must be at least 1",
            "raise it, or leave it out for no limit",
        )
    names = [slo_class.name for slo_class in scenario.classes]
    for slo_class in scenario.classes:
        field = f"classes.{slo_class.name}"
        if names.count(slo_class.name) > 1:
            raise SpecError(f"{field}.name", slo_class.name, "must be of one class", "rename one")
        if slo_class.when_infeasible not in WHEN_INFEASIBLE:
            raise SpecError(
                f"{field}.when_infeasible",
                slo_class.when_infeasible,
                f"must be one of {', '.join(WHEN_INFEASIBLE)}",
                f"use {WHEN_INFEASIBLE[0]}",
            )
        if slo_class.reserved > 1.0:
            raise SpecError(
                f"{field}.reserved", slo_class.reserved, "must be a part of 0 to 1", "lower it"
            )


def simulate(
    scenario: Scenario,
    base: pathlib.Path = pathlib.Path(),
    progress: Callable[[float, int], None] | None = None,
) -> SimulationResult:
    """Run a scenario; files in it are relative to `base`.

    `progress` is called repeatedly with the virtual time and the number of arrivals.
    """
    _check_sizes(scenario)
    _check_settings(scenario)
    scheduling = scenario.scheduling.for_pipeline(scenario.topology.spp, scenario.classes)
    scenario = msgspec.structs.replace(scenario, scheduling=scheduling)
    loop, machine = Loop(), _profile(scenario.profile, base)
    replicas: list[SimReplica] = []

    def start(name: str) -> SimReplica:
        replicas.append(_replica(scenario, name, len(replicas), machine, loop))
        return replicas[-1]

    for index in range(scenario.replicas):
        start(f"replica-{index}")
    served_by = OfferedTo(
        _predictor(scenario, machine),
        scenario.replicas,
        {slo_class.name: slo_class for slo_class in scenario.classes},
        scenario.model.max_context_tokens,
        scenario.scheduling.min_batch_s,
    )
    _check_classes(scenario, served_by.predictor)
    arrivals = arrivals_of(scenario.workload, served_by, scenario.seed, base)
    fleet = _fleet(scenario, replicas, loop) if scenario.admission else None
    scaler = _scaler(scenario, fleet, start)
    arrive, records = (
        (fleet.arrive, fleet.records) if fleet else _unguarded(scenario, replicas, loop)
    )
    for index, arrival in enumerate(arrivals):
        loop.at(arrival.arrival_s, ARRIVE, functools.partial(arrive, arrival))
        if progress is not None and index % 100 == 0:
            notify = functools.partial(_notify, progress, loop, index)
            loop.at(arrival.arrival_s, ARRIVE, notify)
    for loss in scenario.lost:
        _check_loss(scenario, loss)
        loop.at(loss.at_s, DONE, functools.partial(_lose, replicas[loss.replica], loss.group))
    loop.run(float("inf") if scenario.until_s is None else scenario.until_s)
    replica_count = scaler.replica_s / loop.now if scaler else scenario.replicas
    layout = scenario.topology
    busy_s = sum(replica.clock.busy_s for replica in replicas)
    capacity_s = loop.now * replica_count * layout.spp * layout.kvp_max
    offered, request_records = _measured(
        msgspec.structs.replace(served_by, replicas=replica_count),
        [arrival for arrival in arrivals if arrival.arrival_s <= loop.now],
        records(),
    )
    return SimulationResult(
        report=summarise(request_records, loop.now, offered, scenario.workload.load),
        records=request_records,
        batches=sum(replica.batches for replica in replicas),
        busy=busy_s / capacity_s if capacity_s > 0.0 else 0.0,
        events=loop.events,
        scaling=scaler.journal if scaler else Journal(),
    )


def _measured(
    fleet: OfferedTo, arrivals: Sequence[Arrival], records: Sequence[RequestRecord]
) -> tuple[float | None, tuple[RequestRecord, ...]]:
    """Load that arrived, after the prefix hits that there were, and records with its seconds."""
    if not arrivals or arrivals[-1].arrival_s <= 0.0 or not fleet.replicas:
        return None, tuple(records)
    end_s, cached = arrivals[-1].arrival_s, {record.id: record.cached_tokens for record in records}
    offered = fleet.load_of(arrivals, [cached.get(arrival.id, 0) for arrival in arrivals])
    per_second = len(arrivals) / end_s / fleet.replicas
    seconds = dict(
        zip(
            (arrival.id for arrival in arrivals),
            offered.request_s(per_second).tolist(),
            strict=True,
        )
    )
    return offered.at(per_second), tuple(
        msgspec.structs.replace(record, offered_s=seconds.get(record.id, 0.0)) for record in records
    )


def _check_classes(scenario: Scenario, predictor: Predictor) -> None:
    """Raise SpecError for a TPOT target that no replica keeps alongside prefills."""
    min_batch_s = scenario.scheduling.min_batch_s
    least_ms = least_tpot_ms(least_tpot_s(1, predictor, min_batch_s))
    for slo_class in scenario.classes:
        if 1e3 * slo_class.slo.tpot_s < least_ms:
            raise SpecError(
                f"classes.{slo_class.name}.slo.tpot_s",
                slo_class.slo.tpot_s,
                f"must be at least {least_ms / 1e3:g}, which a replica keeps alongside prefills",
                "raise it, lower scheduling.min_batch_s, or take a faster profile or topology",
            )


def _fleet(scenario: Scenario, replicas: Sequence[SimReplica], loop: Loop) -> SimulatedFleet:
    return SimulatedFleet(
        replicas,
        loop,
        scenario.classes,
        scenario.scheduling,
        scenario.page_tokens,
        scenario.model.max_context_tokens,
        routers=scenario.routers,
    )


def _scaler(
    scenario: Scenario, fleet: SimulatedFleet | None, start: Callable[[str], SimReplica]
) -> SimulatedAutoscaler | None:
    if scenario.autoscaling is None:
        return None
    if fleet is None:
        raise SpecError(
            "admission",
            False,
            "must be true with [autoscaling]: admission measures slack",
            "set admission = true, or leave [autoscaling] out",
        )
    least, most = scenario.autoscaling.least, scenario.autoscaling.most
    if not 0 <= least <= most <= MOST_REPLICAS or most < 1:
        raise SpecError(
            "autoscaling",
            f"{least} to {most} replicas",
            f"must begin at 0 or more and end between 1 and {MOST_REPLICAS}",
            "set least and most in that order",
        )
    return SimulatedAutoscaler(
        fleet, scenario.autoscaling, start, scenario.cold_start_s, scenario.until_s
    )


def _unguarded(
    scenario: Scenario, replicas: Sequence[SimReplica], loop: Loop
) -> tuple[Callable[[Arrival], None], Callable[[], list[RequestRecord]]]:
    """Functions that submit a request and return all records, without admission."""
    classes = {slo_class.name: slo_class for slo_class in scenario.classes}
    index = PrefixIndex()

    def arrive(arrival: Arrival) -> None:
        loads = [replica.scheduler.load(loop.now) for replica in replicas]
        least = min(range(len(replicas)), key=lambda i: (loads[i].pending_s, i))
        replica, slo = replicas[least], classes[arrival.slo_class].slo
        budget_s = scenario.scheduling.reference_budget_s(slo.tpot_s, scenario.topology.spp)
        page_names = arrival.page_names(scenario.page_tokens)
        events = replica.take_kv_events()
        if events is not None:
            index.apply(replica.name, events)
        cached = index.match(page_names).get(replica.name, 0) * scenario.page_tokens
        times = replica.scheduler.predictor.at_budget(budget_s)
        work_s = times.prefill_s(arrival.prompt_tokens, min(cached, arrival.prompt_tokens - 1))
        request = Request(
            id=arrival.id,
            arrival_s=loop.now,
            prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.max_output_tokens,
            work_s=work_s,
            ttft_deadline_s=slo.ttft_deadline_s(work_s),
            tpot_s=slo.tpot_s,
            slo_class=arrival.slo_class,
            tenant=arrival.tenant,
        )
        replica.submit(request, page_names, stops_after=arrival.output_tokens)

    return arrive, lambda: [record for replica in replicas for record in replica.records()]


def _predictor(scenario: Scenario, machine: Profile) -> Predictor:
    return Predictor(machine, scenario.model, scenario.topology, scenario.scheduling.max_batch_s)


def _replica(
    scenario: Scenario, name: str, number: int, machine: Profile, loop: Loop
) -> SimReplica:
    predictor = _predictor(scenario, machine)
    scheduler = Scheduler(
        scenario.topology,
        scenario.model,
        predictor,
        scenario.scheduling,
        scenario.pages_per_group,
        scenario.page_tokens,
        scenario.model.max_context_tokens,
        scenario.classes,
    )
    error = scenario.prediction_error
    slowness = Misprediction(error, scenario.seed, number) if error else None
    machine_times = _predictor(scenario, machine)
    clock = PipelineClock(machine_times, scenario.page_tokens, scheduler.layout, slowness)
    return SimReplica(name, scheduler, clock, loop, scenario.cold_start_s)


def _check_loss(scenario: Scenario, loss: GroupLoss) -> None:
    for field, value, most in (
        ("replica", loss.replica, scenario.replicas),
        ("group", loss.group, scenario.topology.kvp_max),
    ):
        if value >= most:
            raise SpecError(
                f"lost.{field}", value, f"must be less than {most}", f"use 0 to {most - 1}"
            )


def _profile(name: str, base: pathlib.Path) -> Profile:
    if name in profiles.SHIPPED:
        return profiles.SHIPPED[name]
    path = base / name
    if not path.is_file():
        raise SpecError(
            "profile",
            name,
            "must be a file or a shipped profile",
            f"use one of {', '.join(profiles.SHIPPED)} or a JSON file from `medha calibrate`",
        )
    return profiles.read(path)


def _lose(replica: SimReplica, group: int) -> None:
    replica.lose(group)


def _notify(progress: Callable[[float, int], None], loop: Loop, arrived: int) -> None:
    progress(loop.now, arrived)
