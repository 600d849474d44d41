"""From a resource to the configs of a local fleet's processes, checked and written."""

from __future__ import annotations

import json
import math
import socket
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from medha.checkpoints.decoder_config import read_config
from medha.checkpoints.tensor_names import HEAD, projections, vectors
from medha.cli.local_fleet import preflight
from medha.cli.local_fleet.checkpoint_check import check_resource
from medha.cli.local_fleet.fleet_plan import HostSettings, plan_fleet, replica_count
from medha.cli.local_fleet.launches import controller_launch, rank_launch, router_launch
from medha.cli.local_fleet.run_dir import PREFIX, RunDir, remove_stale
from medha.cli.resource_file import read_resources
from medha.cli.router_settings import read_router_settings
from medha.config import POLICIES as KNOWN
from medha.config import AdapterFolder, RouterConfig, Scheduling, WorkerConfig, read
from medha.errors import CheckpointError, SetupError, SpecError
from medha.rendering import POLICIES, scheduling_of
from medha.spec import MedhaReplica, parse

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CONFIG = {
    "model_type": "llama",
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}


def resource(**spec: Any) -> MedhaReplica:
    model = {"name": "m", "source": {"hostPath": {"path": "model"}}, "maxContextTokens": 4096}
    whole = {"model": {**model, **spec.pop("model", {})}, "device": {"kind": "Cpu"}, **spec}
    return parse(
        {
            "apiVersion": "medha.dev/v1beta1",
            "kind": "MedhaReplica",
            "metadata": {"name": "tiny"},
            "spec": whole,
        }
    )


def place(ports: int = 1, **changes: Any) -> HostSettings:
    plain = HostSettings(
        run_dir="/run/x",
        address="127.0.0.1",
        public_address="0.0.0.0",
        port=8000,
        ops_port=8001,
        fleet_address="tcp://127.0.0.1:7800",
        controller_ports=tuple(range(9000, 9000 + ports)),
        checkpoints={"tiny": "/models/tiny"},
    )
    return msgspec.structs.replace(plain, **changes)


def checkpoint(folder: Path, **changes: object) -> Path:
    """Write a checkpoint whose tensors are zeros."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = read_config(folder)
    shapes = {HEAD: (model.vocab, model.hidden), **dict(vectors(model))}
    shapes |= {f"{module}.weight": shape for module, shape in projections(model)}
    tensors, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * math.prod(shape)
        tensors[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    header = json.dumps(tensors).encode()
    weights = len(header).to_bytes(8, "little") + header + bytes(at)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def at(folder: Path, **spec: Any) -> MedhaReplica:
    source = {"source": {"hostPath": {"path": str(folder)}}}
    return resource(model={**source, **spec.pop("model", {})}, **spec)


def test_each_copy_of_a_resource_is_a_replica_with_a_port_of_its_own() -> None:
    plan = plan_fleet([resource(replicas=2)], place(ports=2))
    assert [(replica.name, replica.config.ops_port) for replica in plan.replicas] == [
        ("tiny-0", 9000),
        ("tiny-1", 9001),
    ]
    assert plan.router.models[0].name == "m"
    assert {replica.config.routers for replica in plan.replicas} == {(plan.router.fleet_bind,)}


def test_settings_of_the_router_reach_its_config(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    file = tmp_path / "router.yaml"
    file.write_text("api_keys: keys\nclass_headers: {x-tier: {gold: fast}}\nmax_queue: 7\n")
    plain = plan_fleet([resource()], place()).router
    assert (plain.host, plain.ops_host) == ("0.0.0.0", "127.0.0.1")
    router = plan_fleet([resource()], place(router_settings=read_router_settings(file))).router
    assert router.api_keys == str(tmp_path / "keys")
    assert router.class_headers == {"x-tier": {"gold": "fast"}}
    assert router.max_queue == 7
    restored = {name: getattr(plain, name) for name in ("api_keys", "class_headers", "max_queue")}
    assert msgspec.structs.replace(router, **restored) == plain


def test_ranks_are_planned_up_to_the_largest_replica() -> None:
    plan = plan_fleet([resource(parallelism={"tp": 2, "spp": 2, "kvp": {"max": 3}})], place())
    groups = plan.replicas[0].groups
    assert [[str(rank.at) for rank in group] for group in groups] == [
        [f"g{g}-s{s}-t{t}" for s in range(2) for t in range(2)] for g in range(3)
    ]


def test_gpus_are_assigned_in_order_and_growth_stops_at_the_last() -> None:
    cuda = resource(device={"kind": "Cuda"}, replicas=2, parallelism={"tp": 2, "kvp": {"max": 2}})
    plan = plan_fleet([cuda], place(ports=2, gpus=6))
    dealt = [[[rank.gpu for rank in g] for g in replica.groups] for replica in plan.replicas]
    assert dealt == [[[0, 1], [2, 3]], [[4, 5]]]
    assert plan.replicas[0].config.dtype == "bfloat16"
    with pytest.raises(SetupError, match="replica tiny-1 needs 2 GPUs and this machine has 3"):
        plan_fleet([cuda], place(ports=2, gpus=3))


def test_a_fleet_of_no_replicas_is_refused() -> None:
    with pytest.raises(SpecError, match=r"spec\.replicas is 0: must be at least 1"):
        replica_count([resource(replicas=0)])
    assert replica_count([resource(replicas=0), resource(replicas=2)]) == 2


def test_two_resources_of_one_model_must_agree_on_it() -> None:
    other = msgspec.structs.replace(resource(model={"maxContextTokens": 99}), name="other")
    checkpoints = {"tiny": "/a", "other": "/b"}
    with pytest.raises(SpecError, match="must have the same maxContextTokens, adapters and slo"):
        plan_fleet([resource(), other], place(ports=2, checkpoints=checkpoints))
    adapter = {"name": "legal", "source": {"hostPath": {"path": "/legal"}}}
    adapted = msgspec.structs.replace(resource(adapters=[adapter]), name="other")
    with pytest.raises(SpecError, match="adapters"):
        plan_fleet([resource(), adapted], place(ports=2, checkpoints=checkpoints))
    plan = plan_fleet([adapted], place(ports=1, checkpoints=checkpoints))
    assert plan.router.models[0].adapters == ("legal",)
    assert plan.replicas[0].config.adapters == (AdapterFolder(name="legal", folder="/legal"),)
    twin = msgspec.structs.replace(resource(), name="other")
    assert (
        len(plan_fleet([resource(), twin], place(ports=2, checkpoints=checkpoints)).replicas) == 2
    )


def test_the_resources_fields_become_the_schedulers_settings() -> None:
    spec = resource(
        scheduling={
            "policy": "LARSPaper",
            "normaliser": "Deadline",
            "maxYieldPercent": 25,
            "batchBudget": {"mode": "Tokens", "tokens": 512, "min": "5ms", "max": "1s"},
            "longPrefillThresholdTokens": 128,
            "promises": "Revise",
            "prefixCache": "Disabled",
            "growthTimeout": "1m30s",
        }
    ).spec
    assert scheduling_of(spec.scheduling, cuda=False) == Scheduling(
        policy="lars-paper",
        normaliser="deadline",
        budget="tokens",
        batch_tokens=512,
        min_batch_s=0.005,
        max_batch_s=1.0,
        long_prefill_threshold_tokens=128,
        max_yield=0.25,
        commit=False,
        prefix_cache=False,
        growth_timeout_s=90.0,
    )


def test_a_resource_without_settings_gets_the_schedulers_defaults() -> None:
    assert scheduling_of(resource().spec.scheduling, cuda=False) == Scheduling()


@pytest.mark.parametrize(
    "setting, cuda, ahead",
    [
        ("Auto", True, True),
        ("Auto", False, False),
        ("Enabled", False, True),
        ("Disabled", True, False),
    ],
)
def test_a_gpu_has_the_next_batch_ready_unless_disabled(
    setting: str, cuda: bool, ahead: bool
) -> None:
    spec = resource(scheduling={"decideAhead": setting}).spec
    assert (scheduling_of(spec.scheduling, cuda).ahead_s > 0.0) == ahead


@pytest.mark.parametrize(
    "spp, slo, batch, longest_s",
    [
        (4, {}, {}, 0.1),
        (8, {}, {}, 0.25 / 6.5),
        (16, {}, {}, 0.25 / 14.5),
        (8, {"ttft": {"floor": "5s"}}, {}, 0.1),
        (8, {"ttft": {"floor": "100ms"}}, {}, 0.01),  # the shortest batches still meet it
        (8, {"ttft": {"floor": "60ms"}}, {}, 0.1),  # nor they
        (8, {}, {"mode": "Tokens"}, 0.1),
    ],
)
def test_a_deep_pipeline_has_batches_short_enough_for_the_least_floor(
    spp: int, slo: dict[str, Any], batch: dict[str, str], longest_s: float
) -> None:
    deep = resource(
        parallelism={"spp": spp}, slo={"default": slo}, scheduling={"batchBudget": batch}
    )
    scheduling = plan_fleet([deep], place()).replicas[0].config.scheduling
    assert scheduling.max_batch_s == pytest.approx(longest_s)


def test_every_policy_of_the_scheduler_has_a_name_in_the_resource() -> None:
    assert sorted(POLICIES.values()) == sorted(KNOWN)


def test_written_configs_are_what_the_processes_read(tmp_path: Path) -> None:
    run_dir = RunDir.make(tmp_path / "run")
    router, controller = run_dir.write_keys()
    plan = plan_fleet([resource()], place(router_curve=router, controller_curve=controller))
    run_dir.write_configs(plan)
    assert read(RouterConfig, run_dir.router_config) == plan.router
    assert read(WorkerConfig, run_dir.worker_config("tiny-0")) == plan.replicas[0].config


def test_a_run_directory_is_for_its_owner_alone_and_leaves_nothing(tmp_path: Path) -> None:
    run_dir = RunDir.make(None, tmp_path)
    run_dir.write_keys()
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in run_dir.path.glob("*.secret")}
    assert modes == {0o600}
    run_dir.clean()
    assert list(tmp_path.iterdir()) == []


def test_a_chosen_run_directory_keeps_its_logs_and_loses_keys_and_sockets(tmp_path: Path) -> None:
    run_dir = RunDir.make(tmp_path / "mine")
    run_dir.write_keys()
    run_dir.write_keys()  # a second start in the same place
    run_dir.log("router").write_text("said\n")
    (run_dir.path / "tiny-0.sock").touch()
    run_dir.clean()
    left = {path.name for path in run_dir.path.iterdir()}
    assert left == {"router.log", "router.public", "controller.public"}


def test_the_next_start_removes_the_files_of_a_killed_one(tmp_path: Path) -> None:
    dead = tmp_path / f"{PREFIX}999999999-abc"
    dead.mkdir()
    living = RunDir.make(None, tmp_path)
    assert not dead.exists()
    assert remove_stale(tmp_path) == [] and living.path.exists()


def test_a_run_directory_is_used_once_at_a_time_and_lives_in_any_container(tmp_path: Path) -> None:
    living = RunDir.make(None, tmp_path)
    with pytest.raises(SetupError, match="in use by another"):
        RunDir.make(living.path)
    elsewhere = RunDir.make(tmp_path / f"{PREFIX}999999999-abc")  # a number of no process here
    assert remove_stale(tmp_path) == [] and elsewhere.path.exists()
    elsewhere.clean()
    assert remove_stale(tmp_path) == [elsewhere.path]


def test_a_chosen_run_directory_forgets_what_an_earlier_run_measured(tmp_path: Path) -> None:
    first = RunDir.make(tmp_path / "mine")
    (first.path / "tiny-0.profile.json").touch()
    first.clean()
    second = RunDir.make(tmp_path / "mine")
    assert not list(second.path.glob("*.profile.json"))
    second.clean()


def test_a_given_profile_is_that_of_every_controller() -> None:
    assert plan_fleet([resource()], place()).replicas[0].config.profile == ""
    plan = plan_fleet([resource()], place(profile="/data/here.json"))
    assert plan.replicas[0].config.profile == "/data/here.json"


def test_launches_name_config_coordinates_and_environment(tmp_path: Path) -> None:
    run_dir = RunDir.make(tmp_path)
    spec = resource(engine={"threadsPerRank": 3}, parallelism={"spp": 2})
    replica = plan_fleet([spec], place()).replicas[0]
    config = run_dir.worker_config(replica.name)
    launch = rank_launch(replica.config, replica.groups[0][1], config, generation=4)
    assert launch.argv[1:4] == ("-m", "medha_worker.low_priority_start", "--config")
    assert launch.argv[4] == str(tmp_path / "tiny-0.json")
    assert launch.argv[5:] == ("--group", "0", "--stage", "1", "--shard", "0")
    assert launch.env == {
        "MEDHA_REPLICA": "tiny-0",
        "MEDHA_KVP_GROUP": "0",
        "MEDHA_SPP_STAGE": "1",
        "MEDHA_TP_SHARD": "0",
        "MEDHA_GENERATION": "4",
        "OMP_NUM_THREADS": "3",
    }
    assert router_launch(run_dir).argv[2] == "medha_router"
    assert controller_launch(replica.name, config).argv[2] == "medha_worker.controller"


def test_a_relative_path_starts_at_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    file = tmp_path / "examples" / "tiny.yaml"
    file.write_text((EXAMPLES / "tiny.yaml").read_text())
    (example,) = read_resources(file)
    source = example.spec.model.source.host_path
    assert source is not None and source.path == str(tmp_path / "build" / "tiny")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("a: [", r"must be YAML \(line 1: "),
        ("\x00", r"must be YAML"),
        ("", "the file is empty: must hold a MedhaReplica"),
        ("kind: Pod", "apiVersion is missing: must be medha.dev/v1beta1 or"),
        ("!!python/object/apply:os.getcwd []", r"must be YAML \(line 1: could not determine"),
    ],
)
def test_a_file_that_is_no_resource_is_refused_in_one_line(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=sentence) as caught:
        read_resources(file)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(SpecError, match=r"-f is /nowhere\.yaml: must be a file"):
        read_resources(Path("/nowhere.yaml"))


def test_the_example_is_a_valid_resource() -> None:
    document = yaml.safe_load((EXAMPLES / "tiny.yaml").read_text())
    spec = parse(document).spec
    assert spec.device.kind == "Cpu" and spec.parallelism.kvp.max > 1


def test_a_whole_checkpoint_passes(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    assert check_resource(at(folder, parallelism={"tp": 2, "spp": 4}), gpus=0) == folder


def test_random_weights_need_no_weight_files(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    assert check_resource(at(folder), gpus=0, weights=False) == folder
    drawing = msgspec.structs.replace(place(), dummy_weights=True)
    assert plan_fleet([resource()], drawing).replicas[0].config.dummy_weights
    assert not plan_fleet([resource()], place()).replicas[0].config.dummy_weights


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ({"parallelism": {"tp": 3}}, r"spec\.parallelism\.tp is 3: must divide .* use one of 1, 2"),
        ({"parallelism": {"spp": 5}}, r"spec\.parallelism\.spp is 5: must be at most .* 4 layers"),
        (
            {"model": {"maxContextTokens": 5000}},
            "maxContextTokens is 5000: must be at most the model's .* 4096 by .*; use 4096 or less",
        ),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(
    tmp_path: Path, spec: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SpecError, match=sentence):
        check_resource(at(checkpoint(tmp_path / "m"), **spec), gpus=0)


def test_a_missing_folder_is_named_by_its_field(tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match=r"spec\.model\.source\.hostPath\.path is .*must be a folder"
    ):
        check_resource(at(tmp_path / "none"), gpus=0)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_an_incomplete_checkpoint_names_what_is_missing(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace("model", r"\*")):
        check_resource(at(folder), gpus=0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"num_hidden_layers": 0}', "\xff"])
def test_a_broken_config_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    folder = checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json(: | is not JSON| holds)") as caught:
        check_resource(at(folder), gpus=0)
    assert "\n" not in str(caught.value)


def test_a_source_that_this_machine_cannot_mount_is_refused() -> None:
    replica = resource(model={"source": {"pvc": {"claimName": "models"}}})
    with pytest.raises(SpecError, match="must be hostPath on this machine"):
        check_resource(replica, gpus=0)


def test_a_taken_port_is_refused_with_the_flag_that_changes_it() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        with pytest.raises(SetupError, match=rf"port {port} of 127\.0\.0\.1 is in use: .*--port"):
            preflight.check_port("127.0.0.1", port, "--port")


def test_free_ports_are_different_and_free() -> None:
    ports = preflight.free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    for port in ports:
        preflight.check_port("127.0.0.1", port, "--port")


def test_a_chosen_port_is_kept_for_its_server_and_from_everybody_else() -> None:
    """Other programs choose ports while this one's servers start."""
    ports = [*preflight.free_ports("127.0.0.1", 20), preflight.free_port_run("127.0.0.1", 1)]
    (given,) = preflight.free_ports("127.0.0.1", 1)
    preflight.check_port("127.0.0.1", given, "--port")
    for port in (*ports, given):
        with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()
        for _ in range(2):  # a server, and the one that takes its place
            with closing(socket.create_server(("127.0.0.1", port), reuse_port=True)):
                pass


def test_descriptors_of_kept_ports_are_few() -> None:
    preflight.free_ports("127.0.0.1", preflight.MOST_RESERVED + 1)
    assert len(preflight._reserved) == preflight.MOST_RESERVED


def test_no_free_port_is_among_those_that_linux_gives_to_outgoing_connections() -> None:
    assert max(preflight.free_ports("127.0.0.1", 20)) < 32_768


def test_cuda_without_a_gpu_is_refused_with_what_to_use() -> None:
    with pytest.raises(SpecError, match=r"spec\.device\.kind is Cuda: must be Cpu on a machine"):
        preflight.check_gpus(resource(device={"kind": "Cuda"}), gpus=0)
    preflight.check_gpus(resource(device={"kind": "Cuda"}), gpus=1)


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia0x"):
        (tmp_path / name).touch()
    assert preflight.gpu_count(tmp_path) == 2
