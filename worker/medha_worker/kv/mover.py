"""The thread that moves KV pages in the background while chunks go on.

It owns the Transfer: connects peers, computes the digests of what this rank grants, reads what it
fetches, and lets peers read. Orders come from other threads; answers go to `report`. It spends no
time when nothing moves. Whether a page may be given or taken was decided before, by the thread of
the steps (`grants`, `fetches.Copies`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from medha.errors import EngineError
from medha.messages import Fetched, FetchPages, Offered, Peer, RankReport
from medha_worker.kv.fetches import Copies, Fetches
from medha_worker.kv.grants import Grant
from medha_worker.kv.transfer import Pool, Transfer, digests

# Between two polls while something is under way (no time at all after one that found that something
# had moved), and between two looks at a quiet agent.
_POLL_S = 0.0005
_QUIET_S = 0.25

_LOG = logging.getLogger("medha.transfer")


class Mover:
    """Runs until `stop`. Methods other than `run` may be called from any thread.

    `checked`: digests of sampled pages are computed here and compared at the other end. `failed`
    hears of an error that ends the thread.
    """

    def __init__(
        self,
        transfer: Transfer,
        pool: Pool,
        copies: Copies,
        report: Callable[[RankReport], object],
        failed: Callable[[Exception], object],
        *,
        checked: bool,
    ) -> None:
        self._transfer, self._pool, self._copies = transfer, pool, copies
        self._report, self._failed, self._checked = report, failed, checked
        self._fetches = Fetches(transfer, pool)
        self._granted: set[int] = set()
        self._seen_bytes = 0
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mover", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the transfer; waits a little for it."""
        self._orders.put(None)
        self._thread.join(timeout=2.0)

    def connect(self, peer: Peer) -> None:
        self._orders.put(lambda: self._transfer.connect(peer))

    def forget(self, group: int) -> None:
        """The group is gone: reads from it fail."""
        self._orders.put(lambda: self._transfer.disconnect(group))

    def offer(self, grant: Grant) -> None:
        """Answer Offered, and let the taker read until `withdraw`."""
        self._orders.put(lambda: self._offer(grant))

    def withdraw(self, move: int) -> None:
        """The taker reads no more."""
        self._orders.put(lambda: self._granted.discard(move))

    def fetch(self, order: FetchPages) -> None:
        """Read a move's pages; answers Fetched when it is over."""
        self._orders.put(lambda: self._fetches.begin(order, time.monotonic()))

    def cancel(self, move: int) -> None:
        """Stop reading a move; answers Fetched(ok=False) once every read is terminal."""
        self._orders.put(
            lambda: self._fetches.cancel(move, "the move was withdrawn", time.monotonic())
        )

    def _run(self) -> None:
        try:
            while self._obey():
                if self._fetches.busy or self._granted:
                    self._transfer.progress()
                for fetched in self._fetches.advance(time.monotonic()):
                    self._copies.landed(fetched.move, fetched.ok)
                    self._report(fetched)
        except Exception as error:  # the rank must not go on without its mover
            self._failed(error)
        finally:
            self._transfer.close()

    def _obey(self) -> bool:
        """Carry out what was ordered, or wait a moment; False when it is time to stop."""
        moving = self._fetches.busy or bool(self._granted)
        seen, self._seen_bytes = self._seen_bytes, self._fetches.moved_bytes
        wait_s = 0.0 if seen != self._seen_bytes else _POLL_S if moving else _QUIET_S
        try:
            order = self._orders.get(timeout=wait_s)
            while order is not None:
                self._carry_out(order)
                order = self._orders.get_nowait()
        except queue.Empty:
            return True
        return False

    def _carry_out(self, order: Callable[[], None]) -> None:
        try:
            order()
        except EngineError as error:
            # A peer that cannot be reached: moves from it will fail and say why.
            _LOG.warning("KV transfers: %s", error)

    def _offer(self, grant: Grant) -> None:
        move = grant.move
        self._granted.add(move.id)
        told = digests(self._pool, move.id, move.from_pages) if self._checked else b""
        self._report(Offered(move.id, grant.epochs, told))


def refused(move: int, error: Exception) -> Offered:
    """The answer to an offer that cannot be made."""
    return Offered(move, (), b"", str(error)[:4096])


def not_fetched(move: int, error: Exception) -> Fetched:
    """The answer to a fetch that cannot begin."""
    return Fetched(move, False, 0, 0.0, str(error)[:4096])
