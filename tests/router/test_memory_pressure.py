"""The last line of defence: a router near its memory limit refuses bodies, and streams go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pathlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import httpx
import pytest
from tests.router.conftest import MODEL, Controller, wait_until

from medha.adapters.memory import MemoryGate
from medha.config import RouterConfig, RouterModel, RouterProcess, render
from medha_router import app
from medha_router.app import memory_limit_bytes

LIMIT_BYTES, HELD_BYTES, UPLOADS = 480 << 20, 56 << 20, 6
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


@pytest.fixture
def limited(tmp_path: pathlib.Path) -> Iterator[dict[str, str]]:
    """A router process with a limit of 480 MiB; the fields of its first log line."""
    config = RouterConfig(
        port=0,
        ops_port=0,
        fleet_bind="tcp://127.0.0.1:0",
        models=(RouterModel(name=MODEL, max_context_tokens=2048),),
        memory_limit_bytes=LIMIT_BYTES,
    )
    path = tmp_path / "router.json"
    path.write_bytes(render(config))
    with subprocess.Popen(
        [sys.executable, "-m", "medha_router", "--config", str(path)], stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stderr is not None
            yield json.loads(process.stderr.readline())
        finally:
            process.kill()


def begin_upload(url: str) -> socket.socket:
    """Send most of a large body, and not its end."""
    address = httpx.URL(url)
    upload = socket.create_connection((address.host, address.port))
    upload.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % (HELD_BYTES + 1)
    )
    upload.sendall(bytes(HELD_BYTES))
    return upload


def reason(response: httpx.Response) -> str:
    return str(response.headers.get("x-medha-dropped-reason", ""))


def test_a_router_short_of_memory_refuses_bodies_until_it_has_some_again(
    limited: dict[str, str], dial: Callable[[str], Controller]
) -> None:
    controller = dial(limited["fleet"])
    with (
        httpx.Client(base_url=limited["url"], timeout=20) as client,
        contextlib.ExitStack() as held,
    ):

        def post() -> httpx.Response:
            return client.post("/v1/chat/completions", json=CHAT)

        wait_until(lambda: post().status_code == 200, 20.0)
        controller.emitting.clear()
        stream = held.enter_context(
            client.stream(
                "POST",
                "/v1/completions",
                json={"model": MODEL, "prompt": "a b c", "stream": True, "max_tokens": 8},
            )
        )
        wait_until(lambda: controller.running)
        uploads = [held.enter_context(begin_upload(limited["url"])) for _ in range(UPLOADS)]
        controller.emitting.set()
        wait_until(lambda: reason(post()) == "memory", 20.0)
        refused = post()
        assert (refused.status_code, reason(refused)) == (503, "memory")
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert refused.headers["x-medha-request-id"]
        refused = client.post("/v1/messages", json=CHAT)
        assert (refused.status_code, refused.json()["type"]) == (503, "error")
        assert client.get("/v1/models").status_code == 200  # it has no body
        events = [line for line in stream.iter_lines() if line]
        assert events[-1] == "data: [DONE]" and not any("error" in event for event in events)
        for upload in uploads:
            upload.close()
        wait_until(lambda: post().status_code == 200, 20.0)


def test_processes_of_a_router_have_equal_parts_of_its_memory() -> None:
    config = RouterConfig(fleet_bind="tcp://127.0.0.1:0", memory_limit_bytes=900)
    assert memory_limit_bytes(config) == 900
    place = RouterProcess(index=1, fleet_ports=(1, 2, 3), ops_socket="", salt_secret="")
    shared = RouterConfig(fleet_bind="tcp://127.0.0.1:0", memory_limit_bytes=900, process=place)
    assert memory_limit_bytes(shared) == 300


def test_memory_is_measured_again_after_a_lack_of_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, outcomes = MemoryGate(100, refuses=True), iter([None, None, 90, 10])

    def measured() -> int:
        used_bytes = next(outcomes, 10)
        if used_bytes is None:
            raise OSError(24, "Too many open files")
        return used_bytes

    monkeypatch.setattr(app, "resident_bytes", measured)
    monkeypatch.setattr(app, "MEMORY_S", 0.0)

    async def watch() -> None:
        watching = asyncio.ensure_future(app._watch(gate, lambda: True))
        while gate.refuses and not watching.done():
            await asyncio.sleep(0)
        watching.cancel()

    asyncio.run(watch())
    assert not gate.refuses and caplog.text.count("memory is not measured") == 1
