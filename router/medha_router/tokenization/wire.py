"""Messages between the router and its tokenizer processes, and their framing.

    router -> process                             process -> router
    LoadFiles                                     Loaded
    Encode with `messages` or `prompt`            Encoded | Planned | Declined
    Detokenize with a list of token ids           Planned | Declined
    Advance of a planned job                      Part | Answer with a payload | Declined
    ReadBody with a body                          BodyRead with a payload | Declined
    FormatTokens with int32 tokens                Answer with a payload
    Close of a planned job                        -

A frame is the lengths of both parts in 8 little-endian bytes each, then a msgpack message and its
payload, which is not copied: JSON, tokens, or an answer. A long job is planned and runs in steps,
so that its process serves other jobs between two steps.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from medha_router.protocol import PromptEnd
from medha_router.structured.tool_calls import Format

LENGTHS = struct.Struct("<QQ")
MAX_FRAME_BYTES = 1 << 30
READ_BYTES = 16 << 10
KEY_BYTES = 16

if TYPE_CHECKING:
    Bytes = bytes | bytearray | memoryview
else:
    Bytes = bytes  # msgspec decodes one of them

B = TypeVar("B", bound=bytearray | memoryview)


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a checkpoint's tokenizer files; empty if missing. `key` names the set.

    `adapter_templates`: JSON of the chat templates of adapters by name.
    """

    key: str
    tokenizer: bytes
    config: bytes = b""
    template: bytes = b""
    adapter_templates: bytes = b""


class LoadFiles(msgspec.Struct, frozen=True, tag=True):
    files: TokenizerFiles


class Encode(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Encode raw JSON, sent as the payload: `messages` (`chat`) or `prompt`.

    The hash chain that names full pages of `page_tokens` starts at `salt`; without pages (0) there
    are no names. A prompt of more than `limit_tokens` is declined, and one with a token id from
    `vocab` on; 0 is no limit. If `texts`, the outcome holds the text of each prompt (for `echo`).
    `ending`: of a chat. `tools`, `template_values`: JSON of its tools, and of further values for
    its template, or empty.
    """

    key: str
    chat: bool
    raw: Bytes
    page_tokens: int
    salt: bytes
    adapter: str = ""
    add_special_tokens: bool = True
    ending: PromptEnd = "reply"
    texts: bool = False
    tools: bytes = b""
    template_values: bytes = b""
    limit_tokens: int = 0
    vocab: int = 0
    number: int = 0


class Detokenize(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Make the answer of `/detokenize` for the payload: a JSON list of token ids."""

    key: str
    number: int = 0


class ReadBody(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Read a request body, which is the payload, by one of `dialects.readers.READERS`."""

    kind: str


class FormatTokens(msgspec.Struct, frozen=True, tag=True):
    """Make a JSON list of int32 tokens, which are the payload."""


class Known(msgspec.Struct, frozen=True):
    """The known beginning of a prompt: its pieces, tokens, last page name, and tokens after it."""

    pieces: int = 0
    tokens: int = 0
    link: bytes = b""
    rest: bytes = b""


class Advance(msgspec.Struct, frozen=True, tag=True):
    """Run a part of a planned job; the first step says what is known of each prompt."""

    number: int
    known: tuple[Known, ...] = ()


class Close(msgspec.Struct, frozen=True, tag=True):
    """Drop a planned job."""

    number: int


class Prompt(msgspec.Struct, frozen=True):
    """Token ids (int32 bytes), names of the full pages, and the text if requested."""

    tokens: bytes
    hashes: bytes
    text: str | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) // 4


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Outcome of LoadFiles; `error` is empty on success. `tool_calls`: see ChatTemplate; those of
    adapters with a template of their own apart. `adapter_faults`: of templates that do not load."""

    error: str = ""
    tool_calls: Format | None = None
    adapter_tool_calls: dict[str, Format | None] = {}
    adapter_faults: dict[str, str] = {}


class Encoded(msgspec.Struct, frozen=True, tag=True):
    prompts: tuple[Prompt, ...]


class Planned(msgspec.Struct, frozen=True, tag=True):
    """A job that runs in steps.

    `keys` holds for each prompt the keys of its pieces but the last, of KEY_BYTES each. A key names
    the text of a prompt up to the end of the piece, for one tokenizer, page size and salt.
    """

    keys: tuple[bytes, ...] = ()


class Piece(msgspec.Struct, frozen=True):
    """Tokens of one piece of a prompt, and names of the pages that it fills."""

    prompt: int
    tokens: bytes
    hashes: bytes


class Part(msgspec.Struct, frozen=True, tag=True):
    """The outcome of a step. The last one is `done` and holds the texts if requested."""

    pieces: tuple[Piece, ...] = ()
    served_bytes: int = 0
    done: bool = False
    texts: tuple[str, ...] = ()


class BodyRead(msgspec.Struct, frozen=True, tag=True):
    """The parameters of a body as JSON; the payload is their `raw`."""

    params: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The payload is the answer's JSON."""


class Declined(msgspec.Struct, frozen=True, tag=True):
    """The fields of a RequestError."""

    message: str
    status: int
    code: str | None
    param: str | None


Job = LoadFiles | Encode | Detokenize | ReadBody | FormatTokens | Advance | Close
Outcome = Loaded | Encoded | Planned | Part | BodyRead | Answer | Declined


def frame_of(message: bytes, payload: Sequence[Bytes] = ()) -> bytes:
    """Return one frame."""
    return b"".join((LENGTHS.pack(len(message), sum(map(len, payload))), message, *payload))


def send_frame(link: socket.socket, message: bytes, payload: Sequence[Bytes] = ()) -> None:
    """Send one frame; raises OSError if the other end has closed."""
    size = sum(map(len, payload))
    if size <= READ_BYTES:
        link.sendall(frame_of(message, payload))
        return
    link.sendall(LENGTHS.pack(len(message), size) + message)
    for part in payload:
        link.sendall(part)


class FrameReader(Generic[B]):
    """Receives the frames of a link, small ones in one call of the kernel.

    `make` returns a buffer of a size, and `wrap` one with some bytes. Raises OSError if the link
    closed or a length is too large.
    """

    def __init__(
        self, link: socket.socket, make: Callable[[int], B], wrap: Callable[[bytes], B]
    ) -> None:
        self._link, self._make, self._wrap = link, make, wrap
        self._held = b""

    @property
    def ready(self) -> bool:
        """True if the whole of the next frame was received."""
        if len(self._held) < LENGTHS.size:
            return False
        message, payload = LENGTHS.unpack_from(self._held)
        return len(self._held) - LENGTHS.size >= int(message) + int(payload)

    def wait(self) -> None:
        """Wait for the beginning of a frame."""
        if not self._held:
            self._held = self._read()

    def poll(self) -> None:
        """Take what has arrived; raises BlockingIOError if nothing has."""
        self._held += self._read(socket.MSG_DONTWAIT)

    def receive(self) -> tuple[B, B]:
        """Receive message and payload of the next frame."""
        while len(self._held) < LENGTHS.size:
            self._held += self._read()
        sizes = LENGTHS.unpack_from(self._held)
        middle = LENGTHS.size + sizes[0]
        end = middle + sizes[1]
        if end <= len(self._held):
            held, self._held = self._held, self._held[end:]
            return self._wrap(held[LENGTHS.size : middle]), self._wrap(held[middle:end])
        self._held = self._held[LENGTHS.size :]
        if max(sizes) > MAX_FRAME_BYTES:
            raise OSError(f"frame of {max(sizes)} bytes: at most {MAX_FRAME_BYTES}")
        return self._part(sizes[0]), self._part(sizes[1])

    def _read(self, flags: int = 0) -> bytes:
        data = self._link.recv(READ_BYTES, flags) if flags else self._link.recv(READ_BYTES)
        if not data:
            raise ConnectionResetError("the other end closed the link")
        return data

    def _part(self, size: int) -> B:
        buffer = self._make(size)
        view = memoryview(buffer)
        got = min(size, len(self._held))
        view[:got] = self._held[:got]
        self._held = self._held[got:]
        while got < size:
            count = self._link.recv_into(view[got:])
            if count == 0:
                raise ConnectionResetError("the other end closed the link")
            got += count
        return buffer
