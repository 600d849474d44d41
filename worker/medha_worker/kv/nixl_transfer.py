"""`Transfer` over NIXL (UCX): pages read directly from a peer's registered pool.

Descriptors of both pools are prepared once per peer from addresses that the peer sent over our own
link; a read then names indices only. NIXL's agent metadata is opaque and travels on the
authenticated link. NIXL refuses addresses that the peer did not register. There is no progress
thread, which would spin on a core: the mover calls `progress`. No other module imports nixl.
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
        self._peers: dict[int, _Remote] = {}

    def connect(self, peer: Peer) -> None:
        check_peer(peer, self._pool)
        known = self._peers.get(peer.group)
        if known is not None and known.peer == peer:
            return
        self.disconnect(peer.group)
        try:
            name = self._nixl.add_remote_agent(peer.metadata)
        except _ERRORS as error:
            raise EngineError(f"metadata of agent {peer.agent} is refused: {error}") from None
        agent = name.decode() if isinstance(name, bytes) else str(name)
        remote = _Remote(self._nixl, peer, agent)
        try:
            if agent != peer.agent:
                raise EngineError(f"metadata of agent {peer.agent} is that of {agent}: refused")
            remote.pages = self._prepare(agent, peer.bases, peer.pages)
            self._peers[peer.group] = remote
        except _ERRORS as error:
            raise EngineError(f"agent {peer.agent} cannot be reached: {error}") from None
        finally:
            if self._peers.get(peer.group) is not remote:
                remote.leave()

    def disconnect(self, group: int) -> None:
        remote = self._peers.pop(group, None)
        if remote is not None:
            remote.leave()

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> PageRead:
        remote = self._peers.get(group)
        peer = check_read(self._pool, remote.peer if remote else None, group, layer, theirs, ours)
        assert remote is not None
        if remote.broken and remote.idle:
            self.disconnect(group)
            self.connect(peer)
            remote = self._peers[group]
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
            return _NixlRead(self._nixl, handle, remote)
        except _ERRORS as error:
            remote.broken = True
            raise EngineError(f"agent {peer.agent} refuses a read: {error}") from None

    def progress(self) -> None:
        """Drive transfers that need this end's CPU."""
        with contextlib.suppress(*_ERRORS):  # a dead peer's reads report the failure
            self._nixl.get_new_notifs()

    def close(self) -> None:
        """Disconnect from all peers and deregister the memory."""
        for group in list(self._peers):
            self.disconnect(group)
        for end in (self._own.release, lambda: self._nixl.deregister_memory(self._registered)):
            with contextlib.suppress(*_ERRORS):  # the process is ending
                end()

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
    """A peer's agent. If it leaves, it is removed once its last read has ended: data of a read that
    is cancelled, or whose endpoint is closed, may still land. `broken`: a read failed, after which
    NIXL refuses others until the agent is added again."""

    def __init__(self, nixl: Any, peer: Peer, agent: str) -> None:
        self._nixl, self.peer, self._agent = nixl, peer, agent
        self.pages: Any = None
        self.broken = False
        self._reads, self._left = 0, False

    @property
    def idle(self) -> bool:
        """True if all reads have ended."""
        return not self._reads

    def begin(self) -> None:
        self._reads += 1

    def end(self) -> None:
        self._reads -= 1
        self._remove_if_over()

    def leave(self) -> None:
        self._left = True
        self._remove_if_over()

    def _remove_if_over(self) -> None:
        if not self._left or self._reads:
            return
        if self.pages is not None:
            with contextlib.suppress(*_ERRORS):  # NIXL frees the rest with the agent
                self.pages.release()
        with contextlib.suppress(*_ERRORS):  # it may be gone already
            self._nixl.remove_remote_agent(self._agent)


class _NixlRead:
    """A posted request; polled until terminal, then its state is kept."""

    def __init__(self, agent: Any, handle: Any, remote: _Remote) -> None:
        self._agent, self._handle, self._remote = agent, handle, remote
        self._state = self._state_of(agent.transfer(handle))
        remote.begin()

    def state(self) -> ReadState:
        if self._state is ReadState.PENDING:
            try:
                self._state = self._state_of(self._agent.check_xfer_state(self._handle))
            except _ERRORS:
                self._state = ReadState.FAILED
            self._remote.broken |= self._state is ReadState.FAILED
        return self._state

    def close(self) -> None:
        with contextlib.suppress(*_ERRORS):  # NIXL frees the rest with the agent
            self._handle.release()
        self._remote.end()

    @staticmethod
    def _state_of(status: str) -> ReadState:
        return {"DONE": ReadState.DONE, "PROC": ReadState.PENDING}.get(status, ReadState.FAILED)


def _indices(pages: Sequence[int], first: int) -> npt.NDArray[np.int32]:
    return np.asarray(pages, dtype=np.int32) + np.int32(first)
