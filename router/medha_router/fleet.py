"""The replicas that serve, as this router knows them: introductions, load, life and death.

Decides who is taken in (protocol, model and profile must fit), who may take new work, and who is
lost. Replicas of one model may be of several editions. `now` is an argument; it sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from medha import PROTOCOL
from medha.config import CLOSED_S
from medha.errors import SpecError
from medha.messages import Hello, Load, LoadReport, Rejected
from medha.predictor import Predictor
from medha.profile import Profile

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Replica:
    """One controller that said Hello; `peer` is its socket identity.

    `load` None: it has not reported yet, so nothing is placed on it. `sent`: ids of requests that
    run there on our behalf.
    """

    def __init__(self, peer: bytes, hello: Hello, predictor: Predictor, now: float) -> None:
        self.peer, self.hello, self.predictor = peer, hello, predictor
        self.load: Load | None = None
        self.load_s = now
        self.draining = hello.draining
        self.heard_s = now
        self.closed_s = float("inf")
        self.sent: set[str] = set()

    @property
    def name(self) -> str:
        return self.hello.replica

    @property
    def edition(self) -> str:
        """The same for replicas that may go on with each other's requests: their weights are the
        same, and their tokens, pages and layers mean the same."""
        shape, files = self.hello.shape, self.hello.files
        numbers = (
            self.hello.page_tokens, *self.hello.stop_tokens,
            shape.vocab, shape.layers, shape.hidden, shape.heads, shape.kv_heads,
        )  # fmt: skip
        texts = (self.hello.checkpoint, *(files.get(name, "") for name in FILES))
        return ":".join((*texts, *map(str, numbers)))

    @property
    def open(self) -> bool:
        """May take new work: it has told its load, a group of it runs, it does not drain."""
        return self.load is not None and bool(self.load.total_pages) and not self.draining

    @property
    def empty(self) -> bool:
        """No group of it runs any more, or none yet: nothing that it computed is left."""
        return self.load is not None and not self.load.total_pages


class Fleet:
    """Every replica by its peer; `models` are the names that this router serves, None: any."""

    def __init__(self, models: frozenset[str] | None, timeout_s: float) -> None:
        self._models, self._timeout_s = models, timeout_s
        self._replicas: dict[bytes, Replica] = {}

    def greet(self, peer: bytes, hello: Hello, now: float) -> Replica | Rejected:
        """Take a controller in, or say why not. A known peer is replaced."""
        if hello.protocol != PROTOCOL:
            return Rejected(
                f"replica {hello.replica} speaks protocol {hello.protocol} and this router "
                f"{PROTOCOL}: run the same version of both"
            )
        if self._models is not None and hello.model not in self._models:
            return Rejected(
                f"replica {hello.replica} serves the model {hello.model!r}: this router serves "
                f"{', '.join(sorted(self._models))}"
            )
        if "tokenizer.json" not in hello.files:
            return Rejected(
                f"replica {hello.replica} offers no tokenizer.json: the router needs it"
            )
        try:
            profile = msgspec.json.decode(hello.profile, type=Profile)
            predictor = Predictor(profile, hello.shape, hello.topology, hello.max_batch_s)
        except (msgspec.MsgspecError, SpecError, ValueError) as error:
            return Rejected(f"replica {hello.replica} sent a profile that does not fit: {error}")
        replica = self._replicas[peer] = Replica(peer, hello, predictor, now)
        return replica

    def get(self, peer: bytes) -> Replica | None:
        return self._replicas.get(peer)

    def of(self, model: str) -> list[Replica]:
        """Replicas of a model, in order of their names."""
        return sorted(
            (replica for replica in self if replica.hello.model == model),
            key=lambda replica: (replica.name, replica.peer),
        )

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def report(self, replica: Replica, report: LoadReport, now: float) -> None:
        replica.load, replica.load_s = report.load, now
        replica.draining = report.draining
        if report.learned is not None:
            replica.predictor.restore(report.learned)

    def heard(self, replica: Replica, now: float) -> None:
        replica.heard_s, replica.closed_s = now, float("inf")

    def silent(self, now: float) -> list[tuple[Replica, str]]:
        """Replicas not heard of for too long, and what that is."""
        found = []
        for replica in self:
            if now - replica.closed_s > CLOSED_S:
                found.append((replica, "its connection has ended"))
            elif now - replica.heard_s > self._timeout_s:
                found.append((replica, f"silent for {now - replica.heard_s:.1f} s"))
        return found

    def forget(self, replica: Replica) -> None:
        if self._replicas.get(replica.peer) is replica:
            del self._replicas[replica.peer]
