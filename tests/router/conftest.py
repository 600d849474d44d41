"""A running router on loopback ports, a byte-level tokenizer, and a fake controller.

The controller uses the real protocol over a real socket, on its own thread. It "generates" the text
after the last `say ` of the prompt, one byte per token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
import tokenizers
import uvloop

from medha.adapters.sockets import Dialer
from medha.config import RouterConfig, RouterModel
from medha.messages import (
    Abort,
    Accepted,
    Codec,
    Failed,
    FetchFile,
    FilePart,
    Finished,
    Grant,
    Head,
    Heads,
    Hello,
    KvEvents,
    Load,
    LoadReport,
    Logprob,
    PromptLogprobs,
    Rejected,
    ReplicaMessage,
    RouterMessage,
    Submit,
    TenantCounts,
    Tokens,
    Welcome,
    from_bytes,
)
from medha.model import ModelShape
from medha.profile import CPU_CORE
from medha.request import Slo, SloClass
from medha.topology import Topology
from medha_router.app import RunningRouter, opened
from medha_router.tokenization.pool import TokenizerPool

PATIENT_S = 60.0
"""For what must happen soon: a busy machine may not run a thread for seconds."""
MODEL = "tiny"
SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")
END = 258  # <|end|>
SHAPE = ModelShape(
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=128,
    vocab=259,
    param_bytes=4.0,
    kv_bytes=4.0,
)
TEMPLATE = b"""{%- for message in messages -%}
<|start|>{{ message.role }}: {{ message.content }}
{% endfor -%}{% if add_generation_prompt %}<|start|>{% endif %}"""
CLASSES = (
    SloClass(name="default", slo=Slo(ttft_floor_s=20.0, tpot_s=5.0)),
    SloClass(name="eager", slo=Slo(ttft_floor_s=0.0001, ttft_multiplier=0.001, tpot_s=5.0)),
    SloClass(
        name="patient",
        slo=Slo(ttft_floor_s=0.0001, ttft_multiplier=0.001, tpot_s=5.0),
        when_infeasible="relegate",
    ),
)

HERMES = b"""{%- if tools %}<tool_call> tools: {{ tools | tojson }}
{% endif %}{%- for message in messages -%}
<|start|>{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}
{% endfor -%}{% if add_generation_prompt %}<|start|>{% endif %}
{%- if enable_thinking is false %}<think></think>{% endif %}"""
"""A template that takes tools and may leave thinking out, in the form of Hermes and Qwen."""


def byte_level_tokenizer(*more: str, turned: bool = False) -> bytes:
    """256 bytes, and special tokens: SPECIAL and `more`. A byte is a token: characters get split.

    If `turned`, every byte has another token.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet(), reverse=turned)
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *more])
    return tokenizer.to_str().encode()


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def model_files(tokenizer: bytes = b"", template: bytes = TEMPLATE) -> dict[str, bytes]:
    contents = tokenizer or byte_level_tokenizer()
    return {"tokenizer.json": contents, "chat_template.jinja": template}


def introduction(name: str = "r0", **changes: object) -> Hello:
    """The Hello of a replica of the model."""
    hello = Hello(
        replica=name,
        incarnation="1",
        model=MODEL,
        shape=SHAPE,
        topology=Topology(),
        page_tokens=16,
        max_context_tokens=4096,
        classes=CLASSES,
        stop_tokens=(END,),
        profile=msgspec.json.encode(CPU_CORE),
        files={file: digest(data) for file, data in model_files().items()},
    )
    return msgspec.structs.replace(hello, **changes)


class Controller(threading.Thread):
    """A fake controller of a replica.

    While `granting`, it grants every head. While `emitting` is set, it emits at most `burst` tokens
    per request and turn. `seen` records every Submit, `aborted` every Abort. `tokenizer` and
    `template` replace the usual ones.
    """

    def __init__(
        self,
        address: str,
        name: str = "r0",
        tokenizer: bytes = b"",
        template: bytes = TEMPLATE,
        **changes: object,
    ) -> None:
        super().__init__(daemon=True, name=name)
        files = model_files(tokenizer, template)
        self.tokenizer = files["tokenizer.json"]
        self.by_hash = {digest(data): data for data in files.values()}
        hashes = {file: digest(data) for file, data in files.items()}
        self.hello = introduction(name, **{"files": hashes, **changes})
        self.load = Load(free_pages=(4096,), total_pages=(4096,), page_tokens=16)
        self.granting, self.emitting, self.burst = True, threading.Event(), 3
        self.part_bytes = 1000
        self.emitting.set()
        self.seen: list[Submit] = []
        self.aborted: list[str] = []
        self.heads: tuple[Head, ...] = ()
        self.head_log: list[tuple[str, ...]] = []
        self.counts: list[TenantCounts] = []
        self.welcomes = 0
        self.rejected: list[str] = []
        self.fails: Failed | None = None
        self.silent = self.draining = self.quiet = False
        self.takes_early = False
        self._running: dict[str, tuple[Submit, list[int], int]] = {}
        self._granted: dict[str, float] = {}  # id -> when its lease ends
        self._extra: queue.SimpleQueue[ReplicaMessage] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._link: Dialer[ReplicaMessage, RouterMessage] = Dialer(
            address, name.encode(), sends=Codec(ReplicaMessage), receives=Codec(RouterMessage)
        )

    # --- for tests --------------------------------------------------------------------------------

    def tell(self, message: ReplicaMessage) -> None:
        """Send a further message, from the test's thread."""
        self._extra.put(message)

    def forget(self, name: str) -> None:
        """Stop serving a request silently; it may be granted again."""
        self._running.pop(name, None)
        self._granted.pop(name, None)

    def die(self) -> None:
        """Stop at once, as if killed, without a further message."""
        self._ended.set()
        self.join(PATIENT_S)
        self._link.close()

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    # --- protocol ---------------------------------------------------------------------------------

    def run(self) -> None:
        self._link.send(self.hello)
        beat = 0.0
        while not self._ended.is_set():
            message = self._link.receive(0.005)
            if message is not None:
                self._take(message)
            while not self._extra.empty():
                self._link.send(self._extra.get())
            if not self.silent and time.monotonic() - beat > 0.1:
                beat = time.monotonic()
                self._link.send(LoadReport(self.load, self.draining, self.quiet))
            self._turn()

    def _take(self, message: RouterMessage) -> None:
        match message:
            case Welcome():
                self.welcomes += 1
                self._link.send(LoadReport(self.load))
                self._link.send(KvEvents(0, snapshot=True))
            case Rejected(reason=reason):
                self.rejected.append(reason)
            case FetchFile(hash=name, offset=offset):
                data = self.by_hash[name]
                part = data[offset : offset + self.part_bytes]
                self._link.send(FilePart(name, offset, len(data), part))
            case Heads(heads=heads):
                self.heads = heads
                self.head_log.append(tuple(head.id for head in heads))
                for submit in message.submits if self.takes_early else ():
                    self._submit(submit)
            case TenantCounts():
                self.counts.append(message)
            case Submit():
                self._submit(message)
            case Abort(id=name):
                if name not in self.aborted:  # the router repeats Abort for an ended request
                    self.aborted.append(name)
                self._running.pop(name, None)

    def _submit(self, submit: Submit) -> None:
        self.seen.append(submit)
        self.heads = tuple(head for head in self.heads if head.id != submit.id)
        if self.fails is not None:
            self._link.send(msgspec.structs.replace(self.fails, id=submit.id))
            return
        self._link.send(Accepted(submit.id, 0, 0.01))
        tokens = from_bytes(submit.tokens).tolist()
        if submit.sampling.prompt_logprobs is not None:
            self._score(submit, tokens[1 : len(tokens) - submit.emitted])
        words = spoken(tokens[: len(tokens) - submit.emitted], self.tokenizer)
        self._running[submit.id] = (submit, words, submit.emitted)

    def _score(self, submit: Submit, tokens: list[int]) -> None:
        """Send made-up log probabilities of the prompt in two overlapping parts."""
        count = submit.sampling.prompt_logprobs or 0
        logprobs = [
            Logprob(-position / 8, ((token, -position / 8), (65, -9.0))[:count])
            for position, token in enumerate(tokens, 1)
        ]
        middle = len(logprobs) // 2
        self._link.send(PromptLogprobs(submit.id, 1, tuple(logprobs[: middle + 1])))
        self._link.send(PromptLogprobs(submit.id, 1 + middle, tuple(logprobs[middle:])))

    def _turn(self) -> None:
        now = time.monotonic()
        wanted = [head.id for head in self.heads if self._granted.get(head.id, 0.0) < now]
        if self.granting and wanted:
            self._granted.update(dict.fromkeys(wanted, now + 0.2))
            self._link.send(Grant(tuple(wanted)))
        if self.emitting.is_set():
            for name in list(self._running):
                self._emit(name)

    def _emit(self, name: str) -> None:
        submit, words, done = self._running[name]
        fresh = words[done : min(done + self.burst, submit.max_output_tokens)]
        logprobs: tuple[Logprob, ...] = ()
        if submit.sampling.logprobs is not None:
            top = tuple((token, -0.5 - i) for i, token in enumerate((65, 66, 67)))
            logprobs = tuple(Logprob(-0.25, top[: submit.sampling.logprobs]) for _ in fresh)
        self._link.send(Tokens(name, done, tuple(fresh), logprobs))
        done += len(fresh)
        self._running[name] = (submit, words, done)
        ended = fresh[-1] in submit.sampling.stop_tokens if fresh else True
        if ended or done >= min(submit.max_output_tokens, len(words)):
            del self._running[name]
            prompt = len(submit.tokens) // 4 - submit.emitted
            self._link.send(Finished(name, "stop" if ended else "length", prompt, done, 0))


def spoken(prompt: list[int], tokenizer: bytes) -> list[int]:
    """Return the tokens that the "model" generates after a prompt, and the end token."""
    order = tokenizers.Tokenizer.from_str(tokenizer.decode())
    text = order.decode(prompt, skip_special_tokens=False)
    for special in SPECIAL:
        text = text.replace(special, "")
    words = text.rpartition("say ")[2].removesuffix("\n")
    return [*order.encode(words, add_special_tokens=False).ids, END]


class Running:
    """A router on its own thread, and the controllers that dial it."""

    def __init__(self, tokens: TokenizerPool, **settings: Any) -> None:
        self._tokens = tokens
        self._config = RouterConfig(
            ops_port=0,
            fleet_bind="tcp://127.0.0.1:0",
            **{
                "port": 0,
                "models": (RouterModel(name=MODEL, max_context_tokens=2048, classes=CLASSES),),
                **settings,
            },
        )
        self._ready = threading.Event()
        self.router: RunningRouter
        self.loop: asyncio.AbstractEventLoop
        self.controllers: list[Controller] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENT_S)
        self.client = openai.OpenAI(
            base_url=f"{self.router.url}/v1", api_key="none", max_retries=0, timeout=PATIENT_S
        )
        self.http = httpx.Client(base_url=self.router.url, timeout=PATIENT_S)
        self.ops = httpx.Client(
            base_url=f"http://127.0.0.1:{self.router.ops_port}", timeout=PATIENT_S
        )

    def join(
        self, name: str = "r0", before: Callable[[Controller], object] = repr, **changes: Any
    ) -> Controller:
        """Start a controller that dials; `before` prepares it."""
        controller = Controller(self.router.fleet_address, name, **changes)
        before(controller)
        self.controllers.append(controller)
        controller.start()
        return controller

    def open(self, name: str = "r0", **changes: Any) -> Controller:
        """Start a controller that dials, and wait until it serves."""
        controller = self.join(name, **changes)
        wait_until(
            lambda: (
                name in self.ops.get("/debug/queue").text
                and self.ops.get("/debug/queue").json()[MODEL]["open"]
            )
        )
        return controller

    def prompt(self) -> str:
        """Return the text of the last prompt that reached the first controller."""
        controller = self.controllers[0]
        tokenizer = tokenizers.Tokenizer.from_str(controller.tokenizer.decode())
        return str(tokenizer.decode(from_bytes(controller.seen[-1].tokens).tolist()))

    @staticmethod
    def hello() -> Hello:
        return introduction()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        self.client.close()
        self.http.close()
        self.ops.close()
        self.router.server.should_exit = self.router.server.force_exit = True
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()
        for controller in self.controllers:
            if controller.is_alive():
                controller.die()

    def _serve(self) -> None:
        uvloop.run(self._main())

    async def _main(self) -> None:
        async with opened(self._config, self._tokens) as router:
            self.router, self.loop = router, asyncio.get_running_loop()
            self._ready.set()
            await router.serve()


def wait_until(condition: Callable[[], object], within_s: float = PATIENT_S) -> None:
    """Wait until a condition holds; fails after a timeout."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "the condition did not hold in time"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def tokens() -> Iterator[TokenizerPool]:
    """Tokenizer processes shared by all routers: a start takes half a second."""
    with contextlib.closing(TokenizerPool()) as pool:
        yield pool


@pytest.fixture(scope="module")
def served(tokens: TokenizerPool) -> Iterator[Running]:
    """A router with one controller, shared by a module's tests."""
    with contextlib.closing(Running(tokens, keepalive_s=0.3, max_body_bytes=1 << 20)) as running:
        running.open()
        yield running


@pytest.fixture(scope="module")
def hermes(tokens: TokenizerPool) -> Iterator[Running]:
    """A router with a model whose chat template takes tools."""
    with contextlib.closing(Running(tokens)) as running:
        running.open(template=HERMES)
        yield running


@pytest.fixture
def alone(tokens: TokenizerPool) -> Iterator[Running]:
    """A router for a single test, without controllers."""
    with contextlib.closing(Running(tokens, keepalive_s=0.3, max_queue=4)) as running:
        yield running


@pytest.fixture(scope="session")
def byte_level_json() -> bytes:
    """`tokenizer.json` of the byte-level tokenizer."""
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def turned_json() -> bytes:
    """`tokenizer.json` of another tokenizer, with other token ids."""
    return byte_level_tokenizer(turned=True)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds; fails after a timeout."""
    return wait_until


@pytest.fixture
def make_hello() -> Callable[..., Hello]:
    """Make a Hello of the model, with changes."""
    return introduction


@pytest.fixture
def running_with(tokens: TokenizerPool) -> Iterator[Callable[..., Running]]:
    """Make routers with the settings of a test."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(
            contextlib.closing(Running(tokens, **settings))
        )


@pytest.fixture
def dial() -> Iterator[Callable[[str], Controller]]:
    """Start controllers that dial the router of another process."""
    controllers: list[Controller] = []

    def start(address: str) -> Controller:
        controllers.append(Controller(address))
        controllers[-1].start()
        return controllers[-1]

    yield start
    for controller in controllers:
        controller.die()


@pytest.fixture(autouse=True)
def _no_defect(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail if the router logged a traceback: no test may cause a defect."""
    yield
    traces = [record for record in caplog.get_records("call") if record.exc_info]
    assert [record.getMessage() for record in traces] == []
