"""Cost of a request in the router: calls of functions on its loop, which no machine changes.

A router has one core per process, and a feature that each request passes adds to all of them. Who
raises a limit here measures `benchmarks/router.py` in turns with the version before.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import types
from collections.abc import Callable, Iterator

import pytest
from hatch_build import MODULES
from tests.router.conftest import Running

from medha_router.tokenization.pool import TokenizerPool

REQUESTS = 41
MOST_CALLS = 760
"""A few per cent more than there are."""
COMPILED = tuple(f"{module.replace('.', '/')}.py" for module in MODULES)
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "say " + "a" * 8}],
    "max_tokens": 8,
    "temperature": 0.7,
}


@pytest.fixture(scope="module")
def busy(tokens: TokenizerPool) -> Iterator[Running]:
    """A router whose replica begins what comes with a head, and sends short answers at once."""
    running = Running(tokens)
    try:
        controller = running.open()
        controller.takes_early, controller.burst = True, 8
        yield running
    finally:
        running.close()


def calls(running: Running, post: Callable[[], object]) -> float:
    """Return the calls on the loop from one answer to the next, in the median.

    Functions of compiled modules do not count: they are called unseen where they are compiled.
    """
    count, after = [0], list[int]()

    def note(frame: types.FrameType, event: str, argument: object) -> None:
        if event == "call" and not frame.f_code.co_filename.endswith(COMPILED):
            count[0] += 1

    running.loop.call_soon_threadsafe(sys.setprofile, note)
    try:
        for _ in range(REQUESTS):
            post()
            after.append(count[0])
    finally:
        running.loop.call_soon_threadsafe(sys.setprofile, None)
    return statistics.median(now - before for before, now in itertools.pairwise(after))


@pytest.mark.parametrize("stream", [False, True])
def test_a_short_chat_takes_the_router_a_limited_number_of_calls(
    busy: Running, stream: bool
) -> None:
    def post() -> None:
        response = busy.http.post("/v1/chat/completions", json=BODY | {"stream": stream})
        assert response.status_code == 200

    for _ in range(5):
        post()
    assert calls(busy, post) <= MOST_CALLS
