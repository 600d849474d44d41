"""lm-eval: loglikelihoods as transformers computes them, and generations."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import torch
import transformers

CHOICES = [
    {"question": f"The {a} {b} saw the {c}. The {a} {b} saw the", "choices": [c, d]}
    for a, b, c, d in [
        ("red", "house", "tree", "road"),
        ("old", "man", "river", "hill"),
        ("new", "day", "light", "stone"),
        ("big", "ship", "shore", "cloud"),
    ]
]
TEXTS = ["the old river", "a new stone", "good day to all"]
CHOICE_TASK = """task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXT_TASK = """task: texts
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{text}}"
generation_kwargs: {until: ["<|eot_id|>"], max_gen_toks: 32, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def evaluate(fleet: Any, task: str, yaml: str, documents: list[Any], model: str, path: str) -> Any:
    """Run a task; return its metrics and its samples."""
    folder = fleet.folder / f"{task}-{model}"
    folder.mkdir()
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "task.yaml").write_text(yaml.replace("FILE", str(data)))
    arguments = {
        "model": "tiny",
        "base_url": f"{fleet.url}{path}",
        "tokenizer": str(fleet.model),
        "tokenizer_backend": "huggingface",
        "num_concurrent": "2",
        "max_length": "500",
    }
    chat = ["--apply_chat_template"] if "chat" in model else []
    fleet.run(
        "lm_eval",
        "run",
        f"--model={model}",
        f"--model_args={','.join(f'{name}={value}' for name, value in arguments.items())}",
        f"--tasks={task}",
        f"--include_path={folder}",
        f"--output_path={folder / 'out'}",
        "--log_samples",
        *chat,
        timeout_s=500.0,
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        OPENAI_API_KEY="none",
    )
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"][task], lines


def loglikelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Return the log probability of a continuation, by transformers."""
    whole = tokenizer(context + continuation, add_special_tokens=False).input_ids
    given = len(tokenizer(context, add_special_tokens=False).input_ids)
    with torch.no_grad():
        logits = model(torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(logits[at - 1, whole[at]]) for at in range(given, len(whole)))


@pytest.mark.timeout(900)
def test_loglikelihoods_are_those_of_transformers(fleet: Any) -> None:
    metrics, samples = evaluate(
        fleet, "choices", CHOICE_TASK, CHOICES, "local-completions", "/v1/completions"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(fleet.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(fleet.model).eval()
    assert metrics["acc,none"] == 1.0 and len(samples) == len(CHOICES)
    for sample in samples:
        document = sample["doc"]
        for choice, (reported, _) in zip(
            document["choices"], sample["filtered_resps"], strict=True
        ):
            expected = loglikelihood(model, tokenizer, document["question"], f" {choice}")
            assert float(reported) == pytest.approx(expected, abs=2e-3)


@pytest.mark.timeout(900)
def test_generations_are_those_of_openais_client(fleet: Any, client: openai.OpenAI) -> None:
    documents = [{"text": text} for text in TEXTS]
    _, samples = evaluate(
        fleet, "texts", TEXT_TASK, documents, "local-chat-completions", "/v1/chat/completions"
    )
    for sample in samples:
        turns: Any = [{"role": "user", "content": sample["doc"]["text"]}]
        answer = client.chat.completions.create(
            model="tiny", messages=turns, temperature=0, max_tokens=32
        )
        assert sample["resps"] == [[answer.choices[0].message.content]]
    assert len(samples) == len(TEXTS)
