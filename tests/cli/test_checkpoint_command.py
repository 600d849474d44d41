"""`medha checkpoint new` writes a checkpoint that loads, and refuses wrong options."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from medha.checkpoints.decoder_config import read_config


def new_checkpoint(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "medha.cli", "checkpoint", "new", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_checkpoint_of_the_named_sizes_is_written(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "tiny"
    sizes = ("--layers", 2, "--hidden", 64, "--heads", 2, "--head-dim", 16, "--vocab", 300)
    done = new_checkpoint(folder, "--family", "qwen3_moe", "--experts", 3, *sizes)
    assert done.returncode == 0, done.stderr
    config = read_config(folder)
    assert config.experts is not None and config.experts.count == 3
    assert (config.layers, config.hidden, config.vocab) == (2, 64, 300) and config.head_norms
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names


def test_a_wrong_option_ends_with_status_two_and_the_usage(tmp_path: pathlib.Path) -> None:
    done = new_checkpoint(tmp_path, "--layer-count", 2)
    assert done.returncode == 2 and "usage: medha checkpoint new" in done.stderr


def test_the_help_names_the_writers_options() -> None:
    done = new_checkpoint("--help")
    assert done.returncode == 0 and "--kv-heads" in done.stdout and "--rope" in done.stdout
