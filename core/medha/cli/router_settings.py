"""Read the router's settings for `medha up` from a YAML or JSON file.

The fields are those of RouterConfig, but the ones that `medha up` sets itself.
"""

from __future__ import annotations

import difflib
import pathlib
from typing import Any

import msgspec

from medha.cli.resource_file import read_documents
from medha.config import RouterConfig
from medha.errors import SpecError

OPTION = "--router-config"
OWN = frozenset(
    [
        "host",
        "port",
        "ops_host",
        "ops_port",
        "ops_token",
        "fleet_bind",
        "processes",
        "process",
        "models",
        "models_file",
        "learn",
        "learn_s",
        "forget_model_s",
        "curve",
        "run_dir",
        "log_level",
        "drain_timeout_s",
        "replica_timeout_s",
        "grant_lease_s",
    ]
)
"""Fields that `medha up` sets, or that have no use with it."""
FIELDS = tuple(name for name in RouterConfig.__struct_fields__ if name not in OWN)


def read_router_settings(path: pathlib.Path) -> dict[str, Any]:
    """Return the fields that the file sets, decoded; raises SpecError.

    A relative `api_keys` is relative to the file's folder.
    """
    documents = read_documents(path, OPTION, "name a file with settings of the router")
    settings = documents[0] if documents else None
    if len(documents) > 1 or not isinstance(settings, dict):
        raise SpecError(
            OPTION, str(path), "must hold one mapping", "write lines such as api_keys: keys.txt"
        )
    for name in settings:
        if name not in FIELDS:
            near = difflib.get_close_matches(str(name), FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise SpecError(OPTION, name, f"must be one of {', '.join(FIELDS)}", hint)
    try:
        config = msgspec.convert({"fleet_bind": "", **settings}, RouterConfig)
    except msgspec.ValidationError as error:
        raise SpecError(
            OPTION, str(path), f"must hold valid settings ({error})", "correct that field"
        ) from None
    decoded = {name: getattr(config, name) for name in settings}
    if keys := config.api_keys:
        decoded["api_keys"] = str(_key_file(path.resolve().parent / pathlib.Path(keys)))
    return decoded


def _key_file(path: pathlib.Path) -> pathlib.Path:
    try:
        path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"api_keys of {OPTION}",
            str(path),
            f"must be a file that can be read ({error.strerror})",
            "write it there, or correct the path",
        ) from None
    return path
