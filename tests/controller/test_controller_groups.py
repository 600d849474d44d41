"""KVP groups join, leave and fail under a controller in virtual time; every stream stays right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha.peer_liveness import CLOSED_S, GONE_S, QUIET_S
from medha.topology import Coordinate, Topology

Make = Callable[..., VirtualReplica]
Submit = Callable[..., m.Submit]
Judge = Callable[[VirtualReplica, m.Submit], None]
Idle = Callable[[VirtualReplica], None]

LONG = 4000  # tokens: more than the 100 pages of one group hold


def grown(spp: int = 2, kvp_min: int = 1, kvp_max: int = 3) -> dict[str, Any]:
    """Groups of 100 pages of 16 tokens; a sequence spreads each 1,000 tokens."""
    topology = Topology(spp=spp, kvp_min=kvp_min, kvp_max=kvp_max, tokens_per_group=1000)
    return {"topology": topology, "pages": 100, "key_s": 1e-9}


def supervise(replica: VirtualReplica, until_s: float, cold_start_s: float = 0.5) -> None:
    """Act as `medha up`: start wanted groups, restart lost ones."""
    starting: set[int] = set()

    def poll() -> None:
        status = replica.controller.status(replica.loop.now)
        for group in {*range(status.wanted_groups), *status.restart_groups}:
            if group not in replica.groups and group not in starting:
                starting.add(group)
                replica.loop.at(replica.loop.now + cold_start_s, 0, start(group))
        if replica.loop.now < until_s:
            replica.loop.at(replica.loop.now + 0.1, 3, poll)

    def start(group: int) -> Callable[[], None]:
        def begin() -> None:
            starting.discard(group)
            replica.start_group(group)

        return begin

    poll()


def states(replica: VirtualReplica) -> list[str]:
    return [group.state for group in replica.controller.status(replica.loop.now).groups]


def test_a_long_prompt_grows_the_replica_while_a_short_one_is_not_disturbed(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(**grown(), settings={"release_cooldown_s": 1e9})
    long, short = make_submit("long", LONG, outputs=30), make_submit("short", 100, outputs=200)
    supervise(replica, 20.0)
    replica.submit_at(1.0, short)
    replica.submit_at(1.1, long)
    replica.run(20.0)
    judge(replica, long)
    judge(replica, short)
    assert states(replica) == ["running"] * 3
    assert any(len(chunk.groups) == 3 for _, batch in replica.log for chunk in batch.chunks)
    gaps = [
        later[0] - earlier[0] for earlier, later in zip(replica.log, replica.log[1:], strict=False)
    ]
    assert max(gaps[: gaps.index(max(gaps)) + 1][:100]) < 0.2, "growth paused the running work"
    idle(replica)


def test_wanted_groups_fall_again_and_idle_groups_are_released(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(**grown(), settings={"release_cooldown_s": 2.0})
    long, later = make_submit("long", LONG, outputs=3), make_submit("later", LONG, outputs=3)
    supervise(replica, 60.0)
    replica.submit_at(1.0, long)
    replica.run(20.0)
    judge(replica, long)
    assert states(replica) == ["running", "absent", "absent"]
    assert set(replica.groups) == {0}
    replica.submit_at(25.0, later)
    replica.run(60.0)
    judge(replica, later)
    idle(replica)


@pytest.mark.parametrize("at_s", [1.02, 1.15, 1.2, 1.3, 1.45])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_group_lost_in_the_middle_costs_time_but_no_token(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle, at_s: float, victim: int
) -> None:
    replica = make_replica(**grown(kvp_min=2, kvp_max=2), settings={"release_cooldown_s": 1e9})
    many = [make_submit("long", 2000, outputs=20)]
    many += [make_submit(f"s{i}", 100 + 30 * i, outputs=15) for i in range(6)]
    supervise(replica, 60.0)
    for submit in many:
        replica.submit_at(1.0, submit)
    replica.loop.at(at_s, 0, lambda: replica.kill_group(victim))
    replica.run(60.0)
    for submit in many:
        judge(replica, submit)
    assert states(replica) == ["running", "running"]
    idle(replica)


def test_the_last_group_lost_holds_requests_until_it_is_back(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica()
    first, second = make_submit("one", 200, outputs=40), make_submit("two", 60, outputs=3)
    replica.submit_at(1.0, first)
    replica.loop.at(1.05, 0, lambda: replica.kill_group(0))
    replica.submit_at(8.0, second)
    replica.run(10.0)
    assert states(replica) == ["lost"]
    status = replica.controller.status(10.0)
    assert status.restart_groups == (0,) and not status.ready and "silent" in status.message
    replica.start_group(0)
    replica.run(30.0)
    judge(replica, first)
    judge(replica, second)
    idle(replica)


def test_a_rank_without_a_sign_of_life_is_reported_before_its_group_is_lost(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica()
    replica.submit_at(1.0, make_submit("one", 200, outputs=40))
    replica.loop.at(1.05, 0, lambda: replica.kill_group(0))
    replica.run(10.0)
    quiet = [at_s for at_s, report in replica.reports if report.quiet]
    lost = [at_s for at_s, report in replica.reports if at_s > 1.05 and not report.load.total_pages]
    assert 1.05 + QUIET_S - 0.5 <= quiet[0] <= 1.05 + QUIET_S + 0.1
    assert quiet[-1] < lost[0] and lost[0] - quiet[0] > 3.0
    assert not any(report.quiet for at_s, report in replica.reports if at_s >= lost[0])


def cut(replica: VirtualReplica, group: int, at_s: float, *, dead: bool = False) -> None:
    """End the connection of a group's first rank at that time; `dead`: because it was killed."""

    def end() -> None:
        if dead:
            replica.kill_group(group)
        replica.controller.on_disconnect(Coordinate(group, 0, 0), replica.loop.now)

    replica.loop.at(at_s, 0, end)


def test_a_rank_whose_connection_ended_is_reported_before_its_group_is_lost(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica()
    replica.submit_at(1.0, make_submit("one", 200, outputs=40))
    cut(replica, 0, 1.05, dead=True)
    replica.run(5.0)
    gone = [at_s for at_s, report in replica.reports if report.gone]
    lost = [at_s for at_s, report in replica.reports if at_s > 1.05 and not report.load.total_pages]
    assert 1.05 + GONE_S <= gone[0] <= 1.05 + GONE_S + 0.05
    assert gone[-1] < lost[0] <= 1.05 + CLOSED_S + 0.3


def test_a_rank_that_dials_again_soon_is_not_reported(
    make_replica: Make, make_submit: Submit, judge: Judge
) -> None:
    replica = make_replica()
    request = make_submit("one", 200, outputs=40)
    replica.submit_at(1.0, request)
    cut(replica, 0, 1.05)
    again = m.RankBeat()
    replica.loop.at(
        1.05 + GONE_S, 0, lambda: replica.controller.on_rank(Coordinate(0, 0, 0), again, 1.3)
    )
    replica.run(5.0)
    assert not any(report.gone for _, report in replica.reports)
    judge(replica, request)


def test_a_replica_is_gone_only_if_each_of_its_groups_has_lost_a_rank(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica(**grown(kvp_min=2, kvp_max=2), settings={"release_cooldown_s": 1e9})
    replica.submit_at(1.0, make_submit("one", 200, outputs=40))
    cut(replica, 0, 2.05, dead=True)
    cut(replica, 1, 2.5, dead=True)
    replica.run(5.0)
    gone = [at_s for at_s, report in replica.reports if report.gone]
    assert gone[0] >= 2.5 + GONE_S


def test_requests_without_a_group_fail_in_time_and_may_run_elsewhere(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica()
    replica.submit_at(1.0, make_submit("one", 200, outputs=40))
    replica.loop.at(1.05, 0, lambda: replica.kill_group(0))
    replica.run(12.0)
    assert replica.controller.running_requests == 1
    replica.run(20.0)
    failed = replica.clients["one"].failed
    assert failed is not None and failed.code == "replica_lost" and failed.retriable
    assert not replica.controller.running_requests


def test_a_request_that_loses_its_group_three_times_is_poison(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica()
    poison, later = make_submit("poison", 12_000, outputs=50), make_submit("later", 100)
    replica.submit_at(1.0, poison)
    for time_s in (1.5, 10.1, 18.7):  # during its prefill of 1.2 s
        replica.loop.at(time_s, 0, lambda: replica.kill_group(0))
        replica.loop.at(time_s + 8.0, 0, lambda: replica.start_group(0))
    replica.submit_at(40.0, later)
    replica.run(60.0)
    failed = replica.clients["poison"].failed
    assert failed is not None and failed.code == "poison_request" and not failed.retriable
    judge(replica, later)
    idle(replica)


def test_a_request_that_makes_progress_outlives_any_number_of_its_groups(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica()
    request = make_submit("one", 500, outputs=5000)
    replica.submit_at(1.0, request)
    for time_s in (2.0, 11.0, 20.0, 29.0):
        replica.loop.at(time_s, 0, lambda: replica.kill_group(0))
        replica.loop.at(time_s + 8.0, 0, lambda: replica.start_group(0))
    replica.run(80.0)
    judge(replica, request)
    idle(replica)


def test_a_rank_that_comes_back_as_another_process_takes_its_group_down_at_once(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(topology=Topology(spp=2))
    first = make_submit("one", 400, outputs=40)
    replica.submit_at(1.0, first)

    def restart() -> None:
        replica.kill_group(0)
        replica.start_group(0)

    replica.loop.at(1.1, 0, restart)
    replica.run(30.0)
    judge(replica, first)
    idle(replica)


def test_a_failed_rank_takes_its_group_down_without_waiting_for_silence(
    make_replica: Make, make_submit: Submit
) -> None:
    replica = make_replica(topology=Topology(tp=2))
    replica.submit_at(1.0, make_submit("one", 400, outputs=40))
    failed = m.RankFailed("group", "a TP peer is gone")
    at = Coordinate(0, 0, 1)
    replica.loop.at(1.1, 0, lambda: replica.controller.on_rank(at, failed, replica.loop.now))
    replica.run(1.6)
    assert states(replica) == ["lost"]
    assert "a TP peer is gone" in replica.controller.status(1.6).message


def test_a_group_whose_columns_do_not_form_leaves_the_old_generation_serving(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica(**grown(kvp_max=2), settings={"release_cooldown_s": 1e9})
    short = make_submit("short", 100, outputs=300)
    replica.refuse_forming = {1}
    replica.submit_at(1.0, short)
    replica.loop.at(2.0, 0, lambda: replica.start_group(1))
    replica.run(4.0)
    assert states(replica) == ["running", "lost"]
    assert replica.controller.generations.current == 1
    assert "cannot reach" in replica.controller.status(4.0).message
    replica.refuse_forming = set()
    replica.start_group(1)
    replica.run(30.0)
    assert states(replica) == ["running", "running"]
    assert replica.controller.generations.current == 3
    judge(replica, short)
    idle(replica)


def test_pages_move_in_the_background_and_the_stream_stays_right(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    fields = grown(kvp_min=2, kvp_max=2)
    fields |= {"pages": 200, "key_s": 1e-7}
    replica = make_replica(**fields)
    long = make_submit("long", 2500, outputs=120)
    replica.submit_at(1.0, long)
    replica.run(60.0)
    judge(replica, long)
    switched = [number for _, batch in replica.log for number in batch.switches]
    assert switched, "nothing moved: the test shows nothing"
    idle(replica)


@pytest.mark.parametrize("fault", ["offer", "fetch", "changed", "dumb"])
def test_a_move_in_doubt_is_cancelled_and_the_stream_stays_right(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle, fault: str
) -> None:
    fields = grown(kvp_min=2, kvp_max=2)
    fields |= {"pages": 200, "key_s": 1e-7}
    replica = make_replica(**fields)
    replica.move_fault = fault
    long = make_submit("long", 2500, outputs=120)
    replica.submit_at(1.0, long)
    supervise(replica, 120.0)
    replica.run(120.0)
    judge(replica, long)
    assert replica.move_faults > 0, "nothing moved: the test shows nothing"
    assert not [number for _, batch in replica.log for number in batch.switches]
    idle(replica)


def test_a_drain_refuses_new_requests_and_finishes_running_ones(
    make_replica: Make, make_submit: Submit, judge: Judge, idle: Idle
) -> None:
    replica = make_replica()
    running = make_submit("one", 300, outputs=500)
    replica.submit_at(1.0, running)
    replica.loop.at(1.2, 0, replica.controller.drain)
    replica.submit_at(1.3, make_submit("two", 10))
    replica.run(1.35)
    assert replica.controller.running_requests == 1
    replica.run(20.0)
    judge(replica, running)
    failed = replica.clients["two"].failed
    assert failed is not None and failed.code == "draining" and failed.retriable
    assert replica.controller.drained
    idle(replica)
