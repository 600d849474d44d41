"""Stand-ins for controllers and routers: real ops ports with the content that a test defines.

The ports, their routes and the counting of demand are real; only the input is simulated.
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
from medha.fleet.demand import WINDOW_S, WORK_FLOOR_S, DemandWindow
from medha.messages import GroupStatus, ReplicaStatus, RouterDemand
from medha.request import Request

_NETWORKS = itertools.count()
PLACES = 1024


class Leaders:
    """A controller for each leader pod, on a loopback address of its own; the other pods share one.

    `load` is the number of requests that run on each; a controller that drains finishes them at
    once.
    """

    def __init__(self) -> None:
        network = ipaddress.ip_address(f"127.{64 + os.getpid() % 128}.0.0")
        self._first = network + PLACES * (next(_NETWORKS) % 64)
        self._metrics = Metrics("controller")
        self._servers: dict[str, OpsServer] = {}
        self._places: dict[str, int] = {}
        self.load: dict[str, int] = {}
        self.draining: set[str] = set()
        self.busy: set[str] = set()
        """Leaders whose requests go on while they drain."""
        self.wanted: dict[str, int] = {}
        self.least: Callable[[str], int] = lambda pod: 1
        """Number of groups that a leader wants on its own account."""

    def address(self, pod: str) -> str:
        """The pod's address; a leader's controller starts to listen there."""
        if not pod.endswith("-g0-s0"):
            return str(self._first + PLACES - 1)
        place = self._places.setdefault(pod, len(self._places) + 1)
        assert place < PLACES - 1, f"{pod}: no address is left for so many leaders"
        address = str(self._first + place)
        if address not in self._servers:
            self.listen(pod, address)
        self.draining.discard(pod)  # a new pod of that name starts afresh
        self.wanted.pop(pod, None)
        return address

    def listen(self, pod: str, address: str) -> None:
        """Start the controller of a leader pod at an address; one that was there ends."""
        if former := self._servers.pop(address, None):
            former.close()
        self._servers[address] = OpsServer(
            address,
            CONTROLLER_OPS_PORT,
            self._metrics,
            alive=lambda: True,
            ready=lambda: True,
            routes={
                "GET /status": lambda: json_reply(self._status(pod)),
                "POST /drain": lambda: self._drain(pod),
            },
        )

    def close(self) -> None:
        for server in self._servers.values():
            server.close()

    def _drain(self, pod: str) -> Reply:
        self.draining.add(pod)
        self.load[pod] = self.load.get(pod, 0) if pod in self.busy else 0
        return json_reply({"draining": True}, 202)

    def _status(self, pod: str) -> ReplicaStatus:
        match = re.fullmatch(r"(.+)-g0-s0", pod)
        wanted = self.wanted.get(pod) or self.least(pod)
        return ReplicaStatus(
            replica=match.group(1) if match else pod,
            ready=True,
            draining=pod in self.draining,
            generation=1,
            wanted_groups=wanted,
            routers=1,
            running=self.load.get(pod, 0),
            groups=tuple(
                GroupStatus(group=index, state="running", pages=100, free_pages=100)
                for index in range(wanted)
            ),
        )


class Router:
    """A router's ops port; `demand` is what it counts, `silent` makes it stop answering."""

    def __init__(self) -> None:
        self.demand = DemandWindow()
        self.models: tuple[str, ...] = ()
        self.silent = False
        self.polls = 0
        self._server = OpsServer(
            "127.0.0.1",
            0,
            Metrics("router"),
            alive=lambda: True,
            ready=lambda: True,
            routes={"GET /demand": self._show},
        )

    @property
    def settings(self) -> dict[str, str]:
        """The settings with which an operator finds it."""
        return {
            "MEDHA_ROUTER": "tcp://127.0.0.1:7800",
            "MEDHA_ROUTER_OPS_PORT": str(self._server.port),
        }

    def offer(self, model: str, slack: float, load: float) -> None:
        """Offer a hundred requests with this slack, where an idle replica would have left them more
        (four times their work), that fill `load` replicas."""
        demand = DemandWindow()
        now, work_s = time.monotonic(), max(WORK_FLOOR_S, load * WINDOW_S / 100)
        request = Request(
            id="",
            arrival_s=now,
            prompt_tokens=1,
            work_s=work_s,
            ttft_deadline_s=(1.0 + max(4.0, slack)) * work_s,
        )
        for _ in range(100):
            first_s = request.ttft_deadline_s - slack * work_s
            demand.taken(model, request, first_s, work_s, now)
            demand.ended(model, "default", slack > 0.0, now)
        self.models, self.demand = (model,), demand  # a poll never counts a part of them

    def calm(self) -> None:
        """Drop all demand."""
        self.demand = DemandWindow()

    @contextlib.contextmanager
    def held(self, model: str) -> Iterator[None]:
        """Keep a request waiting for the model's first replica."""
        self.models = (model,)
        with self.demand.holding(model):
            yield

    def close(self) -> None:
        self._server.close()

    def _show(self) -> Reply:
        self.polls += 1
        if self.silent:
            return Reply(b"not now\n", 503)
        now, demand = time.monotonic(), self.demand
        demands = tuple(demand.of(name, now) for name in self.models)
        return json_reply(RouterDemand(window_s=WINDOW_S, models=demands))
