"""The metric catalogue: name, help, unit, labels, buckets and exporters of every metric.

Adapters make the metrics from it; dashboards and alerts are tested against it. Names start with
`medha_` and end in their base unit, counters in `_total`. Labels are bounded: tenants beyond the
first `MAX_TENANTS` become `other`, lengths are buckets, and request ids are never labels. Aliases
repeat values under the `vllm:` names and the label `model_name` of the inference gateway's
model-server protocol.
"""

from __future__ import annotations

import bisect
import functools
from typing import Literal, Protocol

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Exporter = Literal["router", "controller", "pod", "operator"]

UNITS = ("seconds", "bytes", "ratio", "tokens", "pages", "requests", "replicas", "groups")
MAX_TENANTS = 64
OTHER = "other"

# Kinds of medha_operator_errors_total besides the API server's reasons: no response; a defect.
UNANSWERED, UNEXPECTED = "unanswered", "unexpected"

# Upper edges of prompt lengths in tokens, and the labels of the buckets; the last has no edge.
LENGTH_EDGES = (1_024, 8_192, 32_768, 131_072, 393_216, 1_048_576)
LENGTH_LABELS = ("1k", "8k", "32k", "128k", "384k", "1m", "1m+")

LATENCY_S = (
    0.01,
    0.025,
    0.05,
    0.1,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    1.5,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    320.0,
    640.0,
)
TOKEN_GAP_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.06,
    0.1,
    0.15,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)
BATCH_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
DECISION_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
RATIO = (
    -4.0,
    -2.0,
    -1.0,
    -0.5,
    -0.2,
    0.0,
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.0,
    5.0,
    10.0,
    25.0,
)
ERROR = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
MARGIN_S = (-60.0, -10.0, -2.0, -0.5, -0.1, 0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 120.0)
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Metric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Description of a metric. `exporters` are the processes whose ops ports export it.

    `alias_of` names the metric whose values an alias repeats, its label `model` as `model_name`.
    """

    name: str
    kind: Kind
    help: str
    exporters: tuple[Exporter, ...]
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    alias_of: str = ""

    @property
    def unit(self) -> str:
        """The unit at the end of the name; empty for plain counts."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in UNITS else ""


def _counter(name: str, help: str, by: str, *labels: str) -> Metric:
    return Metric(name=name, kind="counter", help=help, exporters=_who(by), labels=labels)


def _gauge(name: str, help: str, by: str, *labels: str) -> Metric:
    return Metric(name=name, kind="gauge", help=help, exporters=_who(by), labels=labels)


def _histogram(name: str, help: str, by: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(
        name=name, kind="histogram", help=help, exporters=_who(by), labels=labels, buckets=buckets
    )


def _who(by: str) -> tuple[Exporter, ...]:
    names: dict[str, Exporter] = {"r": "router", "c": "controller", "p": "pod", "o": "operator"}
    return tuple(names[letter] for letter in by)


def _alias(metric: str, name: str) -> Metric:
    of = next(entry for entry in MEDHA if entry.name == metric)
    labels = tuple("model_name" if label == "model" else label for label in of.labels)
    return msgspec.structs.replace(of, name=name, alias_of=metric, labels=labels)


REQUEST = ("model", "class", "length")

# r: router, c: replica controller, o: operator
MEDHA: tuple[Metric, ...] = (
    _histogram(
        "medha_request_ttft_seconds",
        "Time from arrival to the first token.",
        "r",
        LATENCY_S,
        *REQUEST,
    ),
    _histogram(
        "medha_request_tpot_seconds",
        "Mean time per output token after the first.",
        "r",
        TOKEN_GAP_S,
        *REQUEST,
    ),
    _histogram(
        "medha_inter_token_seconds", "Gap between two output tokens.", "r", TOKEN_GAP_S, *REQUEST
    ),
    _histogram(
        "medha_request_e2e_seconds",
        "Time from arrival to the last token.",
        "r",
        LATENCY_S,
        *REQUEST,
    ),
    _histogram(
        "medha_request_slack_ratio",
        "Relative slack at dispatch and at the first token.",
        "r",
        RATIO,
        "model",
        "class",
        "at",
    ),
    _histogram(
        "medha_arrival_slack_ratio",
        "Relative slack at arrival, refused requests included.",
        "r",
        RATIO,
        "model",
        "class",
    ),
    _gauge(
        "medha_queue_slack_ratio",
        "Relative slack of waiting requests at a quantile.",
        "r",
        "model",
        "quantile",
    ),
    _histogram(
        "medha_queue_slack_distribution_ratio",
        "Relative slack of waiting requests, sampled at each round.",
        "r",
        RATIO,
        "model",
    ),
    _gauge("medha_queue_requests", "Waiting requests.", "rc", "model"),
    _gauge(
        "medha_queue_work_seconds", "Predicted prefill seconds of waiting requests.", "rc", "model"
    ),
    _gauge(
        "medha_pending_work_seconds",
        "Prefill seconds that a replica still has to compute, by upper bound of relative slack.",
        "c",
        "model",
        "slack",
    ),
    _gauge("medha_running_requests", "Requests in prefill or decode.", "rc", "model"),
    _counter("medha_requests_total", "Requests that ended, by outcome.", "r", *REQUEST, "outcome"),
    _counter(
        "medha_prompt_tokens_total", "Prompt tokens of accepted requests.", "r", "model", "tenant"
    ),
    _counter("medha_output_tokens_total", "Tokens sent to clients.", "r", "model", "tenant"),
    _counter(
        "medha_tenant_requests_total",
        "Requests of a tenant that attained or missed their SLO, or were refused.",
        "r",
        "model",
        "tenant",
        "outcome",
    ),
    _counter("medha_slo_attained_total", "Requests that met their SLO.", "r", *REQUEST),
    _counter("medha_slo_missed_total", "Requests that missed their SLO.", "r", *REQUEST),
    _counter(
        "medha_requests_refused_total",
        "Requests refused, by reason.",
        "r",
        "model",
        "class",
        "reason",
    ),
    _counter(
        "medha_requests_relegated_total",
        "Requests accepted or kept without a promise.",
        "rc",
        "model",
        "class",
    ),
    _counter(
        "medha_scheduler_decided_total",
        "Requests that a scheduler admitted, by prompt length.",
        "c",
        "model",
        "length",
    ),
    _counter(
        "medha_scheduler_displaced_total",
        "Requests dropped from the promise set for others, once each, by prompt length.",
        "c",
        "model",
        "length",
    ),
    _counter(
        "medha_promises_total",
        "Promised TTFT deadlines: given, kept, broken.",
        "r",
        "model",
        "class",
        "outcome",
    ),
    _histogram(
        "medha_promise_margin_seconds",
        "Deadline minus first token of promised requests.",
        "r",
        MARGIN_S,
        "model",
        "class",
    ),
    _counter(
        "medha_requests_moved_total", "Requests resubmitted to another replica.", "r", "model"
    ),
    _gauge("medha_replicas", "Replicas that this router knows, by state.", "r", "model", "state"),
    _histogram("medha_batch_seconds", "Time of a batch per stage.", "c", BATCH_S, "model"),
    _histogram(
        "medha_batch_tokens", "Tokens of a batch: decode or prefill.", "c", TOKENS, "model", "kind"
    ),
    _histogram("medha_chunk_tokens", "Tokens of a prefill chunk.", "c", TOKENS, "model"),
    _histogram(
        "medha_batch_budget_ratio",
        "Predicted batch time over the longest that a batch may take.",
        "c",
        (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 1.0, 1.1, 1.5, 2.0),
        "model",
    ),
    _histogram(
        "medha_prediction_error_ratio", "Measured batch time over predicted.", "c", ERROR, "model"
    ),
    _gauge("medha_prediction_correction_ratio", "The predictor's online correction.", "c", "model"),
    _histogram("medha_scheduler_seconds", "Time to decide a batch.", "c", DECISION_S, "model"),
    _counter(
        "medha_preemptions_total",
        "Sequences that lost their pages and are recomputed.",
        "c",
        "model",
        "reason",
    ),
    _gauge(
        "medha_kv_pages",
        "KV pages by group and state: free, cached (free, with content of the "
        "prefix cache), used (reserved pages included).",
        "c",
        "model",
        "group",
        "state",
    ),
    _counter(
        "medha_prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", "c", "model"
    ),
    _counter(
        "medha_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache.",
        "c",
        "model",
    ),
    _gauge("medha_kvp_groups", "KVP groups by state.", "c", "model", "state"),
    _gauge("medha_kvp_wanted_groups", "KVP groups that should run.", "c", "model"),
    _gauge("medha_kvp_generation", "Generation of the KVP columns.", "c", "model"),
    _counter("medha_kv_transfer_bytes_total", "KV bytes moved between groups.", "c", "model"),
    _histogram("medha_kv_transfer_seconds", "Time of a move of KV pages.", "c", LATENCY_S, "model"),
    _counter(
        "medha_kv_transfer_failures_total",
        "Moves of KV pages that failed, by reason.",
        "c",
        "model",
        "reason",
    ),
    _gauge("medha_ranks", "Ranks of the KVP groups that exist; each has a device.", "c", "model"),
    _counter("medha_rank_restarts_total", "Lost ranks, to be restarted.", "c", "model"),
    _counter("medha_pod_restarts_total", "Restarts of a pod's programs.", "p", "program"),
    _counter(
        "medha_messages_rejected_total", "Messages from peers that did not decode.", "rc", "peer"
    ),
    _histogram("medha_operator_reconcile_seconds", "Time of one reconciliation.", "o", LATENCY_S),
    _counter("medha_operator_errors_total", "Reconciliations that failed, by kind.", "o", "kind"),
    _counter(
        "medha_operator_writes_total",
        "Writes to the API, by what they wrote and how.",
        "o",
        "kind",
        "verb",
        "code",
    ),
    _gauge("medha_operator_leading", "Leadership of this operator: 1 if it leads, else 0.", "o"),
    _gauge("medha_operator_queue_depth", "MedhaReplicas that wait for reconciliation.", "o"),
    _gauge("medha_operator_behind_seconds", "Time that the first of them has been due.", "o"),
    _gauge(
        "medha_replica_condition",
        "A MedhaReplica's condition: 1 true, 0 false.",
        "o",
        "namespace",
        "name",
        "condition",
    ),
    _gauge(
        "medha_desired_replicas", "Replicas that the autoscaler wants.", "o", "namespace", "name"
    ),
    _gauge(
        "medha_autoscaling_at_maximum",
        "Demand beyond maxReplicas: 1 if the autoscaler would add a replica, else 0.",
        "o",
        "namespace",
        "name",
    ),
    _counter(
        "medha_group_restarts_total",
        "KVP groups that failed and are restarted.",
        "o",
        "namespace",
        "name",
    ),
)

ALIASES: tuple[Metric, ...] = (
    _alias("medha_queue_requests", "vllm:num_requests_waiting"),
    _alias("medha_running_requests", "vllm:num_requests_running"),
    Metric(
        name="vllm:kv_cache_usage_perc",
        kind="gauge",
        exporters=("controller",),
        help="Used share of KV pages, 0 to 1.",
        labels=("model_name",),
        alias_of="medha_kv_pages",
    ),
    _alias("medha_request_ttft_seconds", "vllm:time_to_first_token_seconds"),
    _alias("medha_request_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
    _alias("medha_inter_token_seconds", "vllm:inter_token_latency_seconds"),
    _alias("medha_request_e2e_seconds", "vllm:e2e_request_latency_seconds"),
    _alias("medha_prompt_tokens_total", "vllm:prompt_tokens_total"),
    _alias("medha_output_tokens_total", "vllm:generation_tokens_total"),
    _alias("medha_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    _alias("medha_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
)

CATALOGUE: tuple[Metric, ...] = MEDHA + ALIASES


def exported_by(exporter: Exporter) -> tuple[Metric, ...]:
    """Return the metrics, aliases included, that a kind of process exports."""
    return tuple(metric for metric in CATALOGUE if exporter in metric.exporters)


def length_bucket(prompt_tokens: int) -> int:
    """Return the bucket of a prompt's length, from 0."""
    return bisect.bisect_left(LENGTH_EDGES, prompt_tokens)


@functools.lru_cache(4096)
def length_label(prompt_tokens: int) -> str:
    """Return the label of that bucket: its upper edge."""
    return LENGTH_LABELS[length_bucket(prompt_tokens)]


class MetricsSink(Protocol):
    """Destination of the measurements of one process.

    `name` is a metric of the catalogue; `labels` follow its order. A sink of one model adds the
    label `model` itself.
    """

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add `amount` to a counter."""
        ...

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        ...

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        ...


class CappedLabel:
    """Bounds the cardinality of a label: names beyond the first `max_names` become `other`."""

    def __init__(self, max_names: int = MAX_TENANTS) -> None:
        self._max_names = max_names
        self._names: set[str] = set()

    def label(self, name: str) -> str:
        if name not in self._names:
            if len(self._names) >= self._max_names:
                return OTHER
            self._names.add(name)
        return name
