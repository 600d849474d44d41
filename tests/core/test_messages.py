"""Messages decode to what was sent, and nothing else decodes."""

from __future__ import annotations

import hashlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha import PROTOCOL
from medha import messages as m
from medha.batch import Batch, Chunk, Move
from medha.errors import ProtocolError

RANK_COMMANDS = m.Codec[m.RankCommand](m.RankCommand)
ROUTER_MESSAGES = m.Codec[m.RouterMessage](m.RouterMessage)

STEP = m.Step(
    step=3,
    batch=Batch(9, 2, (Chunk(5, 64, 2, (0, 1), 1, (7,), True),), (4,), (1, 2), 0.25),
    tokens=m.to_bytes([11, -1]),
    starts=(m.SequenceStart(5, m.Sampling(temperature=0.0), 66, ((0, 3),)),),
    ends=(1,),
    switches=(Move(4, 5, 0, 1, (0,), (3,), (8,)),),
)


def test_messages_with_other_fields_have_another_protocol() -> None:
    """If this fails, raise PROTOCOL and then correct both: a peer of the same protocol refuses
    messages with fields that it does not know, unless defaults are omitted."""
    kinds = [*vars(m).values(), Batch, Chunk, Move]
    fields = sorted(
        (kind.__name__, kind.__struct_fields__)
        for kind in kinds
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and (kind.__struct_config__.array_like or not kind.__struct_config__.omit_defaults)
    )
    digest = hashlib.blake2b(repr(fields).encode(), digest_size=4).hexdigest()
    assert (PROTOCOL, digest) == (15, "40c14805")


def test_a_step_survives_the_wire() -> None:
    assert RANK_COMMANDS.decode(RANK_COMMANDS.encode(STEP)) == STEP


@given(st.lists(st.integers(-1, 2**31 - 1), max_size=50))
def test_token_ids_survive_as_int32_bytes(ids: list[int]) -> None:
    assert np.array_equal(m.from_bytes(m.to_bytes(ids)), np.array(ids, dtype=np.int32))


@given(st.binary(max_size=300))
def test_junk_is_a_protocol_error_and_nothing_worse(junk: bytes) -> None:
    with pytest.raises(ProtocolError):
        RANK_COMMANDS.decode(b"\xc1" + junk)
    try:
        RANK_COMMANDS.decode(junk)
    except ProtocolError:
        return


@given(st.integers(0, 200), st.integers(0, 7))
def test_a_flipped_bit_decodes_to_a_message_or_is_refused(place: int, bit: int) -> None:
    data = bytearray(RANK_COMMANDS.encode(STEP))
    data[place % len(data)] ^= 1 << bit
    try:
        RANK_COMMANDS.decode(bytes(data))
    except ProtocolError:
        return


def test_a_message_of_another_direction_is_refused() -> None:
    with pytest.raises(ProtocolError):
        ROUTER_MESSAGES.decode(RANK_COMMANDS.encode(STEP))


def test_bounds_are_enforced_on_arrival() -> None:
    bombs: list[m.RouterMessage] = [
        m.Abort("x" * 129),
        m.Submit(id="a", tokens=b"", sampling=m.Sampling(temperature=-1.0)),
        m.Submit(id="a", tokens=b"", max_output_tokens=0),
        m.Submit(
            id="a", tokens=b"", sampling=m.Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))
        ),
    ]
    for bomb in bombs:
        with pytest.raises(ProtocolError):
            ROUTER_MESSAGES.decode(ROUTER_MESSAGES.encode(bomb))


def test_deep_nesting_is_refused_without_a_crash() -> None:
    with pytest.raises(ProtocolError):
        RANK_COMMANDS.decode(b"\x91" * 100_000)


def test_token_bytes_of_odd_length_are_refused() -> None:
    with pytest.raises(ProtocolError, match="multiple of 4"):
        m.from_bytes(b"abc")
