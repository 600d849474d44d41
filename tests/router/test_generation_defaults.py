"""Sampling parameters of the checkpoint where a request is silent."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from medha.checkpoints.decoder_config import read_config, read_generation_defaults
from medha.errors import CheckpointError
from medha.messages import GenerationDefaults
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

DEFAULTS = GenerationDefaults(temperature=0.6, top_p=0.95, top_k=20)


def settings_of(running: Any, **fields: object) -> tuple[float, float, int]:
    """Return temperature, top-p and top-k that reach the replica."""
    body = {"model": "tiny", "prompt": "say a", **fields}
    assert running.http.post("/v1/completions", json=body).status_code == 200
    sampling = running.controllers[0].seen[-1].sampling
    return sampling.temperature, sampling.top_p, sampling.top_k


def test_a_silent_request_samples_as_the_checkpoint_says(alone: Any) -> None:
    alone.open(defaults=DEFAULTS)
    assert settings_of(alone) == (0.6, 0.95, 20)
    assert settings_of(alone, temperature=1, top_k=0) == (1.0, 0.95, 0)
    assert settings_of(alone, temperature=None, top_p=0.5) == (0.6, 0.5, 20)


def test_the_defaults_of_checkpoints_can_be_switched_off(running_with: Any) -> None:
    running = running_with(generation_defaults=False)
    running.open(defaults=DEFAULTS)
    assert settings_of(running) == (1.0, 1.0, 0)


def test_the_defaults_are_read_from_the_checkpoint(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "generation_config.json"
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    file.write_text(
        json.dumps(
            {"do_sample": True, "eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20}
            | {"top_p": 0.95, "min_p": None}
        )
    )
    assert read_generation_defaults(tmp_path) == DEFAULTS
    file.write_text('{"top_p": 1.5}')
    with pytest.raises(CheckpointError, match="top_p"):
        read_generation_defaults(tmp_path)


@pytest.mark.parametrize("off", [0, -1])
def test_a_top_k_that_is_off_is_read(off: int, tmp_path: pathlib.Path) -> None:
    write(tmp_path, "generation_config.json", {"top_k": off, "top_p": 0.9})
    assert read_generation_defaults(tmp_path) == GenerationDefaults(top_k=0, top_p=0.9)


@pytest.mark.parametrize("top_k", [-2, 1.5, "-1"])
def test_another_top_k_below_zero_is_named(top_k: object, tmp_path: pathlib.Path) -> None:
    write(tmp_path, "generation_config.json", {"top_k": top_k})
    with pytest.raises(CheckpointError, match="top_k"):
        read_generation_defaults(tmp_path)


def write(folder: pathlib.Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value))


def stop_tokens_of(
    folder: pathlib.Path, generation: object, config: object, eos_token: object
) -> tuple[int, ...]:
    """Return the stop tokens of a checkpoint whose three files have these values."""
    write_checkpoint(folder, TinyModel(layers=1))
    settings = json.loads((folder / "config.json").read_text()) | {"eos_token_id": config}
    write(folder, "config.json", settings)
    write(folder, "generation_config.json", {"eos_token_id": generation})
    write(folder, "tokenizer_config.json", {"eos_token": eos_token})
    return read_config(folder).stop_tokens


@pytest.mark.parametrize(
    ("generation", "config", "eos_token", "expected"),
    [
        (1, 5, "<|eot_id|>", (1, 4)),
        ([3, 1], [1, 2], None, (3, 1)),
        (None, [1, 2], "<|eot_id|>", (1, 2, 4)),
        (None, None, {"__type": "AddedToken", "content": "<|eot_id|>"}, (4,)),
        (1, -1, "<|eot_id|>", (1, 4)),
        (1, 1, "no token", (1,)),
        (None, None, 7, ()),
    ],
)
def test_an_output_ends_at_the_tokens_of_the_checkpoint_and_of_its_tokenizer(
    generation: object,
    config: object,
    eos_token: object,
    expected: tuple[int, ...],
    tmp_path: pathlib.Path,
) -> None:
    assert stop_tokens_of(tmp_path, generation, config, eos_token) == expected


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("damage", [None, b"{", b"[]", b'{"added_tokens": 3, "eos_token": 1}'])
def test_stop_tokens_do_without_files_of_the_tokenizer_that_are_not_sound(
    name: str, damage: bytes | None, tmp_path: pathlib.Path
) -> None:
    stop_tokens_of(tmp_path, 1, 5, "<|eot_id|>")
    if damage is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(damage)
    assert read_config(tmp_path).stop_tokens == (1,)
