"""Jobs of a tokenizer process that run in steps of bounded work.

    EncodeJob       prompts, each cut in pieces; a step encodes STEP_PIECES of them
    DetokenizeJob   token ids; a step makes the text of STEP_TOKENS of them

A prompt that cannot fit is declined before its tokens are computed: by its bytes, else as soon as
there are more tokens than the limit.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from medha.errors import RequestError
from medha.fleet.prefix_index import HASH_BYTES, page_names
from medha_router.tokenization import wire
from medha_router.tokenization.detokenizer import Detokenizer, Vocabulary, text_of
from medha_router.tokenization.text_encoder import TextEncoder

STEP_PIECES = 8
STEP_TOKENS = 1 << 15
PLANNED_CHARS = 32 << 10
"""Prompts of more characters are planned; shorter ones are encoded at once."""

Source = str | npt.NDArray[np.int32]


class SteppedJob(Protocol):
    """A job that was planned."""

    def step(self, known: Sequence[wire.Known]) -> tuple[wire.Outcome, bytes]:
        """Run one step; return its outcome and payload."""
        ...


class EncodeJob:
    """The prompts of one request, and what is encoded of them."""

    def __init__(
        self,
        job: wire.Encode,
        sources: Sequence[Source],
        encoder: TextEncoder,
        texts: tuple[str, ...] = (),
    ) -> None:
        self._texts = texts
        self._prompts = [_PromptState(source, job, encoder) for source in sources]
        self.chars = sum(prompt.chars for prompt in self._prompts)

    def plan(self) -> wire.Planned:
        """Return the keys of all prompts."""
        return wire.Planned(tuple(prompt.keys() for prompt in self._prompts))

    def step(self, known: Sequence[wire.Known]) -> tuple[wire.Part, bytes]:
        """Encode a few pieces; raises RequestError if a prompt has too many tokens."""
        for prompt, beginning in zip(self._prompts, known, strict=False):
            prompt.resume(beginning)
        pieces: list[wire.Piece] = []
        served_bytes = 0
        for index, prompt in enumerate(self._prompts):
            while not prompt.done and len(pieces) < STEP_PIECES:
                for tokens, names in prompt.encode(STEP_PIECES - len(pieces)):
                    pieces.append(wire.Piece(index, tokens, names))
                    served_bytes += len(tokens)
        done = all(prompt.done for prompt in self._prompts)
        return wire.Part(tuple(pieces), served_bytes, done, self._texts if done else ()), b""

    def run(self) -> list[tuple[bytes, bytes]]:
        """Encode everything; return tokens and page names of each prompt."""
        outcomes: list[tuple[bytes, bytes]] = []
        for prompt in self._prompts:
            parts = list(prompt.encode(prompt.pieces))
            outcomes.append(
                (b"".join(part[0] for part in parts), b"".join(part[1] for part in parts))
            )
        return outcomes


class _PromptState:
    """A prompt: pieces, tokens so far, and the chain of page names."""

    def __init__(self, source: Source, job: wire.Encode, encoder: TextEncoder) -> None:
        self._source, self._job, self._encoder = source, job, encoder
        self._where = "messages" if job.chat else "prompt"
        self._opening, self._closing = b"", b""
        # Tokens that the tokenizer may have and the model's weights lack.
        self._checks_ids = bool(job.vocab) and encoder.vocab > job.vocab
        if isinstance(source, str):
            self._check_bytes(source)
            self._ends = encoder.cut(source)
            self.chars = len(source)
            if job.add_special_tokens:
                self._opening, self._closing = encoder.special_tokens()
        else:
            self._ends = [*range(STEP_TOKENS, len(source), STEP_TOKENS), len(source)]
            self.chars = len(source)
        self._next = 0
        self._count = 0
        self._link, self._rest = job.salt, b""

    @property
    def pieces(self) -> int:
        return len(self._ends)

    @property
    def done(self) -> bool:
        return self._next >= self.pieces

    def keys(self) -> bytes:
        """Return the keys of all pieces but the last; token ids have none."""
        if not isinstance(self._source, str):
            return b""
        job = self._job
        first = msgspec.json.encode([job.key, job.page_tokens, bool(self._opening), job.chat])
        link = hashlib.blake2b(job.salt + first, digest_size=wire.KEY_BYTES).digest()
        keys: list[bytes] = []
        for start, end in itertools.pairwise([0, *self._ends[:-1]]):
            text = self._source[start:end].encode("utf-8", "surrogatepass")
            link = hashlib.blake2b(link + text, digest_size=wire.KEY_BYTES).digest()
            keys.append(link)
        return b"".join(keys)

    def resume(self, known: wire.Known) -> None:
        """Continue after the pieces that are known."""
        self._next, self._count = known.pieces, known.tokens
        if known.link:
            self._link = known.link
        self._rest = known.rest

    def encode(self, pieces: int) -> Sequence[tuple[bytes, bytes]]:
        """Encode further pieces, at most `pieces`; return tokens and page names of each."""
        first, last = self._next, min(self._next + pieces, self.pieces)
        if isinstance(self._source, str):
            parts = self._encoder.encode(self._source, self._ends, first, last)
        else:
            starts = [0, *self._ends]
            parts = [
                self._source[starts[index] : starts[index + 1]].tobytes()
                for index in range(first, last)
            ]
        if first == 0:
            parts[0] = self._opening + parts[0]
        if last == self.pieces:
            parts[-1] += self._closing
        self._next = last
        self._count += sum(map(len, parts)) // 4
        self._check_tokens()
        if self._checks_ids:
            self._check_ids(parts)
        return [(tokens, self._names(tokens)) for tokens in parts]

    def _names(self, tokens: bytes) -> bytes:
        """Return the names of the pages that these tokens fill."""
        if not self._job.page_tokens:
            return b""
        data = self._rest + tokens
        page_bytes = 4 * self._job.page_tokens
        names = page_names(data, page_bytes, self._link)
        self._link = names[-HASH_BYTES:] or self._link
        self._rest = data[len(data) - len(data) % page_bytes :]
        return names

    def _check_ids(self, parts: Sequence[bytes]) -> None:
        """Decline tokens that the tokenizer has and the model's weights lack."""
        vocab = self._job.vocab
        largest = max(int(np.frombuffer(tokens, "<i4").max(initial=0)) for tokens in parts)
        if largest >= vocab:
            raise RequestError(
                f"{self._where} holds the token id {largest}, which the tokenizer has and the "
                f"model, of {vocab} tokens, does not: leave out that special token",
                code="invalid_value",
                param=self._where,
            )

    def _check_bytes(self, text: str) -> None:
        """Decline a text that has too many tokens whatever they are."""
        most, limit = self._encoder.token_bytes, self._job.limit_tokens
        if not (limit and most) or len(text) * 4 <= limit * most:
            return
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        if size > limit * most:
            raise _too_long(
                limit,
                self._where,
                f"has {size} bytes, which are at least {-(-size // most)} tokens",
            )

    def _check_tokens(self) -> None:
        limit = self._job.limit_tokens
        if limit and self._count > limit and not self.done:
            raise _too_long(limit, self._where, f"has more than {limit} tokens")


def _too_long(limit: int, where: str, what: str) -> RequestError:
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, your {where} {what}. "
        f"Please reduce the length of the {where}.",
        code="context_length_exceeded",
        param=where,
    )


class DetokenizeJob:
    """Token ids on their way to the answer of `/detokenize`."""

    def __init__(self, tokens: npt.NDArray[np.int32], vocabulary: Vocabulary) -> None:
        self._tokens = tokens
        self._detokenizer = Detokenizer(vocabulary, continues=False, shown=None)
        self._texts: list[str] = []
        self._next = 0

    def step(self, known: Sequence[wire.Known]) -> tuple[wire.Outcome, bytes]:
        """Make the text of some tokens."""
        tokens = self._tokens[self._next : self._next + STEP_TOKENS].tolist()
        self._next += STEP_TOKENS
        self._texts.append("".join(map(self._detokenizer.push, tokens)))
        if self._next < len(self._tokens):
            return wire.Part(served_bytes=4 * len(tokens)), b""
        self._texts.append(self._detokenizer.end())
        return wire.Answer(), msgspec.json.encode({"prompt": "".join(self._texts)})


def texts_of(sources: Sequence[Source], vocabulary: Vocabulary) -> tuple[str, ...]:
    """Return the text of each prompt."""
    return tuple(
        source if isinstance(source, str) else text_of(vocabulary, source.tolist())
        for source in sources
    )
