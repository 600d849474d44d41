"""Status that controllers and routers serve over HTTP on their ops ports, for an operator."""

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
    """Response to GET /status on the ops port of a controller, for an operator or `medha up`.

    `wanted_groups` is an absolute target. `restart_groups` must restart because a rank was lost.
    `refused`: the reason of a router that rejected the Hello of this controller, or empty.
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


class ClassDemand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests of a class that ended within the window: those that met their SLO, and the rest."""

    name: str
    met: int = 0
    missed: int = 0


class ModelDemand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Demand for a model within the window, and its requests that wait or run now.

    `slack_counts`: relative slack at arrival by the buckets of `medha.metrics.RATIO`, with refused
    requests and without those that not even an idle replica could serve in time. `alone_counts`:
    the slack of the same requests on an idle replica. `work_s`: prefill seconds of all arrivals.
    `held`: requests that find no replica or wait for one.
    """

    model: str
    slack_counts: tuple[int, ...] = ()
    alone_counts: tuple[int, ...] = ()
    work_s: float = 0.0
    backlog_s: float = 0.0
    held: int = 0
    waiting: int = 0
    running: int = 0
    classes: tuple[ClassDemand, ...] = ()


class RouterDemand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """GET /demand on a router's ops port: what the last `window_s` seconds brought."""

    window_s: float
    models: tuple[ModelDemand, ...] = ()
