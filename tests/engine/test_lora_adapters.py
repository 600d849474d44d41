"""LoRA adapters: each row is computed as by the merged checkpoint of its adapter, whatever shares
its batch; adapters that would give other results are refused by name."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tests.engine import gpu_twin
from tests.support.adapter_writer import ALL, merge, write_adapter
from tests.support.quantiser import FORMATS, quantise
from tests.support.recalling_prompts import recalling
from tests.support.solo_engine import SoloEngine

from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.fit import read_adapters
from medha.checkpoints.lora import read_lora
from medha.config import AdapterFolder, WorkerConfig
from medha.errors import CheckpointError, EngineError, SpecError
from medha.topology import Topology
from medha_worker.model import low_rank as products
from medha_worker.model.checkpoint_writer import FAMILIES, TinyModel
from medha_worker.model.layers import GatedMlp, Linear, Projection
from medha_worker.model.low_rank import AdaptedProjection, load_adapter
from medha_worker.weights import Checkpoint, load

Tokens = npt.NDArray[np.int32]
Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, Tokens], torch.Tensor]
# The base checkpoint of that name, its adapters, and the merged checkpoint of each ("": the base).
Adapted = tuple[pathlib.Path, dict[str, pathlib.Path], dict[str, pathlib.Path]]
Bases = Callable[[str], Adapted]

TOLERANCE = 1e-4
ADAPTERS: dict[str, dict[str, Any]] = {
    "legal": {"rank": 8, "seed": 1},
    "poems": {"rank": 3, "seed": 2, "targets": ("q_proj", "v_proj"), "use_rslora": True},
    "code": {
        "rank": 16,
        "seed": 3,
        "targets": ("k_proj", "o_proj", "up_proj", "down_proj"),
        "layers": (1, 3),
        "dtype": torch.bfloat16,
    },
}
BASES = ["llama", "qwen2", "qwen3", "qwen3_moe", "mistral, a narrow window", "awq", "gptq"]


@pytest.fixture(scope="module")
def bases(checkpoint: Folder, tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Written when first asked for."""

    @functools.cache
    def made(name: str) -> Adapted:
        target = tmp_path_factory.mktemp("adapters")
        if name in FORMATS:
            base, plain = quantise(checkpoint(TinyModel(intermediate=384)), target, FORMATS[name])
        else:
            base = plain = checkpoint(FAMILIES[name])
        folders = {
            adapter: write_adapter(plain, target / adapter, **settings)
            for adapter, settings in ADAPTERS.items()
        }
        merged = {
            adapter: merge(plain, folder, target / f"{adapter}-merged")
            for adapter, folder in folders.items()
        }
        return base, folders, {"": plain, **merged}

    return made


class Mixed:
    """An engine with sequences of all adapters and of none, checked against the merged models."""

    def __init__(self, adapted: Adapted, oracle: Oracle, **engine: Any) -> None:
        base, folders, self.merged = adapted
        self.oracle, self.engine = oracle, SoloEngine(base, adapters=folders, **engine)
        self.adapter: dict[int, str] = {}
        self.tokens: dict[int, Tokens] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}

    def start(self, seq: int, prompt: Tokens, adapter: str) -> None:
        self.engine.start(seq, prompt, adapter=adapter)
        self.adapter[seq], self.tokens[seq], self.logits[seq] = adapter, prompt, []

    def step(self, *work: tuple[int, int]) -> None:
        rows = torch.split(self.engine.step(*work), [length for _, length in work])
        for (seq, _), own in zip(work, rows, strict=True):
            self.logits[seq].append(own)

    def error(self, seq: int, skipped: int = 0) -> float:
        """Return the largest difference to the merged model, in σ."""
        ours = torch.cat(self.logits[seq])
        expected = self.oracle(self.merged[self.adapter[seq]], self.tokens[seq])
        theirs = expected[skipped : skipped + len(ours)]
        assert bool((ours.argmax(-1) == theirs.argmax(-1)).all())
        return float((ours - theirs).abs().max() / theirs.std())


def mixed_batches(run: Mixed, lengths: Sequence[int], seed: int = 0) -> None:
    """Compute prompts of all adapters in chunks, their last tokens as decodes of one batch."""
    names = ["", *ADAPTERS]
    left: dict[int, int] = {}
    for seq, length in enumerate(lengths):
        prompt = recalling(length, 512, seed=seed + seq)
        run.start(seq, prompt, names[seq % len(names)])
        left[seq] = length
    dice = np.random.default_rng(seed)
    while left:
        seqs = [seq for seq in left if dice.random() < 0.8] or list(left)
        dice.shuffle(seqs)
        sizes = [min(left[seq], int(dice.choice([1, 1, 7, 64, 300]))) for seq in seqs]
        run.step(*zip(seqs, sizes, strict=True))
        for seq, size in zip(seqs, sizes, strict=True):
            left[seq] -= size
            if not left[seq]:
                del left[seq]


@pytest.mark.parametrize("name", BASES)
def test_mixed_batches_match_the_merged_models(name: str, bases: Bases, oracle: Oracle) -> None:
    run = Mixed(bases(name), oracle, pages=128)
    mixed_batches(run, [1, 2, 63, 64, 65, 130, 9, 200, 31, 300, 17, 90])
    assert max(run.error(seq) for seq in run.tokens) < TOLERANCE


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_weights_that_stay_packed_take_adapters(name: str, bases: Bases, oracle: Oracle) -> None:
    run = Mixed(bases(name), oracle, pages=128, packed=True)
    mixed_batches(run, [40, 41, 130, 200, 33, 64, 3, 129])
    assert max(run.error(seq) for seq in run.tokens) < TOLERANCE


@pytest.mark.parametrize("length", [1, 64, 1000, 8000])
def test_a_prompt_of_any_length_matches_the_merged_model(
    length: int, bases: Bases, oracle: Oracle
) -> None:
    run = Mixed(bases("llama"), oracle, pages=160)
    run.start(1, recalling(length, 512, seed=5), "legal")
    for first in range(0, length, 2048):
        run.step((1, min(2048, length - first)))
    assert run.error(1) < TOLERANCE


def test_adapters_change_the_answers(bases: Bases) -> None:
    """Otherwise the comparisons would pass without any adapter."""
    base, folders, _ = bases("llama")
    engine = SoloEngine(base, adapters=folders)
    prompt = recalling(80, 512, seed=4)
    firsts = []
    for seq, adapter in enumerate(["", *folders]):
        engine.start(seq, prompt, adapter=adapter)
        firsts.append(engine.step((seq, 80)))
    for number, logits in enumerate(firsts):
        for other in firsts[:number]:
            assert float((logits - other).abs().max() / logits.std()) > 0.5


def test_a_prefix_hit_of_the_same_adapter_matches_the_merged_model(
    bases: Bases, oracle: Oracle
) -> None:
    run = Mixed(bases("llama"), oracle, pages=64)
    prompt = recalling(300, 512, seed=6)
    run.start(1, prompt, "code")
    run.step((1, 300))
    run.start(2, np.concatenate((prompt[:256], recalling(50, 512, seed=7))), "code")
    run.engine.share(2, 1, 4)
    run.step((2, 50))
    assert run.error(2, skipped=256) < TOLERANCE
    run.start(3, prompt, "legal")  # the pages of another adapter would be seen
    run.engine.share(3, 1, 4)
    run.step((3, 44))
    theirs = oracle(run.merged["legal"], prompt)[256:]
    assert float((run.logits[3][0] - theirs).abs().max() / theirs.std()) > 1000 * TOLERANCE


def test_a_batch_without_adapters_runs_the_plain_layers(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, folders, _ = bases("llama")
    engine, plain = SoloEngine(base, adapters=folders), SoloEngine(base)
    prompt = recalling(100, 512, seed=8)
    monkeypatch.setattr(products, "_adapted", None)
    for solo in (engine, plain):
        solo.start(1, prompt)
    assert torch.equal(engine.step((1, 100)), plain.step((1, 100)))


def test_batches_with_adapters_run_without_graphs(bases: Bases, oracle: Oracle) -> None:
    """A recorded batch would leave the adapters out."""
    at, float32 = torch.device("cpu"), torch.float32
    attention = gpu_twin.attention_for(4, 2, 32, 64, float32, float32, at)
    run, record = Mixed(bases("llama"), oracle, attention=attention), gpu_twin.Again()
    run.engine.record(record, sizes=(1, 2, 4), cuts=(4, 8, 64))
    before = gpu_twin.Again.replays
    for seq, adapter in enumerate(("legal", "")):
        run.start(seq, recalling(63, 512, seed=seq), adapter)
    run.step((0, 60))
    run.step((0, 1))
    run.step((0, 1), (1, 60))
    assert gpu_twin.Again.replays == before
    run.step((1, 1))
    run.step((1, 2))
    assert gpu_twin.Again.replays - before == 1 + (run.engine.config.layers + 1)
    assert run.error(0) < TOLERANCE and run.error(1) < TOLERANCE


def test_rows_without_an_adapter_keep_their_bits(bases: Bases) -> None:
    base, folders, _ = bases("llama")
    engine, plain = SoloEngine(base, adapters=folders), SoloEngine(base)
    prompts = [recalling(70, 512, seed=seed) for seed in (1, 2, 3)]
    for seq, adapter in enumerate(("legal", "", "legal")):
        engine.start(seq, prompts[seq], adapter=adapter)
        plain.start(seq, prompts[seq])
    work = [(seq, 70) for seq in range(3)]
    assert torch.equal(engine.step(*work)[70:140], plain.step(*work)[70:140])


def test_an_adapter_that_the_rank_lacks_is_named(bases: Bases) -> None:
    base, folders, _ = bases("llama")
    engine = SoloEngine(base, adapters=folders)
    engine.start(1, recalling(5, 512), adapter="prose")
    with pytest.raises(EngineError, match="adapter 'prose': this rank has code, legal, poems"):
        engine.step((1, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_near_float32(dtype: torch.dtype, bases: Bases, oracle: Oracle) -> None:
    """As near as without an adapter."""
    base, folders, merged = bases("llama")
    prompt, errors = recalling(150, 512, seed=9), {}
    for adapter in ("", "legal"):
        engine = SoloEngine(base, adapters=folders, dtype=dtype)
        engine.start(1, prompt, adapter=adapter)
        theirs = oracle(merged[adapter], prompt)
        off = engine.step((1, 150)) - theirs
        errors[adapter] = float(off.square().mean().sqrt() / theirs.std())
    assert errors["legal"] < 2 * errors[""] < 0.2


@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_products_of_shards_sum_to_the_merged_weights(tp: int, rows: int, bases: Bases) -> None:
    """Also in products of a fixed number of rows, as a GPU's deterministic arithmetic has them."""
    base, folders, merged = bases("llama")
    config, dtype = read_config(base), torch.float32
    layers = range(config.layers)
    for name, folder in folders.items():
        lora = read_lora(folder, config)
        for shard in range(tp):
            low = load_adapter(lora, config, layers, shard, tp, dtype, rows=rows)
            plain = load(Checkpoint(base), config, layers, shard, tp, dtype).layers
            whole = load(Checkpoint(merged[name]), config, layers, shard, tp, dtype).layers
            for part, before, after in zip(low, plain, whole, strict=True):
                assert isinstance(before.mlp, GatedMlp) and isinstance(after.mlp, GatedMlp)
                for own, mine, theirs in (
                    (part.qkv, before.qkv, after.qkv),
                    (part.gate_up, before.mlp.gate_up, after.mlp.gate_up),
                    (part.out, before.out, after.out),
                    (part.down, before.mlp.down, after.mlp.down),
                ):
                    if own is None:
                        continue
                    inputs = torch.randn(7, mine.by_output().shape[1])
                    actual = AdaptedProjection(mine, ((slice(0, 7), own),))(inputs)
                    torch.testing.assert_close(actual, theirs(inputs), rtol=1e-4, atol=1e-5)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3': must be LORA"),
        ({"use_dora": True}, "use_dora is 'True': must be absent"),
        ({"bias": "lora_only"}, "bias is 'lora_only': must be none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*lm_head.*: must be absent"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is .*: must be absent"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is .*: must be absent"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is 'True': must be absent"),
        ({"lora_bias": True}, "lora_bias is 'True': must be absent"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is .*: must be absent"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is .*: must be absent"),
        ({"of_tomorrow": 1}, "of_tomorrow is '1': must be absent"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base"),
        ({"use_rslora": 1}, "use_rslora is 1: must be true or false"),
        ({"r": 0}, "r is 0: must be a positive whole number"),
        ({"r": 1024}, "r is 1024: must be at most 512"),
        ({"r": 4}, r"lora_[AB].weight is \[.*8.*\]: adapter_config.json and the base .* \[.*4.*\]"),
        ({"lora_alpha": 0}, "lora_alpha is 0: must be a positive number"),
        ({"lora_alpha": True}, "lora_alpha is True: must be a positive number"),
        ({"lora_alpha": 10**400}, "lora_alpha is 10*: must be a positive number of at most"),
        ({"lora_alpha": 1e308}, "lora_alpha is 1e.308: must be a positive number of at most"),
    ],
)
def test_a_setting_that_is_not_served_is_named(
    settings: dict[str, Any], named: str, tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = write_adapter(tiny, tmp_path / "a")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=named) as caught:
        read_lora(folder, read_config(tiny))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        ("llama", {"base_model.model.lm_head.lora_A.weight": (8, 128)}, "lm_head.* is not served"),
        (
            "llama",
            {"base_model.model.model.layers.0.mlp.q_proj.lora_A.weight": (8, 128)},
            "mlp.q_proj.* is not served",
        ),
        (
            "llama",
            {"base_model.model.model.layers.6.mlp.up_proj.lora_A.weight": (8, 128)},
            "adapts layer 6, and the model has 6",
        ),
        (
            "llama",
            {f"base_model.model.model.layers.{'9' * 5000}.mlp.up_proj.lora_A.weight": (8, 128)},
            "9999 is not served",
        ),
        (
            "llama",
            {"base_model.model.model.layers.0.mlp.up_proj.lora_B.weight": None},
            "no tensor base_model.*up_proj.lora_B.weight",
        ),
        (
            "llama",
            {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": (128,)},
            "lora_magnitude_vector is not served",
        ),
        (
            "qwen3_moe",
            {"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": (8, 128)},
            "experts.0.up_proj.* is not served: .* as the model has experts",
        ),
        (
            "qwen3_moe",
            {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (8, 128)},
            "mlp.up_proj.* is not served: .* as the model has experts",
        ),
        ("deepseek_v2", {}, "its base model has latent attention"),
    ],
)
def test_a_tensor_that_is_not_served_is_named(
    model: str,
    change: dict[str, tuple[int, ...] | None],
    named: str,
    checkpoint: Folder,
    tmp_path: pathlib.Path,
) -> None:
    base = checkpoint(FAMILIES[model])
    folder = write_adapter(base, tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=named):
        read_lora(folder, read_config(base))


def test_numbers_with_which_no_answer_is_sound_are_named(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = write_adapter(tiny, tmp_path / "bad")
    held = load_file(folder / "adapter_model.safetensors")
    for name in (next(iter(held)), list(held)[-1]):
        other = held[name].clone()
        other[0, 0] = float("nan")
        save_file(held | {name: other}, folder / "adapter_model.safetensors")
        with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors holds NaN"):
            SoloEngine(tiny, adapters={"a": folder})


def test_other_files_are_named(tiny: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = read_config(tiny)
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be read"):
        read_lora(tmp_path / "nowhere", config)
    folder = write_adapter(tiny, tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match="is not a sound safetensors file"):
        read_lora(folder, config)
    save_file(
        {
            "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(
                8, 128, dtype=torch.int32
            )
        },
        weights,
    )
    with pytest.raises(CheckpointError, match=r"lora_A.weight is I32: must be F32, BF16, F16"):
        read_lora(folder, config)
    save_file({}, weights)
    with pytest.raises(CheckpointError, match="holds no tensors"):
        read_lora(folder, config)
    settings = folder / "adapter_config.json"
    plain = settings.read_text()
    settings.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"adapter_config.json is not JSON"):
        read_lora(folder, config)
    settings.write_text(plain)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"has adapter_model.bin .* safe_serialization=True"):
        read_lora(folder, config)


def test_fp8_pages_take_no_adapter_of_keys_or_values(
    tiny: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """Their scales bound the keys and values of the base model."""
    model = read_config(tiny)
    config = WorkerConfig(
        replica="r",
        model="m",
        checkpoint=str(tiny),
        max_context_tokens=64,
        topology=Topology(),
        rank_bind="ipc://x",
        kv_dtype="fp8_e4m3",
    )
    for targets, refused in ((("q_proj", "o_proj"), False), (("v_proj",), True), (ALL, True)):
        folder = write_adapter(tiny, tmp_path / targets[0] / str(len(targets)), targets=targets)
        adapter = AdapterFolder(name="legal", folder=str(folder))
        given = replace(config, adapters=(adapter,))
        if refused:
            with pytest.raises(SpecError, match=r"kvCacheDtype is fp8_e4m3: .* adapter legal"):
                read_adapters(model, given)
        else:
            assert list(read_adapters(model, given)) == ["legal"]


# --- mutants --------------------------------------------------------------------------------------


def _weight(up: Projection) -> torch.Tensor:
    """B as [r, outputs]."""
    return up.by_output().t().contiguous()


def _halves(weight: torch.Tensor) -> torch.Tensor:
    """The halves of each head of 32 one after the other."""
    return weight.view(len(weight), -1, 16, 2).transpose(-1, -2).flatten(1)


def _unscaled(adapter: products.LayerAdapter) -> products.LayerAdapter:
    return _changed(adapter, lambda up: Linear(_weight(up) * 0.5))


def _unordered(adapter: products.LayerAdapter) -> products.LayerAdapter:
    """The query's and key's rows as the checkpoint orders them."""
    qkv = adapter.qkv
    if qkv is None:
        return adapter
    ups = tuple(
        (
            columns,
            outputs,
            Linear(_halves(_weight(up))),
        )
        for columns, outputs, up in qkv.ups
    )
    return dataclasses.replace(adapter, qkv=products.LowRank(qkv.down, ups))


def _swapped(adapter: products.LayerAdapter) -> products.LayerAdapter:
    """Gate and up exchange their B."""
    both = adapter.gate_up
    if both is None or len(both.ups) < 2:
        return adapter
    (first, a, up), (second, b, other) = both.ups
    ups = ((first, a, other), (second, b, up))
    return dataclasses.replace(adapter, gate_up=products.LowRank(both.down, ups))


def _changed(
    adapter: products.LayerAdapter, change: Callable[[Projection], Projection]
) -> products.LayerAdapter:
    def of(low: products.LowRank | None) -> products.LowRank | None:
        if low is None:
            return None
        ups = tuple((columns, outputs, change(up)) for columns, outputs, up in low.ups)
        return products.LowRank(low.down, ups)

    return products.LayerAdapter(
        of(adapter.qkv), of(adapter.out), of(adapter.gate_up), of(adapter.down)
    )


@pytest.mark.parametrize(
    "fault",
    [
        _unscaled,
        _unordered,
        _swapped,
        lambda adapter: dataclasses.replace(adapter, out=None),
        lambda adapter: dataclasses.replace(adapter, down=None),
        lambda adapter: dataclasses.replace(adapter, qkv=None),
    ],
    ids=["scale", "order", "swap", "no out", "no down", "no qkv"],
)
def test_a_wrong_adapter_is_seen(
    fault: Callable[[products.LayerAdapter], products.LayerAdapter], bases: Bases, oracle: Oracle
) -> None:
    run = Mixed(bases("llama"), oracle)
    held = run.engine.model.adapters
    run.engine.model.adapters = {name: tuple(map(fault, layers)) for name, layers in held.items()}
    assert mismatch(run) > 100 * TOLERANCE


def mismatch(run: Mixed) -> float:
    """Return the difference of an adapter's prompt in a mixed batch, whatever its tokens."""
    for seq, adapter in enumerate(("", "legal", "", "legal")):
        run.start(seq, recalling(60, 512, seed=seq), adapter)
    run.step(*((seq, 60) for seq in range(4)))
    theirs = [oracle_of(run, seq) for seq in range(4)]
    pairs = zip((run.logits[seq][0] for seq in range(4)), theirs, strict=True)
    return max(float((ours - expected).abs().max() / expected.std()) for ours, expected in pairs)


def oracle_of(run: Mixed, seq: int) -> torch.Tensor:
    return run.oracle(run.merged[run.adapter[seq]], run.tokens[seq])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rows: rows[:-1] if isinstance(rows, torch.Tensor) else rows,
        lambda rows: rows - 1 if isinstance(rows, torch.Tensor) else rows,
        lambda rows: slice(None),
    ],
    ids=["a row is left out", "rows are off by one", "rows of others too"],
)
def test_wrong_rows_are_seen(
    wrong: Callable[[Any], Any],
    bases: Bases,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Mixed(bases("llama"), oracle)
    right = run.engine.inputs._joined
    monkeypatch.setattr(run.engine.inputs, "_joined", lambda spans: wrong(right(spans)))
    assert mismatch(run) > 100 * TOLERANCE


def test_without_a_fault_the_same_batch_matches(bases: Bases, oracle: Oracle) -> None:
    assert mismatch(Mixed(bases("llama"), oracle)) < TOLERANCE
