"""What routers must know of models that have no replica now: a ConfigMap in our own namespace.

Routers mount `medha-models`. A model that may be scaled to zero says for how long requests are held
for its first replica; all of them bring name, context limit and classes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from medha.config import RouterModel
from medha.spec import MedhaReplica
from medha_operator.client import CONFIG_MAPS, Client, ClusterError
from medha_operator.names import OWNED_BY

log = logging.getLogger("medha.operator.published")

NAME, ENTRY = "medha-models", "models.json"
HOLD_S = 600.0
MOST_BYTES = 1 << 20


def router_models(resources: Iterable[MedhaReplica]) -> tuple[RouterModel, ...]:
    """One for each served name, by name. Of several resources the first by name speaks."""
    found: dict[str, RouterModel] = {}
    for each in sorted(resources, key=lambda each: (each.namespace, each.name)):
        spec = each.spec
        scales = spec.autoscaling
        zero = scales is not None and scales.min_replicas == 0
        told = RouterModel(
            name=spec.model.name,
            max_context_tokens=spec.model.max_context_tokens,
            classes=spec.classes,
            hold_s=HOLD_S if zero else 0.0,
        )
        found.setdefault(told.name, told)
    return tuple(found[name] for name in sorted(found))


class _ConfigMap(msgspec.Struct):
    data: dict[str, str] | None = None


class Published:
    """Keeps the ConfigMap; `left_s` as the writer has it."""

    def __init__(self, client: Client, namespace: str, left_s: Callable[[], float]) -> None:
        self._client, self._namespace, self._left_s = client, namespace, left_s
        self._known: str | None = None

    def forget(self) -> None:
        """Look at it again: somebody may have changed it."""
        self._known = None

    async def publish(self, resources: Iterable[MedhaReplica]) -> None:
        """The models of these. Raises ClusterError and NotLeading."""
        text = msgspec.json.encode(router_models(resources)).decode()
        if text == self._known:
            return
        if len(text) > MOST_BYTES:
            log.error("models are not published: %d bytes, at most %d", len(text), MOST_BYTES)
            return
        found = await self._get()
        there = (found.data or {}).get(ENTRY) if found is not None else None
        if there != text and (found is not None or text != "[]"):
            body = {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": NAME, "namespace": self._namespace, "labels": OWNED_BY},
                "data": {ENTRY: text},
            }
            encoded = msgspec.json.encode(body)
            await self._client.apply(CONFIG_MAPS, self._namespace, NAME, encoded, self._left_s())
        self._known = text

    async def _get(self) -> _ConfigMap | None:
        try:
            body = await self._client.get(CONFIG_MAPS, self._namespace, NAME)
        except ClusterError as error:
            if error.status != 404:
                raise
            return None
        return msgspec.json.decode(body, type=_ConfigMap)
