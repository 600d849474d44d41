"""Bodies of `POST /v1/messages` and `/v1/messages/count_tokens`, Anthropic's Messages API.

Content blocks become messages of a chat: a user's tool results are messages of their own, an
assistant's tool uses are calls. Text, thinking, tools, stop sequences and JSON schemas are
supported; images, documents and the tools that Anthropic runs itself are refused. Sampling fields
of a chat are extensions here too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from medha.errors import RequestError
from medha_router.dialects.conversation import (
    Conversation,
    content_error,
    function_tool,
    raw_json,
    renamed,
    tool_fields,
    value_error,
    without_billing,
)
from medha_router.protocol import (
    MAX_STOPS,
    Body,
    Effort,
    GenerationParams,
    ModelName,
    PromptEnd,
    StopText,
    TokenizeParams,
    generation_params,
    last_thinks,
    read_body,
    refuse_fields_of_others,
    refuse_unsupported,
    template_values,
    with_usual,
)
from medha_router.structured.sources import RawJson
from medha_router.structured.tools import MAX_TOOLS, ToolName, Tools, check_depth, read_tools
from medha_router.tokenization.json_text import check_values

MAX_MESSAGES = 4096
KEEPS_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
"""Edit that Claude Code sends with each request, and that cuts nothing."""
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}, KEEPS_THINKING),
    "diagnostics": ({}, {"previous_message_id": None}),
    "inference_geo": (),
    "logprobs": (False,),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
}
INSTEAD = {
    "add_generation_prompt": "",
    "continue_final_message": "",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "",
    "n": "",
    "prompt_logprobs": "",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "output_format": "output_config.format",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
NAMES = (
    ("stop", "stop_sequences"),
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("tool_choice.function", "tool_choice"),
)
COUNTED = ("context_management", "mcp_servers")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class SystemBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a system prompt."""

    type: Literal["text"]
    text: str


System = str | list[SystemBlock] | None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config`; the schema of `format` is followed, and `effort` reaches the template."""

    format: OutputFormat | None = None
    effort: Effort = None


class ThinkingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`: off or on where the chat template has a choice; a budget is no limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def on(self) -> bool:
        return self.type != "disabled"


class MessagesBody(Body, frozen=True, kw_only=True):
    """`POST /v1/messages`; `messages` stays raw JSON."""

    messages: msgspec.Raw
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    system: System = None
    stop_sequences: Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    output_config: OutputConfig | None = None
    tool_choice: RawJson = msgspec.UNSET
    tools: RawJson = msgspec.UNSET
    container: RawJson = msgspec.UNSET
    context_management: RawJson = msgspec.UNSET
    diagnostics: RawJson = msgspec.UNSET
    inference_geo: RawJson = msgspec.UNSET
    logprobs: RawJson = msgspec.UNSET
    max_completion_tokens: RawJson = msgspec.UNSET
    mcp_servers: RawJson = msgspec.UNSET
    output_format: RawJson = msgspec.UNSET
    speed: RawJson = msgspec.UNSET
    thinking: ThinkingConfig | None = None
    user_profile_id: RawJson = msgspec.UNSET
    workspace_id: RawJson = msgspec.UNSET


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: what becomes the prompt of a message."""

    model: ModelName = None
    messages: msgspec.Raw
    system: System = None
    tool_choice: RawJson = msgspec.UNSET
    tools: RawJson = msgspec.UNSET
    chat_template_kwargs: RawJson = msgspec.UNSET
    context_management: RawJson = msgspec.UNSET
    mcp_servers: RawJson = msgspec.UNSET
    output_config: OutputConfig | None = None
    thinking: ThinkingConfig | None = None


class CustomTool(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`; tools that the server runs have another type.

    Tools that a client defers are offered at once, as in vLLM.
    """

    name: ToolName
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ContentBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A content block of a message, or of a tool result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `messages`."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class _Messages(msgspec.Struct, frozen=True):
    messages: Annotated[list[Turn], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]


class _ToolFields(msgspec.Struct, frozen=True):
    tools: Annotated[list[CustomTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None


def read_messages_body(data: bytes | bytearray) -> GenerationParams:
    """Read the body of a message; raises RequestError."""
    body = read_body(data, MessagesBody)
    refuse_unsupported(body, UNSUPPORTED)
    refuse_fields_of_others(body, INSTEAD)
    messages, ending, tools = _prompt(body)
    output = body.output_config or OutputConfig()
    schema: RawJson = msgspec.UNSET
    if output.format is not None:
        schema = raw_json({"type": "json_schema", "json_schema": {"schema": output.format.schema}})
    try:
        params = generation_params(
            msgspec.structs.replace(
                body,
                stop=body.stop_sequences,
                response_format=schema,
                chat_template_kwargs=_template_values(body),
            ),
            raw=messages,
            chat=True,
            max_output_tokens=body.max_tokens,
            logprobs=None,
            tools=tools,
        )
    except RequestError as error:
        raise renamed(error, NAMES) from None
    thinks = ending == "continued" and last_thinks(messages)
    params = msgspec.structs.replace(params, ending=ending, thinks=thinks)
    thinking = body.thinking
    if thinking is not None and not (thinking.on and thinking.display != "omitted"):
        params = msgspec.structs.replace(params, shows_thinking=False)
    if params.grammar is None:
        return params
    param = params.grammar.param.replace("response_format.json_schema", "output_config.format")
    return msgspec.structs.replace(
        params, grammar=msgspec.structs.replace(params.grammar, param=param)
    )


def read_count_tokens(data: bytes | bytearray) -> TokenizeParams:
    """Read the body of a count of tokens; raises RequestError."""
    body = read_body(data, CountTokensBody)
    refuse_unsupported(body, {name: UNSUPPORTED[name] for name in COUNTED})
    messages, ending, tools = _prompt(body)
    return TokenizeParams(
        model=body.model or "",
        chat=True,
        raw=messages,
        special=False,
        ending=ending,
        tools=tools.raw if tools is not None else b"",
        template_values=template_values(_template_values(body)),
    )


def _prompt(body: MessagesBody | CountTokensBody) -> tuple[bytes, PromptEnd, Tools | None]:
    """Return the JSON of a chat's messages, how its prompt ends, and the tools that it may call."""
    return *_messages(body), _tools(body)


def _template_values(body: MessagesBody | CountTokensBody) -> RawJson:
    """Return values for the chat template: those of the client, and names of models that may
    think: of Qwen3 and of DeepSeek-V3.1."""
    usual: dict[str, object] = {}
    if body.thinking is not None:
        usual = {"enable_thinking": body.thinking.on, "thinking": body.thinking.on}
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None:
        usual["reasoning_effort"] = effort
    return with_usual(body.chat_template_kwargs, usual) if usual else body.chat_template_kwargs


def _tools(body: MessagesBody | CountTokensBody) -> Tools | None:
    fields = read_body(tool_fields(body.tools, body.tool_choice), _ToolFields)
    offered = [_chat_tool(tool, f"tools[{at}].") for at, tool in enumerate(fields.tools or [])]
    choice = fields.tool_choice or ToolChoice(type="auto")
    wanted: object = CHOICES.get(choice.type)
    if choice.type == "tool":
        if choice.name is None:
            raise value_error("tool_choice.name", "is missing: must be given; add it")
        wanted = {"type": "function", "function": {"name": choice.name}}
    try:
        return read_tools(raw_json(offered), raw_json(wanted), not choice.disable_parallel_tool_use)
    except RequestError as error:
        raise renamed(error, NAMES) from None


def _chat_tool(tool: CustomTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}type is {tool.type[:60]!r}: this server runs no tools; offer custom ones",
            code="unsupported_value",
            param=f"{where}type",
        )
    if tool.input_schema is None:
        raise value_error(f"{where}input_schema", "is missing: must be given; add it")
    check_depth(tool.input_schema, f"{where}input_schema")
    return function_tool(tool.name, tool.description, tool.input_schema)


def _messages(body: MessagesBody | CountTokensBody) -> tuple[bytes, PromptEnd]:
    raw = bytes(body.messages)
    check_values(raw, "messages")
    conversation = Conversation()
    if isinstance(body.system, str):
        conversation.add("system", body.system)
    elif body.system is not None:
        conversation.add("system", "".join(without_billing(block.text) for block in body.system))
    messages = read_body(b'{"messages":' + raw + b"}", _Messages).messages
    for index, message in enumerate(messages):
        _add(conversation, message, f"messages[{index}].content")
    last = f"messages[{len(messages) - 1}]"
    if conversation.calls_last:
        raise content_error(last, "calls tools: a call has a result; end with one of the user")
    return conversation.raw(), "continued" if messages[-1].role == "assistant" else "reply"


def _add(conversation: Conversation, message: Turn, where: str) -> None:
    """Add a message, and one for each tool result in it."""
    if isinstance(message.content, str):
        conversation.add(message.role, message.content)
        return
    texts: list[str] = []
    calls: list[ContentBlock] = []
    results = False
    for index, block in enumerate(message.content):
        at = f"{where}[{index}]"
        match message.role, block.type:
            case _, "text" if block.text is not None:
                texts.append(block.text)
            case "assistant", "thinking" | "redacted_thinking":
                conversation.think(block.thinking or "")
            case "assistant", "tool_use":
                if block.id is None or block.name is None or block.input is None:
                    raise value_error(at, "needs id, name and input; add them")
                calls.append(block)
            case "user", "tool_result":
                if block.tool_use_id is None:
                    raise value_error(f"{at}.tool_use_id", "is missing: must be given; add it")
                conversation.result(block.tool_use_id, _result(block, f"{at}.content"))
                results = True
            case role, kind:
                raise content_error(
                    at,
                    f"has the type {kind[:60]!r} in a message of the {role}: only text, thinking, "
                    "tool_use (assistant) and tool_result (user) are supported",
                )
    if texts or not results:
        conversation.add(message.role, texts)
    for call in calls:
        conversation.call(call.id or "", call.name or "", msgspec.json.encode(call.input).decode())


def _result(block: ContentBlock, where: str) -> list[str]:
    """Return the texts of a tool result, and the names of tools that it refers to. Those of an
    error say so: a chat has no field for it."""
    content, texts = block.content or "", []
    if isinstance(content, str):
        texts.append(content)
    else:
        for index, part in enumerate(content):
            text = part.tool_name if part.type == "tool_reference" else part.text
            if part.type not in ("text", "tool_reference") or text is None:
                raise content_error(
                    f"{where}[{index}]",
                    f"has the type {part.type[:60]!r}: only text parts are supported",
                )
            texts.append(text)
    if block.is_error:
        texts[:1] = ["Error: " + "".join(texts[:1])]
    return texts
