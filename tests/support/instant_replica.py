"""A replica without a model: `python -m tests.support.instant_replica ADDRESS FOLDER`.

Uses the real protocol over real links to all processes of the router at ADDRESS, with CURVE if
FOLDER holds keys. It grants every head and answers a request at once: all tokens of a short output
in one message, a long one a token a step as an engine does. The tokens are those of a fixed text.
With `--cached`, it holds as many pages at first, and those of the prompts that it has served.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import time

import msgspec
import tokenizers

from medha.adapters.sockets import Dialer, wait
from medha.config import Curve
from medha.fleet.prefix_index import HASH_BYTES
from medha.messages import (
    Abort,
    Accepted,
    Codec,
    FetchFile,
    FilePart,
    Finished,
    Grant,
    Heads,
    Hello,
    KvEvents,
    Load,
    LoadReport,
    Rejected,
    ReplicaMessage,
    RouterMessage,
    RouterPorts,
    Submit,
    TenantCounts,
    Tokens,
    Welcome,
)
from medha.model import ModelShape
from medha.profile import H100
from medha.request import Slo, SloClass
from medha.topology import Topology

MODEL = "bench"
END = 0
AT_ONCE_TOKENS = 16
REPORT_S = 0.02
HELLO_S = 0.3
PAGES = 1 << 20
PAGE_TOKENS = 64
NAMES_PER_EVENT = 1 << 10
TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the warm sun. "
TEMPLATE = (
    b"{%- for message in messages -%}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    b"{%- endfor -%}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SHAPE = ModelShape(
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    vocab=1 << 17,
    param_bytes=2.0,
    kv_bytes=2.0,
)


def train_tokenizer(texts: list[str], vocab: int = 8192) -> bytes:
    """Train a byte-level BPE tokenizer on texts; returns `tokenizer.json`."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.to_str().encode()


RouterLink = Dialer[ReplicaMessage, RouterMessage]


class InstantReplica:
    """The replica `name` of a router. `folder` holds `tokenizer.json`, and keys for CURVE."""

    def __init__(
        self, address: str, folder: pathlib.Path, name: str, step_s: float, cached: int = 0
    ) -> None:
        contents = {
            "tokenizer.json": (folder / "tokenizer.json").read_bytes(),
            "chat_template.jinja": TEMPLATE,
        }
        self._files = {_digest(data): data for data in contents.values()}
        self._hello = Hello(
            replica=name,
            incarnation="1",
            model=MODEL,
            shape=SHAPE,
            topology=Topology(),
            page_tokens=PAGE_TOKENS,
            max_context_tokens=1 << 21,
            classes=(SloClass(slo=Slo(ttft_floor_s=30.0, tpot_s=5.0), when_infeasible="relegate"),),
            stop_tokens=(END,),
            profile=msgspec.json.encode(H100),
            files={file: _digest(data) for file, data in contents.items()},
        )
        tokenizer = tokenizers.Tokenizer.from_str(contents["tokenizer.json"].decode())
        self._words: tuple[int, ...] = tuple(tokenizer.encode(TEXT).ids)
        self._step_s, self._cached = step_s, cached
        self._events: dict[str, int] = {}  # by router
        self._load = Load(
            free_pages=(PAGES,), total_pages=(PAGES,), page_tokens=PAGE_TOKENS, share=0.9
        )
        self._granted: dict[str, set[str]] = {}  # by router
        self._running: dict[str, tuple[Submit, int, str]] = {}  # by id: tokens so far, router
        keys = folder / "replica.secret"
        self._curve: Curve | None = None
        if keys.exists():
            public = (folder / "router.public").read_text().strip()
            (folder / "server.public").write_text(public)
            self._curve = Curve(secret=str(keys), server_public=str(folder / "server.public"))
        self._name = name
        self._links: dict[str, RouterLink] = {}  # by router, which is its address
        self._welcome: set[str] = set()
        self._hello_s: dict[str, float] = {}
        self._dial(address)

    def run(self) -> None:
        """Serve until the process is ended."""
        report_s = step_s = time.monotonic()
        while True:
            self._receive(min(REPORT_S, self._step_s))
            now = time.monotonic()
            if now >= step_s:
                step_s = now + self._step_s
                self._step()
            if now >= report_s:
                report_s = now + REPORT_S
                self._report(self._load, now)

    def _dial(self, address: str) -> None:
        self._links[address] = Dialer(
            address,
            self._name.encode(),
            sends=Codec(ReplicaMessage),
            receives=Codec(RouterMessage),
            curve=self._curve,
        )

    def _receive(self, timeout_s: float) -> None:
        """Wait for messages, and take all that have arrived."""
        wait(list(self._links.values()), timeout_s)
        for router, link in list(self._links.items()):
            while (message := link.receive(0.0)) is not None:
                self._take(router, message)

    def _report(self, load: Load, now: float) -> None:
        """Send the load to routers that know this replica, and Hello to the others."""
        for router, link in self._links.items():
            if router in self._welcome:
                link.send(LoadReport(load))
            elif now - self._hello_s.get(router, 0.0) > HELLO_S:
                self._hello_s[router] = now
                link.send(self._hello)

    def _take(self, router: str, message: RouterMessage) -> None:
        link = self._links[router]
        match message:
            case Welcome():
                self._welcome.add(router)
                link.send(KvEvents(0, snapshot=True))
                self._events[router] = 0
                self._store(router, os.urandom(self._cached * HASH_BYTES))
            case RouterPorts(ports=ports):
                host = router.rpartition(":")[0]
                for address in {f"{host}:{port}" for port in ports} - self._links.keys():
                    self._dial(address)
            case Rejected(stranger=True):
                self._welcome.discard(router)
            case Rejected(reason=reason):
                raise SystemExit(reason)
            case FetchFile(hash=name, offset=offset):
                data = self._files[name]
                part = data[offset : offset + (1 << 20)]
                link.send(FilePart(name, offset, len(data), part))
            case TenantCounts():
                for other in self._welcome - {router}:
                    self._links[other].send(message)
            case Heads():
                ids = {head.id for head in message.heads}
                early = {submit.id for submit in message.submits}
                if fresh := ids - early - self._granted.get(router, set()):
                    link.send(Grant(tuple(fresh)))
                self._granted[router] = ids
                for submit in message.submits:
                    self._submit(router, submit)
            case Submit():
                self._submit(router, message)
            case Abort(id=name):
                self._running.pop(name, None)

    def _submit(self, router: str, submit: Submit) -> None:
        self._granted[router].discard(submit.id)
        self._links[router].send(Accepted(submit.id, 0, 0.001))
        count = submit.max_output_tokens
        if count > AT_ONCE_TOKENS:
            self._running[submit.id] = submit, 0, router
            return
        self._links[router].send(Tokens(submit.id, 0, self._words[:count]))
        self._finish(router, submit, count)

    def _step(self) -> None:
        """Send a token of each running request."""
        for name, (submit, emitted, router) in list(self._running.items()):
            word = self._words[emitted % len(self._words)]
            self._links[router].send(Tokens(name, emitted, (word,)))
            self._running[name] = submit, emitted + 1, router
            if emitted + 1 == submit.max_output_tokens:
                del self._running[name]
                self._finish(router, submit, emitted + 1)

    def _store(self, router: str, names: bytes) -> None:
        """Send a router the names of stored pages, in parts as a controller does."""
        size = NAMES_PER_EVENT * HASH_BYTES
        for start in range(0, len(names), size):
            self._events[router] += 1
            part = names[start : start + size]
            self._links[router].send(KvEvents(self._events[router], part))

    def _finish(self, router: str, submit: Submit, count: int) -> None:
        if self._cached and submit.hashes:
            self._store(router, submit.hashes)
        prompt_tokens = len(submit.tokens) // 4
        self._links[router].send(Finished(submit.id, "length", prompt_tokens, count))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--name", default="r0")
    parser.add_argument("--step-s", type=float, default=0.01)
    parser.add_argument("--cached", type=int, default=0)
    given = parser.parse_args()
    InstantReplica(given.address, given.folder, given.name, given.step_s, given.cached).run()


if __name__ == "__main__":
    main()
