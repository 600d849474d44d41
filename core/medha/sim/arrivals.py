"""Arrivals of a scenario: drawn from a seed, or a trace, at the load that the scenario states.

Each tenant has its own arrivals and lengths, from its own seed: if one sends more, the others' stay
the same. A load or rate is that of all tenants with `rate` 1.
"""

from __future__ import annotations

import contextlib
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from medha.errors import SpecError
from medha.predictor import Predictor
from medha.request import SloClass
from medha.sim.offered_load import Demand, OfferedLoad
from medha.sim.workload import (
    BLOCK_TOKENS,
    CHAT_OUTPUT,
    DOCUMENT_OUTPUT,
    MOST_TOKENS,
    Arrival,
    LogNormal,
    mixed,
    read_azure,
    read_lengths,
    read_mooncake,
)

POOL = 20_000  # lengths of a mix from which requests are drawn
LEAST_VARIATION = 1e-3  # less is none
MOST_FACTOR = 1e6  # of max_tokens to the output's length
PICKS, TIMES, CLASSES, TENANTS = range(4)  # what a seed is for

Tokens = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
Requests = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Above0 = Annotated[float, msgspec.Meta(ge=1e-6, le=1e6)]
Multiple = Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)]
# Beyond it, gaps of a gamma distribution are too small for floats.
Variation = Annotated[float, msgspec.Meta(ge=0.0, le=30.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenant with a share of the requests, relative to the other tenants' shares.

    `rate`: how many times its share of requests it sends. `mix`, `gap_cv`, `slo_class`: its own
    instead of the workload's.
    """

    name: str
    share: Above0 = 1.0
    rate: Multiple = 1.0
    mix: Share | None = None
    gap_cv: Variation | None = None
    slo_class: str | None = None


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Source of requests: exactly one of `mix`, `lengths`, `azure`, `mooncake`.

    `mix` (share of long prompts) and `lengths` arrive at random times, at `load` or `per_second`.
    `gap_cv` is the coefficient of variation of the times between arrivals, which have a gamma
    distribution: 1 is a Poisson process, more comes in bursts, 0 is a metronome. Traces arrive as
    recorded, stretched to `load` or `per_second`, or `speed` times as fast; at most `requests`.

    `output_tokens` sets the length of every output. Without it, those of a mix are log-normal
    (`short_output`, `long_output`) and others are the file's. `max_tokens` is the limit that
    clients set: "exact" (the length), a number, or a factor such as "4x" of the length.

    `classes`: share of requests by class; without it all are of the only class, or of `default`.
    """

    mix: Share | None = None
    lengths: str | None = None
    azure: str | None = None
    mooncake: str | None = None
    requests: Requests = 1000
    load: Above0 | None = None
    per_second: Above0 | None = None
    speed: Above0 = 1.0
    gap_cv: Variation = 1.0
    output_tokens: Tokens | None = None
    short_output: LogNormal = CHAT_OUTPUT
    long_output: LogNormal = DOCUMENT_OUTPUT
    max_tokens: Tokens | str = "exact"
    classes: dict[str, Above0] = {}
    tenants: tuple[Tenant, ...] = ()


class OfferedTo(msgspec.Struct, frozen=True):
    """Fleet that a load is offered to. `min_batch_s`: of the replicas' scheduling."""

    predictor: Predictor
    replicas: float
    classes: Mapping[str, SloClass]
    max_context_tokens: int
    min_batch_s: float

    def load_of(self, arrivals: Sequence[Arrival], cached_tokens: Iterable[int]) -> OfferedLoad:
        """Load of these requests on one replica."""
        demands = [
            Demand(
                arrival.prompt_tokens,
                cached,
                arrival.output_tokens,
                self.classes[arrival.slo_class].slo.tpot_s,
            )
            for arrival, cached in zip(arrivals, cached_tokens, strict=True)
        ]
        return OfferedLoad(self.predictor, demands, self.min_batch_s)


def arrivals_of(
    workload: Workload, fleet: OfferedTo, seed: int = 0, base: pathlib.Path = pathlib.Path()
) -> list[Arrival]:
    """Draw or read a workload's arrivals; raises SpecError. Files are relative to `base`."""
    _check(workload, fleet.classes)
    if workload.azure is None and workload.mooncake is None:
        return _drawn(workload, fleet, seed, base)
    return _recorded(workload, fleet, seed, base)


def prefix_hits(arrivals: Sequence[Arrival]) -> list[int]:
    """Tokens of each prompt that one cache without a limit would hold when it arrives."""
    known: set[int] = set()
    hits = []
    for arrival in arrivals:
        blocks = 0
        while blocks < len(arrival.blocks) and arrival.blocks[blocks] in known:
            blocks += 1
        hits.append(min(blocks * BLOCK_TOKENS, arrival.prompt_tokens - 1))
        known.update(arrival.blocks)
    return hits


# --- sources --------------------------------------------------------------------------------------


def _drawn(workload: Workload, fleet: OfferedTo, seed: int, base: pathlib.Path) -> list[Arrival]:
    """Arrivals of a mix or of a file of lengths: each tenant's, merged by time."""
    tenants = workload.tenants or (Tenant(name=""),)
    shares = sum(tenant.share for tenant in tenants)
    counts = [workload.requests * tenant.share / shares for tenant in tenants]
    pools = [_pool(workload, tenant, seed, base) for tenant in tenants]

    def requests(number: int, count: float) -> list[Arrival]:
        tenant, rng = tenants[number], np.random.default_rng((seed, PICKS, number))
        picks = _stratified(pools[number], max(1, round(count)), rng)
        arrivals = [
            Arrival(
                id=f"{tenant.name}r{index}",
                arrival_s=0.0,
                prompt_tokens=prompt,
                output_tokens=output,
                tenant=tenant.name,
            )
            for index, (prompt, output) in enumerate(picks)
        ]
        return _with_classes(_sized(arrivals, workload, fleet), workload, fleet, (seed, number))

    stated = [arrival for k, count in enumerate(counts) for arrival in requests(k, count)]
    if not stated:
        raise _none_fits(workload.lengths or f"mix = {workload.mix}")
    end_s = len(stated) / _per_second(workload, fleet, stated)
    arrivals = []
    for number, (tenant, count) in enumerate(zip(tenants, counts, strict=True)):
        sent = requests(number, count * tenant.rate)
        gap_cv = workload.gap_cv if tenant.gap_cv is None else tenant.gap_cv
        times = _times(len(sent), end_s, gap_cv, np.random.default_rng((seed, TIMES, number)))
        arrivals += [
            msgspec.structs.replace(arrival, arrival_s=time_s)
            for arrival, time_s in zip(sent, times, strict=True)
        ]
    return sorted(arrivals, key=lambda arrival: arrival.arrival_s)


def _pool(
    workload: Workload, tenant: Tenant, seed: int, base: pathlib.Path
) -> list[tuple[int, int]]:
    if workload.lengths is not None:
        lengths = read_lengths(_file("lengths", base, workload.lengths))
        if not lengths:
            raise SpecError(
                "workload.lengths", workload.lengths, "must hold requests", "name another file"
            )
        return lengths
    mix = workload.mix if tenant.mix is None else tenant.mix
    return mixed(mix or 0.0, POOL, seed, workload.short_output, workload.long_output)


def _none_fits(source: object) -> SpecError:
    return SpecError(
        "workload",
        source,
        "must hold requests that the model's context holds",
        "use another one, or raise model.max_context_tokens",
    )


def _stratified(
    pool: Sequence[tuple[int, int]], count: int, rng: np.random.Generator
) -> list[tuple[int, int]]:
    """`count` lengths in random order, spread evenly over the sorted pool.

    Few requests of a mix then have the mix's share of long ones, too.
    """
    ordered = sorted(pool)
    places = ((np.arange(count) + rng.random()) * (len(ordered) / count)).astype(int)
    return [ordered[place] for place in rng.permutation(places).tolist()]


def _times(count: int, end_s: float, gap_cv: float, rng: np.random.Generator) -> list[float]:
    """Times of `count` arrivals, the last at `end_s`."""
    if not count:
        return []
    gaps = rng.gamma(gap_cv**-2, size=count) if gap_cv >= LEAST_VARIATION else np.ones(count)
    times = np.cumsum(gaps)
    scaled: list[float] = (times * (end_s / times[-1])).tolist()
    return scaled


def _recorded(workload: Workload, fleet: OfferedTo, seed: int, base: pathlib.Path) -> list[Arrival]:
    """Arrivals of a trace, stretched in time; tenants and classes are drawn."""
    if workload.azure is not None:
        trace = read_azure(_file("azure", base, workload.azure))
    else:
        trace = read_mooncake(_file("mooncake", base, str(workload.mooncake)))
    arrivals = _sized(trace[: workload.requests], workload, fleet)
    if not arrivals:
        raise _none_fits(workload.azure or workload.mooncake)
    if workload.tenants:
        rng = np.random.default_rng((seed, TENANTS))
        shares = np.array([tenant.share for tenant in workload.tenants])
        picks = rng.choice(len(shares), len(arrivals), p=shares / shares.sum()).tolist()
        arrivals = [
            msgspec.structs.replace(arrival, tenant=workload.tenants[pick].name)
            for arrival, pick in zip(arrivals, picks, strict=True)
        ]
    arrivals = _with_classes(arrivals, workload, fleet, (seed,))
    speed = workload.speed
    if workload.load is not None or workload.per_second is not None:
        recorded_s = arrivals[-1].arrival_s
        speed = _per_second(workload, fleet, arrivals) * recorded_s / len(arrivals)
    return [
        msgspec.structs.replace(arrival, arrival_s=arrival.arrival_s / speed if speed else 0.0)
        for arrival in arrivals
    ]


# --- requests -------------------------------------------------------------------------------------


def _sized(arrivals: Sequence[Arrival], workload: Workload, fleet: OfferedTo) -> list[Arrival]:
    """Arrivals with the scenario's output lengths and limits, without those beyond the context."""
    sized = []
    for arrival in arrivals:
        output = workload.output_tokens or arrival.output_tokens
        room = fleet.max_context_tokens - arrival.prompt_tokens - 1
        limit = _limit(workload.max_tokens, output)
        output = min(output, limit)
        if output <= room:
            sized.append(
                msgspec.structs.replace(arrival, output_tokens=output, max_tokens=min(limit, room))
            )
    return sized


def _limit(max_tokens: int | str, output_tokens: int) -> int:
    if isinstance(max_tokens, int):
        return max_tokens
    if max_tokens == "exact":
        return output_tokens
    return math.ceil(output_tokens * _factor(max_tokens))


def _factor(max_tokens: str) -> float:
    try:
        factor = float(max_tokens.removesuffix("x")) if max_tokens.endswith("x") else 0.0
    except ValueError:
        factor = 0.0
    if not 1.0 <= factor <= MOST_FACTOR:
        raise SpecError(
            "workload.max_tokens",
            max_tokens,
            'must be "exact", a number of tokens, or a factor of 1 to 1,000,000',
            'write "4x" for four times the real length',
        )
    return factor


def _with_classes(
    arrivals: Sequence[Arrival], workload: Workload, fleet: OfferedTo, seed: tuple[int, ...]
) -> list[Arrival]:
    """Arrivals with classes: the tenant's own, or drawn by share."""
    own = {tenant.name: tenant.slo_class for tenant in workload.tenants}
    names = list(workload.classes) or [_only(fleet.classes)]
    weights = np.array([workload.classes.get(name, 1.0) for name in names])
    rng = np.random.default_rng((seed[0], CLASSES, *seed[1:]))
    picks = rng.choice(len(names), len(arrivals), p=weights / weights.sum()).tolist()
    return [
        msgspec.structs.replace(arrival, slo_class=own.get(arrival.tenant) or names[pick])
        for arrival, pick in zip(arrivals, picks, strict=True)
    ]


def _only(classes: Mapping[str, SloClass]) -> str:
    return next(iter(classes)) if len(classes) == 1 else "default"


def _per_second(workload: Workload, fleet: OfferedTo, arrivals: Sequence[Arrival]) -> float:
    """Requests per second of the whole fleet."""
    if workload.load is None:
        return float(workload.per_second or 0.0)
    offered = fleet.load_of(arrivals, prefix_hits(arrivals))
    return offered.per_second(workload.load) * fleet.replicas


def _file(field: str, base: pathlib.Path, name: str) -> pathlib.Path:
    path = base / name
    with contextlib.suppress(OSError):  # of a name that no file can have
        if path.is_file():
            return path
    raise SpecError(f"workload.{field}", name, "must be a file", "name it relative to the scenario")


# --- checks ---------------------------------------------------------------------------------------


def _check(workload: Workload, classes: Mapping[str, SloClass]) -> None:
    """Raise SpecError for settings that contradict each other."""
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
    recorded = sources[0] in ("azure", "mooncake")
    rates = (workload.load is not None) + (workload.per_second is not None)
    if rates > 1 or (not rates and not recorded):
        raise SpecError(
            "workload",
            f"load {workload.load}, per_second {workload.per_second}",
            "must have exactly one of the two",
            "set load = 0.8, say",
        )
    if workload.speed != 1.0 and (rates or not recorded):
        raise SpecError(
            "workload.speed",
            workload.speed,
            "is for traces without load and per_second",
            "leave it out",
        )
    if isinstance(workload.max_tokens, str):
        _limit(workload.max_tokens, 1)
    _check_tenants(workload, recorded)
    for name in (*workload.classes, *(tenant.slo_class for tenant in workload.tenants)):
        _check_class("workload.classes", name, classes)
    if not workload.classes:
        _check_class("classes", _only(classes), classes)


def _check_tenants(workload: Workload, recorded: bool) -> None:
    names = [tenant.name for tenant in workload.tenants]
    if len(set(names)) < len(names):
        raise SpecError(
            "workload.tenants", ", ".join(names), "must have different names", "rename one"
        )
    if recorded and workload.gap_cv != 1.0:
        raise SpecError(
            "workload.gap_cv",
            workload.gap_cv,
            "is not for traces, which have times",
            "leave it out",
        )
    for tenant in workload.tenants:
        for field, value, usual in (
            ("rate", tenant.rate, 1.0),
            ("gap_cv", tenant.gap_cv, None),
            ("mix", tenant.mix, None),
        ):
            if value != usual and (recorded or (field == "mix" and workload.mix is None)):
                raise SpecError(
                    f"workload.tenants.{field}",
                    value,
                    "needs a workload of mix" if field == "mix" else "is not for traces",
                    "leave it out",
                )


def _check_class(field: str, name: str | None, classes: Mapping[str, SloClass]) -> None:
    if name is not None and name not in classes:
        raise SpecError(
            field, name, f"must be one of {', '.join(classes)}", "add it to [[classes]]"
        )
