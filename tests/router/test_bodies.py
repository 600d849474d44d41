"""Slow bodies, and too many bodies at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from medha.errors import MedhaError, Refusal, RequestError
from medha_router.auth import Client
from medha_router.bodies import MAX_BODIES_AT_ONCE, SENT_BYTES, BodyReader

Receive = Callable[[], Awaitable[dict[str, Any]]]


def request(receive: Receive, owner: str = "") -> Request:
    client = Client(owner=owner)
    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    return Request(scope | {"state": {"client": client}}, receive)


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
            asyncio.create_task(bodies.read(request(patient, f"tenant:{number}")))
            for number in range(MAX_BODIES_AT_ONCE + 1)
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


def test_one_tenant_cannot_hold_the_memory_of_all() -> None:
    async def whole() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * 90, "more_body": False}

    async def reads(bodies: BodyReader, owner: str) -> bool:
        try:
            return b"".join(await bodies.read(request(whole, owner))) == b"x" * 90
        except Refusal:
            return False

    async def scene() -> None:
        bodies = BodyReader(100)
        with contextlib.ExitStack() as held:
            for _ in range(20):
                if not await reads(bodies, "hog"):
                    break
                held.enter_context(bodies.held(100, "hog"))
            assert not await reads(bodies, "hog")
            for _ in range(2):
                assert await reads(bodies, "other")
                held.enter_context(bodies.held(90, "other"))
            assert not await reads(bodies, "other") and await reads(bodies, "third")
        assert await reads(bodies, "hog")

    asyncio.run(scene())


def test_answers_that_are_taken_slowly_keep_nobody_else_out() -> None:
    bodies, size = BodyReader(1 << 20), 6 * SENT_BYTES
    most = MAX_BODIES_AT_ONCE << 20

    async def idle() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    def answers(owner: str, limit: int) -> int:
        """Return how many large answers of an owner may be held at once."""
        for count in range(limit):
            try:
                bodies.answer(request(idle, owner), b"x" * size)
            except Refusal:
                return count
            held.enter_context(bodies.sending(size, owner))
        return limit

    with contextlib.ExitStack() as held:
        assert answers("hog", 99) == most // size  # alone, it has all
        assert answers("other", 1) == answers("third", 1) == 1
        assert answers("hog", 1) == 0 and answers("other", 99) == most // 4 // size - 1
        bodies.answer(request(idle, "hog"), b"x" * SENT_BYTES)  # small ones always
    assert answers("hog", 1) == 1


def test_a_large_answer_counts_until_the_client_has_taken_it() -> None:
    async def scene() -> tuple[list[int], bytes]:
        bodies, held, sent = BodyReader(1 << 20), [], []

        async def send(message: Any) -> None:
            held.append(bodies.held_bytes)
            sent.append(message.get("body", b""))

        scope = request(send).scope  # type: ignore[arg-type]
        parts = (b"[", memoryview(b"7" * (3 * SENT_BYTES)), b"]")
        answer = bodies.answer(Request(scope), *parts)
        await answer(scope, send, send)  # type: ignore[arg-type]
        assert all(len(part) <= SENT_BYTES for part in sent)
        return [*held, bodies.held_bytes], b"".join(sent)

    held, body = asyncio.run(scene())
    assert held == [*[3 * SENT_BYTES + 2] * (len(held) - 1), 0] and len(held) > 5
    assert body == b"[" + b"7" * (3 * SENT_BYTES) + b"]"
