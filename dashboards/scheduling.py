"""Does work run in the right order, and do batches take the time that was foreseen?"""

from __future__ import annotations

from dashboards.panels import Board, Panel, Row
from dashboards.queries import Query, heat, level, quantiles, rate, sum_rate

LOW_TO_HIGH = (0.1, 0.5, 0.9)


def _both(name: str, router: str, replica: str) -> tuple[Query, ...]:
    """A level of the routers beside that of the replicas."""
    return (
        Query(level(name, "model", of="router"), f"{{{{model}}}} {router}"),
        Query(level(name, "model", of="controller"), f"{{{{model}}}} {replica}"),
    )


BOARD = Board("scheduling", "Medha / Scheduling", "Who waits, how long may they, what runs?", (
    Row("Slack: time to spare before the deadline, as a multiple of the request's own work", (
        Panel(title="At arrival", kind="heat", says="Relative slack of requests as they arrive.",
              queries=(heat("medha_arrival_slack_ratio"),)),
        Panel(title="Of those that wait", kind="heat", says="Relative slack in the routers' "
              "queues, sampled once a second.",
              queries=(heat("medha_queue_slack_distribution_ratio"),)),
        Panel(title="At dispatch", kind="heat", says="Relative slack when a request is sent to a "
              "replica.", queries=(heat("medha_request_slack_ratio", at="dispatch"),)),
        Panel(title="At the first token", kind="heat", says="Relative slack left when the first "
              "token came: below zero it came late.",
              queries=(heat("medha_request_slack_ratio", at="first_token"),)),
        Panel(title="Slack of the queue", says="Relative slack of waiting requests: the tightest "
              "tenth, and the middle. 0 where nobody waits; below zero some are late already.",
              queries=(Query(level("medha_queue_slack_ratio", "model", "quantile", how="min"),
                             "{{model}} {{quantile}}"),)),
        Panel(title="Work of replicas by slack", kind="areas", unit="s", says="Prefill seconds "
              "that replicas still have to do, by the relative slack up to which they have it.",
              queries=(Query(level("medha_pending_work_seconds", "slack"), "up to {{slack}}"),)),
    )),
    Row("The queue", (
        Panel(title="Requests that wait", says="In routers: not sent to a replica yet. In "
              "replicas: sent, and not begun.", queries=_both("medha_queue_requests", "in routers",
                                                    "in replicas")),
        Panel(title="Work that waits", unit="s", says="Predicted prefill seconds that wait.",
              queries=_both("medha_queue_work_seconds", "in routers", "in replicas")),
        Panel(title="Requests that run", says="Sent to replicas, as routers count; prefilling or "
              "decoding, as replicas count.",
              queries=_both("medha_running_requests", "sent", "running")),
        Panel(title="Without a promise", unit="reqps", says="Requests accepted or kept without a "
              "promise, as routers and as replicas count.", queries=(
                  Query(rate("medha_requests_relegated_total", "class", of="router"),
                        "{{class}} by routers"),
                  Query(rate("medha_requests_relegated_total", "class", of="controller"),
                        "{{class}} by replicas"))),
        Panel(title="Refused", unit="reqps", says="Requests refused, by reason.",
              queries=(Query(rate("medha_requests_refused_total", "reason"), "{{reason}}"),)),
        Panel(title="Taken, and given up for others", unit="reqps", says="Requests that schedulers "
              "took, and those that lost their place among the promised, by length of the prompt.",
              queries=(Query(rate("medha_scheduler_decided_total", "length"), "{{length}} taken"),
                       Query(rate("medha_scheduler_displaced_total", "length"),
                             "{{length}} given up"))),
    )),
    Row("Batches", (
        Panel(title="Tokens computed", kind="areas", says="Tokens per second, prefill and decode.",
              queries=(Query(sum_rate("medha_batch_tokens", "kind"), "{{kind}}"),)),
        Panel(title="Tokens of a prefill chunk", kind="heat", says="How much of one prompt an "
              "iteration takes: small chunks beside decodes, large ones alone.",
              queries=(heat("medha_chunk_tokens"),)),
        Panel(title="Time of a batch", unit="s", says="Time of a batch in its slowest stage.",
              queries=quantiles("medha_batch_seconds", "model")),
        Panel(title="Use of the time budget", kind="heat", unit="percentunit", says="Predicted "
              "time of batches over the longest that one may take.",
              queries=(heat("medha_batch_budget_ratio"),)),
        Panel(title="Prediction", says="Measured time of batches over the predicted one: 1 is "
              "exact, above 1 they took longer. Every deadline rests on it.",
              queries=quantiles("medha_prediction_error_ratio", "model", at=LOW_TO_HIGH)),
        Panel(title="Correction of the prediction", says="The factor that predictors have learned "
              "from measured batches.",
              queries=(Query(level("medha_prediction_correction_ratio", "model", how="avg"),
                             "{{model}}"),)),
        Panel(title="Time to decide", unit="s", says="What the scheduler takes to decide a batch.",
              queries=quantiles("medha_scheduler_seconds", "model")),
        Panel(title="Work done again", unit="ops", says="Sequences whose pages were taken back, so "
              "that they are computed anew.",
              queries=(Query(rate("medha_preemptions_total", "reason"), "{{reason}}"),)),
    )),
))  # fmt: skip
