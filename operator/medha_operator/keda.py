"""A ScaledObject, so that KEDA scales a MedhaReplica to what the operator exports. Pure.

The exported number is absolute: with an average target of 1 for each replica, an HPA wants just as
many. Where Prometheus has no number KEDA is told to fail rather than to take it for 0.
"""

from __future__ import annotations

from typing import Any

from medha.spec import API_VERSION, KIND, MedhaReplica
from medha.spec.values import Autoscaling
from medha_operator import names
from medha_operator.manifests import metadata

POLLS_S = 15
METRIC = "medha_desired_replicas"


def scaled_object(resource: MedhaReplica, asked: Autoscaling, prometheus: str) -> dict[str, Any]:
    """The ScaledObject of a resource, owned by it; `prometheus`: where KEDA asks."""
    place = f'namespace="{resource.namespace}",name="{resource.name}"'
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(resource, resource.name),
        "spec": {
            "scaleTargetRef": {"apiVersion": API_VERSION, "kind": KIND, "name": resource.name},
            "minReplicaCount": asked.min_replicas,
            "maxReplicaCount": asked.max_replicas,
            "pollingInterval": POLLS_S,
            "triggers": [
                {
                    "type": "prometheus",
                    "metricType": "AverageValue",
                    "metadata": {
                        "serverAddress": prometheus,
                        "query": f"max({METRIC}{{{place}}})",
                        "threshold": "1",
                        "activationThreshold": "0",
                        "ignoreNullValues": "false",
                    },
                }
            ],
        },
    }


def same(wanted: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether what is there is what is wanted; the server may have added defaults."""
    owners = found["metadata"].get("ownerReferences") or ()
    owned = {each["uid"] for each in wanted["metadata"]["ownerReferences"]}
    labels = wanted["metadata"]["labels"].items() <= found["metadata"].get("labels", {}).items()
    return (
        labels
        and owned <= {each["uid"] for each in owners}
        and all(found["spec"].get(name) == value for name, value in wanted["spec"].items())
    )


def is_ours(found: dict[str, Any]) -> bool:
    """One of that name that a person made is left alone."""
    labels = found["metadata"].get("labels") or {}
    return names.OWNED_BY.items() <= labels.items()
