"""The router's side of the conversation with registered controllers.

    Heads -> Grant -> Submit -> Accepted -> Tokens ... -> Finished | Failed        Abort
    Heads with Submit        -> Accepted ...

Publishes the heads of each model's queue, submits what a replica grants, and turns its tokens into
deltas of the client request. If few wait, the Submit of a short prompt goes with its head, so that
a replica with room begins it a round trip sooner. `registration` handles Hello and tokenizer files.
The link's loop calls `receive` with each message, and `tick` and `publish` regularly.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Literal

import msgspec

from medha.config import STALL_S
from medha.errors import MedhaError, Refusal
from medha.fleet.request_queue import QueuedRequest
from medha.messages import (
    MAX_EARLY_SUBMITS,
    Abort,
    Accepted,
    Failed,
    FilePart,
    Finished,
    Grant,
    Heads,
    Hello,
    KvEvents,
    LoadReport,
    PromptLogprobs,
    Rejected,
    ReplicaMessage,
    RouterBeat,
    Submit,
    TenantCounts,
    Tokens,
    Welcome,
)
from medha_router.api_errors import StreamBroken
from medha_router.generation import Generation
from medha_router.models import ServedModel
from medha_router.registration import Registration
from medha_router.replicas import ConnectedReplica
from medha_router.request_table import RouterState
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.tokenizer_files import FileStore
from medha_router.turns import TURN_S

REPUBLISH_HEADS_S = 0.25
SNAPSHOT_RETRY_S = 1.0
MOVED_WORK_S = 2.0
"""Predicted seconds to compute a request's tokens again, up to which it leaves a replica that may
hang: about as long as it takes until that is certain."""
EARLY_BYTES = 32 << 10
"""Longest prompt whose Submit goes with its head, with the names of its pages and its grammar."""
COUNTS_THROUGH = 2  # controllers, so that the loss of one loses no report


class ReplicaClient:
    """Conversation of a router with every registered controller."""

    def __init__(self, state: RouterState, files: FileStore, tokens: TokenizerPool) -> None:
        self._router, self._send, self._clock = state.router, state.send, state.clock
        self._models, self._replicas = state.models, state.replicas
        self._requests, self._metrics = state.requests, state.metrics
        self._meter = state.meter
        self._registration = Registration(state, files, tokens, lost=self._forget_heads)
        self._log = logging.getLogger("medha.router")
        # By name of the replica: its heads, as (id, promised), and when they were sent.
        self._published: dict[str, tuple[tuple[tuple[str, bool], ...], float]] = {}
        self._early: dict[str, set[str]] = {}  # by name: heads whose Submit went with them
        self._placing: dict[str, None] = {}  # models that may have requests to place
        self._snapshot_requested_s: dict[str, float] = {}
        self._reported: set[bytes] = set()  # peers whose latest load the dispatcher lacks
        self._ticked_s = self._clock()

    # --- messages and time ------------------------------------------------------------------------

    def receive(self, peer: bytes, message: ReplicaMessage) -> None:
        """Process one message. A message that does not fit is logged and dropped."""
        try:
            self._receive(peer, message)
        except MedhaError as error:
            self._log.warning("dropped %s: %s", type(message).__name__, error)

    def tick(self) -> None:
        """Send heartbeats, retry fetches, remove silent replicas. At least every 0.5 s.

        After a pause of its own, the router first reads the waiting messages: no replica counts as
        silent in that tick.
        """
        now = self._clock()
        paused, self._ticked_s = now - self._ticked_s > STALL_S, now
        for replica, reason in [] if paused else self._replicas.dead(now):
            self._registration.remove(replica, reason)
        for replica in self._replicas:
            if self._send(replica.peer, RouterBeat()):
                replica.life.connected()
            if not paused:
                self._avoid(replica, now)
        for model in self._models.values():
            if len(model.versions) > 1:  # the requests of an old one may have ended
                self._registration.reopen(model)
        self._report_counts(now)
        self._registration.retry_fetches(now)

    def _report_counts(self, now: float) -> None:
        """Report what tenants use to the other routers, through two controllers at most."""
        peers = [replica.peer for replica in itertools.islice(self._replicas, COUNTS_THROUGH)]
        if peers and (counts := self._meter.report(now)):
            for peer in peers:
                self._send(peer, TenantCounts(self._router, counts))

    def closed(self, peer: bytes) -> None:
        """Note the end of a connection; a beat that can be sent shows that there is another."""
        if (replica := self._replicas.get(peer)) is not None:
            replica.life.disconnected(self._clock())

    async def settled(self) -> None:
        """Wait until no tokenizer is being loaded."""
        await self._registration.settled()

    def _receive(self, peer: bytes, message: ReplicaMessage) -> None:
        now = self._clock()
        if isinstance(message, Hello):
            self._registration.greet(peer, message, now)
            return
        replica = self._replicas.get(peer)
        if replica is None:
            self._send(peer, Rejected("unknown controller: send Hello first", stranger=True))
            return
        replica.life.seen(now)
        match message:  # the most frequent first
            case Tokens():
                self._on_tokens(replica, message, now)
            case LoadReport():
                self._on_load(replica, message, now)
            case Grant():
                self._on_grant(replica, message, now)
            case Accepted():
                self._on_accepted(replica, message, now)
            case PromptLogprobs():
                self._on_prompt_logprobs(replica, message, now)
            case Finished():
                self._on_finished(replica, message, now)
            case Failed():
                self._on_failed(replica, message, now)
            case KvEvents():
                self._on_kv_events(replica, message, now)
            case TenantCounts() if message.router != self._router:
                self._meter.receive(message.router, message.counts, now)
            case FilePart():
                self._registration.receive_part(replica, message, now)

    # --- heads ------------------------------------------------------------------------------------

    def publish(self, *, places: bool = True) -> bool:
        """Place waiting requests for a turn, and send each replica its heads if they changed.

        Without `places`, no model begins with its requests again. Returns True if requests wait.
        """
        now = self._clock()
        for peer in self._reported:
            if (replica := self._replicas.get(peer)) is not None:
                dispatcher = self._models[replica.hello.model].dispatcher
                dispatcher.update_replica(replica, replica.load_s)
        self._reported.clear()
        for model in self._models.values():
            for generation in model.dispatcher.relegate_late(now):
                generation.request = msgspec.structs.replace(generation.request, promised=False)
                self._metrics.relegated(generation)
            if places and len(model.dispatcher):
                self._placing.setdefault(model.name)
        self.place()
        for model in self._models.values():
            heads = model.dispatcher.heads(now)
            for replica in self._replicas.of(model.name):
                self._publish_to(replica, model, heads.get(replica.name, ()), now)
        return any(len(model.dispatcher) for model in self._models.values())

    def place(self) -> bool:
        """Place waiting requests for a turn, of each model in turn; True if some are left.

        With many replicas, to place the requests of a lost one takes seconds.
        """
        until_s = self._clock() + TURN_S
        while self._placing:
            name = next(iter(self._placing))
            del self._placing[name]
            model, now = self._models.get(name), self._clock()
            if model is not None and model.dispatcher.place_next(now):
                self._placing[name] = None
            if now > until_s:
                break
        return self.placing

    @property
    def placing(self) -> bool:
        """True if waiting requests are left to place."""
        return bool(self._placing)

    def _publish_to(
        self,
        replica: ConnectedReplica,
        model: ServedModel,
        heads: Sequence[QueuedRequest],
        now: float,
    ) -> None:
        published = tuple([(head.id, head.promised) for head in heads])
        before, published_s = self._published.get(replica.name, ((), now))
        if published == before and (not heads or now - published_s < REPUBLISH_HEADS_S):
            return
        submits: tuple[Submit, ...] = ()
        if len(published) <= MAX_EARLY_SUBMITS:
            fresh = [model.dispatcher.get(head[0]) for head in published if head not in before]
            early = [generation.submit(now) for generation in fresh if generation is not None]
            submits = tuple(submit for submit in early if _bytes_of(submit) <= EARLY_BYTES)
        if self._send(replica.peer, Heads(model.dispatcher.published(heads, now), submits)):
            self._published[replica.name] = (published, now)
            known = self._early.get(replica.name, set()).intersection(head[0] for head in published)
            self._early[replica.name] = known.union(submit.id for submit in submits)

    def _submitted(self, replica: ConnectedReplica, ids: set[str]) -> None:
        """Note that a replica drops the heads of these requests without a further message."""
        published, published_s = self._published.get(replica.name, ((), 0.0))
        left = tuple(head for head in published if head[0] not in ids)
        self._published[replica.name] = left, published_s
        self._early.get(replica.name, set()).difference_update(ids)

    def _forget_heads(self, name: str) -> None:
        self._published.pop(name, None)
        self._early.pop(name, None)

    def _served(self, replica: ConnectedReplica, id: str, now: float) -> Generation | None:
        """Return the generation if the replica serves it; else send Abort for the id.

        It serves a generation that it began without a Grant, if that is still placed on it.
        """
        if id in self._early.get(replica.name, ()):
            dispatcher = self._models[replica.hello.model].dispatcher
            generation = dispatcher.take(id, replica.name, now)
            if generation is not None:
                self._sent(replica, generation, now)
                self._submitted(replica, {id})
        return self._requests.find(replica, id)

    def _sent(self, replica: ConnectedReplica, generation: Generation, now: float) -> None:
        generation.peer = replica.peer
        replica.sent.add(generation.id)
        self._metrics.dispatched(generation, now)

    def _on_load(self, replica: ConnectedReplica, report: LoadReport, now: float) -> None:
        """Take over a load report.

        Reports come up to 50 times a second, and the dispatcher scans all requests of the replica
        for each. So it takes over the latest report when heads are published, or at once if the
        replica opened, closed or drains.
        """
        model = self._models[replica.hello.model]
        was_open = replica.open
        replica.take(report, now)
        if was_open and replica.load is None:
            self._log.error("replica %s reports an impossible load: not used", replica.name)
        if replica.open != was_open or replica.draining:
            model.dispatcher.update_replica(replica, now)
        else:
            self._reported.add(replica.peer)
        if model.takes(replica) != replica.open:
            self._registration.reopen(model)
        self._avoid(replica, now)
        if replica.empty and replica.sent and model.serves(replica.version):
            self._requeue_all(replica, now)
        self._requests.changed()

    def _requeue_all(self, replica: ConnectedReplica, now: float) -> None:
        """Move the requests of a replica without KVP groups to other replicas.

        Another replica begins sooner than this one has ranks again. If no other replica serves the
        version, the requests stay.
        """
        generations = self._requests.sent_to(replica)
        self._log.warning("replica %s has no group: moving %d", replica.name, len(generations))
        for generation in generations:
            self._send(replica.peer, Abort(generation.id))
            self._requests.requeue(generation, now, died=True)

    def _avoid(self, replica: ConnectedReplica, now: float) -> None:
        """Avoid a replica while it may hang, if another one serves its version.

        Requests that another replica can soon compute again move there; the others wait until the
        replica goes on, or is lost.
        """
        hangs = replica.may_hang(now)
        if not hangs and not replica.avoided:
            return
        model = self._models[replica.hello.model]
        others = (other for other in self._replicas.of(model.name) if other is not replica)
        avoided = hangs and any(other.open and other.version == replica.version for other in others)
        if avoided == replica.avoided:
            return
        replica.avoided = avoided
        model.dispatcher.update_replica(replica, now)
        self._registration.reopen(model)
        if not avoided or not model.serves(replica.version):
            return
        moved = [
            generation
            for generation in self._requests.sent_to(replica)
            if self._work_again_s(model, generation) <= MOVED_WORK_S
        ]
        gone = replica.gone(now)
        state = "is probably dead" if gone else "may hang"
        self._log.warning("replica %s %s: moving %d", replica.name, state, len(moved))
        for generation in moved:
            self._send(replica.peer, Abort(generation.id))
            self._requests.requeue(generation, now, failed=gone, died=gone)

    def _work_again_s(self, model: ServedModel, generation: Generation) -> float:
        return model.dispatcher.idle_work_s(
            generation.prompt.length + generation.output_tokens,
            generation.hashes,
            generation.version,
            generation.request.tpot_s,
        )

    # --- requests ---------------------------------------------------------------------------------

    def _on_grant(self, replica: ConnectedReplica, grant: Grant, now: float) -> None:
        """Submit the granted requests that are still placed on the replica."""
        dispatcher = self._models[replica.hello.model].dispatcher
        submitted: set[str] = set()
        for granted in grant.ids:
            generation = dispatcher.take(granted, replica.name, now)
            if generation is None:
                continue
            if self._send(replica.peer, generation.submit(now)):
                submitted.add(granted)
                self._sent(replica, generation, now)
            else:
                self._requests.requeue(generation, now)
        self._submitted(replica, submitted)
        if len(dispatcher):  # others move up
            self._requests.changed()

    def _on_accepted(self, replica: ConnectedReplica, message: Accepted, now: float) -> None:
        generation = self._served(replica, message.id, now)
        if generation is None:
            return
        self._models[replica.hello.model].dispatcher.accepted(message.id, replica.name)
        if not generation.output.tokens:
            generation.cached_tokens = message.cached_tokens

    def _on_prompt_logprobs(
        self, replica: ConnectedReplica, message: PromptLogprobs, now: float
    ) -> None:
        """Add log probabilities of the prompt; a later attempt sends again what is known."""
        generation = self._served(replica, message.id, now)
        if generation is None:
            return
        known = 1 + len(generation.prompt_logprobs)
        if message.first > known:
            self._send(replica.peer, Abort(generation.id))
            self._requests.requeue(generation, now)
            return
        generation.prompt_logprobs += message.logprobs[known - message.first :]

    def _on_tokens(self, replica: ConnectedReplica, message: Tokens, now: float) -> None:
        """Add new tokens. After a gap, tokens are lost and the request is queued again."""
        generation = self._served(replica, message.id, now)
        if generation is None:
            return
        known = len(generation.output.tokens)
        if message.first > known or not generation.prompt_scored:
            self._send(replica.peer, Abort(generation.id))
            self._requests.requeue(generation, now)
            return
        tokens = message.tokens[known - message.first :]
        if not tokens:
            return
        self._metrics.tokens(generation, len(tokens), now, message.slack_ratio)
        delta = generation.output.push(tokens, message.logprobs[known - message.first :])
        if delta.finish is not None:
            self._requests.abort(generation, now)
        if delta.text or delta.logprobs or delta.finish is not None:
            generation.client_request.push(generation.index, delta)
        if delta.finish is not None:
            self._requests.finish(generation, now)

    def _on_finished(self, replica: ConnectedReplica, message: Finished, now: float) -> None:
        generation = self._served(replica, message.id, now)
        if generation is None:
            return
        if message.output_tokens != len(generation.output.tokens):
            self._log.warning("tokens are missing", extra={"fields": {"request": generation.id}})
            self._requests.requeue(generation, now)
            return
        reason: Literal["stop", "length"] = "stop" if message.reason == "stop" else "length"
        self._requests.complete(generation, reason, now)

    def _on_failed(self, replica: ConnectedReplica, message: Failed, now: float) -> None:
        """Queue a failed request again if it is retriable; else fail the client request."""
        generation = self._served(replica, message.id, now)
        if generation is None:
            return
        self._log.warning(
            "replica %s failed a request: %s",
            replica.name,
            message.code,
            extra={"fields": {"request": generation.id}},
        )
        if message.code == "draining":
            replica.draining = True
        if message.retriable:
            self._requests.requeue(generation, now)
        else:
            self._requests.fail(generation.client_request, _error_of(message), now)

    def _on_kv_events(self, replica: ConnectedReplica, events: KvEvents, now: float) -> None:
        """Apply prefix-cache changes. After a gap, Welcome requests a snapshot."""
        dispatcher = self._models[replica.hello.model].dispatcher
        if dispatcher.apply_kv_events(replica.name, events):
            return
        requested_s = self._snapshot_requested_s.get(replica.name, float("-inf"))
        if now - requested_s >= SNAPSHOT_RETRY_S:
            self._snapshot_requested_s[replica.name] = now
            self._send(replica.peer, Welcome(self._router))


def _bytes_of(submit: Submit) -> int:
    """Return the size of what may be long in a Submit."""
    return len(submit.tokens) + len(submit.hashes) + len(submit.sampling.grammar)


def _error_of(message: Failed) -> MedhaError:
    """Return the client's error for a request that a replica failed for good."""
    if message.code in ("context_length_exceeded", "overloaded", "deadline_infeasible"):
        return Refusal(message.code, message.message)
    if message.code == "grammar_failed":  # the client's own grammar
        return StreamBroken(message.code, message.message)
    return StreamBroken(message.code, "the replica could not finish this request")
