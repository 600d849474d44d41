"""Readers of the bodies of all routes, by kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from medha_router import protocol
from medha_router.dialects.messages_body import read_count_tokens, read_messages_body
from medha_router.dialects.responses_body import read_responses

Params = protocol.GenerationParams | protocol.TokenizeParams | protocol.DetokenizeParams
READERS: Mapping[str, Callable[[bytes | bytearray], Params]] = {
    "chat": protocol.read_chat,
    "completion": protocol.read_completion,
    "tokenize": protocol.read_tokenize,
    "detokenize": protocol.read_detokenize,
    "responses": read_responses,
    "messages": read_messages_body,
    "count_tokens": read_count_tokens,
}
"""Each returns parameters in which `raw` alone may be large."""
