"""Adoption of pods whose spec hash was made by another rule, if they hold the current spec.

Operators before the rule `v2-` hashed their own settings as well, so an upgrade would restart every
model. Such a pod is of the current spec if the status, which its operator wrote, says so for this
generation; else if the pod and its configuration hold every field that the resource sets. What a
pod does not show (nodeSelector, packLevel) counts at its next restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from medha.config import WorkerConfig
from medha.rendering import Site
from medha.spec import MedhaReplica
from medha_operator.resources import labels as names
from medha_operator.resources.manifests import CONFIG_FILE, source_volumes, worker_json
from medha_operator.resources.objects import integer
from medha_operator.resources.views import Observed, PodView, load_status
from medha_operator.settings import Settings

Document = Mapping[str, Any]

_OF_SITE = frozenset(Site.__struct_fields__) - {"checkpoint", "adapters"}


def foreign_hashes(observed: Observed) -> list[PodView]:
    """List the pods whose hash cannot be compared with that of the current spec."""
    return [pod for pod in observed.pods if not pod.spec_hash.startswith(names.HASH_RULE)]


def is_updated(resource: MedhaReplica, observed: Observed) -> bool:
    """Return whether the last status calls every replica updated to this generation."""
    return any(
        condition.type == "Updated"
        and condition.status == "True"
        and condition.observed_generation == resource.generation
        for condition in load_status(observed.previous_status).conditions
    )


def holds_spec(
    resource: MedhaReplica, settings: Settings, pod: Document, config: Document | None
) -> bool:
    """Return whether a pod and its ConfigMap, as the API has them, hold what the resource sets."""
    template, placement = resource.spec.template, resource.spec.placement
    ordinal = int(pod["metadata"]["labels"][names.ORDINAL])
    tp, device = resource.spec.parallelism.tp, resource.spec.device.resource_name
    limits = {**({device: tp} if device else {}), **template.resources.get("limits", {})}
    worker: dict[str, Any] = {
        "name": names.WORKER_CONTAINER,
        "env": template.env,
        "volumeMounts": template.volume_mounts,
        "resources": {"limits": limits, "requests": template.resources.get("requests", {})},
    }
    spec: dict[str, Any] = {
        "containers": [worker | ({"image": template.image} if template.image else {})],
        "volumes": [*template.volumes, *source_volumes(resource)],
        "tolerations": placement.tolerations,
    }
    sources = [resource.spec.model.source, *(part.source for part in resource.spec.adapters)]
    if uris := [source.uri for source in sources if source.uri is not None]:
        spec["initContainers"] = [{"command": [uri]} for uri in uris]
    if template.scheduler_name is not None:
        spec["schedulerName"] = template.scheduler_name
    if template.priority_class_name is not None:
        spec["priorityClassName"] = template.priority_class_name
    labels = {"labels": template.labels, "annotations": template.annotations}
    return (
        _holds(pod, {"metadata": labels, "spec": spec})
        and config is not None
        and _same_config(config, worker_json(resource, ordinal, settings))
    )


def _same_config(config: Document, wanted: str) -> bool:
    """Compare two configurations of a replica in all that the resource decides."""
    try:
        text = (config.get("data") or {}).get(CONFIG_FILE, "")
        current = msgspec.json.decode(text, type=WorkerConfig)
    except msgspec.MsgspecError:
        return False
    after = msgspec.json.decode(wanted, type=WorkerConfig)
    site = {name: getattr(after, name) for name in _OF_SITE}
    return msgspec.structs.replace(current, **site) == after


def _holds(current: Any, wanted: Any) -> bool:
    """Return whether `current` has all of `wanted`; the server and webhooks may have added more."""
    if isinstance(wanted, Mapping):
        if not isinstance(current, Mapping):
            return not wanted
        return all(
            _same_amounts(current.get(key) or {}, value)
            if key in ("limits", "requests")
            else _holds(current.get(key), value)
            for key, value in wanted.items()
        )
    if isinstance(wanted, (list, tuple)):
        return all(any(_holds(item, part) for item in current or ()) for part in wanted)
    return current == wanted or (not current and not wanted)


def _same_amounts(current: Document, wanted: Document) -> bool:
    """Compare quantities as numbers, since the server rewrites them: 0.5 becomes 500m."""
    return all(
        name in current and integer(name, current[name]) == integer(name, amount)
        for name, amount in wanted.items()
    )
