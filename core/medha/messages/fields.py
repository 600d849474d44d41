"""Bounded field types, and the values that several messages carry."""

from __future__ import annotations

from typing import Annotated

import msgspec

from medha.grammar_limits import MAX_GRAMMAR_CHARS
from medha.tenants import TenantWork

MAX_MESSAGE_BYTES = 64 << 20
MAX_TOKENS_BYTES = 48 << 20
TOKEN_BYTES = 4
ALLOWED_BIAS, BAD_BIAS = 4096.0, -2048.0
"""Biases of allowed tokens and of bad words: they leave other tokens, or these, no weight at any
temperature, and shift a float32 score by less than 0.0003. A bad word still stands if no other
token is allowed, or if a grammar demands it: without any token, the output would end there."""

Name = Annotated[str, msgspec.Meta(max_length=253)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
TokenBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_TOKENS_BYTES)]
Blob = Annotated[bytes, msgspec.Meta(max_length=16 << 20)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Group = Annotated[int, msgspec.Meta(ge=0, lt=4096)]
BadWord = Annotated[tuple[int, ...], msgspec.Meta(min_length=2, max_length=2048)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters; temperature 0 is greedy. Random numbers depend on (seed, position).

    `logprobs`: number of alternatives (0: the sampled token only), None without log probabilities;
    `prompt_logprobs`: the same for the tokens of the prompt.
    `stop_tokens` end the sequence; the stop token itself is reported. `bad_words`: tokens of words
    that the output may not have; words of one token have a bias instead. `grammar`: llguidance's
    form of the grammar that the output follows, or empty. Bounds are OpenAI's.
    """

    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] = 1.0
    logit_bias: Annotated[dict[int, float], msgspec.Meta(max_length=1024)] = {}
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    stop_tokens: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)] = ()
    min_tokens: Count = 0
    bad_words: Annotated[tuple[BadWord, ...], msgspec.Meta(max_length=256)] = ()
    grammar: Annotated[str, msgspec.Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None

    def stops_at(self, token: int, output_tokens: int) -> bool:
        """Return True if a token ends the sequence as the last of `output_tokens`."""
        return token in self.stop_tokens and output_tokens >= self.min_tokens

    @property
    def penalised(self) -> bool:
        """True if a penalty depends on the earlier tokens of the sequence."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def needs_output(self) -> bool:
        """True if the host of a rank that samples needs the output so far for each token."""
        return bool(self.grammar or self.bad_words)

    @property
    def needs_tokens(self) -> bool:
        """True if the ranks that sample need all tokens of the sequence when it starts."""
        return self.penalised or self.needs_output or self.prompt_logprobs is not None


class Logprob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Log probability of a token and of the most likely alternatives, best first."""

    chosen: float
    top: Annotated[tuple[tuple[int, float], ...], msgspec.Meta(max_length=20)] = ()


GroupMargins = Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=4096)]


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work of a replica, by which the router admits and places.

    `margins`: by running group, (due in s, seconds of work that still fit before it) of promised
    requests by deadline; `due in` may be negative. One list stands for all groups. `lead_s`: for
    each list, seconds until a newcomer waits for no batch in flight. `pending_bands`: (relative
    slack up to, seconds of prefill work). `relegated_s`: work without a promise. `free_pages`,
    `total_pages`: by group, -1 for a group that does not run. `claimable_pages`: pages of groups
    that may still be added. `free_places`: sequences that may still start.
    `share`: share of time for promised prefills, less that of relegated ones. `budget_s`: time
    budget of a batch while decodes run, `decode_capacity_s` the part of it that they may take,
    `decode_room_s` what is free of that. `decode_parts`: (due in up to s, part of the capacity that
    a new promise reckons with), the last for all that is due later; `spanning_parts` the same of
    prompts that need several groups, if it differs. `long_factor`: by which the work of a long
    prompt counts for more, for short ones to come.
    `ahead_s`: work that would run before a most urgent new request; `relegated_ahead_s`: short work
    without a promise, before a most urgent late one. `predicted_tpot_s`: of the running decodes.
    `promised_work`: prefill seconds promised to each tenant.
    """

    margins: Annotated[tuple[GroupMargins, ...], msgspec.Meta(max_length=4096)] = ()
    lead_s: Annotated[tuple[float, ...], msgspec.Meta(max_length=4096)] = ()
    pending_bands: Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=64)] = ()
    pending_s: float = 0.0
    relegated_s: float = 0.0
    ahead_s: float = 0.0
    relegated_ahead_s: float = 0.0
    waiting: int = 0
    prefilling: int = 0
    decoding: int = 0
    free_pages: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    total_pages: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    claimable_pages: int = 0
    free_places: int = 1 << 20
    page_tokens: int = 64
    share: float = 1.0
    budget_s: float = 0.1
    decode_capacity_s: float = 0.0
    decode_room_s: float = 0.0
    decode_parts: Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=64)] = ()
    spanning_parts: Annotated[tuple[tuple[float, float], ...], msgspec.Meta(max_length=64)] = ()
    long_factor: float = 1.0
    predicted_tpot_s: float = 0.0
    drain_s_per_s: float = 1.0
    wanted_groups: int = 1
    promised_work: Annotated[tuple[TenantWork, ...], msgspec.Meta(max_length=64)] = ()
