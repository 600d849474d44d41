"""Moves of pages on a real GPU, while it computes batches.

Run when named: python -m pytest tests/gpu
"""

from __future__ import annotations

import queue

import pytest
import torch

from medha.batch import Move
from medha.messages import Offered, RankReport
from medha_worker.kv.fetches import MoveTargets
from medha_worker.kv.page_leases import PageLease
from medha_worker.kv.page_mover import PageMover
from medha_worker.kv.pages import KvPages, PageEpochs
from medha_worker.kv.transfer import MemoryTransfer, MemoryWorld, digests

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

PAGES = 64
BUSY_CYCLES = 1 << 33  # some seconds


def test_digests_of_pages_do_not_wait_for_batches() -> None:
    kv = KvPages(range(2), PAGES, 8, 64, 128, torch.bfloat16, "cuda")
    kv.memory.normal_()
    pages = tuple(range(PAGES))
    move = Move(1, 0, 0, 1, pages, pages, pages)
    expected = digests(kv, move.id, pages)
    reports = queue.SimpleQueue[RankReport | Exception]()
    mover = PageMover(
        MemoryTransfer("g0", kv, MemoryWorld()),
        kv,
        MoveTargets(0, PageEpochs(PAGES)),
        reports.put,
        reports.put,
        checked=True,
    )
    mover.start()
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
    batch = torch.cuda.Event()  # type: ignore[no-untyped-call]
    batch.record()
    mover.offer(PageLease(move, (1,) * PAGES, float("inf")))
    offered = reports.get(timeout=60)
    assert not batch.query()  # type: ignore[no-untyped-call]
    assert isinstance(offered, Offered) and offered.digests == expected
    torch.cuda.synchronize()
    assert mover.stop()
