"""Keeps the programs of a local fleet running: starts, restarts with back-off, grows, ends.

A unit is programs that live and die together: the router, a replica's controller, the ranks of one
KVP group. When one of a unit's programs ends, the unit ends and starts anew with the next
generation, later each time; too many restarts in a while and the unit is given up. How many groups
a replica runs follows what its controller reports; a group whose ranks leave on their own accord
(status 0) was released. Ranks follow their controller: its end is theirs. The next one begins with
the groups that must always run, since fewer that start at once are sooner there.

`step` and `stop` are called with the time on one thread; they never wait.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable

import msgspec

from medha.cli.children import Child, Launch
from medha.errors import EngineError, SetupError
from medha.messages import ReplicaStatus

FIRST_WORD_S = 1.0  # no controller imports its libraries and answers sooner
USAGE_STATUS = 2  # a person must mend something; its last line says what


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. A unit may restart `restarts` times within `window_s`."""

    first_backoff_s: float = 0.5
    longest_backoff_s: float = 30.0
    restarts: int = 5
    window_s: float = 600.0
    grace_s: float = 5.0
    hung_s: float = 60.0


class State(enum.Enum):
    IDLE = "idle"
    RUNNING = "running"
    STOPPING = "stopping"
    GIVEN_UP = "given up"


class Unit:
    """Programs that live and die together.

    `launches(generation)` says what to start. `vital`: the fleet ends when it is given up.
    `follows`: the unit whose end is this one's end too.
    """

    def __init__(
        self,
        name: str,
        launches: Callable[[int], Iterable[Launch]],
        *,
        vital: bool = True,
        wanted: bool = True,
        follows: Unit | None = None,
    ) -> None:
        self.name, self.launches = name, launches
        self.vital, self.wanted, self.follows = vital, wanted, follows
        self.state = State.IDLE
        self.children: list[Child] = []
        self.generation = 0
        self.started_s = self.not_before_s = float("-inf")
        self.stop_by_s = float("inf")
        self.failures: list[float] = []


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """The units of one replica: its controller and, by index, its KVP groups."""

    name: str
    controller: Unit
    groups: tuple[Unit, ...]


class Supervisor:
    """See the module. `singles` belong to no replica; `start` makes a Child of a Launch."""

    def __init__(
        self,
        singles: tuple[Unit, ...],
        replicas: tuple[Replica, ...],
        start: Callable[[Launch], Child],
        patience: Patience = Patience(),
    ) -> None:
        self.singles, self.replicas = singles, replicas
        self._start, self._patience = start, patience
        self._log = logging.getLogger("medha.up")
        self._ending = False

    @property
    def units(self) -> tuple[Unit, ...]:
        every = [*self.singles]
        for replica in self.replicas:
            every += [replica.controller, *replica.groups]
        return tuple(every)

    @property
    def over(self) -> bool:
        """Asked to stop, and nothing runs any more."""
        return self._ending and not any(unit.children for unit in self.units)

    def step(self, now: float) -> None:
        """Do what is due; raises SetupError or EngineError when the fleet cannot go on."""
        for unit in self.units:
            if unit.state is State.RUNNING:
                self._watch(unit, now)
            if unit.state is State.STOPPING:
                self._finish(unit, now)
            due = unit.wanted and not self._ending and now >= unit.not_before_s
            if unit.state is State.IDLE and due and not _leaderless(unit):
                self._begin(unit, now)

    def follow(self, replica: Replica, status: ReplicaStatus, now: float) -> None:
        """Run as many groups as the controller wants, and start lost ones anew."""
        leader = replica.controller
        if leader.state is not State.RUNNING or now - leader.started_s < FIRST_WORD_S:
            return  # these are the words of the controller before
        wanted = sum(unit.wanted for unit in replica.groups)
        spare = [unit for unit in replica.groups if not unit.wanted and unit.state is State.IDLE]
        for unit in spare[: max(0, status.wanted_groups - wanted)]:
            self._log.info("%s joins: %d groups wanted", unit.name, status.wanted_groups)
            unit.wanted = True
        for index in status.restart_groups:
            unit = replica.groups[index]
            # A busy machine may need longer to start it than was thought: ever more patience.
            hung = now - unit.started_s > self._patience.hung_s * 2 ** len(unit.failures)
            if unit.state is State.RUNNING and hung:
                self._fail(unit, f"{unit.name} was given up by its controller", now)

    def stop(self, now: float, *, at_once: bool = False) -> None:
        """Ask everything to end; what has not by the end of the grace is killed."""
        self._ending = True
        for unit in self.units:
            unit.wanted = False
            if unit.state is State.RUNNING:
                self._halt(unit, now)
            if at_once:
                for child in unit.children:
                    child.kill()

    # --- one unit -------------------------------------------------------------------------------

    def _begin(self, unit: Unit, now: float) -> None:
        unit.generation += 1
        unit.started_s = now
        unit.state = State.RUNNING
        for launch in unit.launches(unit.generation):
            unit.children.append(self._start(launch))

    def _watch(self, unit: Unit, now: float) -> None:
        """Notice ends: a release, a failure, a program that a person must help."""
        ended = [(child, child.poll()) for child in unit.children if child.poll() is not None]
        leader = unit.follows
        if leader is not None and (leader.state is not State.RUNNING or _newer(leader, unit)):
            self._log.info("%s ends with its controller", unit.name)
            unit.wanted &= unit.vital  # the next controller says whether it wants more
            self._halt(unit, now)
        elif not ended:
            return
        elif any(status == USAGE_STATUS for _, status in ended):
            child = next(child for child, status in ended if status == USAGE_STATUS)
            raise SetupError(
                f"{child.name}: {' '.join(child.last_words[-1:]) or 'it does not say why'}"
            )
        elif not unit.vital and all(status == 0 for _, status in ended):
            self._log.info("%s was released", unit.name)
            unit.wanted = False
            self._halt(unit, now)
        else:
            child, status = ended[0]
            self._fail(unit, f"{child.name} ended with {_told(status)}", now)

    def _fail(self, unit: Unit, why: str, now: float) -> None:
        patience = self._patience
        unit.failures = [at for at in unit.failures if now - at < patience.window_s] + [now]
        self._halt(unit, now)
        if len(unit.failures) > patience.restarts:
            unit.wanted = False
            if unit.vital:
                lines = [line for child in unit.children for line in child.last_words[-2:]]
                raise EngineError(
                    f"{unit.name} is given up after {patience.restarts} restarts ({why}): "
                    f"{' | '.join(lines[-4:]) or 'it said nothing'}"
                )
            self._log.error("%s is given up (%s): the rest goes on without it", unit.name, why)
            return
        wait_s = patience.first_backoff_s * 2 ** (len(unit.failures) - 1)
        unit.not_before_s = now + min(wait_s, patience.longest_backoff_s)
        self._log.warning("%s: starts anew in %.1f s", why, unit.not_before_s - now)

    def _halt(self, unit: Unit, now: float) -> None:
        unit.state = State.STOPPING
        unit.stop_by_s = now + self._patience.grace_s
        for child in unit.children:
            child.terminate()

    def _finish(self, unit: Unit, now: float) -> None:
        alive = [child for child in unit.children if child.poll() is None]
        if now >= unit.stop_by_s:
            for child in alive:
                child.kill()
        if not alive:
            given_up = not unit.wanted and len(unit.failures) > self._patience.restarts
            unit.state = State.GIVEN_UP if given_up else State.IDLE
            unit.children = []


def _leaderless(unit: Unit) -> bool:
    return unit.follows is not None and unit.follows.state is not State.RUNNING


def _newer(leader: Unit, unit: Unit) -> bool:
    """The leader was started anew since the unit was."""
    return leader.started_s > unit.started_s


def _told(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"status {status}"
