"""LoRA adapters at the router: names of models, of cached pages, and replicas that have them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import openai
import pytest
from tests.router.conftest import HERMES, TEMPLATE, digest

from medha.config import RouterModel
from medha.messages import Hello
from medha_router.models import ModelRegistry

Routers = Callable[..., Any]
Eventually = Callable[..., None]
Hellos = Callable[..., Hello]
PATIENT_S = 30.0
LONG = "the same words again and again " * 4


def ask(running: Any, model: str, prompt: str = "say hello", tokens: int = 20) -> str:
    answer = running.client.completions.create(model=model, prompt=prompt, max_tokens=tokens)
    assert answer.model == model
    text: str = answer.choices[0].text
    return text


def serves(running: Any, name: str) -> bool:
    """Return True if the replica takes requests."""
    page = running.ops.get("/debug/queue").json()["tiny"]
    return name in [replica["name"] for replica in page["replicas"] if replica["open"]]


@pytest.mark.parametrize("learn", [True, False])
def test_a_request_for_an_adapter_reaches_its_replica_with_its_name(
    learn: bool, running_with: Routers
) -> None:
    models = () if learn else (RouterModel(name="tiny", max_context_tokens=2048),)
    running = running_with(models=models, learn=learn)
    controller = running.open(adapters={"legal": "1", "poems": "2"})
    assert ask(running, "tiny:legal") == ask(running, "tiny") == "hello"
    assert [submit.adapter for submit in controller.seen] == ["legal", ""]


def test_the_list_of_models_has_adapters_with_their_parent(running_with: Routers) -> None:
    running = running_with(models=(), learn=True)
    running.open(adapters={"legal": "1", "poems": "2"})
    listed = running.http.get("/v1/models").json()["data"]
    assert [(entry["id"], entry["parent"]) for entry in listed] == [
        ("tiny", None),
        ("tiny:legal", "tiny"),
        ("tiny:poems", "tiny"),
    ]
    model = running.http.get("/v1/models/tiny:legal").json()
    assert (model["id"], model["max_model_len"]) == ("tiny:legal", 4096)
    assert [entry.id for entry in running.client.models.list()][1] == "tiny:legal"
    counted = running.http.post("/tokenize", json={"model": "tiny:legal", "prompt": "say hello"})
    assert counted.json()["count"] > 0


@pytest.mark.parametrize("name", ["tiny:prose", "tiny:", "tiny:legal:", ":legal", "legal"])
def test_an_unknown_adapter_is_an_error_that_names_the_known(
    name: str, running_with: Routers
) -> None:
    running = running_with(models=(), learn=True, learn_s=0.0)
    running.open(adapters={"legal": "1"})
    with pytest.raises(openai.NotFoundError, match="this server has tiny, tiny:legal") as error:
        ask(running, name)
    assert error.value.code == "model_not_found" and error.value.param == "model"


def test_chats_with_an_adapter_have_its_template(running_with: Routers) -> None:
    def adapted(controller: Any) -> None:
        poems = HERMES.decode().replace("assistant", "poet").replace("<|start|>{{", "<|start|>*{{")
        data = json.dumps({"poems": poems}).encode()
        controller.by_hash[digest(data)] = data
        files = controller.hello.files | {"adapter_templates.json": digest(data)}
        controller.hello = msgspec.structs.replace(controller.hello, files=files)

    running = running_with()
    running.open(template=TEMPLATE, adapters={"legal": "1", "poems": "2"}, before=adapted)
    create, messages = (
        running.client.chat.completions.create,
        [{"role": "user", "content": "say x"}],
    )
    tools = [{"type": "function", "function": {"name": "f"}}]
    for name, prompt in (("tiny", "user: say x\n"), ("tiny:legal", "user: say x\n")):
        assert create(model=name, messages=messages).choices[0].message.content == "x"
        assert running.prompt() == prompt
        with pytest.raises(openai.BadRequestError, match="takes none"):
            create(model=name, messages=messages, tools=tools)
    assert create(model="tiny:poems", messages=messages).choices[0].message.content == "x"
    assert running.prompt() == "*user: say x"
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    messages[0]["content"] = f"say {call}"
    answer = create(model="tiny:poems", messages=messages, tools=tools).choices[0]
    assert answer.finish_reason == "tool_calls" and '"name": "f"' in running.prompt()
    counted = running.http.post("/tokenize", json={"model": "tiny:poems", "messages": messages})
    assert counted.json()["count"] == len(f"<*user: say {call}<")


def test_a_template_that_does_not_parse_ends_the_chats_of_its_adapter_alone(
    running_with: Routers, caplog: pytest.LogCaptureFixture
) -> None:
    def adapted(controller: Any) -> None:
        data = json.dumps({"poems": "{% if %}", "legal": TEMPLATE.decode()}).encode()
        controller.by_hash[digest(data)] = data
        files = controller.hello.files | {"adapter_templates.json": digest(data)}
        controller.hello = msgspec.structs.replace(controller.hello, files=files)

    running = running_with()
    controller = running.open(adapters={"legal": "1", "poems": "2"}, before=adapted)
    create = running.client.chat.completions.create
    messages: Any = [{"role": "user", "content": "say x"}]
    for name in ("tiny", "tiny:legal"):
        assert create(model=name, messages=messages).choices[0].message.content == "x"
    fault = r"adapter poems serves no chats: its chat_template\.jinja is not a Jinja template"
    with pytest.raises(openai.BadRequestError, match=fault) as error:
        create(model="tiny:poems", messages=messages)
    assert error.value.code == "no_chat_template"
    assert ask(running, "tiny:poems") == "hello" and not controller.rejected
    assert "adapter poems of tiny serves no chats: chat_template.jinja is not" in caplog.text


def test_adapters_share_no_names_of_pages(running_with: Routers) -> None:
    """Equal names would let a request read pages that another adapter computed."""
    running = running_with(models=(), learn=True)
    controller = running.open(adapters={"legal": "1", "poems": "2"})
    for model in ("tiny", "tiny:legal", "tiny:poems", "tiny:legal"):
        ask(running, model, LONG)
    tokens = {submit.tokens for submit in controller.seen}
    base, legal, poems, again = (submit.hashes for submit in controller.seen)
    assert len(tokens) == 1 and len(base) > 32
    assert legal == again
    names = [
        {hashes[at : at + 16] for at in range(0, len(hashes), 16)}
        for hashes in (base, legal, poems)
    ]
    assert not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])
    assert len({submit.salt for submit in controller.seen}) == 3


def test_a_request_goes_on_with_its_adapter_on_another_replica(
    running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True)
    controllers = [running.open(name, adapters={"legal": "1"}) for name in ("r0", "r1")]
    for controller in controllers:
        controller.emitting.clear()
    texts: list[str] = []
    client = threading.Thread(
        target=lambda: texts.append(ask(running, "tiny:legal", "say a longer story"))
    )
    client.start()
    eventually(lambda: any(controller.running for controller in controllers), PATIENT_S)
    first, second = sorted(controllers, key=lambda controller: not controller.running)
    second.emitting.set()
    first.die()
    client.join(PATIENT_S)
    assert texts == ["a longer story"]
    assert [submit.adapter for submit in second.seen] == ["legal"]


def test_only_replicas_that_have_an_adapter_serve_it(
    running_with: Routers, eventually: Eventually
) -> None:
    """As in a rolling update that adds an adapter, or replaces it."""
    running = running_with(models=(), learn=True)
    old = running.open("r0", adapters={"legal": "1"})
    new = running.join("r1", adapters={"legal": "2", "poems": "1"})
    eventually(lambda: serves(running, "r1"), PATIENT_S)
    for _ in range(4):
        ask(running, "tiny:poems")
    assert [submit.adapter for submit in new.seen] == ["poems"] * 4 and not old.seen
    new.draining = True
    eventually(lambda: not serves(running, "r1"), PATIENT_S)
    with pytest.raises(openai.InternalServerError, match="with the adapter poems are gone"):
        ask(running, "tiny:poems")
    assert ask(running, "tiny:legal") == "hello" and len(old.seen) == 1


def test_an_adapter_is_known_before_its_first_replica() -> None:
    registry = ModelRegistry(
        (RouterModel(name="base", max_context_tokens=9, adapters=("legal",)),), forget_s=1.0
    )
    named = registry.named("base:legal")
    assert named is not None and (named[0].name, named[1]) == ("base", "legal")
    assert registry.names == ("base", "base:legal")


def test_a_model_with_the_whole_name_precedes_an_adapter() -> None:
    models = (
        RouterModel(name="base", max_context_tokens=9, adapters=("7b",)),
        RouterModel(name="base:7b", max_context_tokens=9, adapters=("legal",)),
    )
    registry = ModelRegistry(models, forget_s=1.0)
    for name, expected in (
        ("base:7b", ("base:7b", "")),
        ("base:7b:legal", ("base:7b", "legal")),
        ("base", ("base", "")),
    ):
        named = registry.named(name)
        assert named is not None and (named[0].name, named[1]) == expected
    assert registry.names == ("base", "base:7b", "base:7b:legal"), "each once"


def names_of(running: Any) -> list[str]:
    return [entry.id for entry in running.client.models.list()]


@pytest.mark.parametrize("leaves", ["r0", "r1"])
def test_a_learned_model_forgets_adapters_with_their_replicas(
    leaves: str, running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True, learn_s=0.0)
    running.open("r0", adapters={"legal": "1"})
    running.join("r1", adapters={"poems": "1"})
    eventually(lambda: serves(running, "r1"), PATIENT_S)
    assert names_of(running) == ["tiny", "tiny:legal", "tiny:poems"]
    next(known for known in running.controllers if known.hello.replica == leaves).die()
    kept = "tiny:poems" if leaves == "r0" else "tiny:legal"
    eventually(lambda: names_of(running) == ["tiny", kept], PATIENT_S)


def test_a_waiting_request_moves_only_to_a_version_with_its_adapter(
    running_with: Routers, eventually: Eventually
) -> None:
    running = running_with(models=(), learn=True, learn_s=0.0)
    old = running.open("r0", adapters={"legal": "1"})
    old.granting = False
    texts: list[str] = []
    client = threading.Thread(target=lambda: texts.append(ask(running, "tiny:legal")))
    client.start()
    page = running.ops.get
    eventually(lambda: page("/debug/queue").json()["tiny"]["waiting"] == 1, PATIENT_S)
    without = running.join("r1")
    eventually(lambda: serves(running, "r1"), PATIENT_S)
    old.draining = True
    eventually(lambda: not serves(running, "r0"), PATIENT_S)
    other = running.join("r2", adapters={"legal": "2"})
    client.join(PATIENT_S)
    assert texts == ["hello"] and without.seen == []
    assert [submit.adapter for submit in other.seen] == ["legal"]
