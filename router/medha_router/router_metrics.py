"""The router's metrics: events in the life of requests to metrics of the catalogue.

Decides which metrics an event changes, not how they are exported. Latencies have the labels model,
class and length bucket. Tenant names are capped. Refused requests count as missed SLOs.
"""

from __future__ import annotations

from collections.abc import Sequence

from medha import metrics
from medha.errors import MedhaError, Refusal
from medha.fleet.demand import WORK_FLOOR_S, DemandWindow, slack_ratio
from medha.fleet.offers import PlacementOption
from medha.fleet.request_queue import QueuedRequest
from medha_router.generation import ClientRequest, Generation

QUANTILES = (0.1, 0.5)


class RouterMetrics:
    """Translates events to metrics; one per router. `demand` counts arrivals and ends."""

    def __init__(self, sink: metrics.MetricsSink, demand: DemandWindow) -> None:
        self._sink, self._demand = sink, demand
        self._tenants = metrics.CappedLabel()
        self._begun: set[tuple[str, str, str]] = set()  # labels of exported outcomes
        self._tenants_begun: set[tuple[str, str]] = set()  # by model

    def refused(self, model: str, slo_class: str, reason: str, now: float) -> None:
        self._sink.add("medha_requests_refused_total", 1, model, slo_class, reason)
        if reason == "no_replica":
            self._demand.unserved(model, now)

    def refused_unread(self, reason: str) -> None:
        """Count a request that was refused before its model was known."""
        self._sink.add("medha_requests_refused_total", 1, "", "", reason)

    def refused_generation(self, generation: Generation, refusal: Refusal, now: float) -> None:
        """Count a refused generation as a missed SLO."""
        self._sink.add("medha_slo_missed_total", 1, *_labels(generation))
        self._sink.add("medha_slo_attained_total", 0, *_labels(generation))
        self._sink.add("medha_requests_total", 1, *_labels(generation), "refused")
        self._of_tenant(generation, "refused")
        self._arrived(
            generation,
            self._demand.refused(
                _model(generation), generation.request, refusal, now, generation.least_tpot_s
            ),
        )

    def arrived(
        self, generation: Generation, option: PlacementOption, age_s: float, now: float
    ) -> None:
        """Count a generation that was admitted `age_s` after its arrival."""
        first_s = age_s + option.first_s(promised=bool(generation.request.promised))
        ratio = self._demand.taken(
            _model(generation), generation.request, first_s, option.work_s, now
        )
        self._arrived(generation, ratio)

    def arrived_held(self, generation: Generation, now: float) -> None:
        """Count a generation that waited for the first replica: not a sign of too few replicas."""
        self._demand.arrived(_model(generation), generation.request, now)

    def admitted(self, client_request: ClientRequest) -> None:
        model, tenant = client_request.model, self._tenant(client_request)
        self._sink.add("medha_prompt_tokens_total", client_request.prompt_tokens, model, tenant)
        self._begin_tenant(model, tenant)
        for generation in client_request.generations:
            labels = _class_labels(generation)
            self._begin(generation)
            if generation.promise_given:
                self._sink.add("medha_promises_total", 1, *labels, "given")
            elif not generation.request.promised:
                self._sink.add("medha_requests_relegated_total", 1, *labels)

    def relegated(self, generation: Generation) -> None:
        """Count a withdrawn promise. It counts as broken at the first token."""
        self._sink.add("medha_requests_relegated_total", 1, *_class_labels(generation))

    def dispatched(self, generation: Generation, now: float) -> None:
        request = generation.request
        slack = slack_ratio(request, now - request.arrival_s + request.work_s)
        self._sink.observe(
            "medha_request_slack_ratio", slack, *_class_labels(generation), "dispatch"
        )

    def tokens(self, generation: Generation, count: int, now: float, ratio: float | None) -> None:
        """Count `count` tokens received at `now`. The first token of all gives the TTFT."""
        labels = generation.labels
        if generation.first_token_s is None:
            labels = generation.labels = _labels(generation)
            generation.first_token_s = now
            ttft_s = now - generation.request.arrival_s
            self._sink.observe("medha_request_ttft_seconds", ttft_s, *labels)
            self._first_token(generation, ttft_s, ratio)
        elif generation.last_token_s is not None:
            gap_s = (now - generation.last_token_s) / count
            for _ in range(count):
                self._sink.observe("medha_inter_token_seconds", gap_s, *labels)
        generation.last_token_s = now
        client_request = generation.client_request
        self._sink.add(
            "medha_output_tokens_total",
            count,
            client_request.model,
            self._tenant(client_request),
        )

    def moved(self, generation: Generation) -> None:
        self._sink.add("medha_requests_moved_total", 1, generation.client_request.model)

    def finished(self, generation: Generation, now: float) -> None:
        """Record end-to-end time, TPOT and SLO attainment of a finished generation."""
        labels, request = _labels(generation), generation.request
        self._sink.observe("medha_request_e2e_seconds", now - request.arrival_s, *labels)
        self._sink.add("medha_requests_total", 1, *labels, "finished")
        if generation.first_token_s is None or generation.last_token_s is None:
            self._missed(generation, now)
            return
        attained = generation.first_token_s <= request.due_s
        later = len(generation.output.tokens) - 1
        if later > 0:
            tpot_s = (generation.last_token_s - generation.first_token_s) / later
            self._sink.observe("medha_request_tpot_seconds", tpot_s, *labels)
            attained = attained and tpot_s <= request.tpot_s
        if not attained:
            self._missed(generation, now)
            return
        self._sink.add("medha_slo_attained_total", 1, *labels)
        self._of_tenant(generation, "attained")
        self._demand.over(_model(generation), request, True, now)

    def failed(self, client_request: ClientRequest, error: MedhaError, now: float) -> None:
        """Count a missed SLO. Only a lack of room is demand for another replica."""
        self._ended(client_request, "failed")
        no_room = isinstance(error, Refusal) and error.code in ("overloaded", "deadline_infeasible")
        for generation in client_request.generations:
            if not generation.done:
                self._missed(generation, now, preventable=no_room)
                self._break_promise(generation)

    def cancelled(self, client_request: ClientRequest) -> None:
        self._ended(client_request, "cancelled")

    def queue(self, model: str, waiting: Sequence[QueuedRequest], running: int, now: float) -> None:
        """Set the gauges of a model's queue."""
        sink = self._sink
        sink.set("medha_queue_requests", len(waiting), model)
        sink.set("medha_queue_work_seconds", sum(item.work_s for item in waiting), model)
        sink.set("medha_running_requests", running, model)
        sink.add("medha_requests_moved_total", 0, model)
        slacks = sorted(queued_slack(item, now) for item in waiting)
        for quantile in QUANTILES:
            value = slacks[int(quantile * len(slacks))] if slacks else 0.0
            sink.set("medha_queue_slack_ratio", value, model, f"p{quantile * 100:.0f}")
        for value in slacks[:: max(1, len(slacks) // 16)]:
            sink.observe("medha_queue_slack_distribution_ratio", value, model)

    def replicas(self, model: str, *, serving: int, draining: int, joining: int) -> None:
        counts = {"serving": serving, "draining": draining, "joining": joining}
        for state, count in counts.items():
            self._sink.set("medha_replicas", count, model, state)

    def rejected(self, count: int) -> None:
        """Count messages of controllers that did not decode."""
        self._sink.add("medha_messages_rejected_total", count, "controller")

    def _begin(self, generation: Generation) -> None:
        """Export outcome counters at zero.

        `rate()` misses the first increment of a new series, and a share of two counters needs both.
        """
        labels = _labels(generation)
        if labels in self._begun:
            return
        self._begun.add(labels)
        for name in ("medha_slo_attained_total", "medha_slo_missed_total"):
            self._sink.add(name, 0, *labels)
        for outcome in ("given", "kept", "broken"):
            self._sink.add("medha_promises_total", 0, *_class_labels(generation), outcome)
        self._sink.add("medha_requests_relegated_total", 0, *_class_labels(generation))

    def _arrived(self, generation: Generation, ratio: float | None) -> None:
        if ratio is not None:
            self._sink.observe("medha_arrival_slack_ratio", ratio, *_class_labels(generation))

    def _missed(self, generation: Generation, now: float, preventable: bool = True) -> None:
        self._sink.add("medha_slo_missed_total", 1, *_labels(generation))
        self._of_tenant(generation, "missed")
        # A request that waited for the first replica was late in any case.
        if preventable and not generation.client_request.held:
            self._demand.over(
                _model(generation), generation.request, False, now, generation.least_tpot_s
            )

    def _first_token(self, generation: Generation, ttft_s: float, ratio: float | None) -> None:
        labels, request = _class_labels(generation), generation.request
        ratio = ratio if ratio is not None else slack_ratio(request, ttft_s)
        self._sink.observe("medha_request_slack_ratio", ratio, *labels, "first_token")
        if not generation.promise_given:
            return
        margin_s = request.ttft_deadline_s - ttft_s
        self._sink.observe("medha_promise_margin_seconds", margin_s, *labels)
        outcome = "kept" if margin_s >= 0.0 else "broken"
        self._sink.add("medha_promises_total", 1, *labels, outcome)

    def _break_promise(self, generation: Generation) -> None:
        if generation.promise_given and generation.first_token_s is None:
            self._sink.add("medha_promises_total", 1, *_class_labels(generation), "broken")

    def _ended(self, client_request: ClientRequest, outcome: str) -> None:
        for generation in client_request.generations:
            if not generation.done:
                self._sink.add("medha_requests_total", 1, *_labels(generation), outcome)

    def _begin_tenant(self, model: str, tenant: str) -> None:
        """Export a tenant's outcomes at zero, as `_begin` does those of a class."""
        if (model, tenant) not in self._tenants_begun:
            self._tenants_begun.add((model, tenant))
            for outcome in ("attained", "missed", "refused"):
                self._sink.add("medha_tenant_requests_total", 0, model, tenant, outcome)

    def _of_tenant(self, generation: Generation, outcome: str) -> None:
        model, tenant = _model(generation), self._tenant(generation.client_request)
        self._sink.add("medha_tenant_requests_total", 1, model, tenant, outcome)

    def _tenant(self, client_request: ClientRequest) -> str:
        return self._tenants.label(client_request.tenant)


def queued_slack(item: QueuedRequest, now: float) -> float:
    """Return the relative slack of a waiting request: (due − now − work) / work."""
    return (item.due_s - now - item.work_s) / max(item.work_s, WORK_FLOOR_S)


def _model(generation: Generation) -> str:
    return generation.client_request.model


def _class_labels(generation: Generation) -> tuple[str, str]:
    return generation.client_request.model, generation.request.slo_class


def _labels(generation: Generation) -> tuple[str, str, str]:
    request = generation.request
    length = metrics.length_label(request.prompt_tokens)
    return generation.client_request.model, request.slo_class, length
