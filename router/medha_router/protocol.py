"""OpenAI's request bodies and the SLO headers, as typed values with bounds.

Decides from the body and headers alone if a request is valid, without a model or a tokenizer.
`messages` and `prompt` stay raw JSON here: a tokenizer process decodes them, off the event loop.

Unknown fields are ignored, as OpenAI-compatible servers do. Fields of OpenAI and vLLM that are not
supported are refused with 400 unless they have their default value, see UNSUPPORTED. `null` means
the default everywhere.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeGuard, TypeVar

import msgspec
from msgspec import structs

from medha.errors import RequestError
from medha.messages import ALLOWED_BIAS, GenerationDefaults, Sampling
from medha_router.structured import sources
from medha_router.structured.output_parser import ends_in_thinking
from medha_router.structured.sources import GrammarSource, RawJson
from medha_router.structured.tools import Tools, read_tools

MAX_CHOICES = 64
MAX_PROMPTS = 64
MAX_STOPS = 16
MAX_STOP_CHARS, MAX_STOPS_CHARS = 256, 1024
MAX_SALT_CHARS = 1024
MAX_BIASED, MAX_BAD_WORDS, MAX_BAD_CHARS = 1024, 128, 4096
MAX_BIAS = 100.0
MAX_TEMPERATURE = 10.0  # vLLM has no limit: with min_p, more than OpenAI's 2 makes sense
MAX_DETOKENIZED = 1 << 20
MAX_SHOWN_CHARS = 60
SHOWN_BODY_BYTES = 64 << 10
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16
MAX_INT64 = (1 << 63) - 1
INTERNAL_ERROR = "internal error; the request may be tried again"

# Of several headers for the same target, the first in the list counts.
TTFT_HEADERS = (
    "x-medha-slo-ttft-ms",
    "x-llm-d-slo-ttft-ms",
    "x-slo-ttft-ms",
    "x-dynamo-slo-ttft-ms",
)
TPOT_HEADERS = ("x-medha-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
CLASS_HEADER = "x-medha-class"
MAX_TARGET_MS = 24 * 3600 * 1000.0

PromptEnd = Literal["reply", "bare", "continued"]
"""End of a chat's prompt: where the assistant's reply begins, after the last message, or within it,
so that the output continues it."""
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] | None
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
OutputTokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None
PromptLogprobCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None
BiasKey = Annotated[str, msgspec.Meta(max_length=12)]
Bias = Annotated[float, msgspec.Meta(ge=-MAX_BIAS, le=MAX_BIAS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
BadWord = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
RequestName = Annotated[str, msgspec.Meta(max_length=128, pattern=r"^[ -~]*$(?!\n)")] | None
ModelName = Annotated[str, msgspec.Meta(max_length=253)] | None

# Fields that would change the output if they were supported, and the values that change nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ec_transfer_params": ({},),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "guided_whitespace_pattern": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "length_penalty": (1, 1.0),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_embeds": ([],),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True, False),
    "stream_interval": (1,),
    "suffix": ("",),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
}
CHAT_UNSUPPORTED = UNSUPPORTED | {
    "include_reasoning": (True, False),
}
COMPLETION_UNSUPPORTED = UNSUPPORTED | {
    "chat_template_kwargs": ({},),
}
# Fields of completions that vLLM reads in a chat, too.
OF_COMPLETIONS: dict[str, tuple[object, ...]] = {"best_of": (1,), "echo": (False,)}
# Fields of chats, and what a completion calls them.
NEUTRAL = {"n": 1, "add_generation_prompt": True, "reasoning_effort": "none"}
"""Values of fields of others, besides false, that change nothing."""
OF_CHATS = {
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "add_generation_prompt": "",
    "continue_final_message": "",
    "reasoning_effort": "",
}
TOKENIZE_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "return_token_strs": (False,),
    **{
        name: UNSUPPORTED[name]
        for name in (
            "chat_template",
            "mm_processor_kwargs",
        )
    },
}
GRAMMAR_FIELDS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_grammar_fields = operator.attrgetter(*GRAMMAR_FIELDS)
DEFAULTED = GenerationDefaults.__struct_fields__
MAX_DEFAULT_BYTES = 64  # no default value is longer, so a longer one is not read
MAX_TEMPLATE_VALUES_BYTES = 16 << 10


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Unsupported(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that are refused unless they have a default value; raw JSON, which costs nothing."""

    audio: RawJson = msgspec.UNSET
    chat_template: RawJson = msgspec.UNSET
    chat_template_kwargs: RawJson = msgspec.UNSET
    documents: RawJson = msgspec.UNSET
    early_stopping: RawJson = msgspec.UNSET
    ec_transfer_params: RawJson = msgspec.UNSET
    function_call: RawJson = msgspec.UNSET
    functions: RawJson = msgspec.UNSET
    guided_decoding_backend: RawJson = msgspec.UNSET
    guided_whitespace_pattern: RawJson = msgspec.UNSET
    include_reasoning: RawJson = msgspec.UNSET
    kv_transfer_params: RawJson = msgspec.UNSET
    length_penalty: RawJson = msgspec.UNSET
    logprob_token_ids: RawJson = msgspec.UNSET
    logits_processors: RawJson = msgspec.UNSET
    media_io_kwargs: RawJson = msgspec.UNSET
    mm_processor_kwargs: RawJson = msgspec.UNSET
    modalities: RawJson = msgspec.UNSET
    priority: RawJson = msgspec.UNSET
    prompt_embeds: RawJson = msgspec.UNSET
    repetition_detection: RawJson = msgspec.UNSET
    return_prompt_text: RawJson = msgspec.UNSET
    return_token_offsets: RawJson = msgspec.UNSET
    routed_experts_prompt_start: RawJson = msgspec.UNSET
    spaces_between_special_tokens: RawJson = msgspec.UNSET
    stream_interval: RawJson = msgspec.UNSET
    suffix: RawJson = msgspec.UNSET
    thinking_token_budget: RawJson = msgspec.UNSET
    use_beam_search: RawJson = msgspec.UNSET
    vllm_xargs: RawJson = msgspec.UNSET
    watermarking: RawJson = msgspec.UNSET
    web_search_options: RawJson = msgspec.UNSET


class Body(Unsupported, frozen=True, kw_only=True):
    """Fields of both endpoints. Bounds are those of OpenAI, names of extensions those of vLLM."""

    model: ModelName = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: OutputTokens = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopText | Annotated[list[StopText], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-MAX_INT64 - 1, le=MAX_INT64)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    logit_bias: Annotated[dict[BiasKey, Bias], msgspec.Meta(max_length=MAX_BIASED)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_BIASED)] | None
    ) = None
    bad_words: Annotated[list[BadWord], msgspec.Meta(max_length=MAX_BAD_WORDS)] | None = None
    request_id: RequestName = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INT64)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0, le=10.0)] | None = None
    reasoning_effort: Effort = None
    min_tokens: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=32)] | None = None
    prompt_logprobs: PromptLogprobCount = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    cache_salt: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: RawJson = msgspec.UNSET
    structured_outputs: RawJson = msgspec.UNSET
    guided_json: RawJson = msgspec.UNSET
    guided_regex: RawJson = msgspec.UNSET
    guided_choice: RawJson = msgspec.UNSET
    guided_grammar: RawJson = msgspec.UNSET


class ChatBody(Body, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`; `messages` stays raw JSON."""

    messages: msgspec.Raw
    best_of: RawJson = msgspec.UNSET
    echo: RawJson = msgspec.UNSET
    max_completion_tokens: OutputTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: RawJson = msgspec.UNSET
    tool_choice: RawJson = msgspec.UNSET
    parallel_tool_calls: bool | None = None


class CompletionBody(Body, frozen=True, kw_only=True):
    """`POST /v1/completions`; `prompt` stays raw JSON."""

    prompt: msgspec.Raw
    echo: bool | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None
    max_completion_tokens: RawJson = msgspec.UNSET
    top_logprobs: RawJson = msgspec.UNSET


class _Message(msgspec.Struct, frozen=True):
    content: Any = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /tokenize`: a `prompt` or `messages`, as in vLLM."""

    model: ModelName = None
    prompt: RawJson = msgspec.UNSET
    messages: RawJson = msgspec.UNSET
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: RawJson = msgspec.UNSET
    chat_template: RawJson = msgspec.UNSET
    chat_template_kwargs: RawJson = msgspec.UNSET
    continue_final_message: bool | None = None
    mm_processor_kwargs: RawJson = msgspec.UNSET
    return_token_strs: RawJson = msgspec.UNSET


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    model: ModelName = None
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_DETOKENIZED)]


class _DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: ModelName = None
    tokens: msgspec.Raw


class GenerationParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a generation request of either endpoint.

    `model` is empty if the client names none: the only one that is served.
    `raw` is the JSON of `messages` (`chat`) or `prompt`. If `max_output_tokens` is None, the
    default of the endpoint holds. `sampling.seed` is 0 unless `seeded`; `sampling.stop_tokens`
    holds only those of the client. `bad_words`: words that the output may not have.
    `special`: a prompt gets the special tokens of the tokenizer. `kept_tokens`: how many tokens of
    a longer prompt are kept, -1 as many as fit, and at which end. `prompt_logprobs`: of a field of
    their own, without those of `echo`. `continuous_usage`: each chunk has the usage so far.
    `grammar`: what the output follows, unchecked. `template_values`: JSON of values for the chat
    template, unchecked, or empty. `ending`: how a chat's prompt ends; `thinks`: in the thinking of
    a message that is continued. `cache_salt`: only requests with the same one share cached pages.
    `shows_stop`, `shows_special`: whether the text has what ended it, and special tokens.
    `token_ids`: the answer has the ids of all tokens; `names_ids`: its log probabilities name them
    by id. `shows_thinking`: the answer has the thinking. `silent`: sampling parameters that the
    client left to the checkpoint. `client_id`: the request's id as its client names it, for logs.
    """

    model: str
    chat: bool
    raw: bytes
    sampling: Sampling
    seeded: bool
    n: int = 1
    max_output_tokens: int | None = None
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None
    bad_words: tuple[str, ...] = ()
    special: bool = True
    kept_tokens: tuple[int, Literal["left", "right"]] | None = None
    ignore_eos: bool = False
    silent: frozenset[str] = frozenset()
    grammar: GrammarSource | None = None
    tools: Tools | None = None
    template_values: bytes = b""
    ending: PromptEnd = "reply"
    thinks: bool = False
    cache_salt: str = ""
    shows_stop: bool = False
    shows_special: bool = False
    token_ids: bool = False
    names_ids: bool = False
    shows_thinking: bool = True
    client_id: str = ""

    @property
    def calls_tools(self) -> bool:
        """True if the output may call a tool."""
        return self.tools is not None and self.tools.choice != "none"


class TokenizeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `/tokenize`; `raw` is the JSON of `messages` (`chat`) or `prompt`.

    `tools`, `template_values`: JSON for the chat template, or empty.
    """

    model: str
    chat: bool
    raw: bytes
    special: bool
    ending: PromptEnd = "reply"
    tools: bytes = b""
    template_values: bytes = b""


class DetokenizeParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of `/detokenize`; `raw` is the JSON of `tokens`."""

    model: str
    raw: bytes


B = TypeVar("B")
WHOLE_NUMBER = re.compile(r"Expected `int( \| \w+)*`, got `float`")


def read_body(data: bytes | bytearray, kind: type[B]) -> B:
    """Decode a JSON body; raises RequestError naming the field and what was expected.

    5.0 is the integer 5, as in JSON Schema and in vLLM. A body with such a number is decoded
    leniently, so that its strings may stand for numbers, too.
    """
    try:
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            if not WHOLE_NUMBER.match(str(error)):
                raise
            return msgspec.json.decode(data, type=kind, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        path = path.rstrip("`").removeprefix("$")
        missing = _missing_field(message)
        param = ".".join(part for part in (path.removeprefix("."), missing) if part) or None
        if missing:
            shown = f"{param} is missing: must be given; add it"
        else:
            what = f"{param or 'the body'}{_shown_at(data, path)}"
            shown = f"{what}: {message[:1].lower()}{message[1:]}; correct it"
            shown += " or leave it out" if param and not _is_required(kind, param) else ""
        raise RequestError(shown, code="invalid_value", param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(
            f"the body is not valid JSON ({error}); send a JSON object", code="invalid_json"
        ) from None


def _is_required(kind: type, param: str) -> bool:
    """Return True for a field of the body without a default value."""
    return any(field.required and field.encode_name == param for field in structs.fields(kind))


def _shown_at(data: bytes | bytearray, path: str) -> str:
    """Return ` is 5`, shortened, for the value at msgspec's path.

    Empty if it is ambiguous, if the body is large, or if another value of the same key follows.
    """
    if len(data) > SHOWN_BODY_BYTES:
        return ""
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # msgspec reports the wrong value before it reaches the invalid JSON
        return ""
    for name, index in re.findall(r"\.([^.\[]+)|\[([^\]]+)\]", path):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and index.isdigit() and int(index) < len(value):
            value = value[int(index)]
        else:  # msgspec does not report the key of a mapping
            return ""
    text = repr(value)
    return f" is {text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + '…'}"


def read_chat(data: bytes | bytearray) -> GenerationParams:
    """Read the body of a chat completion; raises RequestError."""
    body = read_body(data, ChatBody)
    refuse_unsupported(body, OF_COMPLETIONS)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}: needs logprobs to be true",
            code="invalid_value",
            param="top_logprobs",
        )
    limit = body.max_completion_tokens
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    return generation_params(
        body,
        raw=bytes(body.messages),
        chat=True,
        max_output_tokens=body.max_tokens if limit is None else limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        tools=tools,
    )


def last_thinks(messages: bytes) -> bool:
    """Return whether the last message in JSON ends in its thinking; False for an invalid one."""
    try:
        last = msgspec.json.decode(messages, type=list[_Message])[-1]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError):
        return False
    parts = last.content if isinstance(last.content, list) else [last.content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return ends_in_thinking("".join(text for text in texts if isinstance(text, str)))


def read_completion(data: bytes | bytearray) -> GenerationParams:
    """Read the body of a completion; raises RequestError."""
    body = read_body(data, CompletionBody)
    refuse_fields_of_others(body, OF_CHATS)
    if body.best_of not in (None, 1, body.n):
        raise unsupported("best_of", body.best_of)
    return generation_params(
        body,
        raw=bytes(body.prompt),
        chat=False,
        max_output_tokens=(
            DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        ),
        logprobs=body.logprobs,
        echo=bool(body.echo),
    )


def read_tokenize(data: bytes | bytearray) -> TokenizeParams:
    """Read the body of `/tokenize`; raises RequestError."""
    body = read_body(data, TokenizeBody)
    refuse_unsupported(body, TOKENIZE_UNSUPPORTED)
    given = [bytes(raw) for raw in (body.messages, body.prompt) if is_given(raw)]
    if len(given) != 1:
        raise RequestError("give either prompt or messages", code="invalid_value", param="prompt")
    chat = is_given(body.messages)
    tools = read_tools(body.tools, msgspec.UNSET, None)
    values = template_values(body.chat_template_kwargs)
    has_values = b"".join(values.split()) not in (b"", b"{}")
    for field, is_used in (
        ("tools", tools is not None),
        ("chat_template_kwargs", has_values),
        ("continue_final_message", body.continue_final_message),
    ):
        if is_used and not chat:
            raise RequestError(
                f"{field} has no effect on a prompt: give messages, or leave it out",
                code="invalid_value",
                param=field,
            )
    return TokenizeParams(
        model=body.model or "",
        chat=chat,
        raw=given[0],
        special=not chat if body.add_special_tokens is None else body.add_special_tokens,
        ending=prompt_end(body.add_generation_prompt, body.continue_final_message),
        tools=tools.raw if tools is not None else b"",
        template_values=values if chat else b"",
    )


def template_values(raw: RawJson) -> bytes:
    """Return the JSON of `chat_template_kwargs`, or nothing; raises RequestError if it is long."""
    if not is_given(raw):
        return b""
    if memoryview(raw).nbytes > MAX_TEMPLATE_VALUES_BYTES:
        raise RequestError(
            f"chat_template_kwargs takes {memoryview(raw).nbytes} bytes: at most "
            f"{MAX_TEMPLATE_VALUES_BYTES} are read; send fewer",
            code="invalid_value",
            param="chat_template_kwargs",
        )
    return bytes(raw)


def with_effort(values: RawJson, effort: Effort) -> RawJson:
    """Return values for the chat template with an effort of thinking, by the names that templates
    read, as in vLLM. Names that the client gives stand."""
    if effort is None:
        return values
    thinks = effort != "none"
    return with_usual(
        values, {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
    )


def with_usual(values: RawJson, usual: dict[str, object]) -> RawJson:
    """Return values for the chat template, and `usual` ones by names that are not among them."""
    given: dict[str, Any] = {}
    if is_given(values):
        try:
            given = msgspec.json.decode(values, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return values  # its reader refuses it
    return msgspec.Raw(msgspec.json.encode(usual | given))


def prompt_end(generation_prompt: bool | None, continued: bool | None) -> PromptEnd:
    """Return how the prompt of a chat ends; raises RequestError for a contradiction."""
    if generation_prompt and continued:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true: a message is either "
            "continued or begun; leave out one",
            code="invalid_value",
            param="continue_final_message",
        )
    if continued:
        return "continued"
    return "bare" if generation_prompt is False else "reply"


def is_given(raw: RawJson) -> TypeGuard[msgspec.Raw]:
    """Return True unless a field is absent or null."""
    return isinstance(raw, msgspec.Raw) and bytes(raw).strip() != b"null"


def read_detokenize(data: bytes | bytearray) -> DetokenizeParams:
    """Read the body of `/detokenize`, but for the ids; raises RequestError."""
    body = read_body(data, _DetokenizeBody)
    return DetokenizeParams(model=body.model or "", raw=bytes(body.tokens))


def generation_params(
    body: Body,
    *,
    raw: bytes,
    chat: bool,
    max_output_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
    tools: Tools | None = None,
) -> GenerationParams:
    """Make the parameters of a request with one of the bodies; raises RequestError."""
    refuse_unsupported(body, CHAT_UNSUPPORTED if chat else COMPLETION_UNSUPPORTED)
    if max_output_tokens is not None:
        check_min_tokens(body.min_tokens or 0, max_output_tokens)
    if body.stream_options not in (None, StreamOptions()) and not body.stream:
        raise RequestError(
            "stream_options is only allowed when stream is true",
            code="invalid_value",
            param="stream_options",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            "prompt_logprobs stand in whole answers: leave out stream, or ask for echo and "
            "logprobs of a completion",
            code="unsupported_value",
            param="prompt_logprobs",
        )
    kept = body.truncate_prompt_tokens
    if kept == 0 or (kept is not None and echo):
        raise RequestError(
            "truncate_prompt_tokens is 0: a prompt has a token; give more, or -1 for all that fit"
            if kept == 0
            else f"truncate_prompt_tokens is {kept} with echo: leave out one",
            code="unsupported_value" if kept else "invalid_value",
            param="truncate_prompt_tokens",
        )
    options = body.stream_options
    return GenerationParams(
        model=body.model or "",
        chat=chat,
        raw=raw,
        sampling=_sampling(body, logprobs, logprobs if echo else None),
        prompt_logprobs=body.prompt_logprobs,
        seeded=body.seed not in (None, -1),  # -1: none, as in vLLM
        n=body.n or 1,
        max_output_tokens=max_output_tokens,
        stops=_stops(body.stop),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        echo=echo,
        bad_words=_bad_words(body.bad_words or ()),
        special=not chat if body.add_special_tokens is None else body.add_special_tokens,
        kept_tokens=None if kept is None else (kept, body.truncation_side or "left"),
        client_id=body.request_id or "",
        ignore_eos=bool(body.ignore_eos),
        grammar=_grammar(body, tools),
        tools=tools,
        template_values=(
            template_values(with_effort(body.chat_template_kwargs, body.reasoning_effort))
            if chat
            else b""
        ),
        ending=prompt_end(body.add_generation_prompt, body.continue_final_message),
        thinks=bool(body.continue_final_message) and last_thinks(raw),
        cache_salt=body.cache_salt or "",
        shows_stop=bool(body.include_stop_str_in_output),
        shows_special=body.skip_special_tokens is False,
        token_ids=bool(body.return_token_ids),
        names_ids=bool(body.return_tokens_as_token_ids),
        shows_thinking=not _is_given_as(body.include_reasoning, False),
        silent=frozenset([name for name in DEFAULTED if getattr(body, name) is None]),
    )


def check_min_tokens(least: int, most: int) -> None:
    """Raise RequestError if an output must be longer than it may be."""
    if least > most:
        raise RequestError(
            f"min_tokens is {least}: must be at most the limit of output tokens, {most}",
            code="invalid_value",
            param="min_tokens",
        )


def _grammar(body: Body, tools: Tools | None) -> GrammarSource | None:
    """Return the grammar that the output must follow; raises RequestError for two of them.

    An output that must call tools has no answer, so that no `response_format` holds for it. Clients
    of old and new vLLM send `guided_…` along with `structured_outputs`, which holds.
    """
    if tools is None and _grammar_fields(body).count(msgspec.UNSET) == len(GRAMMAR_FIELDS):
        return None
    answer = sources.of_response_format(body.response_format)
    structured = sources.of_structured_outputs(body.structured_outputs)
    guided = sources.of_guided(
        body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar
    )
    grammar = sources.only(
        answer if tools is None or tools.grammar is None else None,
        guided if structured is None else structured,
        tools.grammar if tools is not None else None,
    )
    if grammar is not None and body.ignore_eos:
        raise RequestError(
            f"ignore_eos is true with {grammar.param}: such an output ends; leave out one",
            code="invalid_value",
            param="ignore_eos",
        )
    if grammar is not None and body.allowed_token_ids:
        raise RequestError(
            f"allowed_token_ids stand with {grammar.param}: leave out one",
            code="invalid_value",
            param="allowed_token_ids",
        )
    return grammar


def _sampling(body: Body, logprobs: int | None, echoed: int | None) -> Sampling:
    temperature, top_p, repetition = body.temperature, body.top_p, body.repetition_penalty
    return Sampling(
        temperature=1.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(body.logit_bias or {}, body.allowed_token_ids or ()),
        logprobs=logprobs,
        prompt_logprobs=max(
            (count for count in (echoed, body.prompt_logprobs) if count is not None), default=None
        ),
        seed=(body.seed or 0) & MAX_INT64,
        stop_tokens=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or 0,
    )


def _logit_bias(given: dict[str, float], allowed: Sequence[int]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit()) or not math.isfinite(value):
            raise RequestError(
                f"logit_bias has the key {key!r}: must be a token id such as '42'",
                code="invalid_value",
                param="logit_bias",
            )
        bias[int(key)] = value
    for token in dict.fromkeys(allowed):
        bias[token] = bias.get(token, 0.0) + ALLOWED_BIAS
    check_biased(bias)
    return bias


def check_biased(bias: Mapping[int, float]) -> None:
    """Raise RequestError if too many tokens have a bias."""
    if len(bias) > MAX_BIASED:
        raise RequestError(
            f"logit_bias, allowed_token_ids and bad_words name {len(bias)} tokens together: at "
            f"most {MAX_BIASED}; name fewer",
            code="invalid_value",
            param="logit_bias",
        )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    chars = sum(map(len, stops))
    if chars > MAX_STOPS_CHARS:  # all of them are compared with each token's text
        raise RequestError(
            f"stop has {chars} characters in {len(stops)} strings: at most {MAX_STOPS_CHARS} "
            "together; give fewer or shorter ones",
            code="invalid_value",
            param="stop",
        )
    return stops


def _bad_words(words: Sequence[str]) -> tuple[str, ...]:
    chars = sum(map(len, words))
    if chars > MAX_BAD_CHARS:  # all of them are encoded
        raise RequestError(
            f"bad_words has {chars} characters in {len(words)} words: at most {MAX_BAD_CHARS} "
            "together; give fewer or shorter ones",
            code="invalid_value",
            param="bad_words",
        )
    return tuple(words)


def refuse_unsupported(
    body: msgspec.Struct, table: Mapping[str, tuple[object, ...]], where: str = ""
) -> None:
    """Raise RequestError if a field of the table, raw JSON, has a value that it does not list."""
    for field, defaults in table.items():
        raw: RawJson = getattr(body, field)
        if raw is msgspec.UNSET:
            continue
        if memoryview(raw).nbytes > MAX_DEFAULT_BYTES or not _is_default(raw, defaults):
            raise unsupported(where + field, raw, defaults)


def _is_default(raw: msgspec.Raw, defaults: tuple[object, ...]) -> bool:
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False  # a number out of range, or no text
    return value is None or any(
        value == default and isinstance(value, bool) == isinstance(default, bool)
        for default in defaults  # 0 equals False in Python, but not in JSON
    )


def _is_given_as(raw: RawJson, value: object) -> bool:
    return is_given(raw) and msgspec.json.decode(raw) == value


def refuse_fields_of_others(body: Body, instead: Mapping[str, str]) -> None:
    """Refuse fields that only other APIs have; `instead`: the name in this one, or empty."""
    for field, own in instead.items():
        value = getattr(body, field)
        if isinstance(value, msgspec.Raw):
            value = bytes(value) if is_given(value) else None
        neutral = NEUTRAL.get(field, False)
        changes_nothing = type(value) is type(neutral) and value == neutral
        if value is None or value is msgspec.UNSET or changes_nothing:
            continue
        if not own:
            raise unsupported(field, getattr(body, field))
        raise RequestError(
            f"{field} is not a field of this API: give {own}",
            code="unsupported_parameter",
            param=field,
        )


def unsupported(
    field: str, value: object = msgspec.UNSET, accepted: tuple[object, ...] = ()
) -> RequestError:
    """Return the error for a field with a value that is not one of those that change nothing."""
    shown = ""
    if value is not msgspec.UNSET:
        text = value if isinstance(value, msgspec.Raw) else msgspec.json.encode(value)
        shown = bytes(memoryview(text)[: MAX_SHOWN_CHARS + 1]).decode("utf-8", "replace")
        shown = shown[:MAX_SHOWN_CHARS] + ("…" if len(shown) > MAX_SHOWN_CHARS else "")
    names = " or ".join(f'"{name}"' for name in accepted if isinstance(name, str) and name)
    return RequestError(
        f"{field}{f' is {shown}, which' if shown else ''} is not supported by this server; leave "
        f"it out{f', or give {names}' if names else ''}",
        code="unsupported_parameter",
        param=field,
    )


def _missing_field(message: str) -> str:
    """Return the name of a missing field: msgspec reports it in the message, not in the path."""
    _, marker, rest = message.partition("required field `")
    return rest.rstrip("`") if marker else ""


class SloOverride(msgspec.Struct, frozen=True, kw_only=True):
    """SLO targets from the headers of a request; None where its QoS class decides."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    slo_class: str | None = None


def read_slo(headers: Mapping[str, str]) -> SloOverride:
    """Read the SLO headers; raises RequestError naming the header.

    x-medha-slo-ttft-ms   x-llm-d-slo-ttft-ms   x-slo-ttft-ms   x-dynamo-slo-ttft-ms
    x-medha-slo-tpot-ms   x-llm-d-slo-tpot-ms   x-slo-tpot-ms
    x-medha-class         the QoS class; its targets hold where no header is given
    """
    name = headers.get(CLASS_HEADER)
    return SloOverride(
        ttft_s=_seconds(headers, TTFT_HEADERS),
        tpot_s=_seconds(headers, TPOT_HEADERS),
        slo_class=name.strip() if name else None,
    )


def _seconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        given = headers.get(name)
        if given is None:
            continue
        try:
            milliseconds = float(given)
        except ValueError:
            milliseconds = math.nan
        if not 0.0 < milliseconds <= MAX_TARGET_MS:
            raise RequestError(
                f"{name} is {given[:40]!r}: must be milliseconds, more than 0 and at most "
                f"{MAX_TARGET_MS:.0f}",
                code="invalid_value",
                param=name,
            )
        return milliseconds / 1000.0
    return None
