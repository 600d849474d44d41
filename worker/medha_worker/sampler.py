"""Draw the next token of each row: the same token whatever batch, rank or restart it is drawn in.

One uniform number u per token comes from a counter-based generator, a keyed hash of
(seed, position), and the token is the first whose cumulative probability exceeds u. So a request
that is resumed elsewhere goes on byte for byte. The order of the filters is that of transformers:
repetition, presence and frequency penalties, bias, stop tokens held back, temperature, top-k,
top-p, min-p. Log probabilities are the model's own, before any of these.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.messages.fields import Logprob, Sampling

# Below this a temperature is greedy: its quotients leave float32.
GREEDY_BELOW = 1e-5


class History:
    """A sequence's tokens as penalties see them: which ids the prompt has, how often the output
    repeats each. Fed with overlapping pieces in order; what is known already is skipped."""

    def __init__(self, tokens: npt.NDArray[np.int32], prompt_tokens: int) -> None:
        self.prompt_tokens, self.known = prompt_tokens, 0
        self.prompt: set[int] = set()
        self.output: dict[int, int] = {}
        self.see(0, tokens)

    def see(self, position: int, tokens: npt.NDArray[np.int32]) -> None:
        """`tokens` stand at `position` and after."""
        new = tokens[max(self.known - position, 0) :]
        cut = max(self.prompt_tokens - max(self.known, position), 0)
        self.prompt.update(new[:cut].tolist())
        for token in new[cut:].tolist():
            self.output[token] = self.output.get(token, 0) + 1
        self.known = max(self.known, position + len(tokens))


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One row to sample: the token at `position`, after `emitted` output tokens.

    `history` is needed when `sampling.penalised`.
    """

    sampling: Sampling
    position: int
    emitted: int
    history: History | None = None


@torch.inference_mode()
def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[tuple[int, Logprob | None]]:
    """A token, and its log probability if asked for, per row of `logits` [n, vocab] float32.

    NaN counts as −∞. A row without any finite logit yields the row's first stop token (else 0),
    which ends the sequence rather than the rank.
    """
    raw = logits
    best, tokens = raw.max(-1)
    if not all(map(math.isfinite, best.tolist())):  # a NaN is the maximum of its row
        raw = torch.nan_to_num(logits, nan=float("-inf"), posinf=1e30, neginf=float("-inf"))
        best, tokens = raw.max(-1)
    scores = raw
    adjusted = [i for i, draw in enumerate(draws) if _adjusted(draw)]
    if adjusted:
        scores = raw.clone()
        for i in adjusted:
            _adjust(scores[i], draws[i])
        best, tokens = scores.max(-1)
    drawn = [i for i, draw in enumerate(draws) if draw.sampling.temperature >= GREEDY_BELOW]
    if drawn:
        index = torch.tensor(drawn)
        tokens[index] = _draw(scores[index], [draws[i] for i in drawn])
    dead = best.isneginf().tolist()
    chosen = [
        (draw.sampling.stop_tokens or (0,))[0] if empty else token
        for token, empty, draw in zip(tokens.tolist(), dead, draws, strict=True)
    ]
    reports = _logprobs(raw, chosen, draws)
    return list(zip(chosen, reports, strict=True))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone, on every machine."""
    counter = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=b"medha-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _adjusted(draw: Draw) -> bool:
    s = draw.sampling
    return s.penalised or bool(s.logit_bias) or _held_back(draw)


def _held_back(draw: Draw) -> bool:
    return bool(draw.sampling.stop_tokens) and draw.emitted < draw.sampling.min_tokens


def _adjust(row: torch.Tensor, draw: Draw) -> None:
    """Penalties, bias and held-back stop tokens, in place on `row` [vocab]."""
    s, history = draw.sampling, draw.history
    if history is not None and s.penalised:
        _penalise(row, s, history)
    bias = {token: value for token, value in s.logit_bias.items() if 0 <= token < len(row)}
    if bias:
        row[torch.tensor(list(bias))] += torch.tensor(list(bias.values()))
    if _held_back(draw):
        row[torch.tensor([t for t in s.stop_tokens if 0 <= t < len(row)], dtype=torch.int64)] = (
            float("-inf")
        )


def _penalise(row: torch.Tensor, s: Sampling, history: History) -> None:
    """Repetition (of prompt and output) divides positive logits and multiplies negative ones;
    presence and frequency (of output) are subtracted, as in OpenAI's API."""
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(history.prompt | history.output.keys()), dtype=torch.int64)
        old = row[seen]
        r = s.repetition_penalty
        row[seen] = torch.where(old < 0, old * r, old / r)
    if history.output and (s.presence_penalty or s.frequency_penalty):
        ids = torch.tensor(list(history.output))
        counts = torch.tensor(list(history.output.values()), dtype=row.dtype)
        row[ids] -= s.presence_penalty + s.frequency_penalty * counts


def _draw(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens [n] by inverse cumulative probability; `scores` [n, vocab] is overwritten."""
    heat = torch.tensor([draw.sampling.temperature for draw in draws])
    top = scores.amax(-1, keepdim=True)
    scores.sub_(torch.where(top.isneginf(), 0.0, top)).div_(heat.unsqueeze(1))
    for row, draw in zip(scores, draws, strict=True):
        _filter(row, draw.sampling)
    weight = scores.double().exp_()
    total = weight.cumsum(-1)
    u = torch.tensor(
        [uniform(draw.sampling.seed, draw.position) for draw in draws], dtype=torch.float64
    )
    found = torch.searchsorted(total, (u * total[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # u·total may round up to the total itself: then the last token of any weight.
    last = torch.where(weight > 0, torch.arange(weight.shape[1]), 0).amax(-1)
    return torch.minimum(found, last)


def _filter(row: torch.Tensor, s: Sampling) -> None:
    """Top-k, top-p, min-p in place on scaled scores `row` [vocab]; ties at an edge are kept by
    top-k and by min-p."""
    if 0 < s.top_k < len(row):
        row.masked_fill_(row < row.topk(s.top_k).values[-1], float("-inf"))
    if s.top_p < 1.0:
        # A token stays when the tokens above it hold less than top_p; the best always stays.
        ordered, index = row.sort(descending=True, stable=True)
        mass = ordered.softmax(-1)
        above = mass.cumsum(-1) - mass
        drop = above >= s.top_p
        drop[0] = False
        row[index[drop]] = float("-inf")
    if s.min_p > 0.0:
        row.masked_fill_(row < row.max() + math.log(s.min_p), float("-inf"))


def _logprobs(
    raw: torch.Tensor, chosen: Sequence[int], draws: Sequence[Draw]
) -> list[Logprob | None]:
    reports: list[Logprob | None] = []
    for row, (token, draw) in enumerate(zip(chosen, draws, strict=True)):
        count = draw.sampling.logprobs
        if count is None:
            reports.append(None)
            continue
        logprobs = raw[row].log_softmax(-1)
        best = logprobs.topk(min(count, len(logprobs)))
        top = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        reports.append(Logprob(float(logprobs[token]), tuple(top)))
    return reports
