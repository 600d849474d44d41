"""The models that a router serves, and their versions.

    ModelRegistry   every served model: from the config, the operator's file, or its replicas
    ServedModel     one model: QoS classes, limits, adapters, dispatcher, versions
    ModelVersion    replicas that can continue each other's requests

A rolling update may bring replicas with other weights, another tokenizer or another page size. Both
versions serve until it ends. A request belongs to one version and only its replicas serve it. While
the request has no token yet, it may change to another version (see `retokenize`).
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import pathlib
import sys
from collections.abc import Iterable, Iterator, Mapping, ValuesView

import msgspec

from medha.config import RouterModel
from medha.errors import Refusal, RequestError
from medha.fleet.dispatcher import Dispatcher
from medha.messages import Hello
from medha.request import SloClass
from medha_router.generation import Generation
from medha_router.protocol import PromptEnd, SloOverride
from medha_router.replicas import FILES, ConnectedReplica
from medha_router.structured.tool_calls import Format
from medha_router.tokenization.detokenizer import Vocabulary
from medha_router.tokenization.wire import Encode, Prompt, TokenizerFiles


class ModelVersion:
    """Replicas of a model with the same weights, tokenizer and pages.

    `hello` is the latest of its replicas, `tokenizer` the content of its tokenizer.json.
    `vocabulary` is None until the tokenizer has loaded; `broken` holds the error if it cannot.
    `open` are the replicas that take new requests.
    """

    def __init__(self, key: str, hello: Hello, sequence: int) -> None:
        self.key, self.hello, self.sequence = key, hello, sequence
        # Hashes of its files, which all its replicas have in common.
        self.tokenizer_key = ":".join(hello.files.get(name, "") for name in FILES)
        self.broken = ""
        self.tokenizer = b""
        self.tool_calls: Format | None = None
        self.adapter_tool_calls: dict[str, Format | None] = {}
        self.vocabulary: Vocabulary | None = None
        self.open: tuple[ConnectedReplica, ...] = ()
        self.closed_s = float("-inf")

    @property
    def sent(self) -> int:
        """Number of this router's requests that its open replicas serve."""
        return sum(len(replica.sent) for replica in self.open)

    def files(self, data: dict[str, bytes]) -> TokenizerFiles:
        """Return the tokenizer files, given file contents by name."""
        tokenizer, config, template, adapters = (data.get(name, b"") for name in FILES)
        return TokenizerFiles(
            key=self.tokenizer_key,
            tokenizer=tokenizer,
            config=config,
            template=template,
            adapter_templates=adapters,
        )

    def set_open(self, replicas: tuple[ConnectedReplica, ...], now: float) -> None:
        """Set the replicas that take new requests: none before the tokenizer has loaded."""
        was_open = bool(self.open)
        self.open = replicas if self.vocabulary is not None else ()
        if was_open and not self.open:
            self.closed_s = now

    def form_of_calls(self, adapter: str) -> Format | None:
        """Return how outputs write calls of tools; None if the chat template takes no tools."""
        return self.adapter_tool_calls.get(adapter, self.tool_calls)

    def encode_job(
        self,
        *,
        chat: bool,
        raw: bytes,
        salt: bytes,
        adapter: str = "",
        texts: bool = False,
        tools: bytes = b"",
        template_values: bytes = b"",
        special: bool = True,
        ending: PromptEnd = "reply",
        limit_tokens: int = 0,
    ) -> Encode:
        """Return the tokenizer job for a prompt of this version, of at most `limit_tokens`."""
        return Encode(
            key=self.tokenizer_key,
            chat=chat,
            raw=raw,
            page_tokens=self.hello.page_tokens,
            salt=salt,
            adapter=adapter,
            add_special_tokens=special,
            ending=ending,
            texts=texts,
            limit_tokens=limit_tokens,
            vocab=self.hello.shape.vocab,
            tools=tools,
            template_values=template_values,
        )


class ServedModel:
    """A model with its versions. `dispatcher` holds its queue, of at most `max_waiting` requests;
    `versions` usually has one entry.

    `ready_changed_s` is the last time that the model became ready, or stopped being so.
    """

    def __init__(self, config: RouterModel, max_waiting: int = sys.maxsize) -> None:
        self.config = config
        self.classes = {slo_class.name: slo_class for slo_class in config.classes}
        self.dispatcher: Dispatcher[Generation] = Dispatcher(
            config.classes, max_waiting=max_waiting
        )
        self.versions: dict[str, ModelVersion] = {}
        self._last_sequence = 0
        self.unservable = ""
        self.ready_changed_s = float("-inf")
        self._open = asyncio.Event()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def max_context_tokens(self) -> int:
        """The lowest limit of the router's config and of the replicas."""
        limits = [self.config.max_context_tokens]
        limits += [estimate.max_context_tokens for estimate in self.dispatcher.estimates]
        return min(limits)

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters of the replicas; while none serves, those of the config too."""
        held = (version.hello.adapters for version in self.versions.values())
        return frozenset(() if self.ready else self.config.adapters).union(*held)

    def adopt(self, config: RouterModel, at_least: int) -> None:
        """Replace classes, adapters and context limit; the configured limit is at least
        `at_least`."""
        limit = max(config.max_context_tokens, at_least)
        self.config = msgspec.structs.replace(config, max_context_tokens=limit)
        self.classes = {slo_class.name: slo_class for slo_class in config.classes}
        self.dispatcher.set_classes(config.classes)

    def version_for(self, replica: ConnectedReplica) -> ModelVersion:
        """Return the version of a registered replica; create it if it is new."""
        version = self.versions.get(replica.version)
        if version is None:
            self._last_sequence += 1
            version = ModelVersion(replica.version, replica.hello, self._last_sequence)
            self.versions[version.key] = version
        version.hello = replica.hello
        return version

    def update_replicas(self, replicas: Iterable[ConnectedReplica], now: float) -> None:
        """Update which versions and replicas take requests; drop versions without replicas."""
        serving: dict[str, list[ConnectedReplica]] = {}
        for replica in replicas:
            serving.setdefault(replica.version, []).extend([replica] if replica.open else [])
        for key, version in list(self.versions.items()):
            version.set_open(tuple(serving.get(key, ())), now)
            unused = serving and key not in serving and not self.dispatcher.waiting_for(key)
            if unused and not version.broken:
                del self.versions[key]
        opens = any(version.open for version in self.versions.values())
        if opens != self.ready:
            self.ready_changed_s = now
        if opens:
            self._open.set()
        else:
            self._open.clear()

    def serves(self, version: str) -> bool:
        """Return True if a replica of this version takes requests."""
        return version in self.versions and bool(self.versions[version].open)

    def takes(self, replica: ConnectedReplica) -> bool:
        """Return True if a replica is one of those that take requests."""
        version = self.versions.get(replica.version)
        return version is not None and replica in version.open

    def open_versions(self, adapter: str) -> list[ModelVersion]:
        """Return the versions that take requests, and have the adapter if one is named."""
        return [
            version
            for version in self.versions.values()
            if version.open and (not adapter or adapter in version.hello.adapters)
        ]

    def choose_version(self, adapter: str = "") -> ModelVersion:
        """Choose the version for a new request; raises Refusal if none with `adapter` is open.

        It is the version with the fewest requests per open replica; of equals, the latest.
        """
        candidates = self.open_versions(adapter)
        if not candidates:
            what = f"with the adapter {adapter}" if adapter else "of this model"
            raise Refusal("no_replica", f"the replicas {what} are gone: retry later")
        if len(candidates) == 1:
            return candidates[0]
        return min(
            candidates,
            key=lambda version: (
                (self.dispatcher.waiting_for(version.key) + version.sent) / len(version.open),
                -version.sequence,
            ),
        )

    @property
    def ready(self) -> bool:
        return self._open.is_set()

    def patience_s(self, timeout_s: float) -> float:
        """Return how long requests wait for a replica: longer if the operator starts one."""
        return timeout_s if self.ready else max(timeout_s, self.config.hold_s)

    async def wait_open(self, timeout_s: float) -> None:
        """Wait until a replica serves; raises Refusal after `timeout_s`."""
        if self._open.is_set():
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        except TimeoutError:
            reason = self.unservable or "no replica of this model is connected"
            raise Refusal(
                "no_replica",
                f"{reason}; waited {timeout_s:.0f} s for one: retry later",
                retry_after_s=5.0,
            ) from None

    def slo_class(self, slo: SloOverride) -> SloClass:
        """Return the QoS class of a request; raises RequestError if the name is unknown."""
        name = slo.slo_class or self.config.default_class
        if name not in self.classes:
            raise RequestError(
                f"x-medha-class is {name[:80]!r}: this model has {', '.join(sorted(self.classes))}",
                code="unknown_class",
                param="x-medha-class",
            )
        return self.classes[name]

    def output_tokens(self, prompt: Prompt, requested: int | None, default: int, chat: bool) -> int:
        """Return the limit of output tokens: those requested, as far as the context has room, as in
        vLLM. Raises RequestError if it has none, or is shorter than the output alone."""
        limit, length = self.max_context_tokens, prompt.length
        where = "messages" if chat else "prompt"
        if length == 0:
            raise RequestError(
                f"{where} has no tokens: send some text", code="invalid_value", param=where
            )
        wanted = max(1, requested) if requested is not None else 1
        if length >= limit or wanted > limit:
            room = " A limit of 0 output tokens needs room for one." if requested == 0 else ""
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{length + wanted} tokens ({length} in the {where}, {wanted} in the completion). "
                f"Please reduce the length of the {where} or completion.{room}",
                code="context_length_exceeded",
                param=where,
            )
        return min(limit - length, default if requested is None else wanted)


class ModelRegistry(Mapping[str, ServedModel]):
    """Every served model by name.

    A router that learns takes name, context limit and classes of a model from the Hello of its
    replicas. The latest Hello decides, as a rolling update may change the classes, and so it does
    on the order of the queue; the context limit is the lowest of the serving replicas. A learned
    model is forgotten `forget_s` after its last replica left.

    The operator publishes `file`, which may not exist yet: models without replicas that get one on
    the first request. `hold_s`, the time that requests wait for it, always comes from the file. The
    other fields of the file hold only while the model has no replica. `max_waiting`: requests of
    one model.
    """

    def __init__(
        self,
        configured: Iterable[RouterModel],
        forget_s: float,
        file: pathlib.Path | None = None,
        max_waiting: int = sys.maxsize,
    ) -> None:
        self._max_waiting = max_waiting
        self._models = {model.name: ServedModel(model, max_waiting) for model in configured}
        self._configured = frozenset(self._models)
        self._forget_s = forget_s
        self._left_s: dict[str, float] = {}
        self._log = logging.getLogger("medha.router")
        self._file, self._file_version = file, (0, 0, 0)
        self._published: dict[str, RouterModel] = {}
        self.refresh()

    def __getitem__(self, name: str) -> ServedModel:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def values(self) -> ValuesView[ServedModel]:
        return self._models.values()

    def named(self, name: str) -> tuple[ServedModel, str] | None:
        """Return the model and the adapter ("": none) that a client names; None if unknown.

        An empty name is that of the only model.
        """
        if not name and len(self) == 1:
            return next(iter(self.values())), ""
        model = self._models.get(name)
        if model is not None:
            return model, ""
        base, _, adapter = name.rpartition(":")
        model = self._models.get(base)
        return (model, adapter) if model is not None and adapter in model.adapters else None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that clients may use once, sorted: of models, and `model:adapter`."""
        return tuple(sorted(self._all_names()))

    def first_names(self, count: int) -> tuple[list[str], int]:
        """Return the first of these names, and the number of all."""
        names = self._all_names()
        return heapq.nsmallest(count, names), len(names)

    def _all_names(self) -> set[str]:
        names = set(self._models)
        for name, model in self._models.items():
            if model.versions or model.config.adapters:
                names.update(f"{name}:{adapter}" for adapter in model.adapters)
        return names

    def learn(self, hello: Hello, others: bool) -> None:
        """Learn the model of a new replica; `others` is True if it has more replicas.

        The order of its queue is learned of any model.
        """
        if hello.model not in self._configured:
            self._learn_config(hello, others)
        self._models[hello.model].dispatcher.set_order(hello.order)

    def _learn_config(self, hello: Hello, others: bool) -> None:
        learned = learned_model(hello, self._hold_s(hello.model))
        model = self._models.get(hello.model)
        if model is None:
            self._models[hello.model] = ServedModel(learned, self._max_waiting)
            self._log.info("serving %s from now on", hello.model)
            return
        if others and learned.classes != model.config.classes:
            self._log.warning(
                "replica %s changes the classes of %s to %s: the latest Hello decides",
                hello.replica,
                hello.model,
                ", ".join(slo_class.name for slo_class in learned.classes),
            )
        model.adopt(learned, at_least=model.config.max_context_tokens if others else 0)

    def refresh(self) -> None:
        """Read the file again if it has changed; an invalid file changes nothing."""
        if self._file is None:
            return
        try:
            status = self._file.stat()
            version = status.st_mtime_ns, status.st_ino, status.st_size
            if version == self._file_version:
                return
            self._file_version = version
            models = msgspec.json.decode(self._file.read_bytes(), type=tuple[RouterModel, ...])
        except FileNotFoundError:
            return  # not published yet
        except (OSError, msgspec.MsgspecError) as error:
            self._log.error("kept the former models of %s: %s", self._file, error)
            if isinstance(error, OSError):
                self._file_version = 0, 0, 0  # read it again
            return
        self._published = {
            model.name: model for model in models if model.name not in self._configured
        }
        for name, published in self._published.items():
            if name not in self._models:
                self._models[name] = ServedModel(published, self._max_waiting)
                self._log.info("serving %s from now on, as published", name)
        for name, model in self._models.items():
            if name not in self._configured:
                model.config = msgspec.structs.replace(model.config, hold_s=self._hold_s(name))

    def forget(self, served: frozenset[str], now: float) -> None:
        """Forget learned models that had no replica for `forget_s`; `served` have replicas.

        A published model without replicas gets the configuration of the file again.
        """
        for name in [name for name in self._models if name not in self._configured]:
            model, published = self._models[name], self._published.get(name)
            if published is not None and name not in served and model.config != published:
                model.adopt(published, at_least=0)
            if name in served or published is not None or len(model.dispatcher):
                self._left_s.pop(name, None)
            elif now - self._left_s.setdefault(name, now) > self._forget_s:
                del self._models[name], self._left_s[name]
                self._log.info("stopped serving %s: no replica came back", name)

    def _hold_s(self, name: str) -> float:
        """Return how long requests wait for a first replica, from the file."""
        published = self._published.get(name)
        return published.hold_s if published is not None else 0.0


def learned_model(hello: Hello, hold_s: float) -> RouterModel:
    """Return the model as a replica describes it."""
    classes = hello.classes or (SloClass(),)
    names = [slo_class.name for slo_class in classes]
    return RouterModel(
        name=hello.model,
        max_context_tokens=hello.max_context_tokens,
        classes=classes,
        default_class="default" if "default" in names else names[0],
        adapters=tuple(sorted(hello.adapters)),
        hold_s=hold_s,
    )
