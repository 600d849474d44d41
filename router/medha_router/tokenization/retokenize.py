"""Encode waiting requests again if no replica serves their model version any more.

A rolling update to another tokenizer ends with the drain of the last replica of the old version.
Requests that wait for that version have tokens that no other replica can read. A request without
output is encoded again and continues in a version that serves. A request with output waits for its
version and fails after its timeout.
"""

from __future__ import annotations

import asyncio
import logging

from medha.errors import MedhaError, RequestError
from medha_router.generation import ClientRequest, Generation
from medha_router.models import ServedModel
from medha_router.request_table import RouterState
from medha_router.service import Service

RECONNECT_S = 1.0
"""A replica that only lost its link reconnects within this time."""


class Retokenizer:
    """Moves the stranded requests of one router to other versions; call `tick` regularly."""

    def __init__(self, state: RouterState, service: Service) -> None:
        self._models, self._requests, self._clock = state.models, state.requests, state.clock
        self._service = service
        self._moving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = logging.getLogger("medha.router")

    def tick(self) -> None:
        """Start to move stranded requests. Usually there is one version and nothing to do."""
        for model in self._models.values():
            if not model.ready or len(model.versions) < 2:
                continue
            for client_request in {
                id(generation.client_request): generation.client_request
                for generation in self._stranded(model)
            }.values():
                served = model.open_versions(client_request.adapter)
                if served and client_request.id not in self._moving:
                    task = asyncio.get_running_loop().create_task(self._move(client_request, model))
                    self._moving.add(client_request.id)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stranded(self, model: ServedModel) -> list[Generation]:
        """Return waiting generations without tokens whose version closed some time ago."""
        now = self._clock()
        closed = {
            key
            for key, version in model.versions.items()
            if not version.open and now - version.closed_s > RECONNECT_S
        }
        if not any(model.dispatcher.waiting_for(key) for key in closed):
            return []
        return [
            generation
            for generation in model.dispatcher.items()
            if generation.version in closed and not generation.output.tokens
        ]

    async def _move(self, client_request: ClientRequest, model: ServedModel) -> None:
        try:
            version = model.choose_version(client_request.adapter)
            prompts = await self._service.encode_for(client_request, model, version)
            if not version.open:
                return  # the next tick chooses another
            now = self._clock()
            for generation in self._stranded(model):
                if generation.client_request is client_request:
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
        except (
            MedhaError
        ) as error:  # no version serves, or its tokenizer ended: the next tick retries
            self._log.warning("cannot move to another version yet: %s", error)
        finally:
            self._moving.discard(client_request.id)
