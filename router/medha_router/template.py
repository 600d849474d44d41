"""A model's chat template: from messages to the text that its tokenizer sees.

The template comes with the checkpoint, never from a client, and runs in jinja2's immutable sandbox
with the names that Hugging Face templates expect (`raise_exception`, `strftime_now`, `tojson`,
loop controls, special tokens). Bounded in time by whoever runs the process that renders.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgspec

from medha.errors import CheckpointError, RequestError

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class ChatTemplate:
    """Renders messages; `source` empty: the model has no template and `render` says so.

    `config` is `tokenizer_config.json`: special tokens, and the template if no file of its own
    holds it. Raises CheckpointError when either does not parse.
    """

    def __init__(self, source: bytes, config: bytes) -> None:
        settings = _settings(config)
        file = TEMPLATE_FILE if source else f"chat_template in {CONFIG_FILE}"
        try:
            text = source.decode() if source else _configured(settings)
            self._template = _environment().from_string(text) if text else None
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 ({error}); fetch it again") from None
        except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError) as error:
            raise CheckpointError(
                f"{file} is no Jinja template ({_complaint(error)}); mend the template, or fetch "
                "the file again"
            ) from None
        self._special = {name: _token_text(settings.get(name)) for name in SPECIAL}
        self._special = {name: text for name, text in self._special.items() if text is not None}

    def render(self, messages: list[dict[str, str]], *, generation_prompt: bool) -> str:
        """The prompt's text; raises RequestError when the template refuses the messages."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions with a prompt",
                code="no_chat_template", param="messages",
            )  # fmt: skip
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=generation_prompt,
                tools=None,
                documents=None,
                **self._special,
            )
        except (jinja2.TemplateError, TypeError, ValueError, RecursionError) as error:
            raise RequestError(
                f"the model's chat template refuses these messages: {str(error)[:300]}",
                code="invalid_value", param="messages",
            ) from None  # fmt: skip


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks, for training, what a model said."""

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


def _complaint(error: Exception) -> str:
    """What a parser says, in one line: jinja2's, or Python's of what jinja2 made of it."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {' '.join((error.message or '').split())[:200]}"
    return error.msg if isinstance(error, SyntaxError) else "it is nested too deeply"


def _configured(settings: dict[str, Any]) -> str:
    """The template in tokenizer_config.json: a string, or a list of which `default` counts."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        chosen = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = chosen[-1] if chosen else None
    return template if isinstance(template, str) else ""


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
