"""Routes of the router's ops port: waiting requests, demand, drain.

They run on the threads of the ops server and take snapshots on the event loop. If the loop does not
respond in time, the status is 503.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from medha.adapters.prometheus import Reply, Route, SharedRoute, json_reply
from medha.fleet.demand import WINDOW_S, DemandWindow
from medha.fleet.request_queue import QueuedRequest
from medha.messages import RouterDemand
from medha_router.generation import Generation
from medha_router.models import ServedModel
from medha_router.replicas import ReplicaTable
from medha_router.router_metrics import queued_slack

SNAPSHOT_S = 2.0
MAX_LISTED = 1000

T = TypeVar("T")


class WaitingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A waiting request as JSON. `slack_ratio` is slack divided by work."""

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


def queue_page(
    models: Mapping[str, ServedModel], replicas: ReplicaTable, now: float
) -> dict[str, Any]:
    """Return `/debug/queue`: waiting requests of each model by urgency, and its replicas."""
    page: dict[str, Any] = {}
    for name, model in models.items():
        items = model.dispatcher.waiting(now)
        page[name] = {
            "open": model.ready,
            "waiting": len(items),
            "cached_pages": model.dispatcher.cached_pages,
            "requests": [
                _waiting(item, generation, now)
                for item in items[:MAX_LISTED]
                if (generation := model.dispatcher.get(item.id)) is not None
            ],
            "replicas": [
                {
                    "name": replica.name,
                    "open": replica.open and model.serves(replica.version),
                    "draining": replica.draining,
                    "running": len(replica.sent),
                    "load": replica.load,
                }
                for replica in replicas.of(name)
            ],
        }
    return page


def demand_page(
    models: Mapping[str, ServedModel], replicas: ReplicaTable, demand: DemandWindow, now: float
) -> RouterDemand:
    """Return `/demand`: recent demand for each model."""
    demands = []
    for name, model in models.items():
        items = model.dispatcher.waiting(now)
        demands.append(
            demand.of(
                name,
                now,
                backlog_s=sum(item.work_s for item in items),
                waiting=len(items),
                running=sum(len(replica.sent) for replica in replicas.of(name)),
                stranded=0 if model.ready else len(items),
            )
        )
    return RouterDemand(window_s=WINDOW_S, models=tuple(demands))


def routes(
    loop: asyncio.AbstractEventLoop,
    page: Callable[[], dict[str, Any]],
    demand: Callable[[], RouterDemand],
    drain: Callable[[], None] | None,
) -> dict[str, Route]:
    """Make the routes that a router adds to its ops port; without `drain`, none that changes it."""

    async def snapshot() -> dict[str, Any]:
        return page()

    async def demand_snapshot() -> RouterDemand:
        return demand()

    def debug_queue() -> Reply:
        queue = _on_loop(loop, snapshot())
        return json_reply(queue) if queue is not None else _unresponsive()

    def show_demand() -> Reply:
        demand = _on_loop(loop, demand_snapshot())
        return json_reply(demand) if demand is not None else _unresponsive()

    shown: dict[str, Route] = {
        "GET /debug/queue": SharedRoute(debug_queue),
        "GET /demand": SharedRoute(show_demand),
    }
    if drain is None:
        return shown

    def start_drain() -> Reply:
        loop.call_soon_threadsafe(drain)
        return json_reply({"draining": True}, 202)

    return {**shown, "POST /drain": start_drain}


def _on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T | None:
    """Run a coroutine on the loop and return its result; None after SNAPSHOT_S."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result(SNAPSHOT_S)
    except concurrent.futures.TimeoutError:
        future.cancel()
        return None


def _unresponsive() -> Reply:
    return Reply(b"the event loop does not respond; see /healthz\n", 503)


def _waiting(item: QueuedRequest, generation: Generation, now: float) -> WaitingRequest:
    return WaitingRequest(
        id=item.id,
        age_s=now - item.arrival_s,
        due_in_s=item.due_s - now,
        work_s=item.work_s,
        slack_s=item.due_s - now - item.work_s,
        slack_ratio=queued_slack(item, now),
        promised=item.promised,
        slo_class=generation.request.slo_class,
        prompt_tokens=generation.request.prompt_tokens,
        replica=item.replica,
        why=_reason(item, generation),
    )


def _reason(item: QueuedRequest, generation: Generation) -> str:
    if generation.moves:
        return "lost its replica; waits for another"
    if not item.replica:
        return "no replica has room before its deadline"
    if item.promised:
        return f"promised on {item.replica}; waits for its grant"
    return f"without a promise; placed on {item.replica}, behind promised requests"
