"""Streamed text equals the whole text for any grouping of tokens; stop strings never appear."""

from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import CheckpointError
from medha.messages import Logprob
from medha_router.tokenization.detokenizer import (
    Detokenizer,
    OutputStream,
    StopMatcher,
    Vocabulary,
    byte_alphabet,
    text_of,
)

TEXTS = st.text(alphabet=st.sampled_from("ab e\u00e9\u20ac\U0001f642\n"), max_size=24)
STOPS = st.lists(st.text(alphabet="ab e", min_size=1, max_size=4), max_size=4)


@pytest.fixture(scope="module")
def byte_level(byte_level_json: bytes) -> Vocabulary:
    return Vocabulary(byte_level_json)


@pytest.fixture(scope="module")
def merged() -> Vocabulary:
    """A byte-level tokenizer with merges, so that tokens end in the middle of characters."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        show_progress=False,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["hé€🙂 ab abe €é🙂🙂 ba"] * 20, trainer)
    return Vocabulary(tokenizer.to_str().encode())


@pytest.fixture(scope="module")
def sentencepiece() -> Vocabulary:
    """Llama-2-like: pieces with ▁, and byte fallback."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
    ]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("a", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return Vocabulary(tokenizer.to_str().encode())


@given(tokens=st.lists(st.integers(0, 319), max_size=40))
@settings(max_examples=150, deadline=None)
def test_any_tokens_print_what_the_tokenizer_library_prints(
    merged: Vocabulary, tokens: list[int]
) -> None:
    known = [token for token in tokens if token < merged.size]
    expected = merged.tokenizer.decode(known, skip_special_tokens=True)
    assert text_of(merged, known) == expected


@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_sentencepiece_text_survives_a_round_trip(sentencepiece: Vocabulary, text: str) -> None:
    ids = sentencepiece.tokenizer.encode(text, add_special_tokens=False).ids
    expected = sentencepiece.tokenizer.decode(ids, skip_special_tokens=True)
    assert text_of(sentencepiece, ids) == expected


def test_a_continuation_keeps_its_leading_space(sentencepiece: Vocabulary) -> None:
    ids = sentencepiece.tokenizer.encode("a", add_special_tokens=False).ids
    assert text_of(sentencepiece, ids, continues=True) == " a"
    assert text_of(sentencepiece, ids) == "a"


@given(text=TEXTS)
@settings(max_examples=60, deadline=None)
def test_no_split_character_ever_prints_a_replacement(merged: Vocabulary, text: str) -> None:
    detokenizer = Detokenizer(merged)
    pieces = [detokenizer.push(token) for token in merged.tokenizer.encode(text).ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + detokenizer.end() == text


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 24), max_size=8))
@settings(max_examples=300, deadline=None)
def test_the_matcher_releases_the_same_text_for_any_split(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    matcher = StopMatcher(stops)
    shown = "".join(
        [matcher.push(text[a:b]) for a, b in itertools.pairwise(edges)] + [matcher.end()]
    )
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        assert (shown, matcher.matched) == (text, None)
    else:
        end, size = min(ends)
        assert shown == text[: end + size]
        assert matcher.matched == text[end + size : end]
    assert matcher.released_chars == len(shown)


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 90), max_size=6))
@settings(max_examples=100, deadline=None)
def test_an_output_streams_exactly_its_whole_text(
    merged: Vocabulary, text: str, stops: list[str], cuts: list[int]
) -> None:
    ids = merged.tokenizer.encode(text, add_special_tokens=False).ids
    logprobs = [Logprob(-float(i)) for i in range(len(ids))]
    whole = OutputStream(merged, stops)
    first, last = whole.push(ids, logprobs), whole.end("length")
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    parts = OutputStream(merged, stops)
    deltas = [parts.push(ids[a:b], logprobs[a:b]) for a, b in itertools.pairwise(edges)]
    deltas.append(parts.end("length"))
    assert "".join(delta.text for delta in deltas) == first.text + last.text
    assert parts.finish == whole.finish
    assert sum((delta.logprobs for delta in deltas), ()) == first.logprobs + last.logprobs


def test_a_partial_stop_string_is_held_until_it_is_ruled_out(byte_level: Vocabulary) -> None:
    output = OutputStream(byte_level, ["END"])
    ids = byte_level.tokenizer.encode("xENyEND tail").ids
    shown = [output.push([token]).text for token in ids]
    assert shown == ["x", "", "", "ENy", "", "", "", "", "", "", "", ""]
    assert output.finish == "stop"
    assert output.end("length").text == ""


def test_tokens_after_the_stop_string_have_no_log_probability(byte_level: Vocabulary) -> None:
    output = OutputStream(byte_level, ["b"])
    ids = byte_level.tokenizer.encode("aab").ids
    delta = output.push(ids, [Logprob(-1.0), Logprob(-2.0), Logprob(-3.0)])
    assert [entry.logprob and entry.logprob.chosen for entry in delta.logprobs] == [-1.0, -2.0]
    assert [entry.offset for entry in delta.logprobs] == [0, 1]


def test_a_stop_token_prints_nothing_even_when_it_is_a_letter(byte_level: Vocabulary) -> None:
    letter = byte_level.tokenizer.encode("z").ids[0]
    output = OutputStream(byte_level, (), frozenset([letter]))
    assert output.push([*byte_level.tokenizer.encode("ab").ids, letter]).text == "ab"


def test_an_unfinished_character_at_the_end_becomes_one_replacement(
    byte_level: Vocabulary,
) -> None:
    output = OutputStream(byte_level)
    assert output.push(byte_level.tokenizer.encode("a€").ids[:-1]).text == "a"
    assert output.end("length").text == "\ufffd"


def test_the_byte_alphabet_is_the_tokenizer_librarys() -> None:
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


@pytest.mark.parametrize("decoder", [tokenizers.decoders.WordPiece(), None])
@given(tokens=st.lists(st.integers(0, 5), max_size=12), size=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_an_unknown_decoder_prints_what_its_library_decodes(
    decoder: tokenizers.decoders.Decoder | None, tokens: list[int], size: int
) -> None:
    pieces = ["[UNK]", "hello", "##ing", "world", "é", "[SEP]"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.add_special_tokens(["[SEP]"])
    if decoder is not None:
        tokenizer.decoder = decoder
    vocabulary = Vocabulary(tokenizer.to_str().encode())
    output = OutputStream(vocabulary)
    parts = [tokens[at : at + size] for at in range(0, len(tokens), size)]
    text = "".join([output.push(part).text for part in parts]) + output.end("length").text
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert text == text_of(vocabulary, tokens)


def test_a_broken_tokenizer_file_is_a_checkpoint_error() -> None:
    with pytest.raises(CheckpointError, match="does not load"):
        Vocabulary(b"{}")
