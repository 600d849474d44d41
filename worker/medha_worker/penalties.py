"""Penalties on repeated tokens, by tables that stay where the logits are.

    factor  [slots, vocab] float32    repetition penalty of a token of prompt or output, else 1
    output  [slots, vocab] float32    how often the token occurs in the output

A sequence with penalties has a slot, and each token that it draws changes one entry. So a step
costs the same after a prompt of any length, and the next one may be launched before the host has
read the tokens of this one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from medha.messages.fields import Sampling
from medha_worker.device import CPU, ComputeDevice
from medha_worker.model.native_arithmetic import NativePenalties

# A lower repetition penalty counts as this: float32 takes it for 0, by which it cannot divide.
LEAST_FACTOR = 1e-6


class PenaltyTable:
    """Tables of the sequences with penalties; they grow by doubling.

    On a CPU a compiled kernel applies them, unless `compiled` is False.
    """

    def __init__(self, vocab: int, device: ComputeDevice = CPU, *, compiled: bool = True) -> None:
        self.vocab, self.device = vocab, device
        self._native = NativePenalties() if compiled and device.at.type == "cpu" else None
        self._factor = torch.ones((0, vocab), device=device.at)
        self._output = torch.zeros((0, vocab), device=device.at)
        self._free: list[int] = []

    @torch.inference_mode()
    def begin(
        self, sampling: Sampling, tokens: npt.NDArray[np.int32], prompt_tokens: int
    ) -> TokenCounts:
        """Return the counts of a sequence that has these tokens so far."""
        if not self._free:
            self._grow(max(4, 2 * len(self._factor)))
        slot = self._free.pop()
        self._factor[slot] = 1.0
        self._output[slot] = 0.0
        counts = TokenCounts(self, slot, sampling, prompt_tokens)
        counts.see(0, tokens)
        return counts

    def release(self, counts: TokenCounts) -> None:
        """Free the slot of a sequence that ended."""
        self._free.append(counts.slot)

    @torch.inference_mode()
    def mark(self, slot: int, factor: float, tokens: npt.NDArray[np.int64]) -> None:
        """Give tokens of a slot's prompt, or of its output, their factor."""
        (uploaded,) = self.device.upload(tokens)
        self._factor[slot].index_fill_(0, uploaded, factor)

    @torch.inference_mode()
    def count(self, slots: Sequence[int], factors: Sequence[float], tokens: torch.Tensor) -> None:
        """Count an output token (int64 [n], on the device) of each slot, which has that factor."""
        at, factor = self.device.upload(
            np.array(slots, dtype=np.int64), np.array(factors, dtype=np.float32)
        )
        self._factor.index_put_((at, tokens), factor)
        self._output.index_put_((at, tokens), torch.ones_like(factor), accumulate=True)

    @torch.inference_mode()
    def apply(
        self, scores: torch.Tensor, rows: Sequence[int], counts: Sequence[TokenCounts]
    ) -> None:
        """Change the scores float32 [n, vocab] of `rows`, which have these counts, in place.

        A repetition penalty multiplies the negative scores of its tokens and divides the others.
        Presence and frequency penalties are subtracted, as in OpenAI's API.
        """
        if self._native is not None:
            for row, sequence in zip(rows, counts, strict=True):
                own, slot = sequence.sampling, sequence.slot
                self._native(
                    *(scores[row], self._factor[slot], self._output[slot]),
                    raises=own.repetition_penalty < 1.0,
                    once=own.presence_penalty,
                    per_time=own.frequency_penalty,
                )
            return
        at, slots = self.device.upload(
            np.array(rows, dtype=np.int64),
            np.array([sequence.slot for sequence in counts], dtype=np.int64),
        )
        part = scores[at]
        self._change(part, self._factor[slots], self._output[slots], counts)
        scores.index_copy_(0, at, part)

    def _change(
        self,
        scores: torch.Tensor,
        factor: torch.Tensor,
        output: torch.Tensor,
        counts: Sequence[TokenCounts],
    ) -> None:
        """Change all rows of `scores`; the tables have the same rows."""
        settings = [sequence.sampling for sequence in counts]
        repetition = np.array([[s.repetition_penalty] for s in settings], dtype=np.float32)
        presence = np.array([[s.presence_penalty] for s in settings], dtype=np.float32)
        frequency = np.array([[s.frequency_penalty] for s in settings], dtype=np.float32)
        raises, once, per_time = self.device.upload(repetition < 1.0, presence, frequency)
        if (repetition != 1.0).any():
            # Of product and quotient, the lower one counts if the factor is above 1.
            product = scores * factor
            scores.div_(factor)
            higher = torch.maximum(scores, product) if (repetition < 1.0).any() else None
            torch.minimum(scores, product, out=scores)
            if higher is not None:
                torch.where(raises, higher, scores, out=scores)
        if presence.any():
            scores.addcmul_(output.clamp(max=1.0), once, value=-1.0)
        if frequency.any():
            scores.addcmul_(output, per_time, value=-1.0)

    def _grow(self, slots: int) -> None:
        used = len(self._factor)
        factor, output = (
            part.new_empty(slots, self.vocab) for part in (self._factor, self._output)
        )
        factor[:used], output[:used] = self._factor, self._output
        self._free += range(slots - 1, used - 1, -1)
        self._factor, self._output = factor, output


@dataclasses.dataclass(slots=True)
class TokenCounts:
    """The slot of a sequence in a table; its tokens before position `known` are counted."""

    table: PenaltyTable
    slot: int
    sampling: Sampling
    prompt_tokens: int
    known: int = 0

    @property
    def factor(self) -> float:
        return max(self.sampling.repetition_penalty, LEAST_FACTOR)

    def see(self, position: int, tokens: npt.NDArray[np.int32]) -> None:
        """Count `tokens` from `position` on; those that are counted already are skipped."""
        new = tokens[max(self.known - position, 0) :].astype(np.int64)
        cut = max(self.prompt_tokens - max(self.known, position), 0)
        self.known = max(self.known, position + len(tokens))
        prompt, output = new[:cut], new[cut:]
        if len(prompt):
            self.table.mark(self.slot, self.factor, prompt)
        if len(output):
            (uploaded,) = self.table.device.upload(output)
            self.table.count([self.slot] * len(output), [self.factor] * len(output), uploaded)
