"""Write a small checkpoint in the Hugging Face format, without a model hub.

    medha checkpoint new FOLDER --layers 6 --hidden 128 --vocab 512 …

The folder gets config.json, generation_config.json, tokenizer.json, tokenizer_config.json with a
chat template, and safetensors (one file, or several behind an index). The same arguments give the
same bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import shutil
import sys
import tempfile
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from medha.checkpoints.checkpoint_files import INDEX, SINGLE
from medha.checkpoints.decoder_config import read_config
from medha.errors import MedhaError
from medha_worker.model import bpe_tokenizer, induction_heads
from medha_worker.model.rope import frequencies


class TinyModel(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and kind of the model to write; the default has a million parameters.

    `family` is a model_type. In layers from `window_from` on, a token attends to `window` tokens
    (0: all). In family qwen3_moe, every `sparse_step`-th layer not among `dense_layers` has
    `experts` of width `expert_intermediate`; `per_token` of them compute a token. The model copies
    text from up to `reach` tokens back, if `rope_theta` is large enough.

    In the deepseek families, layers from `first_sparse` on have experts in `groups`, and `shared`
    more that compute every token; a token's experts come from `groups_chosen` groups. `kv_rank`,
    `q_rank` (0: none), `nope_dim` and `rope_dim` are those of LatentShape, `head_dim` is that of
    values, and `paired` is `rope_interleave`.

    `rope` is written to config.json unchanged (as `rope_scaling` if `old_rope`). `files` > 1 shards
    the weights.
    """

    family: str = "llama"
    layers: int = 6
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 352
    vocab: int = 512
    max_tokens: int = 8192
    window: int = 0
    window_from: int = 0
    experts: int = 8
    per_token: int = 2
    expert_intermediate: int = 64
    sparse_step: int = 1
    dense_layers: tuple[int, ...] = ()
    normalized: bool = True
    first_sparse: int = 1
    shared: int = 1
    groups: int = 1
    groups_chosen: int = 1
    factor: float = 1.0
    kv_rank: int = 96
    q_rank: int = 0
    nope_dim: int = 32
    rope_dim: int = 16
    paired: bool = True
    tied: bool = False
    rope_theta: float = 10_000_000.0
    rope: dict[str, Any] = {}
    old_rope: bool = False
    dtype: str = "float32"
    files: int = 1
    reach: int = 4096
    seed: int = 0


DEMO = TinyModel(
    layers=8,
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=704,
    vocab=2048,
    max_tokens=131_072,
)
LARGE = TinyModel(
    layers=12,
    hidden=896,
    heads=14,
    kv_heads=2,
    head_dim=64,
    intermediate=2432,
    vocab=4096,
    max_tokens=131_072,
)


DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}

# Every family at least once, with as many differing features as possible.
FAMILIES = {
    "llama": TinyModel(),
    "qwen2": TinyModel(family="qwen2", tied=True, files=2),
    "qwen2, late layers windowed": TinyModel(family="qwen2", window=150, window_from=3),
    "qwen3": TinyModel(family="qwen3", hidden=96),
    "qwen3_moe": TinyModel(family="qwen3_moe", files=2),
    "qwen3_moe, some layers dense": TinyModel(
        family="qwen3_moe",
        hidden=96,
        experts=5,
        per_token=3,
        expert_intermediate=320,
        sparse_step=2,
        dense_layers=(3,),
        normalized=False,
        tied=True,
    ),
    "deepseek_v2": TinyModel(family="deepseek_v2", rope=DEEPSEEK_YARN, first_sparse=6),
    "deepseek_v2, groups": TinyModel(
        family="deepseek_v2",
        hidden=96,
        q_rank=100,
        kv_rank=104,
        nope_dim=24,
        experts=12,
        per_token=4,
        groups=4,
        groups_chosen=2,
        factor=2.0,
        tied=True,
        files=2,
    ),
    "deepseek_v3": TinyModel(
        family="deepseek_v3",
        q_rank=80,
        groups=4,
        groups_chosen=2,
        factor=2.5,
        shared=2,
        rope=DEEPSEEK_YARN,
        files=3,
    ),
    "deepseek_v3, halves turn": TinyModel(
        family="deepseek_v3", kv_rank=80, nope_dim=16, paired=False, normalized=False, per_token=3
    ),
    "mistral": TinyModel(family="mistral", window=200),
    "mistral, a narrow window": TinyModel(family="mistral", window=40, files=3),
}


def write_checkpoint(folder: pathlib.Path, model: TinyModel = TinyModel()) -> pathlib.Path:  # noqa: B008
    """Write `model` into `folder` (created if missing) and return the folder."""
    write_config(folder, model)
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": bpe_tokenizer.BEGIN,
            "eos_token_id": [bpe_tokenizer.END, bpe_tokenizer.TURN_END],
        },
    )
    bpe_tokenizer.write_tokenizer(folder, model.vocab, model.max_tokens, model.seed)
    config = read_config(folder)
    sizes = induction_heads.Dimensions(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        intermediate=model.intermediate,
        vocab=model.vocab,
        tied=model.tied,
        experts=config.experts,
        latent=config.latent,
        biased=config.qkv_bias,
        head_norms=config.head_norms,
        reach=model.reach,
        frequencies=frequencies(config.rope, config.rotated_dim, 0).numpy(),
    )
    dtype = getattr(torch, model.dtype)
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        for name, array in induction_heads.tensors(sizes, model.seed)
    }
    _write_weights(folder, tensors, model.files)
    return folder


def write_config(folder: pathlib.Path, model: TinyModel) -> None:
    """Write config.json alone, which suffices for dummy weights."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _config(model))


def _config(model: TinyModel) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [f"{model.family.title().replace('_', '')}ForCausalLM"],
        "model_type": model.family,
        "hidden_act": "silu",
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_tokens,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.tied,
        "bos_token_id": bpe_tokenizer.BEGIN,
        "eos_token_id": bpe_tokenizer.TURN_END,
        "torch_dtype": model.dtype,
    }
    if model.family == "mistral":
        config["sliding_window"] = model.window or None
    if model.family.startswith("qwen"):
        config["use_sliding_window"] = model.window > 0
        config["sliding_window"] = model.window or model.max_tokens
        config["max_window_layers"] = model.window_from
    if model.family == "qwen3_moe":
        config["num_experts"] = model.experts
        config["num_experts_per_tok"] = model.per_token
        config["moe_intermediate_size"] = model.expert_intermediate
        config["norm_topk_prob"] = model.normalized
        config["decoder_sparse_step"] = model.sparse_step
        config["mlp_only_layers"] = list(model.dense_layers)
    if model.family.startswith("deepseek"):
        config |= _deepseek(model)
    if model.old_rope:
        scaling = model.rope or None
        return config | {"rope_theta": model.rope_theta, "rope_scaling": scaling}
    rope = {"rope_type": "default", "rope_theta": model.rope_theta} | model.rope
    return config | {"rope_parameters": rope}


def _deepseek(model: TinyModel) -> dict[str, Any]:
    """Return what config.json of the deepseek families says, in its own spelling."""
    third = model.family == "deepseek_v3"
    limited = "group_limited_greedy" if model.groups > 1 else "greedy"
    return {
        "num_key_value_heads": model.heads,
        "head_dim": model.rope_dim,
        "q_lora_rank": model.q_rank or None,
        "kv_lora_rank": model.kv_rank,
        "qk_nope_head_dim": model.nope_dim,
        "qk_rope_head_dim": model.rope_dim,
        "v_head_dim": model.head_dim,
        "first_k_dense_replace": model.first_sparse,
        "n_routed_experts": model.experts,
        "n_shared_experts": model.shared,
        "num_experts_per_tok": model.per_token,
        "moe_intermediate_size": model.expert_intermediate,
        "n_group": model.groups,
        "topk_group": model.groups_chosen,
        "routed_scaling_factor": model.factor,
        "norm_topk_prob": third and model.normalized,
        "topk_method": "noaux_tc" if third else limited,
        "scoring_func": "sigmoid" if third else "softmax",
    } | ({"rope_interleave": model.paired} if third else {})


def _write_weights(folder: pathlib.Path, tensors: dict[str, torch.Tensor], files: int) -> None:
    metadata = {"format": "pt"}
    if files == 1:
        save_file(tensors, folder / SINGLE, metadata)
        (folder / SINGLE).chmod(0o644)  # another user may serve it
        return
    names, weight_map = list(tensors), {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number * len(names) // files : (number + 1) * len(names) // files]
        save_file({name: tensors[name] for name in part}, folder / file, metadata)
        (folder / file).chmod(0o644)
        weight_map.update(dict.fromkeys(part, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser("medha checkpoint new", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    for field in msgspec.structs.fields(TinyModel):
        if field.name in ("rope", "tied", "old_rope", "dense_layers", "normalized", "paired"):
            continue
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            default=field.default,
            help="default: %(default)s",
        )
    parser.add_argument("--tied", action="store_true", help="share embedding and output weights")
    parser.add_argument("--rope", type=json.loads, default={}, help="JSON of rope_parameters")
    parser.add_argument("--force", action="store_true", help="replace a checkpoint in the folder")
    chosen = vars(parser.parse_args())
    try:
        _write(chosen.pop("folder"), chosen.pop("force"), TinyModel(**chosen))
    except (MedhaError, OSError, ValueError, LookupError, ArithmeticError) as error:
        text = str(error).partition("; fetch")[0]
        sys.stderr.write(f"medha: no checkpoint is written: {text}; correct the options\n")
        sys.exit(2)


def _write(folder: pathlib.Path, force: bool, model: TinyModel) -> None:
    """Write a checkpoint, all or nothing, and print its size."""
    if (folder / "config.json").exists() and not force:
        raise FileExistsError(f"{folder} holds one already; name another folder, or give --force")
    with tempfile.TemporaryDirectory() as name:
        fresh = write_checkpoint(pathlib.Path(name), model)
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")):
            old.unlink()
        size = 0
        for path in sorted(fresh.iterdir()):
            size += path.stat().st_size
            shutil.copyfile(path, folder / path.name)
    sys.stdout.write(f"{folder}: a {model.family} of {size / 1e6:.1f} MB\n")


if __name__ == "__main__":
    main()
