"""Texts to tokens of one tokenizer, in parts that may be encoded one after the other.

    text    piece | piece | piece        cut at the first border after PIECE_CHARS characters
    piece   word | word | word | ...     cut at every border; tokens of frequent words are kept

Pieces depend on the text before them only, so a conversation that grows keeps its pieces. A text
without borders is one piece. The tokens are those of encoding the text in one pass (see `borders`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from medha_router.tokenization.borders import borders_of

PIECE_CHARS = 16 << 10
WORD_CHARS = 32
KNOWN_WORDS = 1 << 17
"""Words whose tokens are kept: about 30 MB."""
NEW_WORD_CHARS = 8
"""A text with a new word in fewer characters than this is faster to encode as a whole."""
PARALLEL_CHARS = 32 << 10
PROBE = "a"


class TextEncoder:
    """Encodes texts with `threads` threads; not safe for use by several threads at once.

    `vocab`: all its token ids are below.
    """

    def __init__(self, tokenizer: Tokenizer, threads: int = 0) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._borders = borders_of(tokenizer.to_str())
        self._words: dict[str, bytes] = {}
        self._threads = threads or os.cpu_count() or 1
        self._pool = concurrent.futures.ThreadPoolExecutor(self._threads)
        probe = tokenizer.encode(PROBE)
        mask = probe.special_tokens_mask
        size = mask.index(0) if 0 in mask else len(mask)
        self._opening = int32(probe.ids[:size])
        self._closing = int32(probe.ids[size + mask[size:].count(0) :])

    @property
    def token_bytes(self) -> int:
        """Most bytes of text that a token stands for; 0 if unknown."""
        return self._borders.token_bytes if self._borders is not None else 0

    def special_tokens(self) -> tuple[bytes, bytes]:
        """Return the tokens (int32 bytes) before and after a text with special tokens."""
        return self._opening, self._closing

    def cut(self, text: str) -> list[int]:
        """Return where the pieces of a text end; the last end is the length of the text."""
        ends: list[int] = []
        start = 0
        while start < len(text):
            start = len(text)
            if self._borders is not None:
                start = self._borders.next(text, (ends[-1] if ends else 0) + PIECE_CHARS)
            ends.append(start)
        return ends or [0]

    def encode(self, text: str, ends: Sequence[int], first: int, last: int) -> list[bytes]:
        """Return the tokens (int32 bytes) of pieces `first` up to `last` of a text cut at `ends`.

        Special tokens of the post-processor are not added.
        """
        starts = [ends[index - 1] if index else 0 for index in range(first, last)]
        pieces = [text[start:end] for start, end in zip(starts, ends[first:last], strict=True)]
        borders = self._borders
        if borders is None:
            return self._encode_each(pieces)
        words = [borders.words(piece) for piece in pieces]
        if borders.drops_space:
            for index, part in enumerate(words):
                kept = part[:1] if first + index == 0 else []
                words[index] = kept + [word[1:] for word in part[len(kept) :]]
            pieces = [
                piece[1:] if start else piece for start, piece in zip(starts, pieces, strict=True)
            ]
        known = self._words
        with contextlib.suppress(KeyError):  # of a word that is new
            return [b"".join(map(known.__getitem__, part)) for part in words]
        if len(known) > KNOWN_WORDS:
            known.clear()
        new = [word for word in set(itertools.chain(*words)) if word not in known]
        chars = sum(map(len, pieces))
        if chars > PIECE_CHARS and len(new) * NEW_WORD_CHARS > chars:
            return self._encode_each(pieces)
        known.update(zip(new, self._encode_each(new), strict=True))
        tokens = [b"".join(map(known.__getitem__, part)) for part in words]
        for word in new:
            if len(word) > WORD_CHARS:
                del known[word]
        return tokens

    def _encode_each(self, texts: Sequence[str]) -> list[bytes]:
        """Encode texts one by one; long ones on several threads, without the GIL."""
        if sum(map(len, texts)) < PARALLEL_CHARS or len(texts) < self._threads:
            return self._encode_batch(texts)
        share = -(-len(texts) // self._threads)
        shares = [texts[at : at + share] for at in range(0, len(texts), share)]
        return list(itertools.chain(*self._pool.map(self._encode_batch, shares)))

    def _encode_batch(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [int32(encoding.ids) for encoding in encodings]


def int32(tokens: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32 bytes."""
    return np.asarray(tokens, dtype="<i4").tobytes()
