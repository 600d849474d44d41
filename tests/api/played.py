"""Controllers and routers as far as the operator asks them: their ops ports, with what a test says.

The ports, their routes and the counting of demand are the real ones; only what comes in is played.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator

from medha.adapters.prometheus import Metrics, OpsServer, Reply, json_reply
from medha.config import CONTROLLER_OPS_PORT
from medha.demand import WINDOW_S, WORK_FLOOR_S, Demand
from medha.messages import GroupStatus, ReplicaStatus, RouterDemand
from medha.request import Request

_NETWORKS = itertools.count()
PLACES = 1024


class Leaders:
    """A controller for each leader pod, on a loopback address of its own; the other pods share one.
    `load` is how many requests run on each; one that drains finishes them at once."""

    def __init__(self) -> None:
        network = ipaddress.ip_address(f"127.{64 + os.getpid() % 128}.0.0")
        self._first = network + PLACES * (next(_NETWORKS) % 64)
        self._metrics = Metrics("controller")
        self._servers: dict[str, OpsServer] = {}
        self._places: dict[str, int] = {}
        self.load: dict[str, int] = {}
        self.draining: set[str] = set()
        self.wanted: dict[str, int] = {}
        self.least: Callable[[str], int] = lambda pod: 1
        """Groups that a leader wants of itself."""

    def address(self, pod: str) -> str:
        """The pod's; its controller listens from now on if it is a leader."""
        if not pod.endswith("-g0-s0"):
            return str(self._first + PLACES - 1)
        place = self._places.setdefault(pod, len(self._places) + 1)
        assert place < PLACES - 1, f"{pod}: no address is left for so many leaders"
        address = str(self._first + place)
        if pod not in self._servers:
            self._servers[pod] = OpsServer(
                address, CONTROLLER_OPS_PORT, self._metrics, alive=lambda: True,
                ready=lambda: True,
                routes={"GET /status": lambda: json_reply(self._status(pod)),
                        "POST /drain": lambda: self._drain(pod)},
            )  # fmt: skip
        self.draining.discard(pod)  # whoever bears its name begins anew
        self.wanted.pop(pod, None)
        return address

    def close(self) -> None:
        for each in self._servers.values():
            each.close()

    def _drain(self, pod: str) -> Reply:
        self.draining.add(pod)
        self.load[pod] = 0
        return json_reply({"draining": True}, 202)

    def _status(self, pod: str) -> ReplicaStatus:
        found = re.fullmatch(r"(.+)-g0-s0", pod)
        wanted = self.wanted.get(pod) or self.least(pod)
        return ReplicaStatus(
            replica=found.group(1) if found else pod, ready=True, draining=pod in self.draining,
            generation=1, wanted_groups=wanted, routers=1,
            running=self.load.get(pod, 0),
            groups=tuple(
                GroupStatus(group=each, state="running", pages=100, free_pages=100)
                for each in range(wanted)
            ),
        )  # fmt: skip


class Router:
    """A router's ops port; `demand` is what it counts, `silent` makes it answer no more."""

    def __init__(self) -> None:
        self.demand = Demand()
        self.models: tuple[str, ...] = ()
        self.silent = False
        self.asked = 0
        self._server = OpsServer(
            "127.0.0.1", 0, Metrics("router"), alive=lambda: True, ready=lambda: True,
            routes={"GET /demand": self._show},
        )  # fmt: skip

    @property
    def settings(self) -> dict[str, str]:
        """Where an operator finds it."""
        return {
            "MEDHA_ROUTER": "tcp://127.0.0.1:7800",
            "MEDHA_ROUTER_OPS_PORT": str(self._server.port),
        }

    def offer(self, model: str, slack: float, load: float) -> None:
        """A hundred requests found so much slack, where an idle replica would have left them more
        (four times their work), and fill `load` replicas."""
        self.calm()
        self.models = (model,)
        now, work_s = time.monotonic(), max(WORK_FLOOR_S, load * WINDOW_S / 100)
        asked = Request(
            id="", arrival_s=now, prompt_tokens=1, work_s=work_s,
            ttft_deadline_s=(1.0 + max(4.0, slack)) * work_s,
        )  # fmt: skip
        for _ in range(100):
            first_s = asked.ttft_deadline_s - slack * work_s
            self.demand.taken(model, asked, first_s, work_s, now)
            self.demand.ended(model, "default", slack > 0.0, now)

    def calm(self) -> None:
        """Nobody came lately."""
        self.demand = Demand()

    @contextlib.contextmanager
    def held(self, model: str) -> Iterator[None]:
        """A request waits for the model's first replica."""
        self.models = (model,)
        with self.demand.holding(model):
            yield

    def close(self) -> None:
        self._server.close()

    def _show(self) -> Reply:
        self.asked += 1
        if self.silent:
            return Reply(b"not now\n", 503)
        now, demand = time.monotonic(), self.demand
        found = tuple(demand.of(name, now) for name in self.models)
        return json_reply(RouterDemand(window_s=WINDOW_S, models=found))
