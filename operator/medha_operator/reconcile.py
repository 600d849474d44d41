"""One MedhaReplica from what is seen to what is done and told: observe, plan, apply, report.

Level-triggered: the key says whom to look at, never what happened. A look either acts or, when
nothing is left to do, tells; what our own writes change wakes the key again. A failure comes back
after a pause, a refusal by the API server is told in the status. Of the status, what planning must
remember is written before it is acted on; mere messages are written only now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from medha.adapters.prometheus import Metrics
from medha.errors import UserError
from medha.spec import MedhaReplica
from medha_operator.actions import LookAgain
from medha_operator.apply import Writer
from medha_operator.client import ClusterError
from medha_operator.health import Health
from medha_operator.keys import Keys
from medha_operator.lease import NotLeading
from medha_operator.observe import Resource, World
from medha_operator.observed import Observed
from medha_operator.plan import decide
from medha_operator.projections import Key
from medha_operator.queue import WorkQueue
from medha_operator.settings import Settings
from medha_operator.status import Status, refused_status, status
from medha_operator.story import changes
from medha_operator.voices import Scaling

log = logging.getLogger("medha.operator.reconcile")

LONGEST_LOOK_S = 60.0
STEPS_AT_ONCE, AFTERWARDS_S, PATIENCE_S = 4, 0.15, 0.25
STATUS_PAUSE_S, MESSAGE_PAUSE_S = 1.0, 5.0
REMEMBERED = ("restarts", "retiring")
UNANSWERED, UNEXPECTED = "unanswered", "unexpected"
PLAIN = ("observedGeneration", "replicas", "readyReplicas", "selector", "scaling", *REMEMBERED)


class Reconciler:
    """Looks at one key after another; several of `run` may go on at once."""

    def __init__(
        self, settings: Settings, world: World, queue: WorkQueue[Key], writer: Writer, keys: Keys,
        metrics: Metrics, health: Health, scaling: Callable[[Key], Scaling | None],
    ) -> None:  # fmt: skip
        self._settings, self._world, self._queue = settings, world, queue
        self._writer, self._keys = writer, keys
        self._metrics, self._health, self._scaling = metrics, health, scaling
        self._told_s: dict[Key, float] = {}
        for kind in (UNANSWERED, UNEXPECTED):  # shown before they count, so that a rise is one
            metrics.add("medha_operator_errors_total", 0, kind)

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            key = await self._queue.get()
            try:
                await self._guarded(key)
            finally:
                self._queue.done(key)

    async def _guarded(self, key: Key) -> None:
        """A look whose failure comes back later, whatever it is."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST_LOOK_S):
                for _ in range(STEPS_AT_ONCE):
                    if not await self._look(key) or self._queue.behind_s > PATIENCE_S:
                        break  # nothing is left to do, or others wait for their turn
            self._queue.succeeded(key)
        except NotLeading:
            return  # whoever leads next looks at everything
        except ClusterError as error:
            kind = error.reason or (str(error.status) if error.status else UNANSWERED)
            self._metrics.add("medha_operator_errors_total", 1, kind)
            pause_s = self._queue.retry(key, error.retry_after_s or 0.0)
            log.warning("%s/%s: %s; again in %.1f s", *key, error, pause_s)
        except Exception:
            self._metrics.add("medha_operator_errors_total", 1, UNEXPECTED)
            self._queue.retry(key)
            log.exception("%s/%s: unexpected", *key)
        self._health.looked(key)
        self._metrics.observe("medha_operator_reconcile_seconds", time.monotonic() - began_s)

    async def _look(self, key: Key) -> bool:
        """Whether it acted, so that another look may find more to do."""
        seen = self._world.replicas.get(key)
        if seen is None or seen.value.deleting:
            self._told_s.pop(key, None)
            self._metrics.drop("medha_replica_condition", *key)
            self._world.note_waiting(key, replicas=False, groups=False)
            self._keys.forget(key[0])
            return False
        resource = seen.value
        observed = self._world.observed(resource, time.time())
        if resource.replica is None:
            told = refused_status(observed, resource.refused, generation=resource.generation)
            await self._tell(resource, told)
            return False
        try:
            return await self._act(resource, resource.replica, observed)
        except (ClusterError, UserError) as error:
            if isinstance(error, ClusterError) and not error.refused:
                raise
            sentence = error.message if isinstance(error, ClusterError) else str(error)
            told = refused_status(observed, sentence, generation=resource.generation)
            await self._tell(resource, told)
            self._queue.retry(key, MESSAGE_PAUSE_S)
            log.warning("%s/%s: %s", *key, error)
            return False

    async def _act(self, resource: Resource, replica: MedhaReplica, observed: Observed) -> bool:
        """Take the next steps; with none left, tell how things are. Whether it took any."""
        decision = decide(replica, observed, self._settings)
        told = status(
            replica, observed, self._settings, generation=resource.generation, decision=decision,
            scaling=self._scaling(resource.meta.key),
        )  # fmt: skip
        self._world.note_waiting(
            resource.meta.key, replicas=bool(decision.misfits), groups=bool(decision.stunted)
        )
        steps = [each for each in decision.actions if not isinstance(each, LookAgain)]
        for step in decision.actions:
            if isinstance(step, LookAgain):
                self._queue.add(resource.meta.key, max(0.1, step.at_s - observed.now_s))
        if not steps:
            await self._tell(resource, told)
            return False
        with self._writer.expecting(steps):
            if any(told[each] != resource.status.get(each, []) for each in REMEMBERED):
                await self._write(resource, told)
            others = [each.value.meta for each in self._world.replicas
                      if each.key[0] == resource.meta.namespace]  # fmt: skip
            await self._keys.ensure(resource.meta, others, self._writer.left_s())
            await self._writer.carry_out(
                resource, steps, lambda: self._queue.succeeded(resource.meta.key)
            )
        self._queue.add(resource.meta.key, AFTERWARDS_S)
        return True

    async def _tell(self, resource: Resource, told: Status) -> None:
        """Write the status if it says something new: at once if it matters, else in a while."""
        key = resource.meta.key
        for each in told["conditions"]:
            value = float(each["status"] == "True")
            self._metrics.set("medha_replica_condition", value, *key, each["type"])
        if told == resource.status:
            return
        matters = _essence(told) != _essence(resource.status)
        pause_s = STATUS_PAUSE_S if matters else MESSAGE_PAUSE_S
        wait_s = self._told_s.get(key, -pause_s) + pause_s - time.monotonic()
        if wait_s > 0 and told.get("retiring") == resource.status.get("retiring"):
            self._queue.add(key, wait_s)
            return
        await self._write(resource, told)

    async def _write(self, resource: Resource, told: Status) -> None:
        key = resource.meta.key
        self._told_s[key] = time.monotonic()
        await self._writer.write_status(resource, told)
        await self._writer.carry_out(resource, changes(key[1], resource.status, told), lambda: None)


def _essence(told: Mapping[str, Any]) -> tuple[object, ...]:
    """What people and machines act on: all but messages, times and the groups' counts."""
    conditions = [
        (each.get("type"), each.get("status"), each.get("reason"))
        for each in told.get("conditions") or ()
    ]
    return *(msgspec.json.encode(told.get(each)) for each in PLAIN), conditions
