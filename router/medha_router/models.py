"""A model as this router serves it: its classes and limits, and its tokenizer once fetched.

Decides when a model may be asked (`ready`), and what its name, class and context limit mean for a
request. Fetched files come from controllers, by content hash.
"""

from __future__ import annotations

import asyncio

import msgspec

from medha import prefix
from medha.config import RouterModel
from medha.errors import Refusal, RequestError
from medha.messages import Hello
from medha.request import SloClass
from medha_router.detokenizer import Vocabulary
from medha_router.dispatch import Dispatch
from medha_router.encoding import Encode, Prompt, TokenizerFiles
from medha_router.fleet import FILES
from medha_router.slo import SloAsk


class ServedModel:
    """One model: `dispatch` holds its queue; `vocabulary` and `hello` are there once known."""

    def __init__(self, config: RouterModel) -> None:
        self.config = config
        self.classes = {each.name: each for each in config.classes}
        self.dispatch = Dispatch(config.classes)
        self.vocabulary: Vocabulary | None = None
        self.hello: Hello | None = None
        self.files_key = ""
        self.unservable = ""
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

    def opened(self, is_open: bool) -> None:
        """A replica may take requests now, or none may any more."""
        if is_open:
            self._open.set()
        else:
            self._open.clear()

    @property
    def ready(self) -> bool:
        return self._open.is_set()

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

    def encode_job(
        self, *, chat: bool, raw: bytes, tenant: str, texts: bool = False,
        special: bool = True, generation_prompt: bool = True,
    ) -> Encode:  # fmt: skip
        """The tokenizer's job for a prompt of this model."""
        return Encode(
            key=self.files_key,
            chat=chat,
            raw=raw,
            page_tokens=self.hello.page_tokens if self.hello else 1,
            salt=self.salt(tenant),
            add_special_tokens=special,
            generation_prompt=generation_prompt,
            texts=texts,
        )

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


def tokenizer_files(hello: Hello, held: dict[str, bytes]) -> TokenizerFiles:
    """A model's tokenizer files from what is held by name; `key` is their hashes."""
    key = ":".join(hello.files.get(name, "") for name in FILES)
    tokenizer, config, template = (held.get(name, b"") for name in FILES)
    return TokenizerFiles(key=key, tokenizer=tokenizer, config=config, template=template)
