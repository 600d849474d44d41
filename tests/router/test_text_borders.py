"""Cut texts: pieces and words encode to the tokens of the whole, for each kind of tokenizer."""

from __future__ import annotations

import inspect
import itertools
import json.decoder
import random
import re._constants  # type: ignore[import-not-found]
import re._parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from medha_router.tokenization import text_encoder
from medha_router.tokenization.borders import borders_of
from medha_router.tokenization.text_encoder import TextEncoder

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<s>", "</s>", "<|start|>", "<|tool_call|>")
CORPUS = [
    inspect.getsource(json.decoder),
    "It's what we've said: they'll go, I'd say, and THEY'RE late.  Two  spaces\n\n\nthree lines\n",
    "naïve café Müller schön ЭТО тест и ещё 中文，没有空格。日本語のテキスト、それだけ！ "
    "한국어 문장 하나 ",
    "x = 12345 + 67.89 == 0xff != 1e-9; path/to/file.py:12 <a href='b'>c</a> "
    '{"k": [1, 2, 3]}\t\tend',
] * 3

Build = Callable[[], Tokenizer]


def byte_level(split: str, *, nfc: bool = False, prefix: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    if split:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def deepseek() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[一-龥\u3040-ゟ゠-ヿ]+"), "isolated"),
            pre_tokenizers.Split(Regex(DEEPSEEK), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(tokenizer, [], unknown=["<unk>"])


def sentencepiece(*, prepends: bool) -> Tokenizer:
    """Llama 2 with a prepended space, Gemma without: the whole text is a word."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # only while it is trained
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = trained(tokenizer, [], unknown=["<unk>", *bytes_])
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if prepends:
        steps.insert(0, normalizers.Prepend("▁"))
        tokenizer.pre_tokenizer = None
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def trained(
    tokenizer: Tokenizer, alphabet: Sequence[str], unknown: Sequence[str] = ()
) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=list(alphabet),
        special_tokens=list(unknown),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.ByteLevel() if alphabet else decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    if alphabet:
        tokenizer.add_special_tokens(["<｜end▁of｜>"])
    tokenizer.add_tokens(
        [AddedToken("widget", normalized=True), AddedToken("== 0", normalized=True)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("<s>", "</s>")],
    )
    return tokenizer


KINDS: dict[str, Build] = {
    "gpt2": lambda: byte_level(""),
    "gpt2 with a prefix space": lambda: byte_level("", prefix=True),
    "llama3": lambda: byte_level(LLAMA3),
    "qwen2": lambda: byte_level(QWEN2, nfc=True),
    "o200k": lambda: byte_level(O200K),
    "deepseek": deepseek,
    "metaspace always": lambda: metaspace("always"),
    "metaspace first": lambda: metaspace("first"),
    "llama2": lambda: sentencepiece(prepends=True),
    "gemma": lambda: sentencepiece(prepends=False),
}
WORDS = (
    *SPECIAL,
    *(
        "<｜end▁of｜>",
        "widget",
        "== 0",
        "it's",
        "THEY'RE",
        "'",
        "'s",
        "foo",
        "Bar_baz",
        "x1",
        "123",
        "4567",
        "0",
    ),
    *("(", ")", ".", ",", "...", "=", "\u0338", "e\u0301", "é", "ı", "ſ", "<", ">", "|", "▁", "_"),
    *(
        "中文",
        "，",
        "。",
        "のテ",
        "！",
        "한국",
        "я",
        "Ⅷ",
        "²",
        "🙂",
        "👩\u200d💻",
        "\u00a0",
        "\u2003",
    ),
    *(" ", " ", " ", "  ", "     ", "\n", "\n\n", "\r\n", "\t", " \n ", "the", "to", "a"),
)
MIXED = st.builds(
    lambda seed, size: "".join(random.Random(seed).choices(WORDS, k=size)),
    st.integers(0, 1 << 32),
    st.integers(20, 80),
)
TEXTS = MIXED | st.lists(st.sampled_from(WORDS), max_size=9).map("".join) | st.text(max_size=30)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: build() for kind, build in KINDS.items()}


def encoded(encoder: TextEncoder, text: str, pieces_at_once: int) -> list[int]:
    ends = encoder.cut(text)
    parts = [
        part
        for first in range(0, len(ends), pieces_at_once)
        for part in encoder.encode(text, ends, first, min(first + pieces_at_once, len(ends)))
    ]
    tokens: list[int] = np.frombuffer(b"".join(parts), "<i4").tolist()
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_words_encode_to_the_tokens_of_one_pass(
    kind: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_encoder, "PIECE_CHARS", 3)
    encoder = TextEncoder(tokenizers[kind])
    cut = 0

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(TEXTS, st.integers(1, 9))
    @example("foo <s>bar widget  == 0 it's\n\n  a  中文，foo 12345 x", 1)
    @example("a" * 200 + "  " * 100 + "b c", 2)
    def equal(text: str, pieces_at_once: int) -> None:
        nonlocal cut
        whole = tokenizers[kind].encode(text, add_special_tokens=False).ids
        assert encoded(encoder, text, pieces_at_once) == whole
        cut += len(encoder.cut(text)) > 1

    equal()
    assert cut > 10  # the texts were cut, so the test says something


def possessive_groups(parsed: object) -> Iterator[object]:
    """Find possessive repetitions of more than one character in a pattern."""
    if isinstance(parsed, re._parser.SubPattern):
        parsed = parsed.data
    if not isinstance(parsed, list | tuple):
        return
    match parsed:
        case [re._constants.POSSESSIVE_REPEAT, [_, _, repeated]]:
            single = re._constants.LITERAL, re._constants.NOT_LITERAL, re._constants.IN
            if len(repeated) != 1 or repeated[0][0] not in single:
                yield repeated
    for part in parsed:
        yield from possessive_groups(part)


@pytest.mark.parametrize("kind", KINDS)
def test_words_are_found_by_every_python_that_is_supported(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    """In Python before 3.11.5, a possessive group may match without end (CPython issue 100061)."""
    assert [*possessive_groups(re._parser.parse("(?:ab*+)*+"))]
    borders = borders_of(tokenizers[kind].to_str())
    if borders is not None:
        for pattern in (borders.cut, borders.word):
            assert not [*possessive_groups(re._parser.parse(pattern.pattern))]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_around_a_text_are_those_of_one_pass(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    encoder = TextEncoder(tokenizers[kind])
    opening, closing = encoder.special_tokens()
    for text in ("", "some text"):
        tokens = opening + b"".join(encoder.encode(text, encoder.cut(text), 0, 1)) + closing
        assert np.frombuffer(tokens, "<i4").tolist() == tokenizers[kind].encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_longer_text_keeps_the_pieces_of_a_shorter_one(
    kind: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_encoder, "PIECE_CHARS", 50)
    encoder = TextEncoder(tokenizers[kind])
    text = "".join(CORPUS)[:3000]
    ends = encoder.cut(text)
    assert len(ends) > 10 and ends[-1] == len(text)
    assert all(start < end for start, end in itertools.pairwise(ends))
    assert encoder.cut(text + " and more of it")[: len(ends) - 1] == ends[:-1]


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_stands_for_more_bytes_than_stated(
    kind: str, tokenizers: dict[str, Tokenizer]
) -> None:
    most = TextEncoder(tokenizers[kind]).token_bytes
    assert (most > 0) == (not kind.startswith("metaspace"))  # unknown characters fuse there

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(TEXTS)
    def bounded(text: str) -> None:
        tokens = tokenizers[kind].encode(text, add_special_tokens=False).ids
        assert not most or len(text.encode()) <= len(tokens) * most

    bounded()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Lowercase()),
            "changes text",
        ),
        (
            lambda tokenizer: setattr(
                tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated")
            ),
            "a word holds a letter and the space after it",
        ),
        (
            lambda tokenizer: setattr(
                tokenizer, "pre_tokenizer", pre_tokenizers.Split(Regex(r"\b"), "isolated")
            ),
            "looks behind",
        ),
        (
            lambda tokenizer: tokenizer.add_tokens([AddedToken("e", rstrip=True)]),
            "a letter takes the spaces after it",
        ),
        (lambda tokenizer: tokenizer.add_tokens(["a b"]), "a token holds a letter and a space"),
    ],
)
def test_a_tokenizer_outside_the_rules_has_no_borders_and_encodes_in_one_pass(
    change: Callable[[Tokenizer], object], reason: str
) -> None:
    tokenizer = byte_level("")
    assert borders_of(tokenizer.to_str()) is not None
    change(tokenizer)
    assert borders_of(tokenizer.to_str()) is None, reason
    text = "A b, a b  and e c d " * 2000
    encoder = TextEncoder(tokenizer)
    assert encoder.cut(text) == [len(text)]
    assert encoded(encoder, text, 1) == tokenizer.encode(text, add_special_tokens=False).ids


def test_words_are_forgotten_before_they_take_much_memory(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_encoder, "KNOWN_WORDS", 20)
    encoder = TextEncoder(tokenizers["llama3"])
    for start in range(0, 400, 10):
        text = " ".join(f"w{number}" for number in range(start, start + 10)) + " " + "y" * 500
        whole = tokenizers["llama3"].encode(text, add_special_tokens=False).ids
        assert encoded(encoder, text, 1) == whole
    assert len(encoder._words) <= 20 + 11
    assert max(map(len, encoder._words)) <= text_encoder.WORD_CHARS
