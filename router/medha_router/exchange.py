"""What this router and its replicas say to each other.

Takes controllers in, fetches their tokenizer files, publishes the heads of each model's queue,
submits what is granted, and turns their tokens into an answer's deltas. Sends through `send`; who
owns the link feeds `receive` and calls `tick`.

    Hello -> files -> vocabulary -> Welcome -> LoadReport -> open    Heads -> Grant -> Submit -> …
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from medha.config import STALL_S
from medha.errors import CheckpointError, MedhaError, ProtocolError, Refusal
from medha.messages import (
    Abort,
    Accepted,
    Failed,
    FilePart,
    Finished,
    Grant,
    Head,
    Heads,
    Hello,
    KvEvents,
    LoadReport,
    Rejected,
    ReplicaMessage,
    RouterBeat,
    Tokens,
    Welcome,
)  # fmt: skip
from medha_router.detokenizer import Vocabulary
from medha_router.editions import Edition
from medha_router.faults import StreamBroken
from medha_router.files import Fetch, FileStore
from medha_router.fleet import FILES, Fleet, Replica
from medha_router.learning import Models
from medha_router.ledger import Ledger, Send
from medha_router.metering import Meter
from medha_router.models import ServedModel
from medha_router.tokenizer import TokenizerPool

HEADS_AGAIN_S = 0.25
SNAPSHOT_AGAIN_S = 1.0


class Exchange:
    """One router's side of every conversation with controllers; `router` names its incarnation."""

    def __init__(
        self, router: str, models: Models, fleet: Fleet, ledger: Ledger,
        files: FileStore, tokens: TokenizerPool, meter: Meter, send: Send,
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self._router, self._models, self._fleet, self._ledger = router, models, fleet, ledger
        self._files, self._tokens, self._meter = files, tokens, meter
        self._send, self._clock = send, clock
        self._log = logging.getLogger("medha.router")
        self._fetches: dict[tuple[bytes, str], Fetch] = {}
        self._published: dict[str, tuple[tuple[str, ...], float]] = {}
        self._snapshot_asked_s: dict[str, float] = {}
        self._loading: dict[Edition, asyncio.Task[None]] = {}
        self._news: set[bytes] = set()  # replicas whose latest load is not taken over yet
        self._ticked_s = clock()

    # --- coming and going -------------------------------------------------------------------------

    def receive(self, peer: bytes, message: ReplicaMessage) -> None:
        """Take one message; what does not fit is logged and dropped, never raised."""
        try:
            self._receive(peer, message)
        except MedhaError as error:
            self._log.warning("dropped %s: %s", type(message).__name__, error)

    def tick(self) -> None:
        """Beat, ask again for what is missing, drop who is silent. At least every 0.5 s.

        After a pause of its own the router reads what waits before it calls anyone silent.
        """
        now = self._clock()
        paused, self._ticked_s = now - self._ticked_s > STALL_S, now
        for replica, why in [] if paused else self._fleet.silent(now):
            self._lost(replica, why)
        for replica in self._fleet:
            self._send(replica.peer, RouterBeat())
        for (peer, _), fetch in self._fetches.items():
            if (question := fetch.ask(now)) is not None:
                self._send(peer, question)

    def closed(self, peer: bytes) -> None:
        """A connection has ended: whoever it belonged to speaks soon on another, or is dead."""
        if (replica := self._fleet.get(peer)) is not None:
            replica.closed_s = self._clock()

    async def settled(self) -> None:
        """When no tokenizer is being loaded any more."""
        await asyncio.gather(*self._loading.values())

    def _receive(self, peer: bytes, message: ReplicaMessage) -> None:
        now = self._clock()
        if isinstance(message, Hello):
            self._greet(peer, message, now)
            return
        replica = self._fleet.get(peer)
        if replica is None:
            told = "say Hello first: this router does not know you"
            self._send(peer, Rejected(told, stranger=True))
            return
        self._fleet.heard(replica, now)
        match message:
            case LoadReport():
                self._reported(replica, message, now)
            case Grant():
                self._granted(replica, message, now)
            case Accepted():
                self._accepted(replica, message)
            case Tokens():
                self._on_tokens(replica, message, now)
            case Finished():
                self._finished(replica, message, now)
            case Failed():
                self._failed(replica, message, now)
            case KvEvents():
                self._cached(replica, message, now)
            case FilePart():
                self._part(replica, message, now)

    def _greet(self, peer: bytes, hello: Hello, now: float) -> None:
        known = self._fleet.get(peer)
        if known is not None and known.sent:  # it took us for dead and dropped what it ran for us
            self._lost(known, "it introduced itself anew")
        elif known is not None and known.hello == hello:
            self._fleet.heard(known, now)
            self._advance(known, now)
            return
        namesakes = [each for each in self._fleet.of(hello.model) if each.name == hello.replica]
        for old in namesakes:
            if old.hello.incarnation != hello.incarnation or old.peer != peer:
                self._lost(old, "another incarnation took its place")
        outcome = self._fleet.greet(peer, hello, now)
        if isinstance(outcome, Rejected):
            self._log.warning("rejected a controller: %s", outcome.reason)
            self._send(peer, outcome)
            return
        self._models.learn(hello, others=len(self._fleet.of(hello.model)) > 1)
        if broken := self._models[hello.model].met(outcome).broken:
            self._fleet.forget(outcome)
            self._send(peer, Rejected(broken))
            return
        self._log.info("replica %s joined", hello.replica)
        for name in FILES:
            digest = hello.files.get(name)
            if digest and self._files.get(digest) is None:
                self._fetches.setdefault((peer, digest), Fetch(digest))
        self._advance(outcome, now)

    def _lost(self, replica: Replica, reason: str) -> None:
        """A replica is gone: its runs wait again, their tokens kept."""
        now = self._clock()
        self._log.warning("replica %s is lost: %s", replica.name, reason)
        runs = self._ledger.sent_to(replica)
        self._fleet.forget(replica)
        self._published.pop(replica.name, None)
        for key in [key for key in self._fetches if key[0] == replica.peer]:
            del self._fetches[key]
        model = self._models[replica.hello.model]
        model.dispatch.left(replica.name)
        self._reopen(model)
        for run in runs:
            self._ledger.again(run, now, died=True)

    # --- tokenizer files --------------------------------------------------------------------------

    def _part(self, replica: Replica, part: FilePart, now: float) -> None:
        key = (replica.peer, part.hash)
        fetch = self._fetches.get(key)
        if fetch is None:
            return
        whole = fetch.take(part)
        if whole is not None:
            del self._fetches[key]
            try:
                self._files.put(part.hash, whole)
            except ProtocolError:
                self._fetches[key] = Fetch(part.hash, asked_s=now)
                raise
        self._advance(replica, now)

    def _advance(self, replica: Replica, now: float) -> None:
        """Ask for what is missing of a replica's files; load the tokenizer when all are here. It is
        welcome once it is loaded: whoever waits for that may end what served until then."""
        mine = [fetch for (peer, _), fetch in self._fetches.items() if peer == replica.peer]
        for fetch in mine:
            if (question := fetch.ask(now)) is not None:
                self._send(replica.peer, question)
        model = self._models[replica.hello.model]
        edition = model.met(replica)
        if mine or edition in self._loading:
            return
        if edition.vocabulary is not None:
            self._send(replica.peer, Welcome(self._router))
            self._reopen(model)
            return
        task = asyncio.get_running_loop().create_task(self._load(model, edition))
        self._loading[edition] = task
        task.add_done_callback(lambda _: self._loading.pop(edition, None))

    async def _load(self, model: ServedModel, edition: Edition) -> None:
        """Read the vocabulary off the loop, and have a tokenizer process load it too."""
        held = {
            name: self._files.get(digest) or b"" for name, digest in edition.hello.files.items()
        }
        files = edition.files(held)
        try:
            self._tokens.add(files)
            vocabulary = await asyncio.to_thread(Vocabulary, files.tokenizer)
            await self._tokens.warm(files.key)
            edition.vocabulary, model.unservable = vocabulary, ""
            for replica in self._of(model, edition):
                self._send(replica.peer, Welcome(self._router))
        except MedhaError as error:
            model.unservable = "this model's tokenizer does not load"
            self._log.error("the tokenizer of %s does not load: %s", model.name, error)
            if isinstance(error, CheckpointError):
                told = f"the tokenizer of {model.name} does not load: {error}"
                self._refuse(model, edition, told)
        self._reopen(model)

    def _refuse(self, model: ServedModel, edition: Edition, reason: str) -> None:
        """Nobody can be served by this edition: its replicas must not count as ready, or a rolling
        update would drain those that can."""
        edition.broken = reason[:500]
        for replica in self._of(model, edition):
            self._send(replica.peer, Rejected(edition.broken))
            self._lost(replica, reason)

    def _of(self, model: ServedModel, edition: Edition) -> list[Replica]:
        return [each for each in self._fleet.of(model.name) if each.edition == edition.key]

    def _reopen(self, model: ServedModel) -> None:
        """Open a model when a replica may take work whose tokenizer is known."""
        model.opened(self._fleet.of(model.name), self._clock())

    # --- requests ---------------------------------------------------------------------------------

    def publish(self) -> None:
        """Place what waits and tell every replica the heads that changed."""
        now = self._clock()
        for peer in self._news:
            if (replica := self._fleet.get(peer)) is not None:
                self._models[replica.hello.model].dispatch.reported(replica, replica.load_s)
        self._news.clear()
        for model in self._models.values():
            for run in model.dispatch.relegate_late(now):
                run.request = msgspec.structs.replace(run.request, promised=False)
                self._meter.relegated(run)
            model.dispatch.place_waiting(now)
            heads = model.dispatch.heads(now)
            for replica in self._fleet.of(model.name):
                self._tell(replica, heads.get(replica.name, ()), now)

    def _tell(self, replica: Replica, heads: tuple[Head, ...], now: float) -> None:
        ids = tuple(head.id for head in heads)
        before, told_s = self._published.get(replica.name, ((), now))
        if ids == before and (not ids or now - told_s < HEADS_AGAIN_S):
            return
        if self._send(replica.peer, Heads(heads)):
            self._published[replica.name] = (ids, now)

    def _reported(self, replica: Replica, report: LoadReport, now: float) -> None:
        """A replica's load. Reports come up to 50 times a second and cost a walk over what is held
        for the replica, so that the latest one is taken over when heads are published."""
        model = self._models[replica.hello.model]
        was_open = replica.open
        self._fleet.report(replica, report, now)
        if replica.open != was_open or replica.draining:
            model.dispatch.reported(replica, now)
        else:
            self._news.add(replica.peer)
        self._reopen(model)
        if replica.empty and replica.sent and model.serves(replica.edition):
            self._take_back(replica, now)
        self._ledger.changed()

    def _take_back(self, replica: Replica, now: float) -> None:
        """Its groups are lost while another replica could serve: that one begins sooner than this
        one has ranks again. Where there is no other its runs wait there."""
        runs = self._ledger.sent_to(replica)
        self._log.warning("replica %s has no group: %d go elsewhere", replica.name, len(runs))
        for run in runs:
            self._send(replica.peer, Abort(run.id))
            self._ledger.again(run, now, died=True)

    def _granted(self, replica: Replica, grant: Grant, now: float) -> None:
        """A replica has room for these: submit those that still wait for it."""
        dispatch = self._models[replica.hello.model].dispatch
        for granted in grant.ids:
            run = dispatch.take(granted, replica.name)
            if run is None:
                continue
            run.peer = replica.peer
            replica.sent.add(run.id)
            if self._send(replica.peer, run.submit(now)):
                self._meter.dispatched(run, now)
            else:
                self._ledger.again(run, now)
        self._ledger.changed()

    def _accepted(self, replica: Replica, message: Accepted) -> None:
        run = self._ledger.run_at(replica, message.id)
        if run is None:
            return
        self._models[replica.hello.model].dispatch.accepted(message.id, replica.name)
        if not run.output.tokens:
            run.cached_tokens = message.cached_tokens

    def _on_tokens(self, replica: Replica, message: Tokens, now: float) -> None:
        """New tokens of a run; a gap means that some were lost, so that the run starts anew."""
        run = self._ledger.run_at(replica, message.id)
        if run is None:
            return
        known = len(run.output.tokens)
        if message.first > known:
            self._send(replica.peer, Abort(run.id))
            self._ledger.again(run, now)
            return
        fresh = message.tokens[known - message.first :]
        if not fresh:
            return
        self._meter.tokens(run, len(fresh), now, message.slack_ratio)
        delta = run.output.feed(fresh, message.logprobs[known - message.first :])
        if delta.finish is not None:
            self._ledger.withdraw(run, now)
            self._ledger.finish(run, now)
        if delta.text or delta.logprobs or delta.finish is not None:
            run.answer.push(run.index, delta)

    def _finished(self, replica: Replica, message: Finished, now: float) -> None:
        run = self._ledger.run_at(replica, message.id)
        if run is None:
            return
        if message.output_tokens != len(run.output.tokens):
            self._log.warning("tokens are missing", extra={"fields": {"request": run.id}})
            self._ledger.again(run, now)
            return
        self._ledger.release(run, now)
        delta = run.output.end("stop" if message.reason == "stop" else "length")
        self._ledger.finish(run, now)
        run.answer.push(run.index, delta)

    def _failed(self, replica: Replica, message: Failed, now: float) -> None:
        """A replica gives a run up: another may try, or its client is told."""
        run = self._ledger.run_at(replica, message.id)
        if run is None:
            return
        self._log.warning(
            "replica %s gave up: %s",
            replica.name,
            message.code,
            extra={"fields": {"request": run.id}},
        )
        if message.code == "draining":
            replica.draining = True
        if message.retriable:
            self._ledger.again(run, now)
        else:
            self._ledger.fail(run.answer, _failure(message), now)

    def _cached(self, replica: Replica, events: KvEvents, now: float) -> None:
        """Prefix-cache changes; after a gap Welcome is said again, which asks for a snapshot."""
        dispatch = self._models[replica.hello.model].dispatch
        if dispatch.cached(replica.name, events):
            return
        if now - self._snapshot_asked_s.get(replica.name, float("-inf")) >= SNAPSHOT_AGAIN_S:
            self._snapshot_asked_s[replica.name] = now
            self._send(replica.peer, Welcome(self._router))


def _failure(message: Failed) -> MedhaError:
    """What a client is told when a replica gave its request up."""
    if message.code in ("context_length_exceeded", "overloaded", "deadline_infeasible"):
        return Refusal(message.code, message.message)
    return StreamBroken(message.code, "the replica could not finish this request")
