"""The tokenizer process: from raw JSON to tokens, `python -m medha_router.tokenization.encoder FD`.

    messages ── chat template ──> text ── tokenizer ──> tokens ──> names of full pages
    prompt ─────────────────────> text or token ids

A message may hold text, or a list of text parts; everything else is a RequestError. The process
holds no secrets and no connection besides the inherited socket FD, so the router may kill it at any
time. It ends when the socket closes.
"""

from __future__ import annotations

import logging
import select
import signal
import socket
import sys
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from medha.adapters.logs import start_logs
from medha.adapters.memory import collect_seldom
from medha.errors import CheckpointError, RequestError
from medha_router.dialects.conversation import ROLES, part_text, without_billing
from medha_router.dialects.readers import READERS
from medha_router.protocol import (
    INTERNAL_ERROR,
    MAX_DETOKENIZED,
    MAX_PROMPTS,
    MAX_SHOWN_CHARS,
    TokenId,
    read_body,
)
from medha_router.tokenization import wire
from medha_router.tokenization.chat_template import ChatTemplate
from medha_router.tokenization.detokenizer import Vocabulary
from medha_router.tokenization.jobs import (
    PLANNED_CHARS,
    DetokenizeJob,
    EncodeJob,
    Source,
    SteppedJob,
    texts_of,
)
from medha_router.tokenization.json_text import check_body, check_values, read_ids
from medha_router.tokenization.text_encoder import TextEncoder

MAX_MESSAGES = 4096
LARGE_BYTES = 64 << 10
COLLECT_AFTER = 20_000  # objects


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[str | ContentPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    audio: Any = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: Any = None


class _Messages(msgspec.Struct, frozen=True):
    """An object around the list, so that an error's path reads `messages[0].role`."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


class _Prompt(msgspec.Struct, frozen=True):
    prompt: str | list[Any]


def read_messages(raw: bytes | bytearray) -> list[dict[str, Any]]:
    """Read messages for a chat template: role, content, names, reasoning and calls if given.

    Content is a text, or a list of texts.
    """
    messages = read_body(b'{"messages":' + raw + b"}", _Messages).messages
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:MAX_SHOWN_CHARS]!r}: must be one of "
            f"{', '.join(ROLES)}",
            code="invalid_value",
            param=f"{where}.role",
        )
    for field, instead in (("function_call", "give tool_calls"), ("audio", "send its text")):
        if getattr(message, field) is not None:
            raise RequestError(
                f"{where}.{field} is not supported by this server; {instead}",
                code="unsupported_parameter",
                param=f"{where}.{field}",
            )
    content = message.refusal if message.content is None else message.content
    text = _content(content, f"{where}.content")
    if message.role == "system":  # gateways hand on what Claude Code gave them
        text = (
            without_billing(text)
            if isinstance(text, str)
            else [kept for part in text if (kept := without_billing(part))]
        )
    plain: dict[str, Any] = {"role": message.role, "content": text}
    reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
    if reasoning is not None and message.role == "assistant":
        plain |= {"reasoning": reasoning, "reasoning_content": reasoning}  # templates read either
    if message.content is None and message.role not in ("assistant", "tool"):
        raise RequestError(
            f"{where}.content is missing: a {message.role} message needs text",
            code="invalid_value",
            param=f"{where}.content",
        )
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    """Return a call for a chat template, which wants its arguments as an object.

    Text that is no JSON object becomes an empty one, as in vLLM: a model may have written it, and
    its conversation should go on.
    """
    arguments = call.function.arguments
    if not isinstance(arguments, dict):
        try:
            arguments = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            arguments = {}
    plain: dict[str, Any] = {"type": "function"}
    if call.id is not None:
        plain["id"] = call.id
    plain["function"] = {"name": call.function.name, "arguments": arguments}
    return plain


def _content(content: str | list[str | ContentPart] | None, where: str) -> str | list[str]:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        text = part_text(part.type, part.text, part.refusal)
        if text is None:
            raise RequestError(
                f"{where}[{index}] has the type {part.type[:MAX_SHOWN_CHARS]!r}: only text parts "
                "are supported",
                code="unsupported_content",
                param=f"{where}[{index}]",
            )
        texts.append(text)
    return texts


def read_prompts(raw: bytes | bytearray) -> list[str | list[int]]:
    """Read prompts: each a string or token ids.

    Accepts OpenAI's four forms: a string, a list of strings, token ids, a list of token id lists.
    """
    prompt = read_body(b'{"prompt":' + raw + b"}", _Prompt).prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        prompts = [_ids(prompt, "prompt")]
    else:
        if not 1 <= len(prompt) <= MAX_PROMPTS:
            raise RequestError(
                f"prompt is a list of {len(prompt)}: must hold 1 to {MAX_PROMPTS} prompts",
                code="invalid_value",
                param="prompt",
            )
        prompts = [
            entry if isinstance(entry, str) else _ids(entry, f"prompt[{index}]")
            for index, entry in enumerate(prompt)
        ]
    return prompts


def _ids(entry: object, where: str) -> list[int]:
    """Read token ids. The caller checks their range against the vocabulary."""
    try:
        return msgspec.convert(entry, list[TokenId])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        at = where + path.rstrip("`")
        raise RequestError(
            f"{at}: {message[:1].lower()}{message[1:]}; give the ids of tokens",
            code="invalid_value",
            param=at,
        ) from None


class Encoder:
    """Tokenizer and template of a checkpoint; raises CheckpointError if they do not load."""

    def __init__(self, files: wire.TokenizerFiles) -> None:
        self._vocabulary = Vocabulary(files.tokenizer)
        self._texts = TextEncoder(self._vocabulary.tokenizer)
        self._template = ChatTemplate(files.template, files.config)
        self.tool_calls = self._template.tool_calls
        self._adapter_templates, self.adapter_faults = _adapter_templates(files)
        self.adapter_tool_calls = {
            name: template.tool_calls for name, template in self._adapter_templates.items()
        }

    def encode(
        self, job: wire.Encode, raw: bytearray
    ) -> tuple[wire.Encoded | wire.Planned, SteppedJob | None]:
        """Encode the prompts in raw JSON, or plan the job if they are long.

        Raises RequestError for the client's faults.
        """
        sources = self._sources(job, raw)
        texts = texts_of(sources, self._vocabulary) if job.texts else ()
        encode_job = EncodeJob(job, sources, self._texts, texts)
        if encode_job.chars > PLANNED_CHARS:
            return encode_job.plan(), encode_job
        prompts = [wire.Prompt(tokens, names) for tokens, names in encode_job.run()]
        for index, text in enumerate(texts):
            prompts[index] = msgspec.structs.replace(prompts[index], text=text)
        return wire.Encoded(tuple(prompts)), None

    def detokenize(self, raw: bytearray) -> tuple[wire.Planned, SteppedJob]:
        """Plan the answer of `/detokenize`; raises RequestError for the client's faults."""
        tokens = read_ids(raw, "tokens")
        if tokens is None:
            raise RequestError(
                "tokens is no list of token ids: give the ids of tokens",
                code="invalid_value",
                param="tokens",
            )
        if len(tokens) > MAX_DETOKENIZED:
            raise RequestError(
                f"tokens holds {len(tokens)} ids: at most {MAX_DETOKENIZED}; send fewer",
                code="invalid_value",
                param="tokens",
            )
        self._check(tokens, "tokens")
        return wire.Planned(), DetokenizeJob(tokens, self._vocabulary)

    def _sources(self, job: wire.Encode, raw: bytearray) -> list[Source]:
        where = "messages" if job.chat else "prompt"
        if not job.chat and len(raw) > LARGE_BYTES:
            ids = read_ids(raw, where)
            if ids is not None:
                self._check(ids, where)
                return [ids]
        check_values(raw, where)
        if job.chat:
            messages = read_messages(raw)
            raw.clear()  # rendering takes as much memory again
            if fault := self.adapter_faults.get(job.adapter):
                raise RequestError(
                    f"the adapter {job.adapter} serves no chats: its {fault}; use /v1/completions "
                    "with a prompt",
                    code="no_chat_template",
                    param="messages",
                )
            template = self._adapter_templates.get(job.adapter, self._template)
            text = template.render(
                messages,
                ending=job.ending,
                tools=job.tools,
                values=job.template_values,
            )
            return [text]
        sources: list[Source] = []
        for prompt in read_prompts(raw):
            if isinstance(prompt, str):
                sources.append(prompt)
            else:
                tokens = np.asarray(prompt, "<i4")
                self._check(tokens, where)
                sources.append(tokens)
        return sources

    def _check(self, tokens: npt.NDArray[np.int32], where: str) -> None:
        largest = int(tokens.max(initial=0))
        if largest >= self._vocabulary.size:
            raise RequestError(
                f"{where} holds the token id {largest}: this model's vocabulary has "
                f"{self._vocabulary.size} tokens",
                code="invalid_value",
                param=where,
            )


def _adapter_templates(
    files: wire.TokenizerFiles,
) -> tuple[dict[str, ChatTemplate], dict[str, str]]:
    """Return the chat templates of adapters, and what is wrong with those that do not load.

    They use the tokens of the model.
    """
    sources = msgspec.json.decode(files.adapter_templates or b"{}", type=dict[str, str])
    templates, faults = dict[str, ChatTemplate](), dict[str, str]()
    for name, source in sources.items():
        try:
            templates[name] = ChatTemplate(source.encode(), files.config)
        except CheckpointError as error:
            faults[name] = str(error)
    return templates, faults


class TokenizerProcess:
    """The encoders and the planned jobs of one process."""

    def __init__(self) -> None:
        self._encoders: dict[str, Encoder] = {}
        self._jobs: dict[int, SteppedJob] = {}

    def answer(self, job: wire.Job, payload: bytearray) -> tuple[wire.Outcome | None, bytes]:
        """Run one job or one step; return its outcome, None for Close, and its payload.

        Faults of the client or the checkpoint are outcomes too, and so is a fault of this code:
        the process holds other clients' jobs.
        """
        try:
            return self._run(job, payload)
        except CheckpointError as error:
            return wire.Loaded(error=str(error)), b""
        except RequestError as error:
            return wire.Declined(str(error), error.status, error.code, error.param), b""
        except Exception as error:
            logging.getLogger("medha.router").exception("a job of a tokenizer failed")
            if isinstance(job, wire.LoadFiles):
                return wire.Loaded(error=f"{type(error).__name__}: {error}"[:MAX_SHOWN_CHARS]), b""
            return wire.Declined(INTERNAL_ERROR, 500, "internal_error", None), b""

    def _run(self, job: wire.Job, payload: bytearray) -> tuple[wire.Outcome | None, bytes]:
        outcome: wire.Outcome | None = None
        stepped: SteppedJob | None = None
        match job:
            case wire.LoadFiles():
                encoder = self._encoders[job.files.key] = Encoder(job.files)
                collect_seldom(COLLECT_AFTER)
                return wire.Loaded(
                    tool_calls=encoder.tool_calls,
                    adapter_tool_calls=encoder.adapter_tool_calls,
                    adapter_faults=encoder.adapter_faults,
                ), b""
            case wire.Encode():
                outcome, stepped = self._encoders[job.key].encode(job, payload)
            case wire.Detokenize():
                outcome, stepped = self._encoders[job.key].detokenize(payload)
            case wire.Advance():
                return self._jobs[job.number].step(job.known)
            case wire.Close():
                self._jobs.pop(job.number, None)
                return None, b""
            case wire.ReadBody():
                return read_large(job.kind, payload)
            case wire.FormatTokens():
                return wire.Answer(), msgspec.json.encode(np.frombuffer(payload, "<i4").tolist())
        if stepped is not None:
            self._jobs[job.number] = stepped
        return outcome, b""


def read_large(kind: str, body: bytearray) -> tuple[wire.BodyRead, bytes]:
    """Read a body in which `raw` alone is large; raises RequestError."""
    check_body(body)
    params = READERS[kind](body)
    small = msgspec.structs.replace(params, raw=b"")
    return wire.BodyRead(msgspec.json.encode(small)), params.raw


def serve(link: socket.socket) -> None:
    """Answer jobs until the link closes; short answers to jobs that came together leave so too."""
    decoder = msgspec.msgpack.Decoder(wire.Job)
    process = TokenizerProcess()
    frames = wire.FrameReader(link, bytearray, bytearray)
    answers: list[bytes] = []
    arrivals = select.poll()
    arrivals.register(link, select.POLLIN)
    while True:
        if not frames.ready:
            arrivals.poll()  # `recv` would also wake up whenever the router takes an answer
        try:
            message, payload = frames.receive()
        except ConnectionResetError:
            return
        outcome, answer = process.answer(decoder.decode(message), payload)
        del payload
        if outcome is not None and len(answer) <= wire.READ_BYTES:
            answers.append(wire.frame_of(msgspec.msgpack.encode(outcome), [answer]))
        elif outcome is not None:
            link.sendall(b"".join(answers))
            answers.clear()
            wire.send_frame(link, msgspec.msgpack.encode(outcome), [answer])
        if answers and not frames.ready:
            link.sendall(b"".join(answers))
            answers.clear()


def main() -> None:
    start_logs("tokenizer", "info")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the router handles Ctrl-C and closes the link
    with socket.socket(fileno=int(sys.argv[1])) as link:
        serve(link)


if __name__ == "__main__":
    main()
