"""A fixed set of ranks that exchange tensors: gloo, or NCCL between GPUs, behind one door.

torch's default world cannot grow, so there is no `init_process_group` and no `new_group` here: each
communicator is a process group of its own on a prefixed store, made by `join`. It offers
point-to-point messages and the exchange of one tensor per peer; sums are built from exchanges in
rank order, so every member gets the same bits. It knows neither groups, stages nor generations
(`mesh` does), and it never retries: a lost peer is `PeerLost`, at once or after the timeout. NCCL's
messages are launched like all work of a GPU, so there the peer's silence shows where the host waits
for the device (`device`), and an exchange is one grouped launch, so that no two can cross.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo, Work

from medha.errors import EngineError

if TYPE_CHECKING:
    from medha_worker.device import Device

# A tag that no exchange uses: receiving it can only time out, which closes every connection.
_ABORT_TAG = 0x7FFF_FFFF


class PeerLost(EngineError):
    """A member of a communicator is gone, silent, or the communicator was aborted."""


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Until it has arrived or left; raises PeerLost."""
        ...


# torch's stubs lack what every backend has: send, recv, the private options with a timeout.
_Gloo: Any = ProcessGroupGloo


class Communicator:
    """Members 0 … size − 1 joined under one name; this process is `rank`.

    All calls but `abort` belong to one thread. Messages between two members arrive in the order in
    which they were sent under one tag. `device`: whose tensors NCCL exchanges;
    None: gloo does.
    """

    def __init__(self, name: str, group: Any, device: Device | None = None) -> None:
        self.name, self.rank, self.size = name, int(group.rank()), int(group.size())
        self._group, self._device = group, device
        self._aborted = threading.Event()

    def __repr__(self) -> str:
        return f"communicator {self.name} ({self.rank} of {self.size})"

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def send(self, tensor: torch.Tensor, to: int, tag: int = 0) -> Pending:
        """Begin to send; `tensor` (contiguous) must live unchanged until `wait` returned."""
        self._check(to)
        try:
            return _Message(self, self._group.send([tensor], to, tag), to)
        except RuntimeError as error:
            raise self._lost(to, error) from None

    def receive(self, into: torch.Tensor, source: int, tag: int = 0) -> Pending:
        """Begin to receive into `into` (contiguous), whose size must equal what is sent."""
        self._check(source)
        try:
            return _Message(self, self._group.recv([into], source, tag), source)
        except RuntimeError as error:
            raise self._lost(source, error) from None

    def exchange(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], tag: int = 0
    ) -> None:
        """One tensor to each key of `sends`, one from each key of `receives`, all at once."""
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
        """The exchange as one launch of NCCL's, which later work of this stream waits for."""
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
        """Every member's tensor of this shape, in rank order; own entry is `tensor` itself."""
        parts = [
            tensor if peer == self.rank else torch.empty_like(tensor) for peer in range(self.size)
        ]
        peers = [peer for peer in range(self.size) if peer != self.rank]
        self.exchange(dict.fromkeys(peers, tensor), {p: parts[p] for p in peers}, tag)
        return parts

    def warm_up(self) -> None:
        """Talk to every member once, so that a silent one is found now; raises PeerLost."""
        at = self._device.at if self._device else "cpu"
        parts = self.gather(torch.tensor([float(self.rank)], device=at))
        for peer, said in enumerate(torch.cat(parts).tolist()):
            if said != peer:
                raise PeerLost(f"{self}: member {peer} calls itself {said:g}; form anew")

    def abort(self) -> None:
        """Close every connection: blocked calls here and at the peers fail at once. Any thread.

        A receive that times out is gloo's one way to close a context from outside.
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
    """A send or receive of gloo's that names its peer when it fails."""

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
    device: Device | None = None,
) -> Communicator:
    """Meet the other members of `name` on `store`; blocks until all are there, then warms up.

    A place is taken once: whoever comes to a (name, rank) that another incarnation has claimed is
    stale and gets PeerLost, as does everyone when a member does not come within `timeout_s`.
    Sockets are bound to `interface` alone. `device`: of a GPU's rank, which exchanges by NCCL.
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
    """NCCL's group; builds of torch for CPUs alone have none."""
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
