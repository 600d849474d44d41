"""Sampling against transformers' logits processors and against the distribution itself."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from medha.messages.fields import ALLOWED_BIAS, Sampling
from medha_worker.penalties import PenaltyTable, TokenCounts
from medha_worker.sampler import History, SampledRow, sample, uniform

VOCAB = 40


def logits(rows: int = 1, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def token(
    scores: torch.Tensor,
    position: int = 0,
    counts: TokenCounts | None = None,
    emitted: int = 0,
    **settings: Any,
) -> int:
    row = SampledRow(Sampling(**settings), position, emitted, counts=counts)
    return sample(scores.view(1, -1), [row])[0][0]


def counted(tokens: list[int], prompt_tokens: int, **settings: Any) -> TokenCounts:
    seen = np.array(tokens, dtype=np.int32)
    return PenaltyTable(VOCAB).begin(Sampling(**settings), seen, prompt_tokens)


def support(scores: torch.Tensor, tries: int = 3000, **settings: Any) -> dict[int, int]:
    """Count how often each token is drawn over many positions."""
    draws = [SampledRow(Sampling(**settings), position, 0) for position in range(tries)]
    counts: dict[int, int] = {}
    for drawn, _ in sample(scores.expand(tries, -1), draws):
        counts[drawn] = counts.get(drawn, 0) + 1
    return counts


def test_temperature_zero_is_greedy() -> None:
    scores = logits(4)
    drawn = sample(scores, [SampledRow(Sampling(temperature=0.0), 3, 0)] * 4)
    assert [t for t, _ in drawn] == scores.argmax(-1).tolist()


@given(
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, VOCAB]),
    top_p=st.sampled_from([0.05, 0.6, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    seed=st.integers(0, 5),
)
def test_filters_leave_the_distribution_that_transformers_leaves(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """A token is the first whose cumulative probability, by id, exceeds u."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if 0 < top_k < VOCAB:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    scores = logits(seed=seed)
    kept = warpers(torch.zeros(1, 1, dtype=torch.int64), scores.clone())[0]
    total = kept.double().softmax(-1).cumsum(-1).numpy()
    settings: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    for position in range(20):
        expected = int(np.searchsorted(total, uniform(seed, position) * total[-1], side="right"))
        assert token(scores, position, seed=seed, **settings) == expected


def test_frequencies_follow_the_distribution() -> None:
    scores = logits(spread=1.5)
    tries = 20_000
    counts = support(scores, tries, temperature=0.8, seed=11)
    expected = (scores[0] / 0.8).double().softmax(-1).numpy() * tries
    counted = np.array([counts.get(i, 0) for i in range(VOCAB)])
    large = expected >= 5
    chi_square = float((((counted - expected) ** 2) / expected)[large].sum())
    # 99.9 % of the chi-square distribution with 39 degrees of freedom is below 72.1.
    assert chi_square < 72.1


def test_numbers_of_the_generator_are_even_and_unlike_for_neighbouring_seeds() -> None:
    numbers = np.array([[uniform(seed, p) for p in range(2000)] for seed in (0, 1)])
    assert 0 <= numbers.min() < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.02
    assert abs(np.corrcoef(numbers)[0, 1]) < 0.08
    assert abs(np.corrcoef(numbers[0, 1:], numbers[0, :-1])[0, 1]) < 0.08


def test_the_generator_is_the_same_on_every_machine() -> None:
    assert uniform(0, 0) == pytest.approx(0.35732775505573056, abs=1e-15)
    assert uniform((1 << 63) - 1, 1_000_000) == pytest.approx(0.443447917418786, abs=1e-15)


def test_a_token_does_not_depend_on_the_batch_it_is_drawn_in() -> None:
    scores = logits(8)
    draws = [
        SampledRow(Sampling(temperature=0.5 + i / 4, seed=i, top_p=0.9), 10 + i, 0)
        for i in range(8)
    ]
    together = sample(scores, draws)
    alone = [sample(scores[i : i + 1], draws[i : i + 1])[0] for i in range(8)]
    assert together == alone
    assert sample(scores.flip(0), draws[::-1]) == alone[::-1]


def test_repetition_penalty_is_that_of_transformers() -> None:
    scores, seen = logits(), [3, 3, 8, 21]
    penalised = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([seen]), scores.clone())
    expected = int(penalised[0].argmax())
    counts = counted(seen, prompt_tokens=2, repetition_penalty=1.7)
    assert token(scores, counts=counts, temperature=0.0) == expected


def test_presence_and_frequency_count_output_tokens_alone() -> None:
    scores = torch.zeros(VOCAB)
    scores[5], scores[6], scores[7] = 3.0, 2.5, 1.0
    counts = counted([7, 7, 5, 5, 6], prompt_tokens=2, frequency_penalty=0.5, presence_penalty=0.25)
    # 5: 3 − 2·0.5 − 0.25 = 1.75;  6: 2.5 − 0.5 − 0.25 = 1.75 (tie: 5);  7 in the prompt only: 1.0
    assert token(scores, counts=counts, temperature=0.0) == 5
    counts.see(5, np.array([5], dtype=np.int32))
    assert token(scores, counts=counts, temperature=0.0) == 6


def test_a_history_skips_what_it_knows_and_the_prompt() -> None:
    history = History(np.array([1, 2], dtype=np.int32), prompt_tokens=4)
    history.see(1, np.array([2, 3, 4, 9], dtype=np.int32))
    history.see(4, np.array([9], dtype=np.int32))
    history.see(5, np.array([9], dtype=np.int32))
    assert (history.emitted, history.known) == ([9, 9], 6)


few_tokens = st.integers(0, 3)


@given(
    st.lists(few_tokens, max_size=8),
    st.lists(st.lists(few_tokens, min_size=2, max_size=4), min_size=1, max_size=9),
    st.integers(0, 99),
)
def test_bad_words_are_those_of_transformers(
    output: list[int], words: list[list[int]], seed: int
) -> None:
    scores = logits(seed=seed)
    scores[0, :4] += 50.0  # the words' tokens are likely
    bad = torch.isneginf(NoBadWordsLogitsProcessor(words)(torch.tensor([output]), scores.clone()))
    history = History(np.array([5, *output], np.int32), prompt_tokens=1)
    settings = Sampling(temperature=0.0, bad_words=tuple(map(tuple, words)))
    row = SampledRow(settings, len(output) + 1, len(output), history)
    left = scores.masked_fill(bad, -1e9)
    assert sample(scores, [row])[0][0] == int(left.argmax())
    allowed = dict.fromkeys((0, 2, 3), ALLOWED_BIAS)
    settings = Sampling(temperature=0.0, bad_words=settings.bad_words, logit_bias=allowed)
    if bad[0, [0, 2, 3]].all():  # they are all that is allowed
        left = scores
    best = max(allowed, key=lambda token: float(left[0, token]))
    assert sample(scores, [SampledRow(settings, 9, len(output), history)])[0][0] == best


@given(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
    st.integers(0, 40),
    st.sampled_from([0.7, 1.0, 1.3]),
    st.booleans(),
    st.data(),
)
def test_counts_of_overlapping_pieces_penalise_like_those_of_the_whole(
    tokens: list[int], prompt_tokens: int, repetition: float, compiled: bool, data: st.DataObject
) -> None:
    settings = Sampling(
        repetition_penalty=repetition, presence_penalty=0.5, frequency_penalty=-0.25
    )
    other = Sampling(repetition_penalty=1.6)
    table = PenaltyTable(VOCAB, compiled=compiled)
    ended = table.begin(settings, np.array(tokens[::2], dtype=np.int32), 1)
    table.release(ended)  # leaves nothing to the next sequence in its slot
    pieces = table.begin(settings, np.empty(0, np.int32), prompt_tokens)
    assert pieces.slot == ended.slot
    neighbour = table.begin(other, np.array(tokens, dtype=np.int32), 0)
    known = 0
    while known < len(tokens):
        start = data.draw(st.integers(0, known))
        end = data.draw(st.integers(known + 1, len(tokens)))
        pieces.see(start, np.array(tokens[start:end], dtype=np.int32))
        known = end
    together, alone = logits(3), logits(3)
    table.apply(together, [0, 2], [pieces, neighbour])
    table.apply(alone, [0], [pieces])
    assert torch.equal(together[:2], alone[:2]) and torch.equal(together[1], logits(3)[1])
    for row, factor, penalised in ((0, repetition, settings), (2, 1.6, other)):
        output = collections.Counter(tokens[prompt_tokens if row == 0 else 0 :])
        for at, score in enumerate(logits(3)[row].tolist()):
            if at in tokens:
                score = score * factor if score < 0 else score / factor
            score -= penalised.presence_penalty * (output[at] > 0)
            score -= penalised.frequency_penalty * output[at]
            assert float(together[row, at]) == pytest.approx(score, abs=1e-5)


def test_bias_can_force_and_ban() -> None:
    scores = logits()
    best = int(scores.argmax())
    assert token(scores, temperature=0.0, logit_bias={9: 100.0}) == 9
    assert token(scores, temperature=0.0, logit_bias={best: -100.0}) != best
    assert token(scores, temperature=0.0, logit_bias={VOCAB + 5: 100.0}) == best


def test_stop_tokens_wait_for_min_tokens() -> None:
    scores = logits()
    best = int(scores.argmax())
    settings: dict[str, Any] = {"temperature": 0.0, "stop_tokens": (best,), "min_tokens": 3}
    assert token(scores, emitted=2, **settings) != best
    assert token(scores, emitted=3, **settings) == best


def test_log_probabilities_are_the_models_own() -> None:
    scores = logits()
    sampling = Sampling(temperature=5.0, logprobs=3, logit_bias={2: 50.0})
    ((drawn, report),) = sample(scores, [SampledRow(sampling, 0, 0)])
    own = scores[0].double().log_softmax(-1)
    assert drawn == 2
    assert report is not None
    assert report.chosen == pytest.approx(float(own[2]), abs=1e-5)
    assert [t for t, _ in report.top] == own.topk(3).indices.tolist()
    assert [p for _, p in report.top] == pytest.approx(own.topk(3).values.tolist(), abs=1e-5)


def test_infinities_and_nan_never_win() -> None:
    scores = logits()
    scores[0, :5] = float("-inf")
    scores[0, 5:9] = float("nan")
    for settings in ({"temperature": 0.0}, {"temperature": 1.5}, {"top_p": 0.99}, {"top_k": 39}):
        counts = support(scores, 200, **settings)
        assert min(counts) >= 9
    scores[0, 12] = float("inf")
    assert support(scores, 50, temperature=1.0) == {12: 50}


def test_a_row_without_a_finite_logit_ends_its_sequence() -> None:
    dead = torch.full((VOCAB,), float("nan"))
    for temperature in (0.0, 1.0):
        assert token(dead, temperature=temperature, stop_tokens=(7, 8)) == 7


@pytest.mark.parametrize(("stops", "expected"), [((VOCAB, 8), 8), ((VOCAB + 5, 1 << 30), 0)])
def test_a_row_without_a_finite_logit_yields_a_token_of_the_vocabulary(
    stops: tuple[int, ...], expected: int
) -> None:
    """Log probabilities, penalties and embeddings take no other."""
    dead = torch.full((VOCAB,), float("-inf"))
    for temperature in (0.0, 1.0):
        assert token(dead, temperature=temperature, stop_tokens=stops, logprobs=3) == expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-4, 10.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    scores = logits(spread=1e4)
    best = int(scores.argmax())
    counts = support(scores, 50, temperature=temperature)
    assert counts == {best: 50}


@pytest.mark.parametrize("penalty", [5e-324, 1e-30, 10.0])
@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_extreme_repetition_penalties_stay_finite(penalty: float, temperature: float) -> None:
    scores = torch.linspace(-3.0, 3.0, VOCAB).view(1, -1)
    scores[0, 1], scores[0, 2] = 0.0, float("-inf")
    seen = list(range(VOCAB - 1))
    counts = counted(seen, prompt_tokens=3, repetition_penalty=penalty)
    best = VOCAB - 1 if penalty > 1.0 else VOCAB - 2
    assert token(scores, counts=counts, repetition_penalty=penalty, temperature=temperature) == best
