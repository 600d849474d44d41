"""Scenarios: files are checked, runs are repeatable, and `medha simulate` shows a table."""

from __future__ import annotations

import io
import pathlib

import msgspec
import pytest
from rich.console import Console

from medha.cli.simulate import SimulateOptions, run_simulate
from medha.errors import SpecError
from medha.sim.report import Report
from medha.sim.scenario import Scenario, Workload, read_scenario, simulate

ROOT = pathlib.Path(__file__).parents[2]
SMALL = Scenario(workload=Workload(mix=0.02, requests=60, load=0.6, output_tokens=5))


def test_the_example_is_a_scenario() -> None:
    scenario = read_scenario(ROOT / "examples" / "scenarios" / "mixed.toml")
    assert scenario.replicas == 2 and scenario.workload.mix == 0.05


def test_a_run_is_the_same_each_time_and_another_seed_is_another() -> None:
    first, again = simulate(SMALL), simulate(SMALL)
    assert first == again
    other = simulate(msgspec.structs.replace(SMALL, seed=1))
    assert other.records != first.records


def test_the_offered_load_is_about_the_one_asked_for() -> None:
    scenario = Scenario(workload=Workload(mix=0.0, requests=600, load=0.6, output_tokens=1))
    assert simulate(scenario).report.offered == pytest.approx(0.6, rel=0.15)


@pytest.mark.parametrize("admission", [True, False])
def test_every_request_is_in_the_report_with_or_without_a_door(admission: bool) -> None:
    scenario = msgspec.structs.replace(SMALL, admission=admission, replicas=2)
    outcome = simulate(scenario)
    assert outcome.report.total.requests == 60 == len(outcome.records)
    assert admission or outcome.report.total.refused == 0


def test_requests_are_dealt_to_the_routers_of_a_scenario(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        "replicas = 2\nrouters = 3\n[workload]\nmix = 0.02\nrequests = 60\nload = 0.6\n"
    )
    single = simulate(msgspec.structs.replace(read_scenario(path), routers=1))
    several = simulate(read_scenario(path))
    assert several.report.total.requests == 60
    assert several.report.total.attainment == pytest.approx(single.report.total.attainment, abs=0.1)


def test_an_unknown_policy_is_refused_with_the_known_ones(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text('[workload]\nmix = 0.0\nload = 0.5\n[scheduling]\npolicy = "best"\n')
    with pytest.raises(SpecError, match=r"scheduling.policy is best: must be one of lars, "):
        read_scenario(path)


def test_a_horizon_censors_what_is_unfinished() -> None:
    scenario = msgspec.structs.replace(
        SMALL, until_s=1.0, admission=False, workload=Workload(mix=1.0, requests=3, per_second=50.0)
    )
    report = simulate(scenario).report
    assert report.seconds == 1.0
    assert report.total.censored == report.total.requests > 0


def test_a_trace_file_is_found_beside_the_scenario(tmp_path: pathlib.Path) -> None:
    (tmp_path / "l.csv").write_text("num_prefill_tokens,num_decode_tokens\n500,3\n")
    (tmp_path / "s.toml").write_text('[workload]\nlengths = "l.csv"\nrequests = 5\nload = 0.1\n')
    outcome = simulate(read_scenario(tmp_path / "s.toml"), tmp_path)
    assert {record.output_tokens for record in outcome.records} == {3}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[workload]\nmix = 2.0\n", r"s\.toml.*mix"),
        ("[workload]\nmix = 0.1\nspeed = 'fast'\n", r"speed"),
        ("nonsense", r"must be a scenario"),
        ("[workload]\nload = 0.5\n", "exactly one source"),
        ("[workload]\nmix = 0.1\n", "exactly one of the two"),
        ('profile = "gpu9000"\n[workload]\nmix = 0.1\nload = 0.5\n', "a100"),
    ],
)
def test_a_broken_scenario_is_named_with_its_remedy(
    tmp_path: pathlib.Path, text: str, complaint: str
) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(SpecError, match=complaint):
        simulate(read_scenario(path), tmp_path)


def test_the_command_prints_a_table_per_policy_and_writes_what_it_saw(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[workload]\nmix = 0.0\nrequests = 30\noutput_tokens = 2\n")
    output = io.StringIO()
    run_simulate(
        SimulateOptions(
            scenario=path, policies=("lars", "fcfs"), load=0.4, seed=3, out=tmp_path / "out"
        ),
        Console(file=output, width=160),
    )
    text = output.getvalue()
    assert "lars:" in text and "fcfs:" in text and text.count("prompt tokens") == 2
    report = msgspec.json.decode((tmp_path / "out" / "lars.json").read_bytes(), type=Report)
    assert report.total.requests == 30
    assert len((tmp_path / "out" / "fcfs.records.jsonl").read_bytes().splitlines()) == 30
    with pytest.raises(SpecError, match="--policy is best"):
        run_simulate(
            SimulateOptions(scenario=path, policies=("best",), load=0.4), Console(file=output)
        )
