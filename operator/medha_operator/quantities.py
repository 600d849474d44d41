"""Kubernetes' resource quantities as integers: cpu in millicores, everything else in its own unit.

cpu 500m -> 500      cpu 2 -> 2000      memory 1Gi -> 1073741824      nvidia.com/gpu 8 -> 8
"""

from __future__ import annotations

import re

from medha.errors import SpecError

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|[MGTPE]|[KMGTPE]i|[eE][0-9]+)?")
_POWERS = "KMGTPE"


def integer(resource: str, quantity: str | int | float) -> int:
    """`quantity` of `resource`, rounded up; raises SpecError when it is no quantity."""
    text = str(quantity)
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise SpecError(resource, text, "must be a quantity", "use one such as 500m, 8 or 16Gi")
    whole, _, part = found.group(1).partition(".")
    digits = int((whole + part) or "0")
    times, over = _scale(found.group(2) or "")
    if resource.removeprefix("requests.").removeprefix("limits.") == "cpu":
        times *= 1000
    over *= int("1" + "0" * len(part))
    return -(-digits * times // over)


def _scale(suffix: str) -> tuple[int, int]:
    """What the suffix multiplies and divides by."""
    if suffix == "m":
        return 1, 1000
    if suffix.endswith("i"):
        return 1 << 10 * (_POWERS.index(suffix[0]) + 1), 1
    if suffix[1:].isdigit():
        return int("1" + "0" * min(int(suffix[1:]), 30)), 1
    return int("1" + "000" * (_POWERS.index(suffix.upper()) + 1 if suffix else 0)), 1
