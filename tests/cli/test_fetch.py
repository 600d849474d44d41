"""`medha fetch` from a local web server: whole, in shards, interrupted, and missing."""

from __future__ import annotations

import http.server
import json
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

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/models/tiny"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
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


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        running.files = {
            "config.json": b"{}",
            "tokenizer.json": b"{}",
            "model.safetensors": b"w" * 10_000,
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


def test_a_checkpoint_in_shards_is_fetched_by_its_index(server: Server, tmp_path: Path) -> None:
    del server.files["model.safetensors"]
    shards = {"model-1.safetensors": b"one", "model-2.safetensors": b"two"}
    weights = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}
    index = json.dumps({"metadata": {}, "weight_map": weights}).encode()
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
    fetch_files(server, tmp_path)
    assert {name for name, _ in server.requested}.isdisjoint(server.files)


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
