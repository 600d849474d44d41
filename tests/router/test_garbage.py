"""Memory of requests: freed as soon as they end, so that the collector seldom stops the loop."""

from __future__ import annotations

import collections
import gc
from collections.abc import Callable

import pytest
from tests.router.conftest import MODEL, Running

COUNT = 20
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say abc"}], "max_tokens": 9}


def garbage(serve: Callable[[], object]) -> dict[str, int]:
    """Count the router's objects that only the collector can free after a call."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        serve()
        gc.collect()
        left = collections.Counter(
            type(thing).__qualname__
            for thing in gc.garbage
            if type(thing).__module__.startswith(("medha_router", "uvicorn", "starlette"))
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    return {name: count for name, count in left.items() if count >= COUNT // 2}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", CHAT | {"stream": True}, 200),
        ("/v1/chat/completions", CHAT | {"model": "none"}, 404),
        ("/v1/messages", CHAT, 200),
        ("/tokenize", CHAT, 200),
    ],
)
def test_a_request_that_has_ended_leaves_no_work_for_the_garbage_collector(
    served: Running, path: str, body: dict[str, object], status: int
) -> None:
    def serve() -> None:
        for _ in range(COUNT):
            assert served.http.post(path, json=body).status_code == status

    assert garbage(serve) == {}
