"""Loading: each shard reads its slices, shards together make the model, and bad files are named."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.recalling_prompts import recalling

from medha.batch import Batch, Chunk
from medha.checkpoints.checkpoint_files import held_tensors
from medha.checkpoints.decoder_config import DecoderConfig, read_config
from medha.checkpoints.tensor_names import HEAD, check_tensors, projections, vectors
from medha.errors import CheckpointError, SpecError
from medha.messages.fields import Sampling
from medha.messages.ranks import SequenceStart, Step
from medha.topology import kv_heads_of
from medha_worker.attention.reference import ReferenceAttention
from medha_worker.inputs import InputBuilder
from medha_worker.kv.pages import KvPages
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.decoder import Decoder
from medha_worker.model.dummy import DummyCheckpoint
from medha_worker.model.rope import Rotary
from medha_worker.parallel.collectives import SoloColumn
from medha_worker.sequences import Sequences
from medha_worker.weights import Checkpoint, load

Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, npt.NDArray[np.int32]], torch.Tensor]


class ThreadShard:
    """TP over threads of this process: shards meet at a barrier and read each other's tensors."""

    def __init__(self, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._slots, self._barrier = rank, len(slots), slots, barrier

    def _meet(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._slots[self.rank] = x.clone()
        self._barrier.wait(timeout=30)
        parts = list(self._slots)
        self._barrier.wait(timeout=30)
        return parts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack(self._meet(x)).sum(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meet(x), dim=-1)


def prompt_step(tokens: npt.NDArray[np.int32], pages: int) -> Step:
    chunk = Chunk(1, 0, len(tokens), (0,), 0, tuple(range(pages)), yields=True)
    start = SequenceStart(seq=1, sampling=Sampling(), prompt_tokens=len(tokens))
    return Step(step=1, batch=Batch(1, 0, (chunk,)), tokens=tokens.tobytes(), starts=(start,))


@pytest.mark.parametrize(
    ("tp", "stages", "model"),
    [
        (2, (3, 3), TinyModel()),
        (4, (6,), TinyModel()),  # two shards hold each KV head
        (2, (1, 4, 1), TinyModel(tied=True, files=3)),
        (2, (2, 4), FAMILIES["qwen2, late layers windowed"]),
        (4, (5, 1), FAMILIES["qwen3"]),
        (2, (3, 3), FAMILIES["mistral, a narrow window"]),
        (2, (3, 3), FAMILIES["qwen3_moe"]),
        (4, (2, 4), FAMILIES["qwen3_moe, some layers dense"]),
        (3, (3,), TinyModel(heads=3, kv_heads=3, hidden=96, intermediate=351, layers=3)),
    ],
)
def test_shards_and_stages_together_are_the_model(
    tp: int, stages: tuple[int, ...], model: TinyModel, checkpoint: Folder, oracle: Oracle
) -> None:
    """Vocabularies of 512 do not divide by 3: the last shard's table is filled up."""
    folder = checkpoint(model)
    tokens = recalling(150, model.vocab, seed=2)
    results = logits_of_shards(folder, tokens, tp, stages)
    expected = oracle(folder, tokens)
    for result in results:
        assert torch.equal(result, results[0])
    assert float((results[0] - expected).abs().max() / expected.std()) < 1e-4


def logits_of_shards(
    folder: pathlib.Path, tokens: npt.NDArray[np.int32], tp: int, stages: tuple[int, ...]
) -> list[torch.Tensor]:
    """Return the logits that each of `tp` shards computes, through stages of these sizes."""
    config = read_config(folder)
    results: list[torch.Tensor] = [torch.empty(0)] * tp
    slots, barrier = [torch.empty(0)] * tp, threading.Barrier(tp)

    def shard(rank: int) -> None:
        torch.set_num_threads(1)
        parallel = ThreadShard(rank, slots, barrier)
        kv_heads = len(kv_heads_of(rank, tp, config.kv_heads))
        x, first = torch.empty(0), 0
        for size in stages:
            layers, first = range(first, first + size), first + size
            weights = load(Checkpoint(folder), config, layers, rank, tp, torch.float32)
            kv = KvPages(layers, 3, kv_heads, 64, config.head_dim)
            kernel = ReferenceAttention(config.heads // tp, kv_heads, config.head_dim, 64)
            rotary = Rotary(config.rope, config.head_dim)
            builder = InputBuilder(
                Sequences(0),
                kernel,
                rotary,
                kv,
                config.vocab,
                embeds=layers.start == 0,
                windows=config.windows_in(layers),
            )
            inputs = builder.build(prompt_step(tokens, 3))
            stage = Decoder(config, layers, parallel, weights)
            x = stage.forward(inputs.tokens if layers.start == 0 else x, inputs, kv, SoloColumn())
        results[rank] = stage.logits(x)

    threads = [threading.Thread(target=shard, args=(rank,), daemon=True) for rank in range(tp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return results


@pytest.mark.parametrize("model", [TinyModel(), TinyModel(family="qwen3_moe", sparse_step=2)])
def test_progress_grows_to_the_whole(model: TinyModel, checkpoint: Folder) -> None:
    seen: list[tuple[int, int]] = []
    folder = checkpoint(model)
    load(
        Checkpoint(folder),
        read_config(folder),
        range(2, 4),
        0,
        2,
        torch.float32,
        lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
    # Norms are small and not in the total: with them the end is reached a few vectors early.
    assert sum(done == total for done, total in seen) < 10
    whole = (folder / "model.safetensors").stat().st_size
    assert seen[-1][1] < whole / 4


def test_a_tp_that_does_not_fit_the_heads_names_those_that_do(tiny: pathlib.Path) -> None:
    with pytest.raises(SpecError, match="use one of 1, 2, 4"):
        load(Checkpoint(tiny), read_config(tiny), range(6), 0, 3, torch.float32)


def _damage_header(path: pathlib.Path, kind: str) -> None:
    """Change what the header says of a tensor, and nothing else."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors = json.loads(data[8 : 8 + length])
    tensors.pop("__metadata__", None)
    first, second, *_ = sorted(tensors.values(), key=lambda held: held["data_offsets"])
    if kind == "overlapping":
        second["data_offsets"] = first["data_offsets"]
    else:
        second["shape"] = [7]
    header = json.dumps(tensors).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def _damage(path: pathlib.Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "cut":
        path.write_bytes(data[:-100])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "huge header":
        path.write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    elif kind == "header beyond the file":
        path.write_bytes(len(data).to_bytes(8, "little") + data[8:])
    elif kind == "no JSON":
        path.write_bytes(data[:8] + b"?" * 64 + data[72:])
    elif kind in ("overlapping", "another size"):
        _damage_header(path, kind)
    elif kind == "gone":
        path.unlink()
    else:
        tensors = load_file(path)
        if kind == "lacks model.norm.weight":
            del tensors["model.norm.weight"]
        elif kind == "shape":
            name = "model.layers.3.mlp.up_proj.weight"
            tensors[name] = tensors[name][:-1].clone()
        elif kind == "I64":
            tensors["model.norm.weight"] = tensors["model.norm.weight"].long()
        save_file(tensors, path)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("cut", "not a sound safetensors file"),
        ("empty", "not a sound safetensors file"),
        ("huge header", "not a sound safetensors file"),
        ("header beyond the file", "not a sound safetensors file"),
        ("no JSON", "not a sound safetensors file"),
        ("gone", "has no \\*\\.safetensors"),
        ("lacks model.norm.weight", "model.norm.weight"),
        ("shape", "model.layers.3.mlp.up_proj.weight is \\[351, 128\\].*\\[352, 128\\]"),
        ("I64", "model.norm.weight is I64"),
        ("overlapping", "not a sound safetensors file .*has bytes 0 to"),
        ("another size", "not a sound safetensors file .*has bytes .* and is F32"),
    ],
)
def test_a_bad_file_is_named_in_one_line(
    kind: str, named: str, tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "bad")
    _damage(folder / "model.safetensors", kind)
    config = read_config(folder)
    with pytest.raises(CheckpointError, match=named) as caught:
        load(Checkpoint(folder), config, range(6), 0, 1, torch.float32)
    message = str(caught.value)
    assert str(folder) in message
    assert "\n" not in message
    with pytest.raises(CheckpointError, match=re.escape(message)):
        check_tensors(folder, held_tensors(folder), config)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.norm.weight", "model.layers.3.mlp.down_proj.weight"],
)
def test_numbers_with_which_no_answer_is_sound_are_named(
    name: str, value: float, tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "bad")
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinities: fetch"):
        load(Checkpoint(folder), read_config(folder), range(6), 0, 1, torch.float32)


@pytest.mark.parametrize("tied", [False, None])
def test_a_head_that_is_missing_is_not_taken_from_the_embedding_unasked(
    tied: bool | None, checkpoint: Folder, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(checkpoint(TinyModel(tied=True)), tmp_path / "headless")
    write_tied(folder, tied)
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head\.weight: needed") as caught:
        load(Checkpoint(folder), read_config(folder), range(6), 0, 1, torch.float32)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    assert "fetch the weights again" in str(caught.value)


def test_a_head_equal_to_the_embedding_shares_its_memory(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "both")
    write_tied(folder, True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    loaded = load(Checkpoint(folder), read_config(folder), range(6), 0, 1, torch.float32)
    assert loaded.head is not None and loaded.embedding is not None
    head = loaded.head.by_output()
    assert torch.equal(head, loaded.embedding)
    assert head.data_ptr() == loaded.embedding.data_ptr()


@pytest.mark.parametrize(("tp", "stages"), [(1, (6,)), (2, (6,)), (2, (2, 4))])
def test_another_head_than_the_embedding_is_used_though_config_json_ties_them(
    tp: int, stages: tuple[int, ...], tiny: pathlib.Path, tmp_path: pathlib.Path, oracle: Oracle
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "both")
    write_tied(folder, True)
    tokens = recalling(150, 512, seed=2)
    actual = logits_of_shards(folder, tokens, tp, stages)[0]
    expected = oracle(folder, tokens)
    assert float((actual - expected).abs().max() / expected.std()) < 1e-4


def test_dummy_weights_of_a_tied_model_have_one_table(
    checkpoint: Folder, tmp_path: pathlib.Path
) -> None:
    folder = checkpoint(TinyModel(tied=True))
    loaded = load(DummyCheckpoint(folder), read_config(folder), range(6), 0, 1, torch.float32)
    assert loaded.head is not None and loaded.embedding is not None
    assert loaded.head.by_output().data_ptr() == loaded.embedding.data_ptr()


def write_tied(folder: pathlib.Path, tied: bool | None) -> None:
    """Change what config.json says of the head; None: it says nothing."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["tie_word_embeddings"]
    path.write_text(json.dumps(config if tied is None else config | {"tie_word_embeddings": tied}))


def implied(model: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the tensors that are checked, without the head."""
    weights = {f"{module}.weight": shape for module, shape in projections(model)}
    return {**dict(vectors(model)), **weights}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_that_are_checked_are_those_of_the_files(name: str, checkpoint: Folder) -> None:
    folder = checkpoint(FAMILIES[name])
    model = read_config(folder)
    held: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        held |= {tensor: tuple(value.shape) for tensor, value in load_file(file).items()}
    held.pop(HEAD, None)
    assert implied(model) == held
    check_tensors(folder, held_tensors(folder), model)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tensors_that_are_checked_are_those_that_a_load_reads(
    name: str, checkpoint: Folder
) -> None:
    folder = checkpoint(FAMILIES[name])
    read: dict[str, tuple[int, ...]] = {}

    class Watched(Checkpoint):
        def slice(self, name: str, shape: Sequence[int] | None, *rest: Any) -> Any:
            read[name] = tuple(shape or ())
            return super().slice(name, shape, *rest)

    model = read_config(folder)
    load(Watched(folder), model, range(model.layers), 0, 1, torch.float32)
    read.pop(HEAD, None)
    assert implied(model) == read


def test_biases_are_checked_if_config_json_names_them(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "bare")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, missed in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.gate_proj")):
        path.write_text(json.dumps(config | {key: True}))
        model = read_config(folder)
        named = f"has no tensor model.layers.0.{missed}.bias, which"
        with pytest.raises(CheckpointError, match=named):
            check_tensors(folder, held_tensors(folder), model)
        with pytest.raises(CheckpointError, match=named):
            load(Checkpoint(folder), model, range(1), 0, 1, torch.float32)


@pytest.mark.parametrize(
    ("index", "named"),
    [
        ("{", "not JSON"),
        ("[]", "list"),
        ("{}", "weight_map"),
        (json.dumps({"weight_map": {"a": "../../etc/passwd"}}), "not a file name"),
        (json.dumps({"weight_map": {"model.embed_tokens.weight": "x.safetensors"}}), "missing"),
    ],
)
def test_a_bad_index_is_named(
    index: str, named: str, tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "bad")
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=named):
        load(Checkpoint(folder), read_config(folder), range(6), 0, 1, torch.float32)


def test_a_folder_without_config_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_dummy_weights_take_the_place_of_files_and_keep_numbers_in_range(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    config = read_config(tmp_path)
    seen: list[tuple[int, int]] = []
    drawn, again = (
        load(
            DummyCheckpoint(tmp_path),
            config,
            range(6),
            0,
            2,
            dtype,
            lambda done, total: seen.append((done, total)),
        )
        for dtype in (torch.float32, torch.float32)
    )
    real = load(Checkpoint(tiny), config, range(6), 0, 2, torch.float32)
    assert drawn.layers[3].qkv.by_output().shape == real.layers[3].qkv.by_output().shape
    assert drawn.head is not None and real.head is not None
    assert drawn.head.by_output().shape == real.head.by_output().shape
    assert torch.equal(drawn.layers[3].out.by_output(), again.layers[3].out.by_output())
    assert not torch.equal(drawn.layers[3].out.by_output(), drawn.layers[2].out.by_output())
    assert seen[-1][0] == seen[-1][1]
    x = torch.randn(64, config.hidden)
    out = drawn.layers[0].qkv(x)
    assert 0.3 < float(out.std()) < 3 and out.isfinite().all()
