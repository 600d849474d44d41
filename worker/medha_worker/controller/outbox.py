"""Outgoing messages as values; the process encodes each once and writes it to sockets.

Each rank and router receives its messages in the order in which they were added here.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from medha.messages import RankCommand, ReplicaMessage
from medha.topology import Coordinate


class ToRanks(msgspec.Struct, frozen=True):
    """Message for several ranks; encoded once."""

    ranks: tuple[Coordinate, ...]
    message: RankCommand


class ToRouter(msgspec.Struct, frozen=True):
    """Message for the router behind an endpoint of the config's `routers`."""

    router: str
    message: ReplicaMessage


class Redial(msgspec.Struct, frozen=True):
    """Close the link to this router with its unsent messages, and dial again."""

    router: str


Outgoing = ToRanks | ToRouter | Redial


class Outbox:
    """Collects outgoing messages until the process takes them."""

    def __init__(self) -> None:
        self._items: list[Outgoing] = []

    def to_ranks(self, ranks: Iterable[Coordinate], message: RankCommand) -> None:
        addressed = tuple(ranks)
        if addressed:
            self._items.append(ToRanks(addressed, message))

    def to_router(self, router: str, message: ReplicaMessage) -> None:
        self._items.append(ToRouter(router, message))

    def redial(self, router: str) -> None:
        """Drop the messages that wait for this router and request a new link."""
        self._items = [
            item
            for item in self._items
            if not (isinstance(item, ToRouter) and item.router == router)
        ]
        self._items.append(Redial(router))

    def take(self) -> list[Outgoing]:
        items, self._items = self._items, []
        return items
