"""What the controller wants sent: values that the process shell encodes once and puts on sockets.

Order is kept: a rank or router gets its messages in the order in which they were written here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from medha.messages import RankCommand, ReplicaMessage
from medha.topology import Coordinate


class ToRanks(msgspec.Struct, frozen=True):
    """One message for several ranks; encoded once."""

    ranks: tuple[Coordinate, ...]
    message: RankCommand


class ToRouter(msgspec.Struct, frozen=True):
    """One message for the router behind an endpoint of the config's `routers`."""

    router: str
    message: ReplicaMessage


class Redial(msgspec.Struct, frozen=True):
    """Close the link to this router, with whatever waits on it, and dial anew."""

    router: str


Outgoing = ToRanks | ToRouter | Redial


class Outbox:
    """Collects outgoing messages until the shell takes them."""

    def __init__(self) -> None:
        self._items: list[Outgoing] = []

    def to_ranks(self, ranks: Iterable[Coordinate], message: RankCommand) -> None:
        addressed = tuple(ranks)
        if addressed:
            self._items.append(ToRanks(addressed, message))

    def to_router(self, router: str, message: ReplicaMessage) -> None:
        self._items.append(ToRouter(router, message))

    def redial(self, router: str) -> None:
        """Drops what still waits for this router and asks for a new link."""
        self._items = [
            item
            for item in self._items
            if not (isinstance(item, ToRouter) and item.router == router)
        ]
        self._items.append(Redial(router))

    def take(self) -> list[Outgoing]:
        items, self._items = self._items, []
        return items
