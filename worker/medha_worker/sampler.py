"""Draw the next token of each row: the same token whatever batch, rank or restart it is drawn in.

One uniform number u per token comes from a counter-based generator, a keyed hash of
(seed, position), and the token is the first whose cumulative probability exceeds u. So a request
that is resumed elsewhere goes on byte for byte. The order of the filters is that of transformers:
repetition, presence and frequency penalties, bias, stop tokens held back, temperature, top-k,
top-p, min-p. Log probabilities are the model's own, before any of these.

Everything happens where the logits are: the host computes the numbers u, which need no logits, and
sends them with the settings; nothing is read back until somebody asks for what was drawn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.messages.fields import Logprob, Sampling
from medha_worker.device import CPU, Arriving, Device

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


class Drawn:
    """What the rows of a batch drew: `tokens` int64 [rows] on the device, and the way here."""

    def __init__(
        self, tokens: torch.Tensor, draws: Sequence[Draw], asked: Sequence[int], arriving: Arriving
    ) -> None:
        self.tokens, self._draws, self._asked = tokens, draws, asked
        self.arriving = arriving

    def read(self, timeout_s: float | None = None) -> list[tuple[int, Logprob | None]]:
        """Each row's token, and its log probability if asked for; waits for the device.

        Raises PeerLost when the device is not done within `timeout_s`.
        """
        tokens, *told = self.arriving.wait(timeout_s)
        reports: list[Logprob | None] = [None] * len(self._draws)
        if self._asked:
            for row, chosen, best, values in zip(
                self._asked, *(part.tolist() for part in told), strict=True
            ):
                count = self._draws[row].sampling.logprobs or 0
                top = tuple(zip(best[:count], values[:count], strict=True))
                reports[row] = Logprob(chosen, top)
        return list(zip(tokens.tolist(), reports, strict=True))


def sample(
    logits: torch.Tensor, draws: Sequence[Draw], device: Device = CPU
) -> list[tuple[int, Logprob | None]]:
    """A token, and its log probability if asked for, per row of `logits` [n, vocab] float32."""
    return draw(logits, draws, device).read()


@torch.inference_mode()
def draw(
    logits: torch.Tensor, draws: Sequence[Draw], device: Device = CPU, *, alone: bool = False
) -> Drawn:
    """Draw a token for each row of `logits` [n, vocab] float32, on the device that holds them.

    `alone`: rows that are not greedy one by one, as a GPU sums several in another order than one.
    NaN counts as −∞. A row without any finite logit yields the row's first stop token (else 0),
    which ends the sequence rather than the rank.
    """
    raw = torch.nan_to_num(logits, nan=-math.inf, posinf=1e30, neginf=-math.inf)
    scores = _adjusted(raw, draws, device)
    best, tokens = scores.max(-1)
    hot = [i for i, one in enumerate(draws) if one.sampling.temperature >= GREEDY_BELOW]
    stops = np.array([(one.sampling.stop_tokens or (0,))[0] for one in draws], dtype=np.int64)
    ends, rows = device.upload(stops, np.array(hot, dtype=np.int64))
    if hot:
        heated = scores.clone() if len(hot) == len(draws) else scores[rows]
        warm = [draws[i] for i in hot]
        if alone:
            each = [_draw(heated[i : i + 1], warm[i : i + 1], device) for i in range(len(warm))]
            tokens.index_copy_(0, rows, torch.cat(each))
        else:
            tokens.index_copy_(0, rows, _draw(heated, warm, device))
    tokens = torch.where(best.isneginf(), ends, tokens)
    asked = [i for i, one in enumerate(draws) if one.sampling.logprobs is not None]
    told = _logprobs(raw, tokens, draws, asked, device) if asked else ()
    return Drawn(tokens, draws, asked, device.fetch(tokens, *told))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on (seed, position) alone, on every machine."""
    counter = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    digest = hashlib.blake2b(counter, digest_size=8, person=b"medha-draw").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _held_back(draw: Draw) -> bool:
    return bool(draw.sampling.stop_tokens) and draw.emitted < draw.sampling.min_tokens


# --- penalties, bias, stop tokens held back: (row, token) places and what happens to them ---------

Entry = tuple[int, int, float]


def _adjusted(raw: torch.Tensor, draws: Sequence[Draw], device: Device) -> torch.Tensor:
    """`raw` itself where no row has any of these; else scores of their own."""
    vocab = raw.shape[1]
    kinds = (_repeated, _counted, _biased, _held)
    found = [[e for i, one in enumerate(draws) for e in kind(i, one, vocab)] for kind in kinds]
    if not any(found):
        return raw
    scores = raw.clone()
    for number, entries in enumerate(found):
        if not entries:
            continue
        rows, tokens, values = zip(*entries, strict=True)
        row, token, value = device.upload(
            np.array(rows, dtype=np.int64), np.array(tokens, dtype=np.int64),
            np.array(values, dtype=np.float32),
        )  # fmt: skip
        old = scores[row, token]
        new = torch.where(old < 0, old * value, old / value) if number == 0 else old + value
        scores.index_put_((row, token), new)
    return scores


def _repeated(row: int, draw: Draw, vocab: int) -> Iterator[Entry]:
    """Repetition (of prompt and output) divides positive logits and multiplies negative ones."""
    penalty, history = draw.sampling.repetition_penalty, draw.history
    if history is not None and penalty != 1.0:
        for token in sorted(history.prompt | history.output.keys()):
            yield row, token, penalty


def _counted(row: int, draw: Draw, vocab: int) -> Iterator[Entry]:
    """Presence and frequency (of output) are subtracted, as in OpenAI's API."""
    s, history = draw.sampling, draw.history
    if history is not None and (s.presence_penalty or s.frequency_penalty):
        for token, count in history.output.items():
            yield row, token, -(s.presence_penalty + s.frequency_penalty * count)


def _biased(row: int, draw: Draw, vocab: int) -> Iterator[Entry]:
    for token, value in draw.sampling.logit_bias.items():
        if 0 <= token < vocab:
            yield row, token, value


def _held(row: int, draw: Draw, vocab: int) -> Iterator[Entry]:
    if _held_back(draw):
        for token in set(draw.sampling.stop_tokens):
            if 0 <= token < vocab:
                yield row, token, -math.inf


# --- temperature and filters ----------------------------------------------------------------------


def _draw(scores: torch.Tensor, draws: Sequence[Draw], device: Device) -> torch.Tensor:
    """Tokens [n] by inverse cumulative probability; `scores` [n, vocab] is overwritten."""
    heat, u = device.upload(
        np.array([one.sampling.temperature for one in draws], dtype=np.float32),
        np.array([uniform(one.sampling.seed, one.position) for one in draws]),
    )
    top = scores.amax(-1, keepdim=True)
    scores.sub_(torch.where(top.isneginf(), 0.0, top)).div_(heat.unsqueeze(1))
    _filter(scores, [one.sampling for one in draws], device)
    weight = scores.double().exp_()
    total = weight.cumsum(-1)
    found = torch.searchsorted(total, (u * total[:, -1]).unsqueeze(1), right=True).squeeze(1)
    # u·total may round up to the total itself: then the last token of any weight.
    places = torch.arange(weight.shape[1], device=weight.device)
    last = torch.where(weight > 0, places, 0).amax(-1)
    return torch.minimum(found, last)


def _filter(scores: torch.Tensor, settings: Sequence[Sampling], device: Device) -> None:
    """Top-k, top-p, min-p in place on scaled scores [n, vocab]; ties at an edge are kept by top-k
    and by min-p. Only rows that have a filter are touched by it."""
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
    raw: torch.Tensor, tokens: torch.Tensor, draws: Sequence[Draw], asked: Sequence[int],
    device: Device,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of the rows `asked` for: the tokens' own log probabilities, the best tokens and theirs."""
    (rows,) = device.upload(np.array(asked, dtype=np.int64))
    own = raw[rows].log_softmax(-1)
    most = max(1, *(draws[i].sampling.logprobs or 0 for i in asked))
    best = own.topk(min(most, own.shape[1]))
    chosen = own.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
    return chosen, best.indices, best.values
