"""Tenants at the front door: limits over all routers, rights, and caches apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from medha.adapters.sockets import write_keys
from medha.config import Curve
from medha.errors import SetupError
from medha_router.auth import ApiKeys, Client

Routers = Callable[..., Any]
Eventually = Callable[..., None]
BODY = {"model": "tiny", "prompt": "say abc", "max_tokens": 8}
LONG = {"model": "tiny", "prompt": "say " + "a" * 900, "max_tokens": 1000, "stream": True}


def line(name: str, key: str, options: str = "") -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()} {options}\n"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(running: Any, key: str, **headers: str) -> httpx.Response:
    response: httpx.Response = running.http.post(
        "/v1/completions", json=BODY, headers=bearer(key) | headers
    )
    return response


@pytest.fixture
def keys_of(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Write a key file of these lines; return its path."""

    def write(*lines: str) -> str:
        fresh = tmp_path / "fresh"
        fresh.write_text("".join(lines))
        fresh.replace(tmp_path / "keys")
        return str(tmp_path / "keys")

    return write


# --- the file -------------------------------------------------------------------------------------


def test_options_of_a_key_are_its_limits_and_rights(keys_of: Callable[..., str]) -> None:
    options = (
        "requests_per_minute=60 tokens_per_minute=2e6 concurrent_s=30  weight=2.5 "
        "classes=patient,default least_ttft_ms=250 least_tpot_ms=20 # bob's"
    )
    keys = ApiKeys(pathlib.Path(keys_of(line("alice", "a"), line("bob", "b", options))))
    bob, alice = keys.client(b"b"), keys.client(b"a")
    assert bob is not None and alice is not None
    assert (bob.limits.requests_per_minute, bob.limits.tokens_per_minute) == (60.0, 2e6)
    assert (bob.limits.concurrent_s, bob.weight) == (30.0, 2.5)
    assert bob.classes == ("patient", "default")
    assert (bob.least_ttft_s, bob.least_tpot_s) == (0.25, 0.02)
    assert (alice.classes, alice.weight, alice.least_ttft_s) == ((), 1.0, 0.0)
    assert alice.limits.requests_per_minute == float("inf")


@pytest.mark.parametrize(
    "options, message",
    [
        ("weight=0", "weight must be a number above 0"),
        ("weight=nan", "weight must be a number above 0"),
        ("tokens_per_minute=inf", "tokens_per_minute must be a number above 0"),
        ("requests_per_minute=ten", "requests_per_minute must be a number above 0"),
        ("classes=", "classes must be names, separated by commas"),
        ("classes=a,,b", "classes must be names"),
        ("sk-my-secret", "unknown option after the key: must be classes=... or one of requests_p"),
        ("sk-my-secret=1", "unknown option"),
    ],
)
def test_an_invalid_option_is_reported_and_never_quoted(
    keys_of: Callable[..., str], options: str, message: str
) -> None:
    with pytest.raises(SetupError) as caught:
        ApiKeys(pathlib.Path(keys_of(line("alice", "a"), line("bob", "b", options))))
    assert message in str(caught.value) and "line 2 of " in str(caught.value)
    assert "sk-my" not in str(caught.value)


def test_a_key_among_a_hundred_thousand_is_found_by_as_many_calls_as_a_single_one(
    keys_of: Callable[..., str],
) -> None:
    few, many = (
        ApiKeys(pathlib.Path(keys_of(*(line(f"t{i}", str(i), "weight=2") for i in range(count)))))
        for count in (1, 100_000)
    )
    client, calls = found(few, 0)
    assert client is not None
    for index in range(0, 100_000, 1000):
        client, took = found(many, index)
        assert client is not None and client.tenant == f"t{index}" and took == calls
    assert found(many, 100_000) == (None, calls)


def found(keys: ApiKeys, index: int) -> tuple[Client | None, int]:
    """Return the client of a key, and the functions called to find it, those in C too."""
    key, seen = str(index).encode(), list[str]()
    sys.setprofile(lambda frame, event, argument: seen.append(event))
    try:
        client = keys.client(key)
    finally:
        sys.setprofile(None)
    return client, sum(event.endswith("call") for event in seen)


def test_the_loop_turns_while_a_long_file_is_read(keys_of: Callable[..., str]) -> None:
    keys = ApiKeys(pathlib.Path(keys_of(line("alice", "a-key"))))

    async def scene() -> int:
        turns = 0
        keys_of(*(line(f"t{index}", str(index)) for index in range(20_000)))
        keys.refresh()
        reading = asyncio.ensure_future(asyncio.to_thread(keys.refresh))
        while not reading.done():
            turns += 1
            assert keys.client(b"a-key") or keys.client(b"19999")  # never without keys
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scene()) > 100
    assert keys.client(b"a-key") is None


# --- rights ---------------------------------------------------------------------------------------


def test_a_key_has_its_own_default_class_and_asks_for_no_other(
    running_with: Routers, keys_of: Callable[..., str]
) -> None:
    rights = "classes=patient,default least_ttft_ms=500 least_tpot_ms=100 weight=3"
    running = running_with(
        api_keys=keys_of(line("bob", "b-key", rights), line("alice", "a-key")),
        class_headers={"x-tier": {"gold": "default", "free": "eager"}},
    )
    controller = running.open()
    assert complete(running, "b-key").headers["x-medha-class"] == "patient"
    assert controller.seen[-1].weight == 3.0
    answer = complete(running, "b-key", **{"x-medha-class": "default"})
    assert answer.headers["x-medha-class"] == "default"
    assert complete(running, "b-key", **{"x-tier": "gold"}).headers["x-medha-class"] == "default"
    assert complete(running, "b-key", **{"x-tier": "tin"}).headers["x-medha-class"] == "patient"
    for name, value, param in (
        ("x-medha-class", "eager", "x-medha-class"),
        ("x-tier", "free", "x-medha-class"),
        ("x-slo-ttft-ms", "499", "x-medha-slo-ttft-ms"),
        ("x-medha-slo-tpot-ms", "99", "x-medha-slo-tpot-ms"),
    ):
        refused = complete(running, "b-key", **{name: value})
        assert refused.status_code == 403, name
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("not_allowed", "permission_error")
        assert error["param"] == param
    allowed = {"x-slo-ttft-ms": "20000", "x-medha-slo-tpot-ms": "5000"}
    assert complete(running, "b-key", **allowed).status_code == 200
    assert complete(running, "a-key", **{"x-tier": "free"}).json()["error"]["code"] != "not_allowed"


# --- limits ---------------------------------------------------------------------------------------


def test_limits_hold_over_all_routers(
    running_with: Routers, keys_of: Callable[..., str], eventually: Eventually
) -> None:
    file = keys_of(line("alice", "a-key", "requests_per_minute=4"), line("bob", "b-key"))
    first, second = running_with(api_keys=file), running_with(api_keys=file)
    controller, other = first.open(), second.open()
    for _ in range(4):
        assert complete(first, "a-key").status_code == 200
    refused = complete(first, "a-key")
    assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    eventually(lambda: any(c.requests > 3.5 for m in controller.counts for c in m.counts))
    for message in controller.counts:
        other.tell(message)
    eventually(lambda: complete(second, "a-key").status_code == 429)
    assert complete(second, "b-key").status_code == 200


def test_requests_for_tokens_count_too(running_with: Routers, keys_of: Callable[..., str]) -> None:
    running = running_with(api_keys=keys_of(line("alice", "a-key", "requests_per_minute=2")))
    running.open()
    hi = [{"role": "user", "content": "hi"}]
    bodies = {
        "/tokenize": {"prompt": "hi"},
        "/v1/messages/count_tokens": {"messages": hi},
        "/detokenize": {"tokens": [65]},
    }
    statuses = [
        running.http.post(path, json=body, headers=bearer("a-key")).status_code
        for path, body in bodies.items()
    ]
    assert statuses == [200, 200, 429]


def test_tokens_and_work_are_counted_until_a_request_ends(
    running_with: Routers, keys_of: Callable[..., str], eventually: Eventually
) -> None:
    running = running_with(
        api_keys=keys_of(
            line("alice", "a-key", "concurrent_s=0.000001"),
            line("bob", "b-key", "tokens_per_minute=12"),
        )
    )
    controller = running.open()
    assert complete(running, "b-key").status_code == 200  # 7 tokens and at most 4
    assert "tokens per minute" in complete(running, "b-key").json()["error"]["message"]
    controller.burst = 1
    with running.http.stream("POST", "/v1/completions", json=LONG, headers=bearer("a-key")):
        controller.emitting.clear()
        refused = complete(running, "a-key")
        assert refused.status_code == 429 and "in flight" in refused.json()["error"]["message"]
    eventually(lambda: running.router.router.service.live == 0)
    controller.emitting.set()
    assert complete(running, "a-key").status_code == 200


# --- caches ---------------------------------------------------------------------------------------


def salt_from(running: Any, address: str, key: str = "") -> bytes:
    """Return the salt of a completion that is sent from a loopback address."""
    transport = httpx.HTTPTransport(local_address=address)
    headers = bearer(key) if key else {}
    with httpx.Client(base_url=running.router.url, transport=transport, timeout=30) as client:
        assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    salt: bytes = running.controllers[0].seen[-1].salt
    return salt


def test_without_keys_only_requests_of_one_address_share_a_cache(running_with: Routers) -> None:
    running = running_with()
    running.open()
    first = salt_from(running, "127.0.0.1")
    assert salt_from(running, "127.0.0.1") == first
    assert salt_from(running, "127.0.0.2") != first
    shared = running_with(share_cache=True)
    shared.open()
    assert salt_from(shared, "127.0.0.1") == salt_from(shared, "127.0.0.2")


def test_with_keys_a_tenant_has_one_cache_from_every_address(
    running_with: Routers, keys_of: Callable[..., str]
) -> None:
    file = keys_of(line("alice", "a-key"), line("alice", "a-new"), line("bob", "b-key"))
    running = running_with(api_keys=file, share_cache=True)
    running.open()
    first = salt_from(running, "127.0.0.1", "a-key")
    assert salt_from(running, "127.0.0.2", "a-new") == first
    assert salt_from(running, "127.0.0.1", "b-key") != first


def test_salts_hold_a_secret_that_only_routers_with_the_same_curve_key_share(
    running_with: Routers, tmp_path: pathlib.Path
) -> None:
    def running_as(name: str) -> Any:
        secret = tmp_path / f"{name}.secret"
        if not secret.exists():
            write_keys(secret)
        allowed = tmp_path / "allowed"
        public = write_keys(tmp_path / f"controller-{time.monotonic_ns()}.secret")
        allowed.write_text(public + "\n")
        return running_with(curve=Curve(secret=str(secret), allowed=str(allowed)))

    def salt(running: Any) -> bytes:
        secret: bytes = running.router.router.service._salt_secret
        return secret

    fleet, alone = salt(running_as("a")), [salt(running_with()) for _ in range(2)]
    assert salt(running_as("a")) == fleet and len(fleet) >= 32
    assert len({fleet, salt(running_as("b")), *alone}) == 4
    assert json.dumps(fleet.hex()) not in (tmp_path / "a.secret").read_text()
