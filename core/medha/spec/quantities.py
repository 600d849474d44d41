"""Durations, numbers and sizes as the resource writes them: text, since an API must hold no floats.

duration   500ms  10m  1h30m  1.5s          number   "1.5"  2
size       512Mi  1Gi  1048576
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

DURATION = r"^([0-9]{1,6}(\.[0-9]{1,6})?(ms|s|m|h))+$"
NUMBER = r"^[0-9]{1,6}(\.[0-9]{1,6})?$"
SIZE = r"^[0-9]{1,12}(Ki|Mi|Gi|Ti)?$"

Duration = Annotated[
    str, msgspec.Meta(pattern=DURATION, max_length=20, description="a duration such as 500ms or 1h")
]
Number = (
    Annotated[
        str,
        msgspec.Meta(pattern=NUMBER, max_length=13, description="a number in quotes, as '1.5'"),
    ]
    | Annotated[int, msgspec.Meta(ge=0, le=999_999)]
)
Size = (
    Annotated[
        str, msgspec.Meta(pattern=SIZE, max_length=16, description="a size such as 512Mi or 1Gi")
    ]
    | Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]
)

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_UNITS_BYTES = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def seconds(duration: str) -> float:
    """`1h30m` -> 5400.0; the text must be a duration."""
    parts = re.findall(r"([0-9.]+)(ms|s|m|h)", duration)
    return sum(float(count) * _UNITS_S[unit] for count, unit in parts)


def to_number(number: str | int) -> float:
    """`"1.5"` -> 1.5."""
    return float(number)


def to_bytes(size: str | int) -> int:
    """`1Gi` -> 1073741824."""
    count, unit = re.findall(r"^([0-9]+)(.*)$", str(size))[0]
    return int(count) * _UNITS_BYTES[unit]
