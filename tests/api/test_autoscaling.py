"""The operator scales resources by the reports of routers and controllers, or leaves it to KEDA."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.api.fleet import Fleet, Operator, condition_of
from tests.api.proxy import Call, Proxy
from tests.api.stand_ins import Router

from medha.config import RouterModel

Start = Callable[..., Operator]

pytestmark = pytest.mark.timeout(1800)

MERGE = {"Content-Type": "application/merge-patch+json"}
SOON = {"maxReplicas": 3, "scaleDownStabilization": "3s"}


def replicas(fleet: Fleet, name: str = "llama") -> int:
    return int(fleet.api.get(fleet.path(name)).json()["spec"]["replicas"])


def active(fleet: Fleet) -> str:
    return str(fleet.condition("llama", "ScalingActive").get("reason"))


def scaled(fleet: Fleet) -> list[str]:
    """Return the notes of the Events about changes of the number."""
    events = fleet.list("events", "apis/events.k8s.io/v1")
    return [event["note"] for event in events if event["reason"] == "Scaled"]


@contextlib.contextmanager
def under_load(make: Callable[[], None]) -> Iterator[None]:
    """Repeat a load in the background: offer a window of it every second."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(1.0):
            make()

    make()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(20)


def test_refusals_add_a_replica_and_idleness_removes_it(
    served: Fleet, start_operator: Start, router: Router, tmp_path: Path
) -> None:
    operator = start_operator(**router.settings)
    served.create("llama", autoscaling=SOON)
    with under_load(lambda: router.offer("llama", -1.0, 0.9)):
        served.played(lambda: replicas(served) == 2, "more replicas")
        served.played(lambda: served.is_ready("llama"))
    slo = served.status("llama")["slo"]
    assert slo["attainmentPercent"] == 0 and float(slo["slackP10"]) <= -1.0
    router.calm()
    served.played(lambda: replicas(served) == 1, "fewer replicas")
    served.played(lambda: served.is_ready("llama") and len(served.pods()) == 2)
    served.played(lambda: active(served) == "Scaling")
    served.played(lambda: operator.metric("medha_desired_replicas") == 1.0)
    path = tmp_path / "scaling.json"
    path.write_bytes(operator.scaling())
    again = subprocess.run(
        [sys.executable, "-m", "medha.cli", "scaling", path], capture_output=True, text=True
    )
    assert again.returncode == 0, again.stderr
    assert "looks come out the same" in again.stdout and "from 2 to 1 replicas" in again.stdout
    served.played(lambda: len(scaled(served)) == 2, "each change is an Event")
    assert sorted(note[:25] for note in scaled(served)) == [
        "from 1 to 2 replicas (Lit",
        "from 2 to 1 replicas (Sur",
    ]


def test_without_data_of_the_routers_nothing_changes_and_the_condition_says_so(
    served: Fleet, start_operator: Start, router: Router
) -> None:
    start_operator(**router.settings)
    served.create("llama", replicas=2, autoscaling={**SOON, "scaleDownStabilization": "1m"})
    served.played(lambda: served.is_ready("llama") and active(served) == "Scaling")
    router.silent = True
    served.played(lambda: active(served) == "NoData")
    assert served.condition("llama", "ScalingActive")["status"] == "False"
    served.change("llama", {"autoscaling": {"scaleDownStabilization": "1s"}})
    polls = router.polls
    served.played(lambda: router.polls > polls + 30)
    assert replicas(served) == 2
    router.silent = False
    served.played(lambda: replicas(served) == 1)


def test_another_writer_is_named_and_its_number_stands_for_a_while(
    served: Fleet, start_operator: Start, router: Router, api: httpx.Client
) -> None:
    start_operator(**router.settings)
    served.create("llama", autoscaling={"maxReplicas": 3, "scaleDownStabilization": "8s"})
    served.played(lambda: served.is_ready("llama") and active(served) == "Scaling")
    answer = api.patch(
        served.path("llama", "scale"),
        json={"spec": {"replicas": 3}},
        headers=MERGE,
        params={"fieldManager": "somebody-else"},
    )
    assert answer.status_code == 200

    def outside() -> dict[str, Any] | None:
        """Return the resource while the condition names another writer: for eight seconds."""
        resource: dict[str, Any] = api.get(served.path("llama")).json()
        condition = condition_of(resource["status"], "ScalingActive")
        return resource if condition["reason"] == "OutsideWriter" else None

    resource = served.played(outside)
    assert resource is not None
    condition = condition_of(resource["status"], "ScalingActive")
    assert (
        condition["status"] == "False"
        and "somebody-else set spec.replicas to 3" in condition["message"]
    )
    assert resource["spec"]["replicas"] == 3
    served.played(lambda: replicas(served) < 3)
    served.played(lambda: replicas(served) == 1 and active(served) == "Scaling")


def test_a_number_whose_write_got_no_answer_is_written_again(
    served: Fleet, start_operator: Start, router: Router, proxy: Proxy
) -> None:
    start_operator(**router.settings)
    served.create("llama", autoscaling=SOON)
    served.played(lambda: served.is_ready("llama") and active(served) == "Scaling")
    stalled: list[Call] = []

    def delay(call: Call) -> float:
        if call.verb == "PUT" and call.path.endswith("/scale") and not stalled:
            stalled.append(call)
            return 300.0
        return 0.0

    proxy.delay = delay
    served.change("llama", {"autoscaling": {"minReplicas": 2}})
    served.played(lambda: replicas(served) == 2)
    assert stalled


def test_the_first_request_starts_a_model_that_was_scaled_to_zero(
    served: Fleet, start_operator: Start, router: Router, api: httpx.Client
) -> None:
    start_operator(**router.settings)
    served.create("llama", autoscaling={**SOON, "minReplicas": 0})
    served.played(lambda: served.is_ready("llama"))
    served.played(lambda: replicas(served) == 0 and not served.pods())
    served.played(lambda: served.condition("llama").get("reason") == "NoneAskedFor")
    with router.held("llama"):
        served.played(lambda: replicas(served) == 1)
        served.played(lambda: served.is_ready("llama") and bool(served.pods()))
    config_map = api.get(f"/api/v1/namespaces/{served.namespace}/configmaps/medha-models").json()
    (model,) = msgspec.json.decode(config_map["data"]["models.json"], type=tuple[RouterModel, ...])
    assert (model.name, model.max_context_tokens, model.hold_s > 0.0) == ("llama", 4096, True)


def test_after_zero_the_operator_distinguishes_its_own_numbers_from_others(
    served: Fleet, start_operator: Start, router: Router, api: httpx.Client
) -> None:
    """The API server forgets who wrote a zero to /scale, and who writes there after it."""
    start_operator(**router.settings)
    served.create("llama", autoscaling={**SOON, "minReplicas": 0})
    served.played(lambda: replicas(served) == 0 and not served.pods())
    assert "f:replicas" not in served.owned("llama")
    later = {
        "minReplicas": 1,
        "scaleDownStabilization": "10m",
    }  # OutsideWriter would last
    served.change("llama", {"autoscaling": later})
    served.played(lambda: replicas(served) == 1 and served.is_ready("llama"))
    served.change("llama", {"autoscaling": {"minReplicas": 2}})
    served.played(lambda: replicas(served) == 2 and served.is_ready("llama"))
    served.played(lambda: active(served) == "Scaling")
    assert "f:replicas" not in served.owned("llama")
    api.patch(
        served.path("llama", "scale"), json={"spec": {"replicas": 3}}, headers=MERGE
    ).raise_for_status()
    served.played(lambda: active(served) == "OutsideWriter")
    message = served.condition("llama", "ScalingActive")["message"]
    assert message.startswith("an unknown writer set spec.replicas to 3")


def exported(operator: Operator) -> tuple[float | None, float | None]:
    """Return the desired number, and whether it is at its maximum."""
    number = operator.metric("medha_desired_replicas")
    return number, operator.metric("medha_autoscaling_at_maximum")


def test_external_exports_a_number_and_writes_nothing(
    served: Fleet, start_operator: Start, router: Router
) -> None:
    operator = start_operator(**router.settings)
    served.create("llama", autoscaling={**SOON, "mode": "External"})
    served.played(lambda: served.is_ready("llama") and active(served) == "Exported")
    with under_load(lambda: router.offer("llama", -1.0, 0.9)):
        served.played(lambda: exported(operator) == (2.0, 0.0))
        served.change("llama", {"autoscaling": {"maxReplicas": 1}})
        served.played(lambda: exported(operator)[1] == 1.0)
    assert replicas(served) == 1
    served.change("llama", {"autoscaling": None})
    served.played(lambda: exported(operator) == (None, None))
    served.played(lambda: not served.condition("llama", "ScalingActive"))


def test_a_scaled_object_exists_with_keda_and_goes_before_the_operator_writes(
    served: Fleet, start_operator: Start, router: Router, api: httpx.Client, keda: str
) -> None:
    where = "http://prometheus.monitoring:9090"
    start_operator(**router.settings, MEDHA_PROMETHEUS=where)
    path = f"{keda}/namespaces/{served.namespace}/scaledobjects/llama"
    served.create("llama", autoscaling={**SOON, "mode": "External"})
    served.played(lambda: api.get(path).status_code == 200)
    scaled_object = api.get(path).json()
    spec = scaled_object["spec"]
    assert spec["scaleTargetRef"] == {
        "apiVersion": "medha.dev/v1alpha1",
        "kind": "MedhaReplica",
        "name": "llama",
    }
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (1, 3)
    (trigger,) = spec["triggers"]
    assert trigger["metadata"]["serverAddress"] == where
    assert trigger["metadata"]["query"] == (
        f'max(medha_desired_replicas{{namespace="{served.namespace}",name="llama"}})'
    )
    assert scaled_object["metadata"]["ownerReferences"][0]["name"] == "llama"
    served.played(lambda: active(served) == "Exported")
    version = scaled_object["metadata"]["resourceVersion"]
    served.change("llama", {"autoscaling": {"maxReplicas": 5}})
    served.played(lambda: api.get(path).json()["spec"]["maxReplicaCount"] == 5)
    assert api.get(path).json()["metadata"]["resourceVersion"] != version
    with under_load(lambda: router.offer("llama", -1.0, 0.9)):
        served.change("llama", {"autoscaling": {"mode": "Builtin"}})

        def written() -> bool:
            more, gone = replicas(served) > 1, api.get(path).status_code == 404
            assert gone or not more
            return more

        served.played(written)


def test_without_the_address_of_prometheus_there_is_no_scaled_object_but_a_reason(
    served: Fleet, start_operator: Start, router: Router, keda: str
) -> None:
    start_operator(**router.settings)
    served.create("llama", autoscaling={**SOON, "mode": "External"})
    served.played(lambda: active(served) == "NoScaledObject")
    assert "MEDHA_PROMETHEUS" in served.condition("llama", "ScalingActive")["message"]


def test_a_scaled_object_made_by_a_person_is_not_touched(
    served: Fleet, start_operator: Start, router: Router, api: httpx.Client, keda: str
) -> None:
    document = {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": "llama"},
        "spec": {
            "scaleTargetRef": {"name": "other"},
            "triggers": [{"type": "cron", "metadata": {"timezone": "UTC"}}],
        },
    }
    path = f"{keda}/namespaces/{served.namespace}/scaledobjects"
    assert api.post(path, json=document).status_code == 201
    start_operator(**router.settings, MEDHA_PROMETHEUS="http://prometheus:9090")
    served.create("llama", autoscaling={**SOON, "mode": "External"})
    served.played(lambda: active(served) == "NoScaledObject")
    assert api.get(f"{path}/llama").json()["spec"]["scaleTargetRef"] == {"name": "other"}
