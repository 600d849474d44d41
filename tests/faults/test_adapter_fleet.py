"""LoRA adapters in a whole fleet: each answer is that of the merged model, whatever was cached,
where the context grew, and which rank died."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
import yaml
from tests.support.adapter_writer import merge, write_adapter
from tests.support.medha_up import Up, until
from tests.support.recalling_prompts import recalling
from transformers import AutoModelForCausalLM

from medha_router.tokenization.detokenizer import Vocabulary
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

pytestmark = pytest.mark.timeout(400)

ADAPTERS: dict[str, dict[str, Any]] = {
    "legal": {"rank": 8, "seed": 1},
    "poems": {"rank": 4, "seed": 2, "targets": ("q_proj", "v_proj"), "use_rslora": True},
}


class Fleet:
    """A fleet with adapters, and the merged models."""

    def __init__(self, folder: pathlib.Path) -> None:
        base = write_checkpoint(folder / "model", TinyModel(layers=4))
        self.vocabulary = Vocabulary((base / "tokenizer.json").read_bytes())
        self.models = {"tiny": _loaded(base)}
        adapters = []
        for name, settings in ADAPTERS.items():
            adapter = write_adapter(base, folder / name, **settings)
            merged = merge(base, adapter, folder / f"{name}-merged")
            self.models[f"tiny:{name}"] = _loaded(merged)
            adapters.append({"name": name, "source": {"hostPath": {"path": name}}})
        document = {
            "apiVersion": "medha.dev/v1beta1",
            "kind": "MedhaReplica",
            "metadata": {"name": "tiny"},
            "spec": {
                "model": {
                    "name": "tiny",
                    "source": {"hostPath": {"path": "model"}},
                    "maxContextTokens": 1024,
                },
                "adapters": adapters,
                "device": {"kind": "Cpu"},
                "engine": {"kvPages": 512, "pageTokens": 16},
                "parallelism": {"spp": 1, "kvp": {"min": 2, "max": 2, "tokensPerGroup": 512}},
                "slo": {"default": {"ttft": {"floor": "60s"}, "tpot": "5s"}},
            },
        }
        file = folder / "tiny.yaml"
        file.write_text(yaml.safe_dump(document))
        self.up = Up(file)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.up.url}/v1", api_key="none", max_retries=0, timeout=120
        )

    def ask(self, model: str, prompt: list[int], count: int) -> tuple[str, int]:
        """Return greedy text and the number of cached tokens."""
        with self.client() as client:
            answer = client.completions.create(
                model=model,
                prompt=prompt,
                max_tokens=count,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        assert answer.usage is not None and answer.model == model
        details = answer.usage.prompt_tokens_details
        return answer.choices[0].text, (details.cached_tokens or 0) if details else 0

    def expected(self, model: str, prompt: list[int], count: int) -> str:
        """Return the greedy text of the merged model."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(count):
                token = self.models[model](ids).logits[0, -1].argmax()
                ids = torch.cat((ids, token.view(1, 1)), dim=1)
        answer = ids[0, len(prompt) :].tolist()
        return b"".join(map(self.vocabulary.bytes_of, answer)).decode("utf-8", "replace")


def _loaded(folder: pathlib.Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    torch.set_num_threads(1)
    started = Fleet(tmp_path_factory.mktemp("adapters"))
    try:
        until(started.up.serves, 120.0)
        yield started
    finally:
        started.up.kill()


def test_each_adapter_answers_as_its_merged_model_from_its_own_pages(fleet: Fleet) -> None:
    """The prompt spans both groups; each model computes it once and then hits its own pages."""
    prompt = recalling(600, 512, seed=11, first=8).tolist()
    answers: dict[str, str] = {}
    for turn in range(2):
        for model in fleet.models:
            text, cached = fleet.ask(model, prompt, 12)
            assert cached == (0 if turn == 0 else 592)
            assert answers.setdefault(model, text) == text
    for model, text in answers.items():
        assert text == fleet.expected(model, prompt, 12)
    assert len(set(answers.values())) == 3


def test_concurrent_requests_of_all_adapters_match_their_models(fleet: Fleet) -> None:
    from concurrent.futures import ThreadPoolExecutor

    lengths = (5, 40, 90, 17, 33, 130, 64, 2, 260)
    models = list(fleet.models)
    cases = [
        (models[number % 3], recalling(length, 512, seed=50 + number, first=8).tolist())
        for number, length in enumerate(lengths)
    ]
    with ThreadPoolExecutor(len(cases)) as clients:
        texts = list(clients.map(lambda case: fleet.ask(case[0], case[1], 10)[0], cases))
    assert texts == [fleet.expected(model, prompt, 10) for model, prompt in cases]


def test_an_adapter_survives_the_rank_that_computed_it(fleet: Fleet) -> None:
    """The prompt spans both groups: its pages in one are lost and computed again."""
    prompt, texts = recalling(600, 512, seed=12, first=8).tolist(), []
    with fleet.client() as client:
        chunks = client.completions.create(
            model="tiny:legal",
            prompt=prompt,
            max_tokens=60,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number, chunk in enumerate(chunks):
            texts.append(chunk.choices[0].text)
            if number == 10:
                fleet.up.children()["tiny-0-g1-s0-t0"].kill()
    assert "".join(texts) == fleet.expected("tiny:legal", prompt, 60)
    assert "tiny-0-g1-s0-t0" in fleet.up.said


def test_the_models_of_the_fleet_are_listed_and_others_refused(fleet: Fleet) -> None:
    with httpx.Client(base_url=fleet.up.url, trust_env=False) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(entry["id"], entry["parent"]) for entry in listed] == [
            ("tiny", None),
            ("tiny:legal", "tiny"),
            ("tiny:poems", "tiny"),
        ]
        body = {"model": "tiny:prose", "prompt": "x", "max_tokens": 1}
        refused = client.post("/v1/completions", json=body)
    assert refused.status_code == 404
    assert "this server has tiny, tiny:legal, tiny:poems" in refused.json()["error"]["message"]
