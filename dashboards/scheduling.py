"""Dashboard of scheduling: slack, queues, admission, batches, prediction errors."""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import Query, heat, level, quantiles, rate, sum_rate

LOW_TO_HIGH = (0.1, 0.5, 0.9)


def _both(name: str, router: str, replica: str) -> tuple[Query, ...]:
    """A gauge of the routers together with that of the replicas."""
    return (
        Query(level(name, "model", of="router"), f"{{{{model}}}} {router}"),
        Query(level(name, "model", of="controller"), f"{{{{model}}}} {replica}"),
    )


BOARD = Board(
    "scheduling",
    "Medha / Scheduling",
    "Who waits, how long may they, what runs?",
    (
        Row(
            "Slack: time to spare before the deadline, as a multiple of the request's own work",
            (
                Panel(
                    title="At arrival",
                    kind="heat",
                    description="Relative slack of requests as they arrive.",
                    queries=(heat("medha_arrival_slack_ratio"),),
                ),
                Panel(
                    title="Of those that wait",
                    kind="heat",
                    description="Relative slack in the routers' queues, sampled once a second.",
                    queries=(heat("medha_queue_slack_distribution_ratio"),),
                ),
                Panel(
                    title="At dispatch",
                    kind="heat",
                    description="Relative slack when a request is sent to a replica.",
                    queries=(heat("medha_request_slack_ratio", at="dispatch"),),
                ),
                Panel(
                    title="At the first token",
                    kind="heat",
                    description="Relative slack left at the first token; below 0 it was late.",
                    queries=(heat("medha_request_slack_ratio", at="first_token"),),
                ),
                Panel(
                    title="Slack of the queue",
                    description="Relative slack of waiting requests: the tightest "
                    "tenth, and the middle. 0 if none wait; below 0 some are already "
                    "late.",
                    queries=(
                        Query(
                            level("medha_queue_slack_ratio", "model", "quantile", how="min"),
                            "{{model}} {{quantile}}",
                        ),
                    ),
                ),
                Panel(
                    title="Work of replicas by slack",
                    kind="areas",
                    unit="s",
                    description="Prefill seconds that replicas still have to compute, by "
                    "relative slack.",
                    queries=(
                        Query(level("medha_pending_work_seconds", "slack"), "up to {{slack}}"),
                    ),
                ),
            ),
        ),
        Row(
            "The queue",
            (
                Panel(
                    title="Waiting requests",
                    description="In routers: not sent to a replica yet. In replicas: not started.",
                    queries=_both("medha_queue_requests", "in routers", "in replicas"),
                ),
                Panel(
                    title="Work that waits",
                    unit="s",
                    description="Predicted prefill seconds of waiting requests.",
                    queries=_both("medha_queue_work_seconds", "in routers", "in replicas"),
                ),
                Panel(
                    title="Requests that run",
                    description="Sent to replicas, as routers count; prefilling or "
                    "decoding, as replicas count.",
                    queries=_both("medha_running_requests", "sent", "running"),
                ),
                Panel(
                    title="Without a promise",
                    unit="reqps",
                    description="Requests accepted or kept without a "
                    "promise, as routers and as replicas count.",
                    queries=(
                        Query(
                            rate("medha_requests_relegated_total", "class", of="router"),
                            "{{class}} by routers",
                        ),
                        Query(
                            rate("medha_requests_relegated_total", "class", of="controller"),
                            "{{class}} by replicas",
                        ),
                    ),
                ),
                Panel(
                    title="Refused",
                    unit="reqps",
                    description="Requests refused, by reason.",
                    queries=(Query(rate("medha_requests_refused_total", "reason"), "{{reason}}"),),
                ),
                Panel(
                    title="Taken, and given up for others",
                    unit="reqps",
                    description="Requests that schedulers "
                    "accepted, and those that lost their promise, by length "
                    "of the prompt.",
                    queries=(
                        Query(rate("medha_scheduler_decided_total", "length"), "{{length}} taken"),
                        Query(
                            rate("medha_scheduler_displaced_total", "length"), "{{length}} given up"
                        ),
                    ),
                ),
            ),
        ),
        Row(
            "Batches",
            (
                Panel(
                    title="Tokens computed",
                    kind="areas",
                    description="Tokens per second, prefill and decode.",
                    queries=(Query(sum_rate("medha_batch_tokens", "kind"), "{{kind}}"),),
                ),
                Panel(
                    title="Tokens of a prefill chunk",
                    kind="heat",
                    description="How much of one prompt an "
                    "iteration takes: small chunks together with decodes, large ones alone.",
                    queries=(heat("medha_chunk_tokens"),),
                ),
                Panel(
                    title="Time of a batch",
                    unit="s",
                    description="Time of a batch in its slowest stage.",
                    queries=quantiles("medha_batch_seconds", "model"),
                ),
                Panel(
                    title="Use of the time budget",
                    kind="heat",
                    unit="percentunit",
                    description="Predicted time of batches, divided by their time budget.",
                    queries=(heat("medha_batch_budget_ratio"),),
                ),
                Panel(
                    title="Prediction",
                    description="Measured time of batches over the predicted one: 1 is "
                    "exact, above 1 they took longer. Every deadline depends on it.",
                    queries=quantiles("medha_prediction_error_ratio", "model", at=LOW_TO_HIGH),
                ),
                Panel(
                    title="Correction of the prediction",
                    description="The factor that predictors have learned from measured batches.",
                    queries=(
                        Query(
                            level("medha_prediction_correction_ratio", "model", how="avg"),
                            "{{model}}",
                        ),
                    ),
                ),
                Panel(
                    title="Time to decide",
                    unit="s",
                    description="Time in which the scheduler decides a batch.",
                    queries=quantiles("medha_scheduler_seconds", "model"),
                ),
                Panel(
                    title="Work done again",
                    unit="ops",
                    description="Sequences that were preempted and recomputed.",
                    queries=(Query(rate("medha_preemptions_total", "reason"), "{{reason}}"),),
                ),
            ),
        ),
    ),
)
