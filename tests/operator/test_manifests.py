"""Manifests of pods and of the objects around them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from medha.config import CONTROLLER_OPS_PORT, AdapterFolder, Network, WorkerConfig
from medha.errors import SpecError
from medha.spec import MedhaReplica
from medha.topology import Coordinate
from medha_operator.controllers.model_publisher import router_models
from medha_operator.resources.manifests import (
    Place,
    PodAssignment,
    check,
    config_name,
    content_hash,
    objects,
    pod_manifest,
    pod_requests,
    spec_hash,
    worker_json,
)
from medha_operator.settings import Flows, Settings, from_environment
from medha_operator.testing import SETTINGS, Cluster, node, resource

RACK, HOST = "topology.kubernetes.io/rack", "kubernetes.io/hostname"
PLANNED = Place(node="node-7", domain={RACK: "r1"}, preferred={"clique": "c", HOST: "node-7"})
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def rendered(
    of: MedhaReplica,
    group: int = 0,
    stage: int = 0,
    gated: bool = False,
    place: Place = PLANNED,
    **settings: Any,
) -> dict[str, Any]:
    start = PodAssignment(
        ordinal=0,
        at=Coordinate(group, stage, 0),
        place=place,
        spec_hash="abc",
        attempt=3,
        gated=gated,
    )
    return pod_manifest(of, start, msgspec.structs.replace(SETTINGS, **settings))


def container(of: MedhaReplica, **changes: Any) -> dict[str, Any]:
    (worker,) = rendered(of, **changes)["spec"]["containers"]
    assert isinstance(worker, dict)
    return worker


def environment(of: MedhaReplica, **changes: Any) -> dict[str, str]:
    return {
        variable["name"]: variable.get("value", "") for variable in container(of, **changes)["env"]
    }


def source(**kind: Any) -> MedhaReplica:
    return resource(model={"name": "m", "source": kind, "maxContextTokens": 64})


def volume(of: MedhaReplica, name: str) -> dict[str, Any]:
    (entry,) = [entry for entry in rendered(of)["spec"]["volumes"] if entry["name"] == name]
    return {key: value for key, value in entry.items() if key != "name"}


# --- pods -------------------------------------------------------------------------------------


def test_labels_of_a_pod_name_its_part_of_the_replica() -> None:
    manifest = rendered(resource(), group=1, stage=2)
    assert manifest["metadata"]["name"] == "tiny-0-g1-s2"
    labels = manifest["metadata"]["labels"]
    assert {
        name: labels[f"medha.dev/{name}"]
        for name in ("replica", "ordinal", "kvp-group", "spp-stage", "role", "attempt", "spec-hash")
    } == {
        "replica": "tiny",
        "ordinal": "0",
        "kvp-group": "1",
        "spp-stage": "2",
        "role": "worker",
        "attempt": "3",
        "spec-hash": "abc",
    }
    assert rendered(resource())["metadata"]["labels"]["medha.dev/role"] == "leader"
    (owner,) = manifest["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["controller"]) == ("MedhaReplica", "uid-tiny", True)


def test_the_environment_gives_processes_their_place() -> None:
    assert environment(resource(parallelism={"tp": 4, "spp": 3}), group=1, stage=2) == {
        "MEDHA_REPLICA": "tiny-0",
        "MEDHA_KVP_GROUP": "1",
        "MEDHA_SPP_STAGE": "2",
        "MEDHA_TP": "4",
        "MEDHA_GENERATION": "3",
        "MEDHA_LEADER_ADDRESS": "tiny-0-g0-s0.tiny-workers.team.svc",
        "MEDHA_POD_IP": "",
    }


def test_a_pod_waits_at_the_gate_only_in_a_gang() -> None:
    manifest = rendered(resource(), gated=True)
    assert manifest["spec"]["schedulingGates"] == [{"name": "medha.dev/gang"}]
    assert "schedulingGates" not in rendered(resource())["spec"]


def test_a_planned_pod_requires_its_domain_and_prefers_its_node() -> None:
    manifest = rendered(resource(placement={"nodeSelector": {"pool": "h100"}}))
    spec = manifest["spec"]
    assert spec["nodeSelector"] == {"pool": "h100"}
    assert list(spec["affinity"]) == ["nodeAffinity"]
    affinity = spec["affinity"]["nodeAffinity"]
    (term,) = affinity[REQUIRED]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": RACK, "operator": "In", "values": ["r1"]}]}
    assert [
        (preferred["weight"], preferred["preference"]["matchExpressions"][0]["key"])
        for preferred in affinity[PREFERRED]
    ] == [(100, HOST), (25, "clique")]
    assert manifest["metadata"]["annotations"]["medha.dev/node"] == "node-7"


def test_an_open_pod_stays_with_its_replica_on_nodes_that_need_not_exist_yet() -> None:
    manifest = rendered(resource(placement={"packLevel": RACK}), place=Place(shared=(RACK,)))
    affinity, labels = manifest["spec"]["affinity"], manifest["metadata"]["labels"]
    assert list(affinity) == ["podAffinity"]
    (shared,) = affinity["podAffinity"][REQUIRED]
    assert shared["topologyKey"] == RACK
    assert shared["labelSelector"]["matchLabels"].items() <= labels.items()  # the first begins one
    assert [
        (near["weight"], near["podAffinityTerm"]["topologyKey"])
        for near in affinity["podAffinity"][PREFERRED]
    ] == [(100, HOST), (25, "nvidia.com/gpu.clique")]
    assert "annotations" not in manifest["metadata"]


def test_a_queue_admits_the_base_as_one_group_and_each_further_group_by_itself() -> None:
    of = resource(parallelism={"spp": 2, "kvp": {"min": 2, "max": 3}})
    labels = {"kueue.x-k8s.io/queue-name": "models", "kueue.x-k8s.io/priority-class": "high"}
    queued = msgspec.structs.replace(of, labels={**labels, "team": "x"})
    pods = [rendered(queued, group=group)["metadata"] for group in range(3)]
    for pod in pods:
        assert labels.items() <= pod["labels"].items() and "team" not in pod["labels"]
    names = [pod["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in pods]
    counts = [pod["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in pods]
    assert names == ["tiny-0-abc", "tiny-0-abc", "tiny-0-g2-abc"] and counts == ["4", "4", "2"]
    assert spec_hash(queued) != spec_hash(of)
    in_template = resource(template={"labels": {"kueue.x-k8s.io/queue-name": "models"}})
    assert "kueue.x-k8s.io/pod-group-name" in rendered(in_template)["metadata"]["labels"]
    assert "kueue" not in str(rendered(of))


def test_claims_of_devices_take_the_place_of_counted_devices() -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]
    template = {"resources": {"claims": [{"name": "gpus"}]}, "resourceClaims": claims}
    of = resource(template=template, parallelism={"tp": 8})
    spec = rendered(of)["spec"]
    assert spec["resourceClaims"] == claims
    resources = spec["containers"][0]["resources"]
    assert resources["claims"] == [{"name": "gpus"}]
    assert "nvidia.com/gpu" not in {**resources["requests"], **resources["limits"]}
    assert set(pod_requests(of)) == {"pods", "cpu", "memory"}
    both = resource(template=template, device={"resource": "example.com/nic"})
    assert pod_requests(both)["example.com/nic"] == 1


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"claims": [{"name": "other"}]}, "spec.template.resources.claims[0].name"),
        ({"claims": "gpus"}, "spec.template.resources.claims"),
        ({"claims": ["gpus"]}, "spec.template.resources.claims"),
    ],
)
def test_a_claim_that_the_pod_does_not_have_is_refused(resources: Any, field: str) -> None:
    claims = [{"name": "gpus", "resourceClaimTemplateName": "eight-gpus"}]
    with pytest.raises(SpecError) as error:
        check(resource(template={"resources": resources, "resourceClaims": claims}))
    assert str(error.value).startswith(field)


@pytest.mark.parametrize(("place", "skew"), [(PLANNED, 100), (Place(), 1)])
def test_siblings_keep_apart_and_only_break_ties_of_a_plan(place: Place, skew: int) -> None:
    (spread,) = rendered(resource(), place=place)["spec"]["topologySpreadConstraints"]
    assert (spread["maxSkew"], spread["whenUnsatisfiable"]) == (skew, "ScheduleAnyway")
    assert spread["labelSelector"] == {
        "matchLabels": {"medha.dev/replica": "tiny"},
        "matchExpressions": [{"key": "medha.dev/ordinal", "operator": "NotIn", "values": ["0"]}],
    }


@pytest.mark.parametrize(
    "of", [resource(), source(uri="https://models/m"), source(image={"reference": "m:1"})]
)
def test_every_container_keeps_to_the_restricted_standard(of: MedhaReplica) -> None:
    spec = rendered(of)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim", "image"}


def test_a_pod_requests_a_device_per_rank() -> None:
    resources = container(resource(parallelism={"tp": 8}))["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 8
    other = resource(device={"kind": "Cuda", "resource": "example.com/gpu"})
    assert container(other)["resources"]["limits"] == {"example.com/gpu": 1}
    assert container(resource(device={"kind": "Cpu"}))["resources"]["limits"] == {}


def test_resources_of_the_template_override_and_count_in_placement() -> None:
    template = {
        "resources": {"requests": {"cpu": "1500m", "rdma/hca": 1}, "limits": {"memory": "2Gi"}}
    }
    of = resource(parallelism={"tp": 2}, template=template)
    assert pod_requests(of) == {
        "pods": 1,
        "cpu": 1500,
        "memory": 512 << 20,
        "nvidia.com/gpu": 2,
        "rdma/hca": 1,
    }


def test_a_pod_gets_rdma_devices_networks_and_locked_memory_that_the_spec_names() -> None:
    network = {
        "transport": "Rdma",
        "devices": ["mlx5_0"],
        "resources": {"rdma/hca_shared_devices_a": 2},
        "attachments": ["fabric/rail-0", "fabric/rail-1"],
        "ipcLock": "Enabled",
    }
    of = resource(network=network)
    check(of)
    manifest = rendered(of)
    (worker,) = manifest["spec"]["containers"]
    for amounts in (worker["resources"]["requests"], worker["resources"]["limits"]):
        assert amounts["rdma/hca_shared_devices_a"] == 2
    assert pod_requests(of)["rdma/hca_shared_devices_a"] == 2
    annotations = manifest["metadata"]["annotations"]
    assert annotations["k8s.v1.cni.cncf.io/networks"] == "fabric/rail-0,fabric/rail-1"
    # For any user but root, Kubernetes makes no capability effective.
    assert worker["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        "runAsNonRoot": False,
        "runAsUser": 0,
    }
    config = msgspec.json.decode(worker_json(of, 0, SETTINGS), type=WorkerConfig)
    assert config.network == Network(transport="rdma", devices=("mlx5_0",))
    fetched = {"name": "m", "source": {"uri": "https://models/m"}, "maxContextTokens": 64}
    init = rendered(resource(model=fetched, network=network))["spec"]["initContainers"]
    assert init[0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_spec_without_a_network_makes_the_pods_that_it_made_before() -> None:
    assert spec_hash(resource()) == spec_hash(resource(network={"transport": "Auto"}))
    assert spec_hash(resource()) != spec_hash(resource(network={"transport": "Tcp"}))


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        (
            {
                "network": {"attachments": ["a"]},
                "template": {"annotations": {"k8s.v1.cni.cncf.io/networks": "b"}},
            },
            "spec.network.attachments",
        ),
        ({"network": {"resources": {"nvidia.com/gpu": 1}}}, "spec.network.resources"),
    ],
)
def test_a_network_that_contradicts_another_field_is_refused(
    spec: dict[str, Any], path: str
) -> None:
    with pytest.raises(SpecError, match=path.replace(".", r"\.")):
        check(resource(**spec))


def test_the_template_adds_and_overrides() -> None:
    template = {
        "image": "own:2",
        "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
        "volumes": [{"name": "scratch", "emptyDir": {}}],
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
        "schedulerName": "other",
        "priorityClassName": "high",
        "labels": {"team": "x"},
        "annotations": {"note": "y"},
    }
    manifest = rendered(resource(template=template))
    (worker,) = manifest["spec"]["containers"]
    assert worker["image"] == "own:2"
    assert worker["env"][-1] == {"name": "NCCL_DEBUG", "value": "INFO"}
    assert worker["volumeMounts"][-1]["mountPath"] == "/scratch"
    assert manifest["spec"]["volumes"][-1]["name"] == "scratch"
    assert (manifest["spec"]["schedulerName"], manifest["spec"]["priorityClassName"]) == (
        "other",
        "high",
    )
    assert manifest["metadata"]["labels"]["team"] == "x"
    assert manifest["metadata"]["annotations"]["note"] == "y"


def test_scrape_annotations_are_optional_and_restart_nothing() -> None:
    for group, port in ((0, "8091"), (1, "8090")):  # the controller's; the pod's own
        annotations = rendered(resource(), group=group, scrape=True)["metadata"]["annotations"]
        assert (
            annotations["prometheus.io/scrape"] == "true"
            and annotations["prometheus.io/port"] == port
        )
        plain = rendered(resource(), group=group)["metadata"]["annotations"]
        assert not any(name.startswith("prometheus.io/") for name in plain)


def test_the_model_comes_from_a_volume_of_its_kind() -> None:
    claim = source(pvc={"claimName": "models", "path": "llama"})
    assert volume(claim, "model") == {
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True}
    }
    assert volume(source(hostPath={"path": "/srv/m"}), "model") == {
        "hostPath": {"path": "/srv/m", "type": "Directory"}
    }
    image = source(image={"reference": "models/llama:1", "path": "weights"})
    assert volume(image, "model")["image"]["reference"] == "models/llama:1"
    fetched = source(uri="https://models.example/llama")
    assert volume(fetched, "model") == {"emptyDir": {}}
    (init,) = rendered(fetched)["spec"]["initContainers"]
    assert init["command"][-3:] == ["fetch", "https://models.example/llama", "/models"]


def test_adapters_come_from_volumes_of_their_own() -> None:
    of = resource(
        adapters=[
            {"name": "legal", "source": {"pvc": {"claimName": "models", "path": "a/legal"}}},
            {"name": "Poems.2", "source": {"uri": "https://models.example/poems"}},
        ]
    )
    assert volume(of, "adapter-0") == {
        "persistentVolumeClaim": {"claimName": "models", "readOnly": True}
    }
    assert volume(of, "adapter-1") == {"emptyDir": {}}
    mounts = {mount["name"]: mount for mount in container(of)["volumeMounts"]}
    assert mounts["adapter-0"]["mountPath"] == "/adapters/legal"
    assert mounts["adapter-1"]["mountPath"] == "/adapters/Poems.2"
    (init,) = rendered(of)["spec"]["initContainers"]
    assert init["name"] == "fetch-adapter-1"
    assert init["command"][-4:] == [
        "fetch",
        "--adapter",
        "https://models.example/poems",
        "/adapters/Poems.2",
    ]
    config = msgspec.json.decode(worker_json(of, 0, SETTINGS), type=WorkerConfig)
    assert config.adapters == (
        AdapterFolder(name="legal", folder="/adapters/legal/a/legal"),
        AdapterFolder(name="Poems.2", folder="/adapters/Poems.2"),
    )
    assert spec_hash(of) != spec_hash(resource())
    assert router_models([of])[0].adapters == ("legal", "Poems.2")


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"adapters": [{"name": "a", "source": {"hostPath": {"path": "a"}}}]},
            "spec.adapters[0].source.hostPath.path",
        ),
        (
            {"adapters": [{"name": "a", "source": {"image": {"reference": "a", "path": "../b"}}}]},
            "spec.adapters[0].source.image.path",
        ),
        (
            {
                "adapters": [{"name": "a", "source": {"uri": "https://a/b"}}],
                "template": {"volumes": [{"name": "adapter-0"}]},
            },
            "spec.template.volumes[0].name",
        ),
    ],
)
def test_adapters_that_cannot_work_in_a_cluster_are_refused(
    spec: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError) as caught:
        check(resource(**spec))
    assert caught.value.field == field


def test_probes_use_the_pods_own_port() -> None:
    worker = container(resource())
    assert worker["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "ops"}
    assert worker["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert {"name": "ops", "containerPort": 8090} in worker["ports"]


# --- hashes -----------------------------------------------------------------------------------


def test_the_spec_hash_follows_the_fields_that_pods_are_made_from_and_nothing_else() -> None:
    plain = spec_hash(resource())
    assert spec_hash(resource(replicas=3, generation=9, drainTimeout="9m")) == plain
    assert spec_hash(resource(autoscaling={"maxReplicas": 4})) == plain
    assert spec_hash(resource(placement={"topologyLevels": ["rack"]})) == plain
    changes: list[dict[str, Any]] = [
        {"parallelism": {"tp": 2}},
        {"template": {"labels": {"a": "b"}}},
        {"template": {"image": "x"}},
        {"template": {"env": [{"name": "A", "value": "b"}]}},
        {"slo": {"default": {"tpot": "31ms"}}},
        {"slo": {"classes": [{"name": "chat"}]}},
        {"placement": {"tolerations": [{"operator": "Exists"}]}},
        {"placement": {"nodeSelector": {"pool": "b"}}},
        {"placement": {"packLevel": "topology.kubernetes.io/rack"}},
        {"parallelism": {"kvp": {"max": 2}}},
        {"engine": {"kvMemory": "2Gi"}},
    ]
    hashes = {spec_hash(resource(**spec)) for spec in changes}
    assert len(hashes) == len(changes)
    assert plain not in hashes


def test_a_field_set_to_its_default_keeps_the_hash() -> None:
    """So does a field that a later version adds: the API server fills in its default."""
    spelled = resource(
        parallelism={"tp": 1, "kvp": {"min": 1}},
        engine={"arithmetic": "Fast"},
        template={"env": []},
    )
    assert spec_hash(spelled) == spec_hash(resource())


def test_hashes_stay_the_same_from_version_to_version() -> None:
    """If this fails, an upgrade restarts every model: see `controllers/adopter.py` for the way to
    change the rule."""
    assert spec_hash(resource()) == "v2-162a55ca35"
    large = resource(
        replicas=4,
        parallelism={"tp": 8, "spp": 4, "kvp": {"min": 1, "max": 4, "tokensPerGroup": 1 << 20}},
        slo={"classes": [{"name": "chat", "weight": 4, "ttft": {"floor": "300ms"}}]},
        placement={"nodeSelector": {"pool": "a"}, "tolerations": [{"operator": "Exists"}]},
        template={"image": "worker:2", "resources": {"limits": {"memory": "1Gi"}}},
    )
    assert spec_hash(large) == "v2-c1b6884c25"


def test_an_objects_hash_follows_its_content() -> None:
    first, second = (
        objects(of, [0], SETTINGS) for of in (resource(), resource(scheduling={"policy": "FCFS"}))
    )
    differing = [
        a["kind"] for a, b in zip(first, second, strict=True) if content_hash(a) != content_hash(b)
    ]
    assert differing == ["ConfigMap"]
    assert first == objects(resource(), [0], SETTINGS)


# --- objects ----------------------------------------------------------------------------------


def test_all_objects_of_a_resource_are_owned_by_it() -> None:
    manifests = objects(resource(), [0, 2], SETTINGS)
    assert [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests] == [
        ("Service", "tiny-workers"),
        ("Service", "tiny-leaders"),
        ("ConfigMap", config_name(resource(), 0, SETTINGS)),
        ("ConfigMap", config_name(resource(), 2, SETTINGS)),
    ]
    for manifest in manifests:
        assert manifest["metadata"]["ownerReferences"][0]["uid"] == "uid-tiny"
        assert manifest["metadata"]["labels"]["medha.dev/replica"] == "tiny"


def test_each_replica_gets_a_policy_if_flows_are_set() -> None:
    flows = Flows(ingress=({"ports": [{"port": 8091}]},), egress=({"ports": [{"port": 53}]},))
    settings = msgspec.structs.replace(SETTINGS, worker_flows=flows)
    first, second = objects(resource(), [0, 2], settings)[-2:]
    assert (first["kind"], first["metadata"]["name"]) == ("NetworkPolicy", "tiny-0")
    own = {"matchLabels": {"medha.dev/replica": "tiny", "medha.dev/ordinal": "2"}}
    assert second["spec"] == {
        "podSelector": own,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [{"podSelector": own}]}, {"ports": [{"port": 8091}]}],
        "egress": [{"to": [{"podSelector": own}]}, {"ports": [{"port": 53}]}],
    }
    assert second["metadata"]["ownerReferences"][0]["uid"] == "uid-tiny"


def test_policies_are_applied_before_their_pods_and_deleted_after_them() -> None:
    flows = Flows(egress=({"ports": [{"port": 53}]},))
    settings = msgspec.structs.replace(SETTINGS, worker_flows=flows)
    cluster = Cluster(resource(replicas=2, parallelism={"tp": 2}), [node("a")], settings)
    actions = [type(action).__name__ for action in cluster.reconcile().actions]
    assert actions.index("CreatePod") > max(
        at for at, name in enumerate(actions) if name == "ApplyObject"
    )
    cluster.settle()
    cluster.update(replicas=1, parallelism={"tp": 2})
    for _ in range(100):
        policies = {name for kind, name in cluster.objects if kind == "NetworkPolicy"}
        assert policies >= {f"tiny-{ordinal}" for ordinal in cluster.ordinals}
        cluster.reconcile()
        cluster.turn()
    assert policies == {"tiny-0"} and cluster.ordinals == {0}
    cluster.settings = SETTINGS  # a person turned policies off
    cluster.settle()
    assert not any(kind == "NetworkPolicy" for kind, _ in cluster.objects)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[", "MEDHA_WORKER_FLOWS"), ('{"ingres": []}', "ingres"), ('{"egress": 1}', "egress")],
)
def test_flows_that_do_not_fit_are_refused_by_name(text: str, message: str) -> None:
    environment = {"MEDHA_NAMESPACE": "a", "MEDHA_WORKER_IMAGE": "w", "MEDHA_WORKER_FLOWS": text}
    with pytest.raises(SpecError, match=message):
        from_environment(environment)


def test_the_file_in_the_config_map_is_what_the_processes_decode() -> None:
    settings = Settings(namespace="medha", worker_image="w")
    (config,) = objects(resource(device={"kind": "Cpu"}), [1], settings)[2:]
    read = msgspec.json.decode(config["data"]["worker.json"], type=WorkerConfig)
    assert (read.replica, read.checkpoint, read.device) == ("tiny-1", "/models", "cpu")
    assert read.routers == ("tcp://medha-router-fleet.medha:7800",)
    assert read.ops_port == CONTROLLER_OPS_PORT
    assert read.listening_curve() is not None


def test_workers_get_dns_names_before_they_are_ready_and_leaders_after() -> None:
    workers, leaders = objects(resource(), [], SETTINGS)[:2]
    assert workers["spec"]["publishNotReadyAddresses"] is True
    assert leaders["spec"]["publishNotReadyAddresses"] is False
    assert leaders["spec"]["selector"]["medha.dev/role"] == "leader"


# --- what cannot work in a cluster ------------------------------------------------------------


@pytest.mark.parametrize(
    "of, sentence",
    [
        (
            source(hostPath={"path": "models/m"}),
            "spec.model.source.hostPath.path is models/m: must be absolute in a cluster",
        ),
        (
            source(pvc={"claimName": "c", "path": "a/../../b"}),
            "spec.model.source.pvc.path is a/../../b: must stay inside the volume; remove the ..",
        ),
        (
            resource(template={"env": [{"name": "A", "value": "a\0b"}]}),
            "spec.template is text with a NUL: must hold none",
        ),
        (
            resource(template={"labels": {"medha.dev/role": "leader"}}),
            "spec.template.labels is medha.dev/role: must not begin with medha.dev/",
        ),
        (
            resource(template={"labels": {"app.kubernetes.io/managed-by": "me"}}),
            "spec.template.labels is app.kubernetes.io/managed-by: must not be a label by which "
            "the operator finds its pods; choose another key",
        ),
        (
            resource(template={"env": [{"name": "MEDHA_TP", "value": "9"}]}),
            "spec.template.env[0].name is MEDHA_TP: must differ from the operator's own",
        ),
        (
            resource(
                template={
                    "env": [
                        {"name": "MEDHA_DECISION_LOG", "value": "/tmp/all"},
                        {"name": "MEDHA_POD_IP", "value": "::1"},
                    ]
                }
            ),
            "spec.template.env[1].name is MEDHA_POD_IP: must differ from the operator's own",
        ),
        (
            resource(template={"env": [{"value": "9"}]}),
            "spec.template.env[0].name is missing: must be text",
        ),
        (
            resource(template={"volumes": [{"name": "model", "emptyDir": {}}]}),
            "spec.template.volumes[0].name is model: must differ from the operator's own",
        ),
        (
            resource(template={"resources": {"requests": {"cpu": "lots"}}}),
            "spec.template.resources.requests.cpu is lots: must be a quantity; use one such as",
        ),
        (
            resource(template={"resources": {"sizes": {}}}),
            "spec.template.resources is sizes: must be requests, limits or claims; remove it",
        ),
        (
            resource(template={"resources": {"limits": 3}}),
            "spec.template.resources.limits is 3: must be a mapping of resources to quantities",
        ),
    ],
)
def test_a_spec_that_cannot_work_in_a_cluster_is_refused_in_a_sentence(
    of: MedhaReplica, sentence: str
) -> None:
    with pytest.raises(SpecError) as caught:
        check(of)
    assert str(caught.value).startswith(sentence)


def test_an_ordinary_resource_is_accepted() -> None:
    check(resource(template={"resources": {"limits": {"memory": "1.5Gi", "cpu": 0.5}}}))
