"""API keys: authentication of clients, and their tenants.

A key file has one key per line, `NAME:SHA256` with the hash in hex, so that it reveals no key; `#`
begins a comment. A name may have several keys: to replace a key, add the new one and then remove
the old one. The file is read again when it changes; if it is invalid, the former keys stay valid. A
file without keys admits no client.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import pathlib
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from medha.errors import SetupError
from medha_router import api_errors

_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62}):(?P<digest>[0-9a-fA-F]{64})")
_HOW = "NAME:SHA256 with the SHA-256 of the key in hex; get it by `printf %s KEY | sha256sum`"


class ApiKeys:
    """The keys of a file. Raises SetupError if the file cannot be read or is invalid."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._log = logging.getLogger("medha.router")
        self._version = self._file_version()
        self._keys = read_keys(path)
        if not self._keys:
            self._log.warning("%s holds no API key: every request is refused", path)

    def tenant(self, key: bytes) -> str | None:
        """Return the tenant of a key, or None if it is unknown; in constant time."""
        digest, tenant = hashlib.sha256(key).digest(), None
        for known, name in self._keys:
            if hmac.compare_digest(known, digest):
                tenant = name
        return tenant

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        version = self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._path)
        except SetupError as error:
            self._log.error("kept the former API keys: %s", error)
            return
        self._log.info("read %d API keys", len(self._keys))

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def read_keys(path: pathlib.Path) -> tuple[tuple[bytes, str], ...]:
    """Read (digest, name) of each key. Errors quote no line: it may hold a key."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SetupError(
            f"the API keys in {path} cannot be read ({why}): put a file there, with one line per "
            f"key of the form {_HOW}"
        ) from None
    keys = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        entry = _LINE.fullmatch(text)
        if entry is None:
            raise SetupError(f"line {number} of {path} is not an API key: must be {_HOW}")
        keys.append((bytes.fromhex(entry["digest"]), entry["name"]))
    return tuple(keys)


class ApiKeyMiddleware:
    """ASGI middleware that requires a key on every route and sets `state.tenant`."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip(" \t") if scheme.lower() == "bearer" else ""
        tenant = self._keys.tenant(given.encode("latin-1"))  # the original bytes
        if tenant is None or not given:
            await api_errors.response(_missing() if not given else _wrong())(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _missing() -> api_errors.ApiError:
    return _unauthorised(
        "no API key was given: send the header `Authorization: Bearer KEY` (api_key of OpenAI's "
        "clients) with a key from the operator of this server",
        "missing_api_key",
    )


def _wrong() -> api_errors.ApiError:
    return _unauthorised(
        "this API key is unknown or was removed: ask the operator of this server for another",
        "invalid_api_key",
    )


def _unauthorised(message: str, code: str) -> api_errors.ApiError:
    return api_errors.of_status(401, message, code=code, headers={"www-authenticate": "Bearer"})
