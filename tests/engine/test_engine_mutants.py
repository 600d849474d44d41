"""The comparison with transformers has teeth: each classic fault, put in on purpose, is seen."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha_worker.attention.fp8_scales import Scales
from medha_worker.attention.kernel_interface import Attention, AttentionPlan, LogBase, Partial, Span
from medha_worker.attention.merge import merge
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.model.rope import Rotary

Oracle = Callable[[pathlib.Path, npt.NDArray[np.int32]], torch.Tensor]
TOLERANCE = 1e-4


class Faulty:
    """An attention that is handed wrong spans."""

    def __init__(self, fault: Callable[[Span], Span]) -> None:
        self.inner, self.fault = ReferenceAttention(4, 2, 32, 64), fault

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        return self.inner.plan([self.fault(span) for span in spans])


class Split:
    """Attention over two halves of the pages, merged as two groups would; `base` is what the second
    half claims its log-sum-exp to be in (it is in e)."""

    def __init__(self, base: LogBase) -> None:
        self.inner, self.base = ReferenceAttention(4, 2, 32, 64), base

    def plan(self, spans: Sequence[Span]) -> AttentionPlan:
        older = [replace(s, held=s.held // 128 * 64, tail=False) for s in spans]
        newer = [
            replace(s, held=s.held - o.held, pages=s.pages[o.held // 64 :])
            for s, o in zip(spans, older, strict=True)
        ]
        return SplitPlan(self.inner.plan(older), self.inner.plan(newer), self.base)


class SplitPlan:
    def __init__(self, older: AttentionPlan, newer: AttentionPlan, base: LogBase) -> None:
        self.older, self.newer, self.base = older, newer, base

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: torch.Tensor,
        scales: Scales | None = None,
    ) -> Partial:
        assert scales is None
        newer = self.newer.run(q, k, v, pool)
        claimed = Partial(newer.out, newer.lse, self.base)
        return merge([self.older.run(q, k, v, pool), claimed])


def _drop_token(span: Span) -> Span:
    """The newest earlier token of every long context is not attended to."""
    return replace(span, held=span.held - 1) if span.held > 128 else span


def _count_page_twice(span: Span) -> Span:
    """The first page stands in twice; the second is lost."""
    if span.held < 192:
        return span
    pages = span.pages.copy()
    pages[1] = pages[0]
    return replace(span, pages=pages)


def _no_causal_tail(span: Span) -> Span:
    """The chunk's own rows do not see the chunk."""
    return replace(span, tail=False) if span.length > 1 else span


def engine_difference(
    folder: pathlib.Path, oracle: Oracle, attention: Attention | None, shift: int = 0
) -> float:
    """Largest difference to transformers, in standard deviations, over chunks and decodes."""
    tokens = recalling(500, 512, seed=9)
    engine = SoloEngine(folder, pages=8, attention=attention)
    if shift:
        engine.inputs.rotary = Shifted(engine.inputs.rotary, shift)
    engine.start(1, tokens)
    actual = torch.cat([engine.step((1, n)) for n in (200, 230, *[1] * 70)])
    expected = oracle(folder, tokens)
    return float((actual - expected).abs().max() / expected.std())


class Shifted(Rotary):
    """Positions of all but the first chunk are off by `shift`."""

    def __init__(self, right: Rotary, shift: int) -> None:
        super().__init__(right.rope, right.head_dim)
        self.shift = shift

    def angles(
        self, positions: torch.Tensor, spans: Iterable[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        off = self.shift if positions[0] else 0
        return super().angles(positions + off, spans)


def test_without_a_fault_the_comparison_passes(tiny: pathlib.Path, oracle: Oracle) -> None:
    assert engine_difference(tiny, oracle, None) < TOLERANCE
    assert engine_difference(tiny, oracle, Faulty(lambda span: span)) < TOLERANCE
    assert engine_difference(tiny, oracle, Split(LogBase.E)) < TOLERANCE


@pytest.mark.parametrize("fault", [_drop_token, _count_page_twice, _no_causal_tail])
def test_a_wrong_span_is_seen(
    fault: Callable[[Span], Span], tiny: pathlib.Path, oracle: Oracle
) -> None:
    assert engine_difference(tiny, oracle, Faulty(fault)) > 1000 * TOLERANCE


def test_a_position_off_by_one_is_seen(tiny: pathlib.Path, oracle: Oracle) -> None:
    assert engine_difference(tiny, oracle, None, shift=1) > 1000 * TOLERANCE


def test_a_wrong_base_of_the_log_sum_exp_is_seen(tiny: pathlib.Path, oracle: Oracle) -> None:
    assert engine_difference(tiny, oracle, Split(LogBase.TWO)) > 1000 * TOLERANCE
