"""Real child programs under the supervisor: restarted, added, given up, ended without orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from medha.cli.local_fleet.child_process import ChildProcess, Launch
from medha.cli.local_fleet.supervisor import (
    REJOIN_S,
    ReplicaUnits,
    Supervisor,
    SupervisorSettings,
    Unit,
    UnitState,
)
from medha.errors import EngineError, SetupError
from medha.messages import GroupStatus, ReplicaStatus
from medha.restart_policy import RestartPolicy

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    "time.sleep(600)"
)
PATIENT = (
    "import signal, sys, time\n"
    "counts = []\n"
    "def end(*_):\n"
    "    counts.append(1)\n"
    "    print(len(counts), flush=True)\n"
    "    if len(counts) == 2: sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, end)\n"
    "print('up', flush=True)\n"
    "while True: time.sleep(600)\n"
)
"""Ends at the second SIGTERM, as a router with a request does."""
FAMILY = (
    "import subprocess, sys, time; "
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print(p.pid, flush=True); time.sleep(600)"
)
SLOW_STANDBY = "import sys; print('waits', flush=True); sys.stdin.readline() or sys.exit(); "
STANDBY = "import os; os.write(0, b'\\n'); " + SLOW_STANDBY + SLEEPER
"""Reports that it is prepared, waits for a line of input, then does what SLEEPER does."""
QUICK = SupervisorSettings(
    restarts=RestartPolicy(first_backoff_s=0.5, longest_backoff_s=4.0, budget=3, window_s=100.0),
    grace_s=0.5,
    hung_s=30.0,
    steady_s=20.0,
    standby_s=5.0,
)


class Lines:
    """Output lines of the children, by name."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for child, line in self.lines if child == name]


def until(happens: Callable[[], object], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not happens():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def program(name: str, code: str, standby: str = "", **env: str) -> Launch:
    waiting = (sys.executable, "-c", standby) if standby else ()
    return Launch(name=name, argv=(sys.executable, "-c", code), env=env, standby=waiting)


class Fleet:
    """A supervised fleet of dummy programs with a virtual clock."""

    def __init__(self, groups: int = 2, ranks: int = 2, code: str = SLEEPER) -> None:
        self.lines, self.now = Lines(), 1000.0
        self.started: list[tuple[str, int]] = []
        self.codes = {"router": code, "controller": code, "rank": code}
        self.standbys: dict[str, str] = {}
        controller = Unit("c", self._launches("controller", ["c"]))
        units = tuple(
            Unit(
                f"g{group}",
                self._launches("rank", [f"g{group}-s{stage}" for stage in range(ranks)]),
                vital=group == 0,
                wanted=group == 0,
            )
            for group in range(groups)
        )
        self.replica = ReplicaUnits(name="r-0", controller=controller, groups=units)
        router = Unit("router", self._launches("router", ["router"]))
        self.supervisor = Supervisor((router,), (self.replica,), self._start, QUICK)

    def _launches(self, kind: str, names: list[str]) -> Callable[[int], Iterable[Launch]]:
        def launches(generation: int) -> Iterable[Launch]:
            self.started += [(name, generation) for name in names]
            standby = self.standbys.get(kind, "")
            return [
                program(name, self.codes[kind], standby, MEDHA_GENERATION=str(generation))
                for name in names
            ]

        return launches

    def _start(self, launch: Launch) -> ChildProcess:
        return ChildProcess(launch, self.lines)

    def step(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.supervisor.step(self.now)

    def over(self, seconds: float = 0.0) -> bool:
        self.step(seconds)
        return self.supervisor.stopped

    def status(
        self,
        wanted: int,
        restart: tuple[int, ...] = (),
        state: str = "running",
        present: int = 2,
    ) -> None:
        ranks = RANKS[:present]
        status = ReplicaStatus(
            replica="r-0",
            ready=True,
            draining=False,
            generation=1,
            wanted_groups=wanted,
            groups=(GroupStatus(group=0, state=state, ranks=ranks),),
            restart_groups=restart,
        )
        self.supervisor.follow(self.replica, status, self.now)

    @property
    def running(self) -> set[str]:
        return {
            child.name
            for unit in self.supervisor.units
            for child in unit.children
            if child.poll() is None
        }

    def child(self, name: str) -> ChildProcess:
        return next(c for unit in self.supervisor.units for c in unit.children if c.name == name)

    def gone(self, name: str) -> None:
        """Wait for a child's end without the supervisor."""
        child = self.child(name)
        until(lambda: child.poll() is not None)

    def reap_standbys(self, group: int, pids: list[int]) -> None:
        """Step until the group's standbys with `pids` are gone."""

        def gone() -> bool:
            self.step(0.01)
            left = {child.pid for child in self.replica.groups[group].standbys}
            return not left & {*pids} and not any(map(psutil.pid_exists, pids))

        until(gone)

    def settle(self) -> None:
        """Step until no unit is stopping."""

        def still() -> bool:
            self.step(0.01)
            return all(unit.state is not UnitState.STOPPING for unit in self.supervisor.units)

        until(still)

    def close(self) -> None:
        self.supervisor.stop(self.now, at_once=True)
        until(lambda: self.over(1.0))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    running = Fleet()
    yield running
    running.close()


def prepared(code: str = STANDBY, seconds: float = 5.0) -> tuple[Fleet, list[int]]:
    """Return a fleet that serves and whose ranks have standbys, and the pids of those."""
    fleet = Fleet()
    fleet.standbys["rank"] = code
    fleet.step()
    fleet.supervisor.served = True
    fleet.step(seconds)
    standbys = fleet.replica.groups[0].standbys
    if code == STANDBY:
        until(lambda: all(child.prepared for child in standbys))
    return fleet, [child.pid for child in standbys]


def restart_a_rank(fleet: Fleet, seconds: float) -> list[int]:
    """Kill a rank, let its group restart, and return the pids of its ranks."""
    fleet.now += seconds
    fleet.child("g0-s0").kill()
    fleet.gone("g0-s0")
    fleet.settle()
    fleet.step(1.0)
    assert fleet.running == BASE
    return [fleet.child(name).pid for name in RANKS]


def test_standbys_wait_and_take_over_from_ranks_that_failed() -> None:
    fleet, waiting = prepared()
    assert len(waiting) == 2
    until(lambda: sorted(fleet.lines.of("g0-s1")) == ["up", "waits"])
    assert restart_a_rank(fleet, 30.0) == waiting
    until(lambda: sorted(fleet.lines.of("g0-s1")) == ["up", "up", "waits"])
    assert not fleet.replica.groups[0].standbys
    fleet.step(5.0)
    following = [child.pid for child in fleet.replica.groups[0].standbys]
    assert len(following) == 2 and not {*following} & {*waiting}
    fleet.close()


def test_a_unit_that_has_not_run_for_a_while_has_no_standbys() -> None:
    fleet, waiting = prepared(seconds=4.9)
    assert not waiting
    assert len(restart_a_rank(fleet, 0.0)) == 2
    fleet.close()


@pytest.mark.parametrize("harmed", [1, 2])
def test_a_group_whose_standbys_ended_restarts_without_them(harmed: int) -> None:
    fleet, waiting = prepared()
    for child in fleet.replica.groups[0].standbys[:harmed]:
        os.kill(child.pid, signal.SIGKILL)
        until(lambda child=child: child.poll() is not None)  # type: ignore[misc]
    fleet.step()
    assert not {*restart_a_rank(fleet, 0.0)} & {*waiting}
    fleet.step(5.0)
    fleet.reap_standbys(0, waiting)
    assert len(fleet.replica.groups[0].standbys) == 2
    fleet.close()


def test_a_group_restarts_without_standbys_that_are_not_prepared() -> None:
    fleet, waiting = prepared(SLOW_STANDBY + SLEEPER)
    assert not {*restart_a_rank(fleet, 0.0)} & {*waiting}
    fleet.reap_standbys(0, waiting)
    fleet.close()


def test_a_standby_that_fails_is_not_started_again_and_again() -> None:
    fleet, failing = prepared("raise SystemExit(1)")
    fleet.reap_standbys(0, failing)
    for _ in range(10):
        fleet.step(5.0)
    assert [generation for name, generation in fleet.started if name == "g0-s0"] == [1, 2]
    assert len(restart_a_rank(fleet, 0.0)) == 2
    fleet.close()


def test_a_fleet_that_stops_leaves_no_standby() -> None:
    fleet, waiting = prepared()
    fleet.supervisor.stop(fleet.now)
    until(lambda: fleet.over(0.1))
    assert not any(map(psutil.pid_exists, waiting))


def test_a_group_that_was_released_leaves_no_standby(fleet: Fleet) -> None:
    fleet.standbys["rank"] = STANDBY
    fleet.codes["rank"] = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
        "print('up', flush=True); time.sleep(600)"
    )
    fleet.step()
    fleet.now += 1.0
    fleet.status(wanted=2)
    fleet.step()
    fleet.step(5.0)
    waiting = [child.pid for child in fleet.replica.groups[1].standbys]
    assert len(waiting) == 2
    until(lambda: "up" in fleet.lines.of("g1-s0") and "up" in fleet.lines.of("g1-s1"))
    fleet.child("g1-s0").terminate()
    fleet.gone("g1-s0")
    fleet.settle()
    fleet.reap_standbys(1, waiting)


RANKS = ("g0-s0", "g0-s1")
BASE = {"router", "c", *RANKS}


def test_everything_that_is_wanted_is_started(fleet: Fleet) -> None:
    fleet.step()
    assert fleet.running == BASE
    until(lambda: fleet.lines.of("g0-s1") == ["up"])


def test_only_a_killed_router_is_restarted_after_a_moment(fleet: Fleet) -> None:
    fleet.step()
    pids = {name: fleet.child(name).pid for name in BASE}
    fleet.child("router").kill()
    fleet.gone("router")
    fleet.settle()
    assert fleet.running == BASE - {"router"}
    fleet.step(0.45)
    assert "router" not in fleet.running
    fleet.step(0.1)
    assert fleet.running == BASE
    assert {name for name in BASE if fleet.child(name).pid != pids[name]} == {"router"}


def test_a_killed_rank_restarts_its_group_in_the_next_generation(fleet: Fleet) -> None:
    fleet.step()
    fleet.child("g0-s1").kill()
    fleet.gone("g0-s1")
    fleet.settle()
    assert fleet.running == {"router", "c"}
    fleet.step(1.0)
    assert fleet.running == BASE
    assert [g for name, g in fleet.started if name.startswith("g0")] == [1, 1, 2, 2]


def killed_controller(fleet: Fleet, *, joined: int = 2, after_s: float = 6.0) -> list[int]:
    """Kill the controller of a fleet that `joined` ranks have joined, let it restart, and return
    the pids of its ranks."""
    fleet.step()
    fleet.now += after_s
    fleet.status(wanted=1, present=joined)
    pids = [fleet.child(name).pid for name in RANKS]
    fleet.child("c").kill()
    fleet.gone("c")
    fleet.settle()
    fleet.step(1.0)
    assert fleet.running == BASE
    return pids


def test_ranks_outlive_their_controller(fleet: Fleet) -> None:
    pids = killed_controller(fleet)
    for _ in range(3):
        fleet.now += REJOIN_S
        fleet.status(wanted=1, present=2)
        fleet.step()
    assert [fleet.child(name).pid for name in RANKS] == pids


def assert_replaced(fleet: Fleet, pids: list[int]) -> None:
    """Report one rank, and check that other processes take the place of both."""
    fleet.status(wanted=1, present=1)
    fleet.settle()
    fleet.step(1.0)
    assert fleet.running == BASE
    assert not {fleet.child(name).pid for name in RANKS} & set(pids)


def test_ranks_that_do_not_join_the_restarted_controller_are_killed(fleet: Fleet) -> None:
    pids = killed_controller(fleet)
    psutil.Process(pids[0]).suspend()
    fleet.now += 3 * REJOIN_S  # a controller may start slowly, and no rank joins before
    fleet.status(wanted=1, present=0)
    fleet.now += REJOIN_S
    fleet.status(wanted=1, present=1)
    fleet.settle()
    assert [fleet.child(name).pid for name in RANKS] == pids, "they have time until now"
    fleet.now += 1.0
    assert_replaced(fleet, pids)


@pytest.mark.parametrize("joined, after_s", [(1, 6.0), (2, 2.0)])
def test_ranks_that_still_start_when_their_controller_restarts_have_the_time_of_a_start(
    fleet: Fleet, joined: int, after_s: float
) -> None:
    # Two ranks that are known soon after the start are those before it.
    pids = killed_controller(fleet, joined=joined, after_s=after_s)
    started = fleet.replica.groups[0].started_s
    fleet.now += 1.0
    fleet.status(wanted=1, present=1)
    fleet.now = started + QUICK.hung_s
    fleet.status(wanted=1, present=1)
    fleet.settle()
    assert [fleet.child(name).pid for name in RANKS] == pids
    fleet.now += 1.0
    assert_replaced(fleet, pids)


def test_ranks_that_never_join_have_the_time_of_a_start(fleet: Fleet) -> None:
    fleet.step()
    pids = [fleet.child(name).pid for name in RANKS]
    fleet.now += 6.0
    fleet.status(wanted=1, present=1)  # the other one was suspended before it joined
    fleet.now = fleet.replica.groups[0].started_s + QUICK.hung_s
    fleet.status(wanted=1, present=1)
    fleet.settle()
    assert [fleet.child(name).pid for name in RANKS] == pids
    fleet.now += 1.0
    assert_replaced(fleet, pids)


def test_only_slow_starts_extend_the_time_of_a_start(fleet: Fleet) -> None:
    """A rank that is suspended while it starts would hang for long if other failures counted."""
    fleet.step()
    fleet.now += 6.0
    for _ in range(2):
        fleet.child("g0-s0").kill()
        fleet.gone("g0-s0")
        fleet.settle()
        fleet.step(10.0)
        assert fleet.running == BASE
    unit = fleet.replica.groups[0]
    for slow_starts in range(3):
        pids = [fleet.child(name).pid for name in RANKS]
        fleet.now += 1.0
        fleet.status(wanted=1, state="starting", present=1)
        fleet.now = unit.started_s + QUICK.hung_s * 2**slow_starts
        fleet.status(wanted=1, state="starting", present=1)
        fleet.settle()
        assert [fleet.child(name).pid for name in RANKS] == pids
        fleet.now += 1.0
        fleet.status(wanted=1, state="starting", present=1)
        fleet.settle()
        fleet.step(10.0)
        assert not {fleet.child(name).pid for name in RANKS} & set(pids)


def test_ranks_that_joined_the_restarted_controller_may_leave_it(fleet: Fleet) -> None:
    """A group that is released has no ranks in the status before their processes end."""
    pids = killed_controller(fleet)
    fleet.now += 1.0
    fleet.status(wanted=1, present=2)
    fleet.now += 2 * REJOIN_S
    fleet.status(wanted=1, state="absent", present=0)
    fleet.settle()
    assert [fleet.child(name).pid for name in RANKS] == pids


def test_the_last_status_of_a_dead_controller_starts_no_group(fleet: Fleet) -> None:
    killed_controller(fleet)
    fleet.replica.controller.started_s = fleet.now
    fleet.status(wanted=2)
    fleet.step(0.5)
    assert fleet.running == BASE
    fleet.step(1.0)
    fleet.status(wanted=2)
    fleet.step()
    assert fleet.running == BASE | {"g1-s0", "g1-s1"}


def test_each_further_restart_waits_twice_as_long(fleet: Fleet) -> None:
    fleet.step()
    waits = []
    for _ in range(3):
        fleet.child("router").kill()
        fleet.gone("router")
        fleet.settle()
        waits.append(fleet.supervisor.singles[0].not_before_s - fleet.now)
        fleet.step(5.0)
    assert [round(wait, 1) for wait in waits] == [0.5, 1.0, 2.0]


def test_too_many_restarts_end_the_fleet_with_the_programs_last_messages() -> None:
    fleet = Fleet()
    fleet.codes["router"] = "print('no such model'); raise SystemExit(1)"
    with pytest.raises(EngineError, match=r"router is given up after 3 restarts .*no such model"):
        until(lambda: fleet.over(0.1))  # slowly: restarts long ago are forgiven
    assert [name for name, _ in fleet.started].count("router") == 4
    fleet.close()


def test_restarts_long_ago_are_forgiven(fleet: Fleet) -> None:
    fleet.step()
    for _ in range(6):
        fleet.child("router").kill()
        fleet.gone("router")
        fleet.settle()
        fleet.step(60.0)
    assert "router" in fleet.running


def test_a_program_with_a_user_error_ends_the_fleet_at_once_with_its_line() -> None:
    fleet = Fleet()
    fleet.codes["rank"] = "print('spec.model: no such folder'); raise SystemExit(2)"
    fleet.step()
    fleet.gone("g0-s0")
    with pytest.raises(SetupError, match=r"g0-s\d: spec\.model: no such folder"):
        fleet.step()
    fleet.close()


def test_once_the_fleet_serves_a_user_error_of_a_unit_is_a_failure_like_others(
    fleet: Fleet,
) -> None:
    fleet.step()
    fleet.supervisor.served = True
    fleet.codes["rank"] = "raise SystemExit(2)"
    fleet.child("g0-s0").kill()
    fleet.gone("g0-s0")
    fleet.settle()
    fleet.step(1.0)
    fleet.gone("g0-s0")
    fleet.settle()
    fleet.codes["rank"] = SLEEPER
    fleet.step(5.0)
    assert fleet.running == BASE


def test_once_the_fleet_serves_a_unit_that_keeps_failing_waits_for_the_longest_back_off_at_most(
    fleet: Fleet,
) -> None:
    fleet.step()
    fleet.supervisor.served = True
    waits = []
    for _ in range(7):
        fleet.child("router").kill()
        fleet.gone("router")
        fleet.settle()
        waits.append(fleet.supervisor.singles[0].not_before_s - fleet.now)
        fleet.step(4.0)
        assert fleet.running == BASE
    assert [round(wait, 1) for wait in waits] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0]


def test_a_unit_that_ran_steadily_restarts_at_once_however_often(fleet: Fleet) -> None:
    fleet.step()
    fleet.supervisor.served = True
    for _ in range(6):
        fleet.now += 20.0
        fleet.child("router").kill()
        fleet.gone("router")
        fleet.settle()
        fleet.step()
        assert fleet.running == BASE


def test_a_suspended_group_that_its_controller_lost_is_killed_without_grace(fleet: Fleet) -> None:
    fleet.step()
    psutil.Process(fleet.child("g0-s0").pid).suspend()
    fleet.now += 6.0
    fleet.status(wanted=1)
    fleet.status(wanted=1, restart=(0,), state="lost")
    fleet.step()  # virtual time stands still: no grace period passes
    fleet.gone("g0-s0")


def test_a_controller_that_stops_answering_restarts(fleet: Fleet) -> None:
    fleet.step()
    controller = fleet.replica.controller
    psutil.Process(fleet.child("c").pid).suspend()
    former = controller.started_s
    fleet.supervisor.hangs(controller, fleet.now + 0.5, fleet.now + 30.0)
    assert controller.state is UnitState.RUNNING, "the answer is from the process before"
    fleet.now += 40.0
    fleet.supervisor.hangs(controller, former + 30.0, fleet.now)
    fleet.settle()
    fleet.settle()
    fleet.step(1.0)
    assert fleet.running == BASE
    assert controller.started_s > former


def test_a_controller_that_never_answers_has_the_time_of_a_start(fleet: Fleet) -> None:
    """As one that is suspended while it starts, at first or after the one before answered."""
    fleet.step()
    controller = fleet.replica.controller
    for answered_s, time_s in ((float("-inf"), QUICK.hung_s), (900.0, 2 * QUICK.hung_s)):
        former = fleet.child("c")
        psutil.Process(former.pid).suspend()
        fleet.now = controller.started_s + time_s
        fleet.supervisor.hangs(controller, answered_s, fleet.now)
        assert controller.state is UnitState.RUNNING
        fleet.now += 1.0
        fleet.supervisor.hangs(controller, answered_s, fleet.now)
        fleet.settle()
        fleet.step(1.0)
        assert fleet.running == BASE and fleet.child("c") is not former


def test_a_wanted_group_joins_and_one_that_leaves_by_itself_is_not_restarted(
    fleet: Fleet,
) -> None:
    fleet.step()
    fleet.now += 1.0
    fleet.codes["rank"] = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
        "print('up', flush=True); time.sleep(600)"
    )
    fleet.status(wanted=2)
    fleet.step()
    assert fleet.running == BASE | {"g1-s0", "g1-s1"}
    until(lambda: fleet.lines.of("g1-s0") and fleet.lines.of("g1-s1"))
    fleet.child("g1-s0").terminate()
    fleet.gone("g1-s0")
    fleet.settle()
    fleet.step(10.0)
    assert fleet.running == BASE
    fleet.status(wanted=2)
    fleet.step()
    assert fleet.running == BASE | {"g1-s0", "g1-s1"}


def test_no_more_groups_start_than_the_plan_has(fleet: Fleet) -> None:
    fleet.step()
    fleet.now += 1.0
    fleet.status(wanted=9)
    fleet.step()
    assert len(fleet.running) == len(BASE) + 2


def test_a_group_that_keeps_failing_is_given_up_and_the_rest_continues(fleet: Fleet) -> None:
    fleet.step()
    fleet.codes["rank"] = "raise SystemExit(1)"
    fleet.status(wanted=2)
    group = fleet.replica.groups[1]
    for _ in range(20):
        fleet.step(5.0)  # longer than a pause before a restart
        fleet.status(wanted=2)
        until(lambda: all(child.poll() is not None for child in group.children))
        fleet.settle()
        if group.state is UnitState.GIVEN_UP:
            break
    assert group.state is UnitState.GIVEN_UP
    fleet.step(100.0)
    assert fleet.running == BASE


def test_a_group_that_its_controller_gave_up_is_restarted_after_a_grace_time(
    fleet: Fleet,
) -> None:
    fleet.step()
    old = fleet.child("g0-s0").pid
    fleet.status(wanted=1, restart=(0,))
    fleet.step(1.0)
    assert fleet.child("g0-s0").pid == old
    fleet.now += 10.0
    fleet.status(wanted=1, restart=(0,))
    fleet.settle()
    fleet.step(1.0)
    assert fleet.running == BASE and fleet.child("g0-s0").pid != old


def test_stopping_kills_programs_that_do_not_end_within_the_grace_time() -> None:
    fleet = Fleet(code=STUBBORN)
    fleet.step()
    until(lambda: all(fleet.lines.of(name) for name in BASE))
    pids = [fleet.child(name).pid for name in BASE]
    fleet.supervisor.stop(fleet.now)
    for _ in range(20):
        fleet.step(0.01)
        time.sleep(0.01)
    assert fleet.running == BASE
    fleet.step(0.5)
    until(fleet.over)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_program_gets_a_second_signal_before_it_is_killed() -> None:
    fleet = Fleet(code=PATIENT)
    fleet.step()
    until(lambda: all(fleet.lines.of(name) for name in BASE))
    router = fleet.child("router")
    fleet.supervisor.stop(fleet.now)
    fleet.step(0.2)
    until(lambda: fleet.lines.of("router") == ["up", "1"])
    fleet.step(0.1)  # half of the grace period is over; no more time passes
    fleet.step()
    until(lambda: router.poll() == 0)
    until(lambda: fleet.lines.of("router") == ["up", "1", "2"])
    fleet.close()


def test_stopping_at_once_waits_for_no_program() -> None:
    fleet = Fleet(code=STUBBORN)
    fleet.step()
    fleet.supervisor.stop(fleet.now, at_once=True)
    until(fleet.over)
    assert fleet.running == set()


def test_descendants_of_a_killed_child_end_with_it() -> None:
    lines = Lines()
    child = ChildProcess(program("parent", FAMILY), lines)
    until(lambda: lines.of("parent"))
    grandchild = int(lines.of("parent")[0])
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: child.poll() is not None)
    assert child.poll() == -signal.SIGKILL
    until(lambda: not _alive(grandchild))


def test_children_end_when_their_starter_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from medha.cli.local_fleet.child_process import ChildProcess, Launch; "
        "launch = Launch(name='x', argv=(sys.executable, '-c', 'import time; time.sleep(600)')); "
        "print(ChildProcess(launch, lambda *_: None).pid, flush=True); time.sleep(600)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    with starter, starter.stdout:
        child = int(starter.stdout.readline())
        assert _alive(child)
        starter.kill()
    until(lambda: not _alive(child))


def test_output_is_handed_over_line_by_line_and_bounded() -> None:
    lines = Lines()
    code = "import sys; sys.stdout.buffer.write(b'one\\n\\n' + b'x' * 20000 + b'\\nt\\xffwo')"
    child = ChildProcess(program("talker", code), lines)
    until(lambda: child.poll() is not None)
    until(lambda: len(lines.of("talker")) == 5)
    output = lines.of("talker")
    assert (output[0], output[-1]) == ("one", "t\ufffdwo")
    assert max(len(line) for line in output) <= 8192 and sum("x" in line for line in output) == 3
    assert child.last_messages == tuple(output)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
