"""Logs as one JSON object per line on stderr: time, level, logger, message, and named fields.

    log = logging.getLogger("medha.controller")
    log.info("group joined", extra={"fields": {"group": 1, "request": "r-17"}})

Prompts, tokens and keys are never logged. `request` is the request's id. The `__main__` of each
process calls `start_logs` once.
"""

from __future__ import annotations

import datetime
import logging
import sys
from typing import Any, TextIO

import msgspec

from medha.errors import SpecError

LEVELS = ("debug", "info", "warning", "error")
MAX_TEXT = 4000


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object; `fields` of the record become further keys.

    `process` names the process (`router`, `llama-0-controller`, `llama-0-g0-s1-t0`, …).
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._second, self._prefix = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self._time(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": _message(record)[:MAX_TEXT],
        }
        fields = getattr(record, "fields", {})
        line.update((name, value) for name, value in fields.items() if name not in line)
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)[-MAX_TEXT:]
        return msgspec.json.encode(line, enc_hook=str).decode(errors="replace")

    def _time(self, created: float) -> str:
        """Return a time with milliseconds; lines of the same second share the rest of it."""
        second, part = divmod(round(created * 1e6), 1_000_000)
        if second != self._second:
            time = datetime.datetime.fromtimestamp(second, datetime.UTC)
            self._second, self._prefix = second, f"{time:%Y-%m-%dT%H:%M:%S}"
        return f"{self._prefix}.{part // 1000:03d}+00:00"


def start_logs(process: str, level: str, stream: TextIO | None = None) -> None:
    """Write all logs of this process to `stream` (stderr) as JSON lines, at `level` and above.

    Replaces the former handlers; warnings of the interpreter are logged too. Raises SpecError for
    an unknown level.
    """
    if level not in LEVELS:
        raise SpecError(
            "log_level", level, "must be a level of logging", f"use one of {', '.join(LEVELS)}"
        )
    # No line names its thread, process or caller: finding them costs more than the line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(process))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


def _message(record: logging.LogRecord) -> str:
    """Return the record's text; a wrong number of arguments is logged, not raised."""
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        return f"{record.msg} {record.args!r}"
