"""What the ops port tells of this router: who waits and why, and the drain.

Routes run on the ops server's threads; they ask the event loop for a snapshot and say so when it
does not answer in time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from medha.adapters.prometheus import Reply, Route, json_reply
from medha.demand import WINDOW_S, Demand
from medha.messages import RouterDemand
from medha.scheduling.queue import Queued
from medha_router.fleet import Fleet
from medha_router.metering import queued_slack
from medha_router.models import ServedModel
from medha_router.runs import Run

SNAPSHOT_S = 2.0
SHOWN = 1000

T = TypeVar("T")


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """A request that waits; times in seconds, `slack_ratio` relative to its work."""

    id: str
    age_s: float
    due_in_s: float
    work_s: float
    slack_s: float
    slack_ratio: float
    promised: bool
    slo_class: str
    prompt_tokens: int
    replica: str
    why: str


def queue_page(models: Mapping[str, ServedModel], fleet: Fleet, now: float) -> dict[str, Any]:
    """`/debug/queue`: every model's waiting requests, most urgent first, and its replicas."""
    page: dict[str, Any] = {}
    for name, model in models.items():
        items = model.dispatch.waiting(now)
        page[name] = {
            "open": model.ready,
            "waiting": len(items),
            "cached_pages": model.dispatch.cached_pages,
            "requests": [
                _waiting(item, run, now)
                for item in items[:SHOWN]
                if (run := model.dispatch.run(item.id)) is not None
            ],
            "replicas": [
                {
                    "name": replica.name,
                    "open": replica.open and model.serves(replica.edition),
                    "draining": replica.draining,
                    "running": len(replica.sent),
                    "load": replica.load,
                }
                for replica in fleet.of(name)
            ],
        }
    return page


def demand_page(
    models: Mapping[str, ServedModel], fleet: Fleet, demand: Demand, now: float
) -> RouterDemand:
    """`/demand`: what clients wanted of each model lately."""
    found = []
    for name, model in models.items():
        items = model.dispatch.waiting(now)
        found.append(
            demand.of(
                name, now, backlog_s=sum(item.work_s for item in items), waiting=len(items),
                running=sum(len(replica.sent) for replica in fleet.of(name)),
                stranded=0 if model.ready else len(items),
            )
        )  # fmt: skip
    return RouterDemand(window_s=WINDOW_S, models=tuple(found))


def routes(
    loop: asyncio.AbstractEventLoop, page: Callable[[], dict[str, Any]],
    demand: Callable[[], RouterDemand], drain: Callable[[], None],
) -> dict[str, Route]:  # fmt: skip
    """The routes that a router adds to its ops port."""

    async def snapshot() -> dict[str, Any]:
        return page()

    async def demanded() -> RouterDemand:
        return demand()

    def debug_queue() -> Reply:
        found = _on_loop(loop, snapshot())
        return json_reply(found) if found is not None else _silent()

    def show_demand() -> Reply:
        found = _on_loop(loop, demanded())
        return json_reply(found) if found is not None else _silent()

    def start_drain() -> Reply:
        loop.call_soon_threadsafe(drain)
        return json_reply({"draining": True}, 202)

    return {
        "GET /debug/queue": debug_queue,
        "GET /demand": show_demand,
        "POST /drain": start_drain,
    }


def _on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of a coroutine on the loop; None when the loop does not answer in time."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(SNAPSHOT_S)
    except concurrent.futures.TimeoutError:
        future.cancel()
        return None


def _silent() -> Reply:
    return Reply(b"the event loop does not answer; see /healthz\n", 503)


def _waiting(item: Queued, run: Run, now: float) -> Waiting:
    return Waiting(
        id=item.id,
        age_s=now - item.arrival_s,
        due_in_s=item.due_s - now,
        work_s=item.work_s,
        slack_s=item.due_s - now - item.work_s,
        slack_ratio=queued_slack(item, now),
        promised=item.promised,
        slo_class=run.request.slo_class,
        prompt_tokens=run.request.prompt_tokens,
        replica=item.replica,
        why=_why(item, run),
    )


def _why(item: Queued, run: Run) -> str:
    if run.moves:
        return "its replica was lost; waits for another"
    if not item.replica:
        return "no replica has room for it before its deadline"
    if item.promised:
        return f"promised on {item.replica}; waits for its grant"
    return f"without a promise; placed on {item.replica}, behind what was promised"
