"""Cells of the policy matrix: workload × model × layout × TPOT × load × replicas.

The cells are a covering array of the factors, without combinations that no policy can serve: an
idle replica must give the TPOT to a decode at the deepest context of the workload and still have
room for a step of a prompt as deep. Deadlines are those of a class, max(0.5 s, 1.5 × W), with W the
prefill time on an idle replica in batches that leave decodes their TPOT, of the tokens that no
earlier request of the workload had: the same for every policy.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence

import msgspec
import numpy as np
from benchmarks.covering_array import Combination, covering_array

from medha.config import Scheduling
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import A100, H100, Profile
from medha.request import Slo, SloClass
from medha.sim.arrivals import OfferedTo, prefix_hits
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.workload import BLOCK_TOKENS, Arrival, read_lengths, read_mooncake
from medha.topology import Topology

LLAMA_3_70B = ModelShape(
    layers=80,
    hidden=8192,
    heads=64,
    kv_heads=8,
    head_dim=128,
    intermediate=28672,
    vocab=128256,
    max_context_tokens=1 << 19,
)
WORKLOADS = ("2 % long", "5 % long", "10 % long", "code", "conversation")
LONG_SHARES = {"2 % long": 0.02, "5 % long": 0.05, "10 % long": 0.1}
MODELS = ("8B", "70B")
LAYOUTS = ("TP8", "TP8 x SPP2", "TP8 x KVP2")
TPOTS_S = (0.03, 0.05, 0.1, 0.3)
LOADS = (0.5, 0.8, 1.0, 1.4, 2.0)
REPLICAS = (1, 8)
CELLS = 60
TRACES = (LENGTHS_TRACE, CONVERSATIONS_TRACE) = (
    "medha_mixed_5pct_long.csv",
    "mooncake_conversation.jsonl",
)

LONG_TOKENS = 32_768
"""Uncached prompt tokens from which a request counts as long."""
LONG_IN_A_RUN = 20
"""Long requests of a mix with one replica; the others follow from their share."""
TRACE_REQUESTS = 600
MANY_REPLICAS = 3.0
"""Factor of the number of requests with 8 replicas, which have one seed in the full form."""
GPU_BYTES = 0.9 * 80e9
PAGE_TOKENS = 64
TRACE_STEP_S = 3.0
"""Resolution of the conversation trace's timestamps; arrivals are spread evenly within."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A combination of levels. `number`: place in the matrix."""

    number: int
    workload: str
    model: str
    layout: str
    tpot_s: float
    load: float
    replicas: int

    @property
    def name(self) -> str:
        return (
            f"{self.workload}, {self.model}, {self.layout}, TPOT {1e3 * self.tpot_s:.0f} ms, "
            f"load {self.load}, {self.replicas} replica{'s' if self.replicas > 1 else ''}"
        )

    @property
    def shape(self) -> ModelShape:
        return LLAMA_3_8B if self.model == "8B" else LLAMA_3_70B

    @property
    def profile(self) -> Profile:
        return A100 if self.model == "8B" else H100

    @property
    def topology(self) -> Topology:
        """Layout; with KVP, contexts of more than half of the longest one span both groups."""
        if self.layout == "TP8 x KVP2":
            size = self.shape.max_context_tokens // 2
            return Topology(tp=8, kvp_min=2, kvp_max=2, tokens_per_group=size)
        return Topology(tp=8, spp=2 if self.layout == "TP8 x SPP2" else 1)

    @property
    def pages(self) -> int:
        """Pages of a KVP group: nine tenths of its memory, without the weights."""
        shape, topology = self.shape, self.topology
        free_bytes = GPU_BYTES * topology.ranks_per_group - shape.weight_bytes
        return int(free_bytes / shape.kv_bytes_per_token / PAGE_TOKENS)

    def predictor(self, settings: Scheduling) -> Predictor:
        return Predictor(self.profile, self.shape, self.topology, settings.max_batch_s)


class CellWorkload(msgspec.Struct, frozen=True):
    """Requests of a cell. By id: `cached` tokens of earlier requests, seconds of `work_s` on an
    idle replica, `deadlines_s` after arrival. `load`: offered work over capacity."""

    arrivals: tuple[Arrival, ...]
    cached: dict[str, int]
    work_s: dict[str, float]
    deadlines_s: dict[str, float]
    load: float

    def is_long(self, arrival: Arrival) -> bool:
        return arrival.prompt_tokens - self.cached[arrival.id] >= LONG_TOKENS


def at_tpot(predictor: Predictor, tpot_s: float, settings: Scheduling) -> Predictor:
    """Return a predictor of batches that leave every decode its TPOT."""
    batch_s = max(settings.min_batch_s, min(predictor.budget_s, tpot_s / predictor.topology.spp))
    topology = msgspec.structs.replace(
        predictor.topology, tokens_per_group=predictor.tokens_per_group
    )
    return Predictor(predictor.profile, predictor.shape, topology, batch_s)


@functools.cache
def cells(count: int = CELLS) -> tuple[Cell, ...]:
    """Return the cells of the matrix."""
    factors = [len(levels) for levels in (WORKLOADS, MODELS, LAYOUTS, TPOTS_S, LOADS, REPLICAS)]
    rows = covering_array(factors, count, lambda row: not infeasible(_cell(0, row)))
    return tuple(_cell(number, row) for number, row in enumerate(rows))


def infeasible_combinations() -> list[str]:
    """Name the combinations of workload, model, layout and TPOT that are left out."""
    return [
        f"{workload}, {model}, {layout}, TPOT {1e3 * tpot_s:.0f} ms: {reason}"
        for workload in WORKLOADS
        for model in MODELS
        for layout in LAYOUTS
        for tpot_s in TPOTS_S
        if (reason := _too_slow(workload, model, layout, tpot_s))
    ]


def infeasible(cell: Cell) -> str:
    """Return why no policy can serve a cell; empty if it can be served."""
    return _too_slow(cell.workload, cell.model, cell.layout, cell.tpot_s)


@functools.cache
def _too_slow(workload: str, model: str, layout: str, tpot_s: float) -> str:
    cell = Cell(
        number=0,
        workload=workload,
        model=model,
        layout=layout,
        tpot_s=tpot_s,
        load=1.0,
        replicas=1,
    )
    depth = deepest_tokens(cell)
    topology, predictor = cell.topology, cell.predictor(Scheduling())
    groups = min(topology.kvp_max, -(-depth // predictor.tokens_per_group))
    load = predictor.load()
    load.add_decode(depth // groups, groups)
    least_s = topology.spp * load.seconds_with(predictor.step_tokens, depth // groups, groups)
    if least_s <= tpot_s:
        return ""
    return f"a decode after {depth} tokens and a step of a prompt take {1e3 * least_s:.1f} ms"


def _cell(number: int, row: Combination) -> Cell:
    return Cell(
        number=number,
        workload=WORKLOADS[row[0]],
        model=MODELS[row[1]],
        layout=LAYOUTS[row[2]],
        tpot_s=TPOTS_S[row[3]],
        load=LOADS[row[4]],
        replicas=REPLICAS[row[5]],
    )


# --- requests -------------------------------------------------------------------------------------

Lengths = list[tuple[int, int]]


def deepest_tokens(cell: Cell) -> int:
    """Longest prompt of a cell's workload."""
    if cell.workload == "conversation":
        return 126_195
    if cell.workload == "code":
        return 262_144
    return cell.shape.max_context_tokens * 996_935 // (1 << 20)


def workload(cell: Cell, seed: int, size: float, data: pathlib.Path | None) -> CellWorkload:
    """Draw the requests of a cell. `size`: factor of their number; `data`: folder of traces.

    Arrivals are stretched so that the requests drawn offer the cell's load exactly.
    """
    rng = np.random.default_rng((seed, WORKLOADS.index(cell.workload), cell.replicas))
    size *= MANY_REPLICAS if cell.replicas > 1 else 1.0
    if cell.workload in LONG_SHARES:
        arrivals = _mix(cell, LONG_SHARES[cell.workload], size, rng, data)
    elif cell.workload == "code":
        arrivals = _code(round(TRACE_REQUESTS * size), rng)
    else:
        arrivals = _conversation(round(TRACE_REQUESTS * size), seed, rng, data)
    return _stretched(cell, arrivals)


def _stretched(cell: Cell, arrivals: Sequence[Arrival]) -> CellWorkload:
    settings = Scheduling()
    slo = Slo(tpot_s=cell.tpot_s)
    predictor = at_tpot(cell.predictor(settings), cell.tpot_s, settings)
    hits = prefix_hits(arrivals)
    offered = OfferedTo(
        cell.predictor(settings),
        cell.replicas,
        {"default": SloClass(slo=slo)},
        cell.shape.max_context_tokens,
        settings.min_batch_s,
    ).load_of(arrivals, hits)
    end_s = len(arrivals) / offered.per_second(cell.load) / cell.replicas
    factor = end_s / arrivals[-1].arrival_s
    cached = {arrival.id: hit for arrival, hit in zip(arrivals, hits, strict=True)}
    work_s = {a.id: predictor.prefill_s(a.prompt_tokens, cached[a.id]) for a in arrivals}
    return CellWorkload(
        arrivals=tuple(
            msgspec.structs.replace(arrival, arrival_s=factor * arrival.arrival_s)
            for arrival in arrivals
        ),
        cached=cached,
        work_s=work_s,
        deadlines_s={name: slo.ttft_deadline_s(own_s) for name, own_s in work_s.items()},
        load=offered.at(len(arrivals) / end_s / cell.replicas),
    )


def _mix(
    cell: Cell, share: float, size: float, rng: np.random.Generator, data: pathlib.Path | None
) -> list[Arrival]:
    """Poisson arrivals with an exact share of long prompts; the 70B's are half as long."""
    longs = round(LONG_IN_A_RUN * size)
    shorts = round(longs / share) - longs
    short, long = _lengths(data, rng)
    scale = cell.shape.max_context_tokens / (1 << 20)
    picked = [short[at] for at in rng.integers(0, len(short), shorts)]
    drawn = [long[at] for at in rng.integers(0, len(long), longs)]
    picked += [(int(prompt * scale), output) for prompt, output in drawn]
    order = rng.permutation(len(picked))
    times = np.cumsum(rng.exponential(1.0, len(picked)))
    return _arrivals([picked[at] for at in order], times.tolist())


def _lengths(data: pathlib.Path | None, rng: np.random.Generator) -> tuple[Lengths, Lengths]:
    """(prompt, output) lengths of short and of long requests: the papers' mix, or its marginals.

    Drawn: short prompts log-normal (median 1,700, σ 1.3, 2 to 8,032) with outputs around 415 (σ
    0.75, up to 1,024); long ones through P50 393 K and P90 839 K (µ 12.88, σ 0.592, 102 K to 997 K)
    with outputs around 520 (σ 0.5, 76 to 1,578).
    """
    if data is not None:
        rows = read_lengths(data / LENGTHS_TRACE)
        rows = [(prompt, max(1, output)) for prompt, output in rows]
        return (
            [row for row in rows if row[0] < LONG_TOKENS],
            [row for row in rows if row[0] >= LONG_TOKENS],
        )
    count = 5000
    return (
        _drawn(rng, count, (7.44, 1.3, 2, 8032), (6.03, 0.75, 2, 1024)),
        _drawn(rng, count, (12.88, 0.592, 102_000, 997_000), (6.25, 0.5, 76, 1578)),
    )


def _code(count: int, rng: np.random.Generator) -> list[Arrival]:
    """Code completion in bursts (gamma arrivals, coefficient of variation 2).

    Lengths after Azure's 2023 code trace: prompts log-normal, median 1,470, σ 0.9, up to 7,437;
    outputs median 13, σ 1.2, up to 1,000. Two in a hundred send a repository instead: uniform in
    the logarithm between 64 Ki and 256 Ki tokens, outputs median 300, σ 0.8.
    """
    longs = round(0.02 * count)
    lengths = _drawn(rng, count - longs, (7.29, 0.9, 3, 7437), (2.56, 1.2, 1, 1000))
    outputs = np.clip(rng.lognormal(5.7, 0.8, longs), 1, 2000).astype(int).tolist()
    repositories = np.exp2(rng.uniform(16.0, 18.0, longs)).astype(int).tolist()
    lengths += zip(repositories, outputs, strict=True)
    order = rng.permutation(count)
    times = np.cumsum(rng.gamma(0.25, 4.0, count))
    return _arrivals([lengths[at] for at in order], times.tolist())


def _conversation(
    count: int, seed: int, rng: np.random.Generator, data: pathlib.Path | None
) -> list[Arrival]:
    """A part of Mooncake's conversation trace, or conversations with its marginals.

    Drawn: six requests in ten open a conversation, the others continue one of the last 64 with all
    of its blocks. A turn adds log-normal tokens: median 5,000 (σ 1.2) at the start, 3,400 later, up
    to 126 K in all; outputs median 350 (σ 0.8), up to 2,000.
    """
    if data is not None:
        trace = read_mooncake(data / CONVERSATIONS_TRACE)
        first = seed * count % (len(trace) - count)
        part = trace[first : first + count]
        times = [a.arrival_s - part[0].arrival_s + rng.uniform(0.0, TRACE_STEP_S) for a in part]
        return [msgspec.structs.replace(part[at], arrival_s=times[at]) for at in np.argsort(times)]
    arrivals: list[Arrival] = []
    last: list[tuple[int, ...]] = []  # blocks of each conversation's last prompt
    times = np.cumsum(rng.exponential(1.0, count)).tolist()
    names = 0
    for index in range(count):
        open_one = not last or rng.random() < 0.6
        before = () if open_one else last[-1 - int(rng.integers(0, min(64, len(last))))]
        added = int(np.clip(rng.lognormal(8.5 if open_one else 8.1, 1.2), 64, 126_195))
        blocks = (*before, *range(names, names + -(-added // BLOCK_TOKENS)))
        blocks = blocks[: 126_195 // BLOCK_TOKENS]
        names += len(blocks)
        last.append(blocks)
        arrivals.append(
            Arrival(
                id=f"r{index}",
                arrival_s=times[index],
                prompt_tokens=len(blocks) * BLOCK_TOKENS,
                output_tokens=int(np.clip(rng.lognormal(5.86, 0.8), 1, 2000)),
                blocks=blocks,
            )
        )
    return arrivals


def _drawn(
    rng: np.random.Generator,
    count: int,
    prompt: tuple[float, float, int, int],
    output: tuple[float, float, int, int],
) -> Lengths:
    """Log-normal lengths: (µ, σ, least, most) of prompts and of outputs."""
    columns = [
        np.clip(rng.lognormal(mu, sigma, count), least, most).astype(int).tolist()
        for mu, sigma, least, most in (prompt, output)
    ]
    return list(zip(*columns, strict=True))


def _arrivals(lengths: Lengths, times: Sequence[float]) -> list[Arrival]:
    return [
        Arrival(id=f"r{index}", arrival_s=times[index], prompt_tokens=prompt, output_tokens=output)
        for index, (prompt, output) in enumerate(lengths)
    ]
