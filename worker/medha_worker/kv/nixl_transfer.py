"""`Transfer` over NIXL (UCX): pages read directly from a peer's registered pool.

Descriptors of both pools are prepared once per peer from addresses that the peer sent over our own
link; a read then names indices only. NIXL's agent metadata is opaque and travels on the
authenticated link. NIXL refuses addresses that the peer did not register. There is no progress
thread, which would spin on a core: `progress` is called while this rank reads or is read. No other
module imports nixl.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config

from medha.errors import EngineError, SetupError
from medha.messages import Peer
from medha_worker.kv.transfer import PagePool, PageRead, ReadState, check_peer, check_read

# All errors of NIXL, whose bindings define no common base class.
_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    ValueError,
    *(getattr(_bindings, name) for name in dir(_bindings) if name.endswith("Error")),
)


class NixlTransfer:
    """The NIXL agent of a rank over its KV pool. `device`: index of the CUDA device, None on CPU.

    Raises SetupError if UCX is not available. The pool must outlive this object.
    """

    def __init__(self, agent: str, pool: PagePool, device: int | None = None) -> None:
        self.agent, self._pool = agent, pool
        self._memory, self._device = ("DRAM", 0) if device is None else ("VRAM", device)
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        with self._errors("the agent does not start"):
            self._nixl = nixl_agent(agent, config)
            regions = [
                (base, pool.pages * pool.page_bytes, self._device, "") for base in pool.bases
            ]
            self._registered = self._nixl.register_memory(regions, self._memory)
            self.metadata: bytes = self._nixl.get_agent_metadata()
            self._own = self._prepare("NIXL_INIT_AGENT", pool.bases, pool.pages)
        self._known: dict[int, Peer] = {}
        self._peers: dict[int, _Remote] = {}

    def connect(self, peer: Peer) -> None:
        check_peer(peer, self._pool)
        self.disconnect(peer.group)
        self._reach(peer)
        self._known[peer.group] = peer

    def _reach(self, peer: Peer) -> _Remote:
        try:
            name = self._nixl.add_remote_agent(peer.metadata)
            known = name.decode() if isinstance(name, bytes) else str(name)
            if known != peer.agent:
                raise EngineError(f"metadata of agent {peer.agent} is that of {known}: refused")
            pages = self._prepare(known, peer.bases, peer.pages)
        except _ERRORS as error:
            raise EngineError(f"agent {peer.agent} cannot be reached: {error}") from None
        remote = self._peers[peer.group] = _Remote(peer, known, pages)
        return remote

    def disconnect(self, group: int) -> None:
        self._known.pop(group, None)
        self.reset(group)

    def reset(self, group: int) -> None:
        """Close the endpoint, the only certain way to end reads: after NIXL's cancel data may
        still land."""
        remote = self._peers.pop(group, None)
        if remote is not None:
            with contextlib.suppress(*_ERRORS):  # it may be gone already
                remote.pages.release()
                self._nixl.remove_remote_agent(remote.agent)

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> PageRead:
        peer = check_read(self._pool, self._known.get(group), group, layer, theirs, ours)
        remote = self._peers.get(group) or self._reach(peer)
        row = layer - self._pool.layers.start
        try:
            handle = self._nixl.make_prepped_xfer(
                "READ",
                self._own,
                _indices(ours, row * self._pool.pages),
                remote.pages,
                _indices(theirs, row * peer.pages),
                b"",
            )
            return _NixlRead(self._nixl, handle)
        except _ERRORS as error:
            raise EngineError(f"agent {remote.agent} refuses a read: {error}") from None

    def progress(self) -> None:
        """Drive transfers that need this end's CPU."""
        with contextlib.suppress(*_ERRORS):  # a dead peer's reads report the failure
            self._nixl.get_new_notifs()

    def close(self) -> None:
        """Disconnect from all peers and deregister the memory."""
        for group in list(self._known):
            self.disconnect(group)
        with contextlib.suppress(*_ERRORS):  # the process is ending
            self._own.release()
            self._nixl.deregister_memory(self._registered)

    def _prepare(self, agent: str, bases: Sequence[int], pages: int) -> Any:
        """Prepare a descriptor per (layer, page): index = layer × pages + page."""
        size = self._pool.page_bytes
        rows = np.array([(base, size, self._device, size, pages) for base in bases], np.uint64)
        return self._nixl.prep_xfer_dlist(agent, rows, self._memory)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except _ERRORS as error:
            raise SetupError(
                f"NIXL agent {self.agent}: {what} ({error}); check UCX_TLS and UCX_NET_DEVICES"
            ) from None


class _Remote:
    def __init__(self, peer: Peer, agent: str, pages: Any) -> None:
        self.peer, self.agent, self.pages = peer, agent, pages


class _NixlRead:
    """A posted request; polled until terminal, then its state is kept."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._state = self._state_of(agent.transfer(handle))

    def state(self) -> ReadState:
        if self._state is ReadState.PENDING:
            try:
                self._state = self._state_of(self._agent.check_xfer_state(self._handle))
            except _ERRORS:
                self._state = ReadState.FAILED
        return self._state

    def close(self) -> None:
        with contextlib.suppress(*_ERRORS):  # NIXL frees the rest with the agent
            self._handle.release()

    @staticmethod
    def _state_of(status: str) -> ReadState:
        return {"DONE": ReadState.DONE, "PROC": ReadState.PENDING}.get(status, ReadState.FAILED)


def _indices(pages: Sequence[int], first: int) -> npt.NDArray[np.int32]:
    return np.asarray(pages, dtype=np.int32) + np.int32(first)
