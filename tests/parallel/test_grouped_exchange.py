"""Between GPUs an exchange is one grouped launch; a fake group records the calls."""

from __future__ import annotations

import pytest
import torch

from medha_worker.device import CpuDevice
from medha_worker.parallel.collectives import PeerLost
from medha_worker.parallel.communicator import Communicator


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
        if self.broken:
            raise RuntimeError("NCCL error: remote process exited")
        return self

    def wait(self) -> None:
        self.calls.append("wait")

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> None:
        self.calls.append(f"send {to}")

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> None:
        self.calls.append(f"receive {source}")
        tensors[0].fill_(float(source))

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
