"""API keys: authentication of clients, their tenants, limits and rights.

A key file has one key per line, `NAME:SHA256` with the hash in hex, so that it reveals no key; `#`
begins a comment. Options may follow, each `NAME=VALUE`:

    requests_per_minute   tokens_per_minute    of the tenant, over all routers
    concurrent_s          predicted prefill seconds of its unfinished requests, over all routers
    weight                factor on the weight of its requests, 0.001 to 1000; 1 without
    classes               classes that it may ask for, by commas; the first is its default
    least_ttft_ms         least_tpot_ms    shortest targets that it may ask for by header

NAME is the tenant. A tenant may have several keys: to replace a key, add the new one and then
remove the old one. Use is counted by tenant; the options of a line hold for requests with its key.
The file is read again once it has changed and then stood still: it may be written in place. If it
is invalid, the former keys stay valid. A file without keys admits no client.

The class of a request is that of `x-medha-class`, else of the first configured header with a known
value, else the first class of its key, else the default class of the model.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import math
import pathlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from medha.errors import RequestError, SetupError
from medha.fleet.use_meter import UNLIMITED, TenantLimits
from medha_router import api_errors
from medha_router.protocol import (
    CLASS_HEADER,
    TPOT_HEADERS,
    TTFT_HEADERS,
    SloOverride,
    read_slo,
)

KEY_HEADER = "x-api-key"
LEAST_WEIGHT = 1e-3
REFRESH_S = 0.5
MOST_CHANGES = 10  # in a row: then a file that never stands still is read as it is
LINES_AT_ONCE = 200
PAUSE_S = 0.0005  # between them: other threads run meanwhile
LOOKUP_S = 0.05  # longer than a lookup that has begun
_KEY = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,62}):(?P<digest>[0-9a-fA-F]{64})")
_CLASS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOW = "NAME:SHA256 with the SHA-256 of the key in hex; get it by `printf %s KEY | sha256sum`"
_NUMBERS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_s",
    "weight",
    "least_ttft_ms",
    "least_tpot_ms",
)

ClassHeaders = Mapping[str, Mapping[str, str]]
"""By name of a header: the class of each of its values."""


class Client(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sender of a request: its tenant and rights.

    `tenant`: of its key; empty without API keys. Requests share cached pages if their `cache_owner`
    is equal. Memory and processes are shared fairly between values of `owner`: tenants, addresses
    of IPv4, or networks of IPv6. `classes`: those that it may ask for, the first is its default;
    empty: all.
    """

    tenant: str = ""
    cache_owner: str = ""
    owner: str = ""
    limits: TenantLimits = UNLIMITED
    weight: float = 1.0
    classes: tuple[str, ...] = ()
    least_ttft_s: float = 0.0
    least_tpot_s: float = 0.0


class ApiKeys:
    """The keys of a file. Raises SetupError if the file cannot be read or is invalid."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._log = logging.getLogger("medha.router")
        self._version = self._seen = self._file_version()
        self._changes, self._failure = 0, ""
        self._clients = read_keys(path)
        self._warn()

    def client(self, key: bytes) -> Client | None:
        """Return the client of a key, or None if the key is unknown.

        The time depends on the hash of the key alone, which reveals no key.
        """
        return self._clients.get(hashlib.sha256(key).digest())

    def refresh(self) -> None:
        """Read the file again if it has changed and stood still since the last call, so that none
        is read half written. Takes a while: call it on a thread."""
        version = self._file_version()
        if version == self._version:
            return
        if version != self._seen and self._changes < MOST_CHANGES:
            self._seen = version
            self._changes += 1
            return
        self._changes = 0
        try:
            former, self._clients = self._clients, read_keys(self._path)
        except SetupError as error:
            if str(error) != self._failure:
                self._log.error("kept the former API keys: %s", error)
            if isinstance(error.__cause__, OSError):
                self._failure = str(error)  # and read it again
            else:
                self._version, self._failure = version, ""
            return
        self._version, self._failure = version, ""
        self._log.info("read %d API keys", len(self._clients))
        self._warn()
        time.sleep(LOOKUP_S)
        _clear(former)

    async def follow(self) -> None:
        """Keep the keys those of the file, until cancelled."""
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await asyncio.to_thread(self.refresh)
            except Exception as error:  # such as no thread; else no key could be revoked any more
                self._log.error("the API keys were not read again: %r", error)

    def _warn(self) -> None:
        if not self._clients:
            self._log.warning("%s holds no API key: every request is refused", self._path)

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


def read_keys(path: pathlib.Path) -> dict[bytes, Client]:
    """Read the clients by the SHA-256 of their keys. Errors quote no line: it may hold a key."""
    try:
        with path.open(encoding="utf-8") as lines:
            return _read(lines, path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise SetupError(
            f"the API keys in {path} cannot be read ({why}): put a file there, with one line per "
            f"key of the form {_HOW}"
        ) from (error if isinstance(error, OSError) else None)


def _clear(clients: dict[bytes, Client]) -> None:
    """Remove all clients; not at once: that would stop the other threads."""
    while clients:
        for _ in range(min(LINES_AT_ONCE, len(clients))):
            clients.popitem()
        time.sleep(PAUSE_S)


def _read(lines: Iterable[str], path: pathlib.Path) -> dict[bytes, Client]:
    clients: dict[bytes, Client] = {}
    try:
        _read_into(clients, lines, path)
    except (SetupError, OSError, UnicodeDecodeError):
        _clear(clients)
        raise
    return clients


def _read_into(clients: dict[bytes, Client], lines: Iterable[str], path: pathlib.Path) -> None:
    known: dict[str, Client] = {}  # by the text of the options
    for number, line in enumerate(lines, start=1):
        if number % LINES_AT_ONCE == 0:
            known.clear()
            time.sleep(PAUSE_S)
        key, _, options = line.partition("#")[0].strip().partition(" ")
        if not key:
            continue
        entry = _KEY.fullmatch(key)
        if entry is None:
            raise SetupError(f"line {number} of {path} is not an API key: must be {_HOW}")
        client = known.get(options)
        if client is None:
            client = known[options] = _client(options, f"line {number} of {path}")
        name, digest = entry["name"], bytes.fromhex(entry["digest"])
        client = msgspec.structs.replace(
            client, tenant=name, cache_owner=f"tenant:{name}", owner=f"tenant:{name}"
        )
        if clients.setdefault(digest, client) != client:
            raise SetupError(
                f"line {number} of {path} has the key of an earlier line, with another tenant or "
                "other options: leave out one of them"
            )


def _client(options: str, where: str) -> Client:
    """Read the options of a line."""
    numbers: dict[str, float] = {}
    classes: tuple[str, ...] = ()
    for option in options.split():
        name, _, value = option.partition("=")
        if name == "classes":
            classes = tuple(value.split(","))
            if not all(_CLASS.fullmatch(slo_class) for slo_class in classes):
                raise SetupError(f"{where}: classes must be names, separated by commas")
        elif name in _NUMBERS:
            numbers[name] = _number(value, f"{where}: {name}")
        else:
            raise SetupError(
                f"{where} has an unknown option after the key: must be classes=... or one of "
                f"{', '.join(_NUMBERS)}, each with =NUMBER"
            )
    return Client(
        limits=TenantLimits(
            requests_per_minute=numbers.get("requests_per_minute", math.inf),
            tokens_per_minute=numbers.get("tokens_per_minute", math.inf),
            concurrent_s=numbers.get("concurrent_s", math.inf),
        ),
        weight=_weight(numbers.get("weight", 1.0), where),
        classes=classes,
        least_ttft_s=numbers.get("least_ttft_ms", 0.0) / 1000.0,
        least_tpot_s=numbers.get("least_tpot_ms", 0.0) / 1000.0,
    )


def _number(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise SetupError(f"{what} must be a number above 0")
    return number


def _weight(number: float, where: str) -> float:
    if not LEAST_WEIGHT <= number <= 1.0 / LEAST_WEIGHT:
        raise SetupError(
            f"{where}: weight is {number:g}: must be {LEAST_WEIGHT:g} to {1.0 / LEAST_WEIGHT:g}"
        )
    return number


class ClientMiddleware:
    """ASGI middleware that sets `state.client`.

    With `keys` it requires a key on every route. Without, a client is its address, and has cached
    pages of its own unless `shares_cache`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, shares_cache: bool) -> None:
        self._app = app
        self._find: Callable[[Scope], Client] = (
            _by_key(keys) if keys is not None else _anybody if shares_cache else _by_address
        )

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["client"] = self._find(scope)
            except Unauthorised as error:
                return api_errors.response(error.api_error)(scope, receive, send)
        return self._app(scope, receive, send)


class Unauthorised(Exception):
    """A request without a valid key, and the error for its client."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        headers = {"www-authenticate": "Bearer"}
        self.api_error = api_errors.of_status(401, message, code=code, headers=headers)


def _anybody(scope: Scope) -> Client:
    return msgspec.structs.replace(_by_address(scope), cache_owner="")


def _by_address(scope: Scope) -> Client:
    host, _ = scope["client"] or ("", 0)
    owner = f"address:{host}"
    if ":" in host:  # one client has all addresses of a network of IPv6
        address = ipaddress.IPv6Address(host)
        network = ipaddress.ip_network((address.packed, 64), strict=False)
        owner = f"address:{address.ipv4_mapped or network}"
    return Client(cache_owner=f"address:{host}", owner=owner)


def _by_key(keys: ApiKeys) -> Callable[[Scope], Client]:
    def find(scope: Scope) -> Client:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip(" \t") if scheme.lower() == "bearer" else headers.get(KEY_HEADER, "")
        if not given:
            raise Unauthorised(
                "no API key was given: send the header `Authorization: Bearer KEY` or `x-api-key: "
                "KEY` (api_key of OpenAI's and Anthropic's clients) with a key from the operator "
                "of this server",
                "missing_api_key",
            )
        client = keys.client(given.encode("latin-1"))  # the original bytes
        if client is None:
            raise Unauthorised(
                "this API key is unknown or was removed: ask the operator of this server for "
                "another",
                "invalid_api_key",
            )
        return client

    return find


def read_claim(
    headers: Mapping[str, str], class_headers: ClassHeaders, client: Client
) -> SloOverride:
    """Return what a request claims; raises RequestError for claims that its key does not allow."""
    slo = read_slo(headers)
    if slo.slo_class is None:
        slo = msgspec.structs.replace(slo, slo_class=_mapped(headers, class_headers))
    if client.classes:
        if slo.slo_class is None:
            slo = msgspec.structs.replace(slo, slo_class=client.classes[0])
        elif slo.slo_class not in client.classes:
            raise _forbidden(
                f"class {slo.slo_class[:60]!r} is not open to this key: ask for "
                f"{' or '.join(client.classes)}",
                CLASS_HEADER,
            )
    for given_s, least_s, names in (
        (slo.ttft_s, client.least_ttft_s, TTFT_HEADERS),
        (slo.tpot_s, client.least_tpot_s, TPOT_HEADERS),
    ):
        if given_s is not None and given_s < least_s:
            raise _forbidden(
                f"{names[0]} is {given_s * 1000:g}: this key may ask for {least_s * 1000:g} ms or "
                "more",
                names[0],
            )
    return slo


def _mapped(headers: Mapping[str, str], class_headers: ClassHeaders) -> str | None:
    for name, classes in class_headers.items():
        if (slo_class := classes.get(headers.get(name.lower(), ""))) is not None:
            return slo_class
    return None


def _forbidden(message: str, param: str) -> RequestError:
    return RequestError(message, status=403, code="not_allowed", param=param)
