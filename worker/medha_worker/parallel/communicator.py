"""A fixed set of ranks that exchange tensors, over gloo or (between GPUs) NCCL.

torch's default process group cannot grow, so each communicator is a process group of its own on a
prefixed store, made by `join`. It offers point-to-point messages and the exchange of one tensor per
peer. `ShardGroup` builds the sums of tensor parallelism on it, `mesh` gives it meaning. It never
retries: a lost peer raises PeerLost, at once or after the timeout. NCCL sends are GPU work like any
other, so there a silent peer shows where the host waits for the device. An NCCL exchange is one
grouped launch, so two exchanges cannot cross.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo, Work

from medha.errors import EngineError
from medha_worker.device import ComputeDevice
from medha_worker.parallel.collectives import PeerLost

# No exchange uses this tag: a receive can only time out, which closes every connection.
_ABORT_TAG = 0x7FFF_FFFF
ONE_ROUND_BYTES = 64 << 10
"""Up to this size a tensor is summed in one round: the link's latency exceeds its time."""


class Pending(Protocol):
    """A message in flight."""

    def wait(self) -> None:
        """Block until the message has arrived or left. Raises PeerLost."""
        ...


# torch's stubs lack send, recv and the private options with a timeout.
_Gloo: Any = ProcessGroupGloo


class Communicator:
    """Members 0 … size − 1 that joined under one name; this process is `rank`.

    All calls but `abort` belong to one thread. Messages between two members with one tag arrive in
    order. `device` is the GPU whose tensors NCCL exchanges; None for gloo.
    """

    def __init__(self, name: str, group: Any, device: ComputeDevice | None = None) -> None:
        self.name, self.rank, self.size = name, int(group.rank()), int(group.size())
        self._group, self._device = group, device
        self._aborted = threading.Event()

    def __repr__(self) -> str:
        return f"communicator {self.name} ({self.rank} of {self.size})"

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    @property
    def native(self) -> bool:
        """True if collectives are the backend's own kernels: between GPUs."""
        return self._device is not None

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Start sending; `tensor` (contiguous) must stay unchanged until `wait` has returned."""
        self._check(to)
        try:
            return _Message(self, self._group.send([tensor], to, tag), to)
        except RuntimeError as error:
            raise self._lost(to, error) from None

    def receive(self, into: torch.Tensor, source: int, tag: int = 0) -> Pending:
        """Start receiving into `into` (contiguous), whose size must equal the sent tensor's."""
        self._check(source)
        try:
            return _Message(self, self._group.recv([into], source, tag), source)
        except RuntimeError as error:
            raise self._lost(source, error) from None

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int = 0
    ) -> None:
        """Send a tensor to each key of `sends` and receive from each key of `receives`, all at
        once."""
        if self._device is not None:
            self._launch(sends, receives)
            return
        pending: list[Pending] = [self.receive(into, peer, tag) for peer, into in receives.items()]
        pending += [self.send(tensor, peer, tag) for peer, tensor in sends.items()]
        for message in pending:
            message.wait()

    def _launch(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Exchange in one NCCL launch, which later work of this stream waits for."""
        for peer in (*receives, *sends):
            self._check(peer)
        try:
            self._group._start_coalescing()
            for peer, into in receives.items():
                self._group.recv([into], peer, 0)
            for peer, tensor in sends.items():
                self._group.send([tensor], peer, 0)
            self._group._end_coalescing().wait()
        except RuntimeError as error:
            raise self._lost(next(iter(receives), self.rank), error) from None

    def gather(self, tensor: torch.Tensor, tag: int = 0) -> list[torch.Tensor]:
        """Return every member's tensor of this shape, in rank order; the own entry is `tensor`
        itself."""
        parts = [
            tensor if peer == self.rank else torch.empty_like(tensor) for peer in range(self.size)
        ]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange(dict.fromkeys(peers, tensor), {p: parts[p] for p in peers}, tag)
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum a contiguous tensor over all members, in place, as the backend does it."""
        try:
            self._group.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise self._lost(self.rank, error) from None

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack every member's contiguous tensor in rank order, as the backend does it."""
        stacked = tensor.new_empty((self.size, *tensor.shape))
        try:
            self._group._allgather_base(stacked, tensor).wait()
        except RuntimeError as error:
            raise self._lost(self.rank, error) from None
        return stacked

    def warm_up(self) -> None:
        """Exchange with every member once, to detect a silent one. Raises PeerLost."""
        at = self._device.at if self._device else "cpu"
        parts = self.gather(torch.tensor([float(self.rank)], device=at))
        for peer, rank in enumerate(torch.cat(parts).tolist()):
            if rank != peer:
                raise PeerLost(
                    f"{self}: member {peer} reports rank {rank:g}; form a new generation"
                )

    def abort(self) -> None:
        """Close all connections: blocked calls here and at the peers fail at once. Any thread may
        call.

        gloo offers no other way to close a context from outside than a receive that times out.
        """
        if self._aborted.is_set():
            return
        self._aborted.set()
        if self._device is not None:
            self._group.abort()
        elif self.size > 1:
            peer = (self.rank + 1) % self.size
            try:
                self._group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return  # the timeout, or a connection that was closed already

    def _check(self, peer: int) -> None:
        if self._aborted.is_set():
            raise PeerLost(f"{self} is closed: use a newer generation")
        if not 0 <= peer < self.size or peer == self.rank:
            raise EngineError(f"{self}: peer {peer} must be another member")

    def _lost(self, peer: int, error: RuntimeError) -> PeerLost:
        reason = "it was aborted" if self._aborted.is_set() else str(error).splitlines()[0]
        return PeerLost(f"{self}: member {peer} is lost: {reason}")


class _Message:
    """A gloo send or receive that names its peer when it fails."""

    def __init__(self, owner: Communicator, work: Work, peer: int) -> None:
        self._owner, self._work, self._peer = owner, work, peer

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._owner._lost(self._peer, error) from None


def join(
    store: Store,
    name: str,
    rank: int,
    size: int,
    *,
    incarnation: str,
    interface: str,
    timeout_s: float,
    device: ComputeDevice | None = None,
) -> Communicator:
    """Meet the other members of `name` on `store`; blocks until all are there, then warms up.

    A (name, rank) can be claimed once: another incarnation that arrives later is stale and gets
    PeerLost, as do all members if one does not arrive within `timeout_s`. Sockets bind to
    `interface` alone. `device` is set on a GPU's rank, which exchanges over NCCL.
    """
    if not 0 <= rank < size:
        raise EngineError(f"communicator {name}: rank is {rank}: must lie in [0, {size})")
    prefixed = PrefixStore(name, store)
    try:
        claim = prefixed.compare_set(f"claim/{rank}", "", incarnation).decode()
        if claim != incarnation:
            raise PeerLost(
                f"communicator {name}: place {rank} belongs to incarnation {claim}, not to "
                f"{incarnation}: this one is stale"
            )
        if device is None:
            group = _Gloo(prefixed, rank, size, _options(interface, timeout_s))
        else:
            group = _nccl(prefixed, rank, size, timeout_s)
    except RuntimeError as error:
        raise PeerLost(f"communicator {name} did not form: {str(error).splitlines()[0]}") from None
    communicator = Communicator(name, group, device)
    communicator.warm_up()
    return communicator


def _nccl(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return NCCL's process group, which CPU builds of torch lack."""
    from torch.distributed import ProcessGroupNCCL

    kind: Any = ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return kind(store, rank, size, options)


def _options(interface: str, timeout_s: float) -> Any:
    options = _Gloo._Options()
    options._devices = [_Gloo.create_device(interface=interface, lazy_init=False)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return options


class ShardGroup:
    """The shards of a stage; implements `collectives.TensorParallel`.

    NCCL sums by its own all-reduce, which picks rings, trees or the switch by size and topology
    and can be recorded in a CUDA graph. `ordered` sums, which gloo always makes, add the shards'
    values in shard order: results depend neither on the batch nor on the order of arrival. A large
    tensor moves 2 (n − 1) / n times, as in a ring, in two rounds: each shard sums its part. A small
    one moves n − 1 times in one round, to the same bits.
    """

    def __init__(self, communicator: Communicator, *, ordered: bool = True) -> None:
        self._communicator = communicator
        self._ordered = ordered or not communicator.native
        self.rank, self.size = communicator.rank, communicator.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over shards, in place; raises PeerLost."""
        flat = x.contiguous().view(-1)
        if not self._ordered:
            self._communicator.all_reduce(flat)
        elif self.size == 2 or flat.nbytes <= ONE_ROUND_BYTES:
            flat.copy_(_sum(self._communicator.gather(flat)))
        else:
            self._reduce_parts(flat)
        return x if x.is_contiguous() else x.copy_(flat.view_as(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the shards' tensors along the last dimension. Raises PeerLost."""
        x = x.contiguous()
        if self._ordered:
            return torch.cat(self._communicator.gather(x), dim=-1)
        return torch.cat([*self._communicator.all_gather(x)], dim=-1)

    def _reduce_parts(self, flat: torch.Tensor) -> None:
        """Sum the own part of all shards' tensors, then exchange the sums."""
        parts, own = flat.tensor_split(self.size), self.rank
        peers = [peer for peer in range(self.size) if peer != own]
        shares = [
            parts[own] if peer == own else torch.empty_like(parts[own]) for peer in range(self.size)
        ]
        self._communicator.exchange({p: parts[p] for p in peers}, {p: shares[p] for p in peers})
        parts[own].copy_(_sum(shares))
        self._communicator.exchange(dict.fromkeys(peers, parts[own]), {p: parts[p] for p in peers})


def _sum(parts: list[torch.Tensor]) -> torch.Tensor:
    first, *rest = parts
    total = first.clone()
    for part in rest:
        total += part
    return total
