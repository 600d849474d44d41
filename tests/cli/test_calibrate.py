"""`medha calibrate` on this machine, on a model small enough to be measured in seconds."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from medha.profile import CPU_CORE, decode
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

SMALL = ("--rows", "64", "--keys", "1024", "--page-tokens", "16", "--seconds", "1")


def calibrate(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "medha.cli", "calibrate", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with only a config.json, whose layers have two kinds of attention."""
    model = TinyModel(
        family="qwen2", layers=2, hidden=64, heads=4, head_dim=16, window=100, window_from=1
    )
    whole = write_checkpoint(tmp_path_factory.mktemp("whole"), model)
    bare = tmp_path_factory.mktemp("bare")
    (bare / "config.json").write_bytes((whole / "config.json").read_bytes())
    return bare


def test_a_profile_is_written_and_judged_by_batches_not_fitted(
    config: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "here.json"
    few = ("--ranks", 2, *SMALL)
    done = calibrate(config, "--out", out, "--name", "here", "--tolerance", 1e6, *few)
    assert done.returncode == 0, done.stderr
    profile = decode(out.read_bytes())
    assert profile.name == "here" and profile.error > 0
    assert profile.valid_rows == 64 and profile.valid_keys >= 1024
    assert profile.all_reduce_bytes_per_s != CPU_CORE.all_reduce_bytes_per_s
    assert profile.p2p_latency_s != CPU_CORE.p2p_latency_s
    assert profile.kvp_bytes_per_s == CPU_CORE.kvp_bytes_per_s
    assert "all-reduce of 2 ranks" in done.stdout and "point-to-point of 2" in done.stdout
    for word in ("GFLOP/s", "GB/s", "decodes over", "p50", "p95", "unseen", str(out)):
        assert word in done.stdout


def test_a_profile_that_misses_the_tolerance_is_written_with_status_one(
    config: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    out = tmp_path / "rough.json"
    done = calibrate(config, "--out", out, "--tolerance", 0.001, "--ranks", 1, *SMALL)
    assert done.returncode == 1 and "NOT within --tolerance 0.1 %" in done.stdout
    profile = decode(out.read_bytes())
    assert profile.linear_flops_per_s > 0
    assert profile.all_reduce_latency_s == CPU_CORE.all_reduce_latency_s
    assert "one rank here" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nowhere", "--out", "p.json"), "CHECKPOINT is nowhere: must be a folder with a config"),
        (("{config}", "--out", "no/such/p.json"), "--out is no/such/p.json: must be a file in"),
        (("{config}", "--out", "{tmp}/p.json", "--dtype", "int4"), "--dtype is int4: must be"),
        (("{config}", "--out", "{tmp}/p.json", "--device", "tpu"), "device is tpu: must be cpu or"),
        (("{config}", "--out", "{tmp}/p.json", "--keys", "999999"), "--keys is 999999: must be at"),
        (("{config}",), "Missing option '--out'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_two(
    arguments: tuple[str, ...], named: str, config: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    done = calibrate(*(argument.format(config=config, tmp=tmp_path) for argument in arguments))
    assert done.returncode == 2
    assert named in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "p.json").exists()
