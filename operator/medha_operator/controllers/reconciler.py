"""Reconciler of one MedhaReplica: observe, plan, execute, report.

Level-triggered: the key names the resource, never what happened to it. A reconciliation either
takes steps or, when none is left, updates the status; our own writes wake the key again. A failure
requeues the key with a delay; a refusal by the API server is reported in the status. The part of
the status that the planner must remember is written before it is acted on (ADR 7); messages alone
are written only now and then.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from medha.adapters.prometheus import Metrics
from medha.errors import UserError
from medha.metrics import UNANSWERED, UNEXPECTED
from medha.spec import MedhaReplica
from medha_operator.cluster.cluster_state import ClusterState, Resource
from medha_operator.controllers.adopter import Adopter
from medha_operator.controllers.executor import Executor, PodOverQuota
from medha_operator.controllers.liveness import Liveness
from medha_operator.kube.client import SECRETS, ClusterError, NameTaken
from medha_operator.kube.lease import NotLeading
from medha_operator.kube.secrets import KeySecrets
from medha_operator.planning.planner import decide
from medha_operator.planning.resource_status import Status, events_between, refused_status, status
from medha_operator.resources.actions import RequeueAt
from medha_operator.resources.labels import WORKER_KEYS
from medha_operator.resources.objects import Key, Meta
from medha_operator.resources.views import Observed, QuotaRefusal, load_status
from medha_operator.settings import Settings

log = logging.getLogger("medha.operator.reconcile")

MAX_RECONCILE_S = 60.0
MAX_ROUNDS, REQUEUE_AFTER_S, MAX_WAIT_S = 4, 0.15, 0.25
STATUS_PAUSE_S, MESSAGE_PAUSE_S = 1.0, 5.0
PERSISTED = ("restarts", "waits", "retiring")
ESSENTIAL = ("observedGeneration", "replicas", "readyReplicas", "selector", "scaling", *PERSISTED)


class Reconciler:
    """Reconciles one key after another; `run` may run several times concurrently."""

    def __init__(
        self,
        settings: Settings,
        state: ClusterState,
        queue: WorkQueue[Key],
        executor: Executor,
        keys: KeySecrets,
        adopter: Adopter,
        metrics: Metrics,
        liveness: Liveness,
    ) -> None:
        self._settings, self._state, self._queue = settings, state, queue
        self._executor, self._keys, self._adopter = executor, keys, adopter
        self._metrics, self._liveness = metrics, liveness
        self._status_written_s: dict[Key, float] = {}
        for kind in (UNANSWERED, UNEXPECTED):
            # Export at zero: `rate()` misses the first increment of a series that did not exist.
            metrics.add("medha_operator_errors_total", 0, kind)

    async def run(self) -> None:
        """Reconcile until cancelled."""
        while True:
            key = await self._queue.get()
            try:
                await self._guarded(key)
            finally:
                self._queue.done(key)

    async def _guarded(self, key: Key) -> None:
        """Reconcile `key`; requeue it after any failure."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(MAX_RECONCILE_S):
                for _ in range(MAX_ROUNDS):
                    if not await self._reconcile(key) or self._queue.behind_s > MAX_WAIT_S:
                        break  # nothing is left to do, or other keys wait
            self._queue.succeeded(key)
        except NotLeading:
            return  # the next leader reconciles every resource
        except ClusterError as error:
            kind = error.reason or (str(error.status) if error.status else UNANSWERED)
            self._metrics.add("medha_operator_errors_total", 1, kind)
            delay_s = self._queue.retry(key, error.retry_after_s or 0.0)
            log.warning("%s/%s: %s; retrying in %.1f s", *key, error, delay_s)
        except Exception:
            self._metrics.add("medha_operator_errors_total", 1, UNEXPECTED)
            self._queue.retry(key)
            log.exception("%s/%s: unexpected error", *key)
        self._liveness.reconciled(key)
        self._metrics.observe("medha_operator_reconcile_seconds", time.monotonic() - began_s)

    async def _reconcile(self, key: Key) -> bool:
        """Take the next steps of one resource. True if it took any: more may follow."""
        if not self._state.serves(key[0]):
            return False
        seen = self._state.replicas.get(key)
        if seen is None or seen.value.deleting:
            self._status_written_s.pop(key, None)
            self._metrics.drop("medha_replica_condition", *key)
            self._metrics.drop("medha_group_restarts_total", *key)
            self._state.set_waiting(key, replicas=False, groups=False)
            self._keys.forget(key[0])
            return False
        resource = seen.value
        observed = self._state.observed(resource, time.time())
        if resource.replica is None:
            refused = refused_status(observed, resource.refused, generation=resource.generation)
            await self._update_status(resource, refused)
            return False
        try:
            return await self._act(resource, resource.replica, observed)
        except (ClusterError, UserError) as error:
            if isinstance(error, PodOverQuota):
                # The planner gives the whole gang back: another gang may wait for its part.
                self._state.quotas[key] = QuotaRefusal(error.message, time.time())
                return True
            if isinstance(error, ClusterError) and not error.refused:
                raise
            message = error.message if isinstance(error, ClusterError) else str(error)
            refused = refused_status(observed, message, generation=resource.generation)
            await self._update_status(resource, refused)
            self._queue.retry(key, MESSAGE_PAUSE_S)
            log.warning("%s/%s: %s", *key, error)
            return False

    async def _act(self, resource: Resource, replica: MedhaReplica, observed: Observed) -> bool:
        """Execute the planned steps, or update the status if there are none."""
        key = resource.meta.key
        if await self._adopter.adopt(replica, observed):
            return True
        decision = decide(replica, observed, self._settings)
        after = status(
            replica,
            observed,
            decision,
            generation=resource.generation,
            scaling=self._state.scaling.get(key),
        )
        self._state.set_waiting(
            key, replicas=bool(decision.unplaced_replicas), groups=bool(decision.unplaced_groups)
        )
        steps = [action for action in decision.actions if not isinstance(action, RequeueAt)]
        if not await self._has_keys(resource, observed, needed=bool(steps)):
            return True
        for action in decision.actions:
            if isinstance(action, RequeueAt):
                self._queue.add(key, max(0.1, action.at_s - observed.now_s))
        if not steps:
            await self._update_status(resource, after)
            return False
        with self._executor.assume(steps):
            if any(after[field] != resource.status.get(field, []) for field in PERSISTED):
                await self._write_status(resource, after)
            await self._executor.execute(resource, steps, lambda: self._queue.succeeded(key))
        self._queue.add(key, REQUEUE_AFTER_S)
        return True

    async def _has_keys(self, resource: Resource, observed: Observed, *, needed: bool) -> bool:
        """Keep the namespace's keys. False if another owner has the Secret's name: plan again.

        A failure is raised only if the keys are `needed` now: what runs has them already.
        """
        if (SECRETS.kind, WORKER_KEYS) in observed.taken:
            return True
        place = resource.meta.namespace

        def others() -> list[Meta]:
            return [seen.value.meta for seen in self._state.replicas if seen.key[0] == place]

        try:
            await self._keys.ensure(resource.meta, others, self._executor.deadline_s())
        except NameTaken as error:
            await self._executor.record_taken(resource, error)
            return False
        except (ClusterError, UserError) as error:
            if needed:
                raise
            log.warning("keys of %s: %s", place, error)
        return True

    async def _update_status(self, resource: Resource, after: Status) -> None:
        """Write a changed status: at once if the change is essential, else after a pause."""
        key = resource.meta.key
        self._metrics.add("medha_group_restarts_total", 0, *key)
        for condition in after["conditions"]:
            value = float(condition["status"] == "True")
            self._metrics.set("medha_replica_condition", value, *key, condition["type"])
        if after == resource.status:
            return
        essential = _essence(after) != _essence(resource.status)
        pause_s = STATUS_PAUSE_S if essential else MESSAGE_PAUSE_S
        wait_s = self._status_written_s.get(key, -pause_s) + pause_s - time.monotonic()
        if wait_s > 0 and after.get("retiring") == resource.status.get("retiring"):
            self._queue.add(key, wait_s)
            return
        await self._write_status(resource, after)

    async def _write_status(self, resource: Resource, after: Status) -> None:
        key = resource.meta.key
        self._status_written_s[key] = time.monotonic()
        await self._executor.write_status(resource, after)
        failed = _recorded_failures(after) - _recorded_failures(resource.status)
        self._metrics.add("medha_group_restarts_total", len(failed), *key)
        events = events_between(key[1], resource.status, after)
        await self._executor.execute(resource, events, lambda: None)


def _recorded_failures(status: Mapping[str, Any]) -> set[tuple[int, int, int]]:
    """Return replica, group and attempt of each failure that a status records as the last."""
    records = load_status(status).restarts
    return {(record.replica, record.group, record.attempt) for record in records}


def _essence(status: Mapping[str, Any]) -> tuple[object, ...]:
    """The part that people and machines act on: all but messages, times and group counts."""
    conditions = [
        (condition.get("type"), condition.get("status"), condition.get("reason"))
        for condition in status.get("conditions") or ()
    ]
    return *(msgspec.json.encode(status.get(field)) for field in ESSENTIAL), conditions


# --- work queue -----------------------------------------------------------------------------------
#
#     add      reconcile the key, now or after a delay; an earlier time replaces a later one
#     retry    reconcile it again after a failure: the delay doubles each time, with jitter
#     done     the key is no longer in work; what was added meanwhile is kept
#
# Keys are few, so plain dictionaries and a heap suffice. The clock is an argument; `get` waits in
# the event loop that calls it.


K = TypeVar("K", bound=Hashable)

FIRST_RETRY_S, LONGEST_RETRY_S = 0.25, 30.0


class WorkQueue(Generic[K]):
    """Keys and the time at which each falls due; each is in work at most once at a time."""

    def __init__(self, clock: Callable[[], float], jitter: random.Random) -> None:
        self._clock, self._jitter = clock, jitter
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._in_work: set[K] = set()
        self._failures: dict[K, int] = {}
        self._added = 0
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    @property
    def behind_s(self) -> float:
        """Seconds for which the first key has been due."""
        now = self._clock()
        return max(0.0, now - min(self._due.values(), default=now))

    def add(self, key: K, after_s: float = 0.0) -> None:
        """Make `key` due after `after_s`, unless it falls due sooner already."""
        due = self._clock() + after_s
        if key in self._due and self._due[key] <= due:
            return
        self._due[key] = due
        self._push(key)

    def retry(self, key: K, at_least_s: float = 0.0) -> float:
        """Make `key` due again after a failure; returns the delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(failures - 1, 20))
        delay_s = max(at_least_s, delay_s * self._jitter.uniform(0.5, 1.0))
        self.add(key, delay_s)
        return delay_s

    def succeeded(self, key: K) -> None:
        """Reset the delay of `key`: its next failure counts as the first."""
        self._failures.pop(key, None)

    def done(self, key: K) -> None:
        """End the work on `key`."""
        self._in_work.discard(key)
        if key in self._due:
            self._push(key)

    def take(self) -> K | None:
        """Take a key that is due and not in work; it is in work until `done`."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due and key not in self._in_work:
                del self._due[key]
                self._in_work.add(key)
                return key
        return None

    async def get(self) -> K:
        """Wait for a key to take."""
        while (key := self.take()) is None:
            self._changed.clear()
            wait_s = self._heap[0][0] - self._clock() if self._heap else None
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return key

    def _push(self, key: K) -> None:
        self._added += 1
        heapq.heappush(self._heap, (self._due[key], self._added, key))
        self._changed.set()
