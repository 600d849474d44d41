"""Admission: promises that fit, refusals with the earliest time, and fair shares."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from medha.errors import Refusal
from medha.fleet.admission import (
    AdmissionDecision,
    TenantUsage,
    admit,
    attainable_tpot_s,
    least_tpot_ms,
    retry_after_s,
)
from medha.fleet.placement import PendingRequest, ReplicaEstimate
from medha.messages import Load
from medha.model import ModelShape
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.topology import Topology

SHAPE = ModelShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256
)
STRICT = SloClass(name="default")
SOFT = SloClass(name="batch", when_infeasible="relegate", slo=Slo(ttft_floor_s=5.0))


def estimate(name: str = "r0", **load: object) -> ReplicaEstimate:
    predictor = Predictor(A100, SHAPE, Topology(tp=8))
    replica = ReplicaEstimate(name, predictor, max_context_tokens=2_000_000, max_batch_s=0.0)
    full: dict[str, object] = {"free_pages": (20_000,), "total_pages": (20_000,), **load}
    replica.update(Load(**full), 0.0)  # type: ignore[arg-type]
    return replica


def ask(
    estimates: Sequence[ReplicaEstimate],
    due_s: float = 2.0,
    tokens: int = 4000,
    slo_class: SloClass = STRICT,
    usage: TenantUsage | None = None,
    tenant: str = "",
) -> AdmissionDecision:
    request = PendingRequest(
        id="n",
        prompt_tokens=tokens,
        max_output_tokens=10,
        due_s=due_s,
        tenant=tenant,
        slo_class=slo_class.name,
    )
    return admit(request, estimates, {}, slo_class, usage or TenantUsage((STRICT, SOFT)), now=0.0)


def test_what_fits_is_promised() -> None:
    decision = ask([estimate()])
    assert decision.promised and decision.option.replica == "r0"


def test_a_deadline_that_cannot_be_met_is_refused_with_the_earliest_that_can() -> None:
    busy = estimate(margins=((1.0, 0.0), (3.0, 0.01)))
    with pytest.raises(Refusal, match="deadline") as refused:
        ask([busy])
    assert refused.value.code == "deadline_infeasible"
    earliest = refused.value.earliest_ttft_s
    assert earliest is not None and earliest > 2.0
    assert ask([busy], due_s=earliest + 0.001).promised


def test_a_class_that_relegates_takes_it_without_a_promise() -> None:
    busy = estimate(margins=((1.0, 0.0), (3.0, 0.01)))
    assert not ask([busy], slo_class=SOFT).promised


def test_what_can_never_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(Refusal, match=r"need 5000010 tokens, at most 1280000") as refused:
        ask([estimate()], tokens=5_000_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(Refusal, match="tokens"):  # relegating does not help
        ask([estimate()], tokens=5_000_000, slo_class=SOFT)


def test_without_a_replica_the_client_is_told_to_retry() -> None:
    for none in ([], [ReplicaEstimate("s", estimate().predictor, 1000)]):
        with pytest.raises(Refusal) as refused:
            ask(none)
        assert refused.value.code == "no_replica"
        assert refused.value.retry_after_s


def test_full_pages_are_an_overload_with_a_time_to_retry() -> None:
    full = estimate(free_pages=(3,), pending_s=12.3, drain_s_per_s=2.0)
    with pytest.raises(Refusal) as refused:
        ask([full])
    assert refused.value.code == "overloaded"
    assert refused.value.retry_after_s == 7.0  # ceil(12.3 / 2)


@pytest.mark.parametrize(("pending", "seconds"), [(0.0, 1.0), (4.2, 5.0), (900.0, 30.0)])
def test_retry_after_is_whole_seconds_between_one_and_thirty(
    pending: float, seconds: float
) -> None:
    assert retry_after_s([estimate(pending_s=pending), estimate(pending_s=2000.0)]) == seconds


def test_decodes_that_would_miss_their_tpot_refuse_a_request() -> None:
    slow = estimate(predicted_tpot_s=0.05, decoding=100)
    with pytest.raises(Refusal, match="output token") as refused:
        ask([slow])
    assert refused.value.code == "overloaded"
    assert ask([slow, estimate("r1")]).option.replica == "r1"


def ask_for_tpot(tpot_s: float, slo_class: SloClass = STRICT) -> AdmissionDecision:
    request = PendingRequest(
        id="n", prompt_tokens=300_000, max_output_tokens=10, due_s=600.0, tpot_s=tpot_s
    )
    return admit(request, [estimate()], {}, slo_class, TenantUsage((STRICT, SOFT)), now=0.0)


def test_a_tpot_below_that_of_an_idle_replica_is_refused_with_the_least_that_is_accepted() -> None:
    with pytest.raises(Refusal, match="x-medha-slo-tpot-ms is 1: after a prompt of 300000") as no:
        ask_for_tpot(0.001)
    least_s = no.value.least_tpot_s
    assert no.value.code == "tpot_infeasible" and least_s == estimate().idle_tpot_s(300_000)
    assert f"at least {least_tpot_ms(least_s):g} ms" in str(no.value)
    with pytest.raises(Refusal):  # it would shorten every batch without a promise, too
        ask_for_tpot(0.99 * least_s, SOFT)
    assert ask_for_tpot(least_tpot_ms(least_s) / 1e3).promised


def test_the_tpot_of_a_class_grows_with_prompts_too_long_for_it() -> None:
    idle_s = estimate().idle_tpot_s(1_000_000)
    assert attainable_tpot_s(2 * idle_s, idle_s) == 2 * idle_s
    assert ask_for_tpot(attainable_tpot_s(1e-4, idle_s)).promised


def fits_down_to(usage: TenantUsage, slo_class: SloClass, tenant: str = "") -> float:
    """Shortest deadline still promised on an idle replica."""
    low, high = 0.0, 5.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        try:
            promised = ask([estimate()], middle, 60_000, slo_class, usage, tenant).promised
        except Refusal:
            promised = False
        low, high = (low, middle) if promised else (middle, high)
    return high


def test_a_reserved_share_is_kept_free_for_a_class_that_does_not_use_it() -> None:
    gold = SloClass(name="gold", reserved=0.5)
    usage = TenantUsage((STRICT, gold))
    usage.add("default", "", 10.0, 0.0)
    assert fits_down_to(usage, STRICT) == pytest.approx(2 * fits_down_to(usage, gold), rel=0.02)
    usage.add("gold", "", 10.0, 0.0)  # gold uses its half: nothing is kept back
    assert fits_down_to(usage, STRICT) == pytest.approx(fits_down_to(usage, gold), rel=0.02)


def test_a_tenant_that_had_more_than_its_share_must_fit_with_more_room() -> None:
    usage = TenantUsage((STRICT,))
    assert usage.inflation("default", "a", 0.0) == 1.0
    usage.add("default", "a", 30.0, 0.0)
    assert usage.inflation("default", "a", 0.0) == 1.0  # alone: the fleet is its own
    usage.add("default", "b", 10.0, 0.0)
    assert usage.inflation("default", "a", 0.0) == pytest.approx(1.5**0.5)
    assert usage.inflation("default", "b", 0.0) == 1.0
    assert fits_down_to(usage, STRICT, "a") > fits_down_to(usage, STRICT, "b")


def test_fairness_counts_work_lately_and_forgets() -> None:
    usage = TenantUsage((STRICT,))
    usage.add("default", "a", 30.0, 0.0)
    usage.add("default", "b", 3.0, 600.0)
    assert usage.inflation("default", "a", 600.0) == 1.0
    assert usage.inflation("default", "b", 600.0) > 1.0


def test_a_class_of_small_weight_is_inflated_before_one_of_large_weight() -> None:
    usage = TenantUsage((SloClass(name="default", weight=3.0), SloClass(name="batch", weight=1.0)))
    usage.add("default", "", 10.0, 0.0)
    usage.add("batch", "", 10.0, 0.0)
    assert usage.inflation("batch", "", 0.0) == pytest.approx(2.0**0.5)
    assert usage.inflation("default", "", 0.0) == 1.0


def test_the_book_of_tenants_is_bounded() -> None:
    usage = TenantUsage((STRICT,))
    for index in range(5000):
        usage.add("default", f"t{index}", 1.0 + index, 0.0)
    assert len(usage._spent) <= 4096
    assert usage.inflation("default", "t4999", 0.0) > 1.0
