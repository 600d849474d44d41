"""Outputs with a grammar or bad words are those of one rank in every layout, token by token."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tokenizers
from benchmarks.structured_outputs import PERSON, is_person
from tests.support.driver import Driver
from tests.support.rank_rig import Rig
from tests.support.solo_engine import SoloEngine

from medha.messages import Sampling
from medha_router.structured.checker import grammar_of

PAGE_TOKENS, PAGES, VOCAB = 16, 700, 512
STOPS = (1, 3)
SCHEMA = {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 2}
PROMPTS = {
    seq: np.random.default_rng(seq).integers(8, VOCAB, 30 + 7 * seq, np.int32) for seq in (1, 2, 3)
}


WORDS = tuple(itertools.product((430, 481), repeat=3))


def sampling(seq: int) -> Sampling:
    if seq == 3:  # the two tokens are likely, and three of them in a row a bad word
        likely = {430: 16.0, 481: 16.0}
        return Sampling(
            temperature=1.0, seed=103, stop_tokens=STOPS, logit_bias=likely, bad_words=WORDS
        )
    grammar = grammar_of("json_schema", json.dumps(SCHEMA))
    return Sampling(temperature=1.0, seed=100 + seq, stop_tokens=STOPS, grammar=grammar)


def in_a_row(output: list[int]) -> int:
    """Return the length of the longest run of the bad words' tokens."""
    runs = itertools.groupby(output, lambda token: token in (430, 481))
    return max(len(list(run)) for bad, run in runs if bad)


def fits(text: str) -> bool:
    """Check a text by the schema's rules, independently of the grammar library."""
    people: list[dict[str, Any]] = json.loads(text)
    return len(people) == 2 and all(
        is_person(person) and list(person) == ["name", "age", "role"] for person in people
    )


@pytest.fixture(scope="module")
def expected(checkpoint: pathlib.Path) -> dict[int, list[int]]:
    """Outputs of one rank: two by the schema, and one without bad words in the same batches."""
    engine = SoloEngine(checkpoint, page_tokens=PAGE_TOKENS, grammars=True)
    outputs = {
        seq: engine.answer(prompt, sampling(seq), 400 if seq < 3 else 60)
        for seq, prompt in PROMPTS.items()
    }
    tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert all(fits(tokenizer.decode(outputs[seq])) for seq in (1, 2))
    assert len(outputs[3]) > 20 and in_a_row(outputs[3]) == 2
    return outputs


@pytest.mark.parametrize(("tp", "spp", "kvp"), [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_outputs_are_the_same_in_every_layout(
    make_rig: Callable[..., Rig], expected: dict[int, list[int]], tp: int, spp: int, kvp: int
) -> None:
    """With two KVP groups, the sequences take the second one in the middle of their outputs."""
    rig = make_rig(tp, spp, kvp)
    rig.start(range(kvp))
    driver = Driver(rig, PAGE_TOKENS, PAGES, generation=int(kvp > 1))
    if kvp > 1:
        rig.form(1, (0, 1))
    for seq, prompt in PROMPTS.items():
        driver.start(seq, prompt, groups=(0,), sampling=sampling(seq))
        driver.prefill(seq, (11, 9))
    live, outputs = set(PROMPTS), dict[int, list[int]]()
    while live:
        for seq in sorted(live):
            run = driver.running[seq]
            if len(run.output) == len(expected[seq]) or run.output[-1] in STOPS:
                outputs[seq] = run.output
                assert run.tail == kvp - 1, "the output was too short to grow"
                driver.end(seq)
                live.discard(seq)
            elif kvp > 1 and run.tail == 0 and run.done % PAGE_TOKENS == 0:
                driver.grow(seq, 1)
                driver.move(seq, sorted(run.pages[0])[:1], 0, 1)
        if live:
            driver.batch(*((seq, 1) for seq in sorted(live)))
    assert outputs == expected
    assert driver.moved == (len(PROMPTS) if kvp > 1 else 0)
