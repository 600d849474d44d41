"""Slow bodies, and too many bodies at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from medha.errors import MedhaError, Refusal, RequestError
from medha_router.bodies import MAX_BODIES_AT_ONCE, BodyReader

Receive = Callable[[], Awaitable[dict[str, Any]]]


def request(receive: Receive) -> Request:
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return Request(scope, receive)


def test_a_body_that_does_not_arrive_in_time_is_a_408() -> None:
    async def stalled() -> dict[str, Any]:
        await asyncio.sleep(60)
        raise AssertionError("the body timed out before")

    with pytest.raises(RequestError) as caught:
        asyncio.run(BodyReader(100, timeout_s=0.02).read(request(stalled)))
    assert caught.value.status == 408


def test_the_memory_of_all_bodies_is_bounded_and_released() -> None:
    async def scene() -> list[object]:
        bodies = BodyReader(100)
        half_read = asyncio.Event()

        async def first_part() -> dict[str, Any]:
            await asyncio.sleep(0)
            if half_read.is_set():
                return {"type": "http.request", "body": b"", "more_body": False}
            return {"type": "http.request", "body": b"x" * 90, "more_body": True}

        async def patient() -> dict[str, Any]:
            part = await first_part()
            if part["body"] and patient_sent.setdefault(asyncio.current_task(), 0):
                await half_read.wait()
                return {"type": "http.request", "body": b"", "more_body": False}
            patient_sent[asyncio.current_task()] = 1
            return part

        patient_sent: dict[object, int] = {}
        reads = [
            asyncio.create_task(bodies.read(request(patient)))
            for _ in range(MAX_BODIES_AT_ONCE + 1)
        ]
        await asyncio.sleep(0.02)
        half_read.set()
        outcomes = await asyncio.gather(*reads, return_exceptions=True)
        return [*outcomes, await bodies.read(request(first_part))]

    *outcomes, after = asyncio.run(scene())
    refused = [outcome for outcome in outcomes if isinstance(outcome, MedhaError)]
    assert [type(outcome) for outcome in refused] == [Refusal]
    assert len(outcomes) - len(refused) == MAX_BODIES_AT_ONCE
    assert after == [b""]
