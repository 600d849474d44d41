"""ScaledObjects of the resources that KEDA scales: created, corrected and deleted by name.

They are read seldom, since only KEDA has a reason to change them. Without KEDA there are none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from medha_operator.kube.client import SCALED_OBJECTS, ClusterError, KubeClient
from medha_operator.resources.objects import Key
from medha_operator.resources.scaled_object import is_ours, same


class ScaledObjects:
    """Keeps ScaledObjects; each is read again after `fresh_s`. `deadline_s` as Executor has it."""

    def __init__(self, client: KubeClient, fresh_s: float, deadline_s: Callable[[], float]) -> None:
        self._client, self._fresh_s, self._deadline_s = client, fresh_s, deadline_s
        self._served = (float("-inf"), False)
        self._checked: dict[Key, tuple[float, bytes]] = {}

    async def served(self) -> bool:
        """Return true if the API server serves KEDA's API."""
        at_s, served = self._served
        if time.monotonic() - at_s > self._fresh_s:
            served = await self._client.serves(SCALED_OBJECTS)
            self._served = time.monotonic(), served
        return served

    async def ensure(self, key: Key, wanted: dict[str, Any]) -> str:
        """Create or correct it. Returns why it cannot be, or "". Raises ClusterError."""
        body = msgspec.json.encode(wanted)
        at_s, before = self._checked.get(key, (float("-inf"), b""))
        if before == body and time.monotonic() - at_s <= self._fresh_s:
            return ""
        current = await self._get(key)
        if current is not None and not is_ours(current):
            return (
                f"ScaledObject {key[1]} exists, and this MedhaReplica does not own it: delete it, "
                "or remove spec.autoscaling"
            )
        if current is None or not same(wanted, current):
            await self._client.apply(SCALED_OBJECTS, *key, body, self._deadline_s())
        self._checked[key] = time.monotonic(), body
        return ""

    async def remove(self, key: Key) -> bool:
        """Delete ours. True once the API server no longer has it. Raises ClusterError."""
        self._checked.pop(key, None)
        current = await self._get(key)
        if current is None or not is_ours(current):
            return True
        if "deletionTimestamp" not in current["metadata"]:
            uid = current["metadata"]["uid"]
            try:
                await self._client.delete(
                    SCALED_OBJECTS, *key, uid=uid, timeout_s=self._deadline_s()
                )
            except ClusterError as error:
                if error.status not in (404, 409):
                    raise
        return await self._get(key) is None

    async def _get(self, key: Key) -> dict[str, Any] | None:
        try:
            current: dict[str, Any] = msgspec.json.decode(
                await self._client.get(SCALED_OBJECTS, *key)
            )
        except ClusterError as error:
            if error.status != 404:
                raise
            return None
        return current
