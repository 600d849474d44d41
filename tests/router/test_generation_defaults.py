"""Sampling parameters of the checkpoint where a request is silent."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from medha.checkpoints.decoder_config import read_generation_defaults
from medha.errors import CheckpointError
from medha.messages import GenerationDefaults

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
