"""Errors that a person can fix end `medha up` before it starts, with one line and status two."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from medha.cli.__main__ import main
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint

SMALL = TinyModel(
    layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, max_tokens=1024
)
WEIGHTS, CONFIG = "model.safetensors", "config.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound") / "model", SMALL)


@pytest.fixture
def folder(tmp_path: Path, sound: Path) -> Path:
    """A folder with a valid resource and its checkpoint, for a test to damage."""
    shutil.copytree(sound, tmp_path / "model")
    write(tmp_path, {})
    return tmp_path


def write(folder: Path, changes: dict[str, object]) -> None:
    """Write the resource with fields of its spec replaced."""
    spec = {
        "model": {
            "name": "tiny",
            "source": {"hostPath": {"path": "model"}},
            "maxContextTokens": 1024,
        },
        "device": {"kind": "Cpu"},
        "engine": {"kvPages": 64},
        **changes,
    }
    document = {
        "apiVersion": "medha.dev/v1beta1",
        "kind": "MedhaReplica",
        "metadata": {"name": "tiny"},
        "spec": spec,
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(document))


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refusal:
    """Run `medha up -f tiny.yaml` in a folder; returns its only line of output."""

    def refusal(folder: Path, *options: str) -> str:
        monkeypatch.chdir(folder)
        with pytest.raises(SystemExit) as ended:
            main(["up", "-f", "tiny.yaml", *options])
        output = capsys.readouterr().err
        assert ended.value.code == 2, output
        assert output.startswith("medha: ") and output.count("\n") == 1, output
        return output

    return refusal


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallelism": {"tp": 3}}, "spec.parallelism.tp is 3: must divide the model's 2 att"),
        ({"parallelism": {"spp": 5}}, "spec.parallelism.spp is 5: must be at most the model's 2"),
        ({"device": {"kind": "Cuda"}}, "spec.device.kind is Cuda: must be Cpu on a machine with"),
        ({"replicas": 0}, "spec.replicas is 0: must be at least 1 to start a fleet; use 1"),
        ({"engine": {"kvPage": 1}}, "spec.engine.kvPage is not a field"),
        (
            {"model": {"name": "t", "maxContextTokens": 8, "source": {"uri": "https://x"}}},
            "spec.model.source is pvc, image or uri: must be hostPath on this machine",
        ),
    ],
)
def test_a_resource_that_this_machine_or_model_cannot_follow(
    folder: Path, refusal: Refusal, changes: dict[str, object], sentence: str
) -> None:
    write(folder, changes)
    assert sentence in refusal(folder)


def test_text_that_is_no_resource(folder: Path, refusal: Refusal) -> None:
    for text, sentence in [
        ("", "the file is empty"),
        ("a:\n\t- b", "must be YAML (line 2: "),
        ("[" * 5_000, "must be YAML of a few levels"),
        ("\0", "must be YAML"),
    ]:
        (folder / "tiny.yaml").write_text(text)
        assert sentence in refusal(folder)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must hold one mapping"),
        ("api_keys: [", "must be YAML (line 1: "),
        ("api_key: keys", "--router-config is api_key: must be one of api_keys, class_headers, "),
        ("api_key: keys", "did you mean api_keys?"),
        ("port: 80", "--router-config is port: must be one of"),
        ("max_queue: many", "must hold valid settings (Expected `int`, got `str` - at `$.max_q"),
        ("keepalive_s: 0", "must hold valid settings (Expected `float` > 0.0 - at `$.keepalive_s`"),
        ("queue_timeout_s: .nan", "must hold valid settings (Expected `float` > 0.0 - at `$.queue"),
        ("stall_timeout_s: .inf", "must hold valid settings (Expected `float` <= 1000000000.0"),
        ("api_keys: nowhere", "nowhere: must be a file that can be read (No such file or dir"),
        ("api_keys: model", "model: must be a file that can be read (Is a directory)"),
    ],
)
def test_settings_of_the_router_that_cannot_be_followed(
    folder: Path, refusal: Refusal, text: str, sentence: str
) -> None:
    (folder / "router.yaml").write_text(text)
    assert sentence in refusal(folder, "--router-config", "router.yaml")


def test_a_file_of_router_settings_that_does_not_exist(folder: Path, refusal: Refusal) -> None:
    assert "--router-config is nope: must be a file" in refusal(folder, "--router-config", "nope")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            CONFIG,
            "config.json cannot be read (No such file or directory); name the folder",
        ),
        ("tokenizer.json", "has no tokenizer.json: copy the whole checkpoint there"),
        (WEIGHTS, "has no *.safetensors: only that format is loaded"),
    ],
)
def test_a_checkpoint_without_one_of_its_files(
    folder: Path, refusal: Refusal, name: str, sentence: str
) -> None:
    (folder / "model" / name).unlink()
    assert sentence in refusal(folder)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "tokenizer.json",
            "{}",
            "tokenizer.json is incomplete (Object missing required field `",
        ),
        (
            "tokenizer.json",
            '{"model": {"vocab"',
            "tokenizer.json is incomplete (Input data was",
        ),
        ("tokenizer_config.json", "[", "tokenizer_config.json is incomplete"),
    ],
)
def test_a_tokenizer_that_is_not_whole(
    folder: Path, refusal: Refusal, name: str, text: str, sentence: str
) -> None:
    (folder / "model" / name).write_text(text)
    line = refusal(folder)
    assert sentence in line and "fetch it again" in line


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def damaged(data: bytes) -> bytes:
    return data[:9] + b"\xff" + data[10:]


@pytest.mark.parametrize(
    "spoil",
    [
        cut,
        damaged,
        lambda data: b"",
        lambda data: b"junk" * 100,
        lambda data: data + b"more",
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
    ],
    ids=["cut short", "damaged", "empty", "junk", "too long", "a header without end"],
)
def test_weights_that_are_not_whole(
    folder: Path, refusal: Refusal, spoil: Callable[[bytes], bytes]
) -> None:
    file = folder / "model" / WEIGHTS
    file.write_bytes(spoil(file.read_bytes()))
    line = refusal(folder)
    assert f"{file} is not a sound safetensors file" in line and "fetch it again" in line


@pytest.mark.parametrize("ids", ["NaN", '"2"', "[1, null]", "-2", "{}", "1e3"])
def test_an_end_of_text_that_is_no_token(folder: Path, refusal: Refusal, ids: str) -> None:
    (folder / "model" / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    assert "must be a token's number, or a list of them; correct it" in refusal(folder)


def test_a_config_that_is_no_models(folder: Path, refusal: Refusal) -> None:
    file = folder / "model" / CONFIG
    for text, sentence in (
        ("{", f"{file} is not JSON"),
        ("[]", f"{file} holds a list, not an object"),
        (json.dumps({"model_type": "llama", "num_hidden_layers": 0}), "num_hidden_layers is 0: "),
    ):
        file.write_text(text)
        assert sentence in refusal(folder)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--port", "99999"), "'--port'"),
        (("--port", "many"), "'--port'"),
        (("--host", "nowhere"), "--host is nowhere: must be an IP address"),
        (("--nope",), "No such option: --nope; see "),
        (
            ("--port", "18123", "--ops-port", "18123"),
            "--ops-port is 18123: must differ from --port",
        ),
        (("--policy", "lifo"), "--policy is lifo: must be one of LARS, "),
        (("--run-dir", "/dev/null"), "run directory /dev/null cannot be used"),
    ],
)
def test_a_wrong_command_line(
    folder: Path, refusal: Refusal, options: tuple[str, ...], sentence: str
) -> None:
    assert sentence in refusal(folder, *options)


def test_a_run_directory_that_is_too_deep_for_sockets(folder: Path, refusal: Refusal) -> None:
    line = refusal(folder, "--run-dir", str(folder / ("x" * 120)), "--port", "0", "--ops-port", "0")
    assert "--run-dir makes a socket of " in line and "at most 107 are allowed" in line


def test_without_a_command_there_is_the_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert "Commands" in shown.out + shown.err and "see medha --help" not in shown.err


def test_a_profile_that_is_none_is_named(folder: Path, refusal: Refusal) -> None:
    assert "--profile is none.json: must be readable" in refusal(folder, "--profile", "none.json")
    (folder / "wrong.json").write_text("x")
    assert "wrong.json is x: must hold a profile" in refusal(folder, "--profile", "wrong.json")
