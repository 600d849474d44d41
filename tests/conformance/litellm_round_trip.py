"""Round trips with litellm's client, in the environment of the tools: `python FILE URL`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

CALL = r'<tool_call>\{"name": "add", "arguments": \{"a": [1-9], "b": [1-9]\}\}</tool_call>'
CALLS = {"structured_outputs": {"regex": CALL}}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PARAMETERS = {
    "type": "object",
    "properties": {"a": NUMBER, "b": NUMBER},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def main() -> None:
    common: dict[str, Any] = {
        "model": "openai/tiny",
        "api_base": f"{sys.argv[1]}/v1",
        "api_key": "none",
        "temperature": 0,
        "max_retries": 0,
        "timeout": 120,
    }
    passed = 0

    def ask(text: str, **fields: Any) -> Any:
        turns = fields.pop("turns", [{"role": "user", "content": text}])
        return litellm.completion(messages=turns, **common, **fields)

    answer = ask("good day to all").choices[0]
    passed += answer.message.content == "good day to all" and answer.finish_reason == "stop"

    chunks = list(ask("good day to all", stream=True))
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    passed += "".join(parts) == "good day to all"

    message = ask("Add them.", tools=[ADD], extra_body=CALLS).choices[0].message
    (call,) = message.tool_calls
    passed += set(json.loads(call.function.arguments)) == {"a", "b"}

    calls = ask("Add them.", tools=[ADD], extra_body=CALLS, stream=True)
    rebuilt = litellm.stream_chunk_builder(list(calls))
    (streamed,) = rebuilt.choices[0].message.tool_calls
    passed += streamed.function.arguments == call.function.arguments

    result = {"role": "tool", "tool_call_id": call.id, "content": "it is 5"}
    question = {"role": "user", "content": "Add them."}
    turns = [question, message.model_dump(exclude_none=True), result]
    final = ask("", turns=turns, tools=[ADD], max_tokens=8).choices[0].message
    passed += bool(final.content) and not final.tool_calls
    print(f"litellm: {passed} of 5")


if __name__ == "__main__":
    main()
