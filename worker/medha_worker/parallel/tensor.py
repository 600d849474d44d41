"""Tensor parallelism over a communicator: sums and gathers with the same bits on every shard.

A sum adds all shards' tensors in shard order after one exchange, so shards agree to the bit (they
sample the same token) and results do not depend on who came first. For the few shards of a stage
this moves no more than a ring would, in one round trip instead of several.
"""

from __future__ import annotations

import torch

from medha_worker.parallel.communicator import Communicator


class GlooTensorParallel:
    """The shards of one stage; implements `interface.TensorParallel`."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over shards, in place; raises PeerLost."""
        first, *rest = self._communicator.gather(x.contiguous())
        total = first.clone()
        for part in rest:
            total += part
        return x.copy_(total)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The shards' tensors side by side along the last dimension; raises PeerLost."""
        return torch.cat(self._communicator.gather(x.contiguous()), dim=-1)
