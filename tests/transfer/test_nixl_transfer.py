"""NIXL itself between two processes: reads that end late, peers that are refused, idle sockets."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import msgspec
import pytest

from medha.adapters.transports import LOOPBACK, Transports
from medha.errors import EngineError
from medha.messages import Peer
from medha_worker.controller.kv_moves import LEASE_S
from medha_worker.kv.fetches import MoveTargets
from medha_worker.kv.page_mover import PageMover
from medha_worker.kv.pages import KvPages, PageEpochs
from medha_worker.kv.transfer import PageRead, ReadState, Transfer

PAGES, LAYERS, WITHIN_S = 60, range(2), 20.0
Reader = tuple[Transfer, KvPages]


def _serve(link: Connection, number: float) -> None:
    """Serve pages full of `number` until killed."""
    transfer, pool = _end("source")
    pool.memory.fill_(number)
    link.send(_peer(transfer, pool))
    while True:
        transfer.progress()
        time.sleep(0.001)


def _end(agent: str) -> Reader:
    # Sockets only: UCX reads shared memory without the source.
    links = Transports(interface=LOOPBACK, device="cpu", shared_memory=False, gpu_direct=False)
    os.environ.update(links.environment())
    from medha_worker.kv.nixl_transfer import NixlTransfer

    pool = KvPages(LAYERS, PAGES, 8, 64, 64)
    return NixlTransfer(agent, pool), pool


def _peer(transfer: Transfer, pool: KvPages) -> Peer:
    return Peer(
        group=0,
        agent=transfer.agent,
        metadata=transfer.metadata,
        bases=pool.bases,
        page_bytes=pool.page_bytes,
        pages=pool.pages,
    )


@pytest.fixture(scope="module")
def source() -> Iterator[tuple[int, Peer]]:
    """The pid and the address of a process full of sevens, forked before UCX has threads here."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(there, 7.0))
    process.start()
    assert process.pid is not None
    yield process.pid, here.recv()
    process.kill()
    process.join()


@pytest.fixture(scope="module")
def reader(source: tuple[int, Peer]) -> Reader:
    return _end("reader")


def until(done: Callable[[], bool], act: Callable[[], object]) -> None:
    ends = time.monotonic() + WITHIN_S
    while not done():
        assert time.monotonic() < ends
        act()


def end_of(reads: Sequence[PageRead], transfer: Transfer) -> set[ReadState]:
    until(lambda: all(read.state() is not ReadState.PENDING for read in reads), transfer.progress)
    return {read.state() for read in reads}


def ports(state: str) -> set[int]:
    """Local ports of sockets in a state of the kernel's table."""
    lines = pathlib.Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {int(line[1].split(":")[1], 16) for line in fields if line[3] == state}


def break_connections() -> None:
    """Shut every established connection of this process, as a network that fails does."""
    established = ports("01")
    for entry in pathlib.Path("/proc/self/fd").iterdir():
        if entry.is_socket():
            with socket.socket(fileno=os.dup(int(entry.name))) as shared:
                if shared.family == socket.AF_INET and shared.getsockname()[1] in established:
                    shared.shutdown(socket.SHUT_RDWR)


def test_a_refused_peer_leaves_nothing_behind(source: tuple[int, Peer], reader: Reader) -> None:
    transfer, _ = reader
    _, peer = source
    strangers = (
        msgspec.structs.replace(peer, agent="another"),
        msgspec.structs.replace(peer, bases=(64, 128)),
    )
    for stranger in strangers:
        with pytest.raises(EngineError, match=r"refused|cannot be reached"):
            transfer.connect(stranger)
        assert not transfer._nixl.check_remote_metadata("source")  # type: ignore[attr-defined]


def test_a_socket_that_its_client_closed_does_not_stay_while_nothing_moves(reader: Reader) -> None:
    listening, half_closed, before = "0A", "08", ports("0A")
    transfer, pool = _end("idle")
    opened, failures = ports(listening) - before, list[Exception]()
    targets = MoveTargets(1, PageEpochs(PAGES))
    mover = PageMover(transfer, pool, targets, print, failures.append, checked=False)
    for port in opened:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert opened
    mover.start()
    until(lambda: not opened & ports(half_closed), lambda: time.sleep(0.05))
    assert mover.stop() and not failures


def test_a_read_after_a_broken_connection_connects_again(
    source: tuple[int, Peer], reader: Reader
) -> None:
    _, peer = source
    transfer, _ = reader
    transfer.connect(peer)
    for _ in range(2):
        warm = transfer.read(0, 0, [0], [0])
        assert end_of([warm], transfer) == {ReadState.DONE}
        warm.close()
        break_connections()
        with contextlib.suppress(EngineError):  # UCX may notice before the read is posted
            broken = transfer.read(0, 0, [1], [1])
            assert end_of([broken], transfer) == {ReadState.FAILED}
            broken.close()
    transfer.disconnect(0)


def test_reads_from_a_machine_that_vanished_end_before_their_reader_is_given_up() -> None:
    links = Transports(interface=LOOPBACK, device="cpu", shared_memory=False, gpu_direct=False)
    ends_s = float(links.environment()["UCX_TCP_USER_TIMEOUT"].removesuffix("s"))
    assert LEASE_S < ends_s < 2 * LEASE_S


def test_no_data_lands_after_a_read_has_ended(source: tuple[int, Peer], reader: Reader) -> None:
    """A stopped source answers a read once it continues; until then the read has not ended, even
    if the source is forgotten. A killed source's read ends."""
    pid, peer = source
    transfer, pool = reader
    pages = list(range(PAGES))
    for last, end in ((signal.SIGCONT, ReadState.DONE), (signal.SIGKILL, ReadState.FAILED)):
        transfer.connect(peer)
        warm = transfer.read(0, 0, [0], [0])
        assert end_of([warm], transfer) == {ReadState.DONE}
        warm.close()
        os.kill(pid, signal.SIGSTOP)
        pool.memory.zero_()
        reads = [transfer.read(0, layer, pages, pages) for layer in LAYERS]
        transfer.disconnect(0)
        for _ in range(1000):
            transfer.progress()
        assert {read.state() for read in reads} == {ReadState.PENDING}
        os.kill(pid, last)
        assert end_of(reads, transfer) == {end}
        assert bool((pool.memory == 7.0).all()) == (end is ReadState.DONE)
        for read in reads:
            read.close()
        pool.memory.zero_()
        for _ in range(1000):
            transfer.progress()
        assert not pool.memory.any()
