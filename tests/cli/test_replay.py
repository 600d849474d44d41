"""Workloads are played open loop against a server that answers, refuses, stalls and breaks."""

from __future__ import annotations

import http.server
import io
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from medha.cli.open_loop import Target, faults, prompts_from
from medha.cli.replay import ReplayOptions, arrivals_of, replay
from medha.errors import SetupError, SpecError
from medha.sim.workload import Arrival

REFUSED, BROKEN, ERROR, GARBLED, SLOW = 3, 4, 5, 6, 7  # prompt lengths with special answers


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}], usage=None)


class _Answers(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        """Tests need no log."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            if body["model"] == "m":
                self._whole(200, {"tokens": [11, 12, 13, 12]})
            else:
                self._whole(404, {"error": {"message": "this server has m"}})
            return
        self.server.seen.append((body, dict(self.headers)))
        length = len(body["prompt"])
        if length == REFUSED:
            self._whole(429, {"error": {"message": "no", "code": "deadline_infeasible"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("x-medha-promise-ttft-ms", "25000")
        self.end_headers()
        for chunk in self._chunks(length, body["max_tokens"]):
            self.wfile.write(chunk)
            self.wfile.flush()

    def _chunks(self, length: int, tokens: int) -> Iterator[bytes]:
        yield b": keep-alive\n\n"
        if length == SLOW:  # answer once all have arrived
            self.server.together.wait(timeout=30)
        yield piece("a")
        if length == BROKEN:
            return
        if length == ERROR:
            yield b"event: error\n" + event(error={"message": "lost", "code": "replica_lost"})
            return
        if length == GARBLED:
            yield b"data: {nonsense\n\n"
        for _ in range(tokens - 1):
            yield piece("b")
        details = {"prompt_tokens_details": {"cached_tokens": 2}}
        yield event(choices=[], usage={"completion_tokens": tokens, **details})
        yield b"data: [DONE]\n\n"

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.seen: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.together = threading.Barrier(8)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def lengths(path: Path, *pairs: tuple[int, int]) -> Path:
    rows = "\n".join(f"{prompt},{output}" for prompt, output in pairs)
    path.write_text(f"num_prefill_tokens,num_decode_tokens\n{rows}\n")
    return path


def options(server: Server, workload: Path, **more: Any) -> ReplayOptions:
    target = more.pop("target", Target(url=server.url, model="m", tpot_s=5.0))
    return ReplayOptions(target=target, workload=workload, **{"rate": 200.0, **more})


def trace(path: Path, *rows: tuple[float, int, int, list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": ms, "input_length": n, "output_length": out, "hash_ids": ids})
        for ms, n, out, ids in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_request_of_a_trace_is_answered_and_reported(server: Server, tmp_path: Path) -> None:
    rows = [(10.0 * index, 20 + index, 3, [1]) for index in range(5)]
    console = Console(file=io.StringIO(), width=200)
    out = tmp_path / "out.json"
    records = replay(options(server, trace(tmp_path / "t.jsonl", *rows), json=out), console)
    assert [record.prompt_tokens for record in records] == [20, 21, 22, 23, 24]
    assert all(r.output_tokens == 3 and r.cached_tokens == 2 and r.good for r in records)
    assert {record.ttft_deadline_s for record in records} == {25.0}
    written = json.loads(out.read_bytes())
    assert written["report"]["total"]["requests"] == 5 and written["faults"] == {}
    assert len(written["records"]) == 5


def test_prompts_are_token_ids_of_exact_length_and_output_is_forced(
    server: Server, tmp_path: Path
) -> None:
    target = Target(url=server.url, model="m", key="k", ttft_s=0.75)
    workload = trace(tmp_path / "t.jsonl", (0.0, 50, 4, []))
    (record,) = replay(options(server, workload, target=target), Console(file=io.StringIO()))
    ((body, headers),) = server.seen
    assert len(body["prompt"]) == 50 and set(body["prompt"]) <= {11, 12, 13}
    assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (4, True, True)
    assert headers["authorization"] == "Bearer k" and headers["x-medha-slo-ttft-ms"] == "750"
    assert record.ttft_deadline_s == 0.75


@pytest.mark.parametrize(
    "length, fault",
    [
        (REFUSED, "deadline_infeasible"),
        (BROKEN, "stream_broken"),
        (ERROR, "replica_lost"),
        (GARBLED, "stream_garbled"),
    ],
)
def test_a_fault_ends_its_request_and_no_other(
    server: Server, tmp_path: Path, length: int, fault: str
) -> None:
    workload = trace(tmp_path / "t.jsonl", (0.0, length, 2, []), (1.0, 30, 2, []))
    console = Console(file=(output := io.StringIO()), width=200)
    bad, good = replay(options(server, workload), console)
    assert bad.refused == fault and bad.finished_s is None and not bad.good
    assert good.refused == "" and good.good
    assert f"1 requests ended with {fault}" in output.getvalue()
    assert faults([bad, good]) == {fault: 1}


def test_requests_are_sent_on_time_while_earlier_ones_still_run(
    server: Server, tmp_path: Path
) -> None:
    workload = trace(tmp_path / "t.jsonl", *[(20.0 * i, SLOW, 1, []) for i in range(8)])
    records = replay(options(server, workload), Console(file=io.StringIO()))
    assert [record.refused for record in records] == [""] * 8
    assert all(record.finished_s is not None for record in records)


def test_a_server_without_the_model_is_reported_before_the_first_request(
    server: Server, tmp_path: Path
) -> None:
    target = Target(url=server.url, model="other")
    workload = trace(tmp_path / "t.jsonl", (0.0, 9, 1, []))
    with pytest.raises(SetupError, match=r"tokenize refuses .* with 404: this server has m"):
        replay(options(server, workload, target=target), Console(file=io.StringIO()))
    assert server.seen == []


def test_an_address_without_a_server_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    target = Target(url=f"http://127.0.0.1:{port}", model="m")
    workload = trace(tmp_path / "t.jsonl", (0.0, 9, 1, []))
    with pytest.raises(SetupError, match=r"does not answer for m .* check the URL"):
        replay(ReplayOptions(target=target, workload=workload), Console(file=io.StringIO()))


def test_lengths_arrive_at_the_rate_and_are_scaled_and_cut(server: Server, tmp_path: Path) -> None:
    workload = lengths(tmp_path / "l.csv", (1000, 10), (100_000, 20))
    arrivals = arrivals_of(
        options(server, workload, rate=10.0, count=400, scale_lengths=0.1, longest_tokens=5000)
    )
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals} == {
        (100, 1),
        (5000, 2),
    }
    assert arrivals[-1].arrival_s == pytest.approx(40.0, rel=0.2)
    twice = arrivals_of(options(server, workload, rate=10.0, count=400, speed=2.0))
    assert twice[-1].arrival_s == pytest.approx(arrivals[-1].arrival_s / 2)


def test_azures_trace_is_recognised_by_its_columns(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.9799600,110,27\n"
    )
    first, second = arrivals_of(options(server, path, rate=None))
    assert (first.prompt_tokens, second.output_tokens) == (4808, 27)
    assert second.arrival_s == pytest.approx(1.0)


def test_lengths_without_a_rate_are_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--rate is missing: must be given"):
        arrivals_of(options(server, lengths(tmp_path / "l.csv", (1, 1)), rate=None))


def test_a_workload_that_is_no_file_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--workload is .*: must be a file"):
        arrivals_of(options(server, tmp_path / "none.csv"))


def test_requests_that_share_blocks_share_exactly_those_tokens() -> None:
    prompt = prompts_from(list(range(100)), seed=3, block_tokens=16)
    first = prompt(Arrival(id="a", arrival_s=0, prompt_tokens=40, blocks=(1, 2)))
    second = prompt(Arrival(id="b", arrival_s=0, prompt_tokens=40, blocks=(1, 3)))
    same = prompt(Arrival(id="a", arrival_s=9, prompt_tokens=40, blocks=(1, 2)))
    assert first[:16] == second[:16] and first[16:32] != second[16:32] and first[32:] != second[32:]
    assert same == first and len(first) == len(second) == 40
