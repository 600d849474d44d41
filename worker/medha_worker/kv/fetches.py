"""The target side of a move: pages read layer by layer, verified by digest, kept until the switch.

    begin     the target pages are free here, and get a new epoch
    advance   polls the reads; a move ends when all layers are read and the digests agree, when a
              read failed, when it was cancelled, or when its lease ran out; never before all its
              reads are terminal
    switch    the copy is used only if its pages still have that epoch; otherwise an error

Reads run in the background, several layers ahead of the poll. `now` is seconds on the caller's
clock. The step thread owns the epochs and the mover's thread the reads, so they are two classes:
`MoveTargets` (page ownership) and `Fetches` (reads in progress).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection

from medha.batch import Move
from medha.errors import EngineError
from medha.messages import Fetched, FetchPages
from medha_worker.kv.page_leases import check_move
from medha_worker.kv.pages import PageEpochs
from medha_worker.kv.transfer import DIGEST_BYTES, PagePool, PageRead, ReadState, Transfer, digests


class MoveTargets:
    """Target pages of moves, from fetch to switch; any thread may call `landed`."""

    def __init__(self, group: int, epochs: PageEpochs) -> None:
        self._group, self._epochs = group, epochs
        self._epochs_at: dict[int, tuple[Move, tuple[int, ...]]] = {}
        self._whole: set[int] = set()
        self._lock = threading.Lock()

    def __contains__(self, move: int) -> bool:
        return move in self._epochs_at

    def reserve(self, move: Move, in_use: Collection[int]) -> None:
        """Claim a move's target pages. Raises EngineError if they are out of range or in use."""
        check_move(move)
        if move.target != self._group:
            raise EngineError(
                f"move {move.id} has target {move.target}: this is group {self._group}"
            )
        self._epochs.check(move.to_pages)
        with self._lock:
            if move.id in self._epochs_at:
                raise EngineError(f"move {move.id} is in progress already: a move id is used once")
            # A completed copy gives way: pages named again were released.
            taken = {
                page
                for held, _ in self._epochs_at.values()
                if held.id not in self._whole
                for page in held.to_pages
            }
            taken.update(in_use)
            if not taken.isdisjoint(move.to_pages):
                page = min(taken.intersection(move.to_pages))
                raise EngineError(f"target page {page} of move {move.id} is in use: stale move")
            self._epochs.hand_out(move.to_pages)
            for held, epochs in list(self._epochs_at.values()):
                if self._epochs.of(held.to_pages) != epochs:
                    self._drop(held.id)
            self._epochs_at[move.id] = (move, self._epochs.of(move.to_pages))

    def landed(self, move: int, ok: bool) -> None:
        """Record the end of a fetch; a failed one releases its pages. Any thread may call."""
        with self._lock:
            if ok and move in self._epochs_at:
                self._whole.add(move)
            else:
                self._drop(move)

    def whole(self, move: int) -> bool:
        """Return True if the copy is complete."""
        return move in self._whole

    def switch(self, move: Move) -> None:
        """Hand the copy to its sequence. Raises EngineError unless it is complete and untouched."""
        with self._lock:
            held, epochs = self._epochs_at.get(move.id, (None, ()))
            if held != move or move.id not in self._whole:
                raise EngineError(f"move {move.id} switches, but no whole copy is here: recompute")
            self._drop(move.id)
        if self._epochs.of(move.to_pages) != epochs:
            raise EngineError(f"target pages of move {move.id} were reused: recompute")

    def _drop(self, move: int) -> None:
        self._epochs_at.pop(move, None)
        self._whole.discard(move)


@dataclasses.dataclass(slots=True)
class _Fetch:
    """A move being read; layers from `next_layer` on are not requested yet."""

    order: FetchPages
    began: float
    until: float
    next_layer: int
    reads: list[PageRead]
    read_bytes: int = 0
    error: str = ""


class Fetches:
    """Reads of all moves of a rank. Belongs to the mover's thread.

    Each move reads at least two layers ahead, and more up to `readahead_bytes`: a fast link
    finishes a few pages between polls. A failed move waits until its reads end, which they do if
    their source continues or dies. `moved_bytes` counts finished reads.
    """

    def __init__(self, transfer: Transfer, pool: PagePool, readahead_bytes: int = 64 << 20) -> None:
        self._transfer, self._pool, self._readahead_bytes = transfer, pool, readahead_bytes
        self.moved_bytes = 0
        self._fetches: dict[int, _Fetch] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fetches)

    def begin(self, order: FetchPages, now: float) -> None:
        """Start a move whose target pages are reserved; `advance` reports failures."""
        fetch = _Fetch(order, now, now + order.lease_s, self._pool.layers.start, [])
        count = len(order.move.to_pages)
        if len(order.epochs) != count:
            fetch.error = f"{len(order.epochs)} epochs came for {count} pages"
        elif order.digests and len(order.digests) != count * DIGEST_BYTES:
            fetch.error = f"{len(order.digests)} digest bytes came for {count} pages"
        self._fetches[order.move.id] = fetch

    def cancel(self, move: int, reason: str) -> None:
        """Stop reading; `advance` reports the move once all its reads are terminal. Ignores
        unknown moves."""
        fetch = self._fetches.get(move)
        if fetch is not None:
            self._fail(fetch, reason)

    def advance(self, now: float) -> list[Fetched]:
        """Poll reads, request further layers, and return the moves that ended."""
        over = []
        for move, fetch in list(self._fetches.items()):
            self._poll(fetch)
            if now > fetch.until:
                self._fail(fetch, f"lease of {fetch.order.lease_s:g} s ran out")
            if not fetch.error:
                self._request(fetch)
            if not fetch.reads and (fetch.error or fetch.next_layer >= self._pool.layers.stop):
                del self._fetches[move]
                over.append(self._judged(fetch, now))
        return over

    def _poll(self, fetch: _Fetch) -> None:
        going: list[PageRead] = []
        for read in fetch.reads:
            state = read.state()
            if state is ReadState.PENDING:
                going.append(read)
                continue
            read.close()
            if state is ReadState.DONE:
                read_bytes = len(fetch.order.move.to_pages) * self._pool.page_bytes
                fetch.read_bytes += read_bytes
                self.moved_bytes += read_bytes
            else:
                self._fail(fetch, "a read failed: the source is gone or refused it")
        fetch.reads = going

    def _request(self, fetch: _Fetch) -> None:
        move = fetch.order.move
        readahead = max(
            2, self._readahead_bytes // max(1, len(move.to_pages) * self._pool.page_bytes)
        )
        try:
            while len(fetch.reads) < readahead and fetch.next_layer < self._pool.layers.stop:
                fetch.reads.append(
                    self._transfer.read(
                        move.source, fetch.next_layer, move.from_pages, move.to_pages
                    )
                )
                fetch.next_layer += 1
        except EngineError as error:
            self._fail(fetch, str(error))

    def _fail(self, fetch: _Fetch, reason: str) -> None:
        fetch.error = fetch.error or reason

    def _judged(self, fetch: _Fetch, now: float) -> Fetched:
        move = fetch.order.move
        error = fetch.error
        if not error and fetch.order.digests:
            ours = digests(self._pool, move.id, move.to_pages)
            if ours != fetch.order.digests:
                error = "digests differ: the source's pages are not what was leased"
        return Fetched(move.id, not error, fetch.read_bytes, now - fetch.began, error)
