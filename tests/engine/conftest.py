"""Checkpoints made once per test process, and what transformers says of them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

Tokens = npt.NDArray[np.int32]
Folder = Callable[[TinyModel], pathlib.Path]
Oracle = Callable[[pathlib.Path, Tokens], torch.Tensor]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """The folder of a checkpoint, written when first asked for."""
    written: dict[str, pathlib.Path] = {}

    def folder(model: TinyModel) -> pathlib.Path:
        key = repr(model)
        if key not in written:
            written[key] = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), model)
        return written[key]

    return folder


@pytest.fixture(scope="session")
def tiny(checkpoint: Folder) -> pathlib.Path:
    return checkpoint(TinyModel())


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    """transformers' logits [tokens, vocab] of a prompt, float32, in one forward."""
    models: dict[pathlib.Path, torch.nn.Module] = {}

    def logits(folder: pathlib.Path, tokens: Tokens) -> torch.Tensor:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="sdpa"
            ).eval()
        with torch.inference_mode():
            ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None]
            logits: torch.Tensor = models[folder](ids).logits[0]
        return logits

    return logits
