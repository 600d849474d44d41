"""Outputs that follow a grammar: masks in the sampler, from the tokenizer of a checkpoint."""

from __future__ import annotations

import itertools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.solo_engine import SoloEngine

from medha.grammar_limits import CHECKED_LIMITS, LIMITS, MASK_S, MASKS_START_S, MaskTime
from medha.messages.fields import Sampling
from medha_router.structured.checker import grammar_of
from medha_worker.grammar_masks import Grammars
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint
from medha_worker.sampler import History, SampledRow, sample

STOPS = (1, 3)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a", "bc", None]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
JSON = grammar_of("json_schema", json.dumps(SCHEMA))
VOCAB = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_checkpoint(tmp_path_factory.mktemp("grammar"), TinyModel(vocab=VOCAB))


@pytest.fixture(scope="module")
def grammars(folder: pathlib.Path) -> Grammars:
    return Grammars(folder / "tokenizer.json", VOCAB)


@pytest.fixture(scope="module")
def tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def sampling(grammar: str = JSON, seed: int = 0, **fields: float) -> Sampling:
    return Sampling(grammar=grammar, seed=seed, stop_tokens=STOPS, **fields)  # type: ignore[arg-type]


def follows(text: str) -> bool:
    """Check a text by the schema's rules, independently of the grammar library."""
    value = json.loads(text)
    return (
        list(value) == ["name", "kind", "sizes"]
        and isinstance(value["name"], str)
        and len(value["name"]) <= 8
        and value["kind"] in ("a", "bc", None)
        and len(value["sizes"]) <= 3
        and all(type(size) is int for size in value["sizes"])
    )


@given(seed=st.integers(0, 1 << 40))
@settings(max_examples=20, deadline=None)
def test_any_logits_give_an_output_that_fits_the_schema(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, seed: int
) -> None:
    settings_, history = sampling(seed=seed), History(np.zeros(0, np.int32), 0)
    constraint = grammars.begin(settings_)
    random = torch.Generator().manual_seed(seed)
    for position in range(2000):
        logits = torch.randn(1, VOCAB, generator=random) * 3
        row = SampledRow(settings_, position, position, history, constraint)
        ((token, _),) = sample(logits, [row])
        if token in STOPS:
            break
        history.see(position, np.array([token], dtype=np.int32))
    assert constraint.error == "" and token in STOPS
    assert follows(tokenizer.decode(history.emitted))


def test_rows_without_a_grammar_are_drawn_as_if_they_were_alone(grammars: Grammars) -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    free = SampledRow(Sampling(seed=5), 4, 4)
    alone = sample(logits[1:], [free])[0]
    settings_ = sampling()
    bound = SampledRow(
        settings_, 0, 0, History(np.zeros(0, np.int32), 0), grammars.begin(settings_)
    )
    assert sample(logits, [bound, free])[1] == alone


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_resumed_output_continues_its_grammar(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, cut: int
) -> None:
    output = tokenizer.encode('{"name":"ab","ki', add_special_tokens=False).ids
    whole, resumed = grammars.begin(sampling()), grammars.begin(sampling())
    for length in range(len(output) + 1):
        expected = whole.mask(output[:length])
    resumed.mask(output[:cut])
    assert np.array_equal(resumed.mask(output), expected)
    assert 0 < np.unpackbits(expected.view(np.uint8)).sum() < VOCAB


def test_the_output_may_end_only_where_the_grammar_is_complete(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer
) -> None:
    constraint = grammars.begin(sampling(grammar_of("regex", "[a-c]{2,3}")))
    (third,) = tokenizer.encode("c", add_special_tokens=False).ids

    def allowed(text: str) -> set[int]:
        ids = [tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in text]
        bits = np.unpackbits(constraint.mask(ids).view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    assert not allowed("a") & set(STOPS)
    assert allowed("ab") >= {*STOPS, third}
    assert allowed("abc") == set(STOPS)


def test_a_grammar_that_fails_says_so_and_ends_the_output(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer
) -> None:
    constraint = grammars.begin(sampling(grammar_of("regex", "(a|aa){500}(b|bb){500}")))
    history = History(np.zeros(0, np.int32), 0)
    row = SampledRow(sampling(), 0, 0, history, constraint)
    for position in range(50):
        ((token, _),) = sample(torch.zeros(1, VOCAB), [row])
        if constraint.error:
            break
        history.see(position, np.array([token], dtype=np.int32))
    assert "too many expressions" in constraint.error and token == STOPS[0]


def test_masks_that_take_too_long_end_the_output_and_are_not_changed(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tokenizer.encode('{"name":"abcdef"', add_special_tokens=False).ids
    prompt, slow = grammars.begin(sampling()), grammars.begin(sampling())
    expected = [prompt.mask(output[:length]) for length in range(len(output))]
    clock = itertools.count(0.0, 0.5 * MASKS_START_S + MASK_S)
    monkeypatch.setattr("medha_worker.grammar_masks.time.thread_time", lambda: next(clock))
    errors = []
    for length, mask in enumerate(expected):
        assert np.array_equal(slow.mask(output[:length]), mask)
        errors.append(slow.error)
    assert prompt.error == "" and errors[:2] == ["", ""]
    assert all("22 ms of CPU time" in error for error in errors[2:])


def test_an_output_that_resumes_is_not_charged_for_its_replay(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tokenizer.encode('{"name":"abcdef"', add_special_tokens=False).ids
    resumed, clock = grammars.begin(sampling()), itertools.count(0.0, 9.0)
    monkeypatch.setattr("medha_worker.grammar_masks.time.thread_time", lambda: next(clock))
    resumed.mask(output)
    assert resumed.error == ""


@given(masks_s=st.lists(st.floats(0.0, 0.1), max_size=50))
def test_an_output_ends_once_its_masks_exceed_their_time_and_not_before(
    masks_s: list[float],
) -> None:
    spent, ended = MaskTime(0.002, 0.04), False
    for count in range(1, len(masks_s) + 1):
        spent.spend(masks_s[count - 1])
        # The worst stretch of masks up to this one.
        over = max(sum(masks_s[first:count]) - 0.002 * (count - first) for first in range(count))
        if abs(over - 0.04) > 1e-9:
            ended = over > 0.04
            assert bool(spent.error) == ended


@pytest.mark.parametrize("seed", range(5))
def test_thousands_of_choices_are_followed_to_the_end(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer, seed: int
) -> None:
    choices = [f"{number * 7919:x}" for number in range(6000)]
    settings_ = sampling(grammar_of("choice", json.dumps(choices)), seed)
    history, constraint = History(np.zeros(0, np.int32), 0), grammars.begin(settings_)
    for position in range(50):
        row = SampledRow(settings_, position, position, history, constraint)
        ((token, _),) = sample(torch.zeros(1, VOCAB), [row])
        if token in STOPS:
            break
        history.see(position, np.array([token], dtype=np.int32))
    assert constraint.error == "" and tokenizer.decode(history.emitted) in choices


def test_a_rank_follows_what_is_a_little_wider_than_the_check_admits(
    grammars: Grammars, tokenizer: tokenizers.Tokenizer
) -> None:
    words = " | ".join(f'"w{number}"' for number in range(CHECKED_LIMITS.max_items_in_row + 50))
    constraint = grammars.begin(sampling(grammar_of("grammar", f'start: "-" word\nword: {words}')))
    output = tokenizer.encode("-w12", add_special_tokens=False).ids
    for length in range(len(output) + 1):
        constraint.mask(output[:length])
    assert constraint.error == ""


@pytest.mark.parametrize("limit", LIMITS.__struct_fields__)
def test_no_limit_of_a_rank_is_below_that_of_the_check(limit: str) -> None:
    assert getattr(LIMITS, limit) >= getattr(CHECKED_LIMITS, limit)


def test_tokens_beyond_the_tokenizer_are_never_allowed(
    folder: pathlib.Path, tokenizer: tokenizers.Tokenizer
) -> None:
    padded = Grammars(folder / "tokenizer.json", VOCAB + 100)
    constraint = padded.begin(sampling(grammar_of("regex", "(?s).*")))
    bits = np.unpackbits(constraint.mask([]).view(np.uint8), bitorder="little")
    assert bits[VOCAB:].sum() == 0 and bits.sum() > 400


@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 1, VOCAB - 32, VOCAB + 5])
def test_tokens_beyond_the_logits_are_never_allowed(
    vocab: int, folder: pathlib.Path, tmp_path: pathlib.Path, grammars: Grammars
) -> None:
    """As with a token for padding that was added to the tokenizer alone."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"added{number}" for number in range(40)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    wider = Grammars(tmp_path / "tokenizer.json", vocab)
    free = sampling(grammar_of("regex", "(?s).*"))
    constraint = wider.begin(free)
    bits = np.unpackbits(constraint.mask([]).view(np.uint8), bitorder="little")
    assert constraint.error == ""
    assert len(bits) == -(-vocab // 32) * 32 and bits[vocab:].sum() == 0
    expected = np.unpackbits(grammars.begin(free).mask([]).view(np.uint8), bitorder="little")
    same = min(vocab, VOCAB)
    assert np.array_equal(bits[:same], expected[:same])
    assert bits[VOCAB:vocab].all()


def test_an_output_follows_its_schema_though_the_tokenizer_has_more_tokens(
    folder: pathlib.Path, tmp_path: pathlib.Path, tokenizer: tokenizers.Tokenizer
) -> None:
    larger = shutil.copytree(folder, tmp_path / "larger")
    added = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    added.add_special_tokens(["<pad>"])
    added.save(str(larger / "tokenizer.json"))
    prompt = np.arange(20, 60, dtype=np.int32)
    output = SoloEngine(larger, grammars=True).answer(prompt, sampling(), 2000)
    assert output[-1] in STOPS and follows(tokenizer.decode(output[:-1]))


def test_a_model_with_a_grammar_writes_json(
    folder: pathlib.Path, tokenizer: tokenizers.Tokenizer
) -> None:
    engine = SoloEngine(folder, grammars=True)
    prompt = np.arange(20, 60, dtype=np.int32)
    for seed in range(3):
        output = engine.answer(prompt, sampling(seed=seed), 2000)
        assert output[-1] in STOPS and follows(tokenizer.decode(output[:-1]))
