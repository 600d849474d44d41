"""`medha fetch` from a local web server: whole, in shards, interrupted, and missing."""

from __future__ import annotations

import http.server
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from medha.cli.fetch import fetch
from medha.errors import CheckpointError


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; cuts each file in `broken` short that many times."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.broken: dict[str, int] = {}
        self.requested: list[tuple[str, str]] = []
        self.queries: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/models/tiny"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        self.server.queries.add(query)
        name = path.rpartition("/")[2]
        wanted = self.headers.get("Range", "")
        self.server.requested.append((name, wanted))
        body = self.server.files.get(name)
        if body is None:
            self.send_error(404)
            return
        start = int(wanted[6:-1]) if wanted else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.server.broken.get(name, 0):
            self.server.broken[name] -= 1
            self.wfile.write(body[start : start + (len(body) - start) // 2])
            self.close_connection = True
            return
        self.wfile.write(body[start:])

    def log_message(self, format: str, *args: object) -> None:
        pass


def weights(size: int) -> bytes:
    """Return a safetensors file of `size` bytes, with one tensor."""
    data = size - 100
    tensor = {"dtype": "U8", "shape": [data], "data_offsets": [0, data]}
    header = json.dumps({"w": tensor}).encode().ljust(92)
    return len(header).to_bytes(8, "little") + header + b"w" * data


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        running.files = {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "model.safetensors": weights(10_000),
        }
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join(20)


def fetch_files(
    server: Server, folder: Path, pauses: list[float] | None = None
) -> dict[str, bytes]:
    fetch(server.url, folder, lambda _: None, (pauses if pauses is not None else []).append)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_in_one_file_is_fetched(server: Server, tmp_path: Path) -> None:
    server.files["tokenizer_config.json"] = b'{"a": 1}'
    assert fetch_files(server, tmp_path / "new" / "model") == server.files


def test_an_adapter_is_fetched_without_a_model(server: Server, tmp_path: Path) -> None:
    server.files = {"adapter_config.json": b"{}", "adapter_model.safetensors": weights(199)}
    fetch(server.url, tmp_path, lambda _: None, adapter=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == server.files
    del server.files["adapter_config.json"]
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be fetched .HTTP 404"):
        fetch(server.url, tmp_path / "other", lambda _: None, adapter=True)


def test_a_checkpoint_in_shards_is_fetched_by_its_index(server: Server, tmp_path: Path) -> None:
    del server.files["model.safetensors"]
    shards = {"model-1.safetensors": weights(201), "model-2.safetensors": weights(202)}
    files = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": files}).encode()
    server.files |= shards | {"model.safetensors.index.json": index}
    assert fetch_files(server, tmp_path) == server.files
    assert [name for name, _ in server.requested].count("model-1.safetensors") == 1


def test_an_interrupted_transfer_continues_where_it_ended(server: Server, tmp_path: Path) -> None:
    server.broken = {"model.safetensors": 2}
    pauses: list[float] = []
    assert fetch_files(server, tmp_path, pauses) == server.files
    ranges = [wanted for name, wanted in server.requested if name == "model.safetensors"]
    assert ranges == ["", "bytes=5000-", "bytes=7500-"]
    assert pauses == [0.5, 1.0]


def test_existing_files_are_not_fetched_again(server: Server, tmp_path: Path) -> None:
    fetch_files(server, tmp_path)
    server.requested.clear()
    lines: list[str] = []
    fetch(server.url, tmp_path, lines.append)
    assert {name for name, _ in server.requested}.isdisjoint(server.files)
    assert {line.partition(": kept")[0] for line in lines} == set(server.files)


@pytest.mark.parametrize(
    ("name", "data", "named"),
    [
        ("model.safetensors", weights(10_000)[:-1], "is not a sound safetensors file"),
        ("model.safetensors", b"<html>log in</html>", "is not a sound safetensors file"),
        ("config.json", b"<html>log in</html>", "is not JSON"),
        ("tokenizer_config.json", b"[]", "holds a list, not an object"),
        ("model.safetensors.index.json", b"{", "is not JSON"),
    ],
)
def test_a_file_that_is_something_else_is_named_and_not_kept(
    name: str, data: bytes, named: str, server: Server, tmp_path: Path
) -> None:
    sound = server.files.get(name)
    server.files[name] = data
    with pytest.raises(CheckpointError, match=f"^http.*/{name} {named}.*: correct the address"):
        fetch_files(server, tmp_path)
    del server.files[name]
    server.files |= {name: sound} if sound else {}
    assert fetch_files(server, tmp_path) == server.files


def test_a_missing_checkpoint_fails_at_once_with_its_address(
    server: Server, tmp_path: Path
) -> None:
    server.files = {}
    pauses: list[float] = []
    with pytest.raises(CheckpointError, match=r"tiny/config\.json cannot be fetched \(HTTP 404\)"):
        fetch_files(server, tmp_path, pauses)
    assert pauses == []


def test_an_unreachable_server_is_retried_and_reported(tmp_path: Path) -> None:
    with Server() as gone:
        url = gone.url
    pauses: list[float] = []
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        fetch(url, tmp_path, lambda _: None, pauses.append)
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_an_index_cannot_name_files_elsewhere(server: Server, tmp_path: Path) -> None:
    index = json.dumps({"weight_map": {"a": "../../etc/x.safetensors"}}).encode()
    server.files["model.safetensors.index.json"] = index
    with pytest.raises(CheckpointError, match=r"must be a \*\.safetensors in the same"):
        fetch_files(server, tmp_path)


@pytest.mark.parametrize(
    "uri", ["model", "/models/x", "file:///models/x", "hf://a/b", "http://", ""]
)
def test_another_kind_of_address_is_refused_before_any_attempt(tmp_path: Path, uri: str) -> None:
    pauses: list[float] = []
    with pytest.raises(CheckpointError, match=f"URI is {uri}: must be an http or https address"):
        fetch(uri, tmp_path / "new", lambda _: None, pauses.append)
    assert pauses == [] and not (tmp_path / "new").exists()


def test_a_query_goes_with_each_file_and_into_no_message(server: Server, tmp_path: Path) -> None:
    uri = f"{server.url}/?token=secret"
    fetch(uri, tmp_path, lambda _: None)
    assert {path.name for path in tmp_path.iterdir()} == set(server.files)
    assert server.queries == {"token=secret"}
    server.files = {}
    with pytest.raises(CheckpointError, match=r"/models/tiny/config\.json cannot") as caught:
        fetch(uri.replace("//", "//me:secret@", 1), tmp_path / "other", lambda _: None)
    assert "secret" not in str(caught.value)


def test_a_target_that_is_no_folder_is_named(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CheckpointError, match=f"FOLDER is {file}: must be a folder"):
        fetch(server.url, file, lambda _: None)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl writes the certificate")
def test_a_checkpoint_is_fetched_over_https(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=local"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    command = [*request, *names, "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    fetch(server.url.replace("http:", "https:"), tmp_path / "model", lambda _: None, fail)
    names_there = {path.name for path in (tmp_path / "model").iterdir()}
    assert names_there == set(server.files)


def fail(pause_s: float) -> None:
    raise AssertionError(f"an attempt failed; the next comes after {pause_s} s")
