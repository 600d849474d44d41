"""Fields of a checkpoint's JSON files, with errors that name file, field and value."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from medha.errors import CheckpointError


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint. Raises CheckpointError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); name the folder of a complete checkpoint"
        ) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object; fetch again")
    return value


MOST = 1 << 31
"""Limit of counts, far beyond those of any model."""


def count(
    path: pathlib.Path,
    raw: dict[str, Any],
    key: str,
    default: int | None = None,
    most: int = MOST,
) -> int:
    """Return a whole number of config.json from 1 to `most`. Raises CheckpointError naming the
    field."""
    value = raw.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise CheckpointError(
            f"{path}: {key} is {value!r:.80}: must be a positive whole number up to {most}; fix it"
        )
    return value


def even_count(
    path: pathlib.Path, raw: dict[str, Any], key: str, default: int | None = None
) -> int:
    """Return a count that must be even, such as a size whose pairs are rotated."""
    value = count(path, raw, key, default)
    if value % 2:
        raise CheckpointError(f"{path}: {key} is {value}: must be even; fetch the file again")
    return value
