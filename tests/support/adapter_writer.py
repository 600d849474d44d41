"""Write LoRA adapters as PEFT saves them, and the merged checkpoints that they stand for.

`merge` is the oracle: it reads the adapter's files by their definition, W + scale · B·A, and writes
a plain checkpoint that transformers loads.
"""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def write_adapter(
    base: pathlib.Path,
    target: pathlib.Path,
    *,
    targets: tuple[str, ...] = ALL,
    rank: int = 8,
    alpha: float = 16.0,
    seed: int = 1,
    strength: float = 0.25,
    layers: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> pathlib.Path:
    """Write a random adapter of the checkpoint in `base` into `target`.

    `strength`: size of the change in relation to the weights. `settings` go to the config.
    """
    dice = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    for name, weight in sorted(_weights(base).items()):
        module = name.removesuffix(".weight")
        parts = module.split(".")
        if parts[-1] not in targets or "experts" in parts:
            continue
        if layers is not None and int(parts[2]) not in layers:
            continue
        outputs, inputs = weight.shape
        down = torch.randn(rank, inputs, generator=dice) / math.sqrt(rank)
        up = torch.randn(outputs, rank, generator=dice) * weight.float().std() * strength / scale
        tensors[f"{PREFIX}{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"{PREFIX}{module}.lora_B.weight"] = up.to(dtype)
    target.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "bias": "none",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **settings,
    }
    (target / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, target / "adapter_model.safetensors", {"format": "pt"})
    return target


def merge(base: pathlib.Path, adapter: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """Write the plain checkpoint of `base` with the adapter added to its weights into `target`."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
    weights, low = _weights(base), load_file(adapter / "adapter_model.safetensors")
    for name in low:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            down, up = low[name].double(), low[f"{module}.lora_B.weight"].double()
            key = f"{module.removeprefix(PREFIX)}.weight"
            weights[key] = (weights[key].double() + scale * (up @ down)).float()
    shutil.copytree(base, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def _weights(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
