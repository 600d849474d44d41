"""The taking end of a move: pages read layer by layer, judged by digest, kept till the switch.

    begin     the target pages are free here, and get a new epoch of their own
    advance   polls the reads; a move is over when all its layers are in and the digests agree,
              when one failed, when it was cancelled, or when its lease ran out; never before
              every read of it is terminal
    switched  the copy may be used only if its pages still have that epoch: any doubt is an error

Reads go on in the background of running batches, `ahead` layers at a time. `now` is seconds on the
caller's clock. The epochs belong to the thread that runs steps, the reads to the mover's: so
`Copies` (who owns what) and `Fetches` (what is under way) are two.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Collection

from medha.batch import Move
from medha.errors import EngineError
from medha.messages import Fetched, FetchPages
from medha_worker.kv.epochs import PageEpochs
from medha_worker.kv.grants import check_move
from medha_worker.kv.transfer import DIGEST_BYTES, Pool, Read, State, Transfer, digests


class Copies:
    """Target pages of moves, from the fetch to the switch; `landed` may come from any thread."""

    def __init__(self, group: int, epochs: PageEpochs) -> None:
        self._group, self._epochs = group, epochs
        self._epochs_at: dict[int, tuple[Move, tuple[int, ...]]] = {}
        self._whole: set[int] = set()
        self._lock = threading.Lock()

    def __contains__(self, move: int) -> bool:
        return move in self._epochs_at

    def reserve(self, move: Move, in_use: Collection[int]) -> None:
        """Claim a move's target pages; raises EngineError when they are strange or in use."""
        check_move(move)
        if move.target != self._group:
            raise EngineError(
                f"move {move.id} has target {move.target}: this is group {self._group}"
            )
        self._epochs.check(move.to_pages)
        with self._lock:
            if move.id in self._epochs_at:
                raise EngineError(f"move {move.id} is under way already: a move id is used once")
            # A copy that landed gives way: its pages were given up if they are named again.
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
        """The fetch is over; a failed one gives its pages back. Any thread."""
        with self._lock:
            if ok and move in self._epochs_at:
                self._whole.add(move)
            else:
                self._drop(move)

    def whole(self, move: int) -> bool:
        """The copy stands."""
        return move in self._whole

    def switch(self, move: Move) -> None:
        """The copy becomes the sequence's own; raises EngineError unless whole and untouched."""
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
    """A move being read: layers from `next_layer` on have not been asked for yet."""

    order: FetchPages
    began: float
    until: float
    next_layer: int
    reads: list[Read]
    read_bytes: int = 0
    error: str = ""
    stuck_at: float = 0.0  # with an error: when reads that still go on are cut off


class Fetches:
    """Reads of all moves of one rank. Belongs to the mover's thread.

    Of each move two layers at least are under way, and more up to `ahead_bytes`: a fast link is
    through with a few pages before anybody looks again. A move that has failed waits `patience_s`
    for its reads to end by themselves, then breaks the connection to their source, which ends them
    for certain. `moved_bytes`: of all reads that are over.
    """

    def __init__(
        self, transfer: Transfer, pool: Pool, ahead_bytes: int = 64 << 20, patience_s: float = 1.0
    ) -> None:
        self._transfer, self._pool, self._ahead_bytes = transfer, pool, ahead_bytes
        self._patience_s, self.moved_bytes = patience_s, 0
        self._fetches: dict[int, _Fetch] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fetches)

    def begin(self, order: FetchPages, now: float) -> None:
        """Start on a move whose target pages are reserved; failures come out of `advance`."""
        fetch = _Fetch(order, now, now + order.lease_s, self._pool.layers.start, [])
        count = len(order.move.to_pages)
        if len(order.epochs) != count:
            fetch.error = f"{len(order.epochs)} epochs came for {count} pages"
        elif order.digests and len(order.digests) != count * DIGEST_BYTES:
            fetch.error = f"{len(order.digests)} digest bytes came for {count} pages"
        self._fetches[order.move.id] = fetch

    def cancel(self, move: int, reason: str, now: float) -> None:
        """Stop reading; `advance` reports it once every read is terminal. Unknown: nothing."""
        fetch = self._fetches.get(move)
        if fetch is not None:
            self._fail(fetch, reason, now)

    def advance(self, now: float) -> list[Fetched]:
        """Poll, ask for further layers, and report the moves that are over."""
        over = []
        for move, fetch in list(self._fetches.items()):
            self._poll(fetch, now)
            if now > fetch.until:
                self._fail(fetch, f"lease of {fetch.order.lease_s:g} s ran out", now)
            if not fetch.error:
                self._ask(fetch, now)
            elif fetch.reads and now >= fetch.stuck_at:
                self._transfer.reset(fetch.order.move.source)
                self._poll(fetch, now)
            if not fetch.reads and (fetch.error or fetch.next_layer >= self._pool.layers.stop):
                del self._fetches[move]
                over.append(self._judged(fetch, now))
        return over

    def _poll(self, fetch: _Fetch, now: float) -> None:
        going: list[Read] = []
        for read in fetch.reads:
            state = read.state()
            if state is State.GOING:
                going.append(read)
                continue
            read.close()
            if state is State.DONE:
                read_bytes = len(fetch.order.move.to_pages) * self._pool.page_bytes
                fetch.read_bytes += read_bytes
                self.moved_bytes += read_bytes
            else:
                self._fail(fetch, "a read failed: the source is gone or refused it", now)
        fetch.reads = going

    def _ask(self, fetch: _Fetch, now: float) -> None:
        move = fetch.order.move
        ahead = max(2, self._ahead_bytes // max(1, len(move.to_pages) * self._pool.page_bytes))
        try:
            while len(fetch.reads) < ahead and fetch.next_layer < self._pool.layers.stop:
                fetch.reads.append(
                    self._transfer.read(
                        move.source, fetch.next_layer, move.from_pages, move.to_pages
                    )
                )
                fetch.next_layer += 1
        except EngineError as error:
            self._fail(fetch, str(error), now)

    def _fail(self, fetch: _Fetch, reason: str, now: float) -> None:
        if not fetch.error:
            fetch.error, fetch.stuck_at = reason, now + self._patience_s

    def _judged(self, fetch: _Fetch, now: float) -> Fetched:
        move = fetch.order.move
        error = fetch.error
        if not error and fetch.order.digests:
            ours = digests(self._pool, move.id, move.to_pages)
            if ours != fetch.order.digests:
                error = "digests differ: the source's pages are not what was granted"
        return Fetched(move.id, not error, fetch.read_bytes, now - fetch.began, error)
