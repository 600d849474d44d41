"""Placement: the earliest finish among replicas that can promise, counting what was just placed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.fleet.dispatcher import Dispatcher
from medha.fleet.offers import ALL_GROUPS, PendingRequest
from medha.fleet.placement import assess, best_first, place
from medha.fleet.replica_estimate import MAX_TIMES, ReplicaEstimate, forecast_steps, groups_needed
from medha.messages import KvEvents, Load
from medha.model import CHUNK_TOKENS, ModelShape
from medha.predictor import Predictor
from medha.profile import A100, CPU_CORE, Profile
from medha.sim.scenario import LLAMA_3_8B
from medha.tenants import TenantWork
from medha.topology import Topology

SMALL = ModelShape(
    layers=4, hidden=256, heads=8, kv_heads=4, head_dim=32, intermediate=1024, vocab=4096
)
IDLE = Load(free_pages=(20_000,), total_pages=(20_000,))


def estimate(
    name: str = "r0", load: Load = IDLE, now: float = 0.0, **topology: int
) -> ReplicaEstimate:
    return shaped(LLAMA_3_8B, name, load, now, **topology)


def shaped(
    shape: ModelShape,
    name: str = "r0",
    load: Load = IDLE,
    now: float = 0.0,
    max_batch_s: float = 0.0,
    **topology: int,
) -> ReplicaEstimate:
    of = Predictor(A100, shape, Topology(**{"tp": 8, **topology}))
    replica = ReplicaEstimate(name, of, max_context_tokens=10_000_000, max_batch_s=max_batch_s)
    replica.update(load, now)
    return replica


def request(due_s: float = 10.0, prompt_tokens: int = 1000, id: str = "n") -> PendingRequest:
    return PendingRequest(id=id, prompt_tokens=prompt_tokens, max_output_tokens=100, due_s=due_s)


def test_a_long_prompt_leaves_less_room_for_short_ones_of_other_tenants() -> None:
    """Half of its work for all that come: two thirds of them of `a`, a third of `b`."""
    promised = (TenantWork("a", 9.0, 2.0), TenantWork("b", 9.0, 1.0))
    busy = msgspec.structs.replace(IDLE, long_factor=1.5, promised_work=promised)
    alone = msgspec.structs.replace(busy, promised_work=promised[:1])

    def room(tenant: str, load: Load = busy) -> float:
        long = msgspec.structs.replace(request(99.0, 100_000), tenant=tenant)
        return assess(estimate(load=load), long, 0.0).cost_s / idle_s - 1.0

    idle_s = assess(estimate(), request(99.0, 100_000), 0.0).cost_s
    assert room("a", alone) == pytest.approx(0.5, rel=0.01)
    own = {"a": 2.0 / 7.0, "b": 1.0 / 8.0, "c": 0.0}
    for tenant, part in own.items():
        assert room(tenant) == pytest.approx(part + min(0.25, 0.5 - part), rel=0.01)


def loaded(*margins: tuple[float, float]) -> Load:
    return Load(margins=(margins,), free_pages=(20_000,), total_pages=(20_000,))


def test_an_idle_replica_finishes_after_its_own_work() -> None:
    at = estimate()
    option = assess(at, request(), now=0.0)
    assert option.fits and option.roomy
    assert option.finish_s == option.work_s == pytest.approx(at.predictor.prefill_s(1000))


def test_offers_follow_the_budget_of_the_last_load_whatever_it_was_before() -> None:
    """Use more budgets than are remembered, and let some come back."""
    at = estimate()
    for number in (*range(2 * MAX_TIMES), 3, 0, 2 * MAX_TIMES - 1):
        load = msgspec.structs.replace(IDLE, budget_s=0.02 + 0.003 * number)
        at.update(load, 0.0)
        offer = assess(at, request(prompt_tokens=30_000), 0.0)
        assert offer == assess(estimate(load=load), request(prompt_tokens=30_000), 0.0)


def test_only_long_prompts_leave_a_later_promise_time_for_answers_to_come() -> None:
    """Answers to come take a fifth of the capacity, an eighth of the time, of 50 s."""
    load = msgspec.structs.replace(
        loaded((50.0, 3.0)), budget_s=0.05, decode_capacity_s=0.03, decode_parts=((1.0, 0.2),)
    )
    load = msgspec.structs.replace(load, decode_room_s=0.03)
    at = shaped(LLAMA_3_8B, load=load, max_batch_s=0.1)
    short, long = (
        assess(at, msgspec.structs.replace(request(20.0, tokens), max_output_tokens=1), 0.0)
        for tokens in (5000, 40_000)
    )
    assert short.fits and short.earliest_s < 1.0
    assert long.cost_s < 2.0 and not long.fits
    assert long.earliest_s >= 50.0


def test_without_a_promise_the_first_token_waits_for_promises_and_not_for_a_guard() -> None:
    idle = assess(estimate(), request(), 0.0)
    assert idle.needed_s == idle.earliest_s > idle.work_s
    assert idle.first_s(promised=False) == idle.first_s(promised=True) == idle.work_s
    busy = assess(estimate(load=loaded((1.0, 0.0), (3.0, 0.01))), request(), 0.0)
    waits_s = busy.first_s(promised=False) - idle.work_s
    assert abs(waits_s - (busy.earliest_s - idle.earliest_s)) < 1e-9 and waits_s > 1.0
    assert busy.first_s(promised=True) == min(busy.finish_s, busy.earliest_s)


@given(
    st.integers(70_000, 1_200_000),
    st.sampled_from([{}, {"spp": 4}, {"kvp_max": 8}]),
    st.floats(0.0, 1.0),
)
@settings(max_examples=10, deadline=None)
def test_forecasts_that_were_extended_in_steps_are_those_of_one_step(
    tokens: int, topology: dict[str, int], part: float
) -> None:
    load = msgspec.structs.replace(
        IDLE, budget_s=0.05, decode_capacity_s=0.02, decode_parts=((1.0, part),)
    )
    stepped, fresh = (estimate("r0", load, 0.0, **topology) for _ in range(2))
    for step in forecast_steps(tokens):
        stepped.extend(step, 0.03, 0.03)
    of = request(prompt_tokens=tokens)
    assert assess(stepped, of, 0.0) == assess(fresh, of, 0.0)
    assert stepped.reference_work_s(tokens, 0, 0.03) == fresh.reference_work_s(tokens, 0, 0.03)


def test_a_prompt_costs_what_decodes_leave_it_until_it_is_due() -> None:
    load = msgspec.structs.replace(
        IDLE,
        budget_s=0.05,
        decode_capacity_s=0.02,
        decode_parts=((1.0, 0.1), (8.0, 0.5), (64.0, 0.2)),
        spanning_parts=((64.0, 0.9),),
    )

    def work_s(due_in_s: float, tokens: int = 1000) -> float:
        at = estimate(load=load, now=3.0, kvp_max=2)
        return assess(at, request(3.0 + due_in_s, tokens), 3.0).work_s

    soon_s, next_s, late_s = work_s(1.0), work_s(1.1), work_s(64.0)
    assert soon_s < late_s < next_s == work_s(8.0) and late_s == work_s(1e6)
    at = estimate(load=load, kvp_max=2)
    assert groups_needed(3_000_000, at.predictor) > 1
    # A group runs alone, and others may come: what decodes there counts for all.
    alone = estimate(load=msgspec.structs.replace(load, spanning_parts=()), kvp_max=2)
    idle = estimate(load=msgspec.structs.replace(load, spanning_parts=((64.0, 0.0),)), kvp_max=2)
    of = request(1e6, 3_000_000)
    works_s = [assess(replica, of, 0.0).work_s for replica in (idle, alone, at)]
    assert works_s == sorted(set(works_s))


def test_the_steps_of_forecasts_grow_by_half_up_to_the_prompt() -> None:
    assert list(forecast_steps(1000)) == [1000]
    steps = list(forecast_steps(1_000_000))
    assert steps[0] <= 1 << 11 and steps[-1] == 1_000_000
    assert all(before < after <= 1.5 * before for before, after in itertools.pairwise(steps))


def test_the_least_tpot_is_of_every_stage_and_of_what_groups_share() -> None:
    alone, deep = estimate(), 2_000_000
    assert alone.predicted_tpot_s(request()) < alone.least_tpot_s(1000) == alone.min_batch_s
    deep_s = alone.predicted_tpot_s(request(prompt_tokens=deep))
    assert alone.least_tpot_s(deep) == pytest.approx(deep_s)
    staged = estimate(spp=2)
    assert staged.least_tpot_s(1000) == 2 * staged.min_batch_s
    assert staged.least_tpot_s(deep) > staged.least_tpot_s(1000)
    spread = estimate(kvp_max=8)
    assert groups_needed(deep, spread.predictor) > 1
    assert alone.least_tpot_s(1000) < spread.least_tpot_s(deep) < alone.least_tpot_s(deep)


def test_prefix_hits_shorten_the_work_and_win_the_place() -> None:
    here, there = estimate("a"), estimate("b")
    chosen = place(request(prompt_tokens=60_000), [here, there], {"b": 50_000}, 0.0)
    assert chosen is not None
    assert (chosen.replica, chosen.cached_tokens) == ("b", 50_000)
    assert chosen.work_s < 0.5 * here.predictor.prefill_s(60_000)


def test_a_fully_cached_prompt_still_computes_its_last_token() -> None:
    option = assess(estimate(), request(prompt_tokens=640), 0.0, cached_tokens=640)
    assert option.cached_tokens == 639
    assert option.work_s > 0


def test_a_promise_that_would_break_another_is_not_given() -> None:
    cost_s = assess(estimate(), request(), 0.0).cost_s
    tight = estimate(load=loaded((5.0, 0.5 * cost_s)))
    assert not assess(tight, request(due_s=4.0), 0.0).fits  # due before it: would push it out
    assert assess(tight, request(due_s=6.0), 0.0).fits  # due after it: waits its turn


def test_the_earliest_deadline_offered_is_one_that_fits_and_none_sooner_does() -> None:
    at = estimate(load=loaded((1.0, 0.01), (5.0, 0.005), (9.0, 8.0)))
    option = assess(at, request(due_s=0.5), 0.0)
    assert not option.fits
    assert assess(at, request(due_s=option.earliest_s + 1e-6), 0.0).fits
    assert not assess(at, request(due_s=option.earliest_s - 0.01), 0.0).fits


def test_a_replica_that_can_promise_goes_before_a_faster_one_that_cannot() -> None:
    broken = estimate("fast", loaded((5.0, 0.0)))
    slow = Load(
        pending_bands=((100.0, 3.0),), pending_s=3.0, free_pages=(20_000,), total_pages=(20_000,)
    )
    keeps = estimate("slow", slow)
    first, second = best_first(request(due_s=4.0), [broken, keeps], {}, 0.0)
    assert (first.replica, second.replica) == ("slow", "fast")
    assert first.finish_s > second.finish_s


def test_ties_go_to_the_replica_with_more_free_pages_then_by_name() -> None:
    less = Load(free_pages=(10_000,), total_pages=(20_000,))
    chosen = place(request(), [estimate("a", less), estimate("b"), estimate("c")], {}, 0.0)
    assert chosen is not None and chosen.replica == "b"


def with_pending(seconds: float, slack: float = 1.0) -> Load:
    """A replica with work of no promise, that a request with less relative slack goes before."""
    return msgspec.structs.replace(IDLE, pending_bands=((slack, seconds),), pending_s=seconds)


def replicas(**loads: Load) -> list[ReplicaEstimate]:
    return [shaped(LLAMA_3_8B, name, load, max_batch_s=0.1) for name, load in loads.items()]


def test_a_long_prompt_goes_to_an_idle_replica_though_it_would_be_first_at_a_busy_one() -> None:
    at = replicas(busy=with_pending(20.0), idle=msgspec.structs.replace(IDLE, ahead_s=0.05))
    long = request(prompt_tokens=300_000, due_s=1.5 * at[0].predictor.prefill_s(300_000))
    busy, idle = (assess(replica, long, 0.0) for replica in at)
    assert busy.finish_s < idle.finish_s and idle.clear_s < busy.clear_s <= long.due_s
    chosen = place(long, at, {}, 0.0)
    assert chosen is not None and chosen.replica == "idle"


def test_work_that_is_late_whatever_happens_keeps_no_long_prompt_away() -> None:
    at = replicas(late=with_pending(20.0, slack=0.0), idle=IDLE)
    long = request(prompt_tokens=300_000, due_s=1.5 * at[0].predictor.prefill_s(300_000))
    late, idle = (assess(replica, long, 0.0) for replica in at)
    assert late.clear_s == idle.clear_s < long.due_s
    beyond = msgspec.structs.replace(long, beyond_share=True)  # it runs after all else
    late, idle = (assess(replica, beyond, 0.0) for replica in at)
    assert idle.clear_s < late.clear_s


def test_a_short_prompt_goes_where_its_first_token_is_sooner() -> None:
    at = replicas(
        busy=with_pending(20.0, slack=100.0),
        idle=msgspec.structs.replace(IDLE, ahead_s=0.2),
        last=msgspec.structs.replace(IDLE, ahead_s=0.3),
    )
    chosen = place(request(due_s=0.5), at, {}, 0.0)
    assert chosen is not None and chosen.replica == "busy" and chosen.clear_s == 0.0


def test_a_request_goes_where_its_answer_and_not_only_its_first_token_is_sooner() -> None:
    at = replicas(
        busy=msgspec.structs.replace(IDLE, predicted_tpot_s=0.02, decoding=40),
        idle=msgspec.structs.replace(IDLE, ahead_s=0.1),
    )
    for output_tokens, name in ((1, "busy"), (100, "idle"), (10_000, "idle")):
        of = msgspec.structs.replace(request(), max_output_tokens=output_tokens)
        chosen = place(of, at, {}, 0.0)
        assert chosen is not None and chosen.replica == name and chosen.finish_s < 0.2
    back = place(request(prompt_tokens=60_000), at, {"busy": 59_000}, 0.0)
    assert back is not None and back.replica == "busy"


def slowed(profile: Profile, factor: float) -> Profile:
    """The profile that a machine `factor` times as slow would have."""
    fields = msgspec.structs.asdict(profile)
    for name, value in fields.items():
        if name.endswith("_per_s"):
            fields[name] = value / factor
        elif name.endswith("_s"):
            fields[name] = value * factor
    return Profile(**fields)


@pytest.mark.parametrize("profile", [A100, CPU_CORE], ids=lambda profile: profile.name)
@pytest.mark.parametrize("running", [4, 30])
def test_equal_replicas_share_requests_though_one_was_measured_as_slower(
    profile: Profile, running: int
) -> None:
    """Each prompt is done when the next comes, and decodes until `running` others have come."""
    shape = LLAMA_3_8B if profile is A100 else SMALL
    fleet = {
        name: ReplicaEstimate(
            name, Predictor(slowed(profile, factor), shape, Topology()), 100_000, max_batch_s=0.1
        )
        for name, factor in (("fast", 1.0), ("slow", 1.3))
    }
    chosen: list[str] = []
    for number in range(200):
        for name, at in fleet.items():
            decodes = chosen[-running:].count(name)
            batch = [(1, 1000, True)] * decodes
            tpot_s = at.predictor.batch_s(batch) if decodes else 0.0
            at.update(msgspec.structs.replace(IDLE, predicted_tpot_s=tpot_s, decoding=decodes), 0.0)
        of = request(prompt_tokens=200, id=str(number))
        option = place(of, fleet.values(), {}, 0.0)
        assert option is not None and option.fits
        chosen.append(option.replica)
    assert 40 <= chosen.count("slow") <= 100


def test_a_long_prompt_that_no_replica_clears_in_time_goes_where_it_finishes_first() -> None:
    at = replicas(
        a=msgspec.structs.replace(with_pending(90.0), ahead_s=0.2),
        b=msgspec.structs.replace(with_pending(99.0), ahead_s=0.1),
    )
    long = request(prompt_tokens=300_000, due_s=1.5 * at[0].predictor.prefill_s(300_000))
    assert assess(at[0], long, 0.0).clear_s == assess(at[1], long, 0.0).clear_s == long.due_s
    chosen = place(long, at, {}, 0.0)
    assert chosen is not None and chosen.replica == "b"


def test_what_was_placed_counts_until_a_load_counts_it() -> None:
    at = estimate()
    first = assess(at, request(), 0.0)
    at.hold(request(due_s=1.01 * first.cost_s, id="x"), first, 0.0, promised=True)
    assert not assess(at, request(due_s=1.005 * first.cost_s), 0.0).fits
    assert assess(at, request(due_s=10.0), 0.0).fits
    at.update(IDLE, 0.1)
    assert list(at.held) == ["x"]  # not accepted yet: the Load cannot count it
    at.accepted("x")
    assert at.pending_s == first.cost_s
    at.update(IDLE, 0.2)
    assert not at.held and at.pending_s == 0.0


def test_releasing_what_was_placed_gives_its_time_and_pages_back() -> None:
    at = estimate()
    before = assess(at, request(), 0.0)
    at.hold(request(id="x"), before, 0.0, promised=True)
    assert assess(at, request(), 0.0) != before
    at.release("x", 0.0)
    at.release("unknown", 0.0)
    assert assess(at, request(), 0.0) == before


def test_a_prompt_over_the_context_or_the_pages_has_no_place() -> None:
    at = estimate()
    assert place(request(prompt_tokens=10_000_001), [at], {}, 0.0) is None
    assert place(request(prompt_tokens=20_000 * 64), [at], {}, 0.0) is None


def test_a_long_prompt_needs_groups_that_run_or_may_come() -> None:
    load = Load(free_pages=(15_000, -1), total_pages=(15_000, -1), claimable_pages=15_000)
    two = estimate("two", load, kvp_max=2, tokens_per_group=900_000)
    single = estimate("one", IDLE, kvp_max=1)
    long = request(due_s=1e6, prompt_tokens=1_500_000)
    assert groups_needed(1_500_100, two.predictor) == 2
    assert [option.replica for option in best_first(long, [single, two], {}, 0.0)] == ["two"]


WINDOWED = msgspec.structs.replace(LLAMA_3_8B, window_tokens=4096, window_layers=32)
FEW = Load(free_pages=(90, 80), total_pages=(100, 100), claimable_pages=100)


def test_a_context_whose_window_slides_takes_the_pages_of_a_window() -> None:
    at = shaped(WINDOWED, load=FEW, kvp_max=3, tokens_per_group=1000)
    offer = assess(at, request(prompt_tokens=900_000), 0.0)
    assert (offer.pages, offer.free_pages, offer.roomy) == (97, 90, False)
    assert offer.pages == (4096 + CHUNK_TOKENS) // 64 + 1
    assert assess(at, request(prompt_tokens=5000), 0.0).pages == 80
    hit = assess(at, request(prompt_tokens=900_000), 0.0, cached_tokens=899_968)
    assert hit.pages == 3 and hit.roomy
    assert at.can_ever(request(prompt_tokens=900_000))
    least = msgspec.structs.replace(FEW, free_pages=(66,), total_pages=(66,))
    small = shaped(WINDOWED, load=least)
    assert small.can_ever(request(prompt_tokens=900_000))
    assert assess(small, request(prompt_tokens=900_000), 0.0).pages == 66
    none = msgspec.structs.replace(FEW, free_pages=(65,) * 9, total_pages=(65,) * 9)
    assert not shaped(WINDOWED, load=none).can_ever(request(prompt_tokens=900_000))
    assert shaped(WINDOWED, load=none).most_tokens() == 65 * 64


@dataclasses.dataclass
class Replica:
    """A replica as a dispatcher reads it."""

    predictor: Predictor
    load: Load = FEW
    name: str = "r0"
    version: str = "1"
    max_context_tokens: int = 1_000_000
    min_batch_s: float = 0.01
    max_batch_s: float = 0.1
    max_running: int = 256
    open: bool = True


def test_a_dispatcher_expects_the_pages_of_the_last_window_only() -> None:
    """Of 200 pages the last 70 are left; a window and the last token need 64 of them."""
    names = [page.to_bytes(16, "little") for page in range(200)]
    for shape, cached in ((WINDOWED, {"r0": 199 * 64}), (LLAMA_3_8B, {})):
        dispatcher: Dispatcher[Any] = Dispatcher([])
        dispatcher.update_replica(Replica(Predictor(A100, shape, Topology())), 0.0)
        stored = KvEvents(1, stored=b"".join(names[130:]), snapshot=True)
        assert dispatcher.apply_kv_events("r0", stored)
        assert dispatcher.cached_tokens(names, 200 * 64) == cached


@pytest.mark.parametrize("first", [0, 1])
def test_each_replica_is_expected_to_need_the_pages_of_its_own_model(first: int) -> None:
    """A rolling update may bring a longer context, in which the window slides."""
    names = [page.to_bytes(16, "little") for page in range(200)]
    dispatcher: Dispatcher[Any] = Dispatcher([])
    replicas = {"r0": LLAMA_3_8B, "r1": WINDOWED}
    for name in sorted(replicas, reverse=bool(first)):
        of = Predictor(A100, replicas[name], Topology())
        dispatcher.update_replica(Replica(of, name=name), 0.0)
        stored = KvEvents(1, stored=b"".join(names[130:]), snapshot=True)
        assert dispatcher.apply_kv_events(name, stored)
    assert dispatcher.cached_tokens(names, 200 * 64) == {"r1": 199 * 64}


@pytest.mark.parametrize("tokens", [10, 100_000, 900_000])
def test_the_least_tpot_of_a_fleet_is_that_of_its_best_replica(tokens: int) -> None:
    dispatcher: Dispatcher[Any] = Dispatcher([])
    for at, (spp, batch_s) in enumerate([(2, 0.02), (1, 0.03), (2, 0.01), (1, 0.025)]):
        of = Predictor(A100, LLAMA_3_8B, Topology(tp=at + 1, spp=spp))
        replica = Replica(of, name=f"r{at}", min_batch_s=batch_s)
        dispatcher.update_replica(replica, 0.0)
    each_s = [replica.least_tpot_s(tokens) for replica in dispatcher.estimates]
    assert dispatcher.least_tpot_s(tokens, "1") == min(each_s)


def test_a_replica_without_free_pages_now_comes_last() -> None:
    full = estimate("a", Load(free_pages=(5,), total_pages=(20_000,)))
    busy = estimate("b", loaded((5.0, 0.0)))
    ranked = list(best_first(request(due_s=4.0), [full, busy], {}, 0.0))
    assert [option.replica for option in ranked] == ["b", "a"]
    assert not ranked[1].roomy


def test_before_its_first_load_a_replica_takes_nothing() -> None:
    silent = ReplicaEstimate("s", estimate().predictor, max_context_tokens=1000)
    assert place(request(prompt_tokens=10), [silent], {}, 0.0) is None


job = st.tuples(st.floats(0.05, 4.0), st.floats(0.01, 1.0))


def feasible(jobs: list[tuple[float, float]]) -> bool:
    """Brute force: some order meets every deadline."""
    for order in itertools.permutations(jobs):
        clock = 0.0
        for due, work in order:
            clock += work
            if clock > due + 1e-9:
                break
        else:
            return True
    return False


@given(st.lists(job, max_size=4), st.floats(0.05, 4.0), st.integers(100, 30_000))
@settings(max_examples=150, deadline=None)
def test_fits_agrees_with_brute_force_over_all_orders(
    jobs: list[tuple[float, float]], due_s: float, tokens: int
) -> None:
    kept: list[tuple[float, float]] = []
    for job in jobs:
        if feasible([*kept, job]):
            kept.append(job)
    kept.sort()
    done = list(itertools.accumulate(work for _, work in kept))
    margins = tuple((due, due - sum_s) for (due, _), sum_s in zip(kept, done, strict=True))
    option = assess(estimate(load=loaded(*margins)), request(due_s, tokens), 0.0)
    assert option.fits == feasible([*kept, (due_s, option.cost_s)])


def test_holding_many_equals_a_load_that_counts_them() -> None:
    at = estimate()
    works = []
    for index, due_s in enumerate((8.0, 3.0, 5.0)):
        pending = request(due_s, id=str(index))
        option = assess(at, pending, 0.0)
        works.append((due_s, option.cost_s))
        at.hold(pending, option, 0.0, promised=True)
    works.sort()
    done = itertools.accumulate(work for _, work in works)
    reported = estimate(load=loaded(*((d, d - s) for (d, _), s in zip(works, done, strict=True))))
    for due_s in (0.1, 2.0, 4.0, 9.0):
        mine, theirs = assess(at, request(due_s), 0.0), assess(reported, request(due_s), 0.0)
        assert mine.fits == theirs.fits
        assert abs(mine.earliest_s - theirs.earliest_s) < 1e-9


def grouped(*margins: tuple[tuple[float, float], ...]) -> ReplicaEstimate:
    """Return the estimate of a replica of two groups with those lists of margins."""
    load = Load(margins=margins, free_pages=(20_000, 20_000), total_pages=(20_000, 20_000))
    return estimate(load=load, kvp_min=2, kvp_max=2)


def test_a_tighter_tpot_takes_time_from_the_promises_of_every_group() -> None:
    # One budget bounds the batches of all groups.
    tight = PendingRequest(
        id="n", prompt_tokens=1000, max_output_tokens=400, due_s=10.0, tpot_s=0.015
    )
    for margin_s, fits in ((0.05, False), (25.0, True)):
        load = Load(
            margins=((), ((30.0, margin_s),)),
            free_pages=(20_000, 20_000),
            total_pages=(20_000, 20_000),
            budget_s=0.1,
            decode_capacity_s=0.05,
            decode_room_s=0.05,
        )
        at = shaped(LLAMA_3_8B, load=load, max_batch_s=0.1, kvp_min=2, kvp_max=2)
        option = assess(at, tight, 0.0)
        assert option.group == 0 and option.fits == fits
    at.hold(tight, option, 0.0, promised=True)
    held_s = at.margins[1].room_s(29.0, 0.0, 0.0)
    assert held_s < 25.0
    for number in range(5):  # batches become no shorter
        another = msgspec.structs.replace(tight, id=f"n{number}")
        assert assess(at, another, 0.0).fits
        at.hold(another, option, 0.0, promised=True)
        at.accepted(another.id)
    assert at.margins[1].room_s(29.0, 0.0, 0.0) == pytest.approx(held_s)
    at.accepted("n")
    at.hold(msgspec.structs.replace(tight, id="other"), option, 0.0, promised=True)
    at.update(load, 0.0)  # which counts the first
    assess(at, tight, 0.0)
    assert at.margins[1].room_s(29.0, 0.0, 0.0) == pytest.approx(held_s)


def test_a_promise_leaves_half_a_batch_to_spare_once_the_batch_in_flight_is_over() -> None:
    strict = ReplicaEstimate("s", estimate().predictor, 10_000_000, max_batch_s=0.1)
    strict.update(msgspec.structs.replace(IDLE, lead_s=(0.03,)), 0.0)
    cost_s = assess(strict, request(), 0.0).cost_s
    assert not assess(strict, request(due_s=cost_s + 0.029), 0.0).fits
    assert assess(strict, request(due_s=cost_s + 0.031), 0.0).fits
    assert assess(strict, request(due_s=cost_s + 0.031), 0.02).fits
    assert not assess(strict, request(due_s=0.04 + cost_s + 0.049), 0.04).fits
    assert assess(strict, request(due_s=0.04 + cost_s + 0.051), 0.04).fits


@pytest.mark.parametrize("spp", [1, 2, 3, 4])
def test_a_promise_leaves_what_its_replica_reckons_with_less_half_a_batch(spp: int) -> None:
    """A replica withdraws a promise once it sees it overrun by a batch, behind `spp` stages."""
    piped = shaped(LLAMA_3_8B, max_batch_s=0.1, spp=spp)
    option = assess(piped, request(), 0.0)
    assert option.needed_s - option.cost_s >= 0.1 * (spp - 1) - 0.05


def test_no_more_promises_are_given_than_sequences_may_start() -> None:
    replica = estimate(load=msgspec.structs.replace(IDLE, free_places=2))
    given = []
    for number in range(4):
        wanted = request(id=f"n{number}")
        option = assess(replica, wanted, 0.0)
        given.append(option.fits)
        replica.hold(wanted, option, 0.0, promised=option.fits)
    assert given == [True, True, False, False]
    replica.release("n0", 0.0)
    assert assess(replica, request(), 0.0).fits


def test_a_prompt_fits_in_the_group_that_has_room() -> None:
    """Several lists of margins are of several groups; one list stands for all of them."""
    full, roomy = ((0.5, 0.0), (3.0, 0.01)), ((1.0, 0.9),)
    apart, together = grouped(full, roomy), grouped(full)
    short = request(due_s=0.6)
    fits = assess(apart, short, 0.0)
    assert fits.fits and fits.group == 1
    assert not assess(together, short, 0.0).fits
    cached = assess(apart, short, 0.0, cached_tokens=900)
    assert cached.fits and cached.group == 1 and cached.cost_s == fits.cost_s
    anywhere = assess(grouped(roomy, roomy), short, 0.0, cached_tokens=900)
    assert anywhere.fits and anywhere.group == ALL_GROUPS and anywhere.cost_s < fits.cost_s
    tokens = apart.predictor.tokens_per_group
    spans = assess(grouped(((1e6, 0.0),), ()), request(1e5, tokens), 0.0)
    assert not spans.fits and spans.group == ALL_GROUPS
    for number in range(40):
        option = assess(apart, short, 0.0)
        if not option.fits:
            break
        apart.hold(request(due_s=0.6, id=f"h{number}"), option, 0.0, promised=True)
    assert 5 < number < 39  # what is held counts in the group that it is held for


@pytest.mark.parametrize(
    ("output_tokens", "tpot_s", "fits"), [(1, 0.05, True), (400, 0.05, False), (400, 1.0, False)]
)
def test_the_answer_of_a_deep_prompt_is_counted_against_a_document_due_later(
    output_tokens: int, tpot_s: float, fits: bool
) -> None:
    """The document needs 17 of its 20 seconds; of batches of 50 ms a decode there takes 8."""
    idle = Load(margins=(((20.0, 2.4),),), free_pages=(60_000,), total_pages=(60_000,))
    turn = PendingRequest(
        id="turn",
        prompt_tokens=900_100,
        max_output_tokens=output_tokens,
        due_s=1.0,
        tpot_s=tpot_s,
    )
    replica = shaped(LLAMA_3_8B, load=idle, max_batch_s=0.1)
    option = assess(replica, turn, 0.0, cached_tokens=899_584)
    assert option.fits == fits


@pytest.mark.parametrize(("free", "fits"), [(786, False), (2000, True)])
def test_found_pages_that_may_be_free_ones_are_not_counted_twice(free: int, fits: bool) -> None:
    """Of 1,135 pages 816 are found, but they may be among the free ones, to be evicted."""
    load = Load(free_pages=(free,), total_pages=(2296,))
    turn = request(due_s=60.0, prompt_tokens=72_000)
    option = assess(estimate(load=load), turn, 0.0, cached_tokens=52_224)
    assert option.roomy and option.fits == fits


@pytest.mark.parametrize("full", [0, 1])
def test_a_promise_takes_time_and_pages_of_the_same_group(full: int) -> None:
    """The group with the most time has no pages left; the other one has, and the time."""
    pages = [4000, 4000]
    margins: list[tuple[tuple[float, float], ...]] = [((9.0, 2.0),), ((9.0, 2.0),)]
    pages[full], margins[full] = 100, ()
    load = Load(margins=tuple(margins), free_pages=tuple(pages), total_pages=(4000, 4000))
    replica = estimate(load=load, kvp_min=2, kvp_max=2)
    option = assess(replica, request(due_s=5.0, prompt_tokens=20_000), 0.0)
    assert option.fits and option.group == 1 - full
    pages[1 - full] = 100
    load = Load(margins=tuple(margins), free_pages=tuple(pages), total_pages=(4000, 4000))
    replica = estimate(load=load, kvp_min=2, kvp_max=2)
    assert not assess(replica, request(due_s=5.0, prompt_tokens=20_000), 0.0).fits


@pytest.mark.parametrize("tokens_per_group", [1 << 20, 30_000])
@pytest.mark.parametrize("margins", [((), ()), ((),)])
def test_found_pages_lie_in_a_group_that_may_have_no_other_pages_left(
    margins: tuple[tuple[tuple[float, float], ...], ...], tokens_per_group: int
) -> None:
    """The prompt is computed again, which takes seconds, not a tenth of one."""
    load = Load(margins=margins, free_pages=(50, 4000), total_pages=(4000, 4000))
    replica = estimate(load=load, kvp_min=2, kvp_max=2, tokens_per_group=tokens_per_group)
    for due_s, fits in ((1.0, False), (8.0, True)):
        turn = request(due_s, prompt_tokens=50_100)
        assert assess(replica, turn, 0.0, cached_tokens=49_984).fits == fits
    load = msgspec.structs.replace(load, free_pages=(1000, 1000))
    replica.update(load, 0.0)
    assert assess(replica, request(1.0, 50_100), 0.0, cached_tokens=49_984).fits


@pytest.mark.parametrize("claimable", [0, 4000])
def test_a_prompt_that_is_larger_than_a_group_takes_pages_of_several(claimable: int) -> None:
    """A group has pages for 256,000 tokens, and time for more than the prompt's 400,000."""
    pages = (4000,) if claimable else (4000, 4000)
    load = Load(free_pages=pages, total_pages=pages, claimable_pages=claimable)
    replica = estimate(load=load, kvp_min=1, kvp_max=2)
    large = request(due_s=90.0, prompt_tokens=400_000)
    option = assess(replica, large, 0.0)
    assert replica.predictor.tokens_per_group > 400_000
    assert option.roomy and option.fits and replica.most_together(large) == 1
    replica.hold(large, option, 0.0, promised=True)
    assert not assess(replica, large, 0.0).roomy
