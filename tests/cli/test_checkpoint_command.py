"""`medha checkpoint new` writes a checkpoint that loads, and refuses wrong options."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

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


def test_a_checkpoint_is_replaced_only_if_that_is_said(tmp_path: pathlib.Path) -> None:
    sizes = ("--hidden", 64, "--heads", 2, "--head-dim", 16, "--vocab", 300)
    assert new_checkpoint(tmp_path, "--layers", 2, "--files", 2, *sizes).returncode == 0
    again = new_checkpoint(tmp_path, "--layers", 1, *sizes)
    assert again.returncode == 2 and "--force" in again.stderr
    assert read_config(tmp_path).layers == 2
    forced = new_checkpoint(tmp_path, "--layers", 1, "--force", *sizes)
    assert forced.returncode == 0 and "a llama of 0." in forced.stdout
    assert read_config(tmp_path).layers == 1
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("option", "value"), [("--heads", 3), ("--layers", 0), ("--family", "foo"), ("--kv-heads", 0)]
)
def test_sizes_that_do_not_fit_get_one_line_and_leave_nothing(
    tmp_path: pathlib.Path, option: str, value: object
) -> None:
    done = new_checkpoint(tmp_path / "new", option, value)
    assert done.returncode == 2
    assert done.stderr.startswith("medha: no checkpoint is written: ")
    assert done.stderr.count("\n") == 1 and "fetch" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_gets_one_line() -> None:
    done = new_checkpoint("/proc/none")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "/proc/none" in done.stderr


def test_a_wrong_option_ends_with_status_two_and_the_usage(tmp_path: pathlib.Path) -> None:
    done = new_checkpoint(tmp_path, "--layer-count", 2)
    assert done.returncode == 2 and "usage: medha checkpoint new" in done.stderr


def test_the_help_names_the_writers_options() -> None:
    done = new_checkpoint("--help")
    assert done.returncode == 0 and "--kv-heads" in done.stdout and "--rope" in done.stdout
