"""Autoscaler: how many replicas each MedhaReplica should have, written to /scale or exported.

One loop polls the routers, decides for each resource (`medha.fleet.autoscaling`) and writes /scale
where the operator owns the number. The reconciler writes the scaling part of the status; it is
woken when that part changes. `GET /scaling` returns the last decisions with their inputs, so that
they can be replayed elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from medha.adapters.prometheus import Metrics
from medha.errors import MedhaError
from medha.fleet.autoscaling import Journal, ScalingDecision, ScalingMemory, ScalingRecord, decide
from medha.metrics import UNEXPECTED
from medha.spec import MedhaReplica
from medha.spec.values import AutoscalingSpec
from medha_operator.cluster.cluster_state import ClusterState, Resource
from medha_operator.cluster.polling import RouterPoller
from medha_operator.controllers.executor import Executor
from medha_operator.controllers.keda import ScaledObjects
from medha_operator.controllers.model_publisher import ModelPublisher
from medha_operator.kube.client import ClusterError
from medha_operator.kube.lease import NotLeading
from medha_operator.planning import scaling_signals
from medha_operator.planning.resource_status import ScalingStatus, scaling_condition, update_owner
from medha_operator.planning.scaling_signals import STALE_S, start_times
from medha_operator.resources import scaled_object
from medha_operator.resources.actions import EmitEvent
from medha_operator.resources.objects import Key
from medha_operator.resources.views import ScaleOwnerRecord, load_status
from medha_operator.settings import Settings

log = logging.getLogger("medha.operator.autoscale")

MAX_PAUSE_S, SLO_PAUSE_S, MAX_RECONCILE_S = 15.0, 30.0, 30.0
POLL_AGAIN_S = STALE_S / 3
"""Demand of this age is polled again within a round, before it becomes stale."""
MAX_RECORDS, MAX_RECORDS_IN_ALL, MIN_RECORDS = 500, 20_000, 60
"""Records kept per resource, of all resources, and at least per resource; some 700 bytes each."""


class _Scaled(msgspec.Struct):
    """The state of one resource. It outlives a loss of the Lease: a short one is no reason to start
    over, and `medha.fleet.autoscaling` itself discards what is too old."""

    uid: str
    memory: ScalingMemory = ScalingMemory()
    cold_start_s: float = scaling_signals.USUAL_START_S
    starts: dict[str, float] = {}
    """Seconds that each leader pod took to start, by its UID."""
    written_at: str = ""
    """Version of the resource at our last write: no other write before a newer one is seen."""
    written: int | None = None
    """Replicas written last, or perhaps written, by this operator or the leader before it."""
    slo_s: float = float("-inf")


class Autoscaler:
    """Scales every resource in rounds while `leads` is true; `wake` has its status written."""

    def __init__(
        self,
        settings: Settings,
        state: ClusterState,
        executor: Executor,
        routers: RouterPoller,
        scaled_objects: ScaledObjects,
        model_publisher: ModelPublisher,
        metrics: Metrics,
        wake: Callable[[Key], None],
        leads: Callable[[], bool],
    ) -> None:
        self._settings, self._state, self._executor = settings, state, executor
        self._routers, self._model_publisher = routers, model_publisher
        self._scaled_objects, self._metrics = scaled_objects, metrics
        self._wake, self._leads = wake, leads
        self._scaled: dict[Key, _Scaled] = {}
        self._journals: dict[Key, Journal] = {}
        self._exported: set[Key] = set()
        self._polled_s = float("-inf")
        self._leading_since_s = time.monotonic()

    async def run(self) -> None:
        """Scale until cancelled."""
        while True:
            await asyncio.sleep(min(MAX_PAUSE_S, self._settings.report_s))
            if not self._leads():
                self._stand_by()
                self._leading_since_s = time.monotonic()
                continue
            try:
                await self._round()
            except NotLeading:
                continue
            except (MedhaError, TimeoutError) as error:
                log.warning("scaling: %s", error)
            except Exception:
                self._metrics.add("medha_operator_errors_total", 1, UNEXPECTED)
                log.exception("scaling: unexpected error")

    def page(self) -> dict[str, Journal]:
        """The journal of each resource, by namespace/name."""
        return {"/".join(key): journal for key, journal in list(self._journals.items())}

    async def _round(self) -> None:
        living = [seen for seen in self._state.served() if not seen.value.deleting]
        if not living and any(True for _ in self._state.replicas):
            self._stand_by()  # another release serves them, or may
            return
        self._forget({seen.key: seen.uid for seen in living})
        keys = [seen.key for seen in living]
        await in_turn(keys, self._reconcile, MAX_RECONCILE_S, self._metrics)
        await self._model_publisher.publish(
            seen.value.replica for seen in living if seen.value.replica is not None
        )

    async def _reconcile(self, key: Key) -> None:
        """Scale one resource, given its present state."""
        if time.monotonic() - self._polled_s >= min(POLL_AGAIN_S, self._settings.report_s):
            await self._routers.poll()
            self._polled_s = time.monotonic()
        seen = self._state.replicas.get(key)
        if seen is not None and not seen.value.deleting and seen.value.replica is not None:
            await self._scale(key, seen.value, seen.value.replica)

    async def _scale(self, key: Key, resource: Resource, replica: MedhaReplica) -> None:
        scaled = self._scaled.setdefault(key, _Scaled(uid=resource.meta.uid))
        before = self._state.scaling.get(key)
        demand = self._routers.demand(replica.spec.model.name)
        line, autoscaling = load_status(resource.status).scaling, replica.spec.autoscaling
        now_s = time.time()
        scaling = ScalingStatus(slo=self._slo(scaled, resource, demand))
        if autoscaling is not None:
            decision = self._decide(key, scaled, replica, autoscaling, demand, now_s)
            reported = line is not None and line.mode == autoscaling.mode
            if reported and decision.why == "NoData" and before is None and self._is_new():
                return  # the status stands until the routers just polled have answered
            hold_s = scaling_signals.policy_of(autoscaling).down_after_s
            if before is None and not resource.managers:
                scaled.written = replica.spec.replicas  # by the former leader, unrecorded
            after = update_owner(
                autoscaling,
                replica.spec.replicas,
                resource.managers,
                line,
                hold_s,
                now_s,
                scaled.written,
            )
            fault = await self._act(key, resource, autoscaling, after, line, decision)
            after = await self._with_object(key, autoscaling, after, line)
            condition = scaling_condition(autoscaling, after, decision, fault)
            scaling = msgspec.structs.replace(scaling, record=after, condition=condition)
        elif line is not None and line.has_object and not await self._scaled_objects.remove(key):
            scaling = msgspec.structs.replace(scaling, record=line)
        before = self._state.scaling.get(key)  # may have been cleared during the calls above
        self._state.scaling[key] = scaling
        if scaling != (before or ScalingStatus()):
            self._wake(key)

    def _decide(
        self,
        key: Key,
        scaled: _Scaled,
        replica: MedhaReplica,
        autoscaling: AutoscalingSpec,
        demand: scaling_signals.TotalDemand,
        now_s: float,
    ) -> ScalingDecision:
        policy, pods = scaling_signals.policy_of(autoscaling), self._state.pods_of(key)
        scaled.starts = start_times(pods, scaled.starts)
        scaled.cold_start_s = max(scaled.starts.values(), default=scaled.cold_start_s)
        signals = scaling_signals.signals_of(
            replica,
            demand,
            pods,
            self._state.controller_status.get(key, {}),
            now_s,
            room=key not in self._state.unplaced,
            cold_start_s=scaled.cold_start_s,
        )
        decision, scaled.memory = decide(policy, scaled.memory, signals)
        record = ScalingRecord(policy=policy, signals=signals, decision=decision)
        journal = self._journals.get(key, Journal())
        self._journals[key] = journal.noted(record, max_records(len(self._journals)))
        self._metrics.set("medha_desired_replicas", decision.replicas, *key)
        at_maximum = float(decision.why == "AtMaximum")
        self._metrics.set("medha_autoscaling_at_maximum", at_maximum, *key)
        self._exported.add(key)
        return decision

    async def _act(
        self,
        key: Key,
        resource: Resource,
        autoscaling: AutoscalingSpec,
        after: ScaleOwnerRecord,
        line: ScaleOwnerRecord | None,
        decision: ScalingDecision,
    ) -> str:
        """Write the number, or the ScaledObject; returns why there can be no ScaledObject."""
        reported = line is not None and line.mode == after.mode and resource.replica is not None
        if autoscaling.mode == "External":
            return await self._ensure_object(key, resource, autoscaling, reported)
        changed = after.replicas != decision.replicas and not after.outside_by
        newer = self._scaled[key].written_at != resource.meta.resource_version
        if reported and changed and newer and not after.has_object:
            await self._write(key, resource, after.replicas, decision)
        return ""

    async def _write(
        self, key: Key, resource: Resource, before: int, decision: ScalingDecision
    ) -> None:
        earlier, self._scaled[key].written = self._scaled[key].written, decision.replicas
        try:
            await self._executor.write_scale(resource, decision.replicas)
        except ClusterError as error:
            if error.status == 409:  # not written; the next round decides for the new resource
                self._scaled[key].written = earlier
                return
            raise
        self._scaled[key].written_at = resource.meta.resource_version
        change = f"from {before} to {decision.replicas} replicas"
        message = f"{change} ({decision.why}): {decision.message}"
        log.info("%s/%s: %s", *key, message)
        await self._executor.execute(resource, [EmitEvent("Scaled", message)], lambda: None)

    async def _ensure_object(
        self, key: Key, resource: Resource, autoscaling: AutoscalingSpec, reported: bool
    ) -> str:
        """Create the ScaledObject, if KEDA is there and the status says that it may exist."""
        if resource.replica is None or not await self._scaled_objects.served():
            return ""
        if not self._settings.prometheus:
            return (
                "KEDA needs the address of Prometheus: set MEDHA_PROMETHEUS of the operator "
                "(the chart's operator.prometheus)"
            )
        line = load_status(resource.status).scaling
        if not reported or line is None or not line.has_object:
            return ""
        manifest = scaled_object.scaled_object(
            resource.replica, autoscaling, self._settings.prometheus
        )
        return await self._scaled_objects.ensure(key, manifest)

    async def _with_object(
        self,
        key: Key,
        autoscaling: AutoscalingSpec,
        after: ScaleOwnerRecord,
        line: ScaleOwnerRecord | None,
    ) -> ScaleOwnerRecord:
        """Record in the status whether a ScaledObject of ours may exist."""
        if autoscaling.mode == "External":
            may = bool(self._settings.prometheus) and await self._scaled_objects.served()
            return msgspec.structs.replace(
                after, scaled_object="Expected" if may or after.has_object else "Absent"
            )
        if after.has_object and line is not None and await self._scaled_objects.remove(key):
            return msgspec.structs.replace(after, scaled_object="Absent")
        return after

    def _is_new(self) -> bool:
        """Routers and controllers may still answer for the first time since we lead."""
        return time.monotonic() - self._leading_since_s < STALE_S

    def _slo(
        self, scaled: _Scaled, resource: Resource, demand: scaling_signals.TotalDemand
    ) -> dict[str, object]:
        """The attainment for the status; it changes only every SLO_PAUSE_S."""
        before = dict(resource.status.get("slo") or {})
        now_s = time.monotonic()
        attained = scaling_signals.slo_of(demand)
        if not attained or now_s - scaled.slo_s < SLO_PAUSE_S:
            return before
        if {**before, **attained} != before:
            scaled.slo_s = now_s
        return {**before, **attained}

    def _stand_by(self) -> None:
        """Stop reporting: another operator leads."""
        self._state.scaling.clear()
        while self._exported:
            self._withdraw(self._exported.pop())

    def _forget(self, living: Mapping[Key, str]) -> None:
        """Drop the state of every resource but these, given by key and UID."""
        stale = [key for key, scaled in self._scaled.items() if living.get(key) != scaled.uid]
        for key in stale:
            del self._scaled[key]
            self._state.scaling.pop(key, None)
            self._journals.pop(key, None)
        for key in self._exported - {
            key
            for key in living
            if (seen := self._state.replicas.get(key)) is not None
            and seen.value.replica is not None
            and seen.value.replica.spec.autoscaling is not None
        }:
            self._exported.discard(key)
            self._withdraw(key)

    def _withdraw(self, key: Key) -> None:
        """Stop exporting a resource's numbers."""
        for name in ("medha_desired_replicas", "medha_autoscaling_at_maximum"):
            self._metrics.drop(name, *key)


def max_records(journals: int) -> int:
    """Number of records to keep per journal, given the number of journals."""
    return max(MIN_RECORDS, min(MAX_RECORDS, MAX_RECORDS_IN_ALL // max(1, journals)))


async def in_turn(
    keys: Iterable[Key], act: Callable[[Key], Awaitable[None]], limit_s: float, metrics: Metrics
) -> None:
    """Act on each key, for `limit_s` at most. Failures are logged and the next key follows; only
    NotLeading ends the loop."""
    for key in keys:
        try:
            async with asyncio.timeout(limit_s):
                await act(key)
        except NotLeading:
            raise
        except (MedhaError, TimeoutError) as error:
            log.warning("%s/%s: not scaled: %s", *key, str(error) or repr(error))
        except Exception:
            metrics.add("medha_operator_errors_total", 1, UNEXPECTED)
            log.exception("%s/%s: not scaled: unexpected error", *key)
