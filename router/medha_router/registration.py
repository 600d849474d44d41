"""Registration of controllers: from Hello to a replica that can serve.

    Hello -> tokenizer files -> tokenizer loaded -> Welcome        at any point: Rejected

A replica is welcome only after its tokenizer has loaded: a rolling update may end the replicas that
served before as soon as the new one is welcome. Replicas of the same model version share files and
tokenizer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from medha.errors import CheckpointError, MedhaError, ProtocolError
from medha.fleet.admission import least_tpot_ms
from medha.fleet.replica_estimate import least_tpot_s
from medha.messages import FilePart, Hello, Rejected
from medha_router.models import ModelVersion, ServedModel
from medha_router.replicas import FILES, ConnectedReplica
from medha_router.request_table import RouterState
from medha_router.tokenization.detokenizer import Vocabulary
from medha_router.tokenization.pool import TokenizerPool
from medha_router.tokenization.tokenizer_files import FileFetch, FileStore

MAX_REASON_CHARS = 500


class Registration:
    """Registers controllers, and removes those that are lost.

    `lost` is called with the name of each replica that is removed.
    """

    def __init__(
        self,
        state: RouterState,
        files: FileStore,
        tokens: TokenizerPool,
        lost: Callable[[str], None],
    ) -> None:
        self._state, self._files, self._tokens, self._lost = state, files, tokens, lost
        self._log = logging.getLogger("medha.router")
        self._fetches: dict[tuple[bytes, str], FileFetch] = {}
        self._loading: dict[ModelVersion, asyncio.Task[None]] = {}

    def greet(self, peer: bytes, hello: Hello, now: float) -> None:
        """Register a controller, or send it Rejected.

        A repeated Hello continues the registration of a replica without requests here. A replica
        with requests has lost them, so it is removed and registered again.
        """
        replicas = self._state.replicas
        known = replicas.get(peer)
        if known is not None and known.sent:  # it lost the link and dropped this router's requests
            self.remove(known, "it sent Hello again")
        elif known is not None and known.hello == hello:
            known.life.seen(now)
            self._advance(known, now)
            return
        namesakes = [
            replica for replica in replicas.of(hello.model) if replica.name == hello.replica
        ]
        for old in namesakes:
            if old.hello.incarnation != hello.incarnation or old.peer != peer:
                self.remove(old, "another incarnation took its place")
        outcome = replicas.greet(peer, hello, now)
        if isinstance(outcome, Rejected):
            self._log.warning("rejected a controller: %s", outcome.reason)
            self._state.send(peer, outcome)
            return
        models = self._state.models
        models.learn(hello, others=len(replicas.of(hello.model)) > 1)
        if broken := models[hello.model].version_for(outcome).broken:
            replicas.forget(outcome)
            self._state.send(peer, Rejected(broken))
            return
        self._log.info("replica %s joined", hello.replica)
        self._warn_of_classes(outcome)
        for name in FILES:
            digest = hello.files.get(name)
            if digest and self._files.get(digest) is None:
                self._fetches.setdefault((peer, digest), FileFetch(digest))
        self._advance(outcome, now)

    def _warn_of_classes(self, replica: ConnectedReplica) -> None:
        """Log the classes whose TPOT target the replica cannot keep after any prompt."""
        least_s = least_tpot_s(1, replica.predictor, replica.min_batch_s)
        for slo_class in replica.hello.classes:
            if slo_class.slo.tpot_s < least_s:
                self._log.warning(
                    "class %s has a TPOT target of %g ms, and replica %s keeps %g ms or more "
                    "alongside prefills: that is what its requests are promised; raise slo.tpot",
                    slo_class.name,
                    1e3 * slo_class.slo.tpot_s,
                    replica.name,
                    least_tpot_ms(least_s),
                )

    def remove(self, replica: ConnectedReplica, reason: str) -> None:
        """Remove a lost replica: its requests wait again with their tokens, or fail after too many
        moves."""
        state, now = self._state, self._state.clock()
        self._log.warning("replica %s is lost: %s", replica.name, reason)
        generations = state.requests.sent_to(replica)
        state.replicas.forget(replica)
        self._lost(replica.name)
        for key in [key for key in self._fetches if key[0] == replica.peer]:
            del self._fetches[key]
        model = state.models[replica.hello.model]
        model.dispatcher.remove_replica(replica.name)
        self.reopen(model)
        for generation in generations:
            state.requests.requeue(generation, now, died=True)

    def reopen(self, model: ServedModel) -> None:
        """Open the model if a replica takes requests and its tokenizer is loaded; else close it."""
        model.update_replicas(self._state.replicas.of(model.name), self._state.clock())

    def receive_part(self, replica: ConnectedReplica, part: FilePart, now: float) -> None:
        """Add a part of a file; raises ProtocolError if the file does not match its hash."""
        key = (replica.peer, part.hash)
        fetch = self._fetches.get(key)
        if fetch is None:
            return
        data = fetch.take(part)
        if data is not None:
            del self._fetches[key]
            try:
                self._files.put(part.hash, data)
            except ProtocolError:
                self._fetches[key] = FileFetch(part.hash, requested_s=now)
                raise
        self._advance(replica, now)

    def retry_fetches(self, now: float) -> None:
        """Request each missing part again if it is overdue."""
        for (peer, _), fetch in self._fetches.items():
            if (request := fetch.next_request(now)) is not None:
                self._state.send(peer, request)

    async def settled(self) -> None:
        """Wait until no tokenizer is being loaded."""
        await asyncio.gather(*self._loading.values())

    def _advance(self, replica: ConnectedReplica, now: float) -> None:
        """Take the next step: request missing files, load the tokenizer, or send Welcome."""
        fetches = [fetch for (peer, _), fetch in self._fetches.items() if peer == replica.peer]
        for fetch in fetches:
            if (request := fetch.next_request(now)) is not None:
                self._state.send(replica.peer, request)
        model = self._state.models[replica.hello.model]
        version = model.version_for(replica)
        if fetches or version in self._loading:
            return
        if version.vocabulary is not None:
            self._state.welcome(replica.peer)
            self.reopen(model)
            return
        task = asyncio.get_running_loop().create_task(self._load(model, version))
        self._loading[version] = task
        task.add_done_callback(lambda _: self._loading.pop(version, None))

    async def _load(self, model: ServedModel, version: ModelVersion) -> None:
        """Load the tokenizer in a thread and in a tokenizer process, then send Welcome."""
        data = {
            name: self._files.get(digest) or b"" for name, digest in version.hello.files.items()
        }
        files = version.files(data)
        try:
            self._tokens.add(files)
            vocabulary = await asyncio.to_thread(Vocabulary, files.tokenizer)
            loaded = await self._tokens.warm(files.key)
            version.tokenizer, version.tool_calls = files.tokenizer, loaded.tool_calls
            version.adapter_tool_calls = loaded.adapter_tool_calls
            for adapter, fault in loaded.adapter_faults.items():
                self._log.error("adapter %s of %s serves no chats: %s", adapter, model.name, fault)
            version.vocabulary, model.unservable = vocabulary, ""
            for replica in self._replicas_of(model, version):
                self._state.welcome(replica.peer)
        except MedhaError as error:
            model.unservable = "this model's tokenizer does not load"
            self._log.error("the tokenizer of %s does not load: %s", model.name, error)
            if isinstance(error, CheckpointError):
                reason = f"the tokenizer of {model.name} does not load: {error}"
                self._reject(model, version, reason)
        self.reopen(model)

    def _reject(self, model: ServedModel, version: ModelVersion, reason: str) -> None:
        """Reject all replicas of a version that cannot serve.

        They must not count as ready, or a rolling update would drain the replicas that do serve.
        """
        version.broken = reason[:MAX_REASON_CHARS]
        for replica in self._replicas_of(model, version):
            self._state.send(replica.peer, Rejected(version.broken))
            self.remove(replica, reason)

    def _replicas_of(self, model: ServedModel, version: ModelVersion) -> list[ConnectedReplica]:
        replicas = self._state.replicas.of(model.name)
        return [replica for replica in replicas if replica.version == version.key]
