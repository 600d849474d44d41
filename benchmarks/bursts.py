"""Promises of a router and one replica when requests come at once, over random bursts.

    python -m benchmarks.bursts --seeds 100                     each kind, exact predictions
    python -m benchmarks.bursts --seeds 20 --seed 5000 --kind burst --error 0.2

Router, grants and replica decide as in a fleet; batches take what the predictor says, or up to
`--error` more or less. A promise is *broken* if its first token comes after the deadline that the
router accepted. Prints a row for each kind and a line for each broken promise. Finished runs are
kept in `--out` as JSON lines, under a digest of the run and of the code.

    small       2 to 12 requests, 1 to 4 stages, 1 or 2 KVP groups
    pipeline    5 to 30 requests, 2 to 4 stages, tight TPOTs
    burst       30 to 60 requests, prompts of 100 to 1 M tokens, answers as in Azure's traces
    headers     5 to 30 requests, half of them with a TPOT of their own
    hits        10 to 40 requests, most of them on a cached history
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import math
import pathlib
import random
import sys
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from benchmarks.policies import code_digest, kept_rows
from rich.console import Console
from rich.table import Table

from medha.config import Scheduling
from medha.predictor import Predictor
from medha.profile import SHIPPED
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import Misprediction, PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.report import SHORT_TOKENS, RequestRecord
from medha.sim.scenario import LLAMA_3_8B
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import BLOCK_TOKENS, CHAT_OUTPUT, DOCUMENT_OUTPUT, P95_NORMAL, Arrival
from medha.topology import Topology

IDLE_S = 5.0
PAGE_TOKENS, PAGES, CONTEXT_TOKENS = 64, 60_000, 1 << 20
TPOT_TOLERANCE = 1.001  # as in the policy matrix

# (arrival, prompt tokens, output tokens, number of the history that the prompt begins with or -1)
Wish = tuple[float, int, int, int]


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that come at once to one idle replica with histories in its cache.

    `deadlines_s`, `tpots_s`: headers, by the number of the wish. `error`: by which batches are
    slower or faster than predicted, at most.
    """

    profile: str
    tp: int
    spp: int = 1
    kvp: int = 1
    tpot_s: float
    wishes: tuple[Wish, ...]
    histories: tuple[int, ...] = ()
    deadlines_s: Mapping[int, float] = {}
    tpots_s: Mapping[int, float] = {}
    when_infeasible: str = "refuse"
    error: float = 0.0
    seed: int = 0

    def fleet(self) -> SimulatedFleet:
        """Return a fleet whose loop has all arrivals, and whose histories are cached."""
        layout = Topology(tp=self.tp, spp=self.spp, kvp_min=self.kvp, kvp_max=self.kvp)

        def predictor() -> Predictor:
            return Predictor(SHIPPED[self.profile], LLAMA_3_8B, layout)

        loop, plan = Loop(), Scheduling(max_running=1024)
        slo_class = SloClass(slo=Slo(tpot_s=self.tpot_s), when_infeasible=self.when_infeasible)
        scheduler = Scheduler(
            layout, LLAMA_3_8B, predictor(), plan, PAGES, PAGE_TOKENS, CONTEXT_TOKENS, (slo_class,)
        )
        slowness = Misprediction(self.error, self.seed, 0) if self.error else None
        clock = PipelineClock(predictor(), PAGE_TOKENS, scheduler.layout, slowness)
        due_s = {f"r{number}": due_s for number, due_s in self.deadlines_s.items()}
        due_s |= {f"history-{number}": 1e6 for number in range(len(self.histories))}
        tpots_s = {f"r{number}": tpot_s for number, tpot_s in self.tpots_s.items()}
        fleet = SimulatedFleet(
            [SimReplica("r", scheduler, clock, loop)],
            loop,
            (slo_class,),
            plan,
            PAGE_TOKENS,
            CONTEXT_TOKENS,
            due_s,
            tpots_s,
        )
        for number, tokens in enumerate(self.histories):
            first = Arrival(
                id=f"history-{number}",
                arrival_s=loop.now,
                prompt_tokens=tokens,
                blocks=blocks(number, tokens),
            )
            loop.at(first.arrival_s, ARRIVE, functools.partial(fleet.arrive, first))
            loop.run(most_events=200_000)
        begin_s = loop.now + IDLE_S
        for number, (arrival_s, prompt, output, history) in enumerate(self.wishes):
            cached = min(prompt, self.histories[history]) if history >= 0 else 0
            arrival = Arrival(
                id=f"r{number}",
                arrival_s=begin_s + arrival_s,
                prompt_tokens=prompt,
                output_tokens=output,
                blocks=blocks(history, cached),
            )
            loop.at(arrival.arrival_s, ARRIVE, functools.partial(fleet.arrive, arrival))
        return fleet

    def play(self) -> list[RequestRecord]:
        """Serve the requests; return their records."""
        fleet = self.fleet()
        fleet.loop.run(most_events=2_000_000)
        return [record for record in fleet.records() if record.id.startswith("r")]


def blocks(history: int, tokens: int) -> tuple[int, ...]:
    return tuple(10_000 * (history + 1) + block for block in range(tokens // BLOCK_TOKENS))


def late(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Return by how much promises were broken."""
    return {
        record.id: (math.inf if record.ttft_s is None else record.ttft_s) - record.ttft_deadline_s
        for record in records
        if record.promised and not record.in_time
    }


# --- kinds of bursts ------------------------------------------------------------------------------


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """Values that the bursts of a kind are drawn from. `cached`: part of the requests on a history.

    `real`: prompts of all lengths with answers as in traces. Else lengths are alike, and answers
    of the fewest tokens or many. `headers`: half of the requests have a TPOT of their own.
    """

    requests: tuple[int, int]
    cached: float
    tp: tuple[int, ...]
    spp: tuple[int, ...]
    kvp: tuple[int, ...]
    tpots_s: tuple[float, ...]
    real: bool = False
    headers: bool = False

    def draw(self, draw: random.Random) -> Burst:
        wishes, histories = self._wishes(draw)
        drawn = Burst(
            profile=draw.choice(["a100", "h100"]),
            tp=draw.choice(self.tp),
            spp=draw.choice(self.spp),
            kvp=draw.choice(self.kvp),
            tpot_s=draw.choice(self.tpots_s),
            when_infeasible=draw.choice(["refuse", "relegate"]),
            wishes=wishes,
            histories=histories,
        )
        if not self.headers:
            return drawn
        tpots_s = {
            number: drawn.tpot_s * draw.choice([0.2, 0.4, 0.6, 0.8])
            for number in range(len(wishes))
            if draw.random() < 0.5
        }
        return msgspec.structs.replace(drawn, tpots_s=tpots_s)

    def _wishes(self, draw: random.Random) -> tuple[tuple[Wish, ...], tuple[int, ...]]:
        """Return requests and the histories that some of them begin with."""
        histories = tuple(int(2 ** draw.uniform(12, 19 if self.real else 18)) for _ in range(2))
        low, high = draw.choice([(7, 12), (9, 15.5), (12, 17), (10, 19.9), (6.7, 19.9)])
        spread_s = draw.choice([0.0, 1.0])
        wishes: list[Wish] = []
        for _ in range(draw.randint(*self.requests)):
            prompt, history = int(2 ** draw.uniform(low, high)), -1
            if draw.random() < self.cached:
                history = draw.randrange(2)
                more = draw.choice([1, min(prompt, 5000), min(prompt, 100_000)])
                prompt = histories[history] + more
            output = draw.choice([1, 2, 3, 20, 200, 2000])
            if self.real:
                answer = CHAT_OUTPUT if prompt <= SHORT_TOKENS else DOCUMENT_OUTPUT
                sigma = math.log(answer.p95 / answer.median) / P95_NORMAL
                output = max(1, round(answer.median * math.exp(draw.gauss(0.0, sigma))))
            arrival_s = draw.choice([0.0, draw.uniform(0.0, spread_s)])
            wishes.append((arrival_s, min(prompt, CONTEXT_TOKENS - 1 - output), output, history))
        return tuple(sorted(wishes)), histories


KINDS = {
    "small": Kind(
        requests=(2, 12),
        cached=0.3,
        tp=(2, 4, 8),
        spp=(1, 2, 3, 4),
        kvp=(1, 2),
        tpots_s=(0.05, 0.1, 0.3),
    ),
    "pipeline": Kind(
        requests=(5, 30),
        cached=0.3,
        tp=(1, 2, 4, 8),
        spp=(2, 3, 4),
        kvp=(1, 1, 1, 2),
        tpots_s=(0.02, 0.05, 0.075, 0.1),
    ),
    "burst": Kind(
        requests=(30, 60),
        cached=0.2,
        tp=(1, 2, 2, 4, 8),
        spp=(1, 1, 2, 3),
        kvp=(1, 1, 2),
        tpots_s=(0.02, 0.02, 0.03, 0.05),
        real=True,
    ),
    "headers": Kind(
        requests=(5, 30),
        cached=0.2,
        tp=(4, 8),
        spp=(1, 2, 3),
        kvp=(1, 1, 2),
        tpots_s=(0.05, 0.1, 0.2),
        headers=True,
    ),
    "hits": Kind(
        requests=(10, 40),
        cached=0.7,
        tp=(2, 4, 8),
        spp=(1, 2, 3),
        kvp=(1, 2),
        tpots_s=(0.03, 0.05, 0.1),
        real=True,
    ),
}


def drawn(kind: str, seed: int, error: float = 0.0) -> Burst:
    """Return the burst of a kind and a seed."""
    burst = KINDS[kind].draw(random.Random(f"{kind} {seed}"))
    return msgspec.structs.replace(burst, error=error, seed=seed)


# --- runs -----------------------------------------------------------------------------------------


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, as a line of the file.

    `late_s`: by how much promises were broken, by request. `slow`: promised answers that missed
    their TPOT, of these `slow_headers` one of their own; `second`: those of 2 or 3 tokens.
    `own_tpots`: promised answers with a TPOT of their own.
    """

    key: str
    kind: str
    seed: int
    error: float
    requests: int = 0
    promises: int = 0
    late_s: dict[str, float] = {}
    refused: int = 0
    short: int = 0
    long: int = 0
    short_in_time: int = 0
    long_in_time: int = 0
    good: int = 0
    answers: int = 0
    slow: int = 0
    own_tpots: int = 0
    slow_headers: int = 0
    second: int = 0
    failure: str = ""


def run(kind: str, seed: int, error: float, key: str) -> Outcome:
    """Make a run; one that does not end has a `failure`."""
    of_seed = drawn(kind, seed, error)
    try:
        records = of_seed.play()
    except (RuntimeError, AssertionError, KeyError, ValueError) as failure:
        text = f"{type(failure).__name__}: {failure}"
        return Outcome(key=key, kind=kind, seed=seed, error=error, failure=text)
    short = [record for record in records if record.prompt_tokens <= SHORT_TOKENS]
    answers = [record for record in records if record.promised and record.output_tokens > 1]
    own = [record for record in answers if int(record.id[1:]) in of_seed.tpots_s]
    slow = [record for record in answers if _is_slow(record)]
    in_time = sum(record.in_time for record in records)
    short_in_time = sum(record.in_time for record in short)
    return Outcome(
        key=key,
        kind=kind,
        seed=seed,
        error=error,
        requests=len(records),
        promises=sum(record.promised for record in records),
        late_s=late(records),
        refused=sum(bool(record.refused) for record in records),
        short=len(short),
        long=len(records) - len(short),
        short_in_time=short_in_time,
        long_in_time=in_time - short_in_time,
        good=sum(record.good for record in records),
        answers=len(answers),
        slow=len(slow),
        own_tpots=len(own),
        slow_headers=sum(map(_is_slow, own)),
        second=sum(record.output_tokens <= 3 for record in slow),
    )


def _is_slow(record: RequestRecord) -> bool:
    pace_s = record.mean_tpot_s
    return pace_s is not None and pace_s > TPOT_TOLERANCE * record.tpot_s


def make_runs(
    kinds: Iterable[str], seeds: Sequence[int], error: float, out: pathlib.Path
) -> list[Outcome]:
    """Make all runs that the file does not have, and add them to it."""
    code = code_digest() + hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()
    before, outcomes = kept_rows(out, Outcome), []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as lines:
        for seed in seeds:  # all kinds of a seed first: a run that is cut off has some of each
            for kind in kinds:
                name = f"{kind} {seed} {error:g} {code}"
                key = hashlib.sha256(name.encode()).hexdigest()[:24]
                outcome = before.get(key)
                if outcome is None:
                    outcome = run(kind, seed, error, key)
                    lines.write(msgspec.json.encode(outcome) + b"\n")
                    lines.flush()
                outcomes.append(outcome)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return a row for each kind, and one for all."""
    result = Table("kind", "runs", "promises", "broken", "late s, most / all", "refused")
    for column in (
        "short in time",
        "long in time",
        "all targets",
        "TPOT missed",
        "own TPOT missed",
    ):
        result.add_column(column)
    result.add_column("2nd or 3rd token late")
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    for kind in [*kinds, "all"] if len(kinds) > 1 else kinds:
        of_kind = [outcome for outcome in outcomes if kind in (outcome.kind, "all")]
        late_s = [late_s for outcome in of_kind for late_s in outcome.late_s.values()]

        def count(name: str, of_kind: Sequence[Outcome] = of_kind) -> int:
            return sum(int(getattr(outcome, name)) for outcome in of_kind)

        result.add_row(
            kind,
            str(len(of_kind)),
            str(count("promises")),
            str(len(late_s)),
            f"{max(late_s, default=0.0):.3f} / {sum(late_s):.3f}",
            f"{count('refused')} of {count('requests')}",
            f"{count('short_in_time')} of {count('short')}",
            f"{count('long_in_time')} of {count('long')}",
            str(count("good")),
            f"{count('slow')} of {count('answers')}",
            f"{count('slow_headers')} of {count('own_tpots')}",
            str(count("second")),
        )
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20, help="number of seeds of each kind")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--kind", action="append", choices=[*KINDS])
    parser.add_argument("--error", type=float, default=0.0, help="of predictions, as 0.2")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/bursts.jsonl"))
    options = parser.parse_args()
    seeds = range(options.seed, options.seed + options.seeds)
    outcomes = make_runs(options.kind or KINDS, seeds, options.error, options.out)
    Console(width=180).print(table(outcomes))
    for outcome in outcomes:
        for request, late_s in outcome.late_s.items():
            print(f"broken: {outcome.kind} {outcome.seed} {request}, {late_s:.4f} s late")
        if outcome.failure:
            print(f"failed: {outcome.kind} {outcome.seed}: {outcome.failure}")
    return int(any(outcome.failure for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
