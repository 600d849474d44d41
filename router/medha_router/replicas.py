"""Connected replicas: identity, load, liveness.

Decides which controllers are accepted (protocol, model and profile must fit), which replicas take
new requests, and which are lost. Replicas of one model may have several versions. Sends nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import msgspec

from medha import PROTOCOL
from medha.errors import SpecError
from medha.fleet.replica_estimate import is_usable
from medha.messages import Hello, Load, LoadReport, Rejected
from medha.peer_liveness import PeerLiveness
from medha.predictor import Predictor
from medha.profile import Profile

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "adapter_templates.json",
)


class ConnectedReplica:
    """A replica whose controller has sent Hello; `peer` is its socket identity.

    `load` is None before the first report, and while reports are impossible: no request is placed
    on it. `sent` holds the ids of this
    router's requests that it serves. `avoided`: it may hang, and another replica serves.
    """

    def __init__(self, peer: bytes, hello: Hello, predictor: Predictor, now: float) -> None:
        self.peer, self.hello, self.predictor = peer, hello, predictor
        self.name, self.version = hello.replica, _version(hello)
        self.load: Load | None = None
        self.load_s = now
        self.draining = hello.draining
        self.life = PeerLiveness(now)
        self._reports_quiet = self._reports_gone = False
        self.avoided = False
        self.sent: set[str] = set()

    @property
    def max_context_tokens(self) -> int:
        return self.hello.max_context_tokens

    @property
    def min_batch_s(self) -> float:
        return self.hello.min_batch_s

    @property
    def max_batch_s(self) -> float:
        return self.hello.max_batch_s

    @property
    def max_running(self) -> int:
        return self.hello.max_running

    @property
    def open(self) -> bool:
        """True if it takes new requests: it reported a load, has a KVP group, does not drain."""
        has_group = self.load is not None and bool(self.load.total_pages)
        return has_group and not self.draining and not self.avoided

    def may_hang(self, now: float) -> bool:
        """Return True if the replica, or one of its ranks, is silent or gone."""
        return self._reports_quiet or self.life.quiet(now) or self.gone(now)

    def gone(self, now: float) -> bool:
        """Return True if its controller, or a rank of each of its groups, is probably dead."""
        return self._reports_gone or self.life.gone(now)

    def take(self, report: LoadReport, now: float) -> None:
        """Take over a report of its load and its ranks."""
        self.load, self.load_s = report.load if is_usable(report.load) else None, now
        self.draining = report.draining
        self._reports_quiet, self._reports_gone = report.quiet, report.gone
        if report.learned is not None:
            self.predictor.restore(report.learned)

    @property
    def empty(self) -> bool:
        """True if none of its KVP groups runs: its KV cache is lost."""
        return self.load is not None and not self.load.total_pages


def _version(hello: Hello) -> str:
    """Return the key of a model version.

    Replicas with the same key can continue each other's requests: weights, adapters, tokens, pages
    and layers are the same.
    """
    shape, files = hello.shape, hello.files
    numbers = (
        hello.page_tokens,
        *hello.stop_tokens,
        shape.vocab,
        shape.layers,
        shape.hidden,
        shape.heads,
        shape.kv_heads,
    )
    adapters = (f"{name}={digest}" for name, digest in sorted(hello.adapters.items()))
    texts = (hello.checkpoint, *(files.get(name, "") for name in FILES), *adapters)
    return ":".join((*texts, *map(str, numbers)))


class ReplicaTable:
    """Every connected replica by peer. `models` are the served names; None accepts any."""

    def __init__(self, models: frozenset[str] | None, timeout_s: float) -> None:
        self._models, self._timeout_s = models, timeout_s
        self._replicas: dict[bytes, ConnectedReplica] = {}
        self._by_model: dict[str, list[ConnectedReplica]] = {}  # sorted

    def greet(self, peer: bytes, hello: Hello, now: float) -> ConnectedReplica | Rejected:
        """Accept a controller, replacing one with the same peer, or return the reason not to."""
        if hello.protocol != PROTOCOL:
            return Rejected(
                f"replica {hello.replica} has protocol {hello.protocol} and this router "
                f"{PROTOCOL}: run the same version of both"
            )
        if self._models is not None and hello.model not in self._models:
            return Rejected(
                f"replica {hello.replica} serves the model {hello.model!r}: this router serves "
                f"{', '.join(sorted(self._models))}"
            )
        if "tokenizer.json" not in hello.files:
            return Rejected(f"replica {hello.replica} has no tokenizer.json: the router needs it")
        try:
            hello.order.checked()
        except SpecError as error:
            return Rejected(
                f"replica {hello.replica} wants an order that this router does not know: {error}"
            )
        try:
            profile = msgspec.json.decode(hello.profile, type=Profile)
            predictor = Predictor(profile, hello.shape, hello.topology, hello.max_batch_s)
        except (msgspec.MsgspecError, SpecError, ValueError) as error:
            return Rejected(f"replica {hello.replica} sent a profile that does not fit: {error}")
        replica = ConnectedReplica(peer, hello, predictor, now)
        if (known := self._replicas.get(peer)) is not None:
            self._leave_model(known)
        self._replicas[peer] = replica
        bisect.insort(self._by_model.setdefault(hello.model, []), replica, key=_by_name)
        return replica

    def get(self, peer: bytes) -> ConnectedReplica | None:
        return self._replicas.get(peer)

    def of(self, model: str) -> list[ConnectedReplica]:
        """Return the replicas of a model, sorted by name."""
        return list(self._by_model.get(model, ()))

    def __iter__(self) -> Iterator[ConnectedReplica]:
        return iter(self._replicas.values())

    def dead(self, now: float) -> list[tuple[ConnectedReplica, str]]:
        """Return the replicas whose controllers are dead, with the reason."""
        reasons = ((replica, replica.life.death(now, self._timeout_s)) for replica in self)
        return [(replica, reason) for replica, reason in reasons if reason]

    def forget(self, replica: ConnectedReplica) -> None:
        if self._replicas.get(replica.peer) is replica:
            del self._replicas[replica.peer]
            self._leave_model(replica)

    def _leave_model(self, replica: ConnectedReplica) -> None:
        replicas = self._by_model[replica.hello.model]
        replicas.remove(replica)
        if not replicas:
            del self._by_model[replica.hello.model]


def _by_name(replica: ConnectedReplica) -> tuple[str, bytes]:
    return replica.name, replica.peer
