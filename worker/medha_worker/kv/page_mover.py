"""The thread that moves KV pages in the background while chunks run.

It owns the Transfer: connects peers, computes digests of leased pages, reads fetched pages, and
serves peers' reads. Other threads enqueue orders; results go to `report`. It polls seldom when
nothing moves. The step thread has checked page ownership before (`page_leases`,
`fetches.MoveTargets`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from medha.errors import EngineError
from medha.messages import Fetched, FetchPages, Offered, Peer, RankReport
from medha_worker.device import own_stream
from medha_worker.kv.fetches import Fetches, MoveTargets
from medha_worker.kv.page_leases import PageLease
from medha_worker.kv.transfer import PagePool, Transfer, digests

# Between two polls while a move runs (no wait after a poll that saw progress), and while none does.
_POLL_S = 0.0005
_IDLE_S = 0.25
# How long polls go on as in a move: reads of a move that was cancelled need both ends to end.
_AFTERWARDS_S = 1.0

_LOG = logging.getLogger("medha.transfer")


class PageMover:
    """The mover's thread; any thread may call its methods.

    `checked`: compute digests of sampled pages here, and compare them at the other end. `failed` is
    called with an error that ends the thread.
    """

    def __init__(
        self,
        transfer: Transfer,
        pool: PagePool,
        copies: MoveTargets,
        report: Callable[[RankReport], object],
        failed: Callable[[Exception], object],
        *,
        checked: bool,
    ) -> None:
        self._transfer, self._pool, self._copies = transfer, pool, copies
        self._report, self._failed, self._checked = report, failed, checked
        self._fetches = Fetches(transfer, pool)
        self._granted: set[int] = set()
        self._seen_bytes, self._moving_until = 0, 0.0
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> bool:
        """End the thread and close the transfer; False if that takes more than two seconds."""
        self._orders.put(None)
        self._thread.join(timeout=2.0)
        return not self._thread.is_alive()

    def connect(self, peer: Peer) -> None:
        self._orders.put(lambda: self._transfer.connect(peer))

    def forget(self, group: int) -> None:
        """Disconnect a lost group: reads from it fail."""
        self._orders.put(lambda: self._transfer.disconnect(group))

    def offer(self, lease: PageLease) -> None:
        """Report Offered, and serve reads until `withdraw`."""
        self._orders.put(lambda: self._offer(lease))

    def withdraw(self, move: int) -> None:
        """End a lease: the target reads no more."""
        self._orders.put(lambda: self._granted.discard(move))

    def fetch(self, order: FetchPages) -> None:
        """Read a move's pages; reports Fetched at the end."""
        self._orders.put(lambda: self._fetches.begin(order, time.monotonic()))

    def cancel(self, move: int) -> None:
        """Stop reading a move; reports Fetched(ok=False) once all reads are terminal."""
        self._orders.put(lambda: self._fetches.cancel(move, "the move was withdrawn"))

    def _run(self) -> None:
        try:
            # On the stream of the steps, each page's digest would wait for the batches launched.
            with own_stream(self._pool.page(self._pool.layers.start, 0).device):
                while self._run_orders():
                    self._transfer.progress()
                    for fetched in self._fetches.advance(time.monotonic()):
                        self._copies.landed(fetched.move, fetched.ok)
                        self._report(fetched)
        except Exception as error:  # the rank must not continue without its mover
            self._failed(error)
        finally:
            self._transfer.close()

    def _run_orders(self) -> bool:
        """Run queued orders, or wait a moment. Returns False when the thread must stop."""
        now = time.monotonic()
        if self._fetches.busy or self._granted:
            self._moving_until = now + _AFTERWARDS_S
        seen, self._seen_bytes = self._seen_bytes, self._fetches.moved_bytes
        moving = now < self._moving_until
        wait_s = 0.0 if seen != self._seen_bytes else _POLL_S if moving else _IDLE_S
        try:
            order = self._orders.get(timeout=wait_s)
            while order is not None:
                self._execute(order)
                order = self._orders.get_nowait()
        except queue.Empty:
            return True
        return False

    def _execute(self, order: Callable[[], None]) -> None:
        try:
            order()
        except EngineError as error:
            # The peer is unreachable: moves from it will fail and report why.
            _LOG.warning("KV transfers: %s", error)

    def _offer(self, lease: PageLease) -> None:
        move = lease.move
        self._granted.add(move.id)
        page_digests = digests(self._pool, move.id, move.from_pages) if self._checked else b""
        self._report(Offered(move.id, lease.epochs, page_digests))


def refused(move: int, error: Exception) -> Offered:
    """Return the reply to an offer that failed."""
    return Offered(move, (), b"", str(error)[:4096])


def not_fetched(move: int, error: Exception) -> Fetched:
    """Return the reply to a fetch that could not begin."""
    return Fetched(move, False, 0, 0.0, str(error)[:4096])
