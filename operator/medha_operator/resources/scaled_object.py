"""The ScaledObject by which KEDA scales a MedhaReplica to the number that the operator exports.

Pure. The exported number is absolute: with an average target of 1 per replica, an HPA wants exactly
that many. The number has waited for `scaleDownStabilization` already, so neither the HPA nor KEDA
adds its own five minutes. If Prometheus has no number, KEDA fails instead of scaling to 0.
"""

from __future__ import annotations

from typing import Any

import msgspec

from medha.spec import KIND, MedhaReplica
from medha.spec.values import AutoscalingSpec
from medha_operator.resources.manifests import metadata
from medha_operator.resources.objects import Meta

POLLS_S = 15
_AT_ONCE = {"scaleDown": {"stabilizationWindowSeconds": 0}}
METRIC = "medha_desired_replicas"


def scaled_object(
    resource: MedhaReplica, autoscaling: AutoscalingSpec, prometheus: str
) -> dict[str, Any]:
    """Build the ScaledObject that a resource owns; KEDA queries the address `prometheus`."""
    place = f'namespace="{resource.namespace}",name="{resource.name}"'
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": metadata(resource, resource.name),
        "spec": {
            "scaleTargetRef": {
                "apiVersion": resource.api_version,
                "kind": KIND,
                "name": resource.name,
            },
            "minReplicaCount": autoscaling.min_replicas,
            "maxReplicaCount": autoscaling.max_replicas,
            "pollingInterval": POLLS_S,
            "cooldownPeriod": 0,
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _AT_ONCE}},
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


def same(wanted: dict[str, Any], existing: dict[str, Any]) -> bool:
    """Return whether an existing object is as wanted; the server may have added defaults."""
    owners = existing["metadata"].get("ownerReferences") or ()
    owned = {owner["uid"] for owner in wanted["metadata"]["ownerReferences"]}
    labels = wanted["metadata"]["labels"].items() <= existing["metadata"].get("labels", {}).items()
    return (
        labels
        and owned <= {owner["uid"] for owner in owners}
        and all(existing["spec"].get(name) == value for name, value in wanted["spec"].items())
    )


def is_ours(existing: dict[str, Any]) -> bool:
    """Return whether the MedhaReplica of its name owns the object: any other is left alone."""
    metadata = msgspec.convert(existing["metadata"], Meta)
    return metadata.resource != "" and metadata.resource == metadata.name
