"""Draw the next token of each row, independently of batch, rank and restarts.

A counter-based generator, a keyed hash of (seed, position), gives one uniform number u per token.
The token is the first whose cumulative probability exceeds u, so a request that resumes elsewhere
continues byte for byte. Filters run in the order of transformers: repetition, presence and
frequency penalties, bias, bad words, blocked stop tokens, grammar, temperature, top-k, top-p,
min-p. Log
probabilities are the model's own, before all of these. Sampling runs where the logits are: the host
computes the numbers u and uploads them with the settings, and reads results back only in
`SampledTokens.read`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from medha.errors import EngineError
from medha.messages.fields import BAD_BIAS, Logprob, Sampling
from medha_worker.device import CPU, ComputeDevice, PendingFetch
from medha_worker.grammar_masks import Constraint
from medha_worker.penalties import TokenCounts

# A lower temperature means greedy: dividing by it overflows float32.
GREEDY_BELOW = 1e-5
# Of the generator, before any input: a copy costs half of a new one.
_HASH = hashlib.blake2b(digest_size=8, person=b"medha-draw")


class History:
    """Output of a sequence in order, `emitted`, as its grammar or bad words need it on the host.

    Fed with overlapping pieces in order; positions already seen are skipped.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], prompt_tokens: int) -> None:
        self.known = prompt_tokens
        self.emitted: list[int] = []
        self.see(0, tokens)

    def see(self, position: int, tokens: npt.NDArray[np.int32]) -> None:
        """Add `tokens` from `position` on."""
        self.emitted += tokens[max(self.known - position, 0) :].tolist()
        self.known = max(self.known, position + len(tokens))


class SampledRow(msgspec.Struct, frozen=True):
    """A row to sample: the token at `position`, after `emitted` output tokens.

    `counts` is required if `sampling.penalised`, `history` if `sampling.needs_output`.
    """

    sampling: Sampling
    position: int
    emitted: int
    history: History | None = None
    constraint: Constraint | None = None
    counts: TokenCounts | None = None


class SampledTokens:
    """Tokens drawn for a batch: `tokens` int64 [rows] on the device, and the pending copy to the
    host."""

    def __init__(
        self,
        tokens: torch.Tensor,
        draws: Sequence[SampledRow],
        rows_with_logprobs: Sequence[int],
        pending: PendingFetch,
    ) -> None:
        self.tokens, self._draws = tokens, draws
        self._rows_with_logprobs = rows_with_logprobs
        self.pending = pending

    def read(self, timeout_s: float | None = None) -> list[tuple[int, Logprob | None]]:
        """Return each row's token and its log probability if requested; waits for the device.

        Raises PeerLost if the device is not done within `timeout_s`.
        """
        tokens, *logprobs = self.pending.wait(timeout_s)
        reports: list[Logprob | None] = [None] * len(self._draws)
        if self._rows_with_logprobs:
            for row, chosen, best, values in zip(
                self._rows_with_logprobs, *(part.tolist() for part in logprobs), strict=True
            ):
                count = self._draws[row].sampling.logprobs or 0
                top = tuple(zip(best[:count], values[:count], strict=True))
                reports[row] = Logprob(chosen, top)
        return list(zip(tokens.tolist(), reports, strict=True))


def sample(
    logits: torch.Tensor, draws: Sequence[SampledRow], device: ComputeDevice = CPU
) -> list[tuple[int, Logprob | None]]:
    """Return a token, and its log probability if requested, per row of `logits` [n, vocab]
    float32."""
    return draw(logits, draws, device).read()


@torch.inference_mode()
def draw(
    logits: torch.Tensor,
    draws: Sequence[SampledRow],
    device: ComputeDevice = CPU,
    *,
    alone: bool = False,
) -> SampledTokens:
    """Draw a token for each row of `logits` [n, vocab] float32, on the device that holds them.

    `alone` samples non-greedy rows separately, since a GPU sums several rows in another order. NaN
    counts as −∞. A row without any finite logit yields its first stop token (else 0), which ends
    the sequence rather than the rank; tokens beyond the vocabulary do not count.
    """
    raw = torch.nan_to_num(logits, nan=-math.inf, posinf=1e30, neginf=-math.inf)
    scores = _adjusted(raw, draws, device)
    best, tokens = scores.max(-1)
    settings = [row.sampling for row in draws]
    hot = [i for i, own in enumerate(settings) if own.temperature >= GREEDY_BELOW]
    stops = [next((t for t in own.stop_tokens if t < raw.shape[1]), 0) for own in settings]
    uploaded = device.upload(np.array(stops + hot, dtype=np.int64))[0]
    ends, rows = uploaded[: len(stops)], uploaded[len(stops) :]
    if hot:
        heated = scores.clone() if len(hot) == len(draws) else scores[rows]
        warm = [draws[i] for i in hot]
        if alone:
            drawn = [_draw(heated[i : i + 1], warm[i : i + 1], device) for i in range(len(warm))]
            tokens.index_copy_(0, rows, torch.cat(drawn))
        else:
            tokens.index_copy_(0, rows, _draw(heated, warm, device))
    tokens = torch.where(best.isneginf(), ends, tokens)
    with_logprobs = [i for i, own in enumerate(settings) if own.logprobs is not None]
    logprobs = _logprobs(raw, tokens, draws, with_logprobs, device) if with_logprobs else ()
    return SampledTokens(tokens, draws, with_logprobs, device.fetch(tokens, *logprobs))


@torch.inference_mode()
def score(
    logits: torch.Tensor, targets: npt.NDArray[np.int64], count: int, device: ComputeDevice = CPU
) -> PendingFetch:
    """Return log probabilities [n] of `targets` [n] by `logits` [n, vocab], and the `count` best
    tokens with theirs [n, count]."""
    own = torch.nan_to_num(logits, nan=-math.inf, posinf=1e30, neginf=-math.inf).log_softmax(-1)
    (wanted,) = device.upload(targets)
    chosen = own.gather(1, wanted.unsqueeze(1)).squeeze(1)
    best = own.topk(min(max(1, count), own.shape[1]))
    return device.fetch(chosen, best.indices, best.values)


def logprobs_of(fetched: tuple[torch.Tensor, ...], count: int) -> tuple[Logprob, ...]:
    """Return what `score` fetched, with `count` alternatives each."""
    chosen, best, values = (part.tolist() for part in fetched)
    return tuple(
        Logprob(own, tuple(zip(tokens[:count], scores[:count], strict=True)))
        for own, tokens, scores in zip(chosen, best, values, strict=True)
    )


def uniform(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on (seed, position) alone, on every machine."""
    counter = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    state = _HASH.copy()
    state.update(counter)
    return (int.from_bytes(state.digest(), "little") >> 11) * 2.0**-53


# --- bias, bad words, blocked stop tokens: entries (row, token, value) ----------------------------

Entry = tuple[int, int, float]


def _adjusted(
    raw: torch.Tensor, draws: Sequence[SampledRow], device: ComputeDevice
) -> torch.Tensor:
    """Return scores with penalties, bias and grammars applied; `raw` itself if no row has any."""
    vocab = raw.shape[1]
    changes = _biased(draws, vocab), _completed_words(draws, vocab), _held_back(draws, vocab)
    constrained = [i for i, row in enumerate(draws) if row.constraint is not None]
    penalised = [(i, row.counts) for i, row in enumerate(draws) if row.counts is not None]
    if not any(changes) and not constrained and not penalised:
        return raw
    scores = raw.clone()
    if penalised:
        rows, counts = zip(*penalised, strict=True)
        counts[0].table.apply(scores, rows, counts)
    for entries in changes:
        if not entries:
            continue
        at, tokens, values = zip(*entries, strict=True)
        row, token, value = device.upload(
            np.array(at, dtype=np.int64),
            np.array(tokens, dtype=np.int64),
            np.array(values, dtype=np.float32),
        )
        scores.index_put_((row, token), value, accumulate=True)
    if constrained:
        _forbid(scores, constrained, draws, device)
    return scores


def _forbid(
    scores: torch.Tensor, rows: Sequence[int], draws: Sequence[SampledRow], device: ComputeDevice
) -> None:
    """Set the scores of tokens that the rows' grammars forbid to −∞, in place."""
    masks = []
    for draw in (draws[i] for i in rows):
        assert draw.constraint is not None
        masks.append(draw.constraint.mask(_output(draw)))
    words, places = device.upload(np.stack(masks), np.array(rows, dtype=np.int64))
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=words.device)) & 1
    allowed = bits.reshape(len(rows), -1)[:, : scores.shape[1]].bool()
    scores.index_copy_(0, places, scores[places].masked_fill_(~allowed, -math.inf))


def _biased(draws: Sequence[SampledRow], vocab: int) -> list[Entry]:
    return [
        (row, token, value)
        for row, draw in enumerate(draws)
        if draw.sampling.logit_bias
        for token, value in draw.sampling.logit_bias.items()
        if 0 <= token < vocab
    ]


def _completed_words(draws: Sequence[SampledRow], vocab: int) -> list[Entry]:
    """Return the last tokens of bad words whose other tokens end the output, as in vLLM."""
    entries: list[Entry] = []
    for row, draw in enumerate(draws):
        if not draw.sampling.bad_words:
            continue
        output = _output(draw)
        last = output[-1] if output else -1
        tokens = {
            word[-1]
            for word in draw.sampling.bad_words
            if word[-2] == last and tuple(output[1 - len(word) :]) == word[:-1]
        }
        entries += [(row, token, BAD_BIAS) for token in tokens if 0 <= token < vocab]
    return entries


def _output(draw: SampledRow) -> list[int]:
    if draw.history is None:
        raise EngineError("a row that needs its output has no history: its start came without one")
    return draw.history.emitted


def _held_back(draws: Sequence[SampledRow], vocab: int) -> list[Entry]:
    return [
        (row, token, -math.inf)
        for row, draw in enumerate(draws)
        if draw.emitted < draw.sampling.min_tokens
        for token in set(draw.sampling.stop_tokens)
        if 0 <= token < vocab
    ]


# --- temperature and filters ----------------------------------------------------------------------


def _draw(scores: torch.Tensor, draws: Sequence[SampledRow], device: ComputeDevice) -> torch.Tensor:
    """Return tokens [n] by inverse cumulative probability; overwrites `scores` [n, vocab]."""
    heat, u = device.upload(
        np.array([row.sampling.temperature for row in draws], dtype=np.float32),
        np.array([uniform(row.sampling.seed, row.position) for row in draws]),
    )
    top = scores.amax(-1, keepdim=True)
    scores.sub_(torch.where(top.isneginf(), 0.0, top)).div_(heat.unsqueeze(1))
    _filter(scores, [row.sampling for row in draws], device)
    weight = scores.double().exp_()
    total = weight.cumsum(-1)
    drawn = torch.searchsorted(total, (u * total[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # u·total may round up to the total itself: then take the last token with any weight.
    places = torch.arange(weight.shape[1], device=weight.device)
    last = torch.where(weight > 0, places, 0).amax(-1)
    return torch.minimum(drawn, last)


def _filter(scores: torch.Tensor, settings: Sequence[Sampling], device: ComputeDevice) -> None:
    """Apply top-k, top-p and min-p in place to scaled scores [n, vocab].

    Top-k and min-p keep ties at the edge. Rows without a filter stay untouched.
    """
    vocab = scores.shape[1]
    k = np.array([s.top_k if s.top_k < vocab else 0 for s in settings], dtype=np.int64)
    p = np.array([s.top_p for s in settings], dtype=np.float32)
    floor = np.array([math.log(s.min_p) if s.min_p else -math.inf for s in settings], np.float32)
    if k.any():
        index, at = device.upload(np.flatnonzero(k), k[k > 0] - 1)
        rows = scores[index]
        edge = rows.topk(int(k.max())).values.gather(1, at.unsqueeze(1))
        scores.index_copy_(0, index, rows.masked_fill_(rows < edge, -math.inf))
    if (p < 1.0).any():
        # A token stays when the tokens above it hold less than top_p; the best always stays.
        index, most = device.upload(np.flatnonzero(p < 1.0), p[p < 1.0])
        ordered, order = scores[index].sort(descending=True, stable=True)
        mass = ordered.softmax(-1)
        drop = mass.cumsum(-1).sub_(mass) >= most.unsqueeze(1)
        drop[:, 0] = False
        kept = torch.empty_like(ordered).scatter_(1, order, ordered.masked_fill_(drop, -math.inf))
        scores.index_copy_(0, index, kept)
    if np.isfinite(floor).any():
        (low,) = device.upload(floor)
        scores.masked_fill_(scores < scores.amax(-1, keepdim=True) + low.unsqueeze(1), -math.inf)


def _logprobs(
    raw: torch.Tensor,
    tokens: torch.Tensor,
    draws: Sequence[SampledRow],
    rows_with_logprobs: Sequence[int],
    device: ComputeDevice,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for `rows_with_logprobs`, the drawn tokens' log probabilities, and the best tokens
    with theirs."""
    (rows,) = device.upload(np.array(rows_with_logprobs, dtype=np.int64))
    own = raw[rows].log_softmax(-1)
    most = max(1, *(draws[i].sampling.logprobs or 0 for i in rows_with_logprobs))
    best = own.topk(min(most, own.shape[1]))
    chosen = own.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
    return chosen, best.indices, best.values
