"""The made checkpoints: standard files, the same every time, and attention worth testing."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from medha_worker.model.checkpoint_writer import DEMO, FAMILIES, LARGE, TinyModel, write_checkpoint

Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, npt.NDArray[np.int32]], torch.Tensor]


def test_the_same_arguments_write_the_same_bytes(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    again = write_checkpoint(tmp_path / "again", TinyModel())
    files = sorted(path.name for path in tiny.iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name in files:
        assert (again / name).read_bytes() == (tiny / name).read_bytes(), name


def test_another_seed_is_another_model(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = write_checkpoint(tmp_path, TinyModel(seed=1))
    weights = [folder / "model.safetensors" for folder in (tiny, other)]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_the_tokenizer_keeps_every_byte_and_has_the_models_vocabulary(tiny: pathlib.Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert len(tokenizer) == 512
    text = "The water – über 東京 \U0001f600\n\tfound = {x: 1}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == 0


def test_the_chat_template_ends_where_the_assistant_begins(tiny: pathlib.Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": " hello "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_attention_is_peaked_and_reaches_far_back(name: str, checkpoint: Folder) -> None:
    """Copying heads attend to an earlier place of the last two tokens, however far (in sight)."""
    prompt, window = recalling(1000, 512, seed=1), FAMILIES[name].window or 1000
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(FAMILIES[name]), dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        out = model(torch.from_numpy(prompt.astype(np.int64))[None], output_attentions=True)
    pairs = list(zip(prompt[:-1].tolist(), prompt[1:].tolist(), strict=True))
    again = [i + 1 for i, pair in enumerate(pairs) if pair in pairs[:i]]
    assert len(again) > 150
    rows = torch.arange(1000)
    for layer, weights in enumerate(out.attentions):
        best, where = weights[0, 0].max(-1)
        if layer == 0:
            assert best[1:].median() > 0.8
            assert (where[1:] == rows[:-1]).float().mean() > 0.9
        else:
            assert best[again].median() > 0.5
            assert ((rows - where)[again] > 64).float().mean() > 0.5 or window < 100
    assert out.logits.std() > 3


def test_a_continuation_depends_on_the_beginning_of_the_prompt(
    tiny: pathlib.Path, oracle: Oracle
) -> None:
    prompt = recalling(1500, 512, seed=1)
    prompt[-6:] = prompt[20:26]
    whole = oracle(tiny, prompt)[-1]
    changed = prompt.copy()
    changed[20:32] = recalling(12, 512, seed=5)
    assert int(whole.argmax()) == prompt[26]
    assert (oracle(tiny, changed)[-1] - whole).abs().max() / whole.std() > 1


def test_the_demo_model_answers_with_what_it_was_told(checkpoint: Folder) -> None:
    folder = checkpoint(DEMO)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog."}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    tokens = SoloEngine(folder, pages=8).generate([np.array(ids, dtype=np.int32)], 12)[0]
    assert tokenizer.decode(tokens).startswith("The quick brown")


def test_the_large_model_has_a_hundred_million_parameters() -> None:
    layer = LARGE.hidden * (
        LARGE.head_dim * 2 * (LARGE.heads + LARGE.kv_heads) + 3 * LARGE.intermediate
    )
    assert LARGE.layers * layer + 2 * LARGE.vocab * LARGE.hidden > 100_000_000
