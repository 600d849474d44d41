"""Admission: promises that fit, refusals with the earliest time, and fair shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import Refusal
from medha.fleet.admission import (
    AdmissionDecision,
    TenantUsage,
    admit,
    attainable_tpot_s,
    least_tpot_ms,
    retry_after_s,
)
from medha.fleet.offers import PendingRequest
from medha.fleet.replica_estimate import ReplicaEstimate
from medha.messages import Load
from medha.predictor import Predictor
from medha.profile import A100
from medha.request import Slo, SloClass
from medha.sim.scenario import LLAMA_3_8B
from medha.tenants import (
    ACTIVE_S,
    MEMORY_S,
    SHORT_HALF_LIFE_S,
    SHORT_MEMORY_S,
    TenantWork,
    is_short,
)
from medha.topology import Topology

STRICT = SloClass(name="default")
SOFT = SloClass(name="batch", when_infeasible="relegate", slo=Slo(ttft_floor_s=5.0))


def estimate(name: str = "r0", spp: int = 1, **load: object) -> ReplicaEstimate:
    predictor = Predictor(A100, LLAMA_3_8B, Topology(tp=8, spp=spp))
    replica = ReplicaEstimate(name, predictor, max_context_tokens=2_000_000, max_batch_s=0.0)
    pages = (1_000_000,) if name.startswith("large") else (20_000,)
    full: dict[str, object] = {"free_pages": pages, "total_pages": pages, **load}
    replica.update(Load(**full), 0.0)  # type: ignore[arg-type]
    return replica


def ask(
    estimates: Sequence[ReplicaEstimate],
    due_s: float = 2.0,
    tokens: int = 4000,
    slo_class: SloClass = STRICT,
    usage: TenantUsage | None = None,
    tenant: str = "",
    waiting_s: float = 0.0,
    others_wait: bool = False,
) -> AdmissionDecision:
    request = PendingRequest(
        id="n",
        prompt_tokens=tokens,
        max_output_tokens=10,
        due_s=due_s,
        tenant=tenant,
        slo_class=slo_class.name,
    )
    usage = usage or TenantUsage((STRICT, SOFT))
    return admit(request, estimates, {}, slo_class, usage, 0.0, 0.0, waiting_s, others_wait)


def test_what_fits_is_promised() -> None:
    decision = ask([estimate()])
    assert decision.promised and decision.option.replica == "r0"


def test_a_deadline_that_cannot_be_met_is_refused_with_the_earliest_that_can() -> None:
    busy = estimate(margins=(((1.0, 0.0), (3.0, 0.01)),))
    with pytest.raises(Refusal, match="deadline") as refused:
        ask([busy])
    assert refused.value.code == "deadline_infeasible"
    earliest = refused.value.earliest_ttft_s
    assert earliest is not None and earliest > 2.0
    assert ask([busy], due_s=earliest + 0.001).promised


def test_a_class_that_relegates_takes_it_without_a_promise() -> None:
    busy = estimate(margins=(((1.0, 0.0), (3.0, 0.01)),))
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


def ask_for_tpot(tpot_s: float, slo_class: SloClass = STRICT, stages: int = 1) -> AdmissionDecision:
    request = PendingRequest(
        id="n", prompt_tokens=300_000, max_output_tokens=10, due_s=600.0, tpot_s=tpot_s
    )
    replica = estimate(spp=stages)
    return admit(request, [replica], {}, slo_class, TenantUsage((STRICT, SOFT)), now=0.0)


@pytest.mark.parametrize("stages", [1, 4])
def test_a_tpot_that_no_replica_keeps_is_refused_with_the_least_that_is_accepted(
    stages: int,
) -> None:
    """Of a token at that depth, or of four batches of at least 10 ms, one in each stage."""
    # A class that relegates accepts, without a promise, what an idle replica gives.
    decode_s = estimate(spp=stages).predictor.batch_s([(1, 300_000, True)])
    expected_s = stages * max(decode_s, 0.01)
    with pytest.raises(Refusal, match="x-medha-slo-tpot-ms is 1: after a prompt of 300000") as no:
        ask_for_tpot(0.001, stages=stages)
    least_s = no.value.least_tpot_s
    assert no.value.code == "tpot_infeasible"
    assert least_s is not None and least_s == pytest.approx(expected_s)
    assert f"at least {least_tpot_ms(least_s):g} ms" in str(no.value)
    idle_s = estimate(spp=stages).least_tpot_s(300_000, idle=True)
    assert idle_s == pytest.approx(stages * decode_s) and idle_s <= least_s
    if idle_s < least_s:
        assert not ask_for_tpot(max(idle_s, 0.99 * least_s), SOFT, stages).promised
    with pytest.raises(Refusal):
        ask_for_tpot(0.99 * idle_s, SOFT, stages)
    assert ask_for_tpot(least_tpot_ms(least_s) / 1e3, stages=stages).promised


def test_a_tpot_that_promises_do_not_bear_is_refused_with_the_least_that_is_accepted() -> None:
    """Batches of 20 ms would make the document that is due in 20 s too late."""

    def ask_beside(margin_s: float, tpot_s: float, slo_class: SloClass) -> AdmissionDecision:
        layout = Topology(tp=8)
        replica = ReplicaEstimate("r0", Predictor(A100, LLAMA_3_8B, layout), 2_000_000)
        load = Load(
            free_pages=(20_000,),
            total_pages=(20_000,),
            margins=(((20.0, margin_s),),),
            budget_s=0.0285,
            decode_capacity_s=0.0196,
            decode_room_s=0.0196,
        )
        replica.update(load, 0.0)
        chat = PendingRequest(
            id="n", prompt_tokens=1000, max_output_tokens=100, due_s=0.5, tpot_s=tpot_s
        )
        return admit(chat, [replica], {}, slo_class, TenantUsage((STRICT, SOFT)), now=0.0)

    assert ask_beside(19.0, 0.02, STRICT).promised
    with pytest.raises(Refusal, match="would be 30 ms, target 20 ms") as no:
        ask_beside(2.0, 0.02, STRICT)
    assert no.value.code == "overloaded" and no.value.least_tpot_s is not None
    assert ask_beside(2.0, no.value.least_tpot_s, STRICT).promised
    assert not ask_beside(2.0, 0.02, SOFT).promised


def test_a_tpot_that_running_decodes_leave_no_time_for_is_refused() -> None:
    """The decodes take 19.4 ms of each batch, and all are in flight as the Load is reported."""
    replica = ReplicaEstimate("r0", Predictor(A100, LLAMA_3_8B, Topology(tp=1)), 2_000_000)
    load = Load(
        free_pages=(20_000,),
        total_pages=(20_000,),
        margins=((),),
        budget_s=0.0475,
        decode_capacity_s=0.0346,
        decode_room_s=0.0152,
        decoding=1,
        predicted_tpot_s=0.0,
    )
    replica.update(load, 0.0)

    def ask(tpot_s: float) -> AdmissionDecision:
        chat = PendingRequest(
            id="n", prompt_tokens=18_000, max_output_tokens=1000, due_s=9.0, tpot_s=tpot_s
        )
        return admit(chat, [replica], {}, STRICT, TenantUsage((STRICT,)), now=0.0)

    with pytest.raises(Refusal, match="time per output token would be") as no:
        ask(0.016)
    least_s = no.value.least_tpot_s
    assert no.value.code == "overloaded" and least_s is not None
    batch_s = 0.0194 + replica.predictor.batch_s([(1, 18_000, True)])
    assert least_s == pytest.approx(batch_s, rel=0.03)
    assert ask(least_tpot_ms(least_s) / 1e3).promised


def test_a_tpot_that_other_groups_do_not_bear_is_refused_with_one_that_is_accepted() -> None:
    """Another deadline would not help: batches of the class's TPOT make a document late."""
    layout = Topology(tp=8, kvp_min=2, kvp_max=2)
    replica = ReplicaEstimate("r0", Predictor(A100, LLAMA_3_8B, layout), 2_000_000)
    load = Load(
        free_pages=(20_000, 20_000),
        total_pages=(20_000, 20_000),
        margins=((), ((20.0, 0.5),)),
        lead_s=(0.0, 0.0),
        budget_s=0.0475,
        decode_capacity_s=0.03,
        decode_room_s=0.03,
    )
    replica.update(load, 0.0)

    def ask(tpot_s: float, class_tpot_s: float) -> AdmissionDecision:
        slo_class = SloClass(name="default", slo=Slo(tpot_s=class_tpot_s))
        chat = PendingRequest(
            id="n", prompt_tokens=1000, max_output_tokens=100, due_s=5.0, tpot_s=tpot_s
        )
        return admit(chat, [replica], {}, slo_class, TenantUsage((slo_class,)), now=0.0)

    for tpot_s, class_tpot_s in ((0.03, 0.03), (0.02, 0.03)):
        with pytest.raises(Refusal, match="would be 50 ms") as no:
            ask(tpot_s, class_tpot_s)
        assert no.value.code == "overloaded" and no.value.least_tpot_s is not None
        assert ask(least_tpot_ms(no.value.least_tpot_s) / 1e3, class_tpot_s).promised
    with pytest.raises(Refusal, match="would be 50 ms"):
        ask(0.02, 0.05)  # the class's own target holds
    assert ask(0.05, 0.05).promised


def test_the_tpot_of_a_class_grows_with_prompts_too_long_for_it() -> None:
    least_s = estimate().least_tpot_s(1_000_000)
    assert attainable_tpot_s(2 * least_s, least_s) == 2 * least_s
    assert ask_for_tpot(attainable_tpot_s(1e-4, least_s)).promised


def fits_down_to(usage: TenantUsage, slo_class: SloClass) -> float:
    """Shortest deadline still promised on an idle replica."""
    low, high = 0.0, 5.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        try:
            promised = ask([estimate()], middle, 60_000, slo_class, usage).promised
        except Refusal:
            promised = False
        low, high = (low, middle) if promised else (middle, high)
    return high


def test_a_reserved_share_is_kept_free_for_a_class_that_does_not_use_it() -> None:
    gold = SloClass(name="gold", reserved=0.5)
    usage = TenantUsage((STRICT, gold))
    usage.add("default", 10.0, 0.0)
    assert fits_down_to(usage, STRICT) == pytest.approx(2 * fits_down_to(usage, gold), rel=0.02)
    usage.add("gold", 10.0, 0.0)  # gold uses its half: nothing is kept back
    assert fits_down_to(usage, STRICT) == pytest.approx(fits_down_to(usage, gold), rel=0.02)


def test_a_class_of_small_weight_is_inflated_before_one_of_large_weight() -> None:
    usage = TenantUsage((SloClass(name="default", weight=3.0), SloClass(name="batch", weight=1.0)))
    usage.add("default", 10.0, 0.0)
    usage.add("batch", 10.0, 0.0)
    assert usage.inflation("batch", 0.0) == pytest.approx(2.0**0.5)
    assert usage.inflation("default", 0.0) == 1.0
    usage.add("default", 10.0, 600.0)  # what batch was given is forgotten
    assert usage.inflation("batch", 600.0) == 1.0


# --- tenants --------------------------------------------------------------------------------------


def promised_s(
    tenant: str,
    prompts: Iterable[int],
    *,
    within_s: float = 900.0,
    usage: TenantUsage | None = None,
    replicas: Sequence[ReplicaEstimate] = (),
    slo_class: SloClass = SOFT,
) -> float:
    """Seconds of W that a tenant is promised, for prompts of such lengths at once."""
    replicas, usage = replicas or [estimate("large")], usage or TenantUsage((STRICT, SOFT))
    total = 0.0
    for index, tokens in enumerate(prompts):
        request = PendingRequest(
            id=f"{tenant}{index}", prompt_tokens=tokens, due_s=within_s, tenant=tenant
        )
        decision = admit(request, replicas, {}, slo_class, usage, now=0.0)
        if decision.promised:
            by_name = {replica.name: replica for replica in replicas}
            by_name[decision.option.replica].hold(request, decision.option, 0.0, True)
            total += decision.option.work_s
    return total


ROOM_S = 0.5 * MEMORY_S
DOCUMENT, DOCUMENT_S = 150_000, 5.5


def test_a_tenant_alone_is_promised_half_of_what_is_remembered_and_leaves_the_rest() -> None:
    replicas, usage = [estimate("large")], TenantUsage((SOFT,))
    hog_s = promised_s("hog", [DOCUMENT] * 60, usage=usage, replicas=replicas)
    assert ROOM_S - DOCUMENT_S < hog_s <= ROOM_S
    new_s = promised_s("new", [DOCUMENT] * 60, usage=usage, replicas=replicas)
    assert 2 / 3 * ROOM_S - DOCUMENT_S < new_s <= 2 / 3 * ROOM_S  # a third of all
    third_s = promised_s("third", [DOCUMENT] * 60, usage=usage, replicas=replicas)
    assert ROOM_S / 2 - DOCUMENT_S < third_s <= ROOM_S / 2


def test_without_api_keys_there_is_no_share() -> None:
    assert promised_s("", [DOCUMENT] * 60) > 2 * ROOM_S


@pytest.mark.parametrize("within_s", [30.0, 300.0, 3000.0])
def test_neither_a_deadline_nor_more_and_smaller_prompts_give_a_tenant_more(
    within_s: float,
) -> None:
    most_s = 1.0 + 1e-9
    for tokens, count in ((400_000, 20), (DOCUMENT, 80), (30_000, 600)):
        assert promised_s("hog", [tokens] * count, within_s=within_s) <= most_s * ROOM_S


def test_a_prompt_of_any_length_has_its_turn_once_its_tenant_used_little() -> None:
    usage, giant = TenantUsage((SOFT,)), 1_900_000
    used = estimate("large", promised_work=(TenantWork("a", 0.6 * ROOM_S, 0.0),))
    little = estimate("large", promised_work=(TenantWork("a", 0.4 * ROOM_S, 0.0),))
    assert promised_s("a", [giant], replicas=[used], usage=usage) == 0.0
    assert promised_s("a", [giant], replicas=[little], usage=usage) > ROOM_S


def test_what_other_routers_promised_counts_and_is_not_counted_twice() -> None:
    replica, usage = estimate("large"), TenantUsage((SOFT,))
    first_s = promised_s("a", [DOCUMENT], usage=usage, replicas=[replica])
    assert replica.promised_work_s("a", short=False) == pytest.approx(first_s)
    replica.accepted("a0")
    counted = msgspec.structs.replace(replica.load, promised_work=(TenantWork("a", first_s, 0.0),))
    replica.update(counted, 0.0)  # the Load counts it now
    assert replica.promised_work_s("a", short=False) == pytest.approx(first_s)
    full = msgspec.structs.replace(replica.load, promised_work=(TenantWork("a", ROOM_S, 0.0),))
    replica.update(full, 0.0)  # through another router
    assert promised_s("a", [DOCUMENT], usage=usage, replicas=[replica]) == 0.0
    assert promised_s("b", [DOCUMENT], usage=usage, replicas=[replica]) > 0.0


def test_more_replicas_and_a_larger_weight_give_a_larger_share() -> None:
    replicas = [estimate("large0"), estimate("large1")]
    hog_s = promised_s("hog", [DOCUMENT] * 60, replicas=replicas)
    assert 2 * ROOM_S - DOCUMENT_S < hog_s <= 2 * ROOM_S
    heavy, usage = msgspec.structs.replace(SOFT, weight=3.0), TenantUsage((SOFT,))
    usage.ask("heavy", 3.0, 0.0)
    light_s = promised_s("light", [DOCUMENT] * 60, usage=usage)
    assert ROOM_S / 3 - DOCUMENT_S < light_s <= ROOM_S / 3  # 1 of 3 + 1, times 2/3
    heavy_s = promised_s("heavy", [DOCUMENT] * 60, usage=usage, slo_class=heavy)
    assert ROOM_S - DOCUMENT_S < heavy_s <= ROOM_S  # 3 of 3 + 1, times 2/3: thrice as much


def test_a_tenant_stops_to_count_five_minutes_after_its_last_request() -> None:
    usage, replicas = (
        TenantUsage((SOFT,)),
        [estimate("large", promised_work=(TenantWork("a", 0.9 * ROOM_S, 0.9 * ROOM_S),))],
    )
    for tenant in ("b", "c"):
        usage.ask(tenant, 1.0, 0.0)
    usage.ask("a", 1.0, ACTIVE_S - 1.0)
    assert usage.wait_s("a", 2.0, replicas) > 0.0
    usage.ask("a", 1.0, ACTIVE_S)
    assert usage.wait_s("a", 2.0, replicas) == 0.0


def test_beyond_its_share_a_tenant_is_served_without_a_promise_unless_it_would_be_late() -> None:
    usage, used = (
        TenantUsage((STRICT,)),
        estimate("large", promised_work=(TenantWork("a", ROOM_S, ROOM_S),)),
    )
    assert not ask([used], usage=usage, tenant="a").promised
    assert not ask([used], usage=usage, tenant="a", waiting_s=0.1).promised
    with pytest.raises(Refusal, match="tenant a was promised its share") as refused:
        ask([used], usage=usage, tenant="a", waiting_s=1000.0)
    assert refused.value.code == "rate_limit_exceeded"
    wait_s = refused.value.retry_after_s
    assert wait_s is not None and wait_s > 0.0
    after = ROOM_S * 0.5 ** (1.001 * wait_s / SHORT_HALF_LIFE_S)
    assert ask(
        [estimate("large", promised_work=(TenantWork("a", after, after),))], usage=usage, tenant="a"
    ).promised


def test_what_waits_beyond_a_share_is_served_in_the_time_that_promises_leave() -> None:
    def refused(part: float, replicas: int, others_wait: bool = False) -> bool:
        """Ask behind 0.3 s of work while that part of the time is promised; due in 2 s."""
        usage, used = TenantUsage((STRICT,)), TenantWork("a", 0.0, part * SHORT_MEMORY_S)
        usage.ask("other", 1.0, 0.0)
        loads = [estimate(f"large{index}", promised_work=(used,)) for index in range(replicas)]
        try:
            decision = ask(loads, usage=usage, tenant="a", waiting_s=0.3, others_wait=others_wait)
        except Refusal:
            return True
        assert decision.beyond_share
        return False

    assert not refused(0.75, 1)
    assert refused(0.9, 1) and not refused(0.9, 2)
    assert not refused(0.9, 1, others_wait=True)  # weights order what waits


def test_with_thousands_of_tenants_each_has_a_moment() -> None:
    usage = TenantUsage((SOFT,))
    for index in range(4096):
        usage.ask(f"t{index}", 1.0, 0.0)
    used = estimate("large", promised_work=(TenantWork("t7", 0.15, 0.15),))
    assert promised_s("t7", [4000], usage=usage, replicas=[used]) > 0.0
    full = estimate("large", promised_work=(TenantWork("t7", 1.0, 0.25),))
    assert promised_s("t7", [4000], usage=usage, replicas=[full]) == 0.0


def test_chance_takes_no_promise_from_a_tenant_below_its_share() -> None:
    def promised(used: float, recent: float, waiting_s: float = 0.0) -> bool:
        """Ask for a short prompt; `used` and `recent` are parts of the tenant's rooms."""
        usage = TenantUsage((STRICT,))
        usage.ask("other", 1.0, 0.0)
        share = 1.0 / 3.0
        work = TenantWork("a", used * share * MEMORY_S, recent * share * SHORT_MEMORY_S)
        replica = estimate("large", promised_work=(work,))
        return ask([replica], usage=usage, tenant="a", waiting_s=waiting_s).promised

    assert promised(0.5, 0.9) and promised(0.5, 1.4)
    assert not promised(0.5, 1.6) and not promised(0.1, 2.0)
    assert promised(1.0, 0.9) and not promised(1.0, 1.1)  # it has its share
    assert promised(0.5, 0.9, waiting_s=0.1) and not promised(0.5, 1.1, waiting_s=0.1)


def test_a_document_does_not_use_up_the_share_of_chats() -> None:
    used = estimate("large", promised_work=(TenantWork("a", 9.0 * ROOM_S, 0.5),))
    usage = TenantUsage((STRICT,))
    assert ask([used], usage=usage, tenant="a").promised
    assert not ask([used], 90.0, DOCUMENT, usage=usage, tenant="a").promised


def test_requests_beyond_a_share_go_behind_others_without_a_promise() -> None:
    busy = estimate("large", margins=(((1.0, 0.0), (3.0, 0.01)),))
    usage = TenantUsage((SOFT,))
    usage.ask("b", 1.0, 0.0)
    assert not ask([busy], slo_class=SOFT, tenant="a", usage=usage).beyond_share
    full = estimate(
        "large",
        margins=(((1.0, 0.0), (3.0, 0.01)),),
        promised_work=(TenantWork("a", ROOM_S, ROOM_S),),
    )
    assert ask([full], slo_class=SOFT, tenant="a", usage=usage).beyond_share
    alone = ask([full], slo_class=SOFT, tenant="a")
    assert not alone.promised and not alone.beyond_share  # no other tenant is active


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("hog", "other")),
            st.integers(100, 600_000),
            st.floats(1.0, 3000.0),
        ),
        max_size=40,
    )
)
@settings(max_examples=60, deadline=None)
def test_no_mix_of_prompts_and_deadlines_is_promised_more_than_its_room(
    prompts: list[tuple[str, int, float]],
) -> None:
    """Half a room and one prompt, or the room, of the long ones; and a room of short ones."""
    replica, usage = estimate("large"), TenantUsage((SOFT,))
    usage.ask("hog", 1.0, 0.0)
    usage.ask("other", 1.0, 0.0)
    room_s = 2.0 * ROOM_S / 3.0
    work_s: dict[str, list[float]] = {"hog": [], "other": []}
    for index, (tenant, tokens, within_s) in enumerate(prompts):
        request = PendingRequest(id=str(index), prompt_tokens=tokens, due_s=within_s, tenant=tenant)
        decision = admit(request, [replica], {}, SOFT, usage, now=0.0)
        if decision.promised:
            replica.hold(request, decision.option, 0.0, True)
            work_s[tenant].append(decision.option.work_s)
    for promised in work_s.values():
        short_s = sum(work for work in promised if is_short(work))
        longest_s = max(promised, default=0.0)
        assert short_s <= room_s + 1e-6
        assert sum(promised) - short_s <= max(room_s, 0.5 * room_s + longest_s) + 1e-6


@pytest.mark.parametrize("slo_class", [STRICT, SOFT])
@pytest.mark.parametrize("tokens", [200_000, 400_000])
def test_what_needs_a_group_to_come_is_accepted_without_a_promise(
    slo_class: SloClass, tokens: int
) -> None:
    """A group has pages for 256,000 tokens; a second one may never come."""
    predictor = Predictor(A100, LLAMA_3_8B, Topology(tp=8, kvp_min=1, kvp_max=2))
    replica = ReplicaEstimate("r0", predictor, max_context_tokens=2_000_000)
    replica.update(Load(free_pages=(4000,), total_pages=(4000,), claimable_pages=4000), 0.0)
    decision = ask([replica], 90.0, tokens, slo_class)
    assert decision.option.fits and decision.promised == (tokens < 256_000)
    assert not decision.beyond_share
    replica.update(Load(free_pages=(4000, 4000), total_pages=(4000, 4000)), 0.0)
    assert ask([replica], 90.0, tokens, slo_class).promised
