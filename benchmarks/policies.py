"""Policies compared in a matrix of workloads, models, layouts, TPOTs, loads and fleets.

    python -m benchmarks.policies --full  --data DIR    60 cells, at most 3 hours on two cores
    python -m benchmarks.policies --short --data DIR    12 cells, at most 10 minutes
    python -m benchmarks.policies --cell 3 --policy lars --policy fluid
    python -m benchmarks.policies --list                the cells, and what is left out

Prints a table of each cell and a verdict for each criterion. Finished runs are kept in `--out` as
JSON lines, under a digest of the run and of the code, so a run that was cut off goes on.
`--data`: folder with medha_mixed_5pct_long.csv and mooncake_conversation.jsonl; without it requests
have the same marginals. Modules: `policy_cells` (workloads), `policy_runs` (one run), `fluid` (a
reference that knows everything), `policy_verdict`.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec
from benchmarks import fluid
from benchmarks.policy_cells import TRACES, Cell, cells, infeasible_combinations, workload
from benchmarks.policy_runs import REFUSING, VARIANTS, Outcome, play, total
from benchmarks.policy_verdict import Results, table, verdict

import medha

SHORT_CELLS, SHORT_SIZE, FULL_SIZE, FULL_SEEDS = 12, 0.5, 1.0, 2
SHORT_REPLAYS, FULL_REPLAYS = 8, 24
LIMIT_S = 300.0
"""Processor time of a run."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be made. `data`: folder of traces, or empty."""

    cell: Cell
    variant: str
    seed: int
    size: float
    replays: int
    data: str = ""

    def key(self, code: str) -> str:
        """Digest of the run and of the code that makes it."""
        named = msgspec.structs.replace(self, data="traces" if self.data else "")
        return hashlib.sha256(msgspec.json.encode(named) + code.encode()).hexdigest()[:24]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, as a line of the file."""

    key: str
    cell: int
    variant: str
    seed: int
    outcome: Outcome


def code_digest() -> str:
    """Digest of the sources that determine the results."""
    core = pathlib.Path(medha.__file__).parent
    own = pathlib.Path(__file__).parent
    paths = [
        *core.rglob("*.py"),
        *core.rglob("*.c"),
        *core.rglob("*.json"),
        *own.glob("polic*.py"),
        own / "fluid.py",
        own / "covering_array.py",
    ]
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.parent.name != "compiled":
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def run(job: Job) -> Outcome:
    """Make a run."""
    data = pathlib.Path(job.data) if job.data else None
    load = workload(job.cell, job.seed, job.size, data)
    if job.variant in fluid.REFERENCES:
        return fluid.play(job.cell, load, job.variant)
    replays = job.replays if job.variant == REFUSING else 0
    return play(job.cell, job.variant, load, job.seed, LIMIT_S, replays)


def jobs_of(
    picked: Sequence[Cell],
    variants: Sequence[str] = (),
    size: float = FULL_SIZE,
    replays: int = FULL_REPLAYS,
    seeds: int = 1,
    first_seed: int = 0,
    data: str = "",
) -> list[Job]:
    """Return the runs of some cells, cell by cell. Several replicas have one seed."""
    return [
        Job(cell=cell, variant=variant, seed=seed, size=size, replays=replays, data=data)
        for cell in picked
        for variant in variants or [*VARIANTS, *fluid.REFERENCES]
        for seed in range(first_seed, first_seed + (seeds if cell.replicas == 1 else 1))
    ]


def planned_jobs(options: argparse.Namespace) -> list[Job]:
    """Return the runs of the command line."""
    if options.cell:
        picked = [cells()[number] for number in options.cell]
    else:
        picked = list(cells()[:SHORT_CELLS] if options.short else cells())
    return jobs_of(
        picked,
        options.policy or (),
        options.size or (FULL_SIZE if options.full else SHORT_SIZE),
        FULL_REPLAYS if options.full else SHORT_REPLAYS,
        options.seeds or (FULL_SEEDS if options.full else 1),
        options.seed,
        str(options.data or ""),
    )


class Keyed(Protocol):
    """A finished run, named by a digest of what made it."""

    @property
    def key(self) -> str: ...


Kept = TypeVar("Kept", bound=Keyed)


def kept_rows(path: pathlib.Path, of: type[Kept]) -> dict[str, Kept]:
    """Read finished runs by their keys; a line that was cut off is left out."""
    rows: dict[str, Kept] = {}
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = msgspec.json.decode(line, type=of)
        except msgspec.MsgspecError:
            continue
        rows[row.key] = row
    return rows


def _numbered(numbered: tuple[int, Job]) -> tuple[int, Outcome]:
    return numbered[0], run(numbered[1])


def make_runs(planned: Sequence[Job], out: pathlib.Path, processes: int) -> dict[Job, Outcome]:
    """Make all runs that the file does not have, and add them to it."""
    code = code_digest()
    rows = kept_rows(out, Row)
    outcomes = {job: rows[key].outcome for job in planned if (key := job.key(code)) in rows}
    left = [job for job in planned if job not in outcomes]
    out.parent.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    if not left:
        return outcomes
    # A fresh interpreter for each cell's worth of runs bounds memory.
    context = multiprocessing.get_context("spawn")
    with out.open("ab") as lines, context.Pool(processes, maxtasksperchild=16) as pool:
        for done, (index, outcome) in enumerate(
            pool.imap_unordered(_numbered, list(enumerate(left))), 1
        ):
            job = left[index]
            outcomes[job] = outcome
            row = Row(
                key=job.key(code),
                cell=job.cell.number,
                variant=job.variant,
                seed=job.seed,
                outcome=outcome,
            )
            lines.write(msgspec.json.encode(row) + b"\n")
            lines.flush()
            spent_s = time.monotonic() - began_s
            print(
                f"\r{done} of {len(left)} runs, {spent_s:.0f} s, cell {job.cell.number} ",
                end="",
                file=sys.stderr,
                flush=True,
            )
    print(file=sys.stderr)
    return outcomes


def by_cell(planned: Iterable[Job], outcomes: dict[Job, Outcome]) -> Results:
    """Sum the seeds of each cell and variant."""
    grouped: dict[Cell, dict[str, list[Outcome]]] = {}
    for job in planned:
        grouped.setdefault(job.cell, {}).setdefault(job.variant, []).append(outcomes[job])
    return {
        cell: {variant: total(seeds) for variant, seeds in variants.items()}
        for cell, variants in grouped.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--full", action="store_true", help="all cells, two seeds")
    what.add_argument("--short", action="store_true", help="the first cells with fewer requests")
    what.add_argument("--cell", type=int, action="append", help="number of a cell; may be repeated")
    what.add_argument("--list", action="store_true", help="print the cells")
    parser.add_argument("--policy", action="append", choices=[*VARIANTS, *fluid.REFERENCES])
    parser.add_argument("--data", type=pathlib.Path, help="folder of traces")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/policies.jsonl"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, help="number of seeds")
    parser.add_argument("--size", type=float, help="factor of the number of requests")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{cell.number:3} {cell.name}" for cell in cells()))
        print("left out:", *infeasible_combinations(), sep="\n    ")
        return 0
    if options.data:
        missing = [name for name in TRACES if not (options.data / name).is_file()]
        if missing:
            parser.error(f"--data {options.data} lacks {' and '.join(missing)}; name their folder")
    planned = planned_jobs(options)
    results = by_cell(planned, make_runs(planned, options.out, options.processes))
    print(table(results))
    print()
    print(verdict(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
