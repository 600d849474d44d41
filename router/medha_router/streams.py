"""One output of a request on its way to the client: tokens in, text and log probabilities out.

Decides what may be shown now: nothing that could still become a stop string, no half characters,
and no token's log probability before its text. It knows neither HTTP nor ZeroMQ.

    tokens seen   t0 t1 t2 | t3 t4
    text          shown    | held (may become a stop string) | bytes of an unfinished character
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from medha.messages import Logprob
from medha_router.detokenizer import Detokenizer, Vocabulary
from medha_router.stops import StopMatcher


class TokenLogprob(msgspec.Struct, frozen=True):
    """A shown token: its id, where its text begins (characters of this output), its logprob, and
    the vocabulary that spells them."""

    token: int
    offset: int
    logprob: Logprob
    vocabulary: Vocabulary


class Delta(msgspec.Struct, frozen=True):
    """What is new in an output; `finish` (`stop` or `length`) comes with its last one."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


class Output:
    """Text of one output as its tokens arrive.

    `stop_tokens` end an output and print nothing. `tokens` are all that were fed, so that the
    request can be resumed elsewhere.
    """

    def __init__(
        self, vocabulary: Vocabulary, stops: Sequence[str] = (),
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary)
        self._matcher = StopMatcher(stops)
        self._stop_tokens = stop_tokens
        self._pending: list[TokenLogprob] = []
        self._seen_chars = 0
        self.tokens: list[int] = []
        self.finish: str | None = None

    def feed(self, tokens: Sequence[int], logprobs: Sequence[Logprob] = ()) -> Delta:
        """Take tokens in; `finish` is `stop` once a stop string was found (the rest is ignored)."""
        shown: list[str] = []
        for index, token in enumerate(tokens):
            if self.finish is not None:
                break
            self.tokens.append(token)
            if token in self._stop_tokens:
                continue
            if index < len(logprobs):
                self._pending.append(
                    TokenLogprob(token, self._seen_chars, logprobs[index], self._vocabulary)
                )
            text = self._detokenizer.feed(token)
            self._seen_chars += len(text)
            shown.append(self._matcher.feed(text))
            if self._matcher.found is not None:
                self.finish = "stop"
        return Delta("".join(shown), self._released(), self.finish)

    def end(self, reason: str) -> Delta:
        """No token follows: show what was held back, unless a stop string is found in it."""
        if self.finish is not None:
            return Delta(finish=self.finish)
        text = self._matcher.feed(self._detokenizer.end())
        if self._matcher.found is None:
            text += self._matcher.end()
            self.finish = reason
            pending, self._pending = tuple(self._pending), []
        else:
            self.finish = "stop"
            pending = self._released()
        return Delta(text, pending, self.finish)

    def _released(self) -> tuple[TokenLogprob, ...]:
        """Tokens that begin before the end of what was shown."""
        if not self._pending:
            return ()
        count = 0
        for entry in self._pending:
            if entry.offset >= self._matcher.released:
                break
            count += 1
        released = tuple(self._pending[:count])
        del self._pending[:count]
        return released
