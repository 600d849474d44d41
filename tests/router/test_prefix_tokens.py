"""Tokens of growing conversations: what was encoded once is not encoded again."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from medha.errors import RequestError
from medha.fleet.prefix_index import chain
from medha_router.tokenization import jobs, text_encoder
from medha_router.tokenization.jobs import EncodeJob
from medha_router.tokenization.lane import _beginning
from medha_router.tokenization.prefix_tokens import ENTRY_BYTES, PrefixTokens
from medha_router.tokenization.text_encoder import TextEncoder
from medha_router.tokenization.wire import KEY_BYTES, Encode, Part, Planned


@pytest.fixture(scope="module")
def encoder(byte_level_json: bytes) -> TextEncoder:
    return TextEncoder(Tokenizer.from_str(byte_level_json.decode()))


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "PIECE_CHARS", 20)
    monkeypatch.setattr(jobs, "STEP_PIECES", 3)


def encode_job(page_tokens: int = 4, salt: bytes = b"salt", limit_tokens: int = 0) -> Encode:
    return Encode(
        key="k",
        chat=True,
        raw=b"",
        page_tokens=page_tokens,
        salt=salt,
        limit_tokens=limit_tokens,
    )


def encode(
    encoder: TextEncoder, text: str, prefixes: PrefixTokens, job: Encode
) -> tuple[bytes, bytes, int]:
    """Encode as a lane does; return tokens, page names and the number of encoded pieces."""
    planned = EncodeJob(job, [text], encoder)
    (keys,) = planned.plan().keys
    held = prefixes.match(keys)
    known = [_beginning(held, 4 * job.page_tokens)]
    tokens, hashes = [piece[0] for piece in held], [piece[1] for piece in held]
    while True:
        part, _ = planned.step(known)
        known = []
        for piece in part.pieces:
            prefixes.put(keys, len(tokens), piece.tokens, piece.hashes)
            tokens.append(piece.tokens)
            hashes.append(piece.hashes)
        if part.done:
            return b"".join(tokens), b"".join(hashes), len(tokens) - len(held)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(st.text("ab .\n", min_size=1, max_size=120), min_size=1, max_size=5),
    page_tokens=st.integers(1, 50),
)
def test_every_turn_has_the_tokens_and_names_of_a_first_encoding(
    encoder: TextEncoder, turns: list[str], page_tokens: int
) -> None:
    prefixes = PrefixTokens(1 << 20)
    text = ""
    for turn in turns:
        text += turn
        tokens, hashes, _ = encode(encoder, text, prefixes, encode_job(page_tokens))
        ids = np.frombuffer(tokens, "<i4")
        assert ids.tolist() == encoder._tokenizer.encode(text, add_special_tokens=False).ids
        assert hashes == b"".join(chain(ids, page_tokens, b"salt"))


def test_a_turn_costs_what_is_new(encoder: TextEncoder) -> None:
    prefixes = PrefixTokens(1 << 20)
    history = "some words that were sent before " * 200
    *_, first = encode(encoder, history, prefixes, encode_job())
    *_, second = encode(encoder, history + "and a new turn", prefixes, encode_job())
    assert first > 100 and second <= 2


def test_another_tenant_finds_nothing(encoder: TextEncoder) -> None:
    prefixes = PrefixTokens(1 << 20)
    history = "some words that were sent before " * 20
    encode(encoder, history, prefixes, encode_job())
    for other in (encode_job(salt=b"other"), encode_job(page_tokens=5)):
        (keys,) = EncodeJob(other, [history], encoder).plan().keys
        assert keys and prefixes.match(keys) == []


def test_the_cache_keeps_what_was_used_last_within_its_limit() -> None:
    prefixes = PrefixTokens(3 * (ENTRY_BYTES + 8))
    keys = [bytes([number]) * KEY_BYTES for number in range(4)]
    for key in keys[:3]:
        prefixes.put(key, 0, b"1234", b"5678")
    assert prefixes.match(keys[0])
    prefixes.put(keys[3], 0, b"1234", b"5678")
    assert [bool(prefixes.match(key)) for key in keys] == [True, False, True, True]
    assert prefixes.held_bytes <= 3 * (ENTRY_BYTES + 8)


def test_the_last_piece_is_not_kept(encoder: TextEncoder) -> None:
    planned = EncodeJob(encode_job(), ["a short text"], encoder).plan()
    assert planned == Planned((b"",))
    prefixes = PrefixTokens(1 << 20)
    prefixes.put(b"", 0, b"1234", b"")
    assert prefixes.held_bytes == 0


def test_a_text_that_cannot_fit_is_declined_by_its_bytes_alone(encoder: TextEncoder) -> None:
    most = encoder.token_bytes
    with pytest.raises(RequestError, match=f"has {most * 10 + 1} bytes, which are at least 11 tok"):
        EncodeJob(encode_job(limit_tokens=10), ["x" * (most * 10 + 1)], encoder)


def test_encoding_stops_once_there_are_more_tokens_than_the_limit(encoder: TextEncoder) -> None:
    job = EncodeJob(encode_job(limit_tokens=100), ["more words " * 60], encoder)
    job.step([])
    with pytest.raises(RequestError, match="has more than 100 tokens") as caught:
        job.step([])
    assert caught.value.code == "context_length_exceeded"


def test_prompts_of_token_ids_run_in_steps_too(encoder: TextEncoder) -> None:
    ids = np.arange(3 * jobs.STEP_TOKENS * 3 + 5, dtype="<i4") % 256
    job = EncodeJob(msgspec.structs.replace(encode_job(), chat=False), [ids], encoder)
    parts: list[Part] = []
    while not parts or not parts[-1].done:
        parts.append(job.step([])[0])
    assert len(parts) == 4
    pieces = [piece for part in parts for piece in part.pieces]
    assert b"".join(piece.tokens for piece in pieces) == ids.tobytes()
    assert b"".join(piece.hashes for piece in pieces) == b"".join(chain(ids, 4, b"salt"))
