"""Registration of controllers: Hello, tokenizer files, silence, CURVE keys."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.router.conftest import PATIENT_S

from medha import PROTOCOL
from medha.adapters.sockets import Dialer, write_keys
from medha.config import Curve, QueueOrder
from medha.errors import ProtocolError
from medha.messages import (
    Codec,
    FetchFile,
    FilePart,
    Hello,
    Rejected,
    ReplicaMessage,
    RouterMessage,
)
from medha.request import Slo, SloClass
from medha_router.replicas import ConnectedReplica, ReplicaTable
from medha_router.tokenization.tokenizer_files import FileFetch, FileStore, digest_of

BODY = {"model": "tiny", "prompt": "say abc"}


@pytest.fixture
def replicas() -> ReplicaTable:
    return ReplicaTable(frozenset({"tiny"}), timeout_s=3.0)


@pytest.fixture
def hello(make_hello: Callable[..., Hello]) -> Hello:
    return make_hello()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protocol": 99}, ("99", str(PROTOCOL))),
        ({"order": QueueOrder(policy="best")}, ("scheduling.policy is best", "lars-paper")),
        ({"model": "huge"}, ("huge", "tiny")),
        ({"files": {}}, ("tokenizer.json",)),
        ({"profile": b"{}"}, ("profile",)),
    ],
)
def test_an_unsuitable_controller_is_rejected_with_a_reason(
    replicas: ReplicaTable, hello: Hello, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    outcome = replicas.greet(b"a", msgspec.structs.replace(hello, **change), 0.0)
    assert isinstance(outcome, Rejected)
    assert all(word in outcome.reason for word in words)


@pytest.mark.parametrize(
    "change",
    [
        {"page_tokens": 32},
        {"files": {"tokenizer.json": "0" * 32}},
        {"stop_tokens": (1,)},
        {"checkpoint": "other weights"},
    ],
)
def test_replicas_with_other_tokens_are_of_another_version(
    replicas: ReplicaTable, hello: Hello, change: dict[str, object]
) -> None:
    same = msgspec.structs.replace(hello, replica="r1", incarnation="2", max_batch_s=0.2)
    other = msgspec.structs.replace(hello, replica="r2", **change)
    outcomes = [
        replicas.greet(greeting.replica.encode(), greeting, 0.0)
        for greeting in (hello, same, other)
    ]
    versions = [outcome.version for outcome in outcomes if isinstance(outcome, ConnectedReplica)]
    assert versions[0] == versions[1] != versions[2]


def test_a_replica_counts_as_silent_only_after_the_timeout(
    replicas: ReplicaTable, hello: Hello
) -> None:
    replicas.greet(b"a", hello, 10.0)
    assert replicas.dead(12.9) == []
    assert [(replica.name, reason) for replica, reason in replicas.dead(13.1)] == [
        ("r0", "silent for 3.1 s")
    ]


def test_a_replica_whose_connection_ended_has_a_second_to_reconnect(
    replicas: ReplicaTable, hello: Hello
) -> None:
    replicas.greet(b"a", hello, 10.0)
    replica = replicas.get(b"a")
    assert replica is not None
    replica.life.disconnected(11.0)
    assert replicas.dead(11.9) == []
    assert [lost.name for lost, _ in replicas.dead(12.1)] == ["r0"]
    replica.life.seen(11.5)  # on another connection
    assert replicas.dead(12.1) == []


def test_a_file_is_fetched_in_parts_and_requested_again() -> None:
    data = bytes(range(256)) * 4
    name = digest_of(data)
    fetch = FileFetch(name)
    part_request = fetch.next_request(0.0)
    assert part_request is not None and part_request.offset == 0
    assert fetch.next_request(1.0) is None
    assert fetch.next_request(2.5) is not None
    assert fetch.take(FilePart(name, 0, 1024, data[:1000])) is None
    assert fetch.take(FilePart(name, 0, 1024, data[:1000])) is None  # a repeated answer
    part_request = fetch.next_request(2.6)
    assert part_request is not None and part_request.offset == 1000
    assert fetch.take(FilePart(name, 1000, 1024, data[1000:])) == data


def test_a_file_that_does_not_match_its_hash_is_not_stored(tmp_path: pathlib.Path) -> None:
    store = FileStore(tmp_path)
    name = digest_of(b"true")
    with pytest.raises(ProtocolError, match="hashes to"):
        store.put(name, b"false")
    assert store.get(name) is None
    store.put(name, b"true")
    assert FileStore(tmp_path).get(name) == b"true"
    (tmp_path / name).write_bytes(b"corrupt")
    assert FileStore(tmp_path).get(name) is None


def test_a_file_longer_than_any_tokenizer_is_refused() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        FileFetch("x").take(FilePart("x", 0, 1 << 40, b""))


def test_a_file_never_grows_beyond_its_announced_size() -> None:
    fetch = FileFetch("x")
    with pytest.raises(ProtocolError, match="more than"):
        fetch.take(FilePart("x", 0, 10, b"a" * 11))


def test_corrupt_files_are_requested_again_until_they_are_intact(
    alone: Any, eventually: Any
) -> None:
    true: dict[str, bytes] = {}

    def corrupt(controller: Any) -> None:
        true.update(controller.by_hash)
        controller.by_hash.update({name: data[::-1] for name, data in true.items()})

    controller = alone.join("r0", corrupt)
    with pytest.raises(AssertionError):
        eventually(lambda: alone.router.router.service.models["tiny"].ready, 0.5)
    controller.by_hash.update(true)
    eventually(lambda: alone.router.router.service.models["tiny"].ready)


def test_a_protocol_mismatch_is_rejected_with_both_versions(alone: Any, eventually: Any) -> None:
    controller = alone.join("r0", protocol=PROTOCOL + 1)
    eventually(lambda: controller.rejected)
    assert str(PROTOCOL) in controller.rejected[0] and str(PROTOCOL + 1) in controller.rejected[0]


def test_a_restarted_router_requests_hello(served: Any, eventually: Any) -> None:
    dialer: Dialer[ReplicaMessage, RouterMessage] = Dialer(
        served.router.fleet_address,
        b"stranger",
        sends=Codec(ReplicaMessage),
        receives=Codec(RouterMessage),
    )
    with contextlib.closing(dialer):
        dialer.send(FilePart("x", 0, 0, b""))
        answer = dialer.receive(PATIENT_S)
    assert isinstance(answer, Rejected) and "Hello" in answer.reason


def test_a_silent_replica_is_removed_and_may_come_back(alone: Any, eventually: Any) -> None:
    controller = alone.open("r0")
    controller.silent = True

    def replicas() -> list[Any]:
        return list(alone.ops.get("/debug/queue").json()["tiny"]["replicas"])

    eventually(lambda: replicas() == [])
    controller.silent = False
    eventually(lambda: any("Hello" in reason for reason in controller.rejected))
    controller.tell(controller.hello)
    eventually(lambda: len(replicas()) == 1)
    assert alone.http.post("/v1/completions", json=BODY).status_code == 200


def test_a_draining_replica_gets_no_new_requests(alone: Any, eventually: Any) -> None:
    first = alone.open("r0")
    second = alone.open("r1")
    first.draining = True
    eventually(lambda: alone.ops.get("/debug/queue").json()["tiny"]["replicas"][0]["draining"])
    for _ in range(4):
        assert alone.http.post("/v1/completions", json=BODY).status_code == 200
    assert (len(first.seen), len(second.seen)) == (0, 4)


@pytest.mark.parametrize("listed", [True, False])
def test_curve_admits_only_listed_keys(
    tmp_path: pathlib.Path, listed: bool, running_with: Any
) -> None:
    server_public = write_keys(tmp_path / "router.key")
    own_public = write_keys(tmp_path / "controller.key")
    (tmp_path / "server.pub").write_text(server_public)
    other = write_keys(tmp_path / "other.key")
    (tmp_path / "allowed").write_text(own_public if listed else other)
    curve = Curve(secret=str(tmp_path / "router.key"), allowed=str(tmp_path / "allowed"))
    mine = Curve(
        secret=str(tmp_path / "controller.key"), server_public=str(tmp_path / "server.pub")
    )
    running = running_with(curve=curve)
    dialer: Dialer[ReplicaMessage, RouterMessage] = Dialer(
        running.router.fleet_address,
        b"r0",
        sends=Codec(ReplicaMessage),
        receives=Codec(RouterMessage),
        curve=mine,
    )
    with contextlib.closing(dialer):
        dialer.send(running.hello())
        answer = dialer.receive(PATIENT_S if listed else 0.5)
    assert isinstance(answer, FetchFile) if listed else answer is None


def test_configured_classes_override_those_of_replicas(alone: Any) -> None:
    stranger = SloClass(name="stranger", slo=Slo())
    alone.join("r0", classes=(stranger,))
    response = alone.http.post("/v1/completions", json=BODY, headers={"x-medha-class": "stranger"})
    assert response.status_code == 400


def test_messages_that_do_not_decode_are_counted(served: Any, eventually: Any) -> None:
    def counted() -> float:
        page = served.ops.get("/metrics").text
        return float(re.findall(r"^medha_messages_rejected_total\{.*\} (\S+)$", page, re.M)[0])

    eventually(lambda: counted() == 0.0)  # exported at zero
    stranger: Dialer[RouterMessage, ReplicaMessage] = Dialer(
        served.router.fleet_address,
        b"stranger",
        sends=Codec(RouterMessage),
        receives=Codec(ReplicaMessage),
    )
    with contextlib.closing(stranger):
        stranger.send(FetchFile("x", 0))
        eventually(lambda: counted() == 1.0)
