"""The ops port shows the true state of a process, even while the process is busy."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from medha.adapters.logs import JsonLines, start_logs
from medha.adapters.prometheus import (
    MAX_CONNECTIONS,
    Metrics,
    OpsServer,
    Reply,
    SharedRoute,
    Tick,
    json_reply,
    read_token,
)
from medha.errors import SetupError, SpecError
from medha.messages import ReplicaStatus
from medha.metrics import exported_by

LARGE = 1 << 24  # bytes: more than the buffers of a connection hold
STATUS = ReplicaStatus(
    replica="tiny-0", ready=True, draining=False, generation=1, wanted_groups=2, groups=()
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample as `name{label="value"}` -> value."""
    values = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def broken() -> Reply:
    raise ValueError("secret detail")


@pytest.fixture
def server() -> Iterator[OpsServer]:
    drained = threading.Event()

    def drain() -> Reply:
        drained.set()
        return Reply(status=202)

    routes = {
        "GET /status": lambda: json_reply(STATUS),
        "GET /drained": lambda: json_reply(drained.is_set()),
        "POST /drain": drain,
        "GET /broken": broken,
        "GET /large": lambda: Reply(bytes(LARGE)),
    }
    with closing(
        OpsServer(
            "127.0.0.1",
            0,
            Metrics("controller"),
            alive=lambda: True,
            ready=lambda: False,
            routes=routes,
        )
    ) as ops_server:
        yield ops_server


def get(server: OpsServer, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{server.port}{path}", timeout=30, trust_env=False)


def test_health_and_readiness_are_separate(server: OpsServer) -> None:
    assert get(server, "/healthz").status_code == 200
    assert get(server, "/readyz").status_code == 503


def test_a_route_of_the_process_answers_with_its_value(server: OpsServer) -> None:
    answer = get(server, "/status?verbose=1")
    assert answer.headers["content-type"] == "application/json"
    assert msgspec.json.decode(answer.content, type=ReplicaStatus) == STATUS


def test_a_post_route_acts_and_a_get_does_not(server: OpsServer) -> None:
    url = f"http://127.0.0.1:{server.port}/drain"
    assert get(server, "/drain").status_code == 405
    assert get(server, "/drained").json() is False
    assert httpx.post(url, timeout=30, trust_env=False).status_code == 202
    assert get(server, "/drained").json() is True


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "BREW"])
def test_another_method_is_not_allowed(server: OpsServer, method: str) -> None:
    url = f"http://127.0.0.1:{server.port}"
    answer = httpx.request(method, f"{url}/healthz", timeout=30, trust_env=False)
    assert (answer.status_code, answer.text) == (405, "method not allowed\n")
    assert answer.headers["content-type"] == get(server, "/drain").headers["content-type"]
    assert httpx.request(method, f"{url}/x", timeout=30, trust_env=False).status_code == 404


def test_head_answers_as_get_without_the_body(server: OpsServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    for path in ("/healthz", "/readyz", "/status", "/drain", "/x"):
        page, answer = get(server, path), httpx.head(url + path, timeout=30, trust_env=False)
        assert (answer.status_code, answer.content) == (page.status_code, b"")
        for name in ("content-type", "content-length"):
            assert answer.headers[name] == page.headers[name]
    assert get(server, "/drained").json() is False


def test_a_malformed_request_gets_its_reason_as_plain_text(server: OpsServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"GET /healthz HTTP/9.9\r\n\r\n")
        assert connection.makefile("rb").read().endswith(b"http version not supported\n")


@pytest.mark.parametrize("name", ["Origin", "Sec-Fetch-Site"])
def test_a_browser_changes_nothing(server: OpsServer, name: str) -> None:
    url, headers = f"http://127.0.0.1:{server.port}/drain", {name: "same-origin"}
    assert httpx.post(url, timeout=30, trust_env=False, headers=headers).status_code == 403
    assert get(server, "/drained").json() is False


def test_a_token_must_be_long_enough_to_be_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a" * 15 + "\n")
    with pytest.raises(SetupError, match="has 15 bytes: must have 16 or more"):
        read_token(str(tmp_path / "token"))
    with pytest.raises(SetupError, match="cannot be read"):
        read_token(str(tmp_path / "none"))
    (tmp_path / "token").write_text("a" * 16 + "\n")
    assert read_token(str(tmp_path / "token")) == b"a" * 16


def test_an_unknown_page_is_not_found(server: OpsServer) -> None:
    assert get(server, "/etc/passwd").status_code == 404


def test_a_route_that_fails_answers_500_without_its_reason(
    server: OpsServer, caplog: pytest.LogCaptureFixture
) -> None:
    answer = get(server, "/broken")
    assert answer.status_code == 500 and "secret" not in answer.text
    assert "route /broken failed" in caplog.text
    assert get(server, "/healthz").status_code == 200


@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"\xff\0junk\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n",  # the end is missing
        b"GET /large HTTP/1.1\r\n\r\n",  # never takes the response
    ],
)
def test_a_crowd_of_idle_connections_keeps_out_no_request(server: OpsServer, start: bytes) -> None:
    with contextlib.ExitStack() as crowd:
        for _ in range(4):
            for _ in range(MAX_CONNECTIONS):
                idle = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                idle.sendall(start)
            assert get(server, "/healthz").status_code == 200


class SlowServer:
    """An ops port whose page `/slow` is complete once `end` is set."""

    def __init__(self) -> None:
        self.end, self._entered = threading.Event(), threading.Semaphore(0)
        self.ops = OpsServer(
            "127.0.0.1",
            0,
            Metrics("router"),
            alive=lambda: True,
            ready=lambda: True,
            routes={"GET /slow": self._slow},
        )

    def _slow(self) -> Reply:
        self._entered.release()
        assert self.end.wait(60)
        return Reply(b"slow\n")

    def connect(self, data: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.ops.port), timeout=60)
        connection.sendall(data)
        return connection

    def busy(self, count: int) -> list[socket.socket]:
        """Return connections whose requests are being answered."""
        connections = [self.connect(b"GET /slow HTTP/1.0\r\n\r\n") for _ in range(count)]
        assert all(self._entered.acquire(timeout=60) for _ in connections)
        return connections

    def close(self) -> None:
        self.end.set()
        self.ops.close()


def rest(connection: socket.socket) -> bytes:
    """Return what a connection receives until its end."""
    with connection, connection.makefile("rb") as stream:
        return stream.read()


def test_the_connection_that_waits_longest_for_its_client_makes_room() -> None:
    with closing(SlowServer()) as server:
        busy = server.busy(MAX_CONNECTIONS - 2)
        first, second = server.connect(b""), server.connect(b"")
        assert get(server.ops, "/healthz").status_code == 200
        assert rest(first) == b""
        second.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert rest(second).endswith(b"ok\n")
        server.end.set()
        assert all(rest(connection).endswith(b"slow\n") for connection in busy)


def test_requests_wait_while_those_of_all_places_are_being_answered() -> None:
    with closing(SlowServer()) as server:
        busy = server.busy(MAX_CONNECTIONS)
        further = [server.connect(b"GET /healthz HTTP/1.0\r\n\r\n") for _ in range(200)]
        further[0].settimeout(0.2)
        with pytest.raises(TimeoutError):
            further[0].recv(1)
        further[0].settimeout(60)
        server.end.set()
        assert all(rest(connection).endswith(b"ok\n") for connection in further)
        assert all(rest(connection).endswith(b"slow\n") for connection in busy)


class CountedPage:
    """A page that shows the number of times that it was rendered."""

    def __init__(self) -> None:
        self.renders = 0

    def text(self) -> bytes:
        self.renders += 1
        return b"%d" % self.renders


def test_a_crowd_shares_few_pages_of_metrics_and_none_is_older_than_its_request() -> None:
    page, clients, rounds = CountedPage(), MAX_CONNECTIONS // 2, 8
    older = threading.Event()

    def scrape(server: OpsServer) -> None:
        for _ in range(rounds):
            before = page.renders
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
                shown = connection.makefile("rb").read().rpartition(b"\n")[2]
            if int(shown) <= before:
                older.set()

    with closing(OpsServer("127.0.0.1", 0, page, alive=lambda: True, ready=lambda: True)) as server:
        threads = [threading.Thread(target=scrape, args=(server,)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not older.is_set()
    assert rounds <= page.renders < clients * rounds / 2


def test_a_shared_route_that_fails_replies_again() -> None:
    replies = iter([Reply(b"first"), None, Reply(b"second")])

    def route() -> Reply:
        if (reply := next(replies)) is None:
            raise ValueError("no reply")
        return reply

    shared = SharedRoute(route)
    assert shared().body == b"first"
    with pytest.raises(ValueError, match="no reply"):
        shared()
    assert shared().body == b"second"


def test_a_taken_port_is_a_setup_error_that_names_it(server: OpsServer) -> None:
    with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{server.port} cannot be opened"):
        OpsServer(
            "127.0.0.1", server.port, Metrics("router"), alive=lambda: True, ready=lambda: True
        )


def test_a_loop_that_stopped_turning_is_not_alive() -> None:
    assert Tick(stale_s=60).alive()
    stopped = Tick(stale_s=0.0)
    assert not stopped.alive()


def test_the_metrics_page_shows_what_was_measured() -> None:
    metrics = Metrics("router")
    metrics.observe("medha_request_ttft_seconds", 0.2, "m", "interactive", "1k")
    metrics.add("medha_promises_total", 2, "m", "interactive", "given")
    metrics.set("medha_queue_requests", 7, "m")
    values = samples(metrics)
    labels = 'class="interactive",length="1k",model="m"'
    assert values[f"medha_request_ttft_seconds_count{{{labels}}}"] == 1
    assert values['medha_promises_total{class="interactive",model="m",outcome="given"}'] == 2
    assert values['medha_queue_requests{model="m"}'] == 7


def test_aliases_repeat_the_values_under_the_gateways_names() -> None:
    metrics = Metrics("router")
    metrics.set("medha_queue_requests", 7, "m")
    metrics.observe("medha_request_ttft_seconds", 0.2, "m", "c", "1k")
    values = samples(metrics)
    assert values['vllm:num_requests_waiting{model_name="m"}'] == 7
    assert (
        values['vllm:time_to_first_token_seconds_count{class="c",length="1k",model_name="m"}'] == 1
    )
    assert (
        values[
            'vllm:time_to_first_token_seconds_bucket{class="c",le="0.2",length="1k",model_name="m"}'
        ]
        == 1
    )


def test_the_used_share_of_pages_is_used_over_all() -> None:
    metrics = Metrics("controller")
    for group, (free, used, cached) in enumerate([(10, 20, 10), (40, 10, 10)]):
        for state, pages in zip(("free", "used", "cached"), (free, used, cached), strict=True):
            metrics.set("medha_kv_pages", pages, "m", str(group), state)
    assert samples(metrics)['vllm:kv_cache_usage_perc{model_name="m"}'] == pytest.approx(0.3)


@pytest.mark.parametrize("exporter", ["router", "controller", "operator"])
def test_every_metric_of_a_process_can_be_set_and_exported(exporter: str) -> None:
    metrics = Metrics(exporter)  # type: ignore[arg-type]
    for metric in exported_by(exporter):  # type: ignore[arg-type]
        if not metric.alias_of:
            act = {"counter": metrics.add, "gauge": metrics.set, "histogram": metrics.observe}
            act[metric.kind](metric.name, 1.0, *("x" for _ in metric.labels))
    shown = metrics.text().decode()
    for metric in exported_by(exporter):  # type: ignore[arg-type]
        assert f"# HELP {metric.name}" in shown


def test_two_processes_metrics_share_nothing() -> None:
    first, second = Metrics("router"), Metrics("router")
    first.set("medha_queue_requests", 7, "m")
    assert 'medha_queue_requests{model="m"}' not in samples(second)


def test_a_dropped_gauge_is_no_longer_exported() -> None:
    metrics = Metrics("operator")
    for name, condition in (("a", "Ready"), ("a", "Placed"), ("b", "Ready")):
        metrics.set("medha_replica_condition", 1, "default", name, condition)
    metrics.drop("medha_replica_condition", "default", "a")
    metrics.drop("medha_replica_condition", "default", "never-seen")
    shown = [sample for sample in samples(metrics) if sample.startswith("medha_replica_condition")]
    assert shown == ['medha_replica_condition{condition="Ready",name="b",namespace="default"}']
    metrics.drop("medha_replica_condition")
    assert not any(sample.startswith("medha_replica_condition") for sample in samples(metrics))


def test_a_dropped_counter_starts_again_from_zero() -> None:
    metrics = Metrics("operator")
    for name in ("a", "b"):
        metrics.add("medha_group_restarts_total", 3, "default", name)
    metrics.drop("medha_group_restarts_total", "default", "a")
    shown = [sample for sample in samples(metrics) if "restarts_total" in sample]
    assert shown == ['medha_group_restarts_total{name="b",namespace="default"}']
    metrics.add("medha_group_restarts_total", 1, "default", "a")
    page = metrics.text().decode()
    assert 'medha_group_restarts_total{name="a",namespace="default"} 1.0' in page


def test_a_metric_that_is_not_exported_here_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        Metrics("router").add("medha_kv_transfer_bytes_total", 1, "m")


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The stream of a process's log; restores the test's own logging."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    start_logs("tiny-0-controller", "info", stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_log_line_is_one_json_object_with_its_fields(log: io.StringIO) -> None:
    logger = logging.getLogger("medha.controller")
    logger.info("group %d joined\nat once", 1, extra={"fields": {"request": "r-1", "level": "x"}})
    logger.debug("not shown")
    line, rest = log.getvalue().split("\n", 1)
    entry = json.loads(line)
    assert rest == ""
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "info",
        "process": "tiny-0-controller",
        "logger": "medha.controller",
        "message": "group 1 joined\nat once",
        "request": "r-1",
    }


def test_a_logged_failure_carries_its_traceback(log: io.StringIO) -> None:
    try:
        int("one")
    except ValueError:
        logging.getLogger("medha.x").exception("failed")
    assert "Traceback" in json.loads(log.getvalue())["error"]


def test_a_log_call_with_wrong_arguments_still_logs() -> None:
    record = logging.LogRecord("medha.x", logging.INFO, "x.py", 1, "%d %s", ("one",), None)
    assert json.loads(JsonLines("p").format(record))["message"] == "%d %s ('one',)"


def test_an_unknown_log_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"log_level is loud: .*use one of debug, info"):
        start_logs("x", "loud", io.StringIO())


def test_a_scrape_in_slices_is_the_text_of_the_library() -> None:
    metrics, exported = Metrics("router"), exported_by("router")
    for number in range(200):
        for metric in exported:
            labels = [f'{name} {number} \\ "' for name in metric.labels]
            if metric.alias_of or not labels:
                continue
            if metric.kind == "histogram":
                metrics.observe(metric.name, number / 7.0, *labels)
            elif metric.kind == "counter":
                metrics.add(metric.name, number, *labels)
            else:
                metrics.set(metric.name, number, *labels)

    def lines(text: bytes) -> list[bytes]:
        return [line for line in text.splitlines() if b"process_" not in line]

    shown = lines(metrics.text())
    assert shown == lines(generate_latest(metrics.registry)) and len(shown) > 20_000
