"""Keeps the ScaledObjects of resources that KEDA scales: made, mended and deleted through the API.

Looked at by name, seldom: nobody but KEDA has a reason to touch them. Where KEDA is not installed
there is nothing to keep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from medha_operator.client import SCALED_OBJECTS, Client, ClusterError
from medha_operator.keda import is_ours, same
from medha_operator.projections import Key


class ScaledObjects:
    """`left_s` is the time that a write may take; it raises NotLeading when there is none."""

    def __init__(self, client: Client, fresh_s: float, left_s: Callable[[], float]) -> None:
        self._client, self._fresh_s, self._left_s = client, fresh_s, left_s
        self._served = (float("-inf"), False)
        self._checked: dict[Key, tuple[float, bytes]] = {}

    async def served(self) -> bool:
        """Whether KEDA's API is there."""
        at_s, served = self._served
        if time.monotonic() - at_s > self._fresh_s:
            served = await self._client.serves(SCALED_OBJECTS)
            self._served = time.monotonic(), served
        return served

    async def keep(self, key: Key, wanted: dict[str, Any]) -> str:
        """It is there as wanted; else why it cannot be. Raises ClusterError."""
        body = msgspec.json.encode(wanted)
        at_s, before = self._checked.get(key, (float("-inf"), b""))
        if before == body and time.monotonic() - at_s <= self._fresh_s:
            return ""
        found = await self._get(key)
        if found is not None and not is_ours(found):
            return (
                f"a ScaledObject {key[1]} that is not the operator's exists: delete it, or remove "
                "spec.autoscaling"
            )
        if found is None or not same(wanted, found):
            await self._client.apply(SCALED_OBJECTS, *key, body, self._left_s())
        self._checked[key] = time.monotonic(), body
        return ""

    async def gone(self, key: Key) -> bool:
        """Ours is deleted, and was seen to be gone. Raises ClusterError."""
        self._checked.pop(key, None)
        found = await self._get(key)
        if found is None or not is_ours(found):
            return True
        if "deletionTimestamp" not in found["metadata"]:
            uid = found["metadata"]["uid"]
            try:
                await self._client.delete(SCALED_OBJECTS, *key, uid=uid, timeout_s=self._left_s())
            except ClusterError as error:
                if error.status not in (404, 409):
                    raise
        return await self._get(key) is None

    async def _get(self, key: Key) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = msgspec.json.decode(
                await self._client.get(SCALED_OBJECTS, *key)
            )
        except ClusterError as error:
            if error.status != 404:
                raise
            return None
        return found
