"""Stream one chat completion from a running fleet with the official `openai` client.

medha up -f examples/tiny.yaml          # in another terminal
python examples/chat.py "Where do short prompts wait?"
"""

from __future__ import annotations

import os
import sys

import openai

URL = os.environ.get("MEDHA_URL", "http://127.0.0.1:8000/v1")


def main() -> None:
    question = " ".join(sys.argv[1:]) or "Where do short prompts wait?"
    with openai.OpenAI(base_url=URL, api_key=os.environ.get("OPENAI_API_KEY", "none")) as client:
        model = next(iter(client.models.list())).id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=64,
            stream=True,
        )
        for chunk in stream:
            sys.stdout.write("".join(choice.delta.content or "" for choice in chunk.choices))
            sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
