"""The metrics of the catalogue, and the ops port that exports them: /metrics, /healthz, /readyz.

`Metrics` makes a registry of its own, not the library's global one, with the metrics that this kind
of process exports. `OpsServer` answers on its own threads, so that a busy event loop does not seem
dead; a process adds its own routes (`GET /status`, `POST /drain`). The port is for clients inside
the fleet: plain HTTP, with bounds on connections and time. It reads no request body. A route that
changes something (POST) needs a token if the process has one, and is never taken from a browser.
"""

from __future__ import annotations

import bisect
import concurrent.futures
import contextlib
import enum
import hmac
import http.server
import itertools
import logging
import pathlib
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import msgspec
import prometheus_client as client
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from medha.errors import SetupError
from medha.metrics import Exporter, Metric, exported_by

MAX_CONNECTIONS = 32
BACKLOG = 1024  # connections without a place yet: the kernel refuses further ones
CONNECTION_TIMEOUT_S = 5.0
IDLE_POLL_S = 0.05  # while all places are taken
SAMPLES, SERIES = 64, 8  # of a slice while a scrape is rendered: about half a millisecond
SLICE_PAUSE_S = 5e-5
PAUSE_S = 0.05  # between two replies of a shared route
STALE_TICK_S = 10.0
MIN_TOKEN_BYTES = 16
BROWSER_HEADERS = ("Origin", "Sec-Fetch-Site")  # of a POST, no page can leave out both

T = TypeVar("T")


class Reply(msgspec.Struct, frozen=True):
    """The response of a route."""

    body: bytes = b""
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"


Route = Callable[[], Reply]


class SharedRoute:
    """A route that replies once to all clients that wait for it. Thread-safe.

    A reply begins PAUSE_S after the end of the one before, so that a crowd of clients takes little
    time from other threads and from the event loop. No reply is older than its request.
    """

    def __init__(self, route: Route) -> None:
        self._route = route
        self._lock, self._replying = threading.Lock(), threading.Lock()
        self._next: concurrent.futures.Future[Reply] | None = None
        self._ended_s = float("-inf")

    def __call__(self) -> Reply:
        with self._lock:
            reply, first = self._next, self._next is None
            if reply is None:
                reply = self._next = concurrent.futures.Future()
        if first:
            self._complete(reply)
        return reply.result()

    def _complete(self, reply: concurrent.futures.Future[Reply]) -> None:
        with self._replying:
            time.sleep(max(0.0, self._ended_s + PAUSE_S - time.monotonic()))
            with self._lock:
                self._next = None  # a request from now on waits for a later reply
            try:
                reply.set_result(self._route())
            except Exception as error:
                reply.set_exception(error)
            self._ended_s = time.monotonic()


def read_token(path: str) -> bytes:
    """Read the token of an ops port from a file; raises SetupError."""
    try:
        token = pathlib.Path(path).read_bytes().strip()
    except OSError as error:
        raise SetupError(
            f"the token in {path} cannot be read ({error.strerror}): put a file there with "
            f"{MIN_TOKEN_BYTES} or more random characters"
        ) from None
    if len(token) < MIN_TOKEN_BYTES:
        raise SetupError(
            f"the token in {path} has {len(token)} bytes: must have {MIN_TOKEN_BYTES} or more; "
            "write a random one"
        )
    return token


def json_reply(value: object, status: int = 200) -> Reply:
    """Make a reply from a msgspec value, as JSON."""
    return Reply(msgspec.json.encode(value), status, "application/json")


class Exposition(Protocol):
    """Metrics in the exposition format."""

    def text(self) -> bytes: ...


Labels = tuple[str, ...]


class Metrics:
    """The metrics that an `exporter` process exports; labels follow the catalogue's order.

    Thread-safe. Raises KeyError for a metric that this process does not export, and ValueError for
    a wrong number of labels. The values are kept here: the library's own objects cost five times
    as much to update, which counts where each token is observed.
    """

    def __init__(self, exporter: Exporter) -> None:
        self.registry = client.CollectorRegistry()
        self._lock = threading.Lock()
        metrics = exported_by(exporter)
        self._metrics = {metric.name: metric for metric in metrics if not metric.alias_of}
        self._numbers: dict[str, dict[Labels, float]] = {}  # of counters and gauges
        # By name: upper edges, and by labels the count of each bucket and the sum of the values.
        self._histograms: dict[str, tuple[Sequence[float], dict[Labels, list[float]]]] = {}
        for metric in self._metrics.values():
            if metric.kind == "histogram":
                edges = metric.buckets
                self._histograms[metric.name] = edges, {}
                if not metric.labels:
                    self._histograms[metric.name][1][()] = [0.0] * (len(edges) + 2)
            else:
                self._numbers[metric.name] = {} if metric.labels else {(): 0.0}
        self.registry.register(_Values(self._family, self._metrics))
        aliases = [metric for metric in metrics if metric.alias_of]
        self.registry.register(_Aliases(self._family, aliases))
        client.ProcessCollector(registry=self.registry)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add `amount` (0 or more) to a counter."""
        if amount < 0:
            raise ValueError(f"{name}: {amount} is below 0, and a counter only rises")
        numbers = self._numbers[name]
        with self._lock:
            if labels in numbers:
                numbers[labels] += amount
            else:
                numbers[self._checked(name, labels)] = amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        with self._lock:
            self._numbers[name][self._checked(name, labels)] = value

    def drop(self, name: str, *labels: str) -> None:
        """Remove the values of a gauge or counter whose first labels are these.

        For things that no longer exist, or that another process reports now.
        """
        numbers = self._numbers[name]
        with self._lock:
            for values in [values for values in numbers if values[: len(labels)] == labels]:
                del numbers[values]

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put a value into a histogram."""
        edges, series = self._histograms[name]
        with self._lock:
            counts = series.get(labels)
            if counts is None:
                counts = series[self._checked(name, labels)] = [0.0] * (len(edges) + 2)
            counts[bisect.bisect_left(edges, value)] += 1.0
            counts[-1] += value

    def text(self) -> bytes:
        """Return all metrics in the exposition format.

        Other threads run after each slice: without this, one that has waited for something gets the
        interpreter's lock 5 ms later, again and again while a scrape is rendered.
        """
        return b"".join(generate_latest(_Sliced(family)) for family in self.registry.collect())

    def _checked(self, name: str, labels: Labels) -> Labels:
        names = self._metrics[name].labels
        if len(labels) != len(names):
            raise ValueError(f"{name} has the labels {names}, and was given {labels}")
        return labels

    def _family(self, name: str) -> Family:
        """Return the current samples of one metric."""
        metric = self._metrics[name]
        if metric.kind == "histogram":
            edges, series = self._histograms[name]
            histogram = HistogramMetricFamily(name, metric.help, labels=metric.labels)
            with self._lock:
                labelled = list(series.items())
            bounds = [*map(floatToGoString, edges), "+Inf"]
            for labels, counted in _in_slices(labelled, SERIES):
                with self._lock:
                    *counts, total = counted
                buckets = zip(bounds, itertools.accumulate(counts), strict=True)
                histogram.add_metric(labels, list(buckets), total)
                if edges[0] < 0.0:  # it has no sum, and the library leaves out the count too
                    by_name = dict(zip(metric.labels, labels, strict=True))
                    histogram.add_sample(f"{name}_count", by_name, sum(counts))
            return histogram
        kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = kind(name, metric.help, labels=metric.labels)
        with self._lock:
            numbers = dict(self._numbers[name])
        for labels, value in _in_slices(numbers.items(), SAMPLES):
            family.add_metric(labels, value)
        return family


class _Sliced(Collector):
    """Collects a family, whose samples let other threads run in between."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        self._family.samples = _Samples(self._family.samples)
        yield self._family


class _Samples(list[Any]):
    """Samples of a family."""

    def __iter__(self) -> Iterator[Any]:
        return _in_slices(super().__iter__(), SAMPLES)


def _in_slices(items: Iterable[T], size: int) -> Iterator[T]:
    """Yield the items, and let other threads run after as many as `size`."""
    for number, item in enumerate(items, 1):
        yield item
        if not number % size:
            time.sleep(SLICE_PAUSE_S)


class _Values:
    """Collects the metrics of the catalogue in its order."""

    def __init__(self, family: Callable[[str], Family], names: Iterable[str]) -> None:
        self._family, self._names = family, tuple(names)

    def collect(self) -> Iterable[Family]:
        return map(self._family, self._names)


class _Aliases:
    """Repeats metrics under the names and the model label of another protocol."""

    def __init__(self, family: Callable[[str], Family], aliases: Iterable[Metric]) -> None:
        self._family = family
        self._aliases = tuple(aliases)

    def collect(self) -> Iterable[Family]:
        for alias in self._aliases:
            original = self._family(alias.alias_of)
            if alias.kind == "gauge" and alias.alias_of == "medha_kv_pages":
                yield _used_share(alias, original)
                continue
            name = alias.name.removesuffix("_total")
            family = Family(name, alias.help, original.type)
            family.samples = [_renamed(sample, original.name, name) for sample in original.samples]
            yield family

    def describe(self) -> Iterable[Family]:
        return [Family(a.name.removesuffix("_total"), a.help, a.kind) for a in self._aliases]


class Tick:
    """Liveness of an event loop: alive if it turned within the last `stale_s` seconds."""

    def __init__(self, stale_s: float = STALE_TICK_S) -> None:
        self._stale_s = stale_s
        self._last = time.monotonic()

    def __call__(self) -> None:
        """Note that the loop turned."""
        self._last = time.monotonic()

    def alive(self) -> bool:
        return time.monotonic() - self._last < self._stale_s


class OpsServer:
    """Serves `/livez` and `/healthz` (`alive`), `/readyz` (`ready`), `/metrics`, and `routes`.

    Keys of `routes` are a method and a path (`GET /status`). A route runs on a thread of the
    server, so it only reads snapshots or posts to the loop. Port 0 takes any free port; `port` is
    the actual one. `host` may be the path of a Unix socket. A POST needs `Authorization: Bearer
    TOKEN`, unless `token` is empty. Raises SetupError if the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Exposition,
        *,
        alive: Callable[[], bool],
        ready: Callable[[], bool],
        routes: Mapping[str, Route] | None = None,
        token: bytes = b"",
    ) -> None:

        def show_metrics() -> Reply:
            return Reply(metrics.text(), content_type=CONTENT_TYPE_LATEST)

        all_routes: dict[str, Route] = {
            "GET /healthz": lambda: _probe(alive()),
            "GET /livez": lambda: _probe(alive()),
            "GET /readyz": lambda: _probe(ready()),
            "GET /metrics": SharedRoute(show_metrics),
            **(routes or {}),
        }
        try:
            self._server = _Server(host, port, all_routes, token)
        except OSError as error:
            raise SetupError(
                f"ops port {host}:{port} cannot be opened ({error.strerror}): free it or choose "
                "another"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="ops", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Phase(enum.Enum):
    """Phase of a connection. The values of two are the events by which their clients go on."""

    READING = select.POLLIN
    ANSWERING = 0
    WRITING = select.POLLOUT
    CLOSED = -1  # by this process: its thread is about to end


class _Places:
    """Places of at most MAX_CONNECTIONS connections; thread-safe.

    If all are taken, the connection that has waited longest for its client is closed, so that no
    idle client keeps out another. A connection whose thread has something to do is not idle.
    """

    def __init__(self) -> None:
        self._left = threading.Condition()
        self._phases: dict[socket.socket, _Phase] = {}  # in the order of their last steps

    def take(self, connection: socket.socket) -> bool:
        """Wait for a place and take it; False if none becomes free in time."""
        until_s = time.monotonic() + CONNECTION_TIMEOUT_S
        with self._left:
            while not self._make_room():
                if time.monotonic() > until_s:
                    return False
                self._left.wait(IDLE_POLL_S)
            self._phases[connection] = _Phase.READING
            return True

    def answer(self, connection: socket.socket) -> bool:
        """Note that a whole request arrived; False if the connection was closed before."""
        return self._step(connection, _Phase.ANSWERING)

    def write(self, connection: socket.socket) -> None:
        """Note that the response is complete."""
        self._step(connection, _Phase.WRITING)

    def leave(self, connection: socket.socket) -> None:
        with self._left:
            self._phases.pop(connection, None)
            self._left.notify()

    def _step(self, connection: socket.socket, phase: _Phase) -> bool:
        with self._left:
            if self._phases[connection] is _Phase.CLOSED:
                return False
            del self._phases[connection]
            self._phases[connection] = phase
            return True

    def _make_room(self) -> bool:
        """Return whether a place is free; if none is, close an idle connection."""
        if len(self._phases) < MAX_CONNECTIONS:
            return True
        if _Phase.CLOSED not in self._phases.values() and (idle := self._idle()):
            self._phases[idle[0]] = _Phase.CLOSED
            with contextlib.suppress(OSError):  # its client closed it at this moment
                idle[0].shutdown(socket.SHUT_RDWR)  # wakes its thread
        return False

    def _idle(self) -> list[socket.socket]:
        """Return the connections that wait for their clients, the longest first."""
        events = select.poll()  # one call for all: each releases the interpreter's lock
        waiting = [
            connection
            for connection, phase in self._phases.items()
            if phase in (_Phase.READING, _Phase.WRITING)
        ]
        for connection in waiting:
            events.register(connection, self._phases[connection].value)
        due = {number for number, _ in events.poll(0)}
        return [connection for connection in waiting if connection.fileno() not in due]


class _Server(http.server.ThreadingHTTPServer):
    """HTTP server with a thread for each connection that has a place."""

    daemon_threads = True
    request_queue_size = BACKLOG

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], token: bytes) -> None:
        self.routes, self.token = routes, token
        self.places = _Places()
        if host.startswith("/"):
            self.address_family = socket.AF_UNIX
            pathlib.Path(host).unlink(missing_ok=True)  # of a process that was killed
            super().__init__(host, _Handler)  # type: ignore[arg-type]
        else:
            super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_UNIX:
            self.socket.bind(self.server_address)
            self.server_name, self.server_port = str(self.server_address), 0
            return
        # HTTPServer.server_bind resolves the host's full name by DNS, which may block for long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: object) -> None:
        if self.places.take(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.places.leave(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        logging.getLogger("medha.ops").debug("connection broke", exc_info=True)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = CONNECTION_TIMEOUT_S
    server_version = "medha"
    sys_version = ""

    def do_GET(self) -> None:
        self._answer("GET")

    def do_HEAD(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: object) -> None:
        logging.getLogger("medha.ops").debug(format, *args)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Reply to a request that is malformed or has another method."""
        self.log_error("code %d, message %s", code, message)
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._answer(self.command)
        else:
            self._send(Reply(f"{HTTPStatus(code).phrase.lower()}\n".encode(), code))

    def _answer(self, method: str) -> None:
        if not self.server.places.answer(self.connection):
            return
        path = self.path.partition("?")[0]
        routes = self.server.routes
        route = routes.get(f"{method} {path}")
        if route is not None:
            reply = self._denial(method) or _guarded(route, path)
        elif any(key.partition(" ")[2] == path for key in routes):
            reply = Reply(b"method not allowed\n", 405)
        else:
            reply = Reply(b"no such page\n", 404)
        self.server.places.write(self.connection)
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.content_type)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _denial(self, method: str) -> Reply | None:
        """Return the reply to a request that may not change anything."""
        if method == "GET":
            return None
        if any(name in self.headers for name in BROWSER_HEADERS):
            return Reply(b"not from a browser\n", 403)
        expected = b"Bearer " + self.server.token
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if self.server.token and not hmac.compare_digest(given, expected):
            return Reply(b"send the header Authorization: Bearer TOKEN\n", 401)
        return None


def join_expositions(texts: Mapping[str, bytes], label: str) -> bytes:
    """Join the metrics of several processes; each series gets its process's key as `label`.

    A metric's HELP and TYPE stand once, as the format demands, with the series of all below.
    """
    heads: dict[str, list[str]] = {}  # by metric: its comments
    series: dict[str, list[str]] = {}
    for key, text in texts.items():
        head: list[str] = []
        for line in text.decode().splitlines():
            if line.startswith("# HELP "):
                head, name = [], line.split(" ", 3)[2]
                heads.setdefault(name, head)
            if line.startswith("#"):
                head.append(line)
            elif line:
                metric, rest = _split_series(line)
                comma = "" if rest.startswith("}") else ","
                series.setdefault(name, []).append(f'{metric}{{{label}="{key}"{comma}{rest}')
    lines = [line for name, head in heads.items() for line in (*head, *series.get(name, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def _split_series(line: str) -> tuple[str, str]:
    """Split a series into its metric's name, and what follows the brace of its labels."""
    name, brace, rest = line.partition("{")
    if brace:
        return name, rest
    name, _, rest = line.partition(" ")
    return name, f"}} {rest}"


def _guarded(route: Route, path: str) -> Reply:
    try:
        return route()
    except Exception:
        logging.getLogger("medha.ops").exception("route %s failed", path)
        return Reply(b"internal error; see the log\n", 500)


def _probe(good: bool) -> Reply:
    return Reply(b"ok\n") if good else Reply(b"not now\n", 503)


def _renamed(sample: Sample, old: str, new: str) -> Sample:
    labels = {("model_name" if k == "model" else k): v for k, v in sample.labels.items()}
    return sample._replace(name=new + sample.name.removeprefix(old), labels=labels)


def _used_share(alias: Metric, pages: Family) -> Family:
    """Return used over total pages per model, from the samples of `medha_kv_pages`."""
    used: dict[str, float] = {}
    total: dict[str, float] = {}
    for sample in pages.samples:
        model = sample.labels["model"]
        total[model] = total.get(model, 0.0) + sample.value
        if sample.labels["state"] == "used":
            used[model] = used.get(model, 0.0) + sample.value
    family = GaugeMetricFamily(alias.name, alias.help, labels=alias.labels)
    for model, count in total.items():
        family.add_metric([model], used.get(model, 0.0) / count if count else 0.0)
    return family
