"""The policy matrix: its cells cover every pair, its workloads offer their load, its verdicts."""

from __future__ import annotations

import itertools
import pathlib

import msgspec
import pytest
from benchmarks.covering_array import Combination, covering_array, pairs
from benchmarks.fluid import REFERENCES
from benchmarks.policies import Job, Row, by_cell, jobs_of, kept_rows
from benchmarks.policy_cells import CELLS, LONG_SHARES, WORKLOADS, Cell, cells, infeasible, workload
from benchmarks.policy_runs import VARIANTS, Outcome, Run, Served, play, spread, total
from benchmarks.policy_verdict import table, verdict

from medha.config import Scheduling
from medha.sim.replica import SimReplica
from medha.sim.workload import Arrival

CELL = Cell(
    number=0,
    workload="5 % long",
    model="8B",
    layout="TP8",
    tpot_s=0.1,
    load=0.8,
    replicas=1,
)


def all_pairs(levels: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {pair for row in itertools.product(*map(range, levels)) for pair in pairs(row)}


@pytest.mark.parametrize("levels", [(2, 2, 2), (3, 3, 2, 4), (5, 2, 3, 4, 5, 2)])
def test_a_covering_array_contains_every_pair_of_levels(levels: tuple[int, ...]) -> None:
    rows = covering_array(levels, 0)
    assert {pair for row in rows for pair in pairs(row)} == all_pairs(levels)
    assert len(rows) <= 1.6 * max(a * b for a, b in itertools.combinations(levels, 2))


def test_four_rows_cover_three_switches() -> None:
    assert covering_array((2, 2, 2), 0) == [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]


def test_infeasible_rows_are_left_out_and_their_pairs_are_covered_by_others() -> None:
    def feasible(row: Combination) -> bool:
        return row[:2] != (1, 1) and row != (0, 0, 0)

    rows = covering_array((2, 2, 3), 0, feasible)
    assert all(map(feasible, rows))
    covered = {pair for row in rows for pair in pairs(row)}
    assert covered == all_pairs((2, 2, 3)) - {(0, 1, 1, 1)}


def test_more_rows_than_needed_are_different_and_end_with_the_feasible_ones() -> None:
    rows = covering_array((2, 2), 3)
    assert len(rows) == len(set(rows)) == 4  # two rows cannot cover four pairs
    assert len(covering_array((3, 2, 2), 9)) == 9
    assert len(covering_array((2, 2, 2), 99)) == 8


def test_the_cells_cover_every_pair_of_levels_that_can_be_served() -> None:
    matrix = cells()
    assert len(matrix) == CELLS and not any(infeasible(cell) for cell in matrix)
    levels = [
        (cell.workload, cell.model, cell.layout, cell.tpot_s, cell.load, cell.replicas)
        for cell in matrix
    ]
    for left, right in itertools.combinations(range(6), 2):
        covered = {(row[left], row[right]) for row in levels}
        every = set(
            itertools.product({row[left] for row in levels}, {row[right] for row in levels})
        )
        # The 70B cannot give 30 ms at the depth of the mixes with long prompts and SPP or TP8
        # alone: these two factors have no pair that is infeasible in every combination.
        assert covered == every
    assert {row[0] for row in levels} == set(WORKLOADS)


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("replicas", [1, 8])
def test_a_workload_offers_exactly_its_load(name: str, replicas: int) -> None:
    cell = msgspec.structs.replace(CELL, workload=name, replicas=replicas)
    load = workload(cell, 1, 0.3, None)
    assert load.load == pytest.approx(cell.load)
    assert load == workload(cell, 1, 0.3, None) != workload(cell, 2, 0.3, None)
    times = [arrival.arrival_s for arrival in load.arrivals]
    assert times == sorted(times) and len(load.deadlines_s) == len(times)
    if name in LONG_SHARES:
        longs = sum(map(load.is_long, load.arrivals))
        assert longs / len(times) == pytest.approx(LONG_SHARES[name], rel=0.01)


def test_a_conversation_counts_the_blocks_of_its_last_turn_as_cached() -> None:
    load = workload(msgspec.structs.replace(CELL, workload="conversation"), 0, 0.5, None)
    prompts = sum(arrival.prompt_tokens for arrival in load.arrivals)
    assert 0.2 < sum(load.cached.values()) / prompts < 0.6  # Mooncake's trace: 0.37


@pytest.mark.parametrize("variant", ["lars", "threshold", "lars-refuse", "lars-errors"])
def test_a_run_accounts_for_every_request(variant: str) -> None:
    cell = msgspec.structs.replace(CELL, workload="code", load=1.4)
    load = workload(cell, 0, 0.2, None)
    outcome = play(cell, variant, load, 0, 60.0, 2)
    assert not outcome.failure
    assert outcome.short + outcome.long == len(load.arrivals)
    assert outcome.work_s == pytest.approx(sum(load.work_s.values()))
    assert outcome.fill > 0.0 and 0.0 < outcome.busy <= 1.0
    assert outcome.would_make <= outcome.tried <= min(2, outcome.refused)


def test_replayed_refusals_are_spread_evenly_over_a_run() -> None:
    ids = [str(number) for number in range(100)]
    assert spread(ids, 4) == ["12", "37", "62", "87"]
    assert spread(ids[:3], 24) == ids[:3] and spread([], 24) == []


class SetAside(Run):
    """A run that refuses though it relegates, so that it refuses what would be in time."""

    def _replica(self, index: int) -> SimReplica:
        replica = super()._replica(index)
        promises = replica.scheduler._promises
        promises.relegates = True
        promises.set_aside()
        return replica


class OneReplay(SetAside):
    """A run that replays one refusal in its own process, and then stops."""

    made_it: bool | None = None

    def _replay(self, arrival: Arrival) -> None:
        self.made_it = self.would_make_it(arrival)
        self.until_s = self.loop.now


def test_a_refusal_was_right_if_the_request_costs_another_its_deadline() -> None:
    """A document leaves room for one of two prompts; the run refuses the first of them."""
    document, prompt = 200_000, 9000
    work_s = CELL.predictor(Scheduling()).prefill_s(document)
    load = msgspec.structs.replace(
        workload(CELL, 0, 0.2, None),
        arrivals=(
            Arrival(id="document", arrival_s=0.0, prompt_tokens=document, output_tokens=1),
            Arrival(id="first", arrival_s=0.5, prompt_tokens=prompt, output_tokens=1),
            Arrival(id="second", arrival_s=0.9, prompt_tokens=prompt, output_tokens=1),
        ),
        deadlines_s={"document": 1.13 * work_s, "first": 0.5, "second": 0.5},
    )
    run = SetAside(CELL, "lars-refuse", load, 0)
    run.play(60.0)
    assert run.served() == Served(("first",), frozenset({"document", "second"}))

    def made_it(served: Served) -> bool | None:
        again = OneReplay(CELL, "lars-refuse", load, 0)
        again.play(60.0, served, 1)
        return again.made_it

    assert made_it(run.served()) is False
    assert made_it(Served(("first",), frozenset({"document"}))) is True


def test_a_run_that_takes_too_long_has_a_failure() -> None:
    load = workload(CELL, 0, 0.2, None)
    assert "stopped at" in play(CELL, "lars", load, 0, 0.0, 0).failure


def outcome(short: int, long: int, **more: float) -> Outcome:
    """Counts in time of a hundred short and a hundred long requests."""
    return Outcome(
        short=100,
        long=100,
        short_in_time=short,
        long_in_time=long,
        promised=100,
        work_s=1.0,
        **more,  # type: ignore[arg-type]
    )


def failed(**outcomes: Outcome) -> set[str]:
    lines = verdict({CELL: {name.replace("_", "-"): row for name, row in outcomes.items()}})
    return {line.split(":")[0] for line in lines.splitlines() if "fails" in line}


def test_the_verdict_names_a_policy_that_is_better_in_both_or_in_either_at_equal_other() -> None:
    own = outcome(90, 80)
    assert not failed(lars=own, srpf=outcome(92, 82), edf=outcome(100, 79), fluid=outcome(93, 80))
    both, either = "not dominated by 0.02 in short and long", "not 0.05 behind in either at equal"
    assert failed(lars=own, srpf=outcome(93, 83)) == {both}
    assert failed(lars=own, srpf=outcome(96, 80)) == {f"{either} other"}
    assert failed(lars=own, lars_no_commit=outcome(90, 86)) == {f"{either} other"}


def test_the_verdict_names_broken_promises_long_waits_and_wrong_refusals() -> None:
    own = outcome(90, 80)
    assert failed(lars=outcome(90, 80, broken=1)) == {"promises broken"}
    assert failed(lars=own, lars_errors=outcome(9, 9, broken=3)) == {
        "promises broken with ±20 % errors"
    }
    assert failed(lars=outcome(90, 80, late_s=0.21)) == {
        "no short wait over its deadline + 2 batches to load 0.9"
    }
    assert failed(lars=own, lars_refuse=outcome(9, 9, refused=10, tried=4, would_make=1)) == {
        "refused but would have made it"
    }
    assert failed(lars=outcome(90, 80, batch_s=9.0, allowed_s=10.0)) == {
        "batches fill 0.95 of their budget while prompts wait"
    }
    assert failed(lars=own, fluid=outcome(94, 80)) == {
        "within 0.03 (SPP 2"  # and so on
    }


def test_a_failure_is_shown_and_counted() -> None:
    results = {CELL: {"lars": Outcome(failure="TimeoutError: stopped at 3 of 9 s")}}
    assert "stopped at 3" in table(results)
    assert "every run ends: fails in 1 of 1" in verdict(results)


def test_seeds_are_added_up() -> None:
    both = total([outcome(90, 80, wait=3.0, load=0.5), outcome(70, 60, wait=2.0, load=0.7)])
    assert (both.short, both.short_in_time, both.long_share) == (200, 160, 0.7)
    assert both.wait == 3.0 and both.load == pytest.approx(0.6)


def test_finished_runs_are_found_again_until_the_code_changes(tmp_path: pathlib.Path) -> None:
    job = Job(cell=CELL, variant="lars", seed=0, size=1.0, replays=0)
    row = Row(key=job.key("v1"), cell=0, variant="lars", seed=0, outcome=outcome(1, 2))
    path = tmp_path / "rows.jsonl"
    line = msgspec.json.encode(row)
    path.write_bytes(line + b"\n" + line[:50])  # the second was cut off
    assert kept_rows(path, Row) == {job.key("v1"): row}
    assert job.key("v2") not in kept_rows(path, Row)
    assert msgspec.structs.replace(job, seed=1).key("v1") not in kept_rows(path, Row)
    assert not kept_rows(tmp_path / "none", Row)
    assert by_cell([job], {job: row.outcome}) == {CELL: {"lars": row.outcome}}


def test_the_short_form_begins_with_the_cells_of_the_full_one() -> None:
    variants = len(VARIANTS) + len(REFERENCES)
    short, full = jobs_of(cells()[:12], size=0.5), jobs_of(cells(), size=1.0, seeds=2)
    assert {job.cell for job in short} < {job.cell for job in full}
    several = sum(cell.replicas > 1 for cell in cells())
    assert len(full) == variants * (2 * CELLS - several)
