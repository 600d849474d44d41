"""How many replicas each MedhaReplica should have: asked for, decided, written or exported.

One loop beside the reconcilers: it asks the routers, decides for each resource (`medha.scaling`),
and writes /scale where that is its part. What the status has to say of it is left for the
reconciler, which is woken when that matters. `GET /scaling` shows the last looks as they were
decided, so that they can be decided again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from medha.adapters.prometheus import Metrics
from medha.errors import MedhaError
from medha.scaling import Decision, Journal, Memory, Record, decide
from medha.spec import MedhaReplica
from medha.spec.values import Autoscaling
from medha_operator import keda, signals
from medha_operator.actions import Tell
from medha_operator.apply import Writer
from medha_operator.client import ClusterError
from medha_operator.demands import Demands
from medha_operator.lease import NotLeading
from medha_operator.memory import ScalingLine, recall
from medha_operator.observe import Resource, World
from medha_operator.projections import Key
from medha_operator.published import Published
from medha_operator.reconcile import UNEXPECTED
from medha_operator.rounds import each_in_turn
from medha_operator.scaled_objects import ScaledObjects
from medha_operator.settings import Settings
from medha_operator.signals import STALE_S
from medha_operator.starts import starts_of
from medha_operator.voices import Scaling, heard, judged

log = logging.getLogger("medha.operator.autoscale")

LONGEST_PAUSE_S, SLO_PAUSE_S, LONGEST_LOOK_S = 15.0, 30.0, 30.0
ASK_AGAIN_S = STALE_S / 3
"""What routers said this long ago is asked again within a round: it must not become stale in it."""
KEPT_OF_EACH, KEPT_OF_ALL, KEPT_AT_LEAST = 500, 20_000, 60
"""Looks that are kept: some 700 bytes each."""


class _Known(msgspec.Struct):
    """What is remembered of one resource, also while another one leads: a moment without the Lease
    is no reason to begin anew, and `medha.scaling` sees itself what is too long ago."""

    uid: str
    memory: Memory = Memory()
    cold_start_s: float = signals.USUAL_START_S
    starts: dict[str, float] = {}
    """How long each leader pod took to start, by its UID."""
    wrote: str = ""
    """Version of the resource that our last write was made for: until another is seen we wait."""
    written: int | None = None
    """How many replicas we last wrote, or tried to; or whoever led before us may have."""
    slo_s: float = float("-inf")
    scaling: Scaling | None = None
    """None while nothing was decided since we lead."""


class Autoscaler:
    """Looks at every resource again and again while `leads`; `wake` makes its status be told."""

    def __init__(
        self, settings: Settings, world: World, writer: Writer, demands: Demands,
        scaled_objects: ScaledObjects, published: Published, metrics: Metrics,
        wake: Callable[[Key], None], leads: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._settings, self._world, self._writer = settings, world, writer
        self._demands, self._published = demands, published
        self._scaled_objects, self._metrics = scaled_objects, metrics
        self._wake, self._leads = wake, leads
        self._known: dict[Key, _Known] = {}
        self._journals: dict[Key, Journal] = {}
        self._shown: set[Key] = set()
        self._asked_s = float("-inf")
        self._began_s = time.monotonic()
        """When we began to lead."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(min(LONGEST_PAUSE_S, self._settings.report_s))
            if not self._leads():
                self._stand_by()
                self._began_s = time.monotonic()
                continue
            try:
                await self._look_at_all()
            except NotLeading:
                continue
            except (MedhaError, TimeoutError) as error:
                log.warning("scaling: %s", error)
            except Exception:
                self._metrics.add("medha_operator_errors_total", 1, UNEXPECTED)
                log.exception("scaling: unexpected")

    def scaling(self, key: Key) -> Scaling | None:
        """For the status; None while nothing was decided since we lead."""
        known = self._known.get(key)
        return known.scaling if known is not None else None

    def page(self) -> dict[str, Journal]:
        """The last looks at each resource."""
        return {"/".join(key): journal for key, journal in list(self._journals.items())}

    async def _look_at_all(self) -> None:
        living = [seen for seen in self._world.replicas if not seen.value.deleting]
        self._forget({seen.key: seen.uid for seen in living})
        await each_in_turn([seen.key for seen in living], self._turn, LONGEST_LOOK_S, self._metrics)
        await self._published.publish(
            seen.value.replica for seen in living if seen.value.replica is not None
        )

    async def _turn(self, key: Key) -> None:
        """A look at one resource, as it is by now."""
        if time.monotonic() - self._asked_s >= min(ASK_AGAIN_S, self._settings.report_s):
            await self._demands.ask()
            self._asked_s = time.monotonic()
        seen = self._world.replicas.get(key)
        if seen is not None and not seen.value.deleting and seen.value.replica is not None:
            await self._look(key, seen.value, seen.value.replica)

    async def _look(self, key: Key, resource: Resource, replica: MedhaReplica) -> None:
        known = self._known.setdefault(key, _Known(uid=resource.meta.uid))
        demand = self._demands.of(replica.spec.model.name)
        line, asked = recall(resource.status).scaling, replica.spec.autoscaling
        now_s = time.time()
        scaling = Scaling(slo=self._slo(known, resource, demand))
        if asked is not None:
            decision = self._decide(key, known, replica, asked, demand, now_s)
            told = line is not None and line.mode == asked.mode
            if told and decision.why == "NoData" and self._is_new(known):
                return  # what was told before stands until those that were just asked have answered
            hold_s = signals.policy_of(asked).down_after_s
            if known.scaling is None and not resource.authors:
                known.written = replica.spec.replicas  # the former leader's, which left no word
            said = heard(
                asked, replica.spec.replicas, resource.authors, line, hold_s, now_s, known.written
            )
            trouble = await self._act(key, resource, asked, said, line, decision)
            said = await self._without_object(key, asked, said, line)
            verdict = judged(asked, said, decision, trouble)
            scaling = msgspec.structs.replace(scaling, line=said, verdict=verdict)
        elif line is not None and line.has_object and not await self._scaled_objects.gone(key):
            scaling = msgspec.structs.replace(scaling, line=line)
        before, known.scaling = known.scaling or Scaling(), scaling
        if scaling != before:
            self._wake(key)

    def _decide(
        self, key: Key, known: _Known, replica: MedhaReplica, asked: Autoscaling,
        demand: signals.Demand, now_s: float,
    ) -> Decision:  # fmt: skip
        policy, pods = signals.policy_of(asked), self._world.pods_of(key)
        known.starts = starts_of(pods, known.starts)
        known.cold_start_s = max(known.starts.values(), default=known.cold_start_s)
        seen = signals.signals_of(
            replica, demand, pods, self._world.reports.get(key, {}), now_s,
            room=key not in self._world.homeless, cold_start_s=known.cold_start_s,
        )  # fmt: skip
        decision, known.memory = decide(policy, known.memory, seen)
        look = Record(policy=policy, signals=seen, decision=decision)
        journal = self._journals.get(key, Journal())
        self._journals[key] = journal.noted(look, kept(len(self._journals)))
        self._metrics.set("medha_desired_replicas", decision.replicas, *key)
        self._shown.add(key)
        return decision

    async def _act(
        self, key: Key, resource: Resource, asked: Autoscaling, said: ScalingLine,
        line: ScalingLine | None, decision: Decision,
    ) -> str:  # fmt: skip
        """Write what is ours to write; what keeps a ScaledObject from being made, if anything."""
        told = line is not None and line.mode == said.mode and resource.replica is not None
        if asked.mode == "External":
            return await self._follow(key, resource, asked, told and line is not None)
        changed = said.replicas != decision.replicas and not said.outside_by
        fresh = self._known[key].wrote != resource.meta.resource_version
        if told and changed and fresh and not said.has_object:
            await self._write(key, resource, said.replicas, decision)
        return ""

    async def _write(self, key: Key, resource: Resource, before: int, decision: Decision) -> None:
        self._known[key].written = decision.replicas
        try:
            await self._writer.write_scale(resource, decision.replicas)
        except ClusterError as error:
            if error.status == 409:
                return  # it is another one by now: the next look is at that
            raise
        self._known[key].wrote = resource.meta.resource_version
        change = f"from {before} to {decision.replicas} replicas"
        sentence = f"{change} ({decision.why}): {decision.message}"
        log.info("%s/%s: %s", *key, sentence)
        await self._writer.carry_out(resource, [Tell("Scaled", sentence)], lambda: None)

    async def _follow(self, key: Key, resource: Resource, asked: Autoscaling, told: bool) -> str:
        """The ScaledObject, where there is KEDA, once the status says that there may be one."""
        if resource.replica is None or not await self._scaled_objects.served():
            return ""
        if not self._settings.prometheus:
            return (
                "KEDA needs to know where Prometheus is: set MEDHA_PROMETHEUS of the operator "
                "(the chart's operator.prometheus)"
            )
        line = recall(resource.status).scaling
        if not told or line is None or not line.has_object:
            return ""
        wanted = keda.scaled_object(resource.replica, asked, self._settings.prometheus)
        return await self._scaled_objects.keep(key, wanted)

    async def _without_object(
        self, key: Key, asked: Autoscaling, said: ScalingLine, line: ScalingLine | None
    ) -> ScalingLine:
        """The line with whether a ScaledObject of ours may exist."""
        if asked.mode == "External":
            may = bool(self._settings.prometheus) and await self._scaled_objects.served()
            return msgspec.structs.replace(
                said, scaled_object="Expected" if may or said.has_object else "Absent"
            )
        if said.has_object and line is not None and await self._scaled_objects.gone(key):
            return msgspec.structs.replace(said, scaled_object="Absent")
        return said

    def _is_new(self, known: _Known) -> bool:
        """Nothing was decided yet, and whoever is to answer may still do so."""
        return known.scaling is None and time.monotonic() - self._began_s < STALE_S

    def _slo(self, known: _Known, resource: Resource, demand: signals.Demand) -> dict[str, object]:
        """What the status says of it, with something new only now and then."""
        before = dict(resource.status.get("slo") or {})
        now_s = time.monotonic()
        found = signals.slo_of(demand)
        if not found or now_s - known.slo_s < SLO_PAUSE_S:
            return before
        if {**before, **found} != before:
            known.slo_s = now_s
        return {**before, **found}

    def _stand_by(self) -> None:
        """Whoever leads knows how many replicas there should be."""
        for known in self._known.values():
            known.scaling = None
        while self._shown:
            self._metrics.drop("medha_desired_replicas", *self._shown.pop())

    def _forget(self, living: Mapping[Key, str]) -> None:
        """Of all but these, by their UIDs."""
        for key in [each for each, of in self._known.items() if living.get(each) != of.uid]:
            del self._known[key]
            self._journals.pop(key, None)
        for key in self._shown - {
            key
            for key in living
            if (seen := self._world.replicas.get(key)) is not None
            and seen.value.replica is not None
            and seen.value.replica.spec.autoscaling is not None
        }:
            self._shown.discard(key)
            self._metrics.drop("medha_desired_replicas", *key)


def kept(journals: int) -> int:
    """How many looks to keep of each, where there are so many journals."""
    return max(KEPT_AT_LEAST, min(KEPT_OF_EACH, KEPT_OF_ALL // max(1, journals)))
