"""The connected replicas of each model, in the order of their names."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest

from medha.messages import Hello
from medha_router.replicas import ConnectedReplica, ReplicaTable


@pytest.mark.parametrize("seed", range(4))
def test_the_replicas_of_a_model_are_those_connected_sorted_by_name(
    make_hello: Callable[..., Hello], seed: int
) -> None:
    draw, hello, table = random.Random(seed), make_hello(), ReplicaTable(None, timeout_s=1.0)
    forgotten: list[ConnectedReplica] = []
    for _ in range(200):
        peer = draw.choice([b"p0", b"p1", b"p2", b"p3", b"p4"])
        known = table.get(peer)
        if known is not None and draw.random() < 0.4:
            table.forget(known)
            forgotten.append(known)
        elif forgotten and draw.random() < 0.2:
            table.forget(draw.choice(forgotten))  # another one has its peer, or none
        else:
            name, model = draw.choice("abc"), draw.choice("xy")
            own = msgspec.structs.replace(hello, replica=name, model=model)
            assert isinstance(table.greet(peer, own, 0.0), ConnectedReplica)
        for model in "xyz":
            connected = [replica for replica in table if replica.hello.model == model]
            connected.sort(key=lambda replica: (replica.name, replica.peer))
            assert table.of(model) == connected
