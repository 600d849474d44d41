"""What a client asks of time: SLO headers and their aliases, as typed values.

    x-medha-slo-ttft-ms   x-llm-d-slo-ttft-ms   x-slo-ttft-ms   x-dynamo-slo-ttft-ms
    x-medha-slo-tpot-ms   x-llm-d-slo-tpot-ms   x-slo-tpot-ms
    x-medha-class         the QoS class; its targets hold where no header is given

Of several aliases the first in this list counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from medha.errors import RequestError

TTFT_HEADERS = (
    "x-medha-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-dynamo-slo-ttft-ms",
)  # fmt: skip
TPOT_HEADERS = ("x-medha-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
CLASS_HEADER = "x-medha-class"
LONGEST_MS = 24 * 3600 * 1000.0


class SloAsk(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of one request; None: as its class has it."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    slo_class: str | None = None


def read_slo(headers: Mapping[str, str]) -> SloAsk:
    """The SLO of a request's headers; raises RequestError naming the header."""
    name = headers.get(CLASS_HEADER)
    return SloAsk(
        ttft_s=_seconds(headers, TTFT_HEADERS),
        tpot_s=_seconds(headers, TPOT_HEADERS),
        slo_class=name.strip() if name else None,
    )


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        given = headers.get(name)
        if given is None:
            continue
        try:
            milliseconds = float(given)
        except ValueError:
            milliseconds = math.nan
        if not 0.0 < milliseconds <= LONGEST_MS:
            raise RequestError(
                f"{name} is {given[:40]!r}: must be milliseconds, more than 0 and at most "
                f"{LONGEST_MS:.0f}",
                code="invalid_value", param=name,
            )  # fmt: skip
        return milliseconds / 1000.0
    return None
