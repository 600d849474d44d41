"""A small fleet of real processes, and tools of others that take it for any OpenAI server.

The tools have dependencies of their own, so they live in a virtual environment of their own: `make
conformance` makes it from requirements/conformance.txt. A tool that is not there skips its tests.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest
from tests.support.medha_up import Up, until

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

CONTEXT_TOKENS = 512
RESOURCE = f"""
apiVersion: medha.dev/v1beta1
kind: MedhaReplica
metadata: {{name: tiny}}
spec:
  model: {{name: tiny, source: {{hostPath: {{path: model}}}}, maxContextTokens: {CONTEXT_TOKENS}}}
  device: {{kind: Cpu}}
  parallelism: {{tp: 1, spp: 1, kvp: {{min: 1, max: 1, tokensPerGroup: {CONTEXT_TOKENS}}}}}
  slo: {{default: {{ttft: {{floor: 60s, multiplier: "10"}}, tpot: 10s, whenInfeasible: Relegate}}}}
  engine: {{kvPages: 1024}}
"""
TEMPLATE = """{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>

{% for tool in tools %}{{ tool.function.description }}{% endfor %}<|eot_id|>\
{% endif %}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}{% for call in message.tool_calls or [] %}<tool_call>\
{{ call.function | tojson }}</tool_call>{% endfor %}<|eot_id|>{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
HOUSE = pathlib.Path(__file__).parents[2]
TOOLS = HOUSE / ".venv-conformance" / "bin"


class Fleet:
    """A running fleet; its model repeats the last message. `model`: folder of its checkpoint."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.model = folder, folder / "model"
        write_checkpoint(self.model, TinyModel(max_tokens=CONTEXT_TOKENS))
        (self.model / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "tiny.yaml").write_text(RESOURCE)
        self.up = Up(folder / "tiny.yaml")

    @property
    def url(self) -> str:
        return self.up.url

    def run(
        self, tool: str, *arguments: str, timeout_s: float, worst: int = 0, **extra: str
    ) -> str:
        """Run a tool on the fleet until it ends well, and return what it printed.

        `worst`: the largest exit status that is allowed.
        """
        program = TOOLS / tool
        if not program.exists():
            pytest.skip(f"{tool} is not installed in {TOOLS}: run `make conformance`")
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        home = {"HF_HOME": str(self.folder / "hub"), "TERM": "dumb", "COLUMNS": "200"}
        done = subprocess.run(
            [str(program), *arguments],
            cwd=self.folder,
            env={**kept, **home, **extra},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert 0 <= done.returncode <= worst, done.stdout[-8000:]
        return done.stdout


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(tmp_path_factory.mktemp("conformance"))
    try:
        until(running.up.serves, 300.0)
        yield running
        with httpx.Client(base_url=running.url, timeout=30.0, trust_env=False) as http:
            assert http.get("/health").status_code == 200, running.up.said
        assert "Traceback" not in running.up.said
    finally:
        running.up.kill()


@pytest.fixture(scope="session")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as connection:
        yield connection


@pytest.fixture(scope="session")
def messages(fleet: Fleet) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client."""
    with anthropic.Anthropic(
        base_url=fleet.url, api_key="none", max_retries=0, timeout=120
    ) as connection:
        yield connection
