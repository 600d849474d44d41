"""Supervisor of a local fleet: starts units, restarts them with back-off, adds KVP groups, stops.

A unit is a set of processes that start and stop together: the router, a replica's controller, the
ranks of one KVP group. If one process of a unit exits, the whole unit stops and restarts with the
next generation, under a restart policy. Until the fleet has served once, a usage error or a unit
that keeps failing ends it; after that no failure of a unit ends the others.

The controller's status sets the number of KVP groups; a group whose ranks all exit with status 0
was released. Ranks outlive their controller and join the next one.

A launch may have a standby: the program of the next generation, imported, which waits. It starts
once the unit has run for a while, and takes over when the unit restarts.

Call `step` and `stop` with the current time, from one thread; neither blocks.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable

import msgspec

from medha.cli.local_fleet.child_process import ChildProcess, Launch
from medha.errors import EngineError, SetupError
from medha.messages import ReplicaStatus
from medha.restart_policy import RestartPolicy

FIRST_STATUS_S = 1.0  # a controller takes longer to import its libraries and report
REJOIN_S = 10.0  # in which all ranks that run join a restarted controller that reports
SETTLED_STATUS_S = 5.0  # by then a controller has noticed that a group was restarted
URGE_S = 2.0
"""Before it is killed, a program gets a second SIGTERM this early, or after half of the grace
period: the router ends its streams with an error at the second one, and waits at the first."""
USAGE_STATUS = 2  # exit status: the user must fix something; the last line names it


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Restart policy, grace period of a stop, and time limit of a start.

    A unit that fails after running for `steady_s` restarts at once, and its earlier failures are
    forgotten. Once the fleet serves, a vital unit restarts however often it fails. After
    `standby_s` its standbys start.
    """

    restarts: RestartPolicy = RestartPolicy(first_backoff_s=0.5, longest_backoff_s=30.0)
    grace_s: float = 5.0
    hung_s: float = 60.0
    steady_s: float = 20.0
    standby_s: float = 5.0


class UnitState(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    GIVEN_UP = "given up"


class Unit:
    """Processes that start and stop together.

    `launches(generation)` returns the processes to start. `vital`: if the unit is given up, the
    fleet stops. `reports_since_s`: of a controller, time of its first status. `joined`: of a group,
    generation of the last controller that all its ranks joined.
    """

    def __init__(
        self,
        name: str,
        launches: Callable[[int], Iterable[Launch]],
        *,
        vital: bool = True,
        wanted: bool = True,
    ) -> None:
        self.name, self.launches = name, launches
        self.vital, self.wanted = vital, wanted
        self.state = UnitState.IDLE
        self.children: list[ChildProcess] = []
        self.standbys: list[ChildProcess] = []
        self.prepared_generation = self.generation = self.joined = 0
        self.started_s = self.not_before_s = float("-inf")
        self.urge_s = self.stop_by_s = self.reports_since_s = float("inf")
        self.failures: list[float] = []
        self.slow_starts = 0  # in a row, that took longer than their limit
        self.ran = False  # a group: its controller had it running since its last start


class ReplicaUnits(msgspec.Struct, frozen=True, kw_only=True):
    """Units of one replica: its controller and, by index, its KVP groups."""

    name: str
    controller: Unit
    groups: tuple[Unit, ...]


class Supervisor:
    """Owner of all units. `singles` belong to no replica; `start` starts a process.

    `served`: to be set once the fleet serves.
    """

    def __init__(
        self,
        singles: tuple[Unit, ...],
        replicas: tuple[ReplicaUnits, ...],
        start: Callable[[Launch], ChildProcess],
        settings: SupervisorSettings = SupervisorSettings(),
    ) -> None:
        self.singles, self.replicas = singles, replicas
        self._start, self._settings = start, settings
        self._log = logging.getLogger("medha.up")
        self._stopping = False
        self.served = False

    @property
    def units(self) -> tuple[Unit, ...]:
        units = [*self.singles]
        for replica in self.replicas:
            units += [replica.controller, *replica.groups]
        return tuple(units)

    @property
    def stopped(self) -> bool:
        """`stop` was called and no process is left."""
        return self._stopping and not any(unit.children or unit.standbys for unit in self.units)

    def step(self, now: float) -> None:
        """Advance all units; raises SetupError or EngineError if the fleet cannot continue."""
        for unit in self.units:
            if unit.state is UnitState.RUNNING:
                self._watch(unit, now)
            if unit.state is UnitState.STOPPING:
                self._finish(unit, now)
            due = unit.wanted and not self._stopping and now >= unit.not_before_s
            if unit.state is UnitState.IDLE and due:
                self._begin(unit, now)
            self._keep_standbys(unit, now)

    def follow(self, replica: ReplicaUnits, status: ReplicaStatus, now: float) -> None:
        """Start the KVP groups that the controller wants, and restart those it lost."""
        leader = replica.controller
        if leader.state is not UnitState.RUNNING or now - leader.started_s < FIRST_STATUS_S:
            return  # the status is from the previous controller
        wanted = sum(unit.wanted for unit in replica.groups)
        spare = [
            unit for unit in replica.groups if not unit.wanted and unit.state is UnitState.IDLE
        ]
        for unit in spare[: max(0, status.wanted_groups - wanted)]:
            self._log.info("%s starts: %d groups wanted", unit.name, status.wanted_groups)
            unit.wanted = True
        for group in status.groups:
            unit = replica.groups[group.group]
            if group.state == "running" and now - unit.started_s > SETTLED_STATUS_S:
                unit.ran, unit.slow_starts = True, 0
            self.expect_back(unit, leader, len(group.ranks), now)
        for index in status.restart_groups:
            unit = replica.groups[index]
            if unit.state is UnitState.RUNNING and (unit.ran or now > self._starts_by(unit)):
                unit.slow_starts += not unit.ran
                self._kill(unit, f"{unit.name} was lost by its controller", now)

    def expect_back(self, unit: Unit, leader: Unit, present: int, now: float) -> None:
        """Restart ranks that do not join the controller `leader`, which reports.

        `present`: ranks of the unit that the controller knows. Ranks that joined no controller yet
        are still starting, and have the time of a start.
        """
        if now - leader.started_s < FIRST_STATUS_S:
            return  # the status is from the previous controller
        leader.reports_since_s = min(leader.reports_since_s, now)
        if present >= len(unit.children) and now - unit.started_s > SETTLED_STATUS_S:
            unit.joined, unit.slow_starts = leader.generation, 0
        late = now - leader.reports_since_s > REJOIN_S and unit.joined < leader.generation
        started = unit.joined or now > self._starts_by(unit)
        if unit.state is UnitState.RUNNING and late and started:
            unit.slow_starts += not unit.joined
            self._kill(unit, f"{unit.name} does not join its controller", now)

    def hangs(self, unit: Unit, answered_s: float, now: float) -> None:
        """Restart a unit that has not answered since `answered_s`.

        A unit without an answer since its start has the time of a start.
        """
        if unit.state is not UnitState.RUNNING:
            return
        if answered_s - unit.started_s > FIRST_STATUS_S:
            unit.slow_starts = 0
            self._kill(unit, f"{unit.name} hangs", now)
        elif now > self._starts_by(unit):
            unit.slow_starts += 1
            self._kill(unit, f"{unit.name} does not start", now)

    def stop(self, now: float, *, at_once: bool = False) -> None:
        """Send SIGTERM to all processes, and again shortly before the end of the grace period;
        kill those left after it."""
        self._stopping = True
        for unit in self.units:
            unit.wanted = False
            if unit.state is UnitState.RUNNING:
                self._halt(unit, now)
            if at_once:
                for child in unit.children:
                    child.kill()

    # --- one unit -------------------------------------------------------------------------------

    def _starts_by(self, unit: Unit) -> float:
        """Time by which a unit has started, unless it hangs.

        A busy machine may start slowly: the limit doubles with each slow start, up to the budget of
        restarts. Other failures leave it alone, so that a rank that hangs after them is found.
        """
        doublings = min(unit.slow_starts, self._settings.restarts.budget)
        return unit.started_s + self._settings.hung_s * 2.0**doublings

    def _begin(self, unit: Unit, now: float) -> None:
        unit.generation += 1
        unit.started_s, unit.reports_since_s = now, float("inf")
        unit.state, unit.ran, unit.joined = UnitState.RUNNING, False, 0
        launches = [*unit.launches(unit.generation)]
        prepared = unit.prepared_generation == unit.generation
        if prepared and [child.prepared for child in unit.standbys] == [True] * len(launches):
            unit.children, unit.standbys = unit.standbys, []
            for child in unit.children:
                child.release()
        else:
            unit.children = [self._start(launch) for launch in launches]

    def _keep_standbys(self, unit: Unit, now: float) -> None:
        """Start the standbys of a unit that has run for a while; kill those of no use any more.

        The next generation starts without them if one has ended or is not prepared.
        """
        unit.standbys = [child for child in unit.standbys if child.poll() is None]
        following = unit.generation + 1
        if unit.wanted and unit.prepared_generation < following:
            ran_s = now - unit.started_s
            if unit.state is UnitState.RUNNING and ran_s >= self._settings.standby_s:
                unit.prepared_generation = following
                launches = unit.launches(following)
                started = [self._start(launch.waiting()) for launch in launches if launch.standby]
                unit.standbys += started
        if not unit.wanted or unit.prepared_generation != following:
            for child in unit.standbys:
                child.kill()

    def _watch(self, unit: Unit, now: float) -> None:
        """Handle exits: a usage error, a release, a failure."""
        ended = [(child, child.poll()) for child in unit.children if child.poll() is not None]
        if not ended:
            return
        if not self.served and USAGE_STATUS in [status for _, status in ended]:
            child = next(child for child, status in ended if status == USAGE_STATUS)
            raise SetupError(
                f"{child.name}: {' '.join(child.last_messages[-1:]) or 'see its output'}"
            )
        elif not unit.vital and all(status == 0 for _, status in ended):
            self._log.info("%s was released", unit.name)
            unit.wanted = False
            self._halt(unit, now)
        else:
            child, status = ended[0]
            self._fail(unit, f"{child.name} exited with {_exit_cause(status)}", now)

    def _fail(self, unit: Unit, why: str, now: float) -> None:
        policy = self._settings.restarts
        steady = self.served and now - unit.started_s >= self._settings.steady_s
        unit.failures = [now] if steady else [*policy.recent(unit.failures, now), now]
        self._halt(unit, now)
        if policy.exhausted(unit.failures, now) and not (unit.vital and self.served):
            unit.wanted = False
            if unit.vital:
                lines = [line for child in unit.children for line in child.last_messages[-2:]]
                raise EngineError(
                    f"{unit.name} is given up after {policy.budget} restarts ({why}): "
                    f"{' | '.join(lines[-4:]) or 'no output'}"
                )
            self._log.error("%s is given up (%s): the fleet continues without it", unit.name, why)
            return
        # A fleet cannot serve without a vital unit, so that one never waits for the window.
        wait_s = 0.0 if steady else policy.backoff_s(len(unit.failures))
        unit.not_before_s = now + wait_s
        self._log.warning("%s: restarting in %.1f s", why, unit.not_before_s - now)

    def _kill(self, unit: Unit, why: str, now: float) -> None:
        """Fail a unit without grace: it may be suspended."""
        self._fail(unit, why, now)
        unit.stop_by_s = now

    def _halt(self, unit: Unit, now: float) -> None:
        unit.state = UnitState.STOPPING
        unit.stop_by_s = now + self._settings.grace_s
        unit.urge_s = unit.stop_by_s - min(URGE_S, self._settings.grace_s / 2)
        for child in unit.children:
            child.terminate()

    def _finish(self, unit: Unit, now: float) -> None:
        alive = [child for child in unit.children if child.poll() is None]
        if now >= unit.stop_by_s:
            for child in alive:
                child.kill()
        elif now >= unit.urge_s:
            unit.urge_s = float("inf")
            for child in alive:
                child.terminate()
        if not alive:
            given_up = not unit.wanted and len(unit.failures) > self._settings.restarts.budget
            unit.state = UnitState.GIVEN_UP if given_up else UnitState.IDLE
            unit.children = []


def _exit_cause(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
