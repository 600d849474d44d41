"""A model as this router serves it: its classes and limits, and the editions that serve it.

Decides when a model may be asked (`ready`), by which of its editions, and what its name, class and
context limit mean for a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from medha import prefix
from medha.config import RouterModel
from medha.errors import Refusal, RequestError
from medha.request import SloClass
from medha_router.dispatch import Dispatch
from medha_router.editions import Edition
from medha_router.encoding import Prompt
from medha_router.fleet import Replica
from medha_router.slo import SloAsk


class ServedModel:
    """One model: `dispatch` holds its queue, `editions` its versions; usually it has one."""

    def __init__(self, config: RouterModel) -> None:
        self.config = config
        self.classes = {each.name: each for each in config.classes}
        self.dispatch = Dispatch(config.classes)
        self.editions: dict[str, Edition] = {}
        self._births = 0
        self.unservable = ""
        self.turned_s = float("-inf")  # when it became ready, or stopped to be
        self._open = asyncio.Event()

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def max_context_tokens(self) -> int:
        """The router's limit, or the replicas' where that is lower."""
        limits = [self.config.max_context_tokens]
        limits += [each.max_context_tokens for each in self.dispatch.standings]
        return min(limits)

    def adopt(self, config: RouterModel, at_least: int) -> None:
        """Other classes, and a limit that is no lower than `at_least` on the router's side."""
        limit = max(config.max_context_tokens, at_least)
        self.config = msgspec.structs.replace(config, max_context_tokens=limit)
        self.classes = {each.name: each for each in config.classes}
        self.dispatch.reclass(config.classes)

    def met(self, replica: Replica) -> Edition:
        """The edition of a replica that was taken in."""
        edition = self.editions.get(replica.edition)
        if edition is None:
            self._births += 1
            edition = Edition(replica.edition, replica.hello, self._births)
            self.editions[edition.key] = edition
        edition.hello = replica.hello
        return edition

    def opened(self, replicas: Iterable[Replica], now: float) -> None:
        """These are its replicas: some may take requests now, or none may any more."""
        serving: dict[str, list[Replica]] = {}
        for replica in replicas:
            serving.setdefault(replica.edition, []).extend([replica] if replica.open else [])
        for key, edition in list(self.editions.items()):
            edition.serves(tuple(serving.get(key, ())), now)
            left = serving and key not in serving and not self.dispatch.waits_for(key)
            if left and not edition.broken:
                del self.editions[key]
        opens = any(edition.open for edition in self.editions.values())
        if opens != self.ready:
            self.turned_s = now
        if opens:
            self._open.set()
        else:
            self._open.clear()

    def serves(self, edition: str) -> bool:
        """A replica of this edition may take requests."""
        return edition in self.editions and bool(self.editions[edition].open)

    def edition(self) -> Edition:
        """The edition for a new request: the one with the fewest requests per open replica, of
        equals the latest. Raises Refusal when none is open."""
        able = [each for each in self.editions.values() if each.open]
        if not able:
            raise Refusal("no_replica", "the replicas of this model are gone: retry later")
        if len(able) == 1:
            return able[0]
        return min(
            able,
            key=lambda each: (
                (self.dispatch.waits_for(each.key) + each.sent) / len(each.open), -each.birth,
            ),
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        return self._open.is_set()

    def patience_s(self, no_replica_timeout_s: float) -> float:
        """How long requests wait for a replica: longer where the first one is brought for them."""
        return no_replica_timeout_s if self.ready else max(no_replica_timeout_s, self.config.hold_s)

    async def wait_open(self, timeout_s: float) -> None:
        """Hold until a replica serves; raises Refusal when none did in time."""
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

    def slo_class(self, ask: SloAsk) -> SloClass:
        """The class of a request; raises RequestError when there is none of that name."""
        name = ask.slo_class or self.config.default_class
        if name not in self.classes:
            raise RequestError(
                f"x-medha-class is {name[:80]!r}: this model has {', '.join(sorted(self.classes))}",
                code="unknown_class", param="x-medha-class",
            )  # fmt: skip
        return self.classes[name]

    def salt(self, tenant: str) -> bytes:
        return prefix.salt_of(self.name, tenant)

    def output_tokens(self, prompt: Prompt, asked: int | None, default: int, chat: bool) -> int:
        """How many tokens may follow `prompt`; raises RequestError when the context overflows."""
        limit, length = self.max_context_tokens, prompt.length
        where = "messages" if chat else "prompt"
        if length == 0:
            raise RequestError(
                f"{where} makes no token: send some text", code="invalid_value", param=where
            )
        wanted = asked if asked is not None else 1
        if length + wanted > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, you requested "
                f"{length + wanted} tokens ({length} in the {where}, {wanted} in the completion). "
                f"Please reduce the length of the {where} or completion.",
                code="context_length_exceeded", param=where,
            )  # fmt: skip
        return wanted if asked is not None else min(limit - length, default)
