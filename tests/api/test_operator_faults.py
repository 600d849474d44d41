"""The operator against an API server that refuses, stalls, forgets and goes away.

A proxy tampers with the calls between the two; the rest is the real server's behaviour. After
every trouble the operator must still live and end with the same pods.
"""

from __future__ import annotations

import collections
import functools
import itertools
import re
import threading
import time
from collections.abc import Callable

import pytest
from tests.api.fleet import LEASE_S, Fleet, Operator, until
from tests.api.proxy import Answer, Call, Proxy

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

POD_NAMES = ["llama-0-g0-s0", "llama-0-g0-s1"]


@pytest.mark.parametrize("first", range(3))
def test_every_write_may_fail_the_first_time_done_or_not(
    fleet: Fleet, start_operator: Start, proxy: Proxy, first: int
) -> None:
    faults = itertools.cycle(itertools.product((0, 403, 409, 422, 429, 500), (True, False)))
    faulty = itertools.islice(faults, 4 * first, None)
    seen: dict[tuple[str, str], tuple[int, bool]] = {}
    events: set[tuple[str, str]] = set()

    def once(call: Call, done: bool) -> Answer | None:
        write = (call.verb, call.path)
        if not call.own or write in events:
            return None
        status, when = seen[write] if write in seen else seen.setdefault(write, next(faulty))
        if when != done:
            return None
        events.add(write)
        return Answer(status, "SaidByTheTest")

    proxy.before = lambda call: once(call, False)
    proxy.after = lambda call: once(call, True)
    operator = start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"), within_s=300.0)
    assert sorted(fleet.pods()) == POD_NAMES
    assert len(events) >= 8
    assert operator.process.poll() is None


def test_a_deleted_pod_that_answers_late_is_not_deleted_twice(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """The answer to every DELETE is lost: the next one carries the same UID and gets a 404."""
    deleted: collections.Counter[str] = collections.Counter()

    def lose(call: Call) -> Answer | None:
        if call.verb == "DELETE" and "/pods/" in call.path:
            deleted[call.path] += 1
            return Answer(0)
        return None

    proxy.after = lose
    start_operator()
    fleet.create("llama", replicas=2)
    fleet.played(lambda: fleet.is_ready("llama"))
    fleet.change("llama", {"replicas": 1})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 2)
    assert deleted


@pytest.mark.parametrize("code", [403, 410, 500])
def test_a_watch_that_ends_with_an_error_is_started_again(
    fleet: Fleet, start_operator: Start, proxy: Proxy, code: int
) -> None:
    counts = itertools.count(1)
    error = Answer(code, "Expired").body

    def break_off(call: Call, line: bytes) -> list[bytes]:
        if next(counts) % 4 == 0:
            return [b'{"type":"ERROR","object":' + error + b"}"]
        return [line]

    proxy.events = break_off
    operator = start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama"))
    assert len(fleet.pods()) == 4
    until(operator.alive)


def test_the_resync_repairs_what_watches_miss(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    proxy.events = lambda call, line: []
    operator = start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    fleet.remove("llama-0-g0-s0")
    fleet.played(lambda: sorted(fleet.pods()) == POD_NAMES and fleet.is_ready("llama"))
    until(operator.alive)


def test_the_operator_works_again_after_an_outage_of_the_api_server(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    operator = start_operator()
    until(operator.leads)
    away = threading.Event()
    proxy.before = lambda call: Answer(503, "Away") if away.is_set() else None
    away.set()
    fleet.create("llama")
    until(lambda: not operator.leads())
    assert operator.process.poll() is None
    assert fleet.pods() == {}
    away.clear()
    fleet.played(lambda: fleet.is_ready("llama"))
    until(operator.leads)


@pytest.mark.parametrize("done", [False, True], ids=["refused", "done-and-not-told"])
def test_one_failed_lease_write_costs_leadership_only_briefly(
    fleet: Fleet, start_operator: Start, proxy: Proxy, done: bool
) -> None:
    """Fail with each status once: the operator writes the Lease again in time and works on."""
    operator = start_operator()
    until(operator.leads)
    fleet.create("llama", replicas=0)
    told_s: dict[int, float] = {}

    def renewed_s() -> float:
        return max(
            reply.at_s for reply in proxy.done if _renews(reply.call) and reply.status == 200
        )

    def renewed_after(status: int) -> bool:
        return status in told_s and renewed_s() > told_s[status]

    def fail_once(status: int, call: Call) -> Answer | None:
        if status in told_s or not _renews(call):
            return None
        told_s[status] = time.monotonic()
        return Answer(status, "SaidByTheTest")

    for number, status in enumerate((400, 403, 409, 422, 500), start=1):
        setattr(proxy, "after" if done else "before", functools.partial(fail_once, status))
        until(functools.partial(renewed_after, status))
        assert renewed_s() - told_s[status] <= LEASE_S
        until(operator.leads)
        fleet.change("llama", {"replicas": number % 2})
        fleet.played(lambda: fleet.is_ready("llama"))
        until(operator.alive)
        assert operator.process.poll() is None


def _renews(call: Call) -> bool:
    return call.verb == "PUT" and "/leases/" in call.path


def test_answers_of_a_middlebox_do_no_harm(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """A middlebox answers 200 with HTML."""
    operator = start_operator()
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    page = Answer(200, page=b"<html>well</html>")
    proxy.before = lambda call: page
    seen = len(proxy.calls)
    fleet.change("llama", {"replicas": 2})
    kinds = {"nodes", "medha-operator", "medhareplicas"}
    until(lambda: kinds <= {call.path.rpartition("/")[2] for call in proxy.calls[seen:]})
    until(lambda: not operator.leads())
    assert operator.process.poll() is None
    proxy.trust()
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 4)


def test_the_next_operator_repairs_what_one_killed_at_any_write_has_left(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """Each operator dies at the next write of a kind not seen before: executed, not answered."""
    current: list[Operator] = []
    seen: set[str] = set()

    def kill(call: Call) -> Answer | None:
        kind = f"{call.verb} {re.sub('[0-9a-f]{10,}', '', call.path)}"
        if not call.own or kind in seen or not current:
            return None
        seen.add(kind)
        current.pop().process.kill()
        return Answer(0)

    proxy.after = kill
    fleet.create("llama")
    lives = 0
    while not fleet.is_ready("llama"):
        if not current and lives < 6:
            lives += 1
            current.append(start_operator())
        elif not current:
            proxy.after = lambda call: None
            current.append(start_operator())
        fleet.play()
    assert sorted(fleet.pods()) == POD_NAMES
    posts = [reply for reply in proxy.done if reply.call.verb == "POST"]
    created = [
        reply for reply in posts if reply.call.path.endswith("/pods") and reply.status == 201
    ]
    assert len(created) == len(POD_NAMES)
