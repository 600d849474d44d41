"""Owners: tenants, or addresses without API keys, share the queue and the processes fairly."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
from typing import Any

import msgspec
import pytest
from tests.router.conftest import Running

from medha.errors import ProtocolError, SetupError
from medha.fleet.placement import is_usable
from medha.messages import Codec, Head, Load, ReplicaMessage, Tokens
from medha_router import auth
from medha_router.auth import ApiKeys, _anybody, _by_address, read_keys

DIGEST = "0" * 64


@pytest.mark.parametrize(
    ("host", "owner"),
    [
        ("10.1.2.3", "address:10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "address:2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "address:2001:db8:1:2::/64"),
        ("::ffff:10.1.2.3", "address:10.1.2.3"),
    ],
)
def test_all_addresses_of_a_client_are_one_owner(host: str, owner: str) -> None:
    scope: Any = {"client": (host, 1)}
    client = _by_address(scope)
    assert (client.owner, client.cache_owner) == (owner, f"address:{host}")
    assert (_anybody(scope).owner, _anybody(scope).cache_owner) == (owner, "")


def test_one_owner_cannot_fill_the_queue(running_with: Any, eventually: Any) -> None:
    running: Running = running_with(max_queue=64)
    running.open().granting = False
    service = running.router.router.service
    body = json.dumps({"model": "tiny", "prompt": ["a"] * 16, "max_tokens": 1}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
    with contextlib.ExitStack() as links:

        def ask(address: str) -> socket.socket:
            to = running.router.public.getsockname()
            link = socket.create_connection(to, timeout=30, source_address=(address, 0))
            links.enter_context(link).sendall(head + body)
            return link

        for number in range(1, 4):
            ask("127.0.0.1")
            eventually(lambda number=number: service.live == number)
        refused = ask("127.0.0.1").recv(1 << 16)
        assert refused.startswith(b"HTTP/1.1 503 ") and b"of one client a quarter" in refused
        ask("127.0.0.2")
        eventually(lambda: service.live == 4)
        assert ask("127.0.0.3").recv(1 << 16).startswith(b"HTTP/1.1 503 ")  # it is full
    eventually(lambda: service.live == 0)
    assert not service._live_by


@pytest.mark.parametrize("weight", ["0.0001", "1e17"])
def test_weights_of_keys_are_bounded(tmp_path: pathlib.Path, weight: str) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{DIGEST} weight={weight}\n")
    with pytest.raises(SetupError, match=r"line 1 of .* weight is .*: must be 0.001 to 1000"):
        read_keys(file)


def test_keys_that_could_not_be_read_once_are_read_again(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{DIGEST}\n")
    keys = ApiKeys(file)
    file.write_text("# revoked\n")

    def fails(path: pathlib.Path) -> Any:
        raise SetupError("too many open files") from OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(auth, "read_keys", fails)
        keys.refresh()
    assert len(keys._clients) == 1
    keys.refresh()
    assert not keys._clients


@pytest.mark.parametrize(
    "change",
    [
        {"share": 0.0},
        {"share": -1.0},
        {"share": float("nan")},
        {"page_tokens": 0},
        {"budget_s": 0.0},
        {"pending_s": float("nan")},
        {"ahead_s": float("-inf")},
        {"margins": ((), ()), "lead_s": (0.0,)},
    ],
)
def test_an_impossible_load_is_recognised(change: dict[str, Any]) -> None:
    assert is_usable(Load()) and not is_usable(msgspec.structs.replace(Load(), **change))


def test_messages_that_would_end_a_peer_do_not_decode() -> None:
    heads: Codec[Head] = Codec(Head)
    head = Head("a", 0.0, 1.0, 0.1, True)
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        wrong = heads.encode(msgspec.structs.replace(head, weight=weight))
        with pytest.raises(ProtocolError):
            heads.decode(wrong)
    replicas: Codec[ReplicaMessage] = Codec(ReplicaMessage)
    for token in (-1, 3_000_000_000):
        with pytest.raises(ProtocolError):
            replicas.decode(replicas.encode(Tokens("a", 0, (token,))))
