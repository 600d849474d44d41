"""Interface by which KV pages cross between ranks, and its in-memory implementation.

The target READs: it writes only its own pages, so it can verify what it read by owner, epoch and
digest (see `page_leases` and `fetches`), and a dead or stale source can corrupt nothing. Peers
exchange numbers (base addresses, page size, page count), and every read is checked against them. A
read runs in the background until it is terminal; only then may the pages at either end be reused.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch

from medha.errors import EngineError
from medha.messages import Peer

DIGEST_BYTES = 8


class ReadState(enum.Enum):
    """State of a read: in progress, or terminal in one of two ways."""

    PENDING = "going"
    DONE = "done"
    FAILED = "failed"


class PagePool(Protocol):
    """The part of the KV pool that transfers need (`kv.pages.KvPages`)."""

    layers: range
    pages: int

    @property
    def page_bytes(self) -> int: ...

    @property
    def bases(self) -> tuple[int, ...]: ...

    def page(self, layer: int, page: int) -> torch.Tensor: ...


class PageRead(Protocol):
    """A read of pages of one layer from a peer."""

    def state(self) -> ReadState: ...

    def close(self) -> None:
        """Free the read's resources; call only once it is terminal."""
        ...


class Transfer(Protocol):
    """The transfer endpoint of a rank. All calls belong to one thread."""

    agent: str
    metadata: bytes

    def connect(self, peer: Peer) -> None:
        """Register the rank of a group, replacing an earlier one of that group.

        Raises EngineError if its pages differ in size or layers, or its metadata is refused.
        """
        ...

    def disconnect(self, group: int) -> None:
        """Forget the group's rank; ignores unknown groups.

        Its reads in progress end as if it were connected: only that ensures that no data lands
        later.
        """
        ...

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> PageRead:
        """Start copying pages `theirs` of a group's model layer `layer` into pages `ours`.

        Raises EngineError if the group is not connected, or a page or layer is out of range.
        """
        ...

    def progress(self) -> None:
        """Drive reads that need this end's CPU, its own and its peers', and take in what ended: a
        socket that its client closed stays open until then."""
        ...

    def close(self) -> None: ...


def check_peer(peer: Peer, pool: PagePool) -> None:
    """Raise EngineError unless the peer's pages match the pool's."""
    if peer.page_bytes != pool.page_bytes or len(peer.bases) != len(pool.layers) or peer.pages < 1:
        raise EngineError(
            f"peer {peer.agent} of group {peer.group} has {len(peer.bases)} layers of {peer.pages} "
            f"pages of {peer.page_bytes} bytes: must have {len(pool.layers)} layers of pages of "
            f"{pool.page_bytes} bytes; ranks of one column run one model and one page size"
        )


def check_read(
    pool: PagePool,
    peer: Peer | None,
    group: int,
    layer: int,
    theirs: Sequence[int],
    ours: Sequence[int],
) -> Peer:
    """Return the peer to read from. Raises EngineError if a group, layer or page does not exist."""
    if peer is None:
        raise EngineError(f"group {group} is not connected: its Peer message must come first")
    if layer not in pool.layers:
        raise EngineError(f"layer is {layer}: this rank holds {pool.layers}")
    if len(theirs) != len(ours) or not ours:
        raise EngineError(
            f"{len(theirs)} source pages for {len(ours)} target pages: must be equal, at least 1"
        )
    for name, pages, count in (("source", theirs, peer.pages), ("target", ours, pool.pages)):
        wrong = [page for page in pages if not 0 <= page < count]
        if wrong:
            raise EngineError(f"{name} page {wrong[0]} is out of range: the pool has {count} pages")
    return peer


def digest(page: torch.Tensor) -> bytes:
    """Return eight bytes that identify a page's content (SHA-256, which processors accelerate)."""
    content = page.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(content.data).digest()[:DIGEST_BYTES]


def sampled_layers(move: int, pages: int, layers: range) -> list[int]:
    """Return, for each page of a move, the layer whose digest both ends compare."""
    draws = (hashlib.blake2b(f"{move}:{i}".encode(), digest_size=8).digest() for i in range(pages))
    return [layers[int.from_bytes(draw, "little") % len(layers)] for draw in draws]


def digests(pool: PagePool, move: int, pages: Sequence[int]) -> bytes:
    """Return the sampled digests of a move's pages, in the move's order."""
    layers = sampled_layers(move, len(pages), pool.layers)
    return b"".join(
        digest(pool.page(layer, page)) for layer, page in zip(layers, pages, strict=True)
    )


@dataclasses.dataclass(eq=False)
class MemoryWorld:
    """Meeting place of in-memory transfers: agents by name, and injected faults.

    `steps`: polls that a read takes. Reads from `dead` agents fail; reads from `silent` agents
    never end by themselves.
    """

    steps: int = 1
    agents: dict[str, MemoryTransfer] = dataclasses.field(default_factory=dict)
    dead: set[str] = dataclasses.field(default_factory=set)
    silent: set[str] = dataclasses.field(default_factory=set)


class MemoryTransfer:
    """`Transfer` inside one process: the same checks, and copies between tensors."""

    def __init__(self, agent: str, pool: PagePool, world: MemoryWorld) -> None:
        self.agent, self.metadata = agent, agent.encode()
        self._pool, self._world = pool, world
        self._peers: dict[int, Peer] = {}
        world.agents[agent] = self

    def connect(self, peer: Peer) -> None:
        check_peer(peer, self._pool)
        if peer.metadata.decode(errors="replace") not in self._world.agents:
            raise EngineError(f"metadata of agent {peer.agent} is refused: unknown")
        self._peers[peer.group] = peer

    def disconnect(self, group: int) -> None:
        self._peers.pop(group, None)

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> PageRead:
        peer = check_read(self._pool, self._peers.get(group), group, layer, theirs, ours)
        source = self._world.agents[peer.metadata.decode()]
        row = layer - self._pool.layers.start
        if peer.bases[row] != source._pool.bases[row] or peer.pages > source._pool.pages:
            raise EngineError(f"address {peer.bases[row]:#x} is not registered by {peer.agent}")
        copies = [
            (source._pool.page(source._pool.layers[row], a), self._pool.page(layer, b))
            for a, b in zip(theirs, ours, strict=True)
        ]
        return _MemoryRead(peer, copies, self._world)

    def progress(self) -> None:
        """Do nothing: copies need no help of this end."""

    def close(self) -> None:
        self._peers.clear()


class _MemoryRead:
    """A read that copies a part of its pages at each poll."""

    def __init__(
        self,
        peer: Peer,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        world: MemoryWorld,
    ) -> None:
        self._peer, self._copies, self._world = peer, copies, world
        self._pages_per_poll = -(-len(copies) // max(1, world.steps))

    def state(self) -> ReadState:
        if not self._copies:
            return ReadState.DONE
        if self._peer.agent in self._world.dead:
            return ReadState.FAILED
        if self._peer.agent in self._world.silent:
            return ReadState.PENDING
        now, self._copies = (
            self._copies[: self._pages_per_poll],
            self._copies[self._pages_per_poll :],
        )
        for theirs, ours in now:
            ours.copy_(theirs)
        return ReadState.PENDING if self._copies else ReadState.DONE

    def close(self) -> None:
        self._copies = []
