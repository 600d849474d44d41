"""Plays arrivals against a live router, open loop: a request is sent when its time comes, whatever
became of those before it. Latency counts from the time it was due, so a late client shows too.

What comes back is the simulator's `RequestRecord`, so both are reported by the same code. An error
of any kind ends one request, never the play.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np

from medha.errors import SetupError
from medha.sim.report import RequestRecord
from medha.sim.workload import BLOCK_TOKENS, Arrival

SAMPLE = "The quick brown fox jumps over the lazy dog, while 0123456789 sheep stand by and wonder."
REQUEST_TIMEOUT_S = 3600.0

Prompts = Callable[[Arrival], list[int]]
OnRecord = Callable[[RequestRecord], None]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Address, model and SLO of the requests.

    `ttft_s`: sent with every request in a header; without it the promise in the answer is the
    deadline, or `unpromised_ttft_s` where none is given.
    """

    url: str
    model: str
    key: str = ""
    ttft_s: float | None = None
    unpromised_ttft_s: float = 0.5
    tpot_s: float = 0.03

    def headers(self, slo_class: str) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        if self.ttft_s is not None:
            headers["x-medha-slo-ttft-ms"] = f"{self.ttft_s * 1000:.0f}"
        if slo_class != "default":
            headers["x-medha-class"] = slo_class
        return headers


class _Progress:
    """State of a request; times on the monotonic clock."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.worst_gap_s = 0.0
        self.output_tokens = self.cached_tokens = 0
        self.promise_s: float | None = None
        self.finished = False
        self.fault = ""

    def token(self, now: float) -> None:
        if self.first_s is None:
            self.first_s = now
        else:
            self.worst_gap_s = max(self.worst_gap_s, now - self.last_s)
        self.last_s = now
        self.output_tokens += 1


async def play(
    target: Target, arrivals: Sequence[Arrival], prompts: Prompts, on_record: OnRecord
) -> list[RequestRecord]:
    """Send every arrival at its time; records in the order of arrivals, zero is the start."""
    start = time.monotonic()
    async with connect(target.url) as client:
        tasks = [
            asyncio.create_task(_due(client, target, arrival, prompts, start, on_record))
            for arrival in arrivals
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()


def connect(url: str) -> httpx.AsyncClient:
    """A client that opens as many connections as the load asks for."""
    timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=10.0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits, trust_env=False)


async def _due(
    client: httpx.AsyncClient,
    target: Target,
    arrival: Arrival,
    prompts: Prompts,
    start: float,
    on_record: OnRecord,
) -> RequestRecord:
    await asyncio.sleep(max(0.0, start + arrival.arrival_s - time.monotonic()))
    record = await ask(client, target, arrival, prompts(arrival), start)
    on_record(record)
    return record


async def ask(
    client: httpx.AsyncClient, target: Target, arrival: Arrival, prompt: list[int], start: float
) -> RequestRecord:
    """Send one request now and follow its answer to the end."""
    seen = _Progress()
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": arrival.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with client.stream(
            "POST",
            "/v1/completions",
            content=msgspec.json.encode(body),
            headers={"content-type": "application/json", **target.headers(arrival.slo_class)},
        ) as answer:
            await _follow(answer, seen)
    except httpx.HTTPError as error:
        seen.fault = type(error).__name__
    return _record(target, arrival, seen, start)


async def _follow(answer: httpx.Response, seen: _Progress) -> None:
    if answer.status_code != 200:
        seen.fault = _code(await answer.aread(), answer.status_code)
        return
    promise = answer.headers.get("x-medha-promise-ttft-ms")
    seen.promise_s = float(promise) / 1000 if promise else None
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            if line.startswith("event: error"):
                seen.fault = "stream_error"
            continue
        data = line[6:]
        if data == "[DONE]":
            seen.finished = not seen.fault
            return
        _piece(data, seen, time.monotonic())
    seen.fault = seen.fault or "stream_broken"


def _piece(data: str, seen: _Progress, now: float) -> None:
    try:
        event: dict[str, Any] = msgspec.json.decode(data.encode())
    except msgspec.DecodeError:
        seen.fault = "stream_garbled"
        return
    if "error" in event:
        seen.fault = str((event["error"] or {}).get("code") or "stream_error")
    if event.get("choices"):
        seen.token(now)
    usage = event.get("usage")
    if usage:
        seen.output_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        seen.cached_tokens = details.get("cached_tokens") or 0


def _code(body: bytes, status: int) -> str:
    try:
        fault = msgspec.json.decode(body)["error"]
        return str(fault.get("code") or fault.get("type") or f"http_{status}")
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return f"http_{status}"


def _record(target: Target, arrival: Arrival, seen: _Progress, start: float) -> RequestRecord:
    deadline_s = target.ttft_s or seen.promise_s or target.unpromised_ttft_s
    return RequestRecord(
        id=arrival.id,
        arrival_s=arrival.arrival_s,
        prompt_tokens=arrival.prompt_tokens,
        output_tokens=seen.output_tokens,
        cached_tokens=seen.cached_tokens,
        ttft_deadline_s=deadline_s,
        tpot_s=target.tpot_s,
        first_token_s=None if seen.first_s is None else seen.first_s - start,
        finished_s=seen.last_s - start if seen.finished else None,
        worst_gap_s=seen.worst_gap_s,
        promised=seen.promise_s is not None,
        refused=seen.fault,
        slo_class=arrival.slo_class,
        tenant=arrival.tenant,
    )


async def vocabulary(client: httpx.AsyncClient, target: Target) -> list[int]:
    """Token ids of ordinary text, from the model's own tokenizer; raises SetupError without one."""
    body = {"model": target.model, "prompt": SAMPLE, "add_special_tokens": False}
    try:
        answer = await client.post("/tokenize", json=body, headers=target.headers("default"))
        if answer.is_error:
            raise SetupError(
                f"{target.url}/tokenize refuses a request for {target.model} with "
                f"{answer.status_code}: {_message(answer)}"
            )
        tokens = answer.json()["tokens"]
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise SetupError(
            f"{target.url}/tokenize does not answer for {target.model} ({error}): check the URL"
        ) from None
    return sorted(set(tokens))


def _message(answer: httpx.Response) -> str:
    """Return the message of an error, or the start of an answer of another form."""
    try:
        return str(answer.json()["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return answer.text[:200] or "no message; check the URL"


def prompts_from(vocabulary: Sequence[int], seed: int, block_tokens: int = BLOCK_TOKENS) -> Prompts:
    """Makes prompts of exact length; requests that share blocks share those tokens, no others."""
    ids = np.asarray(vocabulary)

    def drawn(key: Sequence[int], count: int) -> list[int]:
        dice = np.random.default_rng([seed, *key])
        picked: list[int] = ids[dice.integers(0, len(ids), count)].tolist()
        return picked

    def prompt(arrival: Arrival) -> list[int]:
        tokens: list[int] = []
        for block in arrival.blocks:
            tokens += drawn((1, block), block_tokens)
        missing = arrival.prompt_tokens - len(tokens)
        if missing > 0:
            key = int.from_bytes(arrival.id.encode()[-8:], "little")
            tokens += drawn((2, key), missing)
        return tokens[: arrival.prompt_tokens]

    return prompt


def faults(records: Sequence[RequestRecord]) -> Mapping[str, int]:
    """Count requests per fault."""
    counted: dict[str, int] = {}
    for record in records:
        if record.refused:
            counted[record.refused] = counted.get(record.refused, 0) + 1
    return counted
