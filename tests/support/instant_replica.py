"""A replica without a model: `python -m tests.support.instant_replica ADDRESS FOLDER`.

Uses the real protocol over a real link, with CURVE if FOLDER holds keys. It grants every head and
answers a request at once: all tokens of a short output in one message, a long one a token a step as
an engine does. The tokens are those of a fixed text.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import time

import msgspec
import tokenizers

from medha.adapters.sockets import Dialer
from medha.config import Curve
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
    Submit,
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
PAGES = 1 << 20
PAGE_TOKENS = 64
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


class InstantReplica:
    """The replica `name` of a router. `folder` holds `tokenizer.json`, and keys for CURVE."""

    def __init__(self, address: str, folder: pathlib.Path, name: str, step_s: float) -> None:
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
            classes=(SloClass(slo=Slo(ttft_floor_s=30.0, tpot_s=5.0)),),
            stop_tokens=(END,),
            profile=msgspec.json.encode(H100),
            files={file: _digest(data) for file, data in contents.items()},
        )
        tokenizer = tokenizers.Tokenizer.from_str(contents["tokenizer.json"].decode())
        self._words: tuple[int, ...] = tuple(tokenizer.encode(TEXT).ids)
        self._step_s = step_s
        self._load = Load(
            free_pages=(PAGES,), total_pages=(PAGES,), page_tokens=PAGE_TOKENS, share=0.9
        )
        self._granted: set[str] = set()
        self._running: dict[str, tuple[Submit, int]] = {}
        keys = folder / "replica.secret"
        curve = None
        if keys.exists():
            public = (folder / "router.public").read_text().strip()
            (folder / "server.public").write_text(public)
            curve = Curve(secret=str(keys), server_public=str(folder / "server.public"))
        self._link: Dialer[ReplicaMessage, RouterMessage] = Dialer(
            address,
            name.encode(),
            sends=Codec(ReplicaMessage),
            receives=Codec(RouterMessage),
            curve=curve,
        )

    def run(self) -> None:
        """Serve until the process is ended."""
        self._link.send(self._hello)
        report_s = step_s = time.monotonic()
        while True:
            message = self._link.receive(min(REPORT_S, self._step_s))
            while message is not None:
                self._take(message)
                message = self._link.receive(0.0)
            now = time.monotonic()
            if now >= step_s:
                step_s = now + self._step_s
                self._step()
            if now >= report_s:
                report_s = now + REPORT_S
                self._link.send(LoadReport(self._load))

    def _take(self, message: RouterMessage) -> None:
        match message:
            case Welcome():
                self._link.send(LoadReport(self._load))
                self._link.send(KvEvents(0, snapshot=True))
            case Rejected(reason=reason):
                raise SystemExit(reason)
            case FetchFile(hash=name, offset=offset):
                data = self._files[name]
                part = data[offset : offset + (1 << 20)]
                self._link.send(FilePart(name, offset, len(data), part))
            case Heads(heads=heads):
                ids = {head.id for head in heads}
                if fresh := ids - self._granted:
                    self._link.send(Grant(tuple(fresh)))
                self._granted = ids
            case Submit():
                self._submit(message)
            case Abort(id=name):
                self._running.pop(name, None)

    def _submit(self, submit: Submit) -> None:
        self._granted.discard(submit.id)
        self._link.send(Accepted(submit.id, 0, 0.001))
        count = submit.max_output_tokens
        if count > AT_ONCE_TOKENS:
            self._running[submit.id] = submit, 0
            return
        self._link.send(Tokens(submit.id, 0, self._words[:count]))
        self._finish(submit, count)

    def _step(self) -> None:
        """Send a token of each running request."""
        for name, (submit, emitted) in list(self._running.items()):
            self._link.send(Tokens(name, emitted, (self._words[emitted % len(self._words)],)))
            self._running[name] = submit, emitted + 1
            if emitted + 1 == submit.max_output_tokens:
                del self._running[name]
                self._finish(submit, emitted + 1)

    def _finish(self, submit: Submit, count: int) -> None:
        self._link.send(Finished(submit.id, "length", len(submit.tokens) // 4, count))


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--name", default="r0")
    parser.add_argument("--step-s", type=float, default=0.01)
    given = parser.parse_args()
    InstantReplica(given.address, given.folder, given.name, given.step_s).run()


if __name__ == "__main__":
    main()
