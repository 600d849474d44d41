"""Promises, refusals and waiting, as seen by a client."""

from __future__ import annotations

import pathlib
import re
import threading
import time
from typing import Any

import msgspec
import openai
import pytest
from tests.router.conftest import PATIENT_S

from medha.config import QueueOrder
from medha.messages import KvEvents, Load

BODY = {"model": "tiny", "prompt": "say abc", "max_tokens": 8}


class Background(threading.Thread):
    """A request on another thread, with `status` and `text` once it has ended."""

    def __init__(self, running: Any, prompt: str = "say abc", **headers: str) -> None:
        super().__init__(daemon=True)
        self._running, self._prompt, self._headers = running, prompt, headers
        self.status = 0
        self.error: dict[str, Any] = {}
        self.text = ""
        self.took_s = 0.0
        self.start()

    def run(self) -> None:
        began = time.monotonic()
        response = self._running.http.post(
            "/v1/completions",
            json={**BODY, "prompt": self._prompt},
            headers={name.replace("_", "-"): value for name, value in self._headers.items()},
        )
        self.took_s = time.monotonic() - began
        self.status = response.status_code
        if self.status == 200:
            self.text = response.json()["choices"][0]["text"]
        else:
            self.error = response.json()["error"]


def waiting(running: Any) -> list[dict[str, Any]]:
    return list(running.ops.get("/debug/queue").json()["tiny"]["requests"])


def test_an_infeasible_deadline_is_refused_with_the_earliest_feasible_ttft(served: Any) -> None:
    response = served.http.post(
        "/v1/completions", json=BODY, headers={"x-medha-slo-ttft-ms": "0.001"}
    )
    assert response.status_code == 429
    assert response.headers["x-should-retry"] == "false"
    assert response.headers["x-medha-dropped-reason"] == "deadline_infeasible"
    error = response.json()["error"]
    assert error["code"] == "deadline_infeasible"
    earliest = error["earliest_ttft_ms"]
    accepted = served.http.post(
        "/v1/completions", json=BODY, headers={"x-medha-slo-ttft-ms": str(earliest + 50)}
    )
    assert accepted.status_code == 200
    assert accepted.headers["x-medha-promise-ttft-ms"] == str(earliest + 50)


def test_a_tpot_that_no_replica_gives_is_refused_with_the_least_that_is_accepted(
    served: Any,
) -> None:
    header = "x-medha-slo-tpot-ms"
    response = served.http.post("/v1/completions", json=BODY, headers={header: "0.0001"})
    assert response.status_code == 400
    assert response.headers["x-medha-dropped-reason"] == "tpot_infeasible"
    error = response.json()["error"]
    least = error["least_tpot_ms"]
    assert (error["code"], error["param"]) == ("tpot_infeasible", header)
    assert f"{header} is 0.0001" in error["message"] and f"{least:g} ms" in error["message"]
    accepted = served.http.post(
        "/v1/completions",
        json=BODY,
        headers={header: response.headers["x-medha-least-tpot-ms"]},
    )
    assert accepted.status_code == 200
    single = {**BODY, "max_tokens": 1}  # has no time between tokens
    assert served.http.post("/v1/completions", json=single, headers={header: "0.0001"}).is_success


def test_the_openai_client_does_not_retry_an_infeasible_deadline(served: Any) -> None:
    client = served.client.with_options(max_retries=3)
    before = refusals(served)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**BODY, extra_headers={"x-medha-class": "eager"})
    assert caught.value.code == "deadline_infeasible"
    assert refusals(served) == before + 1


def refusals(served: Any) -> float:
    """Return the number of requests refused for their deadline."""
    page = served.ops.get("/metrics").text
    counts = re.findall(
        r"^medha_requests_refused_total\{.*deadline_infeasible.*\} (.*)$", page, re.M
    )
    return sum(map(float, counts))


def test_a_class_that_relegates_is_served_without_a_promise(served: Any) -> None:
    response = served.http.post("/v1/completions", json=BODY, headers={"x-medha-class": "patient"})
    assert response.status_code == 200
    assert "x-medha-promise-ttft-ms" not in response.headers
    assert response.headers["x-medha-class"] == "patient"
    assert served.controllers[0].seen[-1].promised is False


def test_a_policy_that_keeps_no_promises_gives_none(alone: Any) -> None:
    alone.open(order=QueueOrder(policy="fcfs"))
    response = alone.http.post("/v1/completions", json=BODY)
    assert response.status_code == 200
    assert "x-medha-promise-ttft-ms" not in response.headers
    assert response.json()["x_medha"]["promise_ttft_ms"] is None
    metrics = alone.ops.get("/metrics").text
    assert not re.search(r"^medha_(promises|requests_relegated)_total\{.*\} [1-9]", metrics, re.M)


def test_requests_are_held_until_a_replica_joins(alone: Any, eventually: Any) -> None:
    early = Background(alone)
    eventually(lambda: alone.router.router.service.live == 1)
    assert alone.ops.get("/readyz").status_code == 200
    alone.open()
    early.join(PATIENT_S)
    assert (early.status, early.text) == (200, "abc")


def test_without_a_replica_a_request_is_refused_after_the_timeout(running_with: Any) -> None:
    early = Background(running_with(no_replica_timeout_s=1.5))
    early.join(PATIENT_S)
    assert early.status == 503 and early.error["code"] == "no_replica"
    assert early.took_s > 1.4


def test_a_held_stream_sends_keep_alives(alone: Any) -> None:
    body = {**BODY, "stream": True}
    controller = alone.open()
    controller.granting = False
    with alone.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        controller.granting = True
        rest = [line for line in lines if line.startswith("data")]
    assert rest[-1] == "data: [DONE]" and "abc" in "".join(rest).replace('"', "")


def test_a_request_without_room_ends_with_an_error(running_with: Any) -> None:
    running = running_with(keepalive_s=0.3, queue_timeout_s=2.0)
    running.open().granting = False
    plain = Background(running, x_medha_slo_ttft_ms="1500")
    body = {**BODY, "stream": True}
    with running.http.stream(
        "POST", "/v1/completions", json=body, headers={"x-medha-slo-ttft-ms": "1500"}
    ) as response:
        text = "".join(response.iter_text())
    assert response.status_code == 200  # a keep-alive was sent before
    assert "event: error" in text and '"code":"overloaded"' in text and "[DONE]" not in text
    plain.join(PATIENT_S)
    assert plain.status == 503 and plain.error["code"] == "overloaded"


def test_the_queue_is_ordered_by_urgency_and_shows_the_reasons(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.granting = False
    requests = []
    for place, ttft_ms in enumerate((9000, 3000, 6000)):
        requests.append(Background(alone, f"say {place}", x_medha_slo_ttft_ms=str(ttft_ms)))
        eventually(lambda many=place + 1: len(waiting(alone)) == many)
    requests.append(Background(alone, "say p", x_medha_class="patient"))
    eventually(lambda: len(waiting(alone)) == 4)
    eventually(lambda: len(controller.heads) == 4)
    entries = waiting(alone)
    due = [entry["due_in_s"] for entry in entries]
    assert [entry["promised"] for entry in entries] == [True, True, True, False]
    assert due[:3] == sorted(due[:3])
    assert [head.id for head in controller.heads] == [entry["id"] for entry in entries]
    assert "waits for its grant" in entries[0]["why"] and "without a promise" in entries[3]["why"]
    controller.granting = True
    for request in requests:
        request.join(PATIENT_S)
        assert request.status == 200


def test_a_full_queue_refuses_with_retry_after(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.granting = False
    small = msgspec.structs.replace(controller.load, pending_s=7.0)
    controller.load = small
    eventually(
        lambda: (
            alone.ops.get("/debug/queue").json()["tiny"]["replicas"][0]["load"]["pending_s"] == 7.0
        )
    )
    held = [Background(alone) for _ in range(4)]
    eventually(lambda: len(waiting(alone)) == 4)
    refused = alone.http.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "overloaded"
    assert refused.headers["retry-after"] in {"7", "8"}
    controller.granting = True
    for request in held:
        request.join(PATIENT_S)
        assert request.status == 200


@pytest.mark.parametrize(("pages", "places"), [(20, 256), (4096, 2)])
def test_outputs_that_no_replica_holds_together_wait_for_the_others(
    alone: Any, eventually: Any, pages: int, places: int
) -> None:
    controller = alone.open(max_running=places)
    controller.load = Load(
        free_pages=(pages,), total_pages=(pages,), page_tokens=16, free_places=places
    )
    queue = "/debug/queue"
    shown = {"free_places": places, "total_pages": [pages]}
    eventually(
        lambda: shown.items() <= alone.ops.get(queue).json()["tiny"]["replicas"][0]["load"].items()
    )
    body = {**BODY, "n": 3, "max_tokens": 130}  # 9 pages each
    response = alone.http.post("/v1/completions", json=body)
    assert [choice["text"] for choice in response.json()["choices"]] == ["abc"] * 3
    assert [submit.promised for submit in controller.seen].count(True) == 2
    assert "x-medha-promise-ttft-ms" not in response.headers
    together = alone.http.post("/v1/completions", json=body | {"n": 2})
    assert "x-medha-promise-ttft-ms" in together.headers


def test_a_prompt_beyond_every_pool_is_refused_with_both_numbers(
    alone: Any, eventually: Any
) -> None:
    controller = alone.open()
    controller.load = Load(free_pages=(8,), total_pages=(8,), page_tokens=16)
    eventually(
        lambda: (
            alone.ops.get("/debug/queue").json()["tiny"]["replicas"][0]["load"]["total_pages"]
            == [8]
        )
    )
    response = alone.http.post("/v1/completions", json={**BODY, "prompt": "x" * 200})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert "208" in message and "128" in message


def test_a_drain_refuses_new_requests_and_finishes_running_ones(
    running_with: Any, tmp_path: pathlib.Path, eventually: Any
) -> None:
    token = tmp_path / "token"
    token.write_text("t" * 20 + "\n")
    alone = running_with(ops_token=str(token))
    controller = alone.open()
    controller.emitting.clear()
    running = Background(alone)
    eventually(lambda: controller.running)
    assert alone.ops.post("/drain").status_code == 401
    may_drain = {"authorization": f"Bearer {'t' * 20}"}
    from_a_page = {**may_drain, "origin": "null"}
    assert alone.ops.post("/drain", headers=from_a_page).status_code == 403
    assert alone.ops.get("/readyz").status_code == 200
    assert alone.ops.post("/drain", headers=may_drain).status_code == 202
    eventually(lambda: alone.ops.get("/readyz").status_code == 503)
    refused = alone.http.post("/v1/completions", json=BODY)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    assert refused.headers["retry-after"] == "1"
    assert refused.headers["connection"] == "close"  # else a retry would come here again
    controller.emitting.set()
    running.join(PATIENT_S)
    assert (running.status, running.text) == (200, "abc")
    eventually(lambda: not alone.alive())


def test_a_router_without_a_token_takes_no_drain_request(served: Any) -> None:
    assert served.ops.post("/drain").status_code == 404
    assert served.ops.get("/readyz").status_code == 200


def test_metrics_show_promises_refusals_and_latencies(served: Any, eventually: Any) -> None:
    served.http.post("/v1/completions", json=BODY)
    served.http.post("/v1/completions", json=BODY, headers={"x-medha-class": "eager"})
    labels = '{class="default",length="1k",model="tiny"}'
    ended = f"medha_request_e2e_seconds_count{labels}"
    eventually(lambda: ended in served.ops.get("/metrics").text)
    text = served.ops.get("/metrics").text
    assert f"medha_request_ttft_seconds_count{labels}" in text
    assert f"medha_slo_attained_total{labels}" in text
    assert 'medha_promises_total{class="default",model="tiny",outcome="kept"}' in text
    assert 'reason="deadline_infeasible"' in text
    assert 'medha_slo_missed_total{class="eager",length="1k",model="tiny"}' in text
    counted = dict(
        re.findall(r'^medha_tenant_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.M)
    )
    assert set(counted) == {"attained", "missed", "refused"}
    assert float(counted["attained"]) >= 1.0 and float(counted["refused"]) >= 1.0


def test_outcome_counters_are_exported_at_zero(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    controller.emitting.clear()
    running = Background(alone)
    eventually(lambda: controller.running)
    text = alone.ops.get("/metrics").text
    for verdict in ("attained", "missed"):
        labels = '{class="default",length="1k",model="tiny"}'
        assert f"medha_slo_{verdict}_total{labels} 0.0" in text
    for outcome, count in (("given", 1.0), ("kept", 0.0), ("broken", 0.0)):
        labels = f'{{class="default",model="tiny",outcome="{outcome}"}}'
        assert f"medha_promises_total{labels} {count}" in text
    eventually(
        lambda: 'medha_requests_moved_total{model="tiny"} 0.0' in alone.ops.get("/metrics").text
    )
    controller.emitting.set()
    running.join(PATIENT_S)


def test_the_probe_answers_from_the_ops_port(served: Any) -> None:
    assert served.ops.get("/healthz").status_code == 200
    assert served.ops.get("/readyz").status_code == 200
    assert served.ops.get("/nowhere").status_code == 404


def test_cached_pages_of_a_replica_shorten_the_predicted_work(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    prompt = "say " + "x" * 500
    assert alone.http.post("/v1/completions", json={**BODY, "prompt": prompt}).status_code == 200
    first = controller.seen[0]
    controller.tell(KvEvents(1, stored=first.hashes))
    pages = len(first.hashes) // 16
    eventually(lambda: alone.ops.get("/debug/queue").json()["tiny"]["cached_pages"] == pages)
    controller.granting = False
    eventually(lambda: not controller.heads)  # the heads of the first request are gone
    requests = [Background(alone, prompt)]
    eventually(lambda: len(controller.heads) == 1)
    head = controller.heads[0]
    assert head.work_s < first.work_s
    controller.tell(KvEvents(2, removed=first.hashes[-16 * 10 :]))
    eventually(lambda: alone.ops.get("/debug/queue").json()["tiny"]["cached_pages"] == pages - 10)
    requests.append(Background(alone, prompt))
    eventually(lambda: len(controller.heads) == 2)
    assert controller.heads[1].work_s > head.work_s
    controller.granting = True
    for request in requests:
        request.join(PATIENT_S)
        assert request.status == 200


def test_a_gap_in_kv_events_requests_a_snapshot(alone: Any, eventually: Any) -> None:
    controller = alone.open()
    eventually(lambda: controller.welcomes == 1)
    controller.tell(KvEvents(5, stored=b"x" * 16))
    eventually(lambda: controller.welcomes == 2)
