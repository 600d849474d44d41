"""The catalogue of metrics keeps its own rules, and holds what the fleet promises to show."""

from __future__ import annotations

import re

import pytest

from medha.metrics import (
    ALIASES,
    CATALOGUE,
    LENGTH_EDGES,
    LENGTH_LABELS,
    MEDHA,
    OTHER,
    CappedLabel,
    Metric,
    length_label,
)

PROMISED = re.findall(
    r"\S+",
    """
    medha_request_ttft_seconds medha_request_tpot_seconds medha_inter_token_seconds
    medha_request_e2e_seconds medha_request_slack_ratio medha_queue_slack_ratio
    medha_queue_requests medha_queue_work_seconds medha_slo_attained_total medha_slo_missed_total
    medha_requests_refused_total medha_requests_relegated_total medha_promises_total
    medha_promise_margin_seconds medha_batch_seconds medha_batch_tokens medha_chunk_tokens
    medha_prediction_error_ratio medha_scheduler_seconds medha_kv_pages
    medha_prefix_cache_hits_total medha_prefix_cache_queries_total medha_kvp_groups
    medha_kv_transfer_bytes_total medha_kv_transfer_seconds medha_kv_transfer_failures_total
    medha_requests_moved_total medha_operator_reconcile_seconds medha_operator_errors_total
    medha_replica_condition vllm:num_requests_waiting vllm:num_requests_running
    vllm:kv_cache_usage_perc vllm:time_to_first_token_seconds
""",
)

# How many values a label can take at most; the product over a metric's labels bounds its series.
CARDINALITY = {
    "model": 8,
    "model_name": 8,
    "class": 8,
    "length": len(LENGTH_LABELS),
    "tenant": 65,
    "at": 2,
    "quantile": 2,
    "outcome": 6,
    "reason": 12,
    "state": 6,
    "kind": 8,
    "group": 64,
    "peer": 3,
    "namespace": 16,
    "name": 16,
    "condition": 12,
    "verb": 4,
    "code": 16,
    "program": 2,
    "slack": 8,
}
MAX_SERIES = 4000


@pytest.mark.parametrize("name", PROMISED)
def test_what_the_fleet_promises_to_show_is_in_the_catalogue(name: str) -> None:
    assert name in {metric.name for metric in CATALOGUE}


def test_no_two_metrics_share_a_name() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("metric", MEDHA, ids=lambda m: m.name)
def test_a_name_follows_the_rules_of_its_kind(metric: Metric) -> None:
    assert re.fullmatch(r"medha_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search(r"_(ms|milliseconds|kb|mb|percent|count|sum|bucket)\b", metric.name)
    if metric.kind == "histogram":
        assert metric.unit != ""


@pytest.mark.parametrize("metric", CATALOGUE, ids=lambda m: m.name)
def test_a_metric_is_explained_and_bounded(metric: Metric) -> None:
    assert metric.help.endswith(".") and metric.help[0].isupper()
    assert metric.exporters
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.buckets) == (metric.kind == "histogram")
    series = len(metric.buckets) + 3 if metric.buckets else 1
    combined = 1
    for label in metric.labels:
        combined *= CARDINALITY[label]
    assert combined <= MAX_SERIES and series <= 24


@pytest.mark.parametrize("metric", ALIASES, ids=lambda m: m.name)
def test_an_alias_repeats_a_metric_of_ours_under_the_other_label(metric: Metric) -> None:
    assert metric.name.startswith("vllm:")
    original = next(m for m in MEDHA if m.name == metric.alias_of)
    assert "model" not in metric.labels and "model_name" in metric.labels
    assert set(metric.exporters) <= set(original.exporters)


def test_a_length_falls_into_the_bucket_that_holds_it() -> None:
    assert [length_label(n) for n in (0, 1_024, 1_025, 131_072, 1_048_576, 1_048_577)] == [
        "1k",
        "1k",
        "8k",
        "128k",
        "1m",
        "1m+",
    ]
    assert [length_label(edge) for edge in LENGTH_EDGES] == list(LENGTH_LABELS[:-1])


def test_names_beyond_the_cap_become_other_and_known_ones_stay() -> None:
    cap = CappedLabel(2)
    assert [cap.label(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]
