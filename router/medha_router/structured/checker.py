"""The process that checks grammars: `python -m medha_router.structured.checker`.

    stdin   Check frames ──> load the tokenizer                         Checked frames   stdout
                             └─ fork: compile, masks of some tokens ──┘

It holds no secrets and no connection, and its memory is bounded. A check that exceeds its CPU time
or memory ends only its own copy of the process, so the tokenizers stay loaded.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from random import Random
from typing import Any, BinaryIO

import llguidance
import llguidance.gbnf_to_lark
import msgspec
import numpy as np

from medha.grammar_limits import (
    CHECKED_LIMITS,
    CHECKED_MASK_S,
    CHECKED_MASKS_START_S,
    MAX_GRAMMAR_CHARS,
    MAX_OPTIONAL_PROPERTIES,
    MaskTime,
    error_text,
)
from medha_router.structured.check_messages import LENGTH, Check, Checked

MAX_MEMORY_BYTES = 4 << 30
WALKED_TOKENS = 32

# Between two tokens of JSON: a line break and an indent. Without a bound, a model may print white
# space for ever.
WHITESPACE = r"\x0A?(\x20{0,16}|\x09{0,8})"


def check(tokenizer: llguidance.LLTokenizer, job: Check) -> Checked:
    """Compile a grammar and follow it for some tokens; its faults are returned.

    If compiling exceeds its CPU time, or the masks twice as much, this process ends.
    """
    signal.setitimer(signal.ITIMER_PROF, job.compile_s)
    try:
        grammar = grammar_of(job.kind, job.text)
        if job.calls:
            grammar = with_calls(job.text, job.calls, tokenizer)
    except (ValueError, RecursionError) as error:
        return Checked(error=error_text(str(error)))
    if len(grammar) > MAX_GRAMMAR_CHARS:
        return Checked(error=f"it has {len(grammar)} characters when compiled: shorten it")
    limits = llguidance.LLParserLimits(
        **msgspec.structs.asdict(CHECKED_LIMITS), verbose_errors=False
    )
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    signal.setitimer(signal.ITIMER_PROF, 2 * job.compile_s)
    # The first token of each letter: some tokenizers make none of a space.
    firsts = {code: tokenizer.tokenize_str(chr(code))[:1] for code in range(32, 127)}
    letters = np.array([token for first in firsts.values() for token in first], np.intp)
    quotes, random = firsts[ord('"')], Random(0)
    spent = MaskTime(CHECKED_MASK_S, CHECKED_MASKS_START_S)
    for _ in range(WALKED_TOKENS):
        if matcher.is_stopped():
            break
        began_s = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        spent.spend(time.thread_time() - began_s)
        if spent.error:
            return Checked(error=f"{spent.error}: simplify it", timed=True)
        allowed = np.unpackbits(mask, bitorder="little")
        if matcher.is_error():
            break
        # Half of them are quotes, because names and strings of JSON seldom end by a random token,
        # and of the others half are letters, because a long token may pass a state that is wide.
        tokens = letters[allowed[letters] > 0]
        if not len(tokens) or random.random() < 0.5:
            tokens = np.flatnonzero(allowed)
        if not len(tokens):
            return Checked(error="no token of this model can begin such an output")
        quoted = allowed[quotes].any() and random.random() < 0.5
        matcher.consume_token(quotes[0] if quoted else int(random.choice(tokens)))
    if matcher.is_error():
        return Checked(error=error_text(matcher.get_error()))
    return Checked(grammar)


def grammar_of(kind: str, text: str) -> str:
    """Return the library's form of a JSON schema, regular expression, choice or grammar (Lark or
    GBNF)."""
    if kind == "json_schema":
        _check_objects(text)
        return llguidance.LLMatcher.grammar_from_json_schema(
            text, overrides={"whitespace_pattern": WHITESPACE}
        )
    if kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(text))
        # A terminal: thousands of choices are one automaton.
        return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
    try:
        lark = llguidance.gbnf_to_lark.any_to_lark(text)
    except Exception as error:  # the converter raises bare Exception
        raise ValueError(str(error)) from None
    return llguidance.LLMatcher.grammar_from_lark(lark)


def with_calls(schema: str, marks: Sequence[str], tokenizer: llguidance.LLTokenizer) -> str:
    """Return the library's form of: the JSON of a schema, or a mark and any tokens after it.

    A mark may be the JSON schema of a call that has none.
    """
    begins, answers = [], [schema]
    for mark in marks:
        if mark.startswith("{"):
            answers.append(mark)
            continue
        first, *others = tokenizer.tokenize_str(mark)
        is_special = not others and tokenizer.is_special_token(first)
        begins.append(f"<[{first}]>" if is_special else json.dumps(mark))
    rules = [f"({' | '.join(begins)}) (<[*]>)*"]
    spaced = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    rules += (f"%json {json.dumps(json.loads(answer) | spaced)}" for answer in answers)
    lark = "\n".join(f"r{number}: {rule}" for number, rule in enumerate(rules))
    start = " | ".join(f"r{number}" for number in range(len(rules)))
    return llguidance.LLMatcher.grammar_from_lark(f"start: {start}\n{lark}")


def _check_objects(schema: str) -> None:
    """Raise ValueError if an object has too many properties that may be left out."""
    values: list[Any] = [json.loads(schema)]
    while values:
        value = values.pop()
        if isinstance(value, list):
            values += value
        if not isinstance(value, dict):
            continue
        values += value.values()
        properties, required = value.get("properties"), value.get("required")
        if isinstance(properties, dict):
            needed = map(str, required) if isinstance(required, list) else ()
            optional = len(properties.keys() - set(needed))
            if optional > MAX_OPTIONAL_PROPERTIES:
                raise ValueError(
                    f"an object has {optional} properties that may be left out: at most"
                    f" {MAX_OPTIONAL_PROPERTIES} may; require them or divide the object"
                )


def check_apart(tokenizer: llguidance.LLTokenizer, job: Check) -> Checked:
    """Check in a copy of this process, which keeps the tokenizer if the copy has to end."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            checked = check(tokenizer, job)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            with open(theirs, "wb") as sink:
                sink.write(msgspec.msgpack.encode(checked))
            status = 0
        except BaseException:  # the library's panics are no Exception
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(theirs)
    with open(ours, "rb") as source:
        payload = source.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        return msgspec.msgpack.decode(payload, type=Checked)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Checked(error=f"it takes more than {job.compile_s:g} s of CPU time: simplify it")
    return Checked(error="its check failed, out of memory or in the library: simplify it")


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer checks until the source ends."""
    tokenizers: dict[str, llguidance.LLTokenizer] = {}
    decoder = msgspec.msgpack.Decoder(Check)
    while len(header := source.read(LENGTH.size)) == LENGTH.size:
        job = decoder.decode(source.read(LENGTH.unpack(header)[0]))
        tokenizers.pop(job.forget, None)
        try:
            if job.key not in tokenizers:
                tokenizers[job.key] = llguidance.LLTokenizer(job.tokenizer.decode())
            checked = check_apart(tokenizers[job.key], job)
        except ValueError as error:
            checked = Checked(error=error_text(str(error)), loaded=False)
        payload = msgspec.msgpack.encode(checked)
        sink.write(LENGTH.pack(len(payload)) + payload)
        sink.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C and closes stdin
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
