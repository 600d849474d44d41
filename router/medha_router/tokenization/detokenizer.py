"""Tokens to text as they arrive: text that was sent to the client never changes.

    tokens received   t0 t1 t2 | t3 t4
    text              released | held (may become a stop string) | bytes of an unfinished character

A token is a string of bytes, and a character may span several tokens. An incremental UTF-8 decoder
holds back an unfinished character; only bytes that can never become a character turn into U+FFFD.
So the text does not depend on how the tokens were grouped in messages.

This holds for byte-level BPE (GPT-2, Llama 3, Qwen) and SentencePiece with byte fallback (Llama 2,
Mistral, Gemma). Any other decoder in `tokenizer.json` runs in the library's own DecodeStream.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from medha.errors import CheckpointError
from medha.messages import Logprob

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Map each printable character of GPT-2's byte-level BPE alphabet to its byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return alphabet


class Vocabulary:
    """Bytes of each token id of one tokenizer, computed on first use.

    `special` ids print nothing. If `bytewise` is False, a token's text depends on the tokens before
    it, and `bytes_of` gives its text alone.

    Raises CheckpointError when `tokenizer.json` does not load.
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        try:
            text = tokenizer_json.decode()
            description: dict[str, Any] = msgspec.json.decode(text)
            self.tokenizer: Tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(
                f"tokenizer.json does not load ({error}): expected the Hugging Face tokenizers "
                "format; export the tokenizer again"
            ) from None
        added = description.get("added_tokens") or []
        self.special = frozenset(int(token["id"]) for token in added if token.get("special"))
        self._added = {int(token["id"]): str(token["content"]) for token in added}
        self._alphabet = byte_alphabet()
        self._replacements: list[tuple[str, str]] = []
        self.strips_first_space = False
        self.bytewise = True
        self._byte_level = self._read_decoder(description.get("decoder"))
        self._known: dict[int, bytes] = {}
        self._hidden: dict[tuple[str, ...], frozenset[int]] = {}
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)

    def hidden(self, shown: tuple[str, ...]) -> frozenset[int]:
        """Return the special tokens but those whose text is in `shown`, one of few choices."""
        hidden = self._hidden.get(shown)
        if hidden is None:
            hidden = self.special - {self.tokenizer.token_to_id(text) for text in shown}
            self._hidden[shown] = hidden
        return hidden

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that `token` prints; an id outside the vocabulary prints nothing."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token) if token >= 0 else None
        if piece is None:
            return b""
        if not self.bytewise:
            return self.tokenizer.decode([token], skip_special_tokens=False).encode()
        if self._byte_level:
            values = [self._alphabet.get(letter) for letter in piece]
            if None in values:  # an added token in plain letters
                return piece.encode()
            return bytes(value for value in values if value is not None)
        if token in self._added:
            return piece.encode()
        match = _BYTE_PIECE.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            piece = piece.replace(old, new)
        return piece.encode()

    def _read_decoder(self, decoder: dict[str, Any] | None) -> bool:
        """Return True for byte-level BPE; otherwise fill the replacements of SentencePiece."""
        steps = [decoder] if decoder else []
        if decoder and decoder.get("type") == "Sequence":
            steps = list(decoder.get("decoders") or [])
        kinds = [step.get("type") for step in steps]
        if "ByteLevel" in kinds:
            return True
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    self._replacements.append((old, new))
                case {"type": "Metaspace"}:
                    self._replacements.append((str(step.get("replacement", "▁")), " "))
                    self.strips_first_space = step.get("prepend_scheme", "always") != "never"
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    self.strips_first_space = True
                case {"type": "ByteFallback" | "Fuse"}:
                    pass
                case _:
                    self.bytewise = False
        self.bytewise = self.bytewise and bool(self._replacements)
        return False


class Detokenizer:
    """Text of one output, token by token; special tokens print nothing.

    If `continues`, the output follows a prompt and a SentencePiece piece keeps its leading space.
    Special tokens whose text is in `shown` print it; None: all do.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        continues: bool = True,
        shown: tuple[str, ...] | None = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._hidden = vocabulary.hidden(shown) if shown is not None else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = vocabulary.strips_first_space and not continues
        self._stream = None if vocabulary.bytewise else _LibraryStream(vocabulary.tokenizer)

    def push(self, token: int) -> str:
        """Return the text that `token` completes, possibly empty."""
        if token in self._hidden:
            return ""
        if self._stream is not None:
            return self._stream.push(token)
        return self._stripped(self._decoder.decode(self._vocabulary.bytes_of(token)))

    def push_all(self, tokens: Iterable[int]) -> str:
        """Return the text that `tokens` complete together."""
        if self._stream is not None:
            return "".join(map(self.push, tokens))
        hidden, bytes_of = self._hidden, self._vocabulary.bytes_of
        printed = b"".join([bytes_of(token) for token in tokens if token not in hidden])
        return self._stripped(self._decoder.decode(printed))

    def end(self) -> str:
        """Return the rest after the last token: an unfinished character becomes U+FFFD."""
        if self._stream is not None:
            return self._stream.end()
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _LibraryStream:
    """Text by the tokenizer's own decoder, which may hold back tokens until they are text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)  # none of them comes here
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises bare Exception if the decoder changes earlier text
            self._stream = DecodeStream(skip_special_tokens=False)
            return self.end()
        if text is None:
            return ""
        self._held.clear()
        return text

    def end(self) -> str:
        held, self._held = self._held, []
        return self._tokenizer.decode(held, skip_special_tokens=False) if held else ""


def text_of(vocabulary: Vocabulary, tokens: Iterable[int], *, continues: bool = False) -> str:
    """Return the text of all tokens, equal to what streaming them prints."""
    detokenizer = Detokenizer(vocabulary, continues=continues)
    return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.end()


def scored(
    vocabulary: Vocabulary, tokens: Sequence[int], logprobs: Sequence[Logprob]
) -> Iterator[TokenLogprob]:
    """Yield the log probabilities of a prompt's tokens with their places in its text.

    The first token has none.
    """
    detokenizer, chars = Detokenizer(vocabulary, continues=False), 0
    for token, logprob in zip(tokens, (None, *logprobs), strict=True):
        yield TokenLogprob(token, chars, logprob, vocabulary)
        chars += len(detokenizer.push(token))


class StopMatcher:
    """Releases text as soon as no stop string can begin in it.

        released text | held: the longest tail that is a proper prefix of a stop string | to come

    The stop string that is complete first wins, however the text was split. It is released only if
    `shows_stop`, and text after it never. `released_chars` counts the released characters;
    `matched` is the stop string that ended the text, or None.
    """

    def __init__(self, stops: Sequence[str] = (), *, shows_stop: bool = False) -> None:
        self.stops, self._shows_stop = tuple(stop for stop in stops if stop), shows_stop
        self._held = ""
        self.released_chars = 0
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add `text` and return the text to release; empty once a stop string has matched.

        Without `may_match`, none is complete in this text, but one may begin in it.
        """
        if self.matched is not None or not text:
            return ""
        if not self.stops:
            self.released_chars += len(text)
            return text
        whole = self._held + text
        at, self.matched = self._first(whole, len(self._held)) if may_match else (-1, None)
        if self.matched is None:
            at = len(whole) - self._tail(whole)
        elif self._shows_stop:
            at += len(self.matched)
        self._held = "" if self.matched else whole[at:]
        self.released_chars += at
        return whole[:at]

    def end(self) -> str:
        """Return the held text after the last push."""
        held, self._held = self._held, ""
        self.released_chars += len(held)
        return held

    def _first(self, text: str, after: int) -> tuple[int, str | None]:
        """Return position and text of the first stop to end beyond `after`; of two, the longer."""
        best: tuple[int, int, str] | None = None
        for stop in self.stops:
            at = text.find(stop, max(0, after + 1 - len(stop)))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        return (best[1], best[2]) if best else (-1, None)

    def _tail(self, text: str) -> int:
        """Return the length of the longest tail of `text` that begins a stop string."""
        longest, last = 0, text[-1]
        for stop in self.stops:
            size = 1 + stop.rfind(last, longest, min(len(stop) - 1, len(text)))
            while size:
                if text.endswith(stop[:size]):
                    longest = size
                    break
                size = 1 + stop.rfind(last, longest, size - 1)
        return longest


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log probability of a token that was released, None for the first of a prompt.

    `offset` is the position of its text in the output, in characters. `vocabulary` turns token ids
    into text.
    """

    token: int
    offset: int
    logprob: Logprob | None
    vocabulary: Vocabulary


class Delta(msgspec.Struct, frozen=True):
    """New text of an output. The last delta has `finish`: `stop` or `length`."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


class OutputStream:
    """Text and log probabilities of one output as its tokens arrive.

    Releases no text that may become a stop string, no unfinished character, and no log probability
    before the text of its token. `stop_tokens` end an output and print nothing; with `shows_stop`,
    they and the stop string print their text. `shown` are special tokens that print theirs; None:
    all do. `tokens` keeps all tokens, so that another replica can resume the
    request. Offsets begin at `offset`. If `empty`, the first token ends the output and is dropped.
    No stop string ends in the text of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
        shown: tuple[str, ...] | None = (),
        *,
        shows_stop: bool = False,
        offset: int = 0,
        empty: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self.vocabulary, self._offset, self._empty = vocabulary, offset, empty
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(vocabulary, shown=shown)
        self._matcher = StopMatcher(stops, shows_stop=shows_stop)
        self._stop_tokens = frozenset[int]() if shows_stop else stop_tokens
        self._pending: list[TokenLogprob] = []
        self._received_chars = 0
        self.tokens: list[int] = []
        self.finish: str | None = None

    @property
    def stop(self) -> str | None:
        """The stop string that ended the output, if one did."""
        return self._matcher.matched

    def push(self, tokens: Sequence[int], logprobs: Sequence[Logprob] = ()) -> Delta:
        """Add tokens. After a stop string, `finish` is `stop` and the rest is ignored."""
        if self._empty:
            self.finish = "length"
        if len(tokens) > 1 and not (logprobs or self._matcher.stops or self.finish):
            self.tokens += tokens
            hidden = self._stop_tokens
            text = self._detokenizer.push_all([token for token in tokens if token not in hidden])
            self._received_chars += len(text)
            return Delta(self._matcher.push(text), self._released())
        texts: list[str] = []
        for index, token in enumerate(tokens):
            if self.finish is not None:
                break
            self.tokens.append(token)
            if token in self._stop_tokens:
                continue
            if index < len(logprobs):
                self._pending.append(
                    TokenLogprob(
                        token,
                        self._offset + self._received_chars,
                        logprobs[index],
                        self.vocabulary,
                    )
                )
            text = self._detokenizer.push(token)
            self._received_chars += len(text)
            may_match = len(self.tokens) > self._min_tokens
            texts.append(self._matcher.push(text, may_match=may_match))
            if self._matcher.matched is not None:
                self.finish = "stop"
        return Delta("".join(texts), self._released(), self.finish)

    def end(self, reason: str) -> Delta:
        """Release the held text after the last token, unless it holds a stop string."""
        if self.finish is not None:
            return Delta(finish=self.finish)
        may_match = len(self.tokens) > self._min_tokens
        text = self._matcher.push(self._detokenizer.end(), may_match=may_match)
        if self._matcher.matched is None:
            text += self._matcher.end()
            self.finish = reason
            pending, self._pending = tuple(self._pending), []
        else:
            self.finish = "stop"
            pending = self._released()
        return Delta(text, pending, self.finish)

    def _released(self) -> tuple[TokenLogprob, ...]:
        """Remove and return the log probabilities of tokens that begin in released text."""
        if not self._pending:
            return ()
        count = 0
        for entry in self._pending:
            if entry.offset - self._offset >= self._matcher.released_chars:
                break
            count += 1
        released = tuple(self._pending[:count])
        del self._pending[:count]
        return released
