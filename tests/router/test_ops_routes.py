"""Pages of the router's ops port take little time from its event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from medha.messages import RouterDemand
from medha_router import ops

CLIENTS, ROUNDS = 16, 8


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    running = asyncio.new_event_loop()
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    yield running
    running.call_soon_threadsafe(running.stop)
    thread.join(60)
    running.close()


@pytest.mark.parametrize("path", ["/debug/queue", "/demand"])
def test_a_crowd_of_clients_shares_few_snapshots(
    loop: asyncio.AbstractEventLoop, path: str
) -> None:
    numbers = itertools.count(1)

    def page() -> dict[str, Any]:
        return {"window_s": next(numbers)}

    def demand() -> RouterDemand:
        return RouterDemand(window_s=next(numbers), models=())

    route = ops.routes(loop, page, demand, None)[f"GET {path}"]

    def read(_: int) -> list[int]:
        return [msgspec.json.decode(route().body)["window_s"] for _ in range(ROUNDS)]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as threads:
        seen = list(threads.map(read, range(CLIENTS)))
    assert all(pages == sorted(set(pages)) for pages in seen)  # none is older than its request
    assert next(numbers) - 1 < CLIENTS * ROUNDS / 2
