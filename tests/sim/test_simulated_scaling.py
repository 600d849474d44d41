"""A fleet in virtual time follows its load by the operator's own decisions, and they replay."""

from __future__ import annotations

import io
import pathlib

import msgspec
import pytest
from rich.console import Console
from tests.sim.test_fleet import REFUSING, RELEGATING

from medha.cli.scaling import run_scaling
from medha.cli.simulate import SimulateOptions, run_simulate
from medha.config import Scheduling
from medha.errors import SpecError
from medha.fleet.autoscaling import Journal, Policy, replay
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.scheduling.scheduler import Scheduler
from medha.sim.arrivals import Workload
from medha.sim.loop import Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.sim.scenario import LLAMA_3_8B, Scenario, read_scenario, simulate
from medha.sim.virtual_autoscaler import SimulatedAutoscaler
from medha.sim.virtual_fleet import SimulatedFleet
from medha.sim.workload import Arrival, poisson
from medha.topology import Topology

POLICY = Policy(least=1, most=3, target_slack=0.2, down_after_s=60.0)
COLD_START_S = 20.0
MIXED = [(2000, 5), (8000, 5), (90_000, 5)]  # 0.03, 0.12 and 2.4 s of work


class Scaled:
    """A fleet of replicas that are all alike, with its autoscaler, until `until_s`."""

    def __init__(
        self,
        policy: Policy = POLICY,
        slo_class: SloClass = RELEGATING,
        count: int = 1,
        until_s: float = 600.0,
    ) -> None:
        self.loop, self.slo_class, self.until_s = Loop(), slo_class, until_s
        replicas = [self._replica(f"replica-{index}") for index in range(count)]
        self.fleet = SimulatedFleet(replicas, self.loop, (slo_class,), Scheduling(), 64, 400_000)
        self.scaler = SimulatedAutoscaler(self.fleet, policy, self._replica, COLD_START_S, until_s)

    def _replica(self, name: str) -> SimReplica:
        predictor = Predictor(A100, LLAMA_3_8B, Topology(tp=8))
        scheduler = Scheduler(
            Topology(tp=8),
            LLAMA_3_8B,
            predictor,
            Scheduling(),
            10_000,
            64,
            400_000,
            (self.slo_class,),
        )
        clock = PipelineClock(predictor, 64, scheduler.layout)
        return SimReplica(name, scheduler, clock, self.loop)

    def play(self, arrivals: list[Arrival]) -> list[tuple[float, int, str]]:
        """Each change: when, to how many, and why."""
        self.fleet.play(arrivals)
        self.loop.run(self.until_s)
        return [
            (look.signals.at_s, look.decision.replicas, look.decision.why)
            for look in self.scaler.journal.looks
            if look.decision.replicas != look.signals.current
        ]

    @property
    def unserved(self) -> list[str]:
        return [record.id for record in self.fleet.records() if record.finished_s is None]


def for_minutes(rate: float, minutes: float, seed: int = 1) -> list[Arrival]:
    return poisson(MIXED, rate, round(rate * 60.0 * minutes), seed)


def test_long_prompts_in_the_load_bring_a_replica_and_its_end_takes_it_without_a_failure() -> None:
    scaled = Scaled()
    changes = scaled.play(for_minutes(1.2, 4.0))
    assert [(count, why) for _, count, why in changes] == [(2, "LittleSlack"), (1, "Surplus")]
    (up_s, _, _), (down_s, _, _) = changes
    assert 20.0 <= up_s <= 240.0 and down_s >= 240.0 + POLICY.down_after_s
    assert len(scaled.fleet.replicas) == 1 and scaled.unserved == []
    served = {record.replica for record in scaled.fleet.records()}
    assert served == {"replica-0", "replica-1"}


def test_what_it_decided_comes_out_the_same_from_the_signals_it_recorded() -> None:
    scaled = Scaled()
    assert scaled.play(for_minutes(1.2, 4.0))
    kept = msgspec.json.decode(msgspec.json.encode(scaled.scaler.journal), type=Journal)
    assert replay(kept) == [look.decision for look in scaled.scaler.journal.looks]
    assert len(kept.looks) == 300


def test_a_long_prompt_that_is_in_nobodys_way_brings_no_replica() -> None:
    """Short ones are promised and served at once, though it has less relative slack than they."""
    scaled = Scaled(until_s=120.0)
    long = Arrival(id="long", arrival_s=1.0, prompt_tokens=390_000)  # half a minute of work
    short = poisson([(500, 2), (2000, 2)], 2.0, 150, seed=3, first_s=2.0)
    assert scaled.play([long, *short]) == []
    records = scaled.fleet.records()
    assert all(record.in_time for record in records)
    (took_s,) = (record.ttft_s for record in records if record.id == "long")
    assert took_s is not None and took_s > 25.0


@pytest.mark.parametrize("slo_class", [RELEGATING, REFUSING], ids=["relegated", "refused"])
@pytest.mark.parametrize("multiplier", [1.05, 1.1, 1.3, 2.0])
def test_clients_in_a_hurry_at_an_idle_fleet_bring_no_replica_and_keep_none(
    multiplier: float, slo_class: SloClass
) -> None:
    """Their deadlines are too early for a promise, whatever the number of replicas."""
    slo = msgspec.structs.replace(slo_class.slo, ttft_floor_s=0.0, ttft_multiplier=multiplier)
    scaled = Scaled(slo_class=msgspec.structs.replace(slo_class, slo=slo), count=2)
    apart = [
        Arrival(id=f"a-{number}", arrival_s=2.0 * number, prompt_tokens=8000)
        for number in range(299)
    ]
    assert [(count, why) for _, count, why in scaled.play(apart)] == [(1, "Surplus")]


def test_a_class_with_a_tpot_that_no_replica_gives_brings_no_replica() -> None:
    """Requests of such a class get the target that an idle replica meets."""
    slo = msgspec.structs.replace(RELEGATING.slo, tpot_s=0.0001)
    scaled = Scaled(slo_class=msgspec.structs.replace(RELEGATING, slo=slo))
    apart = [
        Arrival(id=f"a-{number}", arrival_s=2.0 * number, prompt_tokens=500, output_tokens=20)
        for number in range(299)
    ]
    assert scaled.play(apart) == []
    assert all(record.good and record.tpot_s > 0.001 for record in scaled.fleet.records())


def test_refusals_alone_bring_replicas_up_to_the_most_and_no_more() -> None:
    scaled = Scaled(slo_class=REFUSING, until_s=240.0)
    changes = scaled.play(poisson([(90_000, 1)], 1.0, 240, seed=2))
    assert [count for _, count, _ in changes] == [2, 3]
    reasons = {look.decision.why for look in scaled.scaler.journal.looks}
    assert "AtMaximum" in reasons
    assert max(len(scaled.fleet.replicas), len(scaled.fleet.serving)) == 3


def test_a_fleet_at_zero_holds_the_first_request_and_serves_it_after_a_cold_start() -> None:
    scaled = Scaled(msgspec.structs.replace(POLICY, least=0))
    early = Arrival(id="early", arrival_s=1.0, prompt_tokens=2000)
    late = Arrival(id="late", arrival_s=400.5, prompt_tokens=2000)
    changes = scaled.play([early, late])
    assert [(count, why) for _, count, why in changes][:2] == [(0, "Surplus"), (1, "FirstRequest")]
    assert changes[0][0] >= POLICY.down_after_s and 400.5 < changes[1][0] <= 403.0
    (record,) = (record for record in scaled.fleet.records() if record.id == "late")
    assert record.ttft_s is not None and COLD_START_S < record.ttft_s < COLD_START_S + 3.0
    assert scaled.unserved == []


def test_what_nobody_came_to_serve_is_still_counted() -> None:
    scaled = Scaled(msgspec.structs.replace(POLICY, least=0), until_s=200.0)
    scaled.play([Arrival(id="late", arrival_s=199.5, prompt_tokens=2000)])
    assert scaled.unserved == ["late"]


@pytest.mark.parametrize("seed", range(2))
def test_ten_minutes_of_a_load_whose_slack_lies_about_the_target_change_nothing(seed: int) -> None:
    policy = Policy(least=1, most=4, target_slack=1.0, down_after_s=600.0)
    patient = SloClass(when_infeasible="relegate", slo=Slo(ttft_multiplier=3.0, tpot_s=0.1))
    scaled = Scaled(policy, patient, count=2)
    assert scaled.play(poisson([(8000, 2), (30_000, 2)], 3.55, 1800, seed)) == []
    slacks = [look.signals.slack_p10 for look in scaled.scaler.journal.looks]
    known = [slack for slack in slacks if slack is not None]
    assert min(known) < policy.target_slack < max(known)
    assert sum(known) / len(known) == pytest.approx(policy.target_slack, abs=0.2)


def test_the_example_follows_its_load() -> None:
    scenario = read_scenario(
        pathlib.Path(__file__).parents[2] / "examples" / "scenarios" / "autoscaling.toml"
    )
    assert scenario.autoscaling == Policy(least=1, most=4, target_slack=0.2, down_after_s=300.0)


def test_without_a_door_there_is_no_slack_to_scale_by() -> None:
    scenario = Scenario(
        workload=Workload(mix=0.0, requests=5, load=0.1), admission=False, autoscaling=POLICY
    )
    with pytest.raises(SpecError, match=r"admission.*must be true with \[autoscaling\]"):
        simulate(scenario)


def test_the_command_tells_each_change_and_what_it_writes_is_decided_again(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "l.csv").write_text("num_prefill_tokens,num_decode_tokens\n90000,2\n2000,2\n")
    path = tmp_path / "s.toml"
    path.write_text(
        'until_s = 400\ncold_start_s = 20\n[workload]\nlengths = "l.csv"\nrequests = 80\n'
        "load = 1.5\n[autoscaling]\nleast = 1\nmost = 2\ntarget_slack = 0.2\ndown_after_s = 60\n"
        '[topology]\ntp = 8\n[[classes]]\nwhen_infeasible = "relegate"\n'
    )
    output = io.StringIO()
    run_simulate(
        SimulateOptions(scenario=path, out=tmp_path / "out"), Console(file=output, width=160)
    )
    assert "from 1 to 2 replicas (LittleSlack)" in output.getvalue()
    again = io.StringIO()
    run_scaling(tmp_path / "out" / "lars.scaling.json", Console(file=again, width=160))
    assert "fleet: 200 looks come out the same" in again.getvalue()
    assert "from 1 to 2 replicas (LittleSlack)" in again.getvalue()
