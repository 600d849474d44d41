r"""Borders at which a text may be cut so that the parts encode to the tokens of the whole.

A border stands between two ASCII characters x|y such that

    no token, and no added token, holds x followed by y       (no merge spans the border)
    no match of a pre-tokenizer's regex holds x before y      (no word depends on the other part)
    the normalizer changes neither part by the other

The rules are read from `tokenizer.json`. They cover BPE with the pre-tokenizers of GPT-2, Llama 3,
Qwen, DeepSeek and Mistral, and SentencePiece BPE (Llama 2, Gemma). A tokenizer outside these rules
has no borders: its texts are encoded in one pass.

A regex without lookbehind, anchors and back references scans from left to right. If no match can
hold x before y, the scanner passes the border in the same state with either part alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from medha_router.tokenization.detokenizer import byte_alphabet

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
DIGITS = "0123456789"
MARKS = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WIDE = "，。、！？；：）"
"""Chinese and Japanese punctuation, which may follow a letter of these scripts."""
WIDE_LETTERS = "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
SHRINKS = 4
"""A Unicode normal form of a text may have this many times fewer bytes."""
COMPOSING = "<=>"
"""Marks that NFC may compose with a character after them."""
GPT2_REGEX = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel
)
SPACE_PIECE = "\u2581"
SCRIPTS = "中あア한"
"""Characters that stand for all of WIDE_LETTERS, one for each script."""
SYMBOLS = LETTERS + DIGITS + MARKS + " \n" + WIDE + SCRIPTS
"""The characters between which the rules distinguish."""

# Members of Unicode properties among SYMBOLS, as the inside of a character class.
_PROPERTIES = {
    "L": "A-Za-z" + SCRIPTS,
    "Lu": "A-Z",
    "Ll": "a-z",
    "Lo": SCRIPTS,
    "Lt": "\uffff",
    "Lm": "\uffff",
    "M": "\uffff",
    "Mn": "\uffff",
    "N": "0-9",
    "Nd": "0-9",
    "P": "!-#%-*,-/:;?@\\[-\\]_{}" + WIDE,
    "S": "$+<=>^`|~",
}
_ATOM = re.compile(
    r"(?P<ahead>\(\?!\\S\))|(?P<group>\((?:\?:|\?i:)?)|(?P<end>\))|(?P<bar>\|)"
    r"|(?P<item>\\p\{\w+\}|\\[sSdDwWnrtfv]|\\[^\w\s]|\[(?:\\.|[^\]\\])+\]|[^\\\[\]().*+?{}^$|])"
)
_REPEAT = re.compile(r"(?P<many>[*+]|\{\d*,?\d*\})?\??[?+]?")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_INDEX = {symbol: index for index, symbol in enumerate(SYMBOLS)}

Matrix = npt.NDArray[np.bool_]


class _NoBorders(Exception):
    """A part of the tokenizer for which the rules say nothing."""


class Borders(msgspec.Struct, frozen=True):
    """Patterns of one tokenizer: `cut` matches at a border, `word` a text between two borders.

    If `drops_space`, a part after a border begins after the space there, since the normalizer
    prepends one. No token stands for more than `token_bytes` bytes of a text; 0 if that is unknown.
    """

    cut: re.Pattern[str]
    word: re.Pattern[str]
    drops_space: bool = False
    token_bytes: int = 0

    def next(self, text: str, start: int) -> int:
        """Return the first border at or after `start`, or the length of the text."""
        match = self.cut.search(text, start)
        return match.start() if match else len(text)

    def words(self, text: str) -> list[str]:
        """Return a part of a text as words that may be encoded alone."""
        return self.word.findall(text)


def borders_of(tokenizer_json: str) -> Borders | None:
    """Return the borders of a tokenizer in the form of `Tokenizer.to_str`; None without any."""
    description: dict[str, Any] = msgspec.json.decode(tokenizer_json)
    model = description["model"]
    prefixes = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(field) for field in prefixes):
        return None
    unsafe = np.zeros((len(SYMBOLS), len(SYMBOLS)), np.bool_)
    try:
        prepends, changed = _read_normalizer(description.get("normalizer"))
        _forbid_words(unsafe, description.get("pre_tokenizer"), prepends)
    except _NoBorders:
        return None
    _forbid(unsafe, SYMBOLS, changed)
    pieces = [str(piece) for piece in model["vocab"]]
    _forbid_pieces(unsafe, pieces, description)
    added = description.get("added_tokens") or []
    _forbid_added(unsafe, added, "" if _is_byte_level(description) else SPACE_PIECE)
    _forbid(unsafe, " \n", SYMBOLS)
    borders = _patterns(unsafe, added) if prepends else _plain_patterns(unsafe)
    if borders is None:
        return None
    limit = _token_bytes(description, pieces, added) * (SHRINKS if changed else 1)
    return msgspec.structs.replace(borders, token_bytes=limit)


def _forbid(unsafe: Matrix, before: Iterable[str], after: Iterable[str]) -> None:
    rows = [_INDEX[symbol] for symbol in before if symbol in _INDEX]
    columns = [_INDEX[symbol] for symbol in after if symbol in _INDEX]
    unsafe[np.ix_(rows, columns)] = True


def _forbid_all_but_space(unsafe: Matrix) -> None:
    _forbid(unsafe, SYMBOLS, SYMBOLS.replace(" ", ""))


# --- normalizer -----------------------------------------------------------------------------------


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer, of sequences in sequences too."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for entry in part[inner] for step in _steps(entry, inner)]
    return [part]


def _read_normalizer(normalizer: dict[str, Any] | None) -> tuple[bool, str]:
    """Return True if the normalizer prepends a space, and the marks that it may change."""
    prepends, changed = False, ""
    for step in _steps(normalizer, "normalizers"):
        match step:
            case {"type": "Replace", "pattern": {"String": " "}, "content": str(content)}:
                if content != SPACE_PIECE:
                    raise _NoBorders
            case {"type": "Prepend", "prepend": str(content)}:
                if content != SPACE_PIECE:
                    raise _NoBorders
                prepends = True
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD"}:
                changed = COMPOSING + WIDE
            case _:
                raise _NoBorders
    return prepends, changed


# --- pre-tokenizer --------------------------------------------------------------------------------


def _forbid_words(unsafe: Matrix, pre_tokenizer: dict[str, Any] | None, prepends: bool) -> None:
    """Forbid the pairs that one word of the pre-tokenizer may hold."""
    for step in _steps(pre_tokenizer, "pretokenizers"):
        if prepends:
            raise _NoBorders
        match step:
            case {"type": "ByteLevel"}:
                if step.get("use_regex", True):
                    _forbid_matches(unsafe, GPT2_REGEX)
                if step.get("add_prefix_space", True):
                    _forbid_all_but_space(unsafe)
            case {"type": "Split", "pattern": {"Regex": str(regex)}}:
                _forbid_matches(unsafe, regex)
            case {"type": "Split", "pattern": {"String": str(text)}}:
                _forbid(unsafe, text[:-1], text[1:])
            case {"type": "Digits"}:
                _forbid(unsafe, DIGITS, DIGITS)
            case {"type": "Punctuation"}:
                _forbid(unsafe, MARKS + WIDE, MARKS + WIDE)
            case {"type": "Metaspace", "replacement": "\u2581"}:
                _forbid_all_but_space(unsafe)
            case _:
                raise _NoBorders


def _forbid_matches(unsafe: Matrix, regex: str) -> None:
    """Forbid every pair that a match of the regex may hold; raises _NoBorders if unknown."""
    if "[:" in regex or "&&" in regex:
        raise _NoBorders
    end, _ = _read_alternatives(unsafe, regex, 0, ignore_case=False, grouped=False)
    if end != len(regex):
        raise _NoBorders


def _read_alternatives(
    unsafe: Matrix, regex: str, at: int, *, ignore_case: bool, grouped: bool
) -> tuple[int, frozenset[str]]:
    """Read alternatives until `)` or the end; return where they end and what they may match.

    Forbids the pairs inside of each alternative: any symbol of an item with any of a later item,
    and with itself if the item repeats.
    """
    everything: frozenset[str] = frozenset()
    before: frozenset[str] = frozenset()
    while at < len(regex):
        atom = _ATOM.match(regex, at)
        if atom is None:
            raise _NoBorders
        at = atom.end()
        if atom["bar"]:
            before = frozenset()
            continue
        if atom["end"]:
            return atom.start(), everything
        if atom["ahead"]:
            if grouped:
                raise _NoBorders
            # At a border after `before` the lookahead would see the other part.
            _forbid(unsafe, before, SYMBOLS)
            continue
        if atom["group"]:
            inside = ignore_case or atom["group"] == "(?i:"
            at, symbols = _read_alternatives(unsafe, regex, at, ignore_case=inside, grouped=True)
            if at >= len(regex):
                raise _NoBorders
            at += 1
        else:
            symbols = _members(atom["item"], ignore_case)
        repeat = _REPEAT.match(regex, at)
        if repeat is not None:
            at = repeat.end()
            if repeat["many"]:
                _forbid(unsafe, symbols, symbols)
        _forbid(unsafe, before, symbols)
        before |= symbols
        everything |= symbols
    return at, everything


def _members(item: str, ignore_case: bool) -> frozenset[str]:
    """Return the symbols that one item of a regex matches: a character, an escape, a class."""
    try:
        inside = re.sub(r"\\p\{(\w+)\}", lambda match: _PROPERTIES[match[1]], item)
        if item.startswith("\\p"):
            inside = f"[{inside}]"
        pattern = re.compile(inside, re.IGNORECASE if ignore_case else re.NOFLAG)
    except (re.error, KeyError):
        raise _NoBorders from None
    return frozenset(symbol for symbol in SYMBOLS if pattern.fullmatch(symbol))


# --- vocabulary -----------------------------------------------------------------------------------


def _forbid_pieces(unsafe: Matrix, pieces: list[str], description: dict[str, Any]) -> None:
    """Forbid the pairs that a token holds, and those after which unknown characters may fuse."""
    model = description["model"]
    byte_level = _is_byte_level(description)
    if byte_level:
        table = {ord(letter): chr(byte) for letter, byte in byte_alphabet().items()}
        texts = [piece.translate(table).encode("latin-1", "replace") for piece in pieces]
        blob = b"\xff\xff".join(texts)
    else:
        blob = "\uffff".join(pieces).replace(SPACE_PIECE, " ").encode()
    if model.get("byte_fallback") and any(
        len(piece) > 6 and _BYTE_PIECE.search(piece) for piece in pieces
    ):
        _forbid(unsafe, SYMBOLS, SYMBOLS)
    _forbid_ascii(unsafe, np.frombuffer(blob, np.uint8))
    for mark in WIDE:
        after, end = mark.encode(), b"(?:$|\xff|\xef\xbf\xbf)"
        begun = b"|".join(re.escape(after[:size]) + end for size in range(1, len(after)))
        if re.search(b"[\x80-\xbf](?:" + re.escape(after) + b"|" + begun + b")", blob):
            _forbid(unsafe, SCRIPTS, mark)
    if model.get("unk_token") is not None and not byte_level:
        known = set(pieces)
        unknown = [mark for mark in SYMBOLS if mark.replace(" ", SPACE_PIECE) not in known]
        _forbid(unsafe, SYMBOLS, unknown)


def _is_byte_level(description: dict[str, Any]) -> bool:
    steps = _steps(description.get("pre_tokenizer"), "pretokenizers")
    return any(step.get("type") == "ByteLevel" for step in steps)


def _token_bytes(
    description: dict[str, Any], pieces: list[str], added: list[dict[str, Any]]
) -> int:
    """Return the longest text of a token in bytes; 0 if some text has no token of its own."""
    steps = _steps(description.get("pre_tokenizer"), "pretokenizers")
    removes = any(step.get("behavior") == "Removed" for step in steps)
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    byte_level = _is_byte_level(description)
    if removes or swallows or not (byte_level or description["model"].get("byte_fallback")):
        return 0
    longest = [len(str(token["content"]).encode()) for token in added]
    if byte_level:
        longest += [len(piece) for piece in pieces]
    else:
        longest += [len(piece.replace(SPACE_PIECE, " ").encode()) for piece in pieces]
    return max(longest, default=0)


def _forbid_ascii(unsafe: Matrix, blob: npt.NDArray[np.uint8]) -> None:
    before, after = blob[:-1], blob[1:]
    ascii_pairs = (before < 128) & (after < 128)
    pairs = np.unique(before[ascii_pairs].astype(np.int32) * 128 + after[ascii_pairs])
    for pair in pairs.tolist():
        _forbid(unsafe, chr(pair // 128), chr(pair % 128))


def _forbid_added(unsafe: Matrix, added: list[dict[str, Any]], space: str) -> None:
    """Forbid the pairs inside added tokens, and those at the edges of tokens that look around.

    `space` is the character that stands for a space, if any.
    """
    for token in added:
        content = str(token["content"])
        if space:
            content = content.replace(space, " ")
        for before, after in _pairs(content):
            _forbid(unsafe, before, after)
        if not content:
            continue
        if token.get("rstrip") or token.get("single_word"):
            _forbid(unsafe, _class_of(content[-1]), SYMBOLS)
        if token.get("single_word"):
            _forbid(unsafe, SYMBOLS, _class_of(content[0]))


def _pairs(content: str) -> Iterator[tuple[str, str]]:
    for before, after in itertools.pairwise(content):
        yield _class_of(before), _class_of(after)


def _class_of(symbol: str) -> str:
    """Return the symbols that may stand for a character: itself, or any script."""
    return symbol if symbol in _INDEX else SCRIPTS


# --- patterns -------------------------------------------------------------------------------------


def _after(unsafe: Matrix, before: str, candidates: str) -> str:
    """Return the candidates that may follow a border after any character of `before`."""
    rows = [_INDEX[symbol] for symbol in before]
    return "".join(symbol for symbol in candidates if not unsafe[rows, _INDEX[symbol]].any())


def _before_space(unsafe: Matrix) -> str:
    """Return the marks and digits that may stand before a border at a space."""
    return "".join(symbol for symbol in DIGITS + MARKS if not unsafe[_INDEX[symbol], _INDEX[" "]])


def _plain_patterns(unsafe: Matrix) -> Borders | None:
    after = _after(unsafe, LETTERS, " \n" + MARKS)
    if " " not in after:
        return None
    before, ends = _class(_before_space(unsafe) + LETTERS), _class(after)
    cut = f"(?<={before})(?= )|(?<=[A-Za-z])(?={ends})"
    wide = _after(unsafe, SCRIPTS, " " + WIDE)
    if wide:
        cut += f"|(?<=[{WIDE_LETTERS}])(?={_class(wide)})"
    # Characters are repeated possessively, because nothing that follows can fail. Groups are not:
    # Python before 3.11.5 matches a possessive group wrongly, or without end.
    run = f"[^A-Za-z ]*+(?:(?<!{before}) [^A-Za-z ]*+)*[A-Za-z]*+"
    return Borders(re.compile(cut), re.compile(f"[\\s\\S]{run}(?:[^{ends[1:]}{run})*"))


def _patterns(unsafe: Matrix, added: list[dict[str, Any]]) -> Borders | None:
    """Return patterns for a normalizer that prepends a space after each added token."""
    opening = {str(token["content"])[:1] for token in added}
    closing = {str(token["content"])[-1:] for token in added}
    before = _before_space(unsafe) + _letters_before_space(unsafe)
    before = "".join(symbol for symbol in before if symbol not in closing)
    after = "".join(symbol for symbol in LETTERS + DIGITS if symbol not in opening)
    if not before or not after:
        return None
    border = f"(?<={_class(before)}) (?={_class(after)})"
    word = f"[\\s\\S][^ ]*+(?:(?!{border}) [^ ]*+)*"
    return Borders(re.compile(border), re.compile(word), drops_space=True)


def _letters_before_space(unsafe: Matrix) -> str:
    return "".join(letter for letter in LETTERS if not unsafe[_INDEX[letter], _INDEX[" "]])


def _class(symbols: str) -> str:
    return f"[{re.escape(symbols)}]"
