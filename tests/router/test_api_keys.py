"""API keys: required on every route; a key is a tenant; keys change while the router serves."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import logging
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from medha.errors import SetupError
from medha_router import auth
from medha_router.auth import LINES_AT_ONCE, MOST_CHANGES, ApiKeys, Client

Routers = Callable[..., Any]
Eventually = Callable[..., None]
PATIENT_S = 30.0
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("GET", "/metrics"),
    ("POST", "/drain"),
]


def line(name: str, key: str) -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}\n"


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "keys"
    path.write_text("# clients\n\n" + line("alice", "a-key") + line("bob", "b-key"))
    return path


def tenant(keys: ApiKeys, key: bytes) -> str | None:
    client = keys.client(key)
    return client.tenant if client is not None else None


def ask(running: Any, key: str) -> Any:
    client = openai.OpenAI(
        base_url=f"{running.router.url}/v1", api_key=key, max_retries=0, timeout=PATIENT_S
    )
    with client:
        return client.completions.create(model="tiny", prompt="say hello", max_tokens=20)


def replace(path: pathlib.Path, text: str) -> None:
    """Replace the file as a mounted Secret is replaced: by another file of that name."""
    fresh = path.with_name("fresh")
    fresh.write_text(text)
    fresh.replace(path)


@pytest.mark.parametrize(
    "headers, code",
    [
        ({}, "missing_api_key"),
        ({"authorization": "Bearer"}, "missing_api_key"),
        ({"authorization": "Basic a-key"}, "missing_api_key"),
        ({"authorization": "Bearer wrong"}, "invalid_api_key"),
        ({"authorization": "Bearer a-key2"}, "invalid_api_key"),
    ],
)
def test_no_route_is_open_without_a_key(
    running_with: Routers, file: pathlib.Path, headers: dict[str, str], code: str
) -> None:
    running = running_with(api_keys=str(file))
    for method, path in ROUTES:
        answer = running.http.request(method, path, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        assert error["code"] == code and error["type"] == "authentication_error"
        assert error["param"] is None and "the operator of this server" in error["message"]
        assert answer.headers["x-medha-request-id"]
    for path in ("/healthz", "/readyz", "/metrics", "/debug/queue"):
        assert running.ops.get(path).status_code == 200


def test_a_key_is_a_tenant_and_an_unknown_key_is_refused(
    running_with: Routers, file: pathlib.Path
) -> None:
    running = running_with(api_keys=str(file))
    controller = running.open("r0")
    assert ask(running, "a-key").choices[0].text == "hello"
    with pytest.raises(openai.AuthenticationError, match="unknown or was removed"):
        ask(running, "c-key")
    assert [submit.tenant for submit in controller.seen] == ["alice"]


def test_tenants_do_not_share_cached_pages(running_with: Routers, file: pathlib.Path) -> None:
    running = running_with(api_keys=str(file))
    controller = running.open("r0")
    for key in ("a-key", "b-key"):
        assert ask(running, key).choices[0].text == "hello"
    assert [submit.tenant for submit in controller.seen] == ["alice", "bob"]
    assert controller.seen[0].salt != controller.seen[1].salt


def test_every_byte_of_a_key_counts(running_with: Routers, file: pathlib.Path) -> None:
    key = "clé à"  # in UTF-8 it ends with what is a space in Latin-1
    replace(file, line("alice", key))
    running = running_with(api_keys=str(file))
    running.join("r0")
    headers = {b"authorization": f"Bearer {key}".encode()}
    assert running.http.get("/v1/models", headers=headers).status_code == 200


def test_a_key_is_replaced_by_overlap_and_revoked_while_it_serves(
    running_with: Routers, file: pathlib.Path, eventually: Eventually
) -> None:
    running = running_with(api_keys=str(file))
    running.join("r0")

    def admits(key: str) -> bool:
        headers = {"authorization": f"Bearer {key}"}
        return bool(running.http.get("/v1/models", headers=headers).status_code == 200)

    assert admits("a-key") and not admits("a-new")
    replace(file, line("alice", "a-key") + line("alice", "a-new"))
    eventually(lambda: admits("a-new"), PATIENT_S)
    assert admits("a-key")
    replace(file, line("alice", "a-new") + "oops\n")
    replace(file, line("alice", "a-new"))
    eventually(lambda: not admits("a-key"), PATIENT_S)
    assert admits("a-new")
    replace(file, "# no keys\n")
    eventually(lambda: not admits("a-new"), PATIENT_S)


def test_an_invalid_file_changes_nothing(
    file: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(file)
    for text in ("alice:a-key\n", None):
        if text is None:
            file.unlink()
        else:
            replace(file, text)
        for _ in range(3):
            keys.refresh()
        assert tenant(keys, b"a-key") == "alice" and tenant(keys, b"") is None
    assert caplog.text.count("kept the former API keys") == 2
    replace(file, line("bob", "a-key"))
    keys.refresh()
    keys.refresh()
    assert tenant(keys, b"a-key") == "bob"


def test_keys_are_followed_on_after_a_failure(
    file: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys, read, reads = ApiKeys(file), auth.read_keys, list[pathlib.Path]()

    def fails_once(path: pathlib.Path) -> dict[bytes, Client]:
        reads.append(path)
        if len(reads) == 1:
            raise RuntimeError("can't start new thread")
        return read(path)

    monkeypatch.setattr(auth, "read_keys", fails_once)
    monkeypatch.setattr(auth, "REFRESH_S", 0.0)
    replace(file, line("carol", "c-key"))

    async def follow() -> None:
        following = asyncio.ensure_future(keys.follow())
        while tenant(keys, b"c-key") is None and not following.done():
            await asyncio.sleep(0.001)
        following.cancel()

    asyncio.run(asyncio.wait_for(follow(), PATIENT_S))
    assert tenant(keys, b"c-key") == "carol"
    assert "not read again: RuntimeError" in caplog.text


def test_a_file_that_stays_unreadable_is_reported_once(
    file: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, text = ApiKeys(file), file.read_text()
    for reports in (1, 2):
        file.unlink()
        file.mkdir()
        for _ in range(5):
            keys.refresh()
        assert caplog.text.count("kept the former API keys") == reports
        assert tenant(keys, b"a-key") == "alice"
        file.rmdir()
        file.write_text(text)
        keys.refresh()
        keys.refresh()


def test_a_file_that_is_written_in_place_counts_once_it_stands_still(file: pathlib.Path) -> None:
    keys = ApiKeys(file)
    with file.open("w") as written:
        for name in ("carol", "dave", "erin"):
            keys.refresh()
            assert tenant(keys, b"a-key") == "alice"
            written.write(line(name, name))
            written.flush()
    keys.refresh()
    assert tenant(keys, b"a-key") == "alice"
    keys.refresh()
    assert tenant(keys, b"a-key") is None and tenant(keys, b"carol") == "carol"


def test_a_key_is_revoked_in_a_file_that_never_stands_still(file: pathlib.Path) -> None:
    keys = ApiKeys(file)
    for number in range(2 * MOST_CHANGES):
        replace(file, line("bob", "b-key") + "#" * number)
        keys.refresh()
    assert tenant(keys, b"a-key") is None and tenant(keys, b"b-key") == "bob"


@pytest.mark.parametrize("last", ["", "oops\n"])
def test_clients_are_never_freed_all_at_once(
    file: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    last: str,
) -> None:
    """Other threads stand still meanwhile, with them the event loop."""
    caplog.set_level(logging.CRITICAL, "medha.router")  # a kept record holds what an error does
    keys, held = ApiKeys(file), []
    monkeypatch.setattr(time, "sleep", lambda _: held.append(sys.getallocatedblocks()))
    many = [f"{line(f't{i}', f'k{i}')[:-1]} weight={i + 1}\n" for i in range(900)]
    gc.collect()
    gc.disable()  # it frees what others have left, all at once
    try:
        for text in ("".join(many), ""):
            replace(file, text + last)
            keys.refresh()
            keys.refresh()
            held.append(sys.getallocatedblocks())
    finally:
        gc.enable()
    freed = [before - after for before, after in itertools.pairwise(held)]
    assert max(freed) < 12 * LINES_AT_ONCE < max(held) - min(held)


@pytest.mark.parametrize(
    "text", ["alice:plain-secret\n", "plain-secret\n", f"a b:{'0' * 64}\n", f"a:{'0' * 63}g\n"]
)
def test_an_invalid_line_is_reported_by_its_number_and_never_quoted(
    file: pathlib.Path, text: str
) -> None:
    file.write_text(line("bob", "b") + text)
    with pytest.raises(SetupError) as caught:
        ApiKeys(file)
    message = str(caught.value)
    assert message.startswith(f"line 2 of {file} is not an API key: must be NAME:SHA256")
    assert "sha256sum" in message and "plain-secret" not in message and "\n" not in message


@pytest.mark.parametrize("second", [("bob", ""), ("alice", " weight=2")])
def test_a_key_has_one_tenant_and_one_set_of_options(
    file: pathlib.Path, second: tuple[str, str]
) -> None:
    first = line("alice", "a-key")
    file.write_text(first + first)
    assert tenant(ApiKeys(file), b"a-key") == "alice"
    name, options = second
    file.write_text(first + line(name, "a-key").strip() + options)
    with pytest.raises(SetupError, match=r"line 2 of .* has the key of an earlier line"):
        ApiKeys(file)


def test_a_missing_file_is_reported_with_the_remedy(tmp_path: pathlib.Path) -> None:
    with pytest.raises(SetupError, match=r"cannot be read \(No such file .*one line per key"):
        ApiKeys(tmp_path / "none")
