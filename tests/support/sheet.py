"""A table of measurements that survives failures: each row is printed and written at once.

A benchmark on a borrowed GPU ends when its time is over, or when a kernel fails. Everything
measured until then is on screen and in the file. A failing section becomes a row with its error,
and the next section goes on.
"""

from __future__ import annotations

import pathlib
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from rich.console import Console

from medha.errors import UserError


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A table line: `value` in `unit`, compared with its `target` if it has one.

    `met`: the target was kept, missed, or absent (None). `value` None: not measured, see `note`;
    `failed`: measuring raised an error.
    """

    row: str
    what: str
    value: float | None = None
    unit: str = ""
    target: float = 0.0
    least: bool = False
    met: bool | None = None
    failed: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.failed:
            return "FAILED"
        if self.value is None:
            return "not measured"
        if self.met is None:
            return "not timed" if self.target else ""
        return "met" if self.met else "MISSED"


class Sheet:
    """Rows by section, printed on `console` and written to the file at `path`, with `head` at
    its top."""

    def __init__(self, console: Console, path: pathlib.Path | None, head: dict[str, Any]) -> None:
        self.rows: list[Row] = []
        self.head, self._console, self._path = head, console, path
        self._whole = False

    @property
    def good(self) -> bool:
        """True if nothing failed and no target was missed."""
        return not any(row.failed or row.met is False for row in self.rows)

    def attempt(self, row: str, what: str, measure: Callable[[], Row]) -> None:
        """Add a row; an error becomes the row."""
        try:
            self.add(measure())
        except Exception as error:
            traceback.print_exc()
            self.add(Row(row=row, what=what, failed=True, note=_text(error)))

    def section(self, name: str, rows: Callable[[], Iterable[Row]]) -> bool:
        """Add all `rows`. Returns False if they ended in an error, which becomes the last row.

        A UserError is no failure: the row counts as not measured.
        """
        self._console.print(f"[bold]{name}[/bold]")
        try:
            for row in rows():
                self.add(row)
        except UserError as error:
            self.add(Row(row=name, what=f"the rest of {name}", note=str(error)))
            return False
        except Exception as error:
            traceback.print_exc()
            self.add(Row(row=name, what=f"the rest of {name}", failed=True, note=_text(error)))
            return False
        return True

    def add(self, row: Row) -> None:
        """Print a row and rewrite the file with it."""
        self.rows.append(row)
        self._console.print(_line(row), highlight=False, markup=False, soft_wrap=True)
        self._write()

    def close(self) -> int:
        """Print missed targets; return the benchmark's exit status."""
        self._whole = True
        self._write()
        bad = [row for row in self.rows if row.failed or row.met is False]
        for row in bad:
            self._console.print(
                f"{row.verdict}: {row.row}: {row.what}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        return 0 if self.good else 1

    def _write(self) -> None:
        if self._path is None:
            return
        table = self.head | {"whole": self._whole, "rows": self.rows}
        fresh = self._path.with_name(self._path.name + ".part")
        fresh.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
        fresh.replace(self._path)


def _text(error: Exception) -> str:
    """Return the error's kind and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'it says nothing'}"[:500]


def _line(row: Row) -> str:
    value = "—" if row.value is None else f"{row.value:,.4g} {row.unit}"
    target = f"{'≥' if row.least else '≤'} {row.target:,.4g} {row.unit}" if row.target else ""
    cells = f"  {row.what:<64} {value:>18}  {target:<18} {row.verdict:<12} {row.note}"
    return cells.rstrip()
