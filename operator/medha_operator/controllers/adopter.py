"""Adopter of pods from before an upgrade: gives them the hash of the spec that they hold.

Without it, an operator that computes spec hashes by another rule would restart every model.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from medha.spec import MedhaReplica
from medha_operator.kube.client import CONFIG_MAPS, PODS, Kind, KubeClient
from medha_operator.planning.adoption import foreign_hashes, holds_spec, is_updated
from medha_operator.resources import objects
from medha_operator.resources.labels import CONFIG_VOLUME, RESOURCE, SPEC_HASH
from medha_operator.resources.manifests import spec_hash
from medha_operator.resources.views import Observed, PodView
from medha_operator.settings import Settings

log = logging.getLogger("medha.operator.adoption")


class Adopter:
    """Relabels pods; `deadline_s` as Executor has it, `learn` receives each relabelled pod."""

    def __init__(
        self,
        client: KubeClient,
        settings: Settings,
        deadline_s: Callable[[], float],
        learn: Callable[[objects.Versioned[objects.OwnedPod]], None],
    ) -> None:
        self._client, self._settings = client, settings
        self._deadline_s, self._learn = deadline_s, learn
        self._outdated: set[str] = set()
        """UIDs of pods that hold a former spec."""

    async def adopt(self, resource: MedhaReplica, observed: Observed) -> bool:
        """Adopt the pods that hold the current spec. True if there were any: observe again."""
        pods = [pod for pod in foreign_hashes(observed) if pod.uid not in self._outdated]
        if not pods:
            return False
        current = pods
        if not is_updated(resource, observed):
            uids = {uid async for uid in self._unchanged(resource)}
            current = [pod for pod in pods if pod.uid in uids]
        await self._relabel(resource, current)
        self._outdated |= {pod.uid for pod in pods} - {pod.uid for pod in current}
        return bool(current)

    async def _unchanged(self, resource: MedhaReplica) -> AsyncIterator[str]:
        """UIDs of the pods that hold what the resource sets."""
        configs = {
            document["metadata"]["name"]: document
            async for document in self._listed(CONFIG_MAPS, resource)
        }
        async for pod in self._listed(PODS, resource):
            mounted = [
                volume["configMap"]["name"]
                for volume in pod["spec"]["volumes"]
                if volume["name"] == CONFIG_VOLUME
            ]
            config = configs.get(mounted[0]) if mounted else None
            if holds_spec(resource, self._settings, pod, config):
                yield pod["metadata"]["uid"]

    async def _listed(self, kind: Kind, resource: MedhaReplica) -> AsyncIterator[dict[str, Any]]:
        labels = f"{RESOURCE}={resource.name}"
        async for page in self._client.pages(kind, resource.namespace, labels=labels):
            for raw in page.items or ():
                yield msgspec.json.decode(raw)

    async def _relabel(self, resource: MedhaReplica, pods: Iterable[PodView]) -> None:
        label = {SPEC_HASH: spec_hash(resource)}
        for pod in pods:
            body = msgspec.json.encode({"metadata": {"uid": pod.uid, "labels": label}})
            answer = await self._client.merge(
                PODS, resource.namespace, pod.name, body, self._deadline_s()
            )
            self._learn(objects.pod(answer))
            log.info("adopted", extra={"fields": {"pod": pod.name, "former": pod.spec_hash}})
