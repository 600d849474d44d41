"""Client of the Kubernetes API, the only one: one method per verb, with a time limit and an error.

Bodies are JSON as bytes; the caller decodes the fields it needs and drops the rest, which keeps
the operator small and fast (see docs/adr). Nothing is retried here: the reconciler requeues. Lists
come in pages, deletes carry the UID of the object, and a watch yields all events that have arrived
since the last ones.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import aiohttp
import msgspec

from medha.errors import MedhaError
from medha_operator.resources.labels import FIELD_MANAGER

T = TypeVar("T")
AnyPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

REQUEST_S = 10.0
LIST_S = 60.0
CONNECT_S = 5.0
WATCH_S = 300
SILENCE_S = 75.0
"""A watch silent for this long is dead: the API server sends a bookmark every minute."""
PAGE = 500
RELOGIN_S = 60.0
PARTIAL_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
PARTIAL = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Accept header for metadata alone. A watch with PARTIAL_LIST ends at once, without an error."""


class Kind(msgspec.Struct, frozen=True):
    """A kind of object and its URLs."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", part: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"/namespaces/{namespace}" if namespace and self.namespaced else ""
        end = "".join(f"/{segment}" for segment in (name, part) if segment)
        return f"{root}{place}/{self.plural}{end}"


REPLICAS = Kind("medha.dev", "v1alpha1", "medhareplicas", "MedhaReplica")
REPLICAS_BETA = msgspec.structs.replace(REPLICAS, version="v1beta1")
PODS = Kind("", "v1", "pods", "Pod")
SERVICES = Kind("", "v1", "services", "Service")
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap")
BUDGETS = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
POLICIES = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
SECRETS = Kind("", "v1", "secrets", "Secret")
NODES = Kind("", "v1", "nodes", "Node", namespaced=False)
EVENTS = Kind("events.k8s.io", "v1", "events", "Event")
SCALED_OBJECTS = Kind("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")
KINDS = {kind.kind: kind for kind in (SERVICES, CONFIG_MAPS, BUDGETS, POLICIES, SECRETS, PODS)}


class ClusterError(MedhaError):
    """The API server refused (`status`, `reason`), or did not answer (`status` 0)."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self.status, self.reason, self.retry_after_s = status, reason, retry_after_s
        self.message = message
        super().__init__(f"{message} ({status} {reason})" if status else message)

    @property
    def refused(self) -> bool:
        """True if the object is invalid or forbidden: a retry would fail as well."""
        return self.status in (400, 403, 422)

    @property
    def exceeds_quota(self) -> bool:
        """True if the object is valid, and the namespace's quota has no room for it."""
        return self.status == 403 and "exceeded quota" in self.message


class NameTaken(MedhaError):
    """An object that no MedhaReplica of ours owns has a name that the operator needs."""

    def __init__(self, kind: str, name: str, owner: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(
            f"{kind} {name} exists and belongs to {owner}, so the operator leaves it alone: delete "
            "or rename it, or rename the MedhaReplica"
        )


class Page(msgspec.Struct):
    """A page of a list; the caller decodes the items."""

    class Where(msgspec.Struct, rename="camel"):
        resource_version: str = "0"
        continue_: str | None = msgspec.field(default=None, name="continue")

    metadata: Where
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct):
    """An event of a watch."""

    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    """The API server's answer in place of an object."""

    class Details(msgspec.Struct, rename="camel"):
        retry_after_seconds: float | None = None

    reason: str = ""
    message: str = ""
    code: int = 0
    details: Details | None = None


class Connection(Protocol):
    """The part of kopf's ConnectionInfo that the client needs."""

    @property
    def server(self) -> str: ...
    @property
    def proxy_url(self) -> str | None: ...
    @property
    def insecure(self) -> bool | None: ...
    @property
    def ca_path(self) -> AnyPath | None: ...
    @property
    def ca_data(self) -> str | bytes | None: ...
    @property
    def certificate_path(self) -> AnyPath | None: ...
    @property
    def certificate_data(self) -> str | bytes | None: ...
    @property
    def private_key_path(self) -> AnyPath | None: ...
    @property
    def private_key_data(self) -> str | bytes | None: ...
    def as_http_headers(self) -> dict[str, str]: ...
    def as_ssl_context(self) -> ssl.SSLContext: ...


class KubeClient:
    """Calls one API server. Construct and close it inside the event loop that uses it.

    `on_write` receives the verb, the kind and the answer's status of every write. Credentials are
    read again after `relogin_s`. `replicas` is the MedhaReplica in the version that the operator
    uses throughout.
    """

    def __init__(
        self,
        login: Callable[[], Connection],
        *,
        connections: int = 16,
        relogin_s: float = RELOGIN_S,
        on_write: Callable[[str, Kind, int], None] = lambda verb, kind, status: None,
    ) -> None:
        self.replicas = REPLICAS
        self._login, self._relogin_s = login, relogin_s
        self._on_write = on_write
        connection = login()
        self._server = connection.server.rstrip("/")
        self._proxy = connection.proxy_url
        self._headers = self._headers_of(connection)
        self._tls = connection.as_ssl_context()
        self._identity = _identity(connection)
        self._logged_in = time.monotonic()
        connector = aiohttp.TCPConnector(limit=connections, keepalive_timeout=60.0)
        self._session = aiohttp.ClientSession(connector=connector)

    async def close(self) -> None:
        await self._session.close()

    async def get(self, kind: Kind, namespace: str, name: str) -> bytes:
        return await self._call("GET", kind.path(namespace, name))

    async def serves(self, kind: Kind) -> bool:
        """Return true if the API server serves the kind's group and version."""
        try:
            await self._call("GET", f"/apis/{kind.api_version}")
        except ClusterError as error:
            if error.status != 404:
                raise
            return False
        return True

    async def choose_version(self) -> None:
        """Use the oldest version of MedhaReplica that the API server serves.

        All versions have one schema, and references by the oldest outlive a downgrade of the kind.
        """
        if not await self.serves(REPLICAS) and await self.serves(REPLICAS_BETA):
            self.replicas = REPLICAS_BETA
        else:
            self.replicas = REPLICAS

    async def pages(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        labels: str = "",
        fields: str = "",
        partial: bool = False,
    ) -> AsyncIterator[Page]:
        """List a kind at one resource version, page after page."""
        accept = {"Accept": PARTIAL_LIST} if partial else {}
        query = {"limit": str(PAGE), "labelSelector": labels, "fieldSelector": fields}
        query = {name: value for name, value in query.items() if value}
        while True:
            body = await self._call(
                "GET", kind.path(namespace), query=query, headers=accept, timeout_s=LIST_S
            )
            page = decoded(_PAGE, body)
            yield page
            if not page.metadata.continue_:
                return
            query["continue"] = page.metadata.continue_

    async def watch(
        self,
        kind: Kind,
        namespace: str = "",
        *,
        since: str,
        labels: str = "",
        partial: bool = False,
    ) -> AsyncIterator[list[WatchEvent]]:
        """Watch events after `since`, bookmarks included, until the server ends the stream.

        Raises ClusterError if it ends otherwise; status 410 means: list again.
        """
        query = {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": since}
        query |= {"timeoutSeconds": str(WATCH_S)} | ({"labelSelector": labels} if labels else {})
        headers = await self._credentials() | ({"Accept": PARTIAL} if partial else {})
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        try:
            async with self._session.get(
                self._server + kind.path(namespace),
                params=query,
                headers=headers,
                timeout=limit,
                ssl=self._tls,
                proxy=self._proxy,
            ) as answer:
                if answer.status != 200:
                    raise _refusal(answer, await answer.read())
                rest = b""
                async for piece in answer.content.iter_any():
                    *lines, rest = (rest + piece).split(b"\n")
                    if lines:
                        yield [_event(line) for line in lines if line]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from None

    async def create(
        self, kind: Kind, namespace: str, body: bytes, timeout_s: float = REQUEST_S
    ) -> bytes:
        """POST; fails with 409 if the name is taken, and with 400 if the kind lacks a field."""
        return await self._write(
            "POST",
            kind,
            kind.path(namespace),
            body,
            "application/json",
            timeout_s,
            {"fieldValidation": "Strict"},
        )

    async def apply(
        self, kind: Kind, namespace: str, name: str, body: bytes, timeout_s: float = REQUEST_S
    ) -> bytes:
        """Server-side apply: create the object or give it the fields of `body`."""
        return await self._write(
            "PATCH",
            kind,
            kind.path(namespace, name),
            body,
            "application/apply-patch+yaml",
            timeout_s,
            {"fieldManager": FIELD_MANAGER, "force": "true"},
        )

    async def merge(
        self, kind: Kind, namespace: str, name: str, body: bytes, timeout_s: float = REQUEST_S
    ) -> bytes:
        """Strategic merge of `body`; a UID in its metadata is a precondition."""
        return await self._write(
            "PATCH",
            kind,
            kind.path(namespace, name),
            body,
            "application/strategic-merge-patch+json",
            timeout_s,
            {"fieldManager": FIELD_MANAGER},
        )

    async def replace(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        body: bytes,
        *,
        part: str = "",
        timeout_s: float = REQUEST_S,
    ) -> bytes:
        """PUT: a resource version in its metadata is a precondition. `part`: a subresource."""
        path = kind.path(namespace, name, part)
        return await self._write("PUT", kind, path, body, "application/json", timeout_s)

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_s: int | None = None,
        timeout_s: float = REQUEST_S,
    ) -> bytes:
        """Delete the object of this UID; a newer one of the same name stays (409)."""
        options: dict[str, Any] = {"preconditions": {"uid": uid}}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        body = msgspec.json.encode(options)
        path = kind.path(namespace, name)
        return await self._write("DELETE", kind, path, body, "application/json", timeout_s)

    async def _write(
        self,
        verb: str,
        kind: Kind,
        path: str,
        body: bytes,
        content: str,
        timeout_s: float,
        query: Mapping[str, str] = {},
    ) -> bytes:
        status = 200
        try:
            return await self._call(
                verb,
                path,
                query=query,
                body=body,
                headers={"Content-Type": content},
                timeout_s=timeout_s,
            )
        except ClusterError as error:
            status = error.status
            raise
        finally:
            self._on_write(verb.lower(), kind, status)

    async def _call(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] = {},
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        timeout_s: float = REQUEST_S,
    ) -> bytes:
        sent = {**await self._credentials(), **headers}
        limit = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        try:
            async with self._session.request(
                verb,
                self._server + path,
                params=query or None,
                data=body,
                headers=sent,
                timeout=limit,
                ssl=self._tls,
                proxy=self._proxy,
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _unreachable(error) from None
        if answer.status >= 300:
            if answer.status == 401:
                self._logged_in = float("-inf")
            raise _refusal(answer, content)
        return content

    async def _credentials(self) -> dict[str, str]:
        """Read the credentials again every minute, and after a 401: tokens and certificates are
        files that change. If that fails, the former ones are used for another minute."""
        if time.monotonic() - self._logged_in > self._relogin_s:
            self._logged_in = time.monotonic()
            try:
                await asyncio.to_thread(self._log_in)
            except Exception as error:  # several libraries raise it, about files and formats
                message = f"credentials cannot be read: {error!r}"
                raise ClusterError(0, "NoCredentials", message) from error
        return self._headers

    def _log_in(self) -> None:
        """Log in again. A new TLS context is for new connections; running ones stay."""
        connection = self._login()
        identity = _identity(connection)
        if identity != self._identity:
            self._tls, self._identity = connection.as_ssl_context(), identity
        self._headers = self._headers_of(connection)

    @staticmethod
    def _headers_of(connection: Connection) -> dict[str, str]:
        plain = {"Accept": "application/json", "Accept-Encoding": "identity"}
        return plain | connection.as_http_headers() | {"User-Agent": FIELD_MANAGER}


def _identity(connection: Connection) -> tuple[object, ...]:
    """Collect what the TLS context is made of; files count by their content."""
    files = (connection.ca_path, connection.certificate_path, connection.private_key_path)
    contents = tuple(Path(os.fsdecode(path)).read_bytes() if path else b"" for path in files)
    data = (connection.ca_data, connection.certificate_data, connection.private_key_data)
    return (connection.insecure, *contents, *data)


_PAGE = msgspec.json.Decoder(Page)
_EVENT = msgspec.json.Decoder(WatchEvent)
_STATUS = msgspec.json.Decoder(_Status)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode an answer; raises ClusterError if it is something else (a proxy's page, say)."""
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise ClusterError(500, "Garbled", f"the answer cannot be decoded: {error}") from None


def _event(line: bytes) -> WatchEvent:
    event = decoded(_EVENT, line)
    if event.type == "ERROR":
        status = _STATUS.decode(event.object)
        raise ClusterError(status.code or 500, status.reason, status.message)
    return event


def _refusal(answer: aiohttp.ClientResponse, body: bytes) -> ClusterError:
    try:
        status = _STATUS.decode(body)
    except msgspec.MsgspecError:  # a proxy's page, or a path that is not served
        status = _Status(message=body[:200].decode(errors="replace").strip())
    after = answer.headers.get("Retry-After", "")
    wait_s = float(after) if after.isdigit() else None
    if wait_s is None and status.details is not None:
        wait_s = status.details.retry_after_seconds
    where = f"{answer.method} {answer.url.path}"
    return ClusterError(
        answer.status, status.reason or str(answer.reason), status.message or where, wait_s
    )


def _unreachable(error: Exception) -> ClusterError:
    return ClusterError(0, "Unreachable", f"the API server does not answer: {error!r}")
