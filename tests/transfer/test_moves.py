"""Moves of KV pages in memory: no reference, however wrong, yields a wrong page."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest
import torch

from medha.batch import Move
from medha.errors import EngineError
from medha.messages import Fetched, FetchPages, Peer
from medha_worker.kv.fetches import Fetches, MoveTargets
from medha_worker.kv.page_leases import PageLeases
from medha_worker.kv.pages import KvPages, PageEpochs
from medha_worker.kv.transfer import MemoryTransfer, MemoryWorld, digests

PAGES, LAYERS = 24, range(3, 6)


class Side:
    """Rank at one end of a move: pool, epochs, grants, copies, reads."""

    def __init__(self, group: int, world: MemoryWorld, pages: int = PAGES) -> None:
        self.kv = KvPages(LAYERS, pages, 1, 4, 2)
        self.epochs = PageEpochs(pages)
        self.leases, self.copies = PageLeases(group, self.epochs), MoveTargets(group, self.epochs)
        self.transfer = MemoryTransfer(f"g{group}", self.kv, world)
        self.fetches = Fetches(self.transfer, self.kv)
        self.group = group

    def peer(self) -> Peer:
        return Peer(
            group=self.group,
            agent=self.transfer.agent,
            metadata=self.transfer.metadata,
            bases=self.kv.bases,
            page_bytes=self.kv.page_bytes,
            pages=self.kv.pages,
        )

    def write(self, page: int, value: float) -> None:
        """Hand out the page and fill it, as a sequence does."""
        self.epochs.hand_out([page])
        self.kv.memory[:, page] = value

    def content(self, page: int) -> torch.Tensor:
        return self.kv.memory[:, page].clone()


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld()


@pytest.fixture
def source(world: MemoryWorld) -> Side:
    side = Side(0, world)
    for page in range(PAGES):
        side.write(page, float(page + 1))
    return side


@pytest.fixture
def target(world: MemoryWorld, source: Side) -> Side:
    side = Side(1, world)
    side.transfer.connect(source.peer())
    return side


def move_of(from_pages: tuple[int, ...], to_pages: tuple[int, ...], id: int = 1) -> Move:
    return Move(
        id=id,
        seq=7,
        source=0,
        target=1,
        logical=tuple(range(len(from_pages))),
        from_pages=from_pages,
        to_pages=to_pages,
    )


def order_for(source: Side, move: Move, lease_s: float = 30.0, now: float = 0.0) -> FetchPages:
    """Offer a move; returns the fetch that the controller sends in answer."""
    held = dict(zip(move.logical, move.from_pages, strict=True))
    lease = source.leases.offer(move, held, None, lease_s, now)
    return FetchPages(move, lease.epochs, digests(source.kv, move.id, move.from_pages), lease_s)


def fetched(target: Side, order: FetchPages, now: float = 0.0) -> Fetched:
    target.copies.reserve(order.move, ())
    target.fetches.begin(order, now)
    return finished(target, now)


def finished(target: Side, now: float, polls: int = 100) -> Fetched:
    for _ in range(polls):
        for result in target.fetches.advance(now):
            target.copies.landed(result.move, result.ok)
            return result
    raise AssertionError("the move is not over")


def test_a_move_copies_all_layers_and_can_be_switched(source: Side, target: Side) -> None:
    move = move_of((3, 5, 20), (0, 9, 4))
    result = fetched(target, order_for(source, move))
    assert result.ok and result.moved_bytes == 3 * 3 * source.kv.page_bytes
    assert source.leases.withdraw(move.id, 1.0).intact
    target.copies.switch(move)
    for theirs, ours in zip(move.from_pages, move.to_pages, strict=True):
        assert torch.equal(source.content(theirs), target.content(ours))


def test_a_page_reused_during_the_grant_is_reported(source: Side, target: Side) -> None:
    move = move_of((3, 5), (0, 1))
    order = order_for(source, move)
    source.write(5, 99.0)
    assert not fetched(target, order).ok, "digests differ"
    assert not source.leases.withdraw(move.id, 1.0).intact


def test_a_page_rewritten_with_equal_content_is_reported(source: Side, target: Side) -> None:
    """Equal content proves nothing: the epoch has changed."""
    move = move_of((3,), (0,))
    order = order_for(source, move)
    source.write(3, 4.0)
    assert fetched(target, order).ok
    assert not source.leases.withdraw(move.id, 1.0).intact


def test_a_grant_that_outlives_its_lease_is_not_intact(source: Side) -> None:
    order_for(source, move_of((3,), (0,)), lease_s=30.0)
    assert not source.leases.withdraw(1, 31.0).intact
    assert not source.leases.withdraw(1, 0.0).intact, "a grant ends once"
    assert not source.leases.withdraw(2, 0.0).intact, "unknown"


@pytest.mark.parametrize("error", ["lease", "withdrawn"])
def test_a_failed_move_waits_for_its_reads(
    world: MemoryWorld, source: Side, target: Side, error: str
) -> None:
    """Pages go to another sequence afterwards: what landed then would be read as its keys."""
    order = order_for(source, move_of((3, 4), (0, 1)), lease_s=30.0)
    world.silent.add("g0")
    target.copies.reserve(order.move, ())
    target.fetches.begin(order, 0.0)
    assert target.fetches.advance(0.1) == []
    if error == "withdrawn":
        target.fetches.cancel(1, "the move was withdrawn")
    target.transfer.disconnect(0)
    now = 3000.0 if error == "lease" else 1.0
    for _ in range(3):
        assert target.fetches.advance(now) == []
    world.silent.clear()
    result = finished(target, now)
    assert not result.ok and error in result.error
    assert not target.fetches.busy


def test_a_source_that_dies_ends_the_move_at_once(
    world: MemoryWorld, source: Side, target: Side
) -> None:
    world.steps = 1000
    order = order_for(source, move_of((3, 4), (0, 1)))
    target.copies.reserve(order.move, ())
    target.fetches.begin(order, 0.0)
    target.fetches.advance(0.1)
    world.dead.add("g0")
    assert not finished(target, 0.2, polls=3).ok
    target.copies.landed(1, False)
    target.copies.reserve(move_of((3, 4), (0, 1), id=2), ())  # its pages are free again


def test_a_copy_is_switched_once_and_only_whole(source: Side, target: Side) -> None:
    move = move_of((3,), (0,))
    with pytest.raises(EngineError, match="no whole copy"):
        target.copies.switch(move)
    target.copies.reserve(move, ())
    with pytest.raises(EngineError, match="no whole copy"):
        target.copies.switch(move)
    target.copies.landed(move.id, True)
    with pytest.raises(EngineError, match="no whole copy"):
        target.copies.switch(msgspec.structs.replace(move, to_pages=(1,)))
    target.copies.switch(move)
    with pytest.raises(EngineError, match="no whole copy"):
        target.copies.switch(move)


def test_a_copy_whose_pages_went_elsewhere_is_not_used(source: Side, target: Side) -> None:
    move = move_of((3,), (0,))
    assert fetched(target, order_for(source, move)).ok
    target.write(0, 5.0)
    with pytest.raises(EngineError, match="reused"):
        target.copies.switch(move)


def test_target_pages_in_use_are_not_overwritten(source: Side, target: Side) -> None:
    with pytest.raises(EngineError, match="in use"):
        target.copies.reserve(move_of((3,), (5,)), {5})
    target.copies.reserve(move_of((3,), (6,)), ())
    with pytest.raises(EngineError, match="in use"):
        target.copies.reserve(move_of((4,), (6,), id=2), ())


def test_a_peer_of_another_shape_is_refused(source: Side, target: Side) -> None:
    peer = source.peer()
    for wrong in (
        msgspec.structs.replace(peer, page_bytes=peer.page_bytes * 2),
        msgspec.structs.replace(peer, bases=peer.bases[:-1]),
        msgspec.structs.replace(peer, pages=0),
        msgspec.structs.replace(peer, metadata=b"nobody"),
    ):
        with pytest.raises(EngineError):
            target.transfer.connect(wrong)


@dataclasses.dataclass
class Forgery:
    """A random reference: right in most things, wrong in some."""

    dice: random.Random
    truth: dict[int, int]  # the sequence's logical page -> page id at the source

    def move(self, id: int) -> Move:
        d = self.dice
        count = d.randint(1, 4)
        logical = d.sample(sorted(self.truth), count)
        pages = [self.truth[n] for n in logical]
        targets = d.sample(range(PAGES), count)
        move = Move(
            id=id if d.random() < 0.9 else max(1, id - 1),
            seq=7,
            source=0,
            target=1,
            logical=tuple(logical),
            from_pages=tuple(pages),
            to_pages=tuple(targets),
        )
        return self._spoilt(move) if d.random() < 0.5 else move

    def _spoilt(self, move: Move) -> Move:
        d, any_page = self.dice, self.dice.randint(-3, 2 * PAGES)
        change = d.choice(["from", "to", "logical", "short", "twice", "groups"])
        match change:
            case "from":
                return msgspec.structs.replace(move, from_pages=(any_page, *move.from_pages[1:]))
            case "to":
                return msgspec.structs.replace(move, to_pages=(any_page, *move.to_pages[1:]))
            case "logical":
                return msgspec.structs.replace(move, logical=(any_page, *move.logical[1:]))
            case "short":
                return msgspec.structs.replace(move, to_pages=move.to_pages[1:])
            case "twice":
                return msgspec.structs.replace(
                    move, to_pages=(move.to_pages[0],) * len(move.to_pages)
                )
            case _:
                return msgspec.structs.replace(move, source=d.randrange(3), target=d.randrange(3))

    def order(self, order: FetchPages) -> FetchPages:
        """Order as it arrives at the target, perhaps changed on the way."""
        d = self.dice
        if d.random() < 0.8:
            return order
        match d.choice(["epochs", "digests", "pages"]):
            case "epochs":
                return msgspec.structs.replace(order, epochs=order.epochs[1:])
            case "digests":
                flipped = bytes([order.digests[0] ^ 1]) + order.digests[1:]
                return msgspec.structs.replace(order, digests=flipped)
            case _:
                pages = (d.randint(-2, PAGES + 2), *order.move.from_pages[1:])
                move = msgspec.structs.replace(order.move, from_pages=pages)
                return msgspec.structs.replace(order, move=move)


def test_ten_thousand_references_never_bring_a_wrong_page(
    world: MemoryWorld, source: Side, target: Side
) -> None:
    """Stale, reused, out-of-range and forged references fail; correct ones copy their pages."""
    dice = random.Random(8)
    logical = dice.sample(range(40), 12)
    truth = dict(zip(logical, dice.sample(range(PAGES), 12), strict=True))
    forger, used, good, refused = Forgery(dice, truth), 100.0, 0, 0
    in_use = set(dice.sample(range(PAGES), 5))
    protected = {page: target.content(page) for page in in_use}
    for number in range(1, 10_001):
        move = forger.move(number)
        partial = dice.choice([None, None, *truth])
        was = {page: source.content(page) for page in truth.values()}
        try:
            lease = source.leases.offer(move, truth, partial, 30.0, now=float(number))
            sums = digests(source.kv, move.id, move.from_pages)
            order = forger.order(FetchPages(move, lease.epochs, sums, 30.0))
            target.copies.reserve(order.move, in_use)
        except EngineError:
            refused += 1
            source.leases.withdraw(move.id, float(number))
            continue
        if dice.random() < 0.15:  # the source gives a page to another sequence meanwhile
            used += 1.0
            source.write(dice.choice(sorted(truth.values())), used)
        target.fetches.begin(order, float(number))
        result = finished(target, float(number))
        intact = source.leases.withdraw(move.id, float(number)).intact
        if not (result.ok and intact):
            refused += 1
            target.copies.landed(order.move.id, False)
            continue
        target.copies.switch(order.move)
        good += 1
        for theirs, ours in zip(move.from_pages, order.move.to_pages, strict=True):
            assert torch.equal(was[theirs], target.content(ours)), f"trial {number}"
            assert theirs in truth.values() and ours not in in_use
    assert good > 2000 and refused > 2000
    assert all(torch.equal(target.content(page), was) for page, was in protected.items())
    assert not target.fetches.busy
    target.copies.reserve(move_of(tuple(range(PAGES)), tuple(range(PAGES)), id=20_000), ())
