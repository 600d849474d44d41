"""Limits of the grammars that outputs follow, equal where they are checked and where they run."""

from __future__ import annotations

import msgspec

MAX_SOURCE_BYTES = 64 << 10
"""Length of a JSON schema, regular expression or grammar as a client sends it."""

MAX_GRAMMAR_CHARS = 512 << 10
"""Length of a grammar in the library's own form, which messages carry."""


MAX_SCHEMA_DEPTH = 100
"""Objects and arrays around one another in a tool's JSON schema; llguidance reads 127 in all."""


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """llguidance's limits: at most 20 ms to build a lexer, 20 ms a mask, 40 MB of states."""

    max_items_in_row: int = 2_000
    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 50_000
    max_lexer_states: int = 20_000
    max_grammar_size: int = 200_000


LIMITS = GrammarLimits()
