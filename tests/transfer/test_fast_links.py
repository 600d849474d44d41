"""Pages move as fast as the link: memory in huge pages, enough reads under way."""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Sequence

import pytest
import torch

from medha.batch import Move
from medha.messages import FetchPages, Peer
from medha_worker.kv.fetches import Fetches
from medha_worker.kv.pages import HUGE, KvPages, zeros
from medha_worker.kv.transfer import MemoryTransfer, MemoryWorld, PageRead, ReadState

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_pool_of_some_size_starts_at_a_huge_page_and_at_zero(dtype: torch.dtype) -> None:
    shape = (3, 5, 2, 4, 64, 256)
    memory = zeros(shape, dtype, CPU)
    assert memory.shape == shape and memory.dtype == dtype and memory.is_contiguous()
    assert not memory.view(torch.uint8).any()
    if memory.nbytes >= HUGE and sys.platform == "linux":
        assert memory.data_ptr() % HUGE == 0
    memory.view(torch.uint8).fill_(255)  # all of it is writable


def test_the_kernel_was_asked_for_huge_pages() -> None:
    setting = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    smaps = pathlib.Path("/proc/self/smaps")
    if not setting.exists() or "[never]" in setting.read_text() or not smaps.exists():
        pytest.skip("this kernel has no transparent huge pages")
    memory = zeros((8, HUGE), torch.uint8, CPU)
    first, flags = memory.data_ptr(), ""
    for line in smaps.read_text().splitlines():
        span = line.split()[0]
        if "-" in span and ":" not in span:
            low, high = (int(address, 16) for address in span.split("-"))
            inside = low <= first < high
        elif line.startswith("VmFlags:") and inside:
            flags = line
    assert " hg" in flags


def test_a_small_pool_takes_no_more_than_it_needs() -> None:
    memory = zeros((2, 3), torch.float32, CPU)
    assert memory.untyped_storage().nbytes() == 24 and not memory.any()


class Counting(MemoryTransfer):
    """Memory transfer that counts the most reads under way."""

    def __init__(self, agent: str, pool: KvPages, world: MemoryWorld) -> None:
        super().__init__(agent, pool, world)
        self.asked = self.ended = self.most = 0

    def read(self, group: int, layer: int, theirs: Sequence[int], ours: Sequence[int]) -> PageRead:
        read = super().read(group, layer, theirs, ours)
        self.asked += 1
        self.most = max(self.most, self.asked - self.ended)
        return Ending(read, self)


class Ending:
    """Read that counts its end."""

    def __init__(self, read: PageRead, by: Counting) -> None:
        self._read, self._by = read, by

    def state(self) -> ReadState:
        return self._read.state()

    def close(self) -> None:
        self._by.ended += 1
        self._read.close()


@pytest.mark.parametrize(("ahead_bytes", "most"), [(1, 2), (4 * 2 * 1 * 4 * 2 * 4 * 3, 3)])
def test_as_many_layers_are_under_way_as_make_enough_bytes_and_two_at_least(
    ahead_bytes: int, most: int
) -> None:
    world, layers, pages = MemoryWorld(steps=4), range(8), (0, 1, 2, 3)
    pools = [KvPages(layers, 4, 1, 4, 2) for _ in range(2)]
    assert 4 * pools[0].page_bytes * 3 == 4 * 2 * 1 * 4 * 2 * 4 * 3
    pools[0].memory.copy_(torch.rand(pools[0].memory.shape))
    source, taker = MemoryTransfer("g0", pools[0], world), Counting("g1", pools[1], world)
    taker.connect(
        Peer(
            group=0,
            agent=source.agent,
            metadata=source.metadata,
            bases=pools[0].bases,
            page_bytes=pools[0].page_bytes,
            pages=4,
        )
    )
    fetches = Fetches(taker, pools[1], ahead_bytes)
    fetches.begin(FetchPages(Move(1, 0, 0, 1, pages, pages, pages), (1,) * 4), 0.0)
    for turn in itertools.count():
        assert turn < 1000
        if over := fetches.advance(0.01 * turn):
            break
    assert over[0].ok and taker.most == most
    assert over[0].moved_bytes == fetches.moved_bytes == 8 * 4 * pools[0].page_bytes
    assert torch.equal(pools[0].memory, pools[1].memory)
    assert taker.ended == taker.asked == 8
