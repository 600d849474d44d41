"""What the router counts: from the life of requests to the metrics of the catalogue.

Decides which number each event moves, never how it is exported. Latencies carry model, class and
length bucket; a tenant's name is capped. Refused requests count as missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from medha import metrics
from medha.demand import WORK_FLOOR_S, Demand, slack_ratio
from medha.errors import MedhaError, Refusal
from medha.scheduling.placement import Option
from medha.scheduling.queue import Queued
from medha_router.runs import Answer, Run

QUANTILES = (0.1, 0.5)


class Instruments(Protocol):
    """The catalogue's metrics by name, labels in the catalogue's order."""

    def add(self, name: str, amount: float, *labels: str) -> None: ...

    def observe(self, name: str, value: float, *labels: str) -> None: ...

    def set(self, name: str, value: float, *labels: str) -> None: ...


class Meter:
    """Turns events into numbers; one per router process. `demand` hears what comes and ends."""

    def __init__(self, instruments: Instruments, demand: Demand) -> None:
        self._to, self._demand = instruments, demand
        self._tenants = metrics.Cap()

    def refused(self, model: str, slo_class: str, reason: str, now: float) -> None:
        self._to.add("medha_requests_refused_total", 1, model, slo_class, reason)
        if reason == "no_replica":
            self._demand.unserved(model, now)

    def refused_run(self, run: Run, refusal: Refusal, now: float) -> None:
        """A refusal is a miss wherever attainment is reported."""
        self._to.add("medha_slo_missed_total", 1, *_of_run(run))
        self._to.add("medha_slo_attained_total", 0, *_of_run(run))
        self._to.add("medha_requests_total", 1, *_of_run(run), "refused")
        self._arrived(
            run,
            self._demand.refused(_model(run), run.request, refusal, now, run.idle_tpot_s),
        )

    def arrived(self, run: Run, option: Option, age_s: float, now: float) -> None:
        """Taken, `age_s` after its arrival."""
        first_s = age_s + option.first_s(promised=run.promise_given)
        ratio = self._demand.taken(_model(run), run.request, first_s, option.work_s, now)
        self._arrived(run, ratio)

    def arrived_at_none(self, run: Run, now: float) -> None:
        """Taken after it waited for the first replica: that wait is no lack of replicas now."""
        self._demand.arrived(_model(run), run.request, now)

    def admitted(self, answer: Answer) -> None:
        model, tenant = answer.ask.model, self._tenant(answer)
        self._to.add("medha_prompt_tokens_total", answer.prompt_tokens, model, tenant)
        for run in answer.runs:
            labels = _of_class(run)
            self._begin(run)
            if run.request.promised:
                self._to.add("medha_promises_total", 1, *labels, "given")
            else:
                self._to.add("medha_requests_relegated_total", 1, *labels)

    def relegated(self, run: Run) -> None:
        """A promise that cannot be kept any more; it is counted as broken when its token comes."""
        self._to.add("medha_requests_relegated_total", 1, *_of_class(run))

    def dispatched(self, run: Run, now: float) -> None:
        request = run.request
        slack = slack_ratio(request, now - request.arrival_s + request.work_s)
        self._to.observe("medha_request_slack_ratio", slack, *_of_class(run), "dispatch")

    def tokens(self, run: Run, count: int, now: float, ratio: float | None) -> None:
        """`count` tokens came at `now`; the first of all is the TTFT."""
        labels = _of_run(run)
        if run.first_token_s is None:
            run.first_token_s = now
            ttft_s = now - run.request.arrival_s
            self._to.observe("medha_request_ttft_seconds", ttft_s, *labels)
            self._first_token(run, ttft_s, ratio)
        elif run.last_token_s is not None:
            gap_s = (now - run.last_token_s) / count
            for _ in range(count):
                self._to.observe("medha_inter_token_seconds", gap_s, *labels)
        run.last_token_s = now
        answer = run.answer
        self._to.add("medha_output_tokens_total", count, answer.ask.model, self._tenant(answer))

    def moved(self, run: Run) -> None:
        self._to.add("medha_requests_moved_total", 1, run.answer.ask.model)

    def finished(self, run: Run, now: float) -> None:
        """The run has its last token: end-to-end time, TPOT, and whether its SLO was met."""
        labels, request = _of_run(run), run.request
        self._to.observe("medha_request_e2e_seconds", now - request.arrival_s, *labels)
        self._to.add("medha_requests_total", 1, *labels, "finished")
        if run.first_token_s is None or run.last_token_s is None:
            self._missed(run, now)
            return
        met = run.first_token_s <= request.due_s
        later = len(run.output.tokens) - 1
        if later > 0:
            tpot_s = (run.last_token_s - run.first_token_s) / later
            self._to.observe("medha_request_tpot_seconds", tpot_s, *labels)
            met = met and tpot_s <= request.tpot_s
        if not met:
            self._missed(run, now)
            return
        self._to.add("medha_slo_attained_total", 1, *labels)
        self._demand.over(_model(run), request, True, now)

    def failed(self, answer: Answer, error: MedhaError, now: float) -> None:
        """A miss; one replica more would have been of use only to what found no room."""
        self._ended(answer, "failed")
        room = isinstance(error, Refusal) and error.code in ("overloaded", "deadline_infeasible")
        for run in answer.runs:
            if not run.done:
                self._missed(run, now, preventable=room)
                self._break_promise(run)

    def cancelled(self, answer: Answer) -> None:
        self._ended(answer, "cancelled")

    def queue(self, model: str, waiting: Sequence[Queued], running: int, now: float) -> None:
        """How the queue of a model stands now."""
        to = self._to
        to.set("medha_queue_requests", len(waiting), model)
        to.set("medha_queue_work_seconds", sum(item.work_s for item in waiting), model)
        to.set("medha_running_requests", running, model)
        to.add("medha_requests_moved_total", 0, model)
        slacks = sorted(queued_slack(item, now) for item in waiting)
        for quantile in QUANTILES:
            value = slacks[int(quantile * len(slacks))] if slacks else 0.0
            to.set("medha_queue_slack_ratio", value, model, f"p{quantile * 100:.0f}")
        for value in slacks[:: max(1, len(slacks) // 16)]:
            to.observe("medha_queue_slack_distribution_ratio", value, model)

    def replicas(self, model: str, *, serving: int, draining: int, joining: int) -> None:
        counts = {"serving": serving, "draining": draining, "joining": joining}
        for state, count in counts.items():
            self._to.set("medha_replicas", count, model, state)

    def rejected(self, count: int) -> None:
        """Messages of controllers that did not decode."""
        self._to.add("medha_messages_rejected_total", count, "controller")

    def _begin(self, run: Run) -> None:
        """Show how it may end before it does: a counter that appears with its first event shows no
        rise, and a share of two counters needs both."""
        for name in ("medha_slo_attained_total", "medha_slo_missed_total"):
            self._to.add(name, 0, *_of_run(run))
        for outcome in ("given", "kept", "broken"):
            self._to.add("medha_promises_total", 0, *_of_class(run), outcome)
        self._to.add("medha_requests_relegated_total", 0, *_of_class(run))

    def _arrived(self, run: Run, ratio: float | None) -> None:
        if ratio is not None:
            self._to.observe("medha_arrival_slack_ratio", ratio, *_of_class(run))

    def _missed(self, run: Run, now: float, preventable: bool = True) -> None:
        self._to.add("medha_slo_missed_total", 1, *_of_run(run))
        if preventable and not run.answer.held:  # who waited for the first replica had to be late
            self._demand.over(_model(run), run.request, False, now, run.idle_tpot_s)

    def _first_token(self, run: Run, ttft_s: float, ratio: float | None) -> None:
        labels, request = _of_class(run), run.request
        ratio = ratio if ratio is not None else slack_ratio(request, ttft_s)
        self._to.observe("medha_request_slack_ratio", ratio, *labels, "first_token")
        if not run.promise_given:
            return
        margin_s = request.ttft_deadline_s - ttft_s
        self._to.observe("medha_promise_margin_seconds", margin_s, *labels)
        outcome = "kept" if margin_s >= 0.0 else "broken"
        self._to.add("medha_promises_total", 1, *labels, outcome)

    def _break_promise(self, run: Run) -> None:
        if run.promise_given and run.first_token_s is None:
            self._to.add("medha_promises_total", 1, *_of_class(run), "broken")

    def _ended(self, answer: Answer, outcome: str) -> None:
        for run in answer.runs:
            if not run.done:
                self._to.add("medha_requests_total", 1, *_of_run(run), outcome)

    def _tenant(self, answer: Answer) -> str:
        return self._tenants.label(answer.tenant)


def queued_slack(item: Queued, now: float) -> float:
    """Relative slack of a waiting request: (due − now − work) / work."""
    return (item.due_s - now - item.work_s) / max(item.work_s, WORK_FLOOR_S)


def _model(run: Run) -> str:
    return run.answer.ask.model


def _of_class(run: Run) -> tuple[str, str]:
    return _model(run), run.request.slo_class


def _of_run(run: Run) -> tuple[str, str, str]:
    return *_of_class(run), metrics.length_label(run.request.prompt_tokens)
