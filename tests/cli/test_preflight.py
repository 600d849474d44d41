"""`medha up` and `medha doctor` report every fault before a process starts, without torch."""

from __future__ import annotations

import json
import os
import resource as process_limits
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file
from tests.support.adapter_writer import write_adapter

from medha.cli.__main__ import main
from medha.cli.doctor import diagnose
from medha.cli.local_fleet.checkpoint_check import check_resource, check_resources
from medha.cli.local_fleet.run_dir import RunDir, check_unused
from medha.cli.resource_file import read_resources
from medha.config import AdapterFolder, WorkerConfig
from medha.errors import SetupError, SpecError, UserError
from medha.rendering import Site, worker_config
from medha.topology import Coordinate
from medha_worker.controller.process import identity_of
from medha_worker.device import CPU
from medha_worker.engine import RankEngine
from medha_worker.model.checkpoint_writer import TinyModel, write_checkpoint
from medha_worker.rank import set_environment

SMALL = TinyModel(
    layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, max_tokens=1024
)
MOST_CPU_S = 3.0
WITHOUT_TORCH = """
import sys
from medha.cli.__main__ import main
try:
    main(sys.argv[1:])
finally:
    print(sorted({"torch", "medha_worker", "safetensors"} & sys.modules.keys()))
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sound") / "model", SMALL)


@pytest.fixture
def model(tmp_path: Path, sound: Path) -> Path:
    """A checkpoint for a test to damage, next to the resource that names it."""
    write(tmp_path, document())
    return Path(shutil.copytree(sound, tmp_path / "model"))


def document(name: str = "tiny", path: str = "model", **spec: object) -> dict[str, Any]:
    source = {"hostPath": {"path": path}}
    served = {"name": "tiny", "source": source, "maxContextTokens": 1024}
    return {
        "apiVersion": "medha.dev/v1beta1",
        "kind": "MedhaReplica",
        "metadata": {"name": name},
        "spec": {
            "model": served,
            "device": {"kind": "Cpu"},
            "engine": {"kvPages": 64},
            **spec,
        },
    }


def write(folder: Path, *documents: dict[str, Any]) -> Path:
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return file


def edit_config(model: Path, **changes: object) -> None:
    """Replace fields of config.json; remove those that are None."""
    path = model / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def faults(file: Path) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_resources(read_resources(file), gpus=0)
    return str(caught.value).splitlines()


def config_of(file: Path, model: Path) -> WorkerConfig:
    site = Site(
        checkpoint=str(model),
        routers=(),
        curve=None,
        rank_bind="ipc:///nowhere",
        ops_port=0,
        run_dir="",
    )
    (resource,) = read_resources(file)
    return worker_config(resource, "tiny-0", site)


CONFIGS: list[tuple[dict[str, object], str]] = [
    ({"auto_map": {"AutoModel": "code.Model"}}, 'auto_map is {"AutoModel": "code.Model"}: must be'),
    ({"model_type": "gpt_neox"}, "model_type is 'gpt_neox': must be one of llama, "),
    (
        {"model_type": "kimi_k2", "auto_map": {"AutoModel": "modeling_deepseek.DeepseekV3Model"}},
        "model_type is 'kimi_k2': must be one of llama, ",
    ),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        'architectures is ["LlamaForSequenceClassification"]: must be absent or name one of Llama',
    ),
    ({"model_type": None}, "model_type is missing: must be one of llama, "),
    (
        {"model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": 1},
        "num_experts_per_tok is 8: must be at most num_experts, which is 4; fetch",
    ),
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 8}},
        "quantization_config.bits is 8: must be 4; use a checkpoint of another format, such as",
    ),
    (
        {"rope_scaling": {"rope_type": "longrope"}, "rope_parameters": None},
        "rope type is 'longrope': must be one of default, ",
    ),
    (
        {"num_hidden_layers": 1 << 40},
        "num_hidden_layers is 1099511627776: must be a positive whole number up to 10000; fix",
    ),
    ({"head_dim": 10**30}, f"head_dim is {10**30}: must be a positive whole number up to 21474"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        "factor is 0: must be a number from 0.01 to 1e+15; fetch",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0.5}},
        "original_max_position_embeddings is 0.5: must be a number from 1 to ",
    ),
    (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
        "rope_theta is 1: must be a number from 2 to ",
    ),
    ({"layer_types": [[], {}]}, "layer_types must hold one of full_attention or "),
]


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-99])


def lose_a_shard(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-1-of-2.safetensors")
    names = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def lose_the_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


@pytest.mark.parametrize(("changes", "sentence"), CONFIGS)
def test_a_config_that_is_not_served_is_refused_in_the_words_of_the_rank(
    model: Path, changes: dict[str, object], sentence: str
) -> None:
    edit_config(model, **changes)
    file = model.parent / "tiny.yaml"
    assert [line.partition("config.json: ")[2].startswith(sentence) for line in faults(file)] == [
        True
    ]
    with pytest.raises(UserError) as caught:
        RankEngine(config_of(file, model), Coordinate(0, 0, 0), CPU, lambda *_: None)
    assert [str(caught.value)] == faults(file)


def change(model: Path, name: str, tensor: torch.Tensor) -> None:
    file = model / "model.safetensors"
    save_file(load_file(file) | {name: tensor}, file)


def lose_a_row(model: Path) -> None:
    change(model, "model.embed_tokens.weight", torch.zeros(511, 64))


def take_another_type(model: Path) -> None:
    change(model, "model.layers.1.input_layernorm.weight", torch.zeros(64, dtype=torch.int64))


def misplace_a_tensor(model: Path) -> None:
    index = dict.fromkeys(load_file(model / "model.safetensors"), "model.safetensors")
    index["model.layers.0.self_attn.v_proj.weight"] = "other.safetensors"
    save_file({"v_proj": torch.zeros(1)}, model / "other.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize(
    "spoil", [cut, lose_a_shard, lose_a_row, take_another_type, misplace_a_tensor]
)
def test_weights_that_are_not_whole_are_refused_in_the_words_of_the_rank(
    model: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(model)
    file = model.parent / "tiny.yaml"
    with pytest.raises(UserError) as caught:
        RankEngine(config_of(file, model), Coordinate(0, 0, 0), CPU, lambda *_: None)
    assert [str(caught.value)] == faults(file)


def with_adapters(model: Path, *names: str) -> Path:
    sources = [{"name": name, "source": {"hostPath": {"path": name}}} for name in names]
    return write(model.parent, document(adapters=sources))


def test_adapters_that_the_model_takes_pass(model: Path) -> None:
    write_adapter(model, model.parent / "legal")
    write_adapter(model, model.parent / "poems", targets=("q_proj",), rank=2)
    file = with_adapters(model, "legal", "poems")
    assert list(check_resources(read_resources(file), gpus=0)) == ["tiny"]


def test_a_controller_has_the_templates_of_adapters_that_differ_from_the_models(
    model: Path,
) -> None:
    own, named = "{{ messages }}", [{"name": "default", "template": "{{ 2 }}"}]
    (model / "chat_template.jinja").write_text(own)
    adapters: list[AdapterFolder] = []
    for name, file, text in (
        ("same", "chat_template.jinja", own),
        ("older", "tokenizer_config.json", json.dumps({"chat_template": "{{ 1 }}"})),
        ("named", "tokenizer_config.json", json.dumps({"chat_template": named})),
        ("poems", "chat_template.jinja", "{{ 'ü' }}"),
        ("none", "tokenizer_config.json", "{}"),
    ):
        folder = model.parent / name
        write_adapter(model, folder)
        (folder / file).write_text(text)
        adapters.append(AdapterFolder(name=name, folder=str(folder)))
    config = config_of(write(model.parent, document()), model)
    identity = identity_of(msgspec.structs.replace(config, adapters=tuple(adapters)))
    expected = {"older": "{{ 1 }}", "named": "{{ 2 }}", "poems": "{{ 'ü' }}"}
    assert json.loads(identity.files["adapter_templates.json"]) == expected
    assert "adapter_templates.json" in identity.hashes
    identity = identity_of(msgspec.structs.replace(config, adapters=tuple(adapters[:1])))
    assert "adapter_templates.json" not in identity.files
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    fault = rf"{folder}/chat_template\.jinja cannot be read \(.*\); fetch it again"
    with pytest.raises(UserError, match=fault):
        identity_of(msgspec.structs.replace(config, adapters=tuple(adapters)))


def test_faults_of_adapters_are_reported_together_in_the_words_of_the_rank(model: Path) -> None:
    write_adapter(model, model.parent / "legal", use_dora=True)
    write_adapter(model, model.parent / "poems", rank=513)
    file = with_adapters(model, "legal", "poems", "prose")
    config = config_of(file, model)
    reported = []
    for name in ("legal", "poems"):
        adapter = AdapterFolder(name=name, folder=str(model.parent / name))
        adapted = msgspec.structs.replace(config, adapters=(adapter,))
        with pytest.raises(UserError) as caught:
            RankEngine(adapted, Coordinate(0, 0, 0), CPU, lambda *_: None)
        with pytest.raises(UserError, match=r"use_dora is|r is 513"):
            identity_of(adapted)
        reported.append(str(caught.value))
    *listed, missing = faults(file)
    assert listed == reported
    assert missing.startswith("spec.adapters[2].source.hostPath.path is ")
    assert "must be a folder" in missing


def test_a_missing_tokenizer_is_refused_in_the_words_of_the_controller(model: Path) -> None:
    lose_the_tokenizer(model)
    file = model.parent / "tiny.yaml"
    with pytest.raises(UserError) as caught:
        identity_of(config_of(file, model))
    assert [str(caught.value)] == faults(file)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model_type": "qwen2"}, "has no tensor model.layers.0.self_attn.q_proj.bias, which"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight, which"),
        ({"mlp_bias": True}, "has no tensor model.layers.0.mlp.gate_proj.bias, which config.json"),
    ],
)
def test_tensors_that_the_files_lack_are_refused_in_the_words_of_the_rank(
    model: Path, changes: dict[str, object], sentence: str
) -> None:
    edit_config(model, **changes)
    file = model.parent / "tiny.yaml"
    (line,) = faults(file)
    assert line.startswith(f"{model} {sentence}")
    with pytest.raises(UserError) as caught:
        RankEngine(config_of(file, model), Coordinate(0, 0, 0), CPU, lambda *_: None)
    assert str(caught.value) == line


def test_weights_without_the_prefix_of_a_model_that_generates_text_are_named(model: Path) -> None:
    """As of some models for embeddings."""
    held = load_file(model / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    save_file(renamed, model / "model.safetensors")
    (line,) = faults(model.parent / "tiny.yaml")
    assert line.startswith(f"{model} has no tensor model.embed_tokens.weight, which")


@pytest.mark.parametrize("name", ["tekken.json", "tokenizer.model", "tiktoken.model"])
def test_a_tokenizer_of_another_format_is_to_be_converted(model: Path, name: str) -> None:
    (model / "tokenizer.json").rename(model / name)
    (line,) = faults(model.parent / "tiny.yaml")
    assert line.startswith(f"{model} has {name} but no tokenizer.json, the only format")
    assert line.endswith(f"AutoTokenizer.from_pretrained('{model}').save_pretrained('{model}')")


@pytest.mark.parametrize(
    ("spec", "changes", "sentence"),
    [
        ({"parallelism": {"tp": 2}}, {"intermediate_size": 97}, "spec.parallelism.tp is 2: must"),
        (
            {"parallelism": {"tp": 2}},
            {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 97},
            "spec.parallelism.tp is 2: must divide the model's 2 attention heads and intermediate"
            " size of 97, and",
        ),
        ({"parallelism": {"spp": 3}}, {}, "spec.parallelism.spp is 3: must be at most the"),
        (
            {"engine": {"kvMemory": "1Mi", "pageTokens": 256}},
            {"head_dim": 1024},
            "spec.engine.kvMemory is 1048576 bytes: must hold a page of 4194304 bytes; use 4Mi or",
        ),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_in_the_words_of_the_rank(
    model: Path, spec: dict[str, Any], changes: dict[str, object], sentence: str
) -> None:
    edit_config(model, **changes)
    file = write(model.parent, document(**spec))
    with pytest.raises(UserError) as refused:
        check_resources(read_resources(file), gpus=0, weights=False)
    line = str(refused.value)
    assert line.startswith(sentence)
    config = msgspec.structs.replace(config_of(file, model), dummy_weights=True)
    with pytest.raises(UserError) as caught:
        RankEngine(config, Coordinate(0, 0, 0), CPU, lambda *_: None)
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "network", [{"transport": "Rdma"}, {"transport": "Rdma", "devices": ["mlx5_77"]}]
)
def test_a_network_that_this_machine_lacks_is_refused_in_the_words_of_the_rank(
    model: Path, network: dict[str, Any]
) -> None:
    file = write(model.parent, document(network=network))
    (line,) = faults(file)
    assert ("network" in line and "mlx5_77" in line) or "no device can be used" in line
    with pytest.raises(UserError) as caught:
        set_environment({}, config_of(file, model))
    assert str(caught.value) == line


def test_the_pool_must_hold_the_longest_context(model: Path) -> None:
    file = write(model.parent, document(engine={"kvPages": 7}, parallelism={"kvp": {"max": 2}}))
    assert faults(file) == [
        "spec.model.maxContextTokens is 1024: must be at most the 896 tokens of the KV pool "
        "(2 KVP groups × 7 pages × 64 tokens); use 896 or less, or raise spec.engine.kvPages to 8"
    ]
    enough = write(model.parent, document(engine={"kvPages": 8}, parallelism={"kvp": {"max": 2}}))
    assert check_resources(read_resources(enough), gpus=0)


def test_the_pool_must_hold_a_window_of_one_that_slides(model: Path) -> None:
    """In each group: a window of 300 tokens that begins anywhere, and the next token's page."""
    edit_config(model, model_type="mistral", sliding_window=300)
    two = {"kvp": {"max": 2}}
    file = write(model.parent, document(engine={"kvPages": 6}, parallelism=two))
    assert faults(file) == [
        "spec.model.maxContextTokens is 1024: must be at most the 384 tokens of the KV pool "
        "(1 KVP groups × 6 pages × 64 tokens); use 384 or less, or raise spec.engine.kvPages to 7"
    ]
    enough = write(model.parent, document(engine={"kvPages": 7}, parallelism=two))
    assert check_resources(read_resources(enough), gpus=0)
    edit_config(model, sliding_window=1024)
    assert "2 KVP groups" in faults(file)[0]


@pytest.mark.parametrize("pages", [1, 3])
def test_the_memory_that_a_refusal_names_is_the_least_that_suffices(
    model: Path, pages: int
) -> None:
    edit_config(model, max_position_embeddings=1 << 20)
    engine = {"kvMemory": f"{pages}Mi"}
    spec = document(engine=engine)
    spec["spec"]["model"]["maxContextTokens"] = 1 << 17
    (line,) = faults(write(model.parent, spec))
    needed = int(line.rpartition("spec.engine.kvMemory to ")[2].removesuffix("Mi"))
    assert needed == (1 << 17) * 2 * 2 * 32 * 4 >> 20  # tokens · layers · (K, V) · scalars · bytes
    engine["kvMemory"] = f"{needed - 1}Mi"
    assert len(faults(write(model.parent, spec))) == 1
    engine["kvMemory"] = f"{needed}Mi"
    assert check_resources(read_resources(write(model.parent, spec)), gpus=0)


def test_one_name_serves_one_model(model: Path, tmp_path: Path) -> None:
    two = (document("a"), document("b", path="other"))
    shutil.copytree(model, tmp_path / "other")
    assert len(check_resources(read_resources(write(tmp_path, *two)), gpus=0)) == 2
    shutil.rmtree(tmp_path / "other")
    write_checkpoint(tmp_path / "other", msgspec.structs.replace(SMALL, seed=7))
    assert faults(write(tmp_path, *two)) == [
        "spec.model.name of b is tiny: must name one model, and the checkpoints in "
        f"{model} and {tmp_path / 'other'} differ; serve one of them under another name"
    ]


def test_all_faults_are_reported_at_once_each_with_its_resource(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(model)
    lose_the_tokenizer(model)
    file = write(tmp_path, document("a", parallelism={"tp": 3}), document("b", path="gone"))
    run_dir = RunDir.make(tmp_path / "run")
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = str(server.getsockname()[1])
        options = ("--port", port, "--ops-port", "0", "--run-dir", str(run_dir.path))
        with pytest.raises(SystemExit) as ended:
            main(["up", "-f", str(file), *options])
    run_dir.clean()
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    starts = [
        "medha: a: spec.parallelism.tp is 3: ",
        f"medha: a: {model} has no tokenizer.json: ",
        f"medha: a: {model}/model.safetensors is not a sound safetensors file ",
        "medha: b: spec.model.source.hostPath.path is ",
        f"medha: port {port} of 127.0.0.1 is in use: ",
        f"medha: run directory {run_dir.path} is in use by another `medha up`: end that one or ",
    ]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts


def test_a_run_directory_is_free_again_after_its_process(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys; from medha.cli.local_fleet.run_dir import RunDir;"
        "held = RunDir.make(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for check in (check_unused, RunDir.make):
            with pytest.raises(SetupError, match="is in use by another `medha up`"):
                check(tmp_path)
    finally:
        other.kill()
        other.communicate()
    check_unused(tmp_path)
    first = RunDir.make(tmp_path)
    first.clean()
    RunDir.make(tmp_path).clean()


@pytest.mark.parametrize("command", ["up", "doctor"])
def test_faults_come_within_three_seconds_of_work_and_without_torch(
    model: Path, tmp_path: Path, command: str
) -> None:
    shutil.copytree(model, tmp_path / "other")
    cut(model)
    edit_config(tmp_path / "other", auto_map={"AutoModel": "code.Model"})
    file = write(tmp_path, document("a"), document("b", path="other"))
    before = process_limits.getrusage(process_limits.RUSAGE_CHILDREN)
    result = subprocess.run(
        [
            *(sys.executable, "-c", WITHOUT_TORCH, command, "-f", str(file)),
            *("--port", "0", "--ops-port", "0"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    after = process_limits.getrusage(process_limits.RUSAGE_CHILDREN)
    assert result.returncode == 2
    assert "a sound safetensors file" in result.stderr + result.stdout
    assert "auto_map is" in result.stderr + result.stdout
    assert result.stdout.endswith("[]\n")
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_CPU_S


def test_the_doctor_prints_a_line_for_each_fault(model: Path) -> None:
    lose_the_tokenizer(model)
    edit_config(model, model_type="gpt_neox")
    run_dir = RunDir.make(model.parent / "run")
    console = Console(record=True, width=400, file=open(os.devnull, "w"))  # noqa: SIM115
    try:
        assert not diagnose(model.parent / "tiny.yaml", 0, 0, console, run_dir.path)
    finally:
        console.file.close()
        run_dir.clean()
    wrong = [line for line in console.export_text().splitlines() if line.startswith("no ")]
    names = [f"no run directory {run_dir.path}", *["no resource tiny.yaml"] * 2]
    assert [line.split(":")[0] for line in wrong] == names
    assert "is in use by another `medha up`" in wrong[0]
    assert "model_type is 'gpt_neox'" in wrong[1] and "has no tokenizer.json" in wrong[2]


def test_a_resource_without_replicas_is_a_fault(model: Path) -> None:
    (resource,) = read_resources(model.parent / "tiny.yaml")
    none = msgspec.structs.replace(resource.spec, replicas=0)
    with pytest.raises(SpecError, match=r"spec\.replicas is 0"):
        check_resources([msgspec.structs.replace(resource, spec=none)], gpus=0)


def test_random_weights_need_no_weight_files(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (resource,) = read_resources(model.parent / "tiny.yaml")
    assert check_resource(resource, gpus=0, weights=False) == model


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out == f"medha {version('medha')}\n"
