"""Turns of the event loop: long work for one client lets others be served in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

TURN_S = 0.001
"""Time of one turn; the loop stands still for a few of these at most."""

SLICE = 64
"""Deltas, or tokens with log probabilities, that take about a turn to encode."""

T = TypeVar("T")


async def in_turns(parts: Iterable[T]) -> list[T]:
    """Make the parts, with turns of the event loop for others in between."""
    results, turn_s = list[T](), time.perf_counter() + TURN_S
    for part in parts:
        results.append(part)
        if time.perf_counter() > turn_s:
            await asyncio.sleep(0)
            turn_s = time.perf_counter() + TURN_S
    return results


def taken(entries: list[T]) -> Iterator[list[T]]:
    """Take a list apart from its beginning; at least one slice.

    To free a million objects at once, after the answer, would stop the loop.
    """
    entries.reverse()
    while True:
        some = entries[: -SLICE - 1 : -1]
        del entries[-SLICE:]
        yield some
        if not entries:
            break
