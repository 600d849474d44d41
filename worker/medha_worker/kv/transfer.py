"""The seam through which pages of KV cross between ranks, and its in-memory twin.

The taker READs: it writes only its own pages, so that whatever it read can be judged afterwards by
owner, epoch and digest (see `grants` and `fetches`), and a dead or stale owner can spoil nothing.
Peers tell each other numbers (base addresses, page size, page count); a reference is checked
against them before anything moves. A read runs in the background until it is terminal; only then
may the pages at either end be used for something else.
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


class State(enum.Enum):
    """Of a read: under way, or terminal in one of two ways."""

    GOING = "going"
    DONE = "done"
    FAILED = "failed"


class Pool(Protocol):
    """What transfers need of the KV pool (`kv.pages.KvPages`)."""

    layers: range
    pages: int

    @property
    def page_bytes(self) -> int: ...

    @property
    def bases(self) -> tuple[int, ...]: ...

    def page(self, layer: int, page: int) -> torch.Tensor: ...


class Read(Protocol):
    """Pages of one layer on their way from a peer."""

    def state(self) -> State: ...

    def close(self) -> None:
        """Free its resources; only once terminal."""
        ...


class Transfer(Protocol):
    """One rank's end. All calls belong to one thread."""

    agent: str
    metadata: bytes

    def connect(self, peer: Peer) -> None:
        """Learn how to reach the rank of a group, replacing what was known of that group.

        Raises EngineError when its pages differ in size or layers, or its metadata is refused.
        """
        ...

    def disconnect(self, group: int) -> None:
        """The group's rank is gone: its reads fail. Unknown groups are ignored."""
        ...

    def reset(self, group: int) -> None:
        """Break the connection, so that reads from the group are terminal at once and nothing of
        theirs lands later; the next read connects anew."""
        ...

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> Read:
        """Begin to copy pages `theirs` of a group's model layer `layer` into pages `ours`.

        Raises EngineError when the group is not connected, or a page or layer is out of range.
        """
        ...

    def progress(self) -> None:
        """Let reads move on that need this end's CPU, its own and its peers'."""
        ...

    def close(self) -> None: ...


def check_peer(peer: Peer, pool: Pool) -> None:
    """Raises EngineError unless the peer's pages look like the pool's."""
    if peer.page_bytes != pool.page_bytes or len(peer.bases) != len(pool.layers) or peer.pages < 1:
        raise EngineError(
            f"peer {peer.agent} of group {peer.group} has {len(peer.bases)} layers of {peer.pages} "
            f"pages of {peer.page_bytes} bytes: must have {len(pool.layers)} layers of pages of "
            f"{pool.page_bytes} bytes; ranks of one column run one model and one page size"
        )


def check_read(
    pool: Pool, peer: Peer | None, group: int, layer: int, theirs: Sequence[int],
    ours: Sequence[int],
) -> Peer:  # fmt: skip
    """The peer to read from; raises EngineError for whatever does not exist."""
    if peer is None:
        raise EngineError(f"group {group} is not connected: its Peer message must come first")
    if layer not in pool.layers:
        raise EngineError(f"layer is {layer}: this rank holds {pool.layers}")
    if len(theirs) != len(ours) or not ours:
        raise EngineError(f"{len(theirs)} pages were to be read into {len(ours)}: must be equal")
    for name, pages, count in (("source", theirs, peer.pages), ("target", ours, pool.pages)):
        wrong = [page for page in pages if not 0 <= page < count]
        if wrong:
            raise EngineError(f"{name} page {wrong[0]} is out of range: the pool has {count} pages")
    return peer


def digest(page: torch.Tensor) -> bytes:
    """Eight bytes that name a page's content (SHA-256: processors have instructions for it)."""
    content = page.contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(content.data).digest()[:DIGEST_BYTES]


def sampled_layers(move: int, pages: int, layers: range) -> list[int]:
    """For each page of a move the layer whose digest both ends compare; the same at both."""
    draws = (hashlib.blake2b(f"{move}:{i}".encode(), digest_size=8).digest() for i in range(pages))
    return [layers[int.from_bytes(draw, "little") % len(layers)] for draw in draws]


def digests(pool: Pool, move: int, pages: Sequence[int]) -> bytes:
    """The sampled digests of a move's pages, in the move's order."""
    layers = sampled_layers(move, len(pages), pool.layers)
    return b"".join(
        digest(pool.page(layer, page)) for layer, page in zip(layers, pages, strict=True)
    )


@dataclasses.dataclass(eq=False)
class MemoryWorld:
    """Where in-memory twins meet: agents by name, and faults to play.

    `steps`: polls that a read takes. `dead`: agents from which reads fail; `silent`: agents from
    which reads never end by themselves.
    """

    steps: int = 1
    agents: dict[str, MemoryTransfer] = dataclasses.field(default_factory=dict)
    dead: set[str] = dataclasses.field(default_factory=set)
    silent: set[str] = dataclasses.field(default_factory=set)


class MemoryTransfer:
    """`Transfer` inside one process: the same checks, copies between tensors."""

    def __init__(self, agent: str, pool: Pool, world: MemoryWorld) -> None:
        self.agent, self.metadata = agent, agent.encode()
        self._pool, self._world = pool, world
        self._peers: dict[int, Peer] = {}
        self._resets: dict[int, int] = {}
        world.agents[agent] = self

    def connect(self, peer: Peer) -> None:
        check_peer(peer, self._pool)
        if peer.metadata.decode(errors="replace") not in self._world.agents:
            raise EngineError(f"metadata of agent {peer.agent} is refused: unknown")
        self._peers[peer.group] = peer

    def disconnect(self, group: int) -> None:
        self._peers.pop(group, None)

    def reset(self, group: int) -> None:
        self._resets[group] = self._resets.get(group, 0) + 1

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> Read:
        peer = check_read(self._pool, self._peers.get(group), group, layer, theirs, ours)
        source = self._world.agents[peer.metadata.decode()]
        row = layer - self._pool.layers.start
        if peer.bases[row] != source._pool.bases[row] or peer.pages > source._pool.pages:
            raise EngineError(f"address {peer.bases[row]:#x} is not registered by {peer.agent}")
        copies = [
            (source._pool.page(source._pool.layers[row], a), self._pool.page(layer, b))
            for a, b in zip(theirs, ours, strict=True)
        ]
        return _MemoryRead(self, peer, copies, self._world)

    def progress(self) -> None:
        """Nothing needs this end."""

    def close(self) -> None:
        self._peers.clear()

    def link(self, group: int) -> tuple[Peer | None, int]:
        """Changes when the connection to a group does."""
        return self._peers.get(group), self._resets.get(group, 0)


class _MemoryRead:
    """Copies a part of its pages at each poll."""

    def __init__(
        self,
        owner: MemoryTransfer,
        peer: Peer,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        world: MemoryWorld,
    ) -> None:
        self._owner, self._peer, self._copies, self._world = owner, peer, copies, world
        self._each = -(-len(copies) // max(1, world.steps))
        self._link = owner.link(peer.group)

    def state(self) -> State:
        if not self._copies:
            return State.DONE
        if self._peer.agent in self._world.dead or self._link != self._owner.link(self._peer.group):
            return State.FAILED
        if self._peer.agent in self._world.silent:
            return State.GOING
        now, self._copies = self._copies[: self._each], self._copies[self._each :]
        for theirs, ours in now:
            ours.copy_(theirs)
        return State.GOING if self._copies else State.DONE

    def close(self) -> None:
        self._copies = []
