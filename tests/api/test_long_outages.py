"""Ten minutes of an API server that refuses everything, or says nothing at all, in scaled time.

The operator's own clocks run ten times as fast, and so does all that it waits for. It must not end,
must tell its liveness probe the truth within 90 s by its own clock, and one look of its own, and
must work again afterwards.
`make outages`, and `make test-api` too; with SHORT=1 it is one refusal, for three minutes.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from tests.api.fleet import Fleet, Operator, until
from tests.api.hurried import MOMENT
from tests.api.proxy import Answer, Call, Proxy

from medha_operator.health import LOOK_S

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(900)

WHOLE = os.environ.get("MEDHA_OUTAGES") == "whole"
HURRY = 10.0
AWAY_S = 600.0 if WHOLE else 180.0
TOLD_S, SPARE_S = 90.0, 5.0
"""How soon a stuck operator must be found dead, and what half a second of a busy machine is by an
operator's clock."""
USUAL = {"MEDHA_RESYNC_S": "30", "MEDHA_LEASE_S": "15", "MEDHA_REPORT_S": "2"}


def refuse(status: int) -> Callable[[Proxy], None]:
    def tamper(proxy: Proxy) -> None:
        proxy.before = lambda call: Answer(status, "Away")
        proxy.events = lambda call, line: []

    return tamper


def fall_silent(proxy: Proxy) -> None:
    """Connections stay, and nothing comes."""
    proxy.delay = lambda call: 1e6
    proxy.events = lambda call, line: []


TAMPERS = {"503": refuse(503), "429": refuse(429), "silence": fall_silent}
CHOSEN = TAMPERS if WHOLE else ("503",)


def logged(operator: Operator, message: str) -> list[tuple[float, str]]:
    """Its lines with such a message, and when they were written by its own clock."""
    lines = [json.loads(line) for line in operator.log.read_text().splitlines() if line[:1] == "{"]
    return [
        (datetime.datetime.fromisoformat(each["time"]).timestamp(), each["message"])
        for each in lines
        if re.search(message, each["message"])
    ]


def found_dead_in_time(operator: Operator, tamper: Callable[[], None]) -> None:
    """From now on it cannot do its work: its probe is told when by its own clock 90 s have passed,
    and when it says that they have; a look is made each second."""
    red = r"not alive: the API server was not heard of for \d+ s"
    tamper()
    operator.process.send_signal(signal.SIGUSR1)
    until(lambda: not operator.alive(), "its liveness probe is told")
    ((began_s, _),) = logged(operator, MOMENT)
    ((red_s, said),) = logged(operator, red)
    assert red_s - began_s <= TOLD_S + LOOK_S + SPARE_S
    assert int(re.findall(r"\d+", said)[0]) <= TOLD_S + LOOK_S + SPARE_S


@pytest.mark.parametrize("tamper", [TAMPERS[name] for name in CHOSEN], ids=CHOSEN)
def test_after_ten_minutes_without_an_api_server_the_operator_works_again(
    fleet: Fleet, start_operator: Start, proxy: Proxy, tamper: Callable[[Proxy], None]
) -> None:
    operator = start_operator(hurry=HURRY, **USUAL)
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    before = {name: each["metadata"]["uid"] for name, each in fleet.pods().items()}
    until(lambda: time.monotonic() - proxy.last_write_s() > 2.0)
    assert operator.alive()
    began_s, written = time.monotonic(), own_writes(proxy)

    def goes() -> None:
        tamper(proxy)
        fleet.change("llama", {"replicas": 2})

    found_dead_in_time(operator, goes)
    while time.monotonic() - began_s < AWAY_S / HURRY:
        assert operator.process.poll() is None
        assert not operator.alive()
        time.sleep(0.2)
    assert own_writes(proxy) == written
    proxy.trust()
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 4)
    until(operator.alive)
    after = {name: each["metadata"]["uid"] for name, each in fleet.pods().items()}
    assert before.items() <= after.items()


def own_writes(proxy: Proxy) -> int:
    """Those that were done."""
    return sum(each.call.own and each.status < 300 for each in proxy.done)


def test_an_operator_whose_lease_is_not_heard_of_writes_nothing_and_is_found_dead(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """All but the calls about the Lease are answered."""
    operator = start_operator(hurry=HURRY, **USUAL)
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))

    def nobody_hears_of_the_lease() -> None:
        proxy.delay = lambda call: 1e6 if "/leases" in call.path else 0.0

    found_dead_in_time(operator, nobody_hears_of_the_lease)
    assert not operator.leads()
    proxy.trust()
    until(lambda: operator.alive() and operator.leads())
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 4)


def test_one_kind_that_is_not_told_any_more_is_found_too(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """It would go on with what it knew of the nodes: a zombie, if nobody said so."""
    operator = start_operator(hurry=HURRY, **USUAL)
    until(operator.leads)

    def nodes(call: Call) -> Answer | None:
        return Answer(403, "Forbidden") if call.path.endswith("/nodes") else None

    def nobody_hears_of_nodes() -> None:
        proxy.before = nodes
        proxy.events = lambda call, line: [] if call.path.endswith("/nodes") else [line]

    found_dead_in_time(operator, nobody_hears_of_nodes)
    assert operator.process.poll() is None
    proxy.trust()
    until(operator.alive)
