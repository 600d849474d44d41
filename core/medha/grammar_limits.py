"""Limits of the grammars that outputs follow: where they run, and below, where they are checked."""

from __future__ import annotations

import msgspec

MAX_SOURCE_BYTES = 64 << 10
"""Length of a JSON schema, regular expression or grammar as a client sends it."""

MAX_GRAMMAR_CHARS = 512 << 10
"""Length of a grammar in the library's own form, which messages carry."""

MAX_OPTIONAL_PROPERTIES = 170
"""Properties of one JSON object that may be left out: 4 items of a row each."""

MAX_ERROR_CHARS = 300


MAX_SCHEMA_DEPTH = 100
"""Objects and arrays around one another in a tool's JSON schema; llguidance reads 127 in all."""


class GrammarLimits(msgspec.Struct, frozen=True, kw_only=True):
    """llguidance's limits.

    Compiling takes longer with `max_grammar_size` (8 symbols for a property of a JSON object) and
    `initial_lexer_fuel` (1.4 for a byte of an enumeration), a mask with the others. With 128,000
    tokens, the mask of a string sees 300 rows.
    """

    max_grammar_size: int = 6_000
    initial_lexer_fuel: int = 100_000
    step_lexer_fuel: int = 200_000
    step_max_items: int = 125_000
    max_items_in_row: int = 800
    max_lexer_states: int = 20_000


LIMITS = GrammarLimits()
"""Where outputs are sampled."""

CHECKED_LIMITS = GrammarLimits(
    step_lexer_fuel=150_000, step_max_items=110_000, max_items_in_row=700, max_lexer_states=15_000
)
"""Where grammars are checked: masks after other tokens than the checked ones may cost more."""

MASK_S, MASKS_START_S = 0.002, 0.04
"""CPU time for each mask of an output, and once for all: usual grammars take a tenth of it."""

CHECKED_MASK_S, CHECKED_MASKS_START_S = 0.001, 0.02
"""The same where grammars are checked."""


class MaskTime:
    """CPU time that the masks of one output take, against what each may take.

    Time that a mask does not use is lost, so a cheap beginning pays for nothing.
    """

    def __init__(self, mask_s: float = MASK_S, start_s: float = MASKS_START_S) -> None:
        self._mask_s, self._start_s = mask_s, start_s
        self._over_s = self._last_s = 0.0

    def spend(self, mask_s: float) -> None:
        """Count the CPU seconds of one mask."""
        self._last_s = mask_s
        self._over_s = max(0.0, self._over_s + mask_s - self._mask_s)

    @property
    def error(self) -> str:
        """The reason to end the output; empty while its masks are within their time."""
        if self._over_s <= self._start_s:
            return ""
        return f"a mask of tokens takes {self._last_s * 1e3:.0f} ms of CPU time"


def error_text(error: str) -> str:
    """Return an error of llguidance on one line, without its mark for a short form."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARS]
