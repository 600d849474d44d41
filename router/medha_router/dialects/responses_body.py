"""Bodies of `POST /v1/responses`, OpenAI's Responses API without state.

Input items become messages of a chat. What needs state on the server (`previous_response_id`,
`conversation`) is refused; `store` has no effect. Tools that OpenAI runs itself are left out of the
prompt, as in vLLM. Sampling fields of a chat are extensions here too.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from medha.errors import RequestError
from medha_router.dialects.conversation import (
    Conversation,
    content_error,
    function_tool,
    part_text,
    raw_json,
    renamed,
    tool_fields,
    value_error,
)
from medha_router.protocol import (
    MAX_LOGPROBS,
    Body,
    Effort,
    GenerationParams,
    OutputTokens,
    StreamOptions,
    generation_params,
    is_given,
    read_body,
    refuse_fields_of_others,
    refuse_unsupported,
    unsupported,
)
from medha_router.structured.sources import RawJson
from medha_router.structured.tools import MAX_TOOLS, ToolName, check_depth, read_tools
from medha_router.tokenization.json_text import check_values

MAX_ITEMS = 4096
MAX_ECHOED_CHARS = 8192
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "access_programs": (),
    "background": (False,),
    "best_of": (1,),
    "context_management": ([],),
    "conversation": (),
    "echo": (False,),
    "enable_response_messages": (False,),
    "image": ({},),
    "logprobs": (False,),
    "moderation": (),
    "previous_input_messages": ([],),
    "previous_response_id": (),
    "prompt": (),
}
LOGPROBS = "message.output_text.logprobs"
NAMESPACE_SEPARATOR = "__"
OFFERED = ("function", "namespace")
"""Types of tools that reach the prompt."""
STATE = ("previous_response_id", "conversation", "background")
INSTEAD = {
    "add_generation_prompt": "",
    "continue_final_message": "",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "",
    "n": "",
    "prompt_logprobs": "",
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
INPUT_NAMES = (("messages", "input"),)
NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.function", "tool_choice"),
)


Include = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Values of `include`. All but that of log probabilities are parts of items that never occur."""


class ResponseStreamOptions(StreamOptions, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class Reasoning(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`: the effort reaches the chat template. There are no summaries."""

    effort: Effort = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`text`: the form of the output. `verbosity` has no effect."""

    format: RawJson = msgspec.UNSET
    verbosity: Literal["low", "medium", "high"] | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: RawJson = msgspec.UNSET
    strict: bool | None = None


class ResponsesBody(Body, frozen=True, kw_only=True):
    """`POST /v1/responses`; `input` stays raw JSON."""

    input: msgspec.Raw
    instructions: str | None = None
    max_output_tokens: OutputTokens = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: RawJson = msgspec.UNSET
    tools: RawJson = msgspec.UNSET
    access_programs: RawJson = msgspec.UNSET
    background: RawJson = msgspec.UNSET
    context_management: RawJson = msgspec.UNSET
    best_of: RawJson = msgspec.UNSET
    conversation: RawJson = msgspec.UNSET
    echo: RawJson = msgspec.UNSET
    enable_response_messages: RawJson = msgspec.UNSET
    image: RawJson = msgspec.UNSET
    include: list[Include] | None = None
    logprobs: RawJson = msgspec.UNSET
    max_completion_tokens: RawJson = msgspec.UNSET
    max_tool_calls: int | None = None
    messages: RawJson = msgspec.UNSET
    moderation: RawJson = msgspec.UNSET
    previous_input_messages: RawJson = msgspec.UNSET
    previous_response_id: RawJson = msgspec.UNSET
    prompt: RawJson = msgspec.UNSET
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry of `tools`: a function, a namespace of functions in its own `tools`, or a tool that
    OpenAI runs."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[FunctionTool] | None = None


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice` that names a function, or another way to choose, which is refused."""

    type: str
    name: str | None = None


class ItemPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the content of an item."""

    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of `input`: a message, a function call or its output."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None


class _Input(msgspec.Struct, frozen=True):
    input: str | Annotated[list[InputItem], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]


class _ToolFields(msgspec.Struct, frozen=True):
    tools: Annotated[list[FunctionTool], msgspec.Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None


class ResponsesParams(GenerationParams, frozen=True, kw_only=True):
    """Parameters of a response. `echoed`: JSON of the fields that its object repeats. `namespaced`:
    namespace and own name of functions in namespaces, by the name that the model reads."""

    echoed: bytes = b"{}"
    namespaced: dict[str, tuple[str, str]] = msgspec.field(default_factory=dict)


def read_responses(data: bytes | bytearray) -> ResponsesParams:
    """Read the body of a response; raises RequestError."""
    body = read_body(data, ResponsesBody)
    _refuse(body)
    fields = read_body(tool_fields(body.tools, body.tool_choice), _ToolFields)
    messages = _messages(body)
    namespaced: dict[str, tuple[str, str]] = {}
    offered = _chat_tools(fields.tools or [], namespaced)
    text_format = _text_format(body)
    try:
        tools = read_tools(
            raw_json(offered), _chat_choice(fields.tool_choice), body.parallel_tool_calls
        )
        params = generation_params(
            msgspec.structs.replace(
                body,
                response_format=_chat_format(text_format),
                truncate_prompt_tokens=(
                    -1 if body.truncation == "auto" else body.truncate_prompt_tokens
                ),
                reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
            ),
            raw=messages,
            chat=True,
            max_output_tokens=body.max_output_tokens,
            logprobs=(body.top_logprobs or 0) if LOGPROBS in (body.include or ()) else None,
            tools=tools,
        )
    except RequestError as error:
        raise renamed(error, NAMES) from None
    values = {name: getattr(params, name) for name in GenerationParams.__struct_fields__}
    if params.grammar is not None:
        param = params.grammar.param.replace("response_format.json_schema", "text.format")
        values["grammar"] = msgspec.structs.replace(params.grammar, param=param)
    return ResponsesParams(
        echoed=_echoed(body, fields, text_format), namespaced=namespaced, **values
    )


def _refuse(body: ResponsesBody) -> None:
    """Refuse what is known and not supported; raises RequestError."""
    for field in STATE:
        try:
            refuse_unsupported(body, {field: (False,)})
        except RequestError:
            raise RequestError(
                f"{field} needs responses kept on the server, and this server keeps none: leave it "
                "out, and send the whole conversation as input",
                code="unsupported_parameter",
                param=field,
            ) from None
    refuse_unsupported(body, UNSUPPORTED)
    refuse_fields_of_others(body, INSTEAD)
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", True)


def _chat_tools(
    tools: list[FunctionTool], namespaced: dict[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return the tools of a chat: functions, and those of namespaces, which `namespaced` gets too.

    Tools that OpenAI runs are left out, as in vLLM: clients offer them to every server.
    """
    offered = []
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        if tool.type == "custom":
            raise RequestError(
                f"{where}.type is 'custom': only functions are supported; offer a function",
                code="unsupported_value",
                param=f"{where}.type",
            )
        if tool.type == "function":
            offered.append(_chat_tool(tool, where))
        elif tool.type == "namespace":
            for number, inner in enumerate(tool.tools or []):
                if inner.type == "function":
                    chat_tool = _chat_tool(inner, f"{where}.tools[{number}]", tool.name)
                    namespaced[chat_tool["function"]["name"]] = (tool.name or "", inner.name or "")
                    offered.append(chat_tool)
    return offered


def _chat_tool(tool: FunctionTool, where: str, namespace: str | None = None) -> dict[str, Any]:
    if tool.name is None:
        raise value_error(f"{where}.name", "is missing: must be given; add it")
    check_depth(tool.parameters, f"{where}.parameters")
    return function_tool(_name_in_prompt(namespace, tool.name), tool.description, tool.parameters)


def _name_in_prompt(namespace: str | None, name: str) -> str:
    """Return the name that the model reads, as in vLLM."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def _chat_choice(choice: str | NamedFunction | None) -> RawJson:
    if not isinstance(choice, NamedFunction):
        return raw_json(choice)
    if choice.type != "function" or choice.name is None:
        raise RequestError(
            f"tool_choice.type is {choice.type[:60]!r}: must be function, with a name",
            code="unsupported_value",
            param="tool_choice.type",
        )
    return raw_json({"type": "function", "function": {"name": choice.name}})


def _text_format(body: ResponsesBody) -> TextFormat | None:
    if body.text is None or not is_given(body.text.format):
        return None
    try:
        return read_body(bytes(body.text.format), TextFormat)
    except RequestError as error:
        where = f"text.format.{error.param}" if error.param else "text.format"
        message = str(error).replace(error.param or "the body", where, 1)
        raise RequestError(message, code=error.code, param=where) from None


def _chat_format(text: TextFormat | None) -> RawJson:
    if text is None or text.type != "json_schema":
        return msgspec.UNSET if text is None else raw_json({"type": text.type})
    if isinstance(text.schema, msgspec.UnsetType):
        raise value_error("text.format.schema", "is missing: must be given; add it")
    return raw_json({"type": "json_schema", "json_schema": {"schema": text.schema}})


def _messages(body: ResponsesBody) -> bytes:
    """Return the messages of a chat as JSON."""
    raw = bytes(body.input)
    check_values(raw, "input")
    given = read_body(b'{"input":' + raw + b"}", _Input).input
    conversation = Conversation()
    if body.instructions is not None:
        conversation.add("system", body.instructions)
    if isinstance(given, str):
        conversation.add("user", given)
    else:
        for index, item in enumerate(given):
            _add(conversation, item, f"input[{index}]")
    return conversation.raw()


def _add(conversation: Conversation, item: InputItem, where: str) -> None:
    match item.type or "message":
        case "message":
            if item.role is None:
                raise value_error(f"{where}.role", "is missing: must be given; add it")
            conversation.add(item.role, _text(item.content, f"{where}.content"))
        case "function_call":
            if item.call_id is None or item.name is None:
                raise value_error(where, "needs call_id and name; add them")
            name = _name_in_prompt(item.namespace, item.name)
            conversation.call(item.call_id, name, item.arguments or "{}")
        case "function_call_output":
            if item.call_id is None:
                raise value_error(f"{where}.call_id", "is missing: must be given; add it")
            conversation.result(item.call_id, _text(item.output, f"{where}.output"))
        case "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            conversation.think("".join(part.text or "" for part in parts))
        case kind:
            raise content_error(
                where,
                f"has the type {kind[:60]!r}: only messages, reasoning, function calls and their "
                "outputs are supported",
            )


def _text(content: str | list[ItemPart] | None, where: str) -> str | list[str]:
    if content is None:
        raise value_error(where, "is missing: must be given; add it")
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part_text(part.type, part.text, part.refusal)
        if text is None:
            raise content_error(
                f"{where}[{index}]",
                f"has the type {part.type[:60]!r}: only text parts are supported",
            )
        texts.append(text)
    return texts


def _echoed_tool(tool: FunctionTool) -> FunctionTool | dict[str, Any]:
    """Return a tool with all fields of a function that OpenAI's clients demand."""
    if tool.type != "function":
        return tool
    fields = ("type", "name", "description", "parameters", "strict")
    return {field: getattr(tool, field) for field in fields}


def _echoed(body: ResponsesBody, fields: _ToolFields, text: TextFormat | None) -> bytes:
    """Return the fields of the request that a response repeats; long instructions are left out."""
    instructions = body.instructions
    if instructions is not None and len(instructions) > MAX_ECHOED_CHARS:
        instructions = None
    return msgspec.json.encode(
        {
            "instructions": instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": body.reasoning or Reasoning(),
            "temperature": body.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": fields.tool_choice or "auto",
            "tools": [_echoed_tool(tool) for tool in fields.tools or [] if tool.type in OFFERED],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "user": body.user,
        }
    )
