"""API keys: who may ask, and as which tenant.

A file has a key a line, `NAME:SHA256`, the second in hex, so that nobody reads a key out of it; `#`
begins a comment. A name may stand in several lines, which is how a key is replaced: add the new
one, then take the old one away. The file is read again when it changes; one that does not parse
leaves the keys as they were. Without any key nobody gets in.
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
from medha_router import faults

_LINE = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62}):(?P<digest>[0-9a-fA-F]{64})")
_HOW = "NAME:SHA256 with the SHA-256 of the key in hex; get it by `printf %s KEY | sha256sum`"


class ApiKeys:
    """The keys of a file. Raises SetupError when it cannot be read or does not parse."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._log = logging.getLogger("medha.router")
        self._version = self._seen()
        self._keys = read_keys(path)
        if not self._keys:
            self._log.warning("%s holds no API key: every request is refused", path)

    def tenant(self, key: bytes) -> str | None:
        """Whose key this is, None when it is nobody's; takes as long for each key."""
        digest, found = hashlib.sha256(key).digest(), None
        for known, name in self._keys:
            if hmac.compare_digest(known, digest):
                found = name
        return found

    def refresh(self) -> None:
        """Read the file again if it is another one by now."""
        version = self._seen()
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(self._path)
        except SetupError as error:
            self._log.error("API keys stay as they were: %s", error)
            return
        self._log.info("%d API keys count from now on", len(self._keys))

    def _seen(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def read_keys(path: pathlib.Path) -> tuple[tuple[bytes, str], ...]:
    """(digest, name) of each key; a message names no key, since a line may hold one by mistake."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SetupError(
            f"the API keys in {path} cannot be read ({why}): put a file there, a line per key of "
            f"the form {_HOW}"
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


class Gate:
    """Lets nobody to the application without a key, whatever the route; `state.tenant` of a request
    is whose key it came with."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip(" \t") if scheme.lower() == "bearer" else ""
        tenant = self._keys.tenant(given.encode("latin-1"))  # the bytes that came
        if tenant is None or not given:
            await faults.response(_missing() if not given else _wrong())(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)


def _missing() -> faults.Fault:
    return _unauthorised(
        "no API key was given: send the header `Authorization: Bearer KEY` (api_key of OpenAI's "
        "clients) with a key from whoever runs this server",
        "missing_api_key",
    )


def _wrong() -> faults.Fault:
    return _unauthorised(
        "this API key is not known here, or not any more: ask whoever runs this server for another",
        "invalid_api_key",
    )


def _unauthorised(message: str, code: str) -> faults.Fault:
    return faults.plain(401, message, code=code, headers={"www-authenticate": "Bearer"})
