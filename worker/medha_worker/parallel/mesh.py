"""Communicators of a rank: the own group's wiring, and KVP generations.

    generation 0   a KVP group's own wiring, once per incarnation of the group:
                   TP   the shards of one stage         SPP  the stages of one shard
    generation n   the KVP columns: one communicator per (stage, shard), members are groups

The controller numbers wirings and generations; the first rank of a group (of a generation: of its
first group) serves the store in which their members meet. A rank forms each in a separate thread,
so running work continues, and may hold several at once: a batch names the one it uses. A dissolved
generation, or one older than it, can neither be joined nor used. `kvp` defines what a column does
with partial attention; this module moves no tensor.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from medha.errors import EngineError, SetupError
from medha.messages import Form
from medha.topology import Coordinate, Topology
from medha_worker.device import ComputeDevice
from medha_worker.parallel.collectives import PeerLost
from medha_worker.parallel.communicator import Communicator, join


def serve_store(bind: str) -> tuple[TCPStore, str]:
    """Serve the rendezvous store on `host:port` only (port 0: any free port).

    Returns the store, which serves while it is referenced, and the address for `Form.store`. A path
    after the address (`host:port/path`) separates users of one store, so every wiring of a group
    has a new path. Raises SetupError if the port is taken.
    """
    host, _, port = bind.rpartition(":")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(4096)
    except (OSError, ValueError) as error:
        listener.close()
        raise SetupError(
            f"store_bind is {bind}: must be a free host:port of this machine ({error}); "
            "use another port, or 0 for any"
        ) from None
    bound = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        bound,
        None,
        True,
        timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{bound}"


def dial_store(address: str, timeout_s: float) -> Store:
    """Connect to the store at `host:port[/path]`. Raises PeerLost if nothing serves it."""
    place, _, path = address.partition("/")
    host, _, port = place.rpartition(":")
    if not host or not port.isdecimal():
        raise EngineError(f"Form.store is {address}: must be host:port or host:port/path")
    try:
        store = TCPStore(
            host, int(port), None, False, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        raise PeerLost(f"store {address} does not answer: {str(error).splitlines()[0]}") from None
    return PrefixStore(path, store) if path else store


class Wiring(msgspec.Struct, frozen=True):
    """Communicators of a rank inside its KVP group; None where it is alone in the dimension."""

    tp: Communicator | None
    spp: Communicator | None

    def abort(self) -> None:
        for communicator in (self.tp, self.spp):
            if communicator is not None:
                communicator.abort()


class Column(msgspec.Struct, frozen=True):
    """The KVP column of one generation; `members` are groups, ascending, by communicator rank.

    `communicator` is None in a generation of one group.
    """

    generation: int
    members: tuple[int, ...]
    communicator: Communicator | None

    def abort(self) -> None:
        if self.communicator is not None:
            self.communicator.abort()


class Mesh:
    """All communicators of a rank; any thread may call `form` and `dissolve`.

    `device` is the GPU that exchanges over NCCL; None for gloo.
    """

    def __init__(
        self,
        at: Coordinate,
        topology: Topology,
        *,
        incarnation: str,
        interface: str,
        timeout_s: float,
        device: ComputeDevice | None = None,
    ) -> None:
        self.at, self.topology, self._device = at, topology, device
        self._incarnation, self._interface, self._timeout_s = incarnation, interface, timeout_s
        self._lock = threading.Lock()
        self._columns: dict[int, Column] = {}
        self._dissolved = 0

    def wire(self, form: Form) -> Wiring:
        """Join the group's own TP and SPP communicators; blocks. Raises PeerLost.

        The prefix holds the group; the path in `form.store` separates its incarnations.
        """
        store = dial_store(form.store, form.timeout_s)
        at, name = self.at, f"g{self.at.group}"
        tp = self._join(store, f"{name}/tp/s{at.stage}", at.shard, self.topology.tp)
        spp = self._join(store, f"{name}/spp/t{at.shard}", at.stage, self.topology.spp)
        return Wiring(tp, spp)

    def form(self, form: Form, done: Callable[[int, str], None]) -> None:
        """Join the column of `form.generation` in the background, then call `done(generation,
        error)`."""
        thread = threading.Thread(
            target=self._form, args=(form, done), name=f"form-{form.generation}", daemon=True
        )
        thread.start()

    def column(self, generation: int) -> Column:
        """Return the column of a generation. Raises PeerLost if it never formed or is dissolved."""
        with self._lock:
            column = self._columns.get(generation)
            if column is None:
                held = ", ".join(map(str, sorted(self._columns))) or "none"
                raise PeerLost(
                    f"{self.at} holds no KVP column of generation {generation} (held: {held}): "
                    "form it first"
                )
            return column

    def dissolve(self, generation: int) -> None:
        """Close this generation and older ones; exchanges blocked in them fail at once."""
        with self._lock:
            self._dissolved = max(self._dissolved, generation)
            gone = [self._columns.pop(n) for n in sorted(self._columns) if n <= generation]
        for column in gone:
            column.abort()

    def close(self) -> None:
        """Close all generations, also those that are being formed."""
        self.dissolve(sys.maxsize)

    def _form(self, form: Form, done: Callable[[int, str], None]) -> None:
        try:
            self._hold(self._column(form))
        except EngineError as error:
            done(form.generation, str(error))
        else:
            done(form.generation, "")

    def _column(self, form: Form) -> Column:
        at, members = self.at, form.members
        self._check(form.generation, members)
        if len(members) == 1:
            return Column(form.generation, members, None)
        store = dial_store(form.store, form.timeout_s)
        name = f"kvp/{form.generation}/{at.stage}-{at.shard}"
        communicator = self._join(
            store, name, members.index(at.group), len(members), form.timeout_s
        )
        return Column(form.generation, members, communicator)

    def _hold(self, column: Column) -> None:
        with self._lock:
            stale = column.generation <= self._dissolved
            if not stale:
                self._columns[column.generation] = column
        if stale:
            column.abort()
            raise PeerLost(f"generation {column.generation} was dissolved while it formed")

    def _check(self, generation: int, members: Sequence[int]) -> None:
        if self.at.group not in members or list(members) != sorted(set(members)):
            raise EngineError(
                f"Form.members is {tuple(members)}: must ascend and hold group {self.at.group}"
            )
        with self._lock:
            if generation <= self._dissolved or generation in self._columns:
                raise EngineError(
                    f"Form.generation is {generation}: stale; must be above {self._dissolved} "
                    "and new"
                )

    def _join(
        self, store: Store, name: str, rank: int, size: int, join_s: float | None = None
    ) -> Communicator | None:
        if size == 1:
            return None
        return join(
            store,
            name,
            rank,
            size,
            incarnation=self._incarnation,
            interface=self._interface,
            timeout_s=self._timeout_s if join_s is None else min(join_s, self._timeout_s),
            device=self._device,
        )
