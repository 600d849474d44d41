"""Prompts and API keys appear in no log, at any level."""

from __future__ import annotations

import hashlib
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from medha.adapters.logs import JsonLines
from medha.messages import Failed

EVENTUALLY_S = 30.0
SECRET = "quokka"
KEY, WRONG_KEY = "key-of-numbat", "key-of-bilby"


def lines_of(caplog: pytest.LogCaptureFixture) -> str:
    """Return every record as the process would write it, with arguments and traceback."""
    formatter = JsonLines("router")
    return "\n".join(
        f"{formatter.format(record)} {record.args!r}" for record in caplog.get_records("call")
    )


def bodies() -> list[dict[str, Any]]:
    """Return requests of both endpoints, streaming and not."""
    text = {"model": "tiny", "prompt": f"say {SECRET}", "max_tokens": 20}
    messages = [{"role": "user", "content": f"say {SECRET}"}]
    chat = {"model": "tiny", "messages": messages, "max_tokens": 20}
    return [
        {**body, "stream": stream, "user": SECRET, "stop": [SECRET * 2]}
        for body in (text, chat)
        for stream in (False, True)
    ]


def ask(running: Any, body: dict[str, Any], key: str = KEY, **headers: str) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return running.http.post(path, json=body, headers={"authorization": f"Bearer {key}", **headers})


def test_prompts_and_keys_are_in_no_log(
    running_with: Callable[..., Any],
    eventually: Callable[..., None],
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{hashlib.sha256(KEY.encode()).hexdigest()}\n")
    with caplog.at_level(logging.DEBUG):
        running = running_with(api_keys=str(keys))
        controller = running.open()
        for body in bodies():
            served = ask(running, body)
            assert served.status_code == 200 and "quo" in served.text
            wrong_role = [{"role": SECRET, "content": SECRET}]
            for wrong in (
                {"n": SECRET},
                {"max_tokens": -1},
                {"model": SECRET},
                {"messages": wrong_role} if "messages" in body else {"prompt": []},
                {"logit_bias": {SECRET: 1}},
            ):
                assert ask(running, {**body, **wrong}).status_code in (400, 404)
            assert ask(running, body, **{"x-medha-class": "eager"}).status_code == 429
            assert ask(running, body, **{"x-medha-class": SECRET}).status_code == 400
            assert ask(running, body, WRONG_KEY).status_code == 401
        broken = running.http.post(
            "/v1/completions",
            content=f'{{"prompt": "{SECRET}", ',
            headers={"authorization": f"Bearer {KEY}"},
        )
        assert broken.status_code == 400
        controller.fails = Failed("x", "memory", "out of memory")
        assert ask(running, bodies()[0]).status_code == 500
        eventually(lambda: "failed a request: memory" in lines_of(caplog), EVENTUALLY_S)
    text = lines_of(caplog)
    assert "finished with" in text and "refused: deadline_infeasible" in text
    for secret in (SECRET, KEY, WRONG_KEY, hashlib.sha256(KEY.encode()).hexdigest()):
        assert secret not in text
