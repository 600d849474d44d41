"""The engine against transformers on the same files: logits to rounding, greedy tokens the same."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from medha_worker.attention.reference import ReferenceAttention
from medha_worker.model.checkpoint_writer import TinyModel

Tokens = npt.NDArray[np.int32]
Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, Tokens], torch.Tensor]

# Largest difference of a logit, in standard deviations of the logits.
TOLERANCE = 1e-4

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
KINDS = {
    "default": TinyModel(),
    "linear": TinyModel(rope={"rope_type": "linear", "factor": 2.0}),
    "llama3": TinyModel(rope=LLAMA3, rope_theta=500_000.0),
    "llama3, old names": TinyModel(rope=LLAMA3, rope_theta=500_000.0, old_rope=True),
    "yarn": TinyModel(rope=YARN, rope_theta=10_000.0),
    "dynamic": TinyModel(rope={"rope_type": "dynamic", "factor": 2.0}, max_tokens=256),
    "tied, in three files": TinyModel(tied=True, files=3),
    "as many KV heads as heads": TinyModel(heads=3, kv_heads=3, hidden=96, layers=3),
    "one KV head": TinyModel(heads=4, kv_heads=1, layers=3),
}


def pieces(total: int, *sizes: int) -> Iterator[int]:
    """`total` cut into the given sizes, over and over."""
    done, turn = 0, 0
    while done < total:
        size = min(sizes[turn % len(sizes)], total - done)
        yield size
        done, turn = done + size, turn + 1


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().max() / expected.std())


def prefill(engine: SoloEngine, seq: int, tokens: Tokens, *sizes: int) -> torch.Tensor:
    engine.start(seq, tokens)
    return torch.cat([engine.step((seq, size)) for size in pieces(len(tokens), *sizes)])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_transformers(kind: str, checkpoint: Folder, oracle: Oracle) -> None:
    folder = checkpoint(KINDS[kind])
    tokens = recalling(611, KINDS[kind].vocab, seed=3)
    actual = prefill(SoloEngine(folder, pages=16), 1, tokens, 200, 1, 67)
    expected = oracle(folder, tokens)
    assert difference(actual, expected) < TOLERANCE
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 1000, 2049, 4000])
def test_odd_prompt_lengths_in_chunks_that_do_not_divide_them(
    length: int, tiny: pathlib.Path, oracle: Oracle
) -> None:
    tokens = recalling(length, 512, seed=length)
    engine = SoloEngine(tiny, pages=63, attention=ReferenceAttention(4, 2, 32, 64, tile_pages=7))
    actual = prefill(engine, 1, tokens, 700, 129, 1)
    assert difference(actual, oracle(tiny, tokens)) < TOLERANCE


@pytest.mark.parametrize("page_tokens", [1, 16, 128])
def test_the_page_size_changes_nothing(
    page_tokens: int, tiny: pathlib.Path, oracle: Oracle
) -> None:
    tokens = recalling(300, 512, seed=1)
    engine = SoloEngine(tiny, pages=-(-300 // page_tokens), page_tokens=page_tokens)
    assert difference(prefill(engine, 1, tokens, 90, 1, 31), oracle(tiny, tokens)) < TOLERANCE


def test_a_batch_mixes_decodes_and_chunks_of_several_prompts(
    tiny: pathlib.Path, oracle: Oracle
) -> None:
    lengths = {1: 150, 2: 64, 3: 333, 4: 700, 5: 65}
    tokens = {seq: recalling(length, 512, seed=seq) for seq, length in lengths.items()}
    engine = SoloEngine(tiny, pages=40)
    actual: dict[int, list[torch.Tensor]] = {seq: [] for seq in tokens}
    work = {seq: list(pieces(length, 40 * seq, 1, 1)) for seq, length in lengths.items()}
    for seq in tokens:
        engine.start(seq, tokens[seq])
    while any(work.values()):
        step = [(seq, sizes.pop(0)) for seq, sizes in work.items() if sizes]
        logits = engine.step(*step)
        for (seq, _), rows in zip(step, torch.split(logits, [n for _, n in step]), strict=True):
            actual[seq].append(rows)
    for seq in tokens:
        assert difference(torch.cat(actual[seq]), oracle(tiny, tokens[seq])) < TOLERANCE


def test_a_prefix_hit_reads_the_pages_of_another_sequence(
    tiny: pathlib.Path, oracle: Oracle
) -> None:
    shared, own = recalling(192, 512, seed=1), recalling(100, 512, seed=2)
    engine = SoloEngine(tiny, pages=20)
    prefill(engine, 1, recalling(192, 512, seed=1), 192)
    tokens = np.concatenate([shared, own])
    engine.start(2, tokens)
    engine.share(2, 1, pages=3)
    actual = torch.cat([engine.step((2, 70)), engine.step((2, 30))])
    assert difference(actual, oracle(tiny, tokens)[192:]) < TOLERANCE


def test_pages_that_come_back_carry_nothing_over(tiny: pathlib.Path, oracle: Oracle) -> None:
    engine = SoloEngine(tiny, pages=4)
    prefill(engine, 1, recalling(256, 512, seed=1), 100)
    engine.end(1)
    tokens = recalling(200, 512, seed=2)
    assert difference(prefill(engine, 2, tokens, 130, 1), oracle(tiny, tokens)) < TOLERANCE


def test_greedy_tokens_are_those_of_transformers(tiny: pathlib.Path) -> None:
    prompts = [recalling(length, 512, seed=length) for length in (40, 130, 300, 577)]
    actual = SoloEngine(tiny, pages=64).generate(prompts, 40, chunk=128)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    for prompt, tokens in zip(prompts, actual, strict=True):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = model.generate(
            ids,
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            bos_token_id=None,
        )
        assert tokens == expected[0, len(prompt) :].tolist()


def test_projection_biases_are_applied(tmp_path: pathlib.Path, oracle: Oracle) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        attention_bias=True,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.5 if name.endswith("bias") else 0.2)
    model.save_pretrained(tmp_path)
    tokens = recalling(90, 128, seed=4)
    actual = prefill(SoloEngine(tmp_path, pages=2), 1, tokens, 50, 1)
    assert difference(actual, oracle(tmp_path, tokens)) < TOLERANCE


def test_dynamic_ntk_keeps_the_base_of_admission(checkpoint: Folder, oracle: Oracle) -> None:
    """The first chunks are rotated by the final length's base, as in one forward of the whole."""
    folder = checkpoint(KINDS["dynamic"])
    tokens = recalling(900, 512, seed=5)
    engine = SoloEngine(folder, pages=30)
    engine.start(1, tokens, rope_tokens=900)
    engine.start(2, tokens[:200], rope_tokens=200)
    first = engine.step((1, 150), (2, 150))
    whole = oracle(folder, tokens)
    assert difference(first[:150], whole[:150]) < TOLERANCE
    assert difference(first[150:], oracle(folder, tokens[:200])[:150]) < TOLERANCE
    assert difference(first[150:], whole[:150]) > 100 * TOLERANCE


def test_bfloat16_stays_within_its_roundings(tiny: pathlib.Path) -> None:
    """A rounding to bfloat16 changes a number by at most 2⁻⁸ of it. The bound is the error of
    transformers in float32, on the rounded weights, if all that enters and leaves a module changes
    by up to as much at random: at more places than the engine rounds, and by more on average."""
    tokens = recalling(300, 512, seed=1)
    actual = prefill(SoloEngine(tiny, pages=8, dtype=torch.bfloat16), 1, tokens, 120, 1)
    model = AutoModelForCausalLM.from_pretrained(
        tiny, dtype=torch.bfloat16, attn_implementation="eager"
    ).float()
    generator = torch.Generator().manual_seed(1)

    def rough(part: object) -> object:
        if not isinstance(part, torch.Tensor) or not part.is_floating_point():
            return part
        return part * (1 + 2**-8 * (2 * torch.rand(part.shape, generator=generator) - 1))

    with torch.inference_mode():
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        expected = model(ids).logits[0]
        for name, module in model.named_modules():
            if "rotary" not in name and (name.count(".") == 2 or not list(module.children())):
                module.register_forward_pre_hook(lambda _, given: tuple(map(rough, given)))
                module.register_forward_hook(lambda _, _given, out: rough(out))
        bound = (model(ids).logits[0] - expected).square().mean().sqrt()
    assert (actual - expected).square().mean().sqrt() < bound < 0.02 * expected.std()
