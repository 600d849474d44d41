"""Owners: tenants, or addresses without API keys, share the queue and the processes fairly."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import socket
from typing import Any

import msgspec
import pytest
from tests.router.conftest import Running

from medha.errors import ProtocolError, SetupError
from medha.fleet.replica_estimate import is_usable
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


def write_keys(folder: pathlib.Path, *names: str) -> str:
    """Write a file in which each tenant's key is its name."""
    keys = folder / "keys"
    lines = [f"{name}:{hashlib.sha256(name.encode()).hexdigest()}\n" for name in names]
    keys.write_text("".join(lines))
    return str(keys)


class Clients(contextlib.ExitStack):
    """Clients that send one completion each and keep their connection."""

    def __init__(self, running: Running, body: bytes) -> None:
        super().__init__()
        self._running, self._body = running, body

    def ask(self, name: str) -> socket.socket:
        link = socket.create_connection(self._running.router.public.getsockname(), timeout=30)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: {name}\r\n"
        length = f"content-length: {len(self._body)}\r\n\r\n"
        self.enter_context(link).sendall((head + length).encode() + self._body)
        return link

    def refused(self, name: str) -> bytes:
        """Return the answer to a request, which must be 503."""
        answer = self.ask(name).recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503 ")
        return answer


def test_one_tenant_cannot_fill_the_queue(
    running_with: Any, eventually: Any, tmp_path: pathlib.Path
) -> None:
    keys = write_keys(tmp_path, "alice", "bob", "carol")
    running: Running = running_with(max_queue=64, api_keys=keys)
    running.open().granting = False
    service = running.router.router.service
    body = json.dumps({"model": "tiny", "prompt": ["a"] * 16, "max_tokens": 1}).encode()
    full = b"of one tenant a quarter"
    with Clients(running, body) as clients:

        def ask(name: str, waiting: int) -> None:
            clients.ask(name)
            eventually(lambda: service.live == waiting)

        for waiting in range(1, 5):
            ask("alice", waiting)  # alone, it may have all
        assert full in clients.refused("alice")
        ask("bob", 5)
        assert full in clients.refused("bob") and full in clients.refused("alice")
        ask("carol", 6)
    eventually(lambda: service.live == 0)


def test_one_tenant_cannot_hold_all_requests_that_wait_for_a_replica(
    running_with: Any, eventually: Any, tmp_path: pathlib.Path
) -> None:
    running: Running = running_with(max_queue=8, api_keys=write_keys(tmp_path, "alice", "bob"))
    service = running.router.router.service
    with Clients(running, b'{"model":"tiny","prompt":"a"}') as clients:
        for waiting, name in enumerate(["alice"] * 8 + ["bob"] * 2):  # alice counts as 2 for bob
            if waiting == 8:
                clients.refused("alice")
            clients.ask(name)
            eventually(lambda waiting=waiting: service.live == waiting + 1)
    eventually(lambda: service.live == 0)


def test_a_request_of_more_outputs_than_may_wait_is_served_by_an_idle_router(
    running_with: Any,
) -> None:
    running: Running = running_with(max_queue=4)
    running.open()
    body = {"model": "tiny", "prompt": ["say a"] * 16, "max_tokens": 1}
    assert len(running.http.post("/v1/completions", json=body).json()["choices"]) == 16


def test_a_replica_with_an_impossible_load_takes_nothing_until_it_has_another(
    running_with: Any, eventually: Any
) -> None:
    running: Running = running_with()
    controller = running.open()
    possible = controller.load
    controller.load = msgspec.structs.replace(possible, share=0.0)
    body = {"model": "tiny", "prompt": "say a", "max_tokens": 1}
    eventually(lambda: not running.ops.get("/debug/queue").json()["tiny"]["open"])
    controller.load = possible
    assert running.http.post("/v1/completions", json=body).status_code == 200


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
        {"margins": ((),), "lead_s": (float("inf"),)},
        {"drain_s_per_s": float("nan")},
        {"decode_capacity_s": 1e300},
        {"decode_room_s": float("nan")},
        {"decode_parts": ((1.0, float("nan")),)},
        {"pending_bands": ((1.0, float("inf")),)},
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
