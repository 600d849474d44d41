"""Ranks whose layers run as on a GPU, in pieces or whole graphs, but launched each time."""

from __future__ import annotations

from typing import Any

import torch
from tests.engine import gpu_twin

from medha_worker import engine
from medha_worker.graphs import Replay, Work
from medha_worker.model.decoder import Decoder
from medha_worker.piecewise_graphs import PiecewiseGraphs
from medha_worker.runner import Runner


class Launched:
    """Record nothing: a replay launches the work itself."""

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        def replay() -> None:
            work()

        return torch.empty(0), replay

    def used_bytes(self) -> int:
        return 0


def in_pieces() -> None:
    """Cut every batch of up to 400 rows; a batch that runs uncut is an error."""

    def made(*args: Any, **parts: Any) -> Runner:
        inputs = parts["inputs"]

        def turns(rows: int) -> torch.Tensor:
            turned: torch.Tensor = inputs.rotary.turns(
                torch.zeros(rows, dtype=torch.int64), [(rows, 0)]
            )
            return turned

        sizes = (1, 2, 3, 5, 8, 20, 100, 400)
        pieces = PiecewiseGraphs(parts["model"], parts["kv"], turns, Launched(), sizes=sizes)
        return Runner(*args, **{**parts, "model": pieces})

    def forward(*_: object) -> torch.Tensor:
        raise RuntimeError("a batch was not cut")

    setattr(engine, "Runner", made)  # noqa: B010
    Decoder.forward = forward  # type: ignore[method-assign, assignment]


def in_graphs() -> None:
    """Replay decodes as whole graphs and all else in pieces; a batch that runs without either is an
    error."""
    forward, replaying = Decoder.forward, []

    class Recorded(gpu_twin.Again):
        """Notes when it runs recorded work."""

        def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
            def noted() -> torch.Tensor:
                replaying.append(work)
                try:
                    return work()
                finally:
                    replaying.pop()

            return super().__call__(noted)

    def recorded(self: Decoder, *args: Any) -> torch.Tensor:
        if not replaying:
            raise RuntimeError("a batch ran without a graph")
        return forward(self, *args)

    for name, twin in {**gpu_twin.TWINS, "CudaGraphRecorder": Recorded}.items():
        setattr(engine, name, twin)
    Decoder.forward = recorded  # type: ignore[method-assign, assignment]
