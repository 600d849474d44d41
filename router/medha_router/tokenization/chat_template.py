"""Chat templates of checkpoints: from messages to the text of a prompt.

    load: render probes ──> which content, roles and calls the template takes, and whether tools
    messages, adapted to that ──> template in jinja2's immutable sandbox ──> text

A template comes with the checkpoint, never from a client, and sees the names that Hugging Face
templates use. What it would leave out without a word is given in a form that it prints: parts of a
content as lines of one text, as in vLLM; `developer` as `system`; later system messages in the
first; calls of tools with a null content, after a message with their content, with their arguments
as text, or with ids of nine letters and digits.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from medha.errors import CheckpointError, RequestError
from medha_router.protocol import PromptEnd, read_body
from medha_router.structured.tool_calls import Format, format_of

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
REFUSED = (
    *(jinja2.TemplateError, TypeError, ValueError, RecursionError),
    *(ArithmeticError, AttributeError, LookupError),
)
"""Exceptions of a template for messages that it cannot take."""
NAMES = ("default", "tool_use")
PROBE = ("first part", "second part")
PROBE_ID = "probe1234"
CONTINUED, CONTINUED_SPACE = "\ue000continued\ue001", "\u2003\n"
"""End of a content that is to be continued, and white space that a template may strip."""
_USER = {"role": "user", "content": "any question"}
_CITY = {"city": {"type": "string", "description": "Name of a city"}}
_TOOL: dict[str, Any] = {
    "name": "weather_of_probe",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": _CITY, "required": ["city"]},
}
_OFFERED = [{"type": "function", "function": _TOOL}]


class _TemplateValues(msgspec.Struct, frozen=True):
    chat_template_kwargs: dict[str, Any] | None


class ChatTemplate:
    """Renders messages. If `source` is empty and `config` has no template, `render` raises.

    `config` is `tokenizer_config.json`: special tokens, and the templates if they have no file of
    their own: one, or several by name, `tool_use` being for prompts with tools. Raises
    CheckpointError if either does not parse.
    """

    def __init__(self, source: bytes, config: bytes) -> None:
        settings = _settings(config)
        file = TEMPLATE_FILE if source else f"chat_template in {CONFIG_FILE}"
        special = {name: _token_text(settings.get(name)) for name in SPECIAL}
        names = {name: text for name, text in special.items() if text is not None}
        try:
            texts = {"default": source.decode()} if source else _configured(settings)
            self._templates = {name: _Template(text, names) for name, text in texts.items() if text}
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 ({error}); fetch it again") from None
        except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:
            raise CheckpointError(
                f"{file} is not a Jinja template ({_parser_message(error)}); fix the template, or "
                "fetch the file again"
            ) from None

    @property
    def tool_calls(self) -> Format | None:
        """Form of calls in the outputs that the template asks for; None if it prints no tools."""
        template = self._of(tools=True)
        return template.tool_calls if template is not None else None

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        ending: PromptEnd = "reply",
        tools: bytes = b"",
        values: bytes = b"",
    ) -> str:
        """Return the prompt's text; raises RequestError if the template refuses the messages, or
        does not print the content of the last one and it is to be continued.

        `tools` is the JSON of the tools that the model may call, `values` that of an object with
        further names for the template, as `enable_thinking`; or empty.
        """
        template = self._of(bool(tools))
        if template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions with a prompt",
                code="no_chat_template",
                param="messages",
            )
        offered = msgspec.json.decode(tools) if tools else None
        if ending == "continued":
            messages = [*messages[:-1], _marked(messages[-1])]
        names = template.names(messages, ending == "reply", offered)
        further = _further_values(values, names) if values else {}
        try:
            text = template.render(names | further)
        except REFUSED as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {str(error)[:300]}",
                code="invalid_value",
                param="messages",
            ) from None
        return _cut(text) if ending == "continued" else text

    def _of(self, tools: bool) -> _Template | None:
        default = self._templates.get("default")
        return self._templates.get("tool_use", default) if tools else default


class _Template:
    """Renders one template and knows, from probes, what it takes. `special`: names of tokens."""

    def __init__(self, text: str, special: dict[str, str]) -> None:
        self._text, self._special = text, special
        self._template = _environment().from_string(text)
        # Each rendering copies these names, slowly from the chain of maps that they are.
        self._template.globals = dict(self._template.globals)

    def names(
        self, messages: list[dict[str, Any]], generation_prompt: bool, tools: Any = None
    ) -> dict[str, Any]:
        """Return what the template reads by name, with messages in a form that it takes."""
        forms = [form for message in messages for form in self._adapted(message)]
        if any(form["role"] == "system" for form in forms[1:]) and not self._takes_later_systems:
            forms = _with_one_system(forms)
        return {
            "messages": forms,
            "add_generation_prompt": generation_prompt,
            "tools": tools,
            "documents": None,
            **self._special,
        }

    def render(self, names: dict[str, Any]) -> str:
        """Return the text; raises one of REFUSED if the template refuses the messages."""
        return self._template.render(names)

    # --- what it takes ----------------------------------------------------------------------------

    @functools.cached_property
    def tool_calls(self) -> Format | None:
        """Form of calls that it asks for; None if it does not print the tools of a prompt."""
        names = self.names([_USER], True, _OFFERED)
        shown = self._probe(names)
        # A template may refuse just this prompt, and some print the descriptions alone.
        printed = not shown or any(_TOOL[key] in shown for key in ("name", "description"))
        return format_of(self._text + shown) if printed else None

    @functools.cached_property
    def _takes_parts(self) -> bool:
        """True if it takes a list of a user's parts, and prints their texts alone."""
        parts = [{"type": "text", "text": text} for text in PROBE]
        shown = self._probe_of({"role": "user", "content": parts})
        return all(text in shown for text in PROBE) and "'type'" not in shown.replace('"', "'")

    @functools.cached_property
    def _takes_developer(self) -> bool:
        return PROBE[0] in self._probe_of({"role": "developer", "content": PROBE[0]}, _USER)

    @functools.cached_property
    def _takes_later_systems(self) -> bool:
        """False if it refuses a system message among others, or leaves it out, as Qwen3.5's."""
        system = {"role": "system", "content": PROBE[0]}
        return PROBE[1] in self._probe_of(system, _USER, system | {"content": PROBE[1]}, _USER)

    @functools.cached_property
    def _calls(self) -> tuple[str | None, bool]:
        """Content with which it prints a call of a tool, and whether arguments must be text."""
        forms: tuple[tuple[str | None, bool], ...] = tuple(
            (content, as_text) for content in ("", None) for as_text in (False, True)
        )
        for content, as_text in forms:
            if self._prints_call(_called(content, as_text)):
                return content, as_text
        return forms[0]

    @functools.cached_property
    def _splits_calls(self) -> bool:
        """True if it prints a content and its calls only as two messages, as DeepSeek-R1's."""
        content, as_text = self._calls
        text = PROBE[1]
        answer, called = {"role": "assistant", "content": text}, _called(content, as_text)
        more = ({"role": "assistant", "content": "It rains."}, _USER)
        together = self._prints_call(_called(text, as_text), text=text)
        return not together and self._prints_call(answer, called, more=more, text=text)

    @functools.cached_property
    def _takes_ids(self) -> bool:
        """False if it refuses ids but those of nine letters and digits, as Mistral's."""
        called = _called(*self._calls)
        return self._prints_call(called, id="call_probe_1") or not self._prints_call(called)

    def _prints_call(
        self,
        *messages: dict[str, Any],
        more: Sequence[dict[str, Any]] = (),
        text: str = "",
        id: str = PROBE_ID,
    ) -> bool:
        """Return whether it prints the call of a probe in the messages, and their text.

        `more` messages follow the call's result.
        """
        result = {"role": "tool", "content": "rain", "tool_call_id": PROBE_ID}
        probe = [_with_ids(message, {PROBE_ID: id}.get) for message in (*messages, result)]
        shown = self._probe_of(_USER, *probe, *more)
        return all(expected in shown for expected in (PROBE[0], _TOOL["name"], text))

    def _probe_of(self, *messages: dict[str, Any]) -> str:
        """Return the text of messages, with tools if the template refuses them without."""
        names = self.names([], True) | {"messages": list(messages)}
        return self._probe(names) or self._probe(names | {"tools": _OFFERED})

    def _probe(self, names: dict[str, Any]) -> str:
        """Return the text of a probe, empty if the template refuses it."""
        try:
            return self._template.render(names)
        except REFUSED:
            return ""

    # --- messages in that form --------------------------------------------------------------------

    def _adapted(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return a message, or two with its content and its calls, as the template takes them."""
        if message.keys() & {"tool_calls", "tool_call_id"} and not self._takes_ids:
            message = _with_ids(message, _short_id)
        changes: dict[str, Any] = {}
        if not isinstance(message["content"], str):
            changes["content"] = self._of_parts(message["content"], message["role"])
        if message["role"] == "developer" and not self._takes_developer:
            changes["role"] = "system"
        if "tool_calls" in message:
            content, as_text = self._calls
            if as_text:
                changes["tool_calls"] = [_in_text(call) for call in message["tool_calls"]]
            if message["content"] and self._splits_calls:
                answer = message | changes
                calls = answer.pop("tool_calls")
                return [answer, {"role": "assistant", "content": content, "tool_calls": calls}]
            if not message["content"]:
                changes["content"] = content
        return [message | changes if changes else message]

    def _of_parts(self, texts: list[str], role: str) -> str | list[dict[str, str]]:
        """Return content in parts as the template takes it: parts of a user, else text."""
        if texts and role == "user" and self._takes_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the texts of all system messages in one, before the others."""
    texts = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _called(content: str | None, as_text: bool) -> dict[str, Any]:
    """Return a message of the assistant with the call of the probe."""
    function = {"name": _TOOL["name"], "arguments": {"city": PROBE[0]}}
    call = {"type": "function", "id": PROBE_ID, "function": function}
    calls = [_in_text(call) if as_text else call]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _with_ids(message: dict[str, Any], new_id: Callable[[str], str | None]) -> dict[str, Any]:
    """Return a message whose calls, or whose result, have new ids; None keeps one."""
    changes: dict[str, Any] = {}
    if "tool_call_id" in message:
        changes["tool_call_id"] = new_id(message["tool_call_id"]) or message["tool_call_id"]
    if "tool_calls" in message:
        changes["tool_calls"] = [
            call | {"id": new_id(call["id"]) or call["id"]} if "id" in call else call
            for call in message["tool_calls"]
        ]
    return message | changes


def _short_id(id: str) -> str:
    """Return an id of nine letters and digits; the same for the same id."""
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    return hashlib.blake2b(id.encode("utf-8", "surrogatepass"), digest_size=5).hexdigest()[:9]


def _in_text(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments are text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _marked(last: dict[str, Any]) -> dict[str, Any]:
    """Return a message with a mark at the end of its content; raises RequestError.

    To search for the content would find it in what the template prints after it, too: `end` stands
    in `<|im_end|>`.
    """
    content = last["content"]
    parts = [content] if isinstance(content, str) else content
    if not parts or not parts[-1].strip() or last.get("tool_calls"):
        raise _not_continued()
    marked = parts[-1] + CONTINUED + CONTINUED_SPACE
    return last | {"content": marked if isinstance(content, str) else [*parts[:-1], marked]}


def _cut(text: str) -> str:
    """Return a prompt up to the mark; without white space if the template strips a content."""
    written, mark, rest = text.rpartition(CONTINUED)
    if not mark:
        raise _not_continued()
    for printed in (CONTINUED + CONTINUED_SPACE, CONTINUED):  # of a content that stands twice
        written = written.replace(printed, "")
    if rest.startswith(CONTINUED_SPACE):
        return written
    return written.rstrip("\n" if rest.startswith(CONTINUED_SPACE[0]) else None)


def _not_continued() -> RequestError:
    return RequestError(
        "the last message is to be continued: it must have a text, which the chat template "
        "prints, and no calls; give one, or begin a new message",
        code="invalid_value",
        param="messages",
    )


def _further_values(raw: bytes, taken: Mapping[str, object]) -> dict[str, Any]:
    """Read values for a chat template; raises RequestError if one has a name in `taken`."""
    values = read_body(b'{"chat_template_kwargs":' + raw + b"}", _TemplateValues)
    further = values.chat_template_kwargs or {}
    for name in further:
        if name in taken:
            raise RequestError(
                f"chat_template_kwargs.{name} is set by the server: give further names only",
                code="invalid_value",
                param=f"chat_template_kwargs.{name}",
            )
    return further


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`: training marks around the model's text."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _settings(config: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(config, type=dict[str, Any]) if config else {}
    except msgspec.MsgspecError as error:
        raise CheckpointError(
            f"{CONFIG_FILE} does not load ({error}); fetch the file again"
        ) from None


def _parser_message(error: Exception) -> str:
    """Return the parser's message in one line: of jinja2, or of Python for generated code."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {' '.join((error.message or '').split())[:200]}"
    return error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"


def _configured(settings: dict[str, Any]) -> dict[str, str]:
    """Return the templates in tokenizer_config.json: a string, or those named NAMES of a list."""
    template = settings.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    texts: dict[str, str] = {}
    for entry in template if isinstance(template, list) else ():
        if isinstance(entry, dict) and entry.get("name") in NAMES:
            text = entry.get("template")
            texts[entry["name"]] = text if isinstance(text, str) else ""
    return texts


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
