"""What a controller tells over HTTP on its ops port; an operator or `medha up` acts on it."""

from __future__ import annotations

import msgspec


class GroupStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KVP group as the controller sees it; `state`: absent, starting, joining, running, lost."""

    group: int
    state: str
    pages: int = 0
    free_pages: int = 0
    releasable: bool = False
    loaded: float = 0.0
    ranks: tuple[str, ...] = ()


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GET /status on a controller's ops port: what an operator or `medha up` acts on.

    `wanted_groups` is an absolute target; `restart_groups` must be started anew (a rank was lost).
    `refused`: why a router that heard our Hello does not take us in; empty: none refuses.
    """

    replica: str
    ready: bool
    draining: bool
    generation: int
    wanted_groups: int
    groups: tuple[GroupStatus, ...]
    routers: int = 0
    waiting: int = 0
    running: int = 0
    restart_groups: tuple[int, ...] = ()
    message: str = ""
    refused: str = ""
