"""Encode waiting requests again if no replica serves their model version any more.

A rolling update to another tokenizer ends with the drain of the last replica of the old version.
Requests that wait for that version have tokens that no other replica can read. A request without
output is encoded again and continues in a version that serves. A request with output waits for its
version and fails after its timeout.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Iterator

from medha.errors import MedhaError, RequestError
from medha_router.generation import ClientRequest, Generation
from medha_router.models import ServedModel
from medha_router.request_table import RouterState
from medha_router.service import Service

RECONNECT_S = 1.0
"""A replica that only lost its link reconnects within this time."""
LANES = 16
"""Requests of a model that are encoded again at the same time."""


class Retokenizer:
    """Moves the stranded requests of one router to other versions; call `tick` regularly."""

    def __init__(self, state: RouterState, service: Service) -> None:
        self._models, self._requests, self._clock = state.models, state.requests, state.clock
        self._service = service
        self._lanes: dict[asyncio.Task[None], str] = {}  # with the names of their models
        # By model, why requests could not move and how often, and the causes last logged.
        self._refused: dict[str, collections.Counter[str]] = {}
        self._logged: dict[str, frozenset[str]] = {}
        self._log = logging.getLogger("medha.router")

    def tick(self) -> None:
        """Start to move stranded requests. Usually there is one version and nothing to do.

        The next ones start after all of these.
        """
        moving = set(self._lanes.values())
        for name, model in self._models.items():
            if not model.ready or len(model.versions) < 2 or name in moving:
                continue
            if stranded := self._stranded(model):
                waiting = iter(stranded)
                for _ in range(min(LANES, len(stranded))):
                    task = asyncio.get_running_loop().create_task(self._move_all(waiting, model))
                    self._lanes[task] = name
                    task.add_done_callback(self._ended)

    async def stop(self) -> None:
        for task in (tasks := list(self._lanes)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, lane: asyncio.Task[None]) -> None:
        """Log once why requests of a model could not move, after all of its lanes."""
        name = self._lanes.pop(lane)
        if name in self._lanes.values():
            return
        refused = self._refused.pop(name, collections.Counter())
        for cause, count in refused.items():
            if cause not in self._logged.get(name, ()):
                self._log.warning(
                    "%d requests of %s cannot move to another version yet: %s", count, name, cause
                )
        self._logged[name] = frozenset(refused)

    def _closed(self, model: ServedModel) -> set[str]:
        """Return the versions that closed some time ago."""
        now = self._clock()
        return {
            key
            for key, version in model.versions.items()
            if not version.open and now - version.closed_s > RECONNECT_S
        }

    def _stranded(self, model: ServedModel) -> list[ClientRequest]:
        """Return the client requests with waiting generations without tokens whose version
        closed some time ago."""
        closed = self._closed(model)
        if not any(model.dispatcher.waiting_for(key) for key in closed):
            return []
        stranded = {
            id(generation.client_request): generation.client_request
            for generation in model.dispatcher.items()
            if generation.version in closed and not generation.output.tokens
        }
        return [
            client_request
            for client_request in stranded.values()
            if model.open_versions(client_request.adapter)
        ]

    def _stranded_of(self, client_request: ClientRequest, model: ServedModel) -> list[Generation]:
        """Return those generations of one client request, which may have ended."""
        closed = self._closed(model)
        return [
            generation
            for generation in client_request.generations
            if generation.version in closed
            and not generation.output.tokens
            and model.dispatcher.get(generation.id) is generation
        ]

    async def _move_all(self, waiting: Iterator[ClientRequest], model: ServedModel) -> None:
        for client_request in waiting:
            if self._stranded_of(client_request, model):
                await self._move(client_request, model)

    async def _move(self, client_request: ClientRequest, model: ServedModel) -> None:
        try:
            version = model.choose_version(client_request.adapter)
            prompts = await self._service.encode_for(client_request, model, version)
            if not version.open:
                return  # the next tick chooses another
            now = self._clock()
            for generation in self._stranded_of(client_request, model):
                model.dispatcher.drop(generation.id, None, now)
                self._service.change_version(
                    generation,
                    model,
                    version,
                    prompts[generation.index // client_request.params.n],
                )
                model.dispatcher.resume(generation, now)
            self._requests.changed()
            self._log.info(
                "moved to another version", extra={"fields": {"request": client_request.id}}
            )
        except RequestError as error:
            self._requests.fail(client_request, error, self._clock())
        except MedhaError as error:  # no version serves, or its tokenizer ended: retried later
            self._refused.setdefault(model.name, collections.Counter())[str(error)] += 1
