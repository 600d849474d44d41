"""What a person reads in a status: one sentence that says what is missing and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from medha_operator.status import refused_status
from medha_operator.testing import SETTINGS, Cluster, node, resource

ON_NODES = {"name": "m", "source": {"hostPath": {"path": "/srv/none"}}, "maxContextTokens": 64}
FETCHED = {"name": "m", "source": {"uri": "https://x/y"}, "maxContextTokens": 64}
GATING = ("ModelAvailable", "Placed", "GroupsReady", "KvpReady")


def conditions(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {each["type"]: each for each in cluster.status["conditions"]}


def ready(cluster: Cluster) -> str:
    found = conditions(cluster)["Ready"]
    return f"{found['status']} {found['reason']}: {found['message']}"


def stuck(why: str, message: str, **spec: Any) -> Cluster:
    """A resource whose only pod waits for `why`."""
    cluster = Cluster(resource(**spec), [node("a")])
    cluster.look()
    cluster.turn()
    cluster.change("tiny-0-g0-s0", why=why, message=message)
    cluster.look()
    return cluster


def refused(why: str) -> Cluster:
    """A resource whose replica is loaded, and that no router takes in."""
    cluster = Cluster(resource(), [node("a")])
    cluster.refused = why
    for _ in range(6):
        cluster.look()
        cluster.turn()
    cluster.look()
    return cluster


def failing(message: str, **spec: Any) -> Cluster:
    """A resource whose only pod ended with a message."""
    cluster = Cluster(resource(**spec), [node("a")])
    for _ in range(4):
        cluster.look()
        cluster.turn()
    cluster.change("tiny-0-g0-s0", phase="Failed", ready=False, why="Error", message=message)
    cluster.look()
    cluster.look()
    return cluster


def test_a_resource_that_serves_says_so_in_every_condition() -> None:
    cluster = Cluster(resource(replicas=2), [node("a")])
    cluster.settle()
    found = conditions(cluster)
    assert {name: found[name]["status"] for name in ("Ready", *GATING, "Updated")} == dict.fromkeys(
        ("Ready", *GATING, "Updated"), "True"
    )
    assert {found[name]["status"] for name in
            ("KvpGrowing", "Draining", "RestartBudgetExhausted", "PlacementUnsatisfiable")} == {
        "False"
    }  # fmt: skip
    assert {each["observedGeneration"] for each in found.values()} == {1}
    status = cluster.status
    assert (status["replicas"], status["readyReplicas"], status["kvpGroups"]) == (2, 2, 2)
    assert status["selector"] == "medha.dev/replica=tiny,medha.dev/role=leader"


@pytest.mark.parametrize(
    "cluster, sentence",
    [
        (stuck("ImagePullBackOff", "Back-off pulling image own:9", template={"image": "own:9"}),
         "False ImagePull: own:9 cannot be pulled for pod tiny-0-g0-s0 (ImagePullBackOff: Back-off "
         "pulling image own:9); correct spec.template.image, or make the image available to the "
         "nodes"),
        (stuck("Unschedulable", 'persistentvolumeclaim "models" not found'),
         "False ModelMissing: volume claim models of spec.model.source cannot be used by pod "
         'tiny-0-g0-s0 (persistentvolumeclaim "models" not found); create it in this namespace or '
         "correct claimName"),
        (stuck("CreateContainerConfigError", 'secret "x" not found'),
         'False CreateContainerConfigError: pod tiny-0-g0-s0 cannot be started: secret "x" not '
         "found"),
        (failing("/models/config.json cannot be read (No such file or directory)"),
         "False ModelMissing: the model does not load: pod tiny-0-g0-s0 ended (Error: "
         "/models/config.json cannot be read (No such file or directory)); /models is volume claim "
         "models there: put the whole checkpoint into its volume, or correct "
         "spec.model.source.pvc"),
        (stuck("FailedMount", 'MountVolume.SetUp failed for volume "model" : hostPath type check '
               "failed: /srv/none is not a directory", model=ON_NODES),
         "False ModelMissing: the directory /srv/none cannot be mounted into pod tiny-0-g0-s0 on "
         'node a (MountVolume.SetUp failed for volume "model" : hostPath type check failed: '
         "/srv/none is not a directory); put the whole checkpoint there on every node, or correct "
         "spec.model.source.hostPath.path"),
        (failing("/models holds no config.json", model=ON_NODES),
         "False ModelMissing: the model does not load: pod tiny-0-g0-s0 ended (Error: /models "
         "holds no config.json); /models is the directory /srv/none there: put the whole "
         "checkpoint there on every node, or correct spec.model.source.hostPath.path"),
        (failing("fetch-model: https://x/y/config.json answers 404", model=FETCHED),
         "False ModelMissing: https://x/y cannot be fetched: pod tiny-0-g0-s0 ended (Error: "
         "fetch-model: https://x/y/config.json answers 404); correct spec.model.source.uri, or let "
         "workers reach it (the chart's networkPolicy.modelEgress)"),
        (stuck("ErrImagePull", "fetch-model: no such image own:9", model=FETCHED),
         "False ImagePull: the worker's image cannot be pulled for pod tiny-0-g0-s0 (ErrImagePull: "
         "fetch-model: no such image own:9); correct spec.template.image, or make the image "
         "available to the nodes"),
        (stuck("FailedMount", 'MountVolume.SetUp failed for volume "x" : secret "x" not found'),
         "False FailedMount: a volume of pod tiny-0-g0-s0 cannot be mounted on node a "
         '(MountVolume.SetUp failed for volume "x" : secret "x" not found); make what it names, or '
         "correct spec.template.volumes"),
        (refused("the tokenizer of m does not load: chat_template.jinja is no Jinja template"),
         "False RouterRefuses: no router takes in tiny-0: the tokenizer of m does not load: "
         "chat_template.jinja is no Jinja template"),
        (failing("Segmentation fault"),
         "False GroupFailed: KVP group 0 of tiny-0 is started anew: pod tiny-0-g0-s0 ended (Error: "
         "Segmentation fault)"),
    ],
)  # fmt: skip
def test_what_keeps_it_from_serving_is_told_with_the_remedy(
    cluster: Cluster, sentence: str
) -> None:
    assert ready(cluster) == sentence


def test_a_model_image_that_cannot_be_pulled_is_told_as_the_models_fault() -> None:
    source = {"image": {"reference": "models/llama:1"}}
    model = {"name": "m", "source": source, "maxContextTokens": 64}
    cluster = stuck("ImagePullBackOff", "pulling models/llama:1: not found", model=model)
    assert "model image models/llama:1 cannot be pulled" in ready(cluster)


def test_a_resource_without_a_place_names_what_is_missing() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "spp": 3}), [node("a"), node("b")])
    cluster.look()
    assert ready(cluster) == (
        "False TooFewFree: 3 pods with 8 nvidia.com/gpu each are needed and the best has room for "
        "2; add nodes, free some or lower spec.parallelism"
    )
    assert conditions(cluster)["PlacementUnsatisfiable"]["status"] == "True"
    assert cluster.pods == {}


@pytest.mark.parametrize(
    "spec, sentence",
    [
        ({"parallelism": {"tp": 16}},
         "False NoNodeIsLargeEnough: a pod needs 16 nvidia.com/gpu on one node and the largest has "
         "8 nvidia.com/gpu; lower spec.parallelism.tp or add a larger node"),
        ({"placement": {"nodeSelector": {"pool": "h100"}}},
         "False NoNodeHasLabel: no node has the label pool=h100 of spec.placement.nodeSelector; "
         "label nodes so or correct the selector"),
        ({"placement": {"packLevel": "topology.kubernetes.io/rack"}},
         "False NoNodeHasLabel: no node has the label topology.kubernetes.io/rack of "
         "spec.placement.packLevel; label the nodes or leave packLevel out"),
    ],
)  # fmt: skip
def test_what_no_node_has_is_told_in_ready(spec: dict[str, Any], sentence: str) -> None:
    cluster = Cluster(resource(**spec), [node("a")])
    cluster.look()
    assert ready(cluster) == sentence
    assert cluster.condition("Placed")["status"] == "False"


def test_growth_without_room_is_told_and_does_not_disturb_what_serves() -> None:
    cluster = Cluster(resource(parallelism={"tp": 8, "kvp": {"max": 2}}), [node("a")])
    cluster.settle()
    cluster.wanted[0] = 2
    cluster.settle()
    found = conditions(cluster)
    assert ready(cluster).startswith("True")
    assert found["KvpGrowing"]["status"] == "False"
    assert "a further KVP group is wanted" in found["KvpGrowing"]["message"]
    assert found["PlacementUnsatisfiable"]["status"] == "True"


def test_an_old_failure_does_not_explain_a_new_trouble() -> None:
    cluster = failing("/models/config.json is broken")
    cluster.settle()
    assert ready(cluster).startswith("True")
    cluster.now_s += 3600
    cluster.power("a", False)
    cluster.turn()
    cluster.look()
    assert "config.json" not in ready(cluster)
    assert ready(cluster) == (
        "False NodeLost: node a does not answer and there is no other place for its pods; bring it "
        "back or add nodes"
    )


def test_a_further_group_that_fails_is_told_where_growth_is_told() -> None:
    cluster = Cluster(resource(parallelism={"kvp": {"max": 2}}), [node("a")])
    cluster.wanted[0] = 2
    cluster.settle()
    cluster.change("tiny-0-g1-s0", phase="Failed", ready=False, why="OOMKilled")
    for _ in range(3):
        cluster.look()
        cluster.turn()
    assert ready(cluster).startswith("True")
    assert conditions(cluster)["KvpGrowing"]["message"] == (
        "tiny-0 gets more KVP groups, but group 1 failed: pod tiny-0-g1-s0 ended (OOMKilled)"
    )


def test_a_replica_that_drains_is_named_with_the_reason() -> None:
    cluster = Cluster(resource(replicas=2), [node("a")])
    cluster.settle()
    cluster.load = {0: 9, 1: 9}
    cluster.resource = resource(generation=2, replicas=1)
    cluster.look()
    found = conditions(cluster)
    assert found["Draining"]["message"] == "finishes its work and goes: tiny-1 (ScaledDown)"
    assert cluster.status["retiring"][0]["replica"] == 1
    assert (cluster.status["replicas"], cluster.status["readyReplicas"]) == (2, 1)


def test_times_change_only_with_the_verdict() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    before = conditions(cluster)
    cluster.now_s += 500
    cluster.resource = resource(generation=2, drainTimeout="2h")
    cluster.look()
    after = conditions(cluster)
    assert {each["observedGeneration"] for each in after.values()} == {2}
    assert [each["lastTransitionTime"] for each in after.values()] == [
        each["lastTransitionTime"] for each in before.values()
    ]
    cluster.power("a", False)
    cluster.turn()
    cluster.look()
    moved = {name for name, each in conditions(cluster).items()
             if each["lastTransitionTime"] != before[name]["lastTransitionTime"]}  # fmt: skip
    assert moved == {"Ready", "GroupsReady", "KvpReady"}


def test_a_cold_start_takes_few_status_writes_however_many_pods_there_are() -> None:
    cluster = Cluster(resource(parallelism={"spp": 8}), [node("a")])
    written = []
    for _ in range(30):
        before = cluster.status
        cluster.look()
        if cluster.status != before:
            written.append(cluster.status)
        cluster.turn(0.3)
    assert ready(cluster).startswith("True")
    assert len(written) <= 5


def test_a_refused_spec_keeps_what_is_known_and_says_why() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.settle()
    sentence = "spec.parallelism.tp is 0: must be a whole number from 1 to 64; use 1"
    told = refused_status(cluster.observed(), sentence, generation=7)
    found = {each["type"]: each for each in told["conditions"]}
    assert (found["Ready"]["status"], found["Ready"]["reason"]) == ("False", "SpecRefused")
    assert found["Ready"]["message"] == sentence
    assert found["Placed"] == conditions(cluster)["Placed"]
    assert (told["observedGeneration"], told["readyReplicas"]) == (7, 1)
    cluster.status = told
    again = refused_status(cluster.observed(), sentence, generation=7)
    assert again == told
    cluster.look()
    assert ready(cluster).startswith("True")


def test_the_autoscalers_numbers_that_others_wrote_are_kept() -> None:
    cluster = Cluster(resource(), [node("a")])
    cluster.status = {"slo": {"attainmentPercent": 99}}
    cluster.settle()
    assert cluster.status["slo"] == {"attainmentPercent": 99}
    assert SETTINGS.fleet_address == "tcp://medha-router-fleet.medha:7800"
