"""Hooks of schemathesis, in the environment of the tools: a known model and short outputs.

Without them most requests would end with 404, and the others run to the end of the context.
"""

from __future__ import annotations

from typing import Any

import schemathesis

MAX_NAME_CHARS = 253
OUTPUT_TOKENS = 4
LIMITS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def map_body(context: Any, body: Any) -> Any:
    """Replace most valid names of models, and limit outputs that have no limit."""
    name = body.get("model") if isinstance(body, dict) else None
    if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS and len(name) % 8 != 7:
        body["model"] = "tiny"
    limit = LIMITS.get(context.operation.path)
    if isinstance(body, dict) and limit is not None:
        body.setdefault(limit, OUTPUT_TOKENS)
    return body


def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Ask for the fleet's model every other time."""
    if path_parameters and len(str(path_parameters.get("name"))) % 2:
        path_parameters["name"] = "tiny"
    return path_parameters


for hook in (map_body, map_path_parameters):
    schemathesis.hook(hook)
