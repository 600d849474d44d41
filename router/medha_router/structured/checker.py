"""The process that checks grammars: `python -m medha_router.structured.checker`.

    stdin   Check frames ──> compile, first mask ──> Checked frames   stdout

It holds no secrets and no connection, and its memory is bounded, so the router may kill it at any
time.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from typing import BinaryIO

import llguidance
import llguidance.gbnf_to_lark
import msgspec

from medha.grammar_limits import LIMITS, MAX_GRAMMAR_CHARS
from medha_router.structured.check_messages import LENGTH, Check, Checked

MAX_MEMORY_BYTES = 4 << 30
MAX_ERROR_CHARS = 500

# Between two tokens of JSON: a line break and an indent. Without a bound, a model may print white
# space for ever.
WHITESPACE = r"\x0A?(\x20{0,16}|\x09{0,8})"


def check(tokenizers: dict[str, llguidance.LLTokenizer], job: Check) -> Checked:
    """Compile a grammar and its first mask; its faults are returned."""
    tokenizer = tokenizers.get(job.key)
    if tokenizer is None:
        try:
            tokenizer = llguidance.LLTokenizer(job.tokenizer.decode())
        except ValueError as error:
            return Checked(error=_shortened(str(error)), loaded=False)
        tokenizers[job.key] = tokenizer
    try:
        grammar = grammar_of(job.kind, job.text)
    except ValueError as error:
        return Checked(error=_shortened(str(error)))
    limits = llguidance.LLParserLimits(**msgspec.structs.asdict(LIMITS), verbose_errors=False)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    first = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error():
        return Checked(error=_shortened(matcher.get_error()))
    if not any(first):
        return Checked(error="no token of this model can begin such an output")
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return Checked(error=f"it has {len(grammar)} characters when compiled: shorten it")
    return Checked(grammar)


def grammar_of(kind: str, text: str) -> str:
    """Return the library's form of a JSON schema, regular expression, choice or grammar (Lark or
    GBNF)."""
    if kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": WHITESPACE}
        )
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        return llguidance.LLMatcher.grammar_from_lark(f"start: {choices}")
    try:
        lark = llguidance.gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(str(error)) from None
    return llguidance.LLMatcher.grammar_from_lark(lark)


def _shortened(error: str) -> str:
    return " ".join(error.split())[:MAX_ERROR_CHARS]


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer checks until the source ends."""
    tokenizers: dict[str, llguidance.LLTokenizer] = {}
    decoder = msgspec.msgpack.Decoder(Check)
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        checked = check(tokenizers, decoder.decode(source.read(LENGTH.unpack(header)[0])))
        payload = msgspec.msgpack.encode(checked)
        sink.write(LENGTH.pack(len(payload)) + payload)
        sink.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C and closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
