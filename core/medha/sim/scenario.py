"""Scenarios: simulations described by TOML files.

    seed = 0                                  [workload]
    replicas = 2                              mix = 0.05        # share of long prompts, or
    profile = "a100"                          # lengths = "lengths.csv" / azure = … / mooncake = …
    page_tokens = 64                          requests = 2000
    pages_per_group = 60000                   load = 0.8        # or per_second = 1.25
    [model]     layers, hidden, heads, …      [scheduling]      policy = "lars", …
    [topology]  tp = 8, spp = 1, …            [[classes]]       name, slo, …
    [autoscaling]  least, most, target_slack, down_after_s: replicas follow the load

`load` is offered work over capacity (ρ): prefill seconds of all arrivals per second and replica.
With `admission = true`, requests pass admission and one queue for all replicas. Without it, each
goes to the replica with the least pending work and none is refused, to compare policies alone.
"""

from __future__ import annotations

import functools
import pathlib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from medha import profile as profiles
from medha.config import Scheduling
from medha.errors import SpecError
from medha.fleet.autoscaling import Journal, Policy
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import Profile
from medha.request import Request, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import Report, RequestRecord, summarise
from medha.sim.virtual_autoscaler import SimulatedAutoscaler
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import (
    Arrival,
    mixed,
    poisson,
    read_azure,
    read_lengths,
    read_mooncake,
    scaled,
)
from medha.topology import Topology

Positive = Annotated[int, msgspec.Meta(ge=1)]
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


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of requests: exactly one of `mix`, `lengths`, `azure`, `mooncake`.

    `mix` and `lengths` arrive as a Poisson process at `load` or `per_second`. Traces arrive as
    recorded, `speed` times as fast, at most `requests` of them.
    """

    mix: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    lengths: str | None = None
    azure: str | None = None
    mooncake: str | None = None
    requests: Positive = 1000
    load: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    per_second: Annotated[float, msgspec.Meta(gt=0.0)] | None = None
    speed: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    output_tokens: Positive | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workload, fleet and settings of a simulation. `profile`: a shipped name or a JSON file.

    `until_s` None: until all requests are served. `replicas`: number at the start. With admission,
    requests are dealt to `routers` in turn. `autoscaling` is as in `spec.autoscaling` of a
    resource; an added replica serves after `cold_start_s`.
    """

    workload: Workload
    model: ModelShape = LLAMA_3_8B
    topology: Topology = Topology(tp=8)
    profile: str = "a100"
    replicas: Positive = 1
    routers: Positive = 1
    pages_per_group: Positive = 60_000
    page_tokens: Positive = 64
    scheduling: Scheduling = Scheduling()
    classes: tuple[SloClass, ...] = (SloClass(),)
    admission: bool = True
    autoscaling: Policy | None = None
    cold_start_s: float = 60.0
    until_s: float | None = None
    seed: int = 0


class SimulationResult(msgspec.Struct, frozen=True):
    """Result of a simulation. `scaling`: the looks of the autoscaler."""

    report: Report
    records: tuple[RequestRecord, ...]
    batches: int
    events: int
    scaling: Journal = Journal()


def read_scenario(path: pathlib.Path) -> Scenario:
    """Decode a scenario file; raises SpecError naming the file and the broken field."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), type=Scenario)
    except OSError as error:
        raise SpecError(
            "scenario", str(path), f"must be readable ({error.strerror})", "name a TOML file"
        ) from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise SpecError(
            "scenario", str(path), f"must be a scenario ({error})", "see examples/scenarios"
        ) from None


def simulate(
    scenario: Scenario,
    base: pathlib.Path = pathlib.Path(),
    progress: Callable[[float, int], None] | None = None,
) -> SimulationResult:
    """Run a scenario; files in it are relative to `base`.

    `progress` is called repeatedly with the virtual time and the number of arrivals.
    """
    loop, machine = Loop(), _profile(scenario.profile, base)
    replicas: list[SimReplica] = []

    def start(name: str) -> SimReplica:
        replicas.append(_replica(scenario, name, machine, loop))
        return replicas[-1]

    for index in range(scenario.replicas):
        start(f"replica-{index}")
    predictor = replicas[0].clock.predictor
    arrivals = _arrivals(scenario, predictor, base)
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
    loop.run(float("inf") if scenario.until_s is None else scenario.until_s)
    request_records = tuple(records())
    last_s = arrivals[-1].arrival_s if arrivals else 0.0
    work_s = sum(predictor.prefill_s(arrival.prompt_tokens) for arrival in arrivals)
    served = scaler.replica_s / loop.now if scaler else scenario.replicas
    return SimulationResult(
        report=summarise(
            request_records, loop.now, work_s / last_s / served if last_s > 0 and served else None
        ),
        records=request_records,
        batches=sum(replica.batches for replica in replicas),
        events=loop.events,
        scaling=scaler.journal if scaler else Journal(),
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
    return SimulatedAutoscaler(
        fleet, scenario.autoscaling, start, scenario.cold_start_s, scenario.until_s
    )


def _unguarded(
    scenario: Scenario, replicas: Sequence[SimReplica], loop: Loop
) -> tuple[Callable[[Arrival], None], Callable[[], list[RequestRecord]]]:
    """Functions that submit a request and return all records, without admission."""
    classes = {slo_class.name: slo_class for slo_class in scenario.classes}

    def arrive(arrival: Arrival) -> None:
        loads = [replica.scheduler.load(loop.now) for replica in replicas]
        least = min(range(len(replicas)), key=lambda i: (loads[i].pending_s, i))
        replica, slo = replicas[least], classes[arrival.slo_class].slo
        work_s = replica.clock.predictor.prefill_s(arrival.prompt_tokens)
        request = Request(
            id=arrival.id,
            arrival_s=loop.now,
            prompt_tokens=arrival.prompt_tokens,
            max_output_tokens=arrival.output_tokens,
            work_s=work_s,
            ttft_deadline_s=slo.ttft_deadline_s(work_s),
            tpot_s=slo.tpot_s,
            slo_class=arrival.slo_class,
            tenant=arrival.tenant,
        )
        replica.submit(request, arrival.page_names(scenario.page_tokens))

    return arrive, lambda: [record for replica in replicas for record in replica.records()]


def _replica(scenario: Scenario, name: str, machine: Profile, loop: Loop) -> SimReplica:
    longest_s = scenario.scheduling.max_batch_s
    predictor = Predictor(machine, scenario.model, scenario.topology, longest_s)
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
    clock = PipelineClock(predictor, scenario.page_tokens, scheduler.layout)
    return SimReplica(name, scheduler, clock, loop, scenario.cold_start_s)


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
    return profiles.decode(path.read_bytes(), str(path))


def _arrivals(scenario: Scenario, predictor: Predictor, base: pathlib.Path) -> list[Arrival]:
    workload = scenario.workload
    sources = [
        name
        for name in ("mix", "lengths", "azure", "mooncake")
        if getattr(workload, name) is not None
    ]
    if len(sources) != 1:
        raise SpecError(
            "workload",
            ", ".join(sources) or "empty",
            "must have exactly one source",
            "set mix, lengths, azure or mooncake",
        )
    if workload.azure is not None or workload.mooncake is not None:
        trace = (
            read_azure(base / workload.azure)
            if workload.azure
            else read_mooncake(base / str(workload.mooncake))
        )
        arrivals = scaled(trace[: workload.requests], workload.speed)
    else:
        lengths = (
            read_lengths(base / workload.lengths)
            if workload.lengths
            else mixed(workload.mix or 0.0, 20_000, scenario.seed)
        )
        arrivals = poisson(
            lengths, _rate(scenario, predictor, lengths), workload.requests, scenario.seed
        )
    return list(_fitting(arrivals, scenario.model.max_context_tokens, workload.output_tokens))


def _rate(scenario: Scenario, predictor: Predictor, lengths: Sequence[tuple[int, int]]) -> float:
    workload = scenario.workload
    if (workload.load is None) == (workload.per_second is None):
        raise SpecError(
            "workload",
            f"load {workload.load}, per_second {workload.per_second}",
            "must have exactly one of the two",
            "set load = 0.8, say",
        )
    if workload.per_second is not None:
        return workload.per_second
    mean_s = sum(predictor.prefill_s(prompt) for prompt, _ in lengths) / len(lengths)
    return float(workload.load or 0.0) * scenario.replicas / mean_s


def _fitting(
    arrivals: Sequence[Arrival], most_tokens: int, output_tokens: int | None
) -> Iterator[Arrival]:
    """Arrivals with the output length of the scenario, without those beyond the context."""
    for arrival in arrivals:
        output = output_tokens or arrival.output_tokens
        if arrival.prompt_tokens + output < most_tokens:
            yield msgspec.structs.replace(arrival, output_tokens=output)


def _notify(progress: Callable[[float, int], None], loop: Loop, arrived: int) -> None:
    progress(loop.now, arrived)
