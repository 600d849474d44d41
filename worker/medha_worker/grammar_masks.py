"""Grammars that outputs follow, by llguidance: which tokens may come next.

    prompt is computed          every token
    compile (own thread) ─────> mask of allowed tokens ──> sampler ──> token ──> matcher

Every rank that samples runs its own matcher over the same tokens, so ranks agree without
communication, and a request that resumes elsewhere only replays its output. The router has compiled
the grammar before, in a process that it may kill; the library's limits bound what compiling and
each mask cost here, and an output whose masks take too long ends.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from medha.errors import CheckpointError
from medha.grammar_limits import LIMITS, MaskTime, error_text
from medha.messages.fields import Sampling

if TYPE_CHECKING:
    import llguidance

KEPT = 64


class Grammars:
    """Compiles grammars for the tokens of one checkpoint; keeps the last compiled ones.

    `vocab` is the width of the logits; the tokenizer may have fewer tokens or more. It loads in the
    background: a model without any such request pays no time for it.
    """

    def __init__(self, tokenizer_json: pathlib.Path, vocab: int) -> None:
        self._path, self.vocab = tokenizer_json, vocab
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "grammars")
        self._tokenizer = self._thread.submit(self._load)
        self._compiled: dict[str, llguidance.LLMatcher] = {}

    def begin(self, sampling: Sampling) -> Constraint:
        """Start to compile the grammar of a sequence, and return its constraint."""
        matcher = self._thread.submit(self._matcher, sampling.grammar)
        return Constraint(matcher, frozenset(sampling.stop_tokens), self.vocab)

    def _load(self) -> llguidance.LLTokenizer:
        import llguidance

        try:
            text = self._path.read_text()
            return llguidance.LLTokenizer(text)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self._path} does not load for grammars ({error}): save the tokenizer with the"
                " checkpoint"
            ) from None

    def _matcher(self, grammar: str) -> llguidance.LLMatcher:
        import llguidance

        compiled = self._compiled.pop(grammar, None)
        if compiled is None:
            limits = llguidance.LLParserLimits(
                **msgspec.structs.asdict(LIMITS), verbose_errors=False
            )
            compiled = llguidance.LLMatcher(
                self._tokenizer.result(), grammar, log_level=0, limits=limits
            )
        self._compiled[grammar] = compiled
        if len(self._compiled) > KEPT:
            del self._compiled[next(iter(self._compiled))]
        return compiled.deep_copy()


class Constraint:
    """The grammar of one sequence, advanced over its output.

    Stop tokens are no part of the text: they are allowed as soon as the text may end. `error` says
    why the output cannot go on; it is empty while the grammar works. Masks are the same on all
    ranks, whatever time they took.
    """

    def __init__(
        self,
        matcher: concurrent.futures.Future[llguidance.LLMatcher],
        stop_tokens: frozenset[int],
        vocab: int,
    ) -> None:
        self._future, self._stop_tokens, self._vocab = matcher, stop_tokens, vocab
        self._consumed, self._time = 0, MaskTime()
        self.error = ""

    def mask(self, output: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a bit per token that may follow `output`, in words of 32 tokens.

        `output` are all tokens so far; those that earlier calls have seen are not read again.
        """
        words = np.zeros(-(-self._vocab // 32), dtype=np.int32)
        try:
            matcher = self._future.result()
        except CheckpointError as error:
            self.error = str(error)
            return words
        began_s = time.thread_time()
        for token in output[self._consumed :]:
            if token not in self._stop_tokens:
                matcher.consume_token(token)
        new, self._consumed = len(output) - self._consumed, len(output)
        if not matcher.is_stopped():
            allowed = np.frombuffer(matcher.compute_bitmask(), dtype="<i4")[: len(words)]
            words[: len(allowed)] = allowed
            if self._vocab % 32:
                words.view(np.uint32)[-1] &= np.uint32((1 << self._vocab % 32) - 1)
        if new <= 1:  # an output that resumes here replays its tokens
            self._time.spend(time.thread_time() - began_s)
            self.error = self.error or self._time.error
        if matcher.is_error():
            self.error = error_text(matcher.get_error()) or "no token fits"
            words[:] = 0
        elif matcher.is_accepting():
            for token in self._stop_tokens:
                if token < self._vocab:
                    words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return words
