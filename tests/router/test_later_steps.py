"""Steps that run after those that clients wait for."""

from __future__ import annotations

import asyncio

import pytest

from medha_router.app import LATER_S, LaterSteps


def test_later_steps_run_after_the_turn_and_then_in_groups() -> None:
    asyncio.run(_run_in_groups())


async def _run_in_groups() -> None:
    ran: list[str] = []
    later, loop = LaterSteps(), asyncio.get_running_loop()
    later(lambda: ran.append("first"))
    assert ran == []
    await asyncio.sleep(0)
    assert ran == ["first"]
    began_s = loop.time()
    later(lambda: ran.append("second"))
    later(lambda: ran.append("third"))
    while len(ran) < 3:
        await asyncio.sleep(0)
    assert ran == ["first", "second", "third"] and loop.time() - began_s > LATER_S / 2


def test_a_later_step_that_fails_is_logged_and_the_others_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(_run_after_a_failure())
    assert [record.getMessage() for record in caplog.records] == ["a later step failed"]
    caplog.clear()


async def _run_after_a_failure() -> None:
    ran: list[str] = []
    later = LaterSteps()
    later(lambda: ran.append(str(1 // 0)))
    later(lambda: ran.append("second"))
    later.run()
    assert ran == ["second"]
