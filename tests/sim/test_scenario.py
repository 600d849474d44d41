"""Scenarios: files are checked, runs are repeatable, and `medha simulate` shows a table."""

from __future__ import annotations

import io
import json
import os
import pathlib
import signal

import msgspec
import pytest
from rich.console import Console

from medha.cli.simulate import SimulateOptions, run_simulate
from medha.errors import SpecError
from medha.request import Slo, SloClass
from medha.sim.arrivals import Workload
from medha.sim.report import Report
from medha.sim.scenario import GroupLoss, Scenario, read_scenario, simulate
from medha.topology import Topology

ROOT = pathlib.Path(__file__).parents[2]
SMALL = Scenario(workload=Workload(mix=0.02, requests=60, load=0.6, output_tokens=5))


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "scenarios").glob("*.toml")), ids=str)
def test_an_example_is_a_scenario_with_arrivals(path: pathlib.Path) -> None:
    scenario = msgspec.structs.replace(read_scenario(path), until_s=1e-3, autoscaling=None)
    assert simulate(scenario, path.parent).report.total.requests < 3


def test_a_run_is_the_same_each_time_and_another_seed_is_another() -> None:
    first, again = simulate(SMALL), simulate(SMALL)
    assert first == again
    other = simulate(msgspec.structs.replace(SMALL, seed=1))
    assert other.records != first.records


@pytest.mark.parametrize("spp", [8, 16])
def test_a_deep_pipeline_promises_short_prompts_and_keeps_its_word(spp: int) -> None:
    slo_class = SloClass(slo=Slo(tpot_s=0.02 * spp))
    layout = Topology(tp=8, spp=spp)
    workload = Workload(mix=0.02, requests=200, load=0.6)
    report = simulate(Scenario(workload=workload, topology=layout, classes=(slo_class,))).report
    assert report.short.promised >= 0.95 * report.short.requests
    assert not report.total.promises_broken


def test_the_offered_load_is_about_the_one_asked_for() -> None:
    scenario = Scenario(workload=Workload(mix=0.0, requests=600, load=0.6, output_tokens=1))
    report = simulate(scenario).report
    assert report.offered == pytest.approx(report.stated) == pytest.approx(0.6)


@pytest.mark.parametrize("admission", [True, False])
def test_a_default_deadline_counts_the_tokens_that_are_not_cached(
    admission: bool, tmp_path: pathlib.Path
) -> None:
    row = {"input_length": 100_000, "output_length": 9, "hash_ids": [*range(190)]}
    rows = [{**row, "timestamp": at_ms} for at_ms in (0, 60_000)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workload = Workload(mooncake="m.jsonl")
    outcome = simulate(Scenario(workload=workload, admission=admission), tmp_path)
    first, again = sorted(outcome.records, key=lambda record: record.arrival_s)
    assert again.cached_tokens > 90_000
    assert again.work_s < 0.1 * first.work_s
    assert again.ttft_deadline_s < 0.3 * first.ttft_deadline_s


def test_a_trace_has_the_load_that_is_asked_for_and_its_hits_are_counted(
    tmp_path: pathlib.Path,
) -> None:
    rows = [
        {
            "timestamp": 900 * n,
            "input_length": 16_384,
            "output_length": 9,
            "hash_ids": [*range(24), *range(100 * n + 100, 100 * n + 108)],
        }
        for n in range(60)
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for load in (0.2, 0.6):
        outcome = simulate(Scenario(workload=Workload(mooncake="m.jsonl", load=load)), tmp_path)
        assert outcome.report.offered == pytest.approx(load, rel=0.2)
        assert max(record.cached_tokens for record in outcome.records) == 24 * 512
        buckets = {part.name: part.requests for part in outcome.report.by_length}
        assert buckets["1K – 8K"] >= 55  # all but those before the first was cached


def test_an_answer_stops_at_its_real_length_below_the_limit() -> None:
    workload = msgspec.structs.replace(SMALL.workload, max_tokens=500)
    outcome = simulate(msgspec.structs.replace(SMALL, workload=workload))
    assert {record.output_tokens for record in outcome.records if not record.refused} == {5}


def test_classes_have_their_own_deadlines() -> None:
    classes = (
        SloClass(slo=Slo(ttft_floor_s=2.0, ttft_multiplier=0.0)),
        SloClass(name="batch", slo=Slo(ttft_floor_s=30.0, tpot_s=0.3)),
    )
    workload = msgspec.structs.replace(SMALL.workload, classes={"default": 1, "batch": 1})
    outcome = simulate(msgspec.structs.replace(SMALL, workload=workload, classes=classes))
    seen = {(r.slo_class, r.tpot_s) for r in outcome.records}
    assert seen == {("default", 0.03), ("batch", 0.3)}
    assert {r.ttft_deadline_s for r in outcome.records if r.slo_class == "default"} == {2.0}
    assert len(outcome.report.by_class) == 2


def test_a_clock_that_mispredicts_changes_the_times_and_is_the_same_each_time() -> None:
    wrong = msgspec.structs.replace(SMALL, prediction_error=0.2)
    exact, first, again = simulate(SMALL), simulate(wrong), simulate(wrong)
    assert first == again
    pairs = zip(exact.records, first.records, strict=True)
    assert any(a.first_token_s != b.first_token_s for a, b in pairs)
    assert first.report.offered == pytest.approx(exact.report.offered, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_what_a_predictor_learns_makes_the_simulated_machine_no_slower(seed: int) -> None:
    workload = Workload(mix=0.0, requests=200, load=0.5, output_tokens=5)
    scenario = Scenario(workload=workload, admission=False, seed=seed)
    exact = simulate(scenario).report
    wrong = simulate(msgspec.structs.replace(scenario, prediction_error=0.2)).report
    assert wrong.total.ttft.mean == pytest.approx(exact.total.ttft.mean, rel=0.3)


@pytest.mark.parametrize("admission", [True, False])
def test_requests_outlive_a_lost_group_that_comes_back(admission: bool) -> None:
    lost = (GroupLoss(at_s=0.5, replica=1), GroupLoss(at_s=0.6), GroupLoss(at_s=0.7))
    scenario = msgspec.structs.replace(
        SMALL, replicas=2, admission=admission, lost=lost, cold_start_s=7.0
    )
    outcome = simulate(scenario)
    served = [record for record in outcome.records if not record.refused]
    assert {record.output_tokens for record in served} == {5}
    assert not any(r.first_token_s and 0.61 < r.first_token_s < 7.5 for r in served)
    assert any(r.first_token_s and r.first_token_s > 7.5 for r in served)


@pytest.mark.parametrize(
    ("loss", "complaint"),
    [
        (GroupLoss(at_s=1.0, replica=2), r"lost\.replica is 2: must be less than 1; use 0 to 0"),
        (GroupLoss(at_s=1.0, group=1), r"lost\.group is 1"),
    ],
)
def test_a_loss_of_what_is_not_there_is_named(loss: GroupLoss, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        simulate(msgspec.structs.replace(SMALL, lost=(loss,)))


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
        ("prediction_error = 1.5\n[workload]\nmix = 0.1\nload = 0.5\n", "prediction_error"),
        ("[workload]\nmix = 0.1\nload = 0.5\nmax_tokens = 'x'\n", "max_tokens is x"),
        ("[workload]\nmix = 0.1\nload = 0.5\nlong_output = { median = 9, p95 = 1 }\n", "p95 1"),
        ("nonsense", r"must be a scenario"),
        (
            "[autoscaling]\nleast = 5\nmost = 4\ntarget_slack = 0.2\ndown_after_s = 300\n"
            "[workload]\nmix = 0.1\nload = 0.5\n",
            "autoscaling is 5 to 4 replicas",
        ),
        (
            "[workload]\nmix = 1.0\nload = 0.5\nrequests = 3\n[topology]\ntp = 2\n"
            "[model]\nlayers = 2\nhidden = 64\nheads = 2\nkv_heads = 2\nhead_dim = 32\n"
            "intermediate = 64\nvocab = 64\nmax_context_tokens = 4096\n",
            "mix = 1.0: must hold requests that the model's context holds",
        ),
        (f"[workload]\nmix = 0.1\nload = 0.5\nrequests = {10**18}\n", "requests"),
        ("[workload]\nmix = 0.1\nload = 0.5\ngap_cv = 300.0\n", "gap_cv"),
        ("[workload]\nmix = 0.1\nload = 1e-320\n", "load"),
        ("[workload]\nmix = 0.1\nload = 0.5\nmax_tokens = '1e308x'\n", "max_tokens is 1e308x"),
        (f"[workload]\nload = 0.5\nlengths = '{'x' * 5000}'\n", "must be a file"),
        (f"seed = {'9' * 5000}\n", "must be a scenario"),
        (f"seed = {'[' * 5000}\n", "must be a scenario"),
        ("seed = -1\n[workload]\nmix = 0.1\nload = 0.5\n", "seed is -1: must be 0 or more"),
        ("topology = {tp = 0}\n[workload]\nmix = 0.1\nload = 0.5\n", "topology.tp is 0: must be"),
        (
            "topology = {kvp_min = 2}\n[workload]\nmix = 0.1\nload = 0.5\n",
            "topology.kvp_min is 2: must be at most kvp_max, 1",
        ),
        (
            "scheduling = {min_batch_s = 1}\n[workload]\nmix = 0.1\nload = 0.5\n",
            "min_batch_s is 1.0: must be above 0 and at most max_batch_s, 0.1",
        ),
        ("[workload]\nmix = 0.1\nload = inf\n", "workload.load is inf: must be a finite number"),
        ("[[lost]]\nat_s = nan\n[workload]\nmix = 0.1\n", r"lost\[0\]\.at_s is nan"),
        ("[workload]\nload = 0.5\n", "exactly one source"),
        ("[workload]\nmix = 0.1\n", "exactly one of the two"),
        ('profile = "gpu9000"\n[workload]\nmix = 0.1\nload = 0.5\n', "a100"),
        *(
            (f"{setting}\n[workload]\nmix = 0.1\nload = 0.5\n", complaint)
            for setting, complaint in (
                ('scheduling = {budget = "fast"}', "budget is fast: must be one of slack,"),
                ('scheduling = {budget = "fixed", fixed_s = 0.0}', "fixed_s is 0.0: must be above"),
                ("scheduling = {relegated_share = 1.0}", "relegated_share is 1.0: must be a part"),
                ("scheduling = {plan_guard = 1}", "plan_guard is 1.0: must be a part of 0 to 0.9"),
                ("scheduling = {long_prefill_threshold_tokens = 0}", "must be at least 1"),
                ("topology = {tp = 3}", "tp is 3: must divide the model's 32 heads"),
                ("topology = {tokens_per_group = 0}", "tokens_per_group is 0: must be at least 1"),
                ("scheduling = {max_batch_s = 1e308}", "max_batch_s is 1e.308: must be at most"),
                ("scheduling = {output_reserve = 1e308}", "output_reserve is 1e.308: must be at"),
                (f"model = {{packed_bytes = {10**20}}}", f"packed_bytes is {10**20}: must be at"),
                ('[[classes]]\nname = "a"\nwhen_infeasible = "maybe"', "when_infeasible is maybe"),
                ('[[classes]]\nname = "a"\n[[classes]]\nname = "a"', "must be of one class"),
                ('[[classes]]\nname = "a"\nreserved = 5.0', "reserved is 5.0: must be a part"),
            )
        ),
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
    assert "lars:" in text and "fcfs:" in text and text.count("uncached tokens") == 2
    report = msgspec.json.decode((tmp_path / "out" / "lars.json").read_bytes(), type=Report)
    assert report.total.requests == 30
    assert len((tmp_path / "out" / "fcfs.records.jsonl").read_bytes().splitlines()) == 30
    with pytest.raises(SpecError, match="--policy is best"):
        run_simulate(
            SimulateOptions(scenario=path, policies=("best",), load=0.4), Console(file=output)
        )


def test_a_folder_that_cannot_be_made_is_named_before_anything_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("medha.cli.simulate.simulate")
    path = tmp_path / "s.toml"
    path.write_text("[workload]\nmix = 0.1\nload = 0.5\n")
    with pytest.raises(SpecError, match=r"--out is .*s\.toml: must be a folder \(File exists\)"):
        run_simulate(SimulateOptions(scenario=path, out=path), Console(file=io.StringIO()))


def test_ctrl_c_ends_a_simulation_at_once_unless_it_is_ignored(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[workload]\nmix = 0.1\nload = 0.5\nrequests = 3\n")

    class Ended(BaseException):
        pass

    def pressed(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        raise InterruptedError("it goes on")

    def ended(status: int) -> None:
        raise Ended(status)

    monkeypatch.setattr("medha.cli.simulate.simulate", pressed)
    monkeypatch.setattr(os, "_exit", ended)
    for handler, outcome in (
        (signal.default_int_handler, "130"),
        (signal.SIG_IGN, "it goes on"),
    ):
        before = signal.signal(signal.SIGINT, handler)
        try:
            with pytest.raises((Ended, InterruptedError), match=outcome):
                run_simulate(SimulateOptions(scenario=path), Console(file=io.StringIO()))
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)
