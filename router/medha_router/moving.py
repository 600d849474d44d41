"""Requests that wait for an edition of their model which no replica serves any more.

Towards the end of a rolling update to another tokenizer the last replica of the former edition
drains, and what waits for it was made into tokens that no other can read. Such a request has no
part of its answer yet: it is made into tokens anew, and goes on as one of an edition that serves.
One that has begun to answer cannot: it waits for its edition, and fails when its time is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from medha.errors import MedhaError, RequestError
from medha_router.ledger import Ledger
from medha_router.models import ServedModel
from medha_router.runs import Answer, Run
from medha_router.service import Service

PATIENCE_S = 1.0
"""A replica that only lost its link is back within so long."""


class Mover:
    """Looks after the waiting requests of one router; `tick` it now and then."""

    def __init__(
        self, models: Mapping[str, ServedModel], service: Service, ledger: Ledger,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._models, self._service, self._ledger = models, service, ledger
        self._clock = clock
        self._moving: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = logging.getLogger("medha.router")

    def tick(self) -> None:
        """Begin to move what has to move; with one edition, which is usual, there is nothing."""
        for model in self._models.values():
            if not model.ready or len(model.editions) < 2:
                continue
            for answer in {id(run.answer): run.answer for run in self._stranded(model)}.values():
                if answer.id not in self._moving:
                    task = asyncio.get_running_loop().create_task(self._move(answer, model))
                    self._moving.add(answer.id)
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in (left := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _stranded(self, model: ServedModel) -> list[Run]:
        """Runs without a token that wait for an edition which has been closed for some time."""
        now = self._clock()
        closed = {
            key for key, each in model.editions.items()
            if not each.open and now - each.closed_s > PATIENCE_S
        }  # fmt: skip
        if not any(model.dispatch.waits_for(key) for key in closed):
            return []
        return [
            run for run in model.dispatch.held() if run.edition in closed and not run.output.tokens
        ]

    async def _move(self, answer: Answer, model: ServedModel) -> None:
        try:
            edition = model.edition()
            prompts = await self._service.encoded(answer, model, edition)
            if not edition.open:
                return  # the next tick finds another
            now = self._clock()
            for run in self._stranded(model):
                if run.answer is answer:
                    model.dispatch.drop(run.id, None, now)
                    self._service.retell(run, model, edition, prompts[run.index // answer.ask.n])
                    model.dispatch.resume(run, now)
            self._ledger.changed()
            self._log.info("goes on in another edition", extra={"fields": {"request": answer.id}})
        except RequestError as error:
            self._ledger.fail(answer, error, self._clock())
        except MedhaError as error:  # no edition serves, or its tokenizer ended: the next tick
            self._log.warning("cannot go on in another edition yet: %s", error)
        finally:
            self._moving.discard(answer.id)
