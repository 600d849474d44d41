"""A replica without KVP groups stays registered; requests wait for a group or are refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from medha.messages import Load

BODY = {"model": "tiny", "prompt": "say back", "max_tokens": 8}
NOTHING = Load(free_pages=(), total_pages=(), page_tokens=16)
LIMIT_S = 20.0


def load_of(served: Any) -> dict[str, Any]:
    page = served.ops.get("/debug/queue").json()["tiny"]
    return {"open": page["open"], "pages": page["replicas"][0]["load"]["total_pages"]}


def until(served: Any, open: bool) -> None:
    end = time.monotonic() + LIMIT_S
    while load_of(served)["open"] is not open:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_request_is_held_until_a_group_runs(served: Any) -> None:
    controller = served.controllers[0]
    full = controller.load
    controller.load = NOTHING
    until(served, open=False)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.http.post, "/v1/completions", json=BODY)
        with pytest.raises(TimeoutError):
            answer.result(0.3)
        controller.load = full
        assert answer.result(LIMIT_S).json()["choices"][0]["text"] == "back"


def test_a_request_that_no_group_serves_in_time_is_refused(
    running_with: Callable[..., Any],
) -> None:
    served = running_with(no_replica_timeout_s=0.3)
    served.open().load = NOTHING
    until(served, open=False)
    answer = served.http.post("/v1/completions", json=BODY)
    assert answer.status_code == 503 and answer.headers["retry-after"]
    assert answer.json()["error"]["code"] == "no_replica"


def test_requests_waiting_for_a_busy_replica_move_to_a_new_one(
    running_with: Callable[..., Any],
) -> None:
    served = running_with()
    busy = served.open("r0")
    busy.granting = False
    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(served.http.post, "/v1/completions", json=BODY) for _ in range(6)]
        end = time.monotonic() + LIMIT_S
        while len(busy.heads) < 6:
            assert time.monotonic() < end
            time.sleep(0.01)
        joined = served.open("r1")
        while not joined.seen:
            assert time.monotonic() < end
            time.sleep(0.01)
        busy.granting = True
        texts = {answer.result(LIMIT_S).json()["choices"][0]["text"] for answer in answers}
    assert texts == {"back"}
