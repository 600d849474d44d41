"""Points in time as the API writes them: Unix seconds to and from `2026-01-31T23:59:59Z`.

Arithmetic on the Gregorian calendar, so that decisions need no module that could read a clock.
Years are counted from March: then the leap day is a year's last.
"""

from __future__ import annotations

import re

_DAY_S = 86_400
_DAYS_400_YEARS, _DAYS_BEFORE_1970 = 146_097, 719_468  # since 0000-03-01
_TEXT = re.compile(r"(\d{4})-(\d\d)-(\d\d)T(\d\d):(\d\d):(\d\d)(?:\.\d+)?Z")


def rfc3339(at_s: float) -> str:
    """Whole seconds, UTC."""
    days, second = divmod(int(at_s), _DAY_S)
    era, day = divmod(days + _DAYS_BEFORE_1970, _DAYS_400_YEARS)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    day -= 365 * year + year // 4 - year // 100
    march = (5 * day + 2) // 153
    month = march + 3 if march < 10 else march - 9
    date = day - (153 * march + 2) // 5 + 1
    hour, minute = divmod(second // 60, 60)
    shown = year + era * 400 + (month <= 2)
    return f"{shown:04}-{month:02}-{date:02}T{hour:02}:{minute:02}:{second % 60:02}Z"


def unix_s(text: str) -> float:
    """The moment that `rfc3339` wrote; 0.0 for a text that is none."""
    found = _TEXT.fullmatch(text)
    if found is None:
        return 0.0
    year, month, date, hour, minute, second = map(int, found.groups())
    year -= month <= 2
    march = month - 3 if month > 2 else month + 9
    day = 365 * year + year // 4 - year // 100 + year // 400 + (153 * march + 2) // 5 + date - 1
    return float((day - _DAYS_BEFORE_1970) * _DAY_S + hour * 3600 + minute * 60 + second)
