"""Metrics of a controller: counters from zero, shares of the budget, work by slack, pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha.metrics import LENGTH_LABELS, exported_by
from medha.topology import Topology

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]

PAGE_TOKENS = 16
STATES = (("0", "free"), ("0", "cached"), ("0", "used"))


class RecordedMetrics:
    """Every measurement by name and labels, in order."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], list[float]]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        self.values.setdefault(name, {}).setdefault(labels, []).append(amount)

    set = observe = add

    def last(self, name: str, *labels: str) -> float:
        return self.values[name][labels][-1]


def test_failure_counters_are_exported_at_zero(make_replica: Make) -> None:
    recorded = RecordedMetrics()
    make_replica(metrics=recorded).run(2.0)
    for reason in ("offer", "fetch", "changed", "lease", "lost"):
        assert recorded.values["medha_kv_transfer_failures_total"][(reason,)] == [0.0]
    for length in LENGTH_LABELS:
        assert recorded.values["medha_scheduler_displaced_total"][(length,)] == [0.0]
    assert recorded.values["medha_rank_restarts_total"][()] == [0.0]
    assert recorded.values["medha_preemptions_total"][("group lost",)] == [0.0]


@pytest.mark.parametrize(
    "settings, longest_s",
    [({"max_batch_s": 0.05}, 0.05), ({"budget": "fixed", "fixed_s": 0.02}, 0.02)],
)
def test_a_full_batch_takes_its_whole_budget_and_none_takes_more(
    settings: dict[str, object], longest_s: float, make_replica: Make, make_submit: Submit
) -> None:
    recorded = RecordedMetrics()
    replica = make_replica(metrics=recorded, settings=settings)
    replica.submit_at(1.0, make_submit("one", 4000))
    replica.run(10.0)
    shares = recorded.values["medha_batch_budget_ratio"][()]
    assert 0.8 < max(shares) <= 1.0  # chunks grow by 32 tokens
    taken = recorded.values["medha_batch_seconds"][()]
    assert max(taken) == pytest.approx(max(shares) * longest_s, rel=0.05)


def test_batches_counted_in_tokens_have_no_time_budget(
    make_replica: Make, make_submit: Submit
) -> None:
    recorded = RecordedMetrics()
    replica = make_replica(metrics=recorded, settings={"budget": "tokens", "batch_tokens": 256})
    replica.submit_at(1.0, make_submit("one", 1000))
    replica.run(10.0)
    assert recorded.values["medha_batch_seconds"][()]
    assert "medha_batch_budget_ratio" not in recorded.values


def test_pending_work_is_exported_by_its_slack(make_replica: Make, make_submit: Submit) -> None:
    recorded = RecordedMetrics()
    replica = make_replica(metrics=recorded)
    replica.submit_at(1.0, make_submit("roomy", 4000, ttft_deadline_s=10.0))
    replica.run(1.2)
    bands = {
        labels[0]: values[-1]
        for labels, values in recorded.values["medha_pending_work_seconds"].items()
    }
    assert list(bands) == ["0", "0.25", "0.5", "1", "2", "4", "8", "+Inf"]
    assert sum(bands.values()) == pytest.approx(recorded.last("medha_queue_work_seconds"))
    assert 0.0 < bands["+Inf"] == sum(bands.values())
    replica.run(10.0)
    assert (
        sum(values[-1] for values in recorded.values["medha_pending_work_seconds"].values()) == 0.0
    )


def test_groups_that_do_not_run_have_no_pages(make_replica: Make) -> None:
    recorded = RecordedMetrics()
    topology = Topology(kvp_min=1, kvp_max=3)
    make_replica(metrics=recorded, topology=topology, pages=100).run(2.0)
    assert recorded.last("medha_kvp_wanted_groups") == recorded.last("medha_ranks") == 1
    assert recorded.last("medha_kv_pages", "0", "free") == 100.0
    for group in ("1", "2"):
        assert recorded.last("medha_kv_pages", group, "free") == 0.0
        assert recorded.last("medha_kv_pages", group, "cached") == 0.0
        assert recorded.last("medha_kv_pages", group, "used") == 0.0


def test_pages_are_used_then_cached_and_the_rest_is_free(
    make_replica: Make, make_submit: Submit
) -> None:
    recorded = RecordedMetrics()
    replica = make_replica(metrics=recorded, pages=100)
    names = b"".join(bytes([number]) * 16 for number in range(1000 // PAGE_TOKENS))
    replica.submit_at(1.0, make_submit("long", 1000, outputs=2, hashes=names))
    replica.run(20.0)
    cached = len(names) // 16
    assert [
        recorded.last("medha_kv_pages", "0", state) for state in ("free", "cached", "used")
    ] == [
        100.0 - cached,
        cached,
        0.0,
    ]
    held = [
        [values[sample] for values in map(recorded.values["medha_kv_pages"].get, STATES) if values]
        for sample in range(len(recorded.values["medha_kv_pages"]["0", "used"]))
    ]
    assert all(sum(pages) == 100.0 for pages in held)
    assert max(used for _, _, used in held) >= cached


def test_every_metric_of_a_controller_is_in_the_catalogue_with_its_labels(
    make_replica: Make, make_submit: Submit
) -> None:
    recorded = RecordedMetrics()
    replica = make_replica(metrics=recorded)
    replica.submit_at(1.0, make_submit("one", 100))
    replica.run(5.0)
    known = {metric.name: len(metric.labels) - 1 for metric in exported_by("controller")}
    labels = {
        name: {len(values) for values in by_labels} for name, by_labels in recorded.values.items()
    }
    assert labels == {name: {known[name]} for name in labels}
