"""Pages and pending work return to zero, whatever joins, grows, is lost or is cancelled."""

from __future__ import annotations

import collections
import functools
import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from medha.config import POLICIES, Scheduling
from medha.scheduling.scheduler import Scheduler
from medha.sim.loop import ARRIVE, Loop
from medha.sim.pipeline_clock import PipelineClock
from medha.sim.replica import SimReplica
from medha.testing import leftovers, predictor, request, scheduler, topology

PAGE_TOKENS, GROUP_TOKENS = 64, 6400


def check_pages(plan: Scheduler) -> None:
    """Raise AssertionError unless each held page has as many holders as its pool counts."""
    state, holders = plan._state, collections.Counter[tuple[int, int]]()
    reserved: collections.Counter[int] = collections.Counter()
    for sequence in state.sequences.values():
        assert len(sequence.group_of) == len(sequence.page_of)
        holders.update(zip(sequence.group_of, sequence.page_of, strict=True))
        reserved.update(sequence.reserved)
    moves = plan._rebalance
    for move, _, _ in moves._copying.values():
        holders.update((move.target, page) for page in move.to_pages)
    for sequence in moves.ready.values():
        for move in sequence.switching:
            holders.update((move.target, page) for page in move.to_pages)
    for _, group, _, leaving in moves._leaving:
        holders.update((group, page) for page in leaving)
    for group, pages in state.pool.groups.items():
        pages.check()
        assert pages.reserved == reserved[group]
    for (group, page), count in holders.items():
        assert group not in state.pool.groups or state.pool[group].references(page) == count
    claims = sum(sequence.growth_claim for sequence in state.sequences.values())
    assert state.pool.claimed == claims


def check_rows(plan: Scheduler) -> None:
    """Raise AssertionError unless each sequence waits in all its groups that run, or in none."""
    queues = plan._state.queues.by_group
    for sequence in plan._state.sequences.values():
        rows = {group for group, queue in queues.items() if sequence in queue}
        assert rows in (set(), set(sequence.assigned_groups) & set(queues)), sequence.id


def check(plan: Scheduler) -> None:
    check_pages(plan)
    check_rows(plan)


def play(seed: int, policy: str, pages: int, groups: int, spp: int) -> SimReplica:
    """Serve requests on a replica that grows, loses groups and has few pages."""
    draw = random.Random(seed)
    layout = topology(spp=spp, kvp=1, kvp_max=groups, tokens_per_group=GROUP_TOKENS)
    rules = Scheduling(policy=policy, growth_timeout_s=5.0, release_cooldown_s=2.0)
    plan = scheduler(layout, rules, pages=pages, key_s=3e-9, join=False)
    clock = PipelineClock(predictor(layout, key_s=3e-9), PAGE_TOKENS, plan.layout)
    loop = Loop()
    replica = SimReplica("r", plan, clock, loop, cold_start_s=draw.choice([0.1, 1.0]))
    replica.watch = lambda watched: check(plan) if watched.batches % 4 == 0 else None
    most, at = groups * pages * PAGE_TOKENS, 0.0
    shared = [bytes([page]) * 32 for page in range(60)]
    for number in range(25):
        at += draw.expovariate(4.0)
        prompt = draw.choice([300, 2000, draw.randint(1, most - 1)])
        arriving = request(
            f"r{number}",
            min(prompt, most - 1),
            at,
            within_s=draw.choice([0.3, 3.0, 30.0]),
            output_tokens=draw.choice([1, 30, 400]),
            tpot_s=0.05,
        )
        names = shared[: draw.choice([0, 4, 60])][: arriving.prompt_tokens // PAGE_TOKENS]
        loop.at(at, ARRIVE, functools.partial(replica.submit, arriving, names))
        if draw.random() < 0.3:
            gone_s = at + draw.expovariate(1.0)
            loop.at(gone_s, ARRIVE, functools.partial(replica.abort, arriving.id))

    def lose(group: int) -> None:
        replica.lose(group)

    for _ in range(draw.choice([0, 0, 3])):
        lost_s, group = draw.uniform(0.0, at), draw.randrange(groups)
        loop.at(lost_s, ARRIVE, functools.partial(lose, group))
    loop.run(most_events=400_000)
    return replica


@given(
    seed=st.integers(0, 1 << 20),
    policy=st.sampled_from(POLICIES),
    pages=st.sampled_from([110, 130, 400]),
    groups=st.sampled_from([2, 3, 4]),
    spp=st.sampled_from([1, 2]),
)
@example(868573, "lars", 130, 3, 1)  # a prompt waits in vain for another group
@settings(max_examples=10)
def test_pages_return_though_groups_grow_and_are_lost_and_clients_leave(
    seed: int, policy: str, pages: int, groups: int, spp: int
) -> None:
    replica = play(seed, policy, pages, groups, spp)
    assert not replica.live
    check_pages(replica.scheduler)
    assert leftovers(replica.scheduler) == {}
