"""A replica in virtual time on a machine with simple, known batch times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.virtual_ranks import expected_tokens
from tests.support.virtual_replica import VirtualReplica

from medha import messages as m
from medha import testing
from medha.config import Scheduling, WorkerConfig
from medha.request import Slo, SloClass
from medha.topology import Topology

VOCAB = 50_000


def make_config(**fields: Any) -> WorkerConfig:
    settings = fields.pop("settings", {})
    given = {
        "replica": "r0",
        "model": "m",
        "checkpoint": "/nowhere",
        "max_context_tokens": 1 << 20,
        "topology": Topology(),
        "page_tokens": 16,
        "routers": ("a",),
        "rank_bind": "ipc://nowhere",
        "scheduling": Scheduling(**settings),
        "classes": (SloClass(slo=Slo()),),
    }
    return WorkerConfig(**{**given, **fields})


@pytest.fixture
def make_replica() -> Callable[..., VirtualReplica]:
    """A replica whose prompt tokens cost 0.1 ms each (`key_s` per key and row, if given)."""

    def make(
        *,
        pages: int = 1000,
        key_s: float = 0.0,
        batch_s: float = 1e-3,
        window: int = 0,
        **fields: Any,
    ) -> VirtualReplica:
        own = {"beats", "wrap", "slowness", "loop", "files", "hashes", "measure", "metrics"}
        extra = {name: fields.pop(name) for name in own & fields.keys()}
        shape = msgspec.structs.replace(testing.shape(window_tokens=window), vocab=VOCAB)
        profile = testing.profile(key_s=key_s, batch_s=batch_s)
        return VirtualReplica(make_config(**fields), shape, profile, pages=pages, **extra)

    return make


@pytest.fixture
def make_submit() -> Callable[..., m.Submit]:
    """A request of `tokens` tokens drawn from its id; None gives greedy sampling and no hashes."""

    def make(id: str, tokens: int = 40, *, outputs: int = 4, **fields: Any) -> m.Submit:
        rng = np.random.default_rng([ord(letter) for letter in id])
        prompt = rng.integers(0, VOCAB, tokens)
        sampling = fields.pop("sampling", m.Sampling(temperature=0.0))
        given = {"tokens": m.to_bytes(prompt), "max_output_tokens": outputs, "sampling": sampling}
        return m.Submit(id=id, **{**given, **fields})

    return make


@pytest.fixture
def judge() -> Callable[[VirtualReplica, m.Submit], None]:
    """Check that the client got exactly the tokens that its prompt implies, and the end."""

    def judge(replica: VirtualReplica, submit: m.Submit) -> None:
        client = replica.clients[submit.id]
        assert client.failed is None, client.failed
        assert client.finished is not None, f"{submit.id} hangs after {len(client.tokens)} tokens"
        prompt = m.from_bytes(submit.tokens).tolist()
        expected = expected_tokens(prompt, submit.max_output_tokens, VOCAB, replica.window)
        stops = [i for i, token in enumerate(expected) if token in submit.sampling.stop_tokens]
        assert client.tokens == expected[: stops[0] + 1 if stops else None]

    return judge


@pytest.fixture
def idle() -> Callable[[VirtualReplica], None]:
    """Check that no work is pending, every page is free and nothing is in flight."""

    def idle(replica: VirtualReplica) -> None:
        controller = replica.controller
        engine = controller.engine
        assert engine is not None
        load = engine.load(replica.loop.now)
        assert (load.pending_s, load.relegated_s) == (0.0, 0.0)
        assert (load.waiting, load.prefilling, load.decoding) == (0, 0, 0)
        for group in controller.groups.running:
            assert load.free_pages[group] == load.total_pages[group]
        assert not len(engine.requests) and not len(controller.batches)
        assert not len(engine.moves) and not controller.grants.outstanding

    return idle
