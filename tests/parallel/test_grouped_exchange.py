"""Between GPUs an exchange is one grouped launch; a fake group records the calls."""

from __future__ import annotations

import pytest
import torch

from medha_worker.device import CpuDevice
from medha_worker.parallel.collectives import PeerLost
from medha_worker.parallel.communicator import Communicator, ShardGroup


class Noting:
    """Fake of torch's NCCL group; rank 1 of 3. Receives the peer's rank as data."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.broken = False

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3

    def _start_coalescing(self) -> None:
        self.calls.append("begin")

    def _end_coalescing(self) -> Noting:
        self.calls.append("end")
        return self._started()

    def wait(self) -> None:
        self.calls.append("wait")

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        self.calls.append(f"send {to}")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        self.calls.append(f"receive {source}")
        tensors[0].fill_(float(source))

    def allreduce(self, tensors: list[torch.Tensor]) -> Noting:
        """Sum as if every member had the same tensor."""
        self.calls.append(f"sum {tensors[0].numel()}")
        tensors[0].mul_(3)
        return self._started()

    def _allgather_base(self, stacked: torch.Tensor, tensor: torch.Tensor) -> Noting:
        self.calls.append(f"gather {tensor.numel()}")
        stacked.copy_(tensor.expand_as(stacked))
        return self._started()

    def _started(self) -> Noting:
        if self.broken:
            raise RuntimeError("NCCL error: remote process exited")
        return self

    def abort(self) -> None:
        self.calls.append("abort")


def member() -> tuple[Communicator, Noting]:
    group = Noting()
    return Communicator("kvp", group, CpuDevice()), group


def test_an_exchange_is_one_grouped_launch() -> None:
    communicator, group = member()
    assert [part.item() for part in communicator.gather(torch.tensor(1.0))] == [0.0, 1.0, 2.0]
    assert group.calls == ["begin", "receive 0", "receive 2", "send 0", "send 2", "end", "wait"]


def test_members_that_report_their_ranks_are_warm() -> None:
    communicator, _ = member()
    communicator.warm_up()


def test_an_aborted_group_is_closed_once_and_takes_nothing_more() -> None:
    communicator, group = member()
    communicator.abort()
    communicator.abort()
    assert group.calls == ["abort"] and communicator.aborted
    with pytest.raises(PeerLost, match="closed"):
        communicator.gather(torch.tensor(1.0))


def test_a_launch_that_fails_is_a_lost_peer() -> None:
    communicator, group = member()
    group.broken = True
    with pytest.raises(PeerLost, match="remote process exited"):
        communicator.gather(torch.tensor(1.0))


def test_shards_on_gpus_sum_by_one_collective_of_the_backend() -> None:
    communicator, group = member()
    shards = ShardGroup(communicator, ordered=False)
    x = torch.arange(6.0).view(2, 3)
    total = shards.all_reduce(x)
    assert total is x and torch.equal(x, 3 * torch.arange(6.0).view(2, 3))
    wide = shards.all_gather(torch.ones(2, 1))
    assert torch.equal(wide, torch.ones(2, 3))
    assert group.calls == ["sum 6", "wait", "gather 2", "wait"]


def test_deterministic_shards_on_gpus_sum_in_their_order() -> None:
    communicator, group = member()
    total = ShardGroup(communicator, ordered=True).all_reduce(torch.ones(2))
    assert total.tolist() == [0.0 + 1.0 + 2.0] * 2
    assert group.calls == ["begin", "receive 0", "receive 2", "send 0", "send 2", "end", "wait"]


def test_a_collective_that_fails_is_a_lost_peer() -> None:
    communicator, group = member()
    group.broken = True
    for call in (ShardGroup(communicator, ordered=False).all_reduce, communicator.all_gather):
        with pytest.raises(PeerLost, match="remote process exited"):
            call(torch.ones(1))
