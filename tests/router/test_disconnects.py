"""Clients that disconnect and replicas that die: requests are freed, resumed or failed."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import httpx
import openai
import pytest
from tests.router.conftest import PATIENT_S, spoken

from medha.messages import Failed, Load, Tokens, from_bytes
from medha_router import replica_client

BODY = {"model": "tiny", "prompt": "say " + "a" * 60, "max_tokens": 80}


def streaming(running: Any, body: dict[str, Any] | None = None) -> socket.socket:
    """Open a connection and request a stream by hand, so that it can be cut at any point."""
    host, port = running.router.public.getsockname()
    data = json.dumps({**(body or BODY), "stream": True}).encode()
    link = socket.create_connection((host, port), timeout=PATIENT_S)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    link.sendall(head.encode() + data)
    return link


def stalled(
    alone: Any, eventually: Any, body: dict[str, Any] | None = None, sequences: int = 1
) -> tuple[Any, socket.socket]:
    """Return the controller and the stream of a request that runs there and emits nothing."""
    controller = alone.open()
    controller.emitting.clear()
    link = streaming(alone, body)
    eventually(lambda: len(controller.running) == sequences)
    return controller, link


def idle(running: Any) -> bool:
    return bool(running.router.router.service.live == 0)


@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_disconnects_during_decode_is_aborted(
    alone: Any, eventually: Any, half: bool
) -> None:
    controller = alone.open()
    controller.burst = 1  # generation takes longer than the test needs to interrupt it
    link = streaming(alone, {**BODY, "prompt": "say " + "a" * 900, "max_tokens": 1000})
    assert link.recv(4096)
    controller.emitting.clear()
    if half:
        link.shutdown(socket.SHUT_WR)
    else:
        link.close()
    eventually(lambda: controller.aborted == [controller.seen[0].id])
    eventually(lambda: idle(alone))
    link.close()


@pytest.mark.parametrize("half", [False, True])
def test_a_client_that_disconnects_before_its_first_token_is_aborted(
    alone: Any, eventually: Any, half: bool
) -> None:
    controller, link = stalled(alone, eventually)
    if half:
        link.shutdown(socket.SHUT_WR)
        assert link.recv(1) == b""
    link.close()
    eventually(lambda: controller.aborted == [controller.seen[0].id])
    eventually(lambda: idle(alone))


def test_a_waiting_client_that_disconnects_is_forgotten(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.granting = False
    link = streaming(alone)
    eventually(lambda: len(controller.heads) == 1)
    link.close()
    eventually(lambda: controller.heads == ())
    eventually(lambda: idle(alone))
    assert controller.seen == []


def test_a_client_that_disconnects_without_any_replica_is_forgotten(
    alone: Any, eventually: Any
) -> None:
    link = streaming(alone)
    eventually(lambda: not idle(alone))
    link.close()
    eventually(lambda: idle(alone), 20.0)  # sooner than the wait for a replica ends


def test_a_client_that_disconnects_in_its_body_is_forgotten(alone: Any, eventually: Any) -> None:
    alone.open()
    host, port = alone.router.public.getsockname()
    link = socket.create_connection((host, port))
    link.sendall(b'POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{"model')
    link.close()
    eventually(lambda: not alone.router.server.server_state.tasks)
    assert idle(alone)


def test_a_disconnect_aborts_every_output(alone: Any, eventually: Any) -> None:
    controller, link = stalled(alone, eventually, {**BODY, "n": 3}, 3)
    link.close()
    eventually(
        lambda: sorted(controller.aborted) == sorted(submit.id for submit in controller.seen)
    )


class Reader(threading.Thread):
    """Reads a stream to its end: `text`, and `error` if it failed."""

    def __init__(self, running: Any, **changes: Any) -> None:
        super().__init__(daemon=True)
        self._running, self._body = running, {**BODY, **changes}
        self.text = ""
        self.finish: str | None = None
        self.error: openai.APIError | None = None
        self.start()

    def run(self) -> None:
        try:
            for chunk in self._running.client.completions.create(**self._body, stream=True):
                self.text += chunk.choices[0].text
                self.finish = chunk.choices[0].finish_reason
        except openai.APIError as error:
            self.error = error


def interrupted(running: Any, eventually: Any, **changes: Any) -> tuple[Any, Reader]:
    """Return a replica that emits no more, and the reader of a stream that runs there."""
    first = running.open("r0")
    first.burst = 7
    reader = Reader(running, **changes)
    eventually(lambda: len(reader.text) > 10)
    first.emitting.clear()
    return first, reader


def test_a_stream_continues_on_another_replica_when_its_replica_dies(
    alone: Any, eventually: Any
) -> None:
    first, reader = interrupted(alone, eventually, seed=5, prompt="say " + "héllo" * 10)
    first.die()
    second = alone.open("r1")
    reader.join(PATIENT_S)
    assert reader.error is None and reader.text == "héllo" * 10
    before, after = first.seen[0], second.seen[0]
    assert after.emitted > 10
    assert after.tokens[: len(before.tokens)] == before.tokens
    assert len(after.tokens) == len(before.tokens) + 4 * after.emitted
    assert after.sampling == before.sampling and after.id == before.id
    assert after.max_output_tokens == before.max_output_tokens
    assert 'medha_requests_moved_total{model="tiny"} 1.0' in alone.ops.get("/metrics").text


@pytest.mark.parametrize(("limit", "finish"), [(80, "stop"), (60, "length")])
def test_a_stream_with_all_its_tokens_ends_although_its_replica_dies_without_saying_so(
    alone: Any, eventually: Any, limit: int, finish: str
) -> None:
    first = alone.open("r0")
    first.emitting.clear()
    reader = Reader(alone, max_tokens=limit)
    eventually(lambda: first.running)
    prompt = from_bytes(first.seen[0].tokens).tolist()
    tokens = spoken(prompt, first.tokenizer)[:limit]
    first.tell(Tokens(first.seen[0].id, 0, tuple(tokens)))
    eventually(lambda: reader.text == "a" * 60)
    first.die()
    second = alone.open("r1")
    reader.join(PATIENT_S)
    assert (reader.text, reader.finish, reader.error) == ("a" * 60, finish, None)
    assert second.seen == []  # it would add tokens beyond the end


def test_requests_of_a_replica_without_groups_move_to_another(alone: Any, eventually: Any) -> None:
    first, reader = interrupted(alone, eventually, prompt="say " + "a" * 60)
    first.load = Load(free_pages=(), total_pages=(), page_tokens=16)
    eventually(lambda: not alone.ops.get("/debug/queue").json()["tiny"]["open"])
    assert first.aborted == []  # no other replica yet: this one may have a group again
    second = alone.open("r1")
    reader.join(PATIENT_S)
    assert reader.error is None and reader.text == "a" * 60
    assert first.aborted == [first.seen[0].id]
    assert second.seen[0].emitted > 10


def test_a_request_whose_two_replicas_died_is_not_retried(alone: Any, eventually: Any) -> None:
    reader = Reader(alone)
    for name in ("r0", "r1"):
        controller = alone.open(name)
        controller.burst = 1
        eventually(lambda controller=controller: controller.seen)
        controller.emitting.clear()
        controller.die()
    reader.join(PATIENT_S)
    assert reader.error is not None and reader.error.code == "poison_request"
    eventually(lambda: idle(alone))


def test_a_stream_that_makes_progress_outlives_any_number_of_its_replicas(
    alone: Any, eventually: Any
) -> None:
    reader = Reader(alone, prompt="say " + "a" * 900, max_tokens=1000)
    for number in range(4):
        controller = alone.open(f"r{number}")
        controller.burst = 20
        eventually(lambda wanted=20 * (number + 1): len(reader.text) >= wanted)
        controller.emitting.clear()
        controller.die()
    alone.open("last")
    reader.join(PATIENT_S)
    assert reader.error is None and reader.text == "a" * 900


@pytest.mark.parametrize("sign", ["silent", "quiet"])
def test_a_stream_leaves_a_replica_that_may_hang_before_it_is_given_up(
    running_with: Any, eventually: Any, sign: str
) -> None:
    running = running_with(replica_timeout_s=30.0)
    first, reader = interrupted(running, eventually, prompt="say " + "a" * 900, max_tokens=1000)
    second = running.open("r1")
    setattr(first, sign, True)
    reader.join(PATIENT_S)
    assert reader.error is None and reader.text == "a" * 900
    eventually(lambda: first.aborted == [first.seen[0].id])
    assert second.seen[0].emitted > 10
    setattr(first, sign, False)
    eventually(lambda: is_open(running, "r0"))


def is_open(running: Any, name: str) -> bool:
    replicas = running.ops.get("/debug/queue").json()["tiny"]["replicas"]
    return any(replica["open"] for replica in replicas if replica["name"] == name)


def test_a_request_that_takes_long_to_compute_again_waits_for_its_replica(
    running_with: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_client, "MOVED_WORK_S", 0.0)
    running = running_with(replica_timeout_s=30.0)
    first, reader = interrupted(running, eventually, prompt="say " + "a" * 900, max_tokens=1000)
    second = running.open("r1")
    first.silent = True
    eventually(lambda: not is_open(running, "r0"))
    first.silent = False
    first.emitting.set()
    reader.join(PATIENT_S)
    assert reader.error is None and reader.text == "a" * 900
    assert second.seen == [] and first.aborted == []


def test_a_failure_before_the_first_byte_has_its_own_status(alone: Any) -> None:
    controller = alone.open()
    controller.fails = Failed("x", "memory", "rank g0-s0-t0 at 10.0.0.1 is out of memory")
    for stream in (False, True):
        response = alone.http.post("/v1/completions", json={**BODY, "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "memory"
        assert "10.0.0.1" not in response.text


def test_a_failure_after_the_first_byte_is_an_error_event_and_then_the_end(
    alone: Any, eventually: Any
) -> None:
    controller = alone.open()
    controller.burst = 1
    with alone.http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as response:
        pieces = response.iter_text()
        text = next(pieces)
        controller.emitting.clear()
        controller.tell(Failed(controller.seen[0].id, "internal", "x"))
        text += "".join(pieces)
    assert response.status_code == 200
    assert text.rstrip().rpartition("\n\n")[2].startswith('event: error\ndata: {"error":')
    assert "[DONE]" not in text


def test_a_retriable_failure_is_retried(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.emitting.clear()
    reader = Reader(alone)
    eventually(lambda: controller.running)
    controller.forget(controller.seen[0].id)
    controller.tell(Failed(controller.seen[0].id, "lost", "a rank was lost", True))
    controller.emitting.set()
    reader.join(PATIENT_S)
    assert reader.text == "a" * 60 and len(controller.seen) == 2


def test_missing_tokens_are_never_skipped(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.emitting.clear()
    reader = Reader(alone)
    eventually(lambda: controller.running)
    name = controller.seen[0].id
    controller.forget(name)
    controller.tell(Tokens(name, 5, (65,)))
    eventually(lambda: name in controller.aborted)
    controller.emitting.set()
    reader.join(PATIENT_S)
    assert reader.text == "a" * 60 and reader.error is None


def test_a_replica_that_serves_an_unknown_request_gets_abort(served: Any, eventually: Any) -> None:
    controller = served.controllers[0]
    controller.tell(Tokens("unknown", 0, (65,)))
    eventually(lambda: "unknown" in controller.aborted)


def test_a_replica_that_dropped_the_router_gets_its_requests_again(
    alone: Any, eventually: Any
) -> None:
    controller = alone.open()
    controller.emitting.clear()
    reader = Reader(alone)
    eventually(lambda: controller.running)
    controller.forget(controller.seen[0].id)
    controller.tell(controller.hello)
    controller.emitting.set()
    reader.join(PATIENT_S)
    assert reader.text == "a" * 60 and len(controller.seen) == 2


def test_another_incarnation_replaces_the_first(alone: Any, eventually: Any) -> None:
    first = alone.open("r0")
    first.emitting.clear()
    reader = Reader(alone)
    eventually(lambda: first.running)
    first.die()
    again = alone.join("r0", incarnation="2")
    reader.join(PATIENT_S)
    assert reader.text == "a" * 60 and len(again.seen) == 1


def test_a_hundred_disconnects_leave_nothing_behind(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.emitting.clear()
    for _ in range(25):
        links = [streaming(alone) for _ in range(4)]
        for link in links:
            link.close()
    eventually(lambda: idle(alone))
    eventually(lambda: not controller.running)
    assert alone.http.post("/v1/models").status_code == 405
    controller.emitting.set()
    with httpx.Client(base_url=alone.router.url) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200


def test_a_request_with_output_does_not_hold_the_json_of_its_prompt(
    alone: Any, eventually: Any
) -> None:
    controller, link = stalled(alone, eventually)
    (request,) = alone.router.router._requests._client_requests.values()
    assert b"aaaa" in request.params.raw
    controller.burst = 1
    controller.emitting.set()
    eventually(lambda: request.params.raw == b"")
    link.close()
    eventually(lambda: idle(alone))
