"""Conditions of a status: a sentence that says what is missing and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from medha_operator.planning.resource_status import refused_status
from medha_operator.testing import SETTINGS, Cluster, node, resource

ON_NODES = {"name": "m", "source": {"hostPath": {"path": "/srv/none"}}, "maxContextTokens": 64}
FETCHED = {"name": "m", "source": {"uri": "https://x/y"}, "maxContextTokens": 64}
LEGAL = {"name": "legal", "source": {"pvc": {"claimName": "loras"}}}
POEMS = {"name": "poems", "source": {"image": {"reference": "loras/poems:1"}}}
GATING = ("ModelAvailable", "Placed", "GroupsReady", "KvpReady")


def conditions(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in cluster.status["conditions"]}


def ready(cluster: Cluster) -> str:
    entry = conditions(cluster)["Ready"]
    return f"{entry['status']} {entry['reason']}: {entry['message']}"


def stuck(why: str, message: str, **spec: Any) -> Cluster:
    """A resource whose only pod waits for `why`."""
    cluster = Cluster(resource(**spec), [node("a")])
    cluster.reconcile()
    cluster.turn()
    cluster.change("tiny-0-g0-s0", why=why, message=message)
    cluster.reconcile()
    return cluster


def refused(why: str) -> Cluster:
    """A resource whose replica is loaded and refused by all routers."""
    cluster = Cluster(resource(), [node("a")])
    cluster.refused = why
    for _ in range(6):
        cluster.reconcile()
        cluster.turn()
    cluster.reconcile()
    return cluster


def failing(message: str, **spec: Any) -> Cluster:
    """A resource whose only pod ended with a message."""
    cluster = Cluster(resource(**spec), [node("a")])
    for _ in range(4):
        cluster.reconcile()
        cluster.turn()
    cluster.change("tiny-0-g0-s0", phase="Failed", ready=False, why="Error", message=message)
    cluster.reconcile()
    cluster.reconcile()
    return cluster


def test_all_conditions_of_a_serving_resource_are_good() -> None:
    cluster = Cluster(resource(replicas=2), [node("a")])
    cluster.settle()
    current = conditions(cluster)
    assert {
        name: current[name]["status"] for name in ("Ready", *GATING, "Updated")
    } == dict.fromkeys(("Ready", *GATING, "Updated"), "True")
    assert {
        current[name]["status"]
        for name in ("KvpGrowing", "Draining", "RestartBudgetExhausted", "PlacementUnsatisfiable")
    } == {"False"}
    assert {condition["observedGeneration"] for condition in current.values()} == {1}
    status = cluster.status
    assert (status["replicas"], status["readyReplicas"], status["kvpGroups"]) == (2, 2, 2)
    assert status["selector"] == "medha.dev/replica=tiny,medha.dev/role=leader"


@pytest.mark.parametrize(
    "cluster, sentence",
    [
        (
            stuck("ImagePullBackOff", "Back-off pulling image own:9", template={"image": "own:9"}),
            "False ImagePull: own:9 cannot be pulled for pod tiny-0-g0-s0 "
            "(ImagePullBackOff: Back-off "
            "pulling image own:9); correct spec.template.image, or make the image available to the "
            "nodes",
        ),
        (
            stuck("Unschedulable", 'persistentvolumeclaim "models" not current'),
            "False ModelMissing: volume claim models of spec.model.source cannot be used by pod "
            'tiny-0-g0-s0 (persistentvolumeclaim "models" not current); create it in this '
            "namespace or correct claimName",
        ),
        (
            stuck("CreateContainerConfigError", 'secret "x" not current'),
            'False CreateContainerConfigError: pod tiny-0-g0-s0 cannot be started: secret "x" not '
            "current",
        ),
        (
            failing("/models/config.json cannot be read (No such file or directory)"),
            "False ModelMissing: the model does not load: pod tiny-0-g0-s0 ended (Error: "
            "/models/config.json cannot be read (No such file or directory)); /models is "
            "volume claim "
            "models there: put the whole checkpoint into its volume, or correct "
            "spec.model.source.pvc",
        ),
        (
            stuck(
                "FailedMount",
                'MountVolume.SetUp failed for volume "model" : hostPath type check '
                "failed: /srv/none is not a directory",
                model=ON_NODES,
            ),
            "False ModelMissing: the directory /srv/none cannot be mounted into pod "
            "tiny-0-g0-s0 on "
            'node a (MountVolume.SetUp failed for volume "model" : hostPath type check failed: '
            "/srv/none is not a directory); put the whole checkpoint there on every node, "
            "or correct "
            "spec.model.source.hostPath.path",
        ),
        (
            failing("/models holds no config.json", model=ON_NODES),
            "False ModelMissing: the model does not load: pod tiny-0-g0-s0 ended (Error: /models "
            "holds no config.json); /models is the directory /srv/none there: put the whole "
            "checkpoint there on every node, or correct spec.model.source.hostPath.path",
        ),
        (
            failing("fetch-model: https://x/y/config.json answers 404", model=FETCHED),
            "False ModelMissing: https://x/y cannot be fetched: pod tiny-0-g0-s0 ended (Error: "
            "fetch-model: https://x/y/config.json answers 404); correct "
            "spec.model.source.uri, or let "
            "workers reach it (the chart's networkPolicy.modelEgress)",
        ),
        (
            failing("fetch-adapter-0: https://x/y/adapter_config.json answers 404"),
            "False ModelMissing: an adapter does not load: pod tiny-0-g0-s0 ended (Error: "
            "fetch-adapter-0: https://x/y/adapter_config.json answers 404); correct its source in "
            "spec.adapters",
        ),
        (
            failing("/adapters/legal/adapter_config.json: use_dora is 'True'"),
            "False ModelMissing: an adapter does not load: pod tiny-0-g0-s0 ended (Error: "
            "/adapters/legal/adapter_config.json: use_dora is 'True'); correct its source in "
            "spec.adapters",
        ),
        (
            stuck("Unschedulable", 'persistentvolumeclaim "loras" not found', adapters=[LEGAL]),
            "False ModelMissing: volume claim loras of spec.adapters[0].source cannot be used by "
            'pod tiny-0-g0-s0 (persistentvolumeclaim "loras" not found); create it in this '
            "namespace or correct claimName",
        ),
        (
            stuck("ImagePullBackOff", "pulling loras/poems:1: none", adapters=[LEGAL, POEMS]),
            "False ModelMissing: adapter image loras/poems:1 cannot be pulled for pod "
            "tiny-0-g0-s0 (ImagePullBackOff: pulling loras/poems:1: none); correct "
            "spec.adapters[1].source.image.reference or its pull secret",
        ),
        (
            stuck(
                "FailedMount",
                'MountVolume.SetUp failed for volume "adapter-0" : timed out',
                adapters=[LEGAL],
            ),
            "False ModelMissing: volume claim loras cannot be mounted into pod tiny-0-g0-s0 on "
            'node a (MountVolume.SetUp failed for volume "adapter-0" : timed out); put the '
            "adapter's files into its volume, or correct spec.adapters[0].source.pvc",
        ),
        (
            stuck("ErrImagePull", "fetch-model: no such image own:9", model=FETCHED),
            "False ImagePull: the worker's image cannot be pulled for pod tiny-0-g0-s0 "
            "(ErrImagePull: "
            "fetch-model: no such image own:9); correct spec.template.image, or make the image "
            "available to the nodes",
        ),
        (
            stuck(
                "FailedMount", 'MountVolume.SetUp failed for volume "x" : secret "x" not current'
            ),
            "False FailedMount: a volume of pod tiny-0-g0-s0 cannot be mounted on node a "
            '(MountVolume.SetUp failed for volume "x" : secret "x" not current); make what it '
            "names, or correct spec.template.volumes",
        ),
        (
            refused("the tokenizer of m does not load: chat_template.jinja is no Jinja template"),
            "False RouterRefuses: no router accepts tiny-0: the tokenizer of m does not load: "
            "chat_template.jinja is no Jinja template",
        ),
        (
            failing("Segmentation fault"),
            "False GroupFailed: KVP group 0 of tiny-0 restarts: pod tiny-0-g0-s0 "
            "ended (Error: "
            "Segmentation fault)",
        ),
    ],
)
def test_conditions_name_the_obstacle_and_the_remedy(cluster: Cluster, sentence: str) -> None:
    assert ready(cluster) == sentence


def test_a_model_image_that_cannot_be_pulled_is_reported_as_a_missing_model() -> None:
    source = {"image": {"reference": "models/llama:1"}}
    model = {"name": "m", "source": source, "maxContextTokens": 64}
    cluster = stuck("ImagePullBackOff", "pulling models/llama:1: not current", model=model)
    assert "model image models/llama:1 cannot be pulled" in ready(cluster)


def test_a_resource_without_a_place_names_what_is_missing() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 3}), [node("a"), node("b")])
    cluster.reconcile()
    assert ready(cluster) == (
        "False TooFewFree: 3 pods with 8 nvidia.com/gpu each are needed and the best has room for "
        "2; add nodes, free some or lower spec.parallelism"
    )
    assert conditions(cluster)["PlacementUnsatisfiable"]["status"] == "True"


@pytest.mark.parametrize(
    "spec, sentence",
    [
        (
            {"parallelism": {"tp": 16}},
            "False NoNodeIsLargeEnough: a pod needs 16 nvidia.com/gpu on one node and the "
            "largest has "
            "8 nvidia.com/gpu; lower spec.parallelism.tp or add a larger node",
        ),
        (
            {"placement": {"nodeSelector": {"pool": "h100"}}},
            "False NoNodeHasLabel: no node has the label pool=h100 of spec.placement.nodeSelector; "
            "label nodes so or correct the selector",
        ),
        (
            {"placement": {"packLevel": "topology.kubernetes.io/rack"}},
            "False NoNodeHasLabel: no node has the label topology.kubernetes.io/rack of "
            "spec.placement.packLevel; label the nodes or leave packLevel out",
        ),
    ],
)
def test_ready_names_what_no_node_has(spec: dict[str, Any], sentence: str) -> None:
    cluster = Cluster(resource(**spec), [node("a")])
    cluster.reconcile()
    assert ready(cluster) == sentence
    assert cluster.condition("Placed")["status"] == "False"


def test_growth_without_room_is_reported_and_disturbs_no_serving_replica() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "kvp": {"max": 2}}), [node("a")])
    cluster.settle()
    cluster.wanted[0] = 2
    cluster.settle()
    current = conditions(cluster)
    assert ready(cluster).startswith("True")
    assert current["KvpGrowing"]["status"] == "False"
    assert "a further KVP group is wanted" in current["KvpGrowing"]["message"]
    assert current["PlacementUnsatisfiable"]["status"] == "True"


def test_an_old_failure_does_not_explain_a_new_trouble() -> None:
    cluster = failing("/models/config.json is broken")
    cluster.settle()
    assert ready(cluster).startswith("True")
    cluster.now_s += 3600
    cluster.power("a", False)
    cluster.turn()
    cluster.reconcile()
    assert "config.json" not in ready(cluster)
    assert ready(cluster) == (
        "False NodeLost: node a does not answer and there is no other place for its pods; bring it "
        "back or add nodes"
    )


def test_a_failed_extra_group_is_reported_in_kvp_growing() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.change("tiny-0-g1-s0", phase="Failed", ready=False, why="OOMKilled")
    for _ in range(3):
        cluster.reconcile()
        cluster.turn()
    assert ready(cluster).startswith("True")
    assert conditions(cluster)["KvpGrowing"]["message"] == (
        "tiny-0 gets more KVP groups, but group 1 failed: pod tiny-0-g1-s0 ended (OOMKilled)"
    )


def test_a_draining_replica_is_named_with_the_reason() -> None:
    cluster = Cluster(resource(replicas=2), [node("a")])
    cluster.settle()
    cluster.load = {0: 9, 1: 9}
    cluster.resource = resource(generation=2, replicas=1)
    cluster.reconcile()
    current = conditions(cluster)
    assert current["Draining"]["message"] == "draining, then deleted: tiny-1 (ScaledDown)"
    assert cluster.status["retiring"][0]["replica"] == 1
    assert (cluster.status["replicas"], cluster.status["readyReplicas"]) == (2, 1)


def test_transition_times_change_only_with_the_status() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    before = conditions(cluster)
    cluster.now_s += 500
    cluster.resource = resource(generation=2, drainTimeout="2h")
    cluster.reconcile()
    after = conditions(cluster)
    assert {condition["observedGeneration"] for condition in after.values()} == {2}
    assert [condition["lastTransitionTime"] for condition in after.values()] == [
        condition["lastTransitionTime"] for condition in before.values()
    ]
    cluster.power("a", False)
    cluster.turn()
    cluster.reconcile()
    moved = {
        name
        for name, condition in conditions(cluster).items()
        if condition["lastTransitionTime"] != before[name]["lastTransitionTime"]
    }
    assert moved == {"Ready", "GroupsReady", "KvpReady", "Reconciling"}


def test_a_cold_start_takes_few_status_writes_however_many_pods_there_are() -> None:
    cluster = Cluster(resource(parallelism={"spp": 8}), [node("a")])
    written = []
    for _ in range(30):
        before = cluster.status
        cluster.reconcile()
        if cluster.status != before:
            written.append(cluster.status)
        cluster.turn(0.3)
    assert ready(cluster).startswith("True")
    assert len(written) <= 5


def test_a_refused_spec_keeps_the_rest_of_the_status_and_says_why() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    sentence = "spec.parallelism.tp is 0: must be a whole number from 1 to 64; use 1"
    refused = refused_status(cluster.observed(), sentence, generation=7)
    current = {condition["type"]: condition for condition in refused["conditions"]}
    assert (current["Ready"]["status"], current["Ready"]["reason"]) == ("False", "SpecRefused")
    assert current["Ready"]["message"] == sentence
    assert current["Placed"] == conditions(cluster)["Placed"]
    assert (refused["observedGeneration"], refused["readyReplicas"]) == (7, 1)
    cluster.status = refused
    again = refused_status(cluster.observed(), sentence, generation=7)
    assert again == refused
    cluster.reconcile()
    assert ready(cluster).startswith("True")


def test_a_former_scaling_status_is_kept() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.status = {"slo": {"attainmentPercent": 99}}
    cluster.settle()
    assert cluster.status["slo"] == {"attainmentPercent": 99}
    assert SETTINGS.router == "tcp://medha-router-fleet.medha:7800"
