"""Every live request of this router, and the ways in which it ends.

A generation is in exactly one place: it waits in the dispatcher of its model, or it was sent to one
replica. It can be requeued with the tokens so far; a client request finishes, fails, expires or is
cancelled.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from medha.config import PROGRESS_TOKENS, RouterConfig
from medha.errors import MedhaError, Refusal, RequestError
from medha.fleet.use_meter import UseMeter
from medha.messages import Abort, RouterMessage, RouterPorts, Welcome
from medha_router.api_errors import StreamBroken
from medha_router.generation import (
    MAX_MOVES,
    POISON_DEATHS,
    ClientRequest,
    Generation,
)
from medha_router.models import ModelRegistry, ServedModel
from medha_router.replicas import ConnectedReplica, ReplicaTable
from medha_router.router_metrics import RouterMetrics

Send = Callable[[bytes, RouterMessage], bool]
Later = Callable[[Callable[[], None]], object]


def at_once(step: Callable[[], None]) -> None:
    """Run a step that may be run later."""
    step()


class RequestTable:
    """Client requests and generations by id.

    `send` puts a message on the link and returns False if it cannot. `changed` is called when heads
    may have changed. `later` runs a step that nothing waits for.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        replicas: ReplicaTable,
        metrics: RouterMetrics,
        send: Send,
        changed: Callable[[], None],
        later: Later = at_once,
    ) -> None:
        self._models, self._replicas, self._metrics = models, replicas, metrics
        self._send, self.changed, self._later = send, changed, later
        self._log = logging.getLogger("medha.router")
        self._client_requests: dict[str, ClientRequest] = {}
        self._generations: dict[str, Generation] = {}

    def __len__(self) -> int:
        return len(self._client_requests)

    def add(self, client_request: ClientRequest) -> None:
        """Add a client request whose generations all wait in the dispatcher."""
        self._client_requests[client_request.id] = client_request
        self._generations.update(
            {generation.id: generation for generation in client_request.generations}
        )
        self.changed()

    def sent_to(self, replica: ConnectedReplica) -> list[Generation]:
        """Return the generations that a replica serves."""
        generations = [self._generations.get(sent) for sent in sorted(replica.sent)]
        return [
            generation
            for generation in generations
            if generation is not None and generation.peer == replica.peer
        ]

    def find(self, replica: ConnectedReplica, id: str) -> Generation | None:
        """Return the generation if the replica serves it; else send Abort for the id."""
        generation = self._generations.get(id)
        if generation is None or generation.peer != replica.peer:
            self._send(replica.peer, Abort(id))
            return None
        return generation

    def release(self, generation: Generation, now: float) -> None:
        """Take the generation away from its replica and from the dispatcher."""
        replica = self._replicas.get(generation.peer) if generation.peer is not None else None
        if replica is not None:
            replica.sent.discard(generation.id)
        self._of(generation.client_request).dispatcher.drop(
            generation.id, replica.name if replica else None, now
        )
        generation.peer = None

    def abort(self, generation: Generation, now: float) -> None:
        """Stop a generation, on its replica too."""
        if generation.peer is not None:
            self._send(generation.peer, Abort(generation.id))
        self.release(generation, now)
        self._generations.pop(generation.id, None)

    def requeue(
        self, generation: Generation, now: float, *, failed: bool = True, died: bool = False
    ) -> None:
        """Queue a generation again, or fail it after too many moves or deaths of replicas.

        `failed` False: its replica may still live, which does not count against the generation.
        If only the message of its end is missing, it ends here: another replica would go on.
        """
        if (reason := generation.complete_for) is not None:
            self.complete(generation, reason, now)
            return
        self.release(generation, now)
        if failed:
            if generation.output_tokens - generation.tokens_at_failure >= PROGRESS_TOKENS:
                generation.moves = generation.deaths = 0
            generation.tokens_at_failure = generation.output_tokens
            generation.moves += 1
            generation.deaths += died
        if generation.deaths >= POISON_DEATHS or generation.moves > MAX_MOVES:
            self.fail(generation.client_request, _last_error(generation), now)
            return
        self._metrics.moved(generation)
        generation.waiting_since_s = now
        self._of(generation.client_request).dispatcher.resume(generation, now)
        self.changed()

    def complete(
        self, generation: Generation, reason: Literal["stop", "length"], now: float
    ) -> None:
        """End a generation whose replica gave its last token."""
        self.release(generation, now)
        generation.client_request.push(generation.index, generation.output.end(reason))
        self.finish(generation, now)

    def finish(self, generation: Generation, now: float) -> None:
        """End a generation that has all tokens; the last one ends its client request."""
        generation.done = True
        self._generations.pop(generation.id, None)
        client_request = generation.client_request
        output_tokens: int | None = None
        if client_request.done and self._client_requests.pop(client_request.id, None) is not None:
            output_tokens = client_request.output_tokens
        self._later(functools.partial(self._record_end, generation, output_tokens, now))

    def _record_end(self, generation: Generation, output_tokens: int | None, now: float) -> None:
        """Record the end of a generation, and of its client request if it has all its tokens."""
        self._metrics.finished(generation, now)
        if output_tokens is not None:
            fields = generation.client_request.log_fields
            self._log.info("finished with %d tokens", output_tokens, extra={"fields": fields})

    def fail(self, client_request: ClientRequest, error: MedhaError, now: float) -> None:
        """End a client request and its generations with an error, unless it has ended."""
        if self._end(client_request, now):
            self._metrics.failed(client_request, error, now)
            # The message of a RequestError may quote the prompt.
            reason = error.code if isinstance(error, RequestError) else error
            self._log.warning("failed: %s", reason, extra={"fields": client_request.log_fields})
            client_request.fail(error)

    def cancel(self, client_request: ClientRequest, now: float) -> None:
        """End a client request whose client has disconnected, unless it has ended."""
        if self._end(client_request, now):
            self._metrics.cancelled(client_request)
            self._log.info(
                "cancelled: its connection ended",
                extra={"fields": client_request.log_fields},
            )

    def expire(self, now: float, config: RouterConfig) -> Iterator[None]:
        """Fail requests that waited too long, in steps of one request."""
        for client_request in list(self._client_requests.values()):
            if client_request.id in self._client_requests:
                self._expire(client_request, now, config)
            yield

    def _expire(self, client_request: ClientRequest, now: float, config: RouterConfig) -> None:
        """Fail a request that waited too long for a replica, or for room on a replica.

        The two waits count separately: each begins when the model became ready or stopped being so.
        Without any replica of the model, one is coming back; without one of the request's version,
        that version is gone. Room for an output may come only with the end of another one of the
        same request.
        """
        waiting = [
            generation
            for generation in client_request.generations
            if generation.peer is None and not generation.done
        ]
        if not waiting:
            return
        model = self._of(client_request)
        client_request.held = client_request.held or not model.ready
        since_s = min(generation.waiting_since_s for generation in waiting)
        waited_s = now - max(since_s, model.ready_changed_s)
        if not all(model.serves(generation.version) for generation in waiting):
            gone = model.ready
            patience_s = config.no_replica_timeout_s if gone else config.recovery_timeout_s
            if waited_s <= model.patience_s(patience_s):
                return
            error = Refusal(
                "no_replica",
                "the replicas of this model are gone: retry later",
                retry_after_s=5.0,
            )
        elif not any(generation.peer for generation in client_request.generations) and min(
            waited_s, now - client_request.last_token_s
        ) > max(config.queue_timeout_s, client_request.promise_s or 0.0):
            error = Refusal(
                "overloaded",
                f"waited {waited_s:.0f} s for room: retry later",
                retry_after_s=model.dispatcher.retry_after_s(),
            )
        else:
            return
        self._metrics.refused(model.name, client_request.slo_class.name, error.code, now)
        self.fail(client_request, error, now)

    def _end(self, client_request: ClientRequest, now: float) -> bool:
        if self._client_requests.pop(client_request.id, None) is None:
            return False
        for generation in client_request.generations:
            if not generation.done:
                self.abort(generation, now)
        self.changed()
        return True

    def _of(self, client_request: ClientRequest) -> ServedModel:
        return self._models[client_request.model]


def _last_error(generation: Generation) -> StreamBroken:
    """Return the error of a generation that is not moved again."""
    if generation.deaths >= POISON_DEATHS:
        return StreamBroken(
            "poison_request",
            f"{generation.deaths} replicas died while serving this request: it is not retried",
        )
    return StreamBroken(
        "replica_failed",
        f"the request was tried {generation.moves} times and could not be finished",
    )


@dataclasses.dataclass(frozen=True)
class RouterState:
    """The tables of one router, with its clock and its link to controllers.

    `router` names this incarnation of the router; `ports` are those of its processes, if there are
    several.
    """

    router: str
    models: ModelRegistry
    replicas: ReplicaTable
    requests: RequestTable
    metrics: RouterMetrics
    send: Send
    clock: Callable[[], float]
    meter: UseMeter = dataclasses.field(default_factory=UseMeter)
    ports: tuple[int, ...] = ()

    def welcome(self, peer: bytes) -> None:
        """Accept a controller, and send it the ports of the other processes."""
        self.send(peer, Welcome(self.router))
        if self.ports:
            self.send(peer, RouterPorts(self.ports))
