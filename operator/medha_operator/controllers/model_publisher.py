"""Publisher of the model registry: the ConfigMap `medha-models`, which the routers mount.

It lists every model with name, context limit, classes and adapters, so that routers also serve
models that have no replica now. For a model that may scale to zero it states for how long requests
wait for the first replica.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from medha.config import RouterModel
from medha.spec import MedhaReplica
from medha_operator.kube.client import CONFIG_MAPS, LEASES, ClusterError, KubeClient
from medha_operator.kube.lease import NAME as LEASE
from medha_operator.resources.labels import OWNED_BY
from medha_operator.resources.objects import Meta

log = logging.getLogger("medha.operator.models")

NAME, ENTRY = "medha-models", "models.json"
HOLD_S = 600.0
MAX_BYTES = 1 << 20


def router_models(resources: Iterable[MedhaReplica]) -> tuple[RouterModel, ...]:
    """List one entry per served name, sorted; the first resource by name defines the entry."""
    models: dict[str, RouterModel] = {}
    for resource in sorted(resources, key=lambda resource: (resource.namespace, resource.name)):
        spec = resource.spec
        to_zero = spec.autoscaling is not None and spec.autoscaling.min_replicas == 0
        model = RouterModel(
            name=spec.model.name,
            max_context_tokens=spec.model.max_context_tokens,
            classes=spec.classes,
            adapters=tuple(adapter.name for adapter in spec.adapters),
            hold_s=HOLD_S if to_zero else 0.0,
        )
        models.setdefault(model.name, model)
    return tuple(models[name] for name in sorted(models))


class _ConfigMap(msgspec.Struct):
    metadata: Meta
    data: dict[str, str] | None = None


class _Lease(msgspec.Struct):
    metadata: Meta


class ModelPublisher:
    """Keeps the ConfigMap; `deadline_s` as Executor has it.

    The release's Lease owns it, so that it goes when the release is uninstalled.
    """

    def __init__(self, client: KubeClient, namespace: str, deadline_s: Callable[[], float]) -> None:
        self._client, self._namespace, self._deadline_s = client, namespace, deadline_s
        self._published: str | None = None

    def forget(self) -> None:
        """Read the ConfigMap again at the next `publish`, in case it was changed by hand."""
        self._published = None

    async def publish(self, resources: Iterable[MedhaReplica]) -> None:
        """Write the models of these resources. Raises ClusterError and NotLeading."""
        text = msgspec.json.encode(router_models(resources)).decode()
        if text == self._published:
            return
        if len(text) > MAX_BYTES:
            log.error("models are not published: %d bytes exceed %d", len(text), MAX_BYTES)
            return
        current = await self._get()
        if current is not None or text != "[]":
            await self._write(current, text)
        self._published = text

    async def _write(self, current: _ConfigMap | None, text: str) -> None:
        lease = msgspec.json.decode(
            await self._client.get(LEASES, self._namespace, LEASE), type=_Lease
        ).metadata
        entry = (current.data or {}).get(ENTRY) if current is not None else None
        owners = current.metadata.owner_references or () if current is not None else ()
        if entry != text or lease.uid not in {owner.uid for owner in owners}:
            manifest = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": NAME,
                    "namespace": self._namespace,
                    "labels": OWNED_BY,
                    "ownerReferences": [
                        {
                            "apiVersion": LEASES.api_version,
                            "kind": LEASES.kind,
                            "name": lease.name,
                            "uid": lease.uid,
                        }
                    ],
                },
                "data": {ENTRY: text},
            }
            body, timeout_s = msgspec.json.encode(manifest), self._deadline_s()
            await self._client.apply(CONFIG_MAPS, self._namespace, NAME, body, timeout_s)

    async def _get(self) -> _ConfigMap | None:
        try:
            body = await self._client.get(CONFIG_MAPS, self._namespace, NAME)
        except ClusterError as error:
            if error.status != 404:
                raise
            return None
        return msgspec.json.decode(body, type=_ConfigMap)
