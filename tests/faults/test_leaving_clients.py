"""Clients that disconnect from a real fleet at any moment leave nothing behind."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.support.medha_up import Up, complete, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

RESOURCE = """
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {name: tiny}
spec:
  model: {name: tiny, source: {hostPath: {path: model}}, maxContextTokens: 2048}
  device: {kind: Cpu}
  parallelism: {spp: 2}
  slo: {default: {ttft: {floor: 2s, multiplier: "10"}, tpot: 5s, whenInfeasible: Relegate}}
  engine: {pageTokens: 16, kvPages: 512, standbyRanks: Disabled}
"""
SMALL = TinyModel(
    layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, max_tokens=2048
)
REQUESTS, LEAVING_SHARE, AT_ONCE = 150, 0.3, 24
MAX_STAY_S = 0.6
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: medha\r\ncontent-type: application/json\r\n"
    "content-length: {}\r\n\r\n"
)
AT_REST = {
    "medha_queue_requests": 0.0,
    "medha_queue_work_seconds": 0.0,
    "medha_running_requests": 0.0,
    "medha_kv_pages": 0.0,  # used: neither free nor only cached
}


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    write_checkpoint(tmp_path / "model", SMALL)
    (tmp_path / "tiny.yaml").write_text(RESOURCE)
    running = Up(tmp_path / "tiny.yaml")
    try:
        yield running
    finally:
        running.kill()


def prompt(dice: random.Random) -> list[int]:
    """Draw a prompt; some share their first pages, and lengths are not whole pages."""
    shared = [dice.randrange(3)] * dice.choice((0, 64, 200))
    return [10 + token for token in shared] + [
        dice.randrange(20, 500) for _ in range(dice.randrange(1, 700))
    ]


def leave(port: int, body: bytes, part: float, stay_s: float) -> bool:
    """Send a part of a request, read for a while, and disconnect."""
    request = HEAD.format(len(body)).encode() + body
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(request[: int(len(request) * part)])
        client.settimeout(max(stay_s, 0.001))
        until_s = time.monotonic() + stay_s
        try:
            while time.monotonic() < until_s and client.recv(4096):
                pass
        except TimeoutError:
            pass
    return True


def play(up: Up, number: int) -> bool:
    """Make the request of a number, always the same; return True if it ended properly."""
    dice = random.Random(number)
    tokens, output = prompt(dice), dice.randrange(1, 32)
    if dice.random() >= LEAVING_SHARE:
        return complete(up.url, tokens, output).whole
    body = {
        "model": "tiny",
        "prompt": tokens,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": dice.random() < 0.5,
    }
    part = dice.choice((0.5, 1.0, 1.0, 1.0))
    return leave(up.port, json.dumps(body).encode(), part, dice.uniform(0.0, MAX_STAY_S))


def levels(url: str) -> dict[str, float]:
    """Return the current values of the metrics of AT_REST."""
    page = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = re.findall(r"^(\w+)\{([^}]*)\} (\S+)$", page, flags=re.MULTILINE)
    return {
        name: float(value)
        for name, labels, value in samples
        if name in AT_REST and 'state="free"' not in labels
    }


@pytest.mark.timeout(900)
def test_after_clients_disconnect_at_any_moment_pages_are_free_and_no_work_is_pending(
    up: Up,
) -> None:
    until(up.serves, 120.0)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        assert all(pool.map(lambda number: play(up, number), range(REQUESTS)))
    controller, router = up.controller_url(), f"http://127.0.0.1:{up.ops_port}"
    until(lambda: levels(controller) == AT_REST)
    until(lambda: not any(levels(router).values()))
    assert up.ask() == up.ask()
