"""One version of a model: what replicas of the same weights, tokenizer and pages have in common.

A rolling update may bring replicas that make other tokens of a prompt, cut it into other pages, or
go on with it in another way.
Both kinds serve while it goes on. A request belongs to one edition and is placed on its replicas
alone; only while it has no token yet may it go over to another (see `moving`).
"""

from __future__ import annotations

from medha.messages import Hello
from medha_router.detokenizer import Vocabulary
from medha_router.encoding import Encode, TokenizerFiles
from medha_router.fleet import FILES, Replica


class Edition:
    """`key` names it and `hello` is the latest of its replicas. `vocabulary` is there once its
    files are loaded; `broken` says why they cannot be. `open` are its replicas that may take work.
    """

    def __init__(self, key: str, hello: Hello, birth: int) -> None:
        self.key, self.hello, self.birth = key, hello, birth
        self.broken = ""
        self.vocabulary: Vocabulary | None = None
        self.open: tuple[Replica, ...] = ()
        self.closed_s = float("-inf")

    @property
    def tokenizer_key(self) -> str:
        """Which files its tokenizer is made of, whatever else differs."""
        return ":".join(self.hello.files.get(name, "") for name in FILES)

    @property
    def sent(self) -> int:
        """Our requests that its open replicas serve."""
        return sum(len(replica.sent) for replica in self.open)

    def files(self, held: dict[str, bytes]) -> TokenizerFiles:
        """Its tokenizer's files from what is held by name."""
        tokenizer, config, template = (held.get(name, b"") for name in FILES)
        return TokenizerFiles(
            key=self.tokenizer_key, tokenizer=tokenizer, config=config, template=template
        )

    def serves(self, replicas: tuple[Replica, ...], now: float) -> None:
        """These replicas of it may take work, as far as its prompts can be made into tokens."""
        was_open = bool(self.open)
        self.open = replicas if self.vocabulary is not None else ()
        if was_open and not self.open:
            self.closed_s = now

    def encode_job(
        self, *, chat: bool, raw: bytes, salt: bytes, texts: bool = False, special: bool = True,
        generation_prompt: bool = True,
    ) -> Encode:  # fmt: skip
        """The tokenizer's job for a prompt that its replicas are to read."""
        return Encode(
            key=self.tokenizer_key,
            chat=chat,
            raw=raw,
            page_tokens=self.hello.page_tokens,
            salt=salt,
            add_special_tokens=special,
            generation_prompt=generation_prompt,
            texts=texts,
        )
