"""From token ids to text as they arrive: what is printed never has to be taken back.

A token is a string of bytes, and a character may be split over several tokens. Each token's bytes
go through an incremental UTF-8 decoder, so that an unfinished character is held back until its
rest arrives; only bytes that can never become a character turn into U+FFFD. Hence the text does
not depend on how the tokens were grouped on their way here.

Two families of tokenizers are known by the decoder named in `tokenizer.json`: byte-level BPE
(GPT-2, Llama 3, Qwen) and SentencePiece pieces with byte fallback (Llama 2, Mistral, Gemma). Any
other decoder is a CheckpointError: guessing would print wrong text.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from tokenizers import Tokenizer

from medha.errors import CheckpointError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's alphabet)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return alphabet


class Vocabulary:
    """Bytes of each token id of one tokenizer, computed when first asked for.

    `special` ids print nothing. Raises CheckpointError when `tokenizer.json` does not load or its
    decoder is of no known family.
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
        self._byte_level = self._read_decoder(description.get("decoder"))
        self._known: dict[int, bytes] = {}
        self.size = self.tokenizer.get_vocab_size(with_added_tokens=True)

    def bytes_of(self, token: int) -> bytes:
        """The bytes that `token` prints; an id outside the vocabulary prints nothing."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: int) -> bytes:
        piece = self.tokenizer.id_to_token(token) if token >= 0 else None
        if piece is None:
            return b""
        if self._byte_level:
            values = [self._alphabet.get(letter) for letter in piece]
            if None in values:  # an added token spelt in plain letters
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
        """True for byte-level; fills the replacements of a SentencePiece decoder."""
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
                    self._refuse(kinds)
        if not self._replacements:
            self._refuse(kinds)
        return False

    @staticmethod
    def _refuse(kinds: Iterable[object]) -> None:
        raise CheckpointError(
            f"tokenizer.json has the decoder {list(kinds)!r}: only byte-level and SentencePiece "
            "decoders are known; use a model with one of these"
        )


class Detokenizer:
    """Text of one output, token by token; special tokens print nothing.

    `continues`: the output follows a prompt, so a SentencePiece piece keeps its leading space.
    """

    def __init__(self, vocabulary: Vocabulary, *, continues: bool = True) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = vocabulary.strips_first_space and not continues

    def feed(self, token: int) -> str:
        """Text that `token` completes: possibly empty, never to be taken back."""
        if token in self._vocabulary.special:
            return ""
        return self._stripped(self._decoder.decode(self._vocabulary.bytes_of(token)))

    def end(self) -> str:
        """What is left when no token follows: an unfinished character becomes U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


def text_of(vocabulary: Vocabulary, tokens: Iterable[int], *, continues: bool = False) -> str:
    """The text of a whole sequence, exactly what streaming its tokens would have printed."""
    detokenizer = Detokenizer(vocabulary, continues=continues)
    return "".join([detokenizer.feed(token) for token in tokens]) + detokenizer.end()
