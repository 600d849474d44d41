"""What a controller measures: counters from zero, shares of the budget, work by slack, pages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from medha import messages as m
from medha.metrics import LENGTH_LABELS, exported_by
from medha.topology import Topology
from medha_worker.testing.virtual_replica import VirtualReplica

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]

PAGE_TOKENS = 16
STATES = (("0", "free"), ("0", "cached"), ("0", "used"))


class Seen:
    """Keeps every measurement by name and labels, in order."""

    def __init__(self) -> None:
        self.values: dict[str, dict[tuple[str, ...], list[float]]] = {}

    def add(self, name: str, amount: float, *labels: str) -> None:
        self.values.setdefault(name, {}).setdefault(labels, []).append(amount)

    set = observe = add

    def last(self, name: str, *labels: str) -> float:
        return self.values[name][labels][-1]


def test_counters_of_what_may_go_wrong_are_shown_before_it_does(make_replica: Make) -> None:
    seen = Seen()
    make_replica(meters=seen).run(2.0)
    for reason in ("offer", "fetch", "changed", "lease", "lost"):
        assert seen.values["medha_kv_transfer_failures_total"][(reason,)] == [0.0]
    for length in LENGTH_LABELS:
        assert seen.values["medha_scheduler_displaced_total"][(length,)] == [0.0]
    assert seen.values["medha_rank_restarts_total"][()] == [0.0]
    assert seen.values["medha_preemptions_total"][("group lost",)] == [0.0]


@pytest.mark.parametrize(
    "settings, longest_s",
    [({"max_batch_s": 0.05}, 0.05), ({"budget": "fixed", "fixed_s": 0.02}, 0.02)],
)
def test_a_full_batch_takes_its_whole_budget_and_none_takes_more(
    settings: dict[str, object], longest_s: float, make_replica: Make, make_submit: Submit
) -> None:
    seen = Seen()
    replica = make_replica(meters=seen, settings=settings)
    replica.submit_at(1.0, make_submit("one", 4000))
    replica.run(10.0)
    shares = seen.values["medha_batch_budget_ratio"][()]
    assert 0.8 < max(shares) <= 1.0  # chunks grow by 32 tokens
    taken = seen.values["medha_batch_seconds"][()]
    assert max(taken) == pytest.approx(max(shares) * longest_s, rel=0.05)


def test_batches_counted_in_tokens_have_no_time_budget(
    make_replica: Make, make_submit: Submit
) -> None:
    seen = Seen()
    replica = make_replica(meters=seen, settings={"budget": "tokens", "batch_tokens": 256})
    replica.submit_at(1.0, make_submit("one", 1000))
    replica.run(10.0)
    assert seen.values["medha_batch_seconds"][()]
    assert "medha_batch_budget_ratio" not in seen.values


def test_pending_work_is_told_by_the_slack_that_it_has(
    make_replica: Make, make_submit: Submit
) -> None:
    seen = Seen()
    replica = make_replica(meters=seen)
    replica.submit_at(1.0, make_submit("roomy", 4000, ttft_deadline_s=10.0))
    replica.run(1.2)
    bands = {labels[0]: each[-1] for labels, each in
             seen.values["medha_pending_work_seconds"].items()}  # fmt: skip
    assert list(bands) == ["0", "0.25", "0.5", "1", "2", "4", "8", "+Inf"]
    assert sum(bands.values()) == pytest.approx(seen.last("medha_queue_work_seconds"))
    assert 0.0 < bands["+Inf"] == sum(bands.values())
    replica.run(10.0)
    assert sum(each[-1] for each in seen.values["medha_pending_work_seconds"].values()) == 0.0


def test_pages_of_groups_that_do_not_run_are_none(make_replica: Make) -> None:
    seen = Seen()
    topology = Topology(kvp_min=1, kvp_max=3)
    make_replica(meters=seen, topology=topology, pages=100).run(2.0)
    assert seen.last("medha_kvp_wanted_groups") == 1
    assert seen.last("medha_kv_pages", "0", "free") == 100.0
    for group in ("1", "2"):
        assert seen.last("medha_kv_pages", group, "free") == 0.0
        assert seen.last("medha_kv_pages", group, "cached") == 0.0
        assert seen.last("medha_kv_pages", group, "used") == 0.0


def test_pages_are_used_then_cached_and_the_rest_is_free(
    make_replica: Make, make_submit: Submit
) -> None:
    seen = Seen()
    replica = make_replica(meters=seen, pages=100)
    names = b"".join(bytes([number]) * 16 for number in range(1000 // PAGE_TOKENS))
    replica.submit_at(1.0, make_submit("long", 1000, outputs=2, hashes=names))
    replica.run(20.0)
    cached = len(names) // 16
    assert [seen.last("medha_kv_pages", "0", state) for state in ("free", "cached", "used")] == [
        100.0 - cached, cached, 0.0
    ]  # fmt: skip
    held = [
        [values[each] for values in map(seen.values["medha_kv_pages"].get, STATES) if values]
        for each in range(len(seen.values["medha_kv_pages"]["0", "used"]))
    ]
    assert all(sum(each) == 100.0 for each in held)
    assert max(used for _, _, used in held) >= cached


def test_what_a_controller_measures_is_in_the_catalogue_with_as_many_labels(
    make_replica: Make, make_submit: Submit
) -> None:
    seen = Seen()
    replica = make_replica(meters=seen)
    replica.submit_at(1.0, make_submit("one", 100))
    replica.run(5.0)
    known = {each.name: len(each.labels) - 1 for each in exported_by("controller")}
    told = {name: {len(labels) for labels in of} for name, of in seen.values.items()}
    assert told == {name: {known[name]} for name in told}
