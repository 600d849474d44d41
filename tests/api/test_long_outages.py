"""Ten minutes of an API server that refuses everything, or is silent, in scaled time.

The operator's own clocks and waits run ten times as fast. It must not end, its liveness probe must
fail within 90 s by its own clock and one check more, and it must work again afterwards.
`make outages` runs this, and so does `make test-api`; SHORT=1 is one refusal for three minutes.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable

import pytest
from tests.api.fast_clock import MOMENT
from tests.api.fleet import Fleet, Operator, until
from tests.api.proxy import Answer, Call, Proxy

from medha_operator.controllers.liveness import CHECK_EVERY_S

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

WHOLE = os.environ.get("MEDHA_OUTAGES") == "whole"
SPEED = 10.0
AWAY_S = 600.0 if WHOLE else 180.0
TOLD_S, SPARE_S = 90.0, 5.0
"""Time within which a stuck operator must fail its probe, with half a second of computing in
operator time."""
USUAL = {"MEDHA_RESYNC_S": "30", "MEDHA_LEASE_S": "15", "MEDHA_REPORT_S": "2"}


def refuse(status: int) -> Callable[[Proxy], None]:
    def tamper(proxy: Proxy) -> None:
        proxy.before = lambda call: Answer(status, "Away")
        proxy.events = lambda call, line: []

    return tamper


def fall_silent(proxy: Proxy) -> None:
    """Keep connections open but send nothing."""
    proxy.delay = lambda call: 1e6
    proxy.events = lambda call, line: []


TAMPERS = {"503": refuse(503), "429": refuse(429), "silence": fall_silent}
CHOSEN = TAMPERS if WHOLE else ("503",)


def fails_probe_in_time(operator: Operator, tamper: Callable[[], None]) -> None:
    """Check that from now on the probe fails when 90 s have passed by the operator's clock, and
    that the log names the fault; a check runs each second."""
    red = r"not alive: the API server has sent nothing for \d+ s"
    tamper()
    operator.process.send_signal(signal.SIGUSR1)
    until(lambda: not operator.alive(), "its liveness probe is told")
    ((began_s, _),) = operator.logged(MOMENT)
    ((red_s, line),) = operator.logged(red)
    assert red_s - began_s <= TOLD_S + CHECK_EVERY_S + SPARE_S
    assert int(re.findall(r"\d+", line)[0]) <= TOLD_S + CHECK_EVERY_S + SPARE_S


@pytest.mark.parametrize("tamper", [TAMPERS[name] for name in CHOSEN], ids=CHOSEN)
def test_after_ten_minutes_without_an_api_server_the_operator_works_again(
    fleet: Fleet, start_operator: Start, proxy: Proxy, tamper: Callable[[Proxy], None]
) -> None:
    operator = start_operator(speed=SPEED, **USUAL)
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))
    before = {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}
    until(lambda: time.monotonic() - proxy.last_write_s() > 2.0)
    until(operator.alive)
    began_s, written = time.monotonic(), own_writes(proxy)

    def works_again() -> None:
        tamper(proxy)
        fleet.change("llama", {"replicas": 2})

    fails_probe_in_time(operator, works_again)
    while time.monotonic() - began_s < AWAY_S / SPEED:
        assert operator.process.poll() is None
        assert not operator.alive()
        time.sleep(0.2)
    assert own_writes(proxy) == written
    proxy.trust()
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 4)
    until(operator.alive)
    after = {name: pod["metadata"]["uid"] for name, pod in fleet.pods().items()}
    assert before.items() <= after.items()


def own_writes(proxy: Proxy) -> int:
    """Number of the operator's writes that were executed."""
    return sum(reply.call.own and reply.status < 300 for reply in proxy.done)


def test_an_operator_without_answers_about_its_lease_writes_nothing_and_fails_its_probe(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """Answer every call but those about the Lease."""
    operator = start_operator(speed=SPEED, **USUAL)
    fleet.create("llama")
    fleet.played(lambda: fleet.is_ready("llama"))

    def silence_lease() -> None:
        proxy.delay = lambda call: 1e6 if "/leases" in call.path else 0.0

    fails_probe_in_time(operator, silence_lease)
    assert not operator.leads()
    proxy.trust()
    until(lambda: operator.alive() and operator.leads())
    fleet.change("llama", {"replicas": 2})
    fleet.played(lambda: fleet.is_ready("llama") and len(fleet.pods()) == 4)


def test_one_silent_kind_fails_the_probe_too(
    fleet: Fleet, start_operator: Start, proxy: Proxy
) -> None:
    """Without the probe, an operator without news of the nodes would act on outdated data."""
    operator = start_operator(speed=SPEED, **USUAL)
    until(operator.leads)

    def nodes(call: Call) -> Answer | None:
        return Answer(403, "Forbidden") if call.path.endswith("/nodes") else None

    def silence_nodes() -> None:
        proxy.before = nodes
        proxy.events = lambda call, line: [] if call.path.endswith("/nodes") else [line]

    fails_probe_in_time(operator, silence_nodes)
    assert operator.process.poll() is None
    proxy.trust()
    until(operator.alive)
