"""What a calibration times: batches as the runner serves them, operators alone, nothing cold."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from tests.engine import plain_library

from medha.calibration import Entries, Operator
from medha.measuring import Measured, Plan, Rounds, Told
from medha_worker import engine, kernels
from medha_worker.attention.calls import Geometry
from medha_worker.attention.paged import PagedAttention
from medha_worker.calibrate import Bench, measure
from medha_worker.device import CPU
from medha_worker.graphs import Graphs, Replay, Work
from medha_worker.kv.pages import KvPages
from medha_worker.model.arithmetic import FusedArithmetic
from medha_worker.pieces import Pieces
from medha_worker.testing.checkpoint import TinyModel, write_config

Kind = Literal["linear", "elementwise", "attention", "decode"]
KINDS: tuple[Kind, ...] = ("linear", "elementwise", "attention", "decode")
DECODES: Entries = ((1, 208, True), (1, 64, True), (1, 0, True))
MIXED: Entries = ((20, 64, False), (1, 128, True))


class Slow:
    """A device on which everything takes a second the first time, then a millisecond."""

    def __init__(self) -> None:
        self.ran: list[object] = []

    def operator_s(self, operator: Operator) -> float:
        return self._took(operator)

    def batch_s(self, entries: Entries) -> float:
        return self._took(entries)

    def _took(self, what: object) -> float:
        self.ran.append(what)
        return 1.0 if self.ran.count(what) == 1 else 0.001


PLAN = Plan(operators=(Operator("linear", 16), Operator("decode", 4, 64)), batches=(DECODES,),
            unseen=(MIXED,))  # fmt: skip


def test_nothing_that_runs_for_the_first_time_is_told_of_a_cold_device() -> None:
    slow, told = Slow(), list[Told]()
    measure(slow, PLAN, 1e-9, told.append, cold=True)
    taken = [each for each in told if isinstance(each, Measured)]
    assert [each.index for each in taken] == [0, 1, 2, 3] * 2, "twice, however short the time"
    assert {each.seconds for each in taken} == {0.001}
    assert told[4] == Rounds(2)


def test_a_warm_device_is_measured_once_where_time_is_short() -> None:
    slow, told = Slow(), list[Told]()
    measure(slow, PLAN, 1e-9, told.append)
    assert [each.index for each in told if isinstance(each, Measured)] == [0, 1, 2, 3]


class Again:
    """Records by calling once more."""

    recorded, replays = 0, 0

    def __call__(self, work: Work) -> tuple[torch.Tensor, Replay]:
        out = work()
        Again.recorded += 1

        def replay() -> None:
            Again.replays += 1
            work()

        return out, replay

    def used_bytes(self) -> int:
        return 0


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with paged kernels, graphs and pieces, on the kernels' oracle."""

    def attention(
        heads: int, kv_heads: int, head_dim: int, page_tokens: int, dtype: torch.dtype,
        kv_dtype: torch.dtype, device: torch.device, **_: Any,
    ) -> PagedAttention:  # fmt: skip
        geometry = Geometry(heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
                            page_tokens=page_tokens, kv_dtype=kv_dtype)  # fmt: skip
        library: kernels.Library = plain_library  # type: ignore[assignment]
        return PagedAttention(geometry, library, device)

    def pages(*arguments: Any, **named: Any) -> KvPages:
        return KvPages(*arguments, **(named | {"spare": 1}))

    Again.recorded = Again.replays = 0
    monkeypatch.setattr(engine, "attention_for", attention)
    monkeypatch.setattr("medha_worker.calibrate.attention_for", attention)
    monkeypatch.setattr(engine, "KvPages", pages)
    monkeypatch.setattr(engine, "RecordCuda", Again)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    write_config(tmp_path, TinyModel(layers=2, hidden=64, heads=4, head_dim=16, max_tokens=2048))
    return tmp_path


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """What the calls of a method return."""
    own: Callable[..., Any] = getattr(owner, name)
    found: list[Any] = []

    def noted(*arguments: Any) -> Any:
        found.append(own(*arguments))
        return found[-1]

    monkeypatch.setattr(owner, name, noted)
    return found


@pytest.mark.usefixtures("as_on_a_gpu")
def test_batches_are_timed_through_graphs_and_pieces_as_they_are_served(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = watched(monkeypatch, Graphs, "choose")
    cut = watched(monkeypatch, Pieces, "forward")
    bench = Bench(folder, "float32", 40, 16, CPU, ahead=True, record=Again())
    assert Again.recorded > 0 and isinstance(bench.arithmetic, FusedArithmetic)
    for entries, replayed in ((DECODES, True), (MIXED, False)):
        chosen.clear()
        cut.clear()
        assert bench.batch_s(entries) >= 0
        assert [each is not None for each in chosen] == [False, replayed]
        assert len(cut) == 1 + (not replayed)
    assert len(bench.runner._inputs.sequences) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_operator_is_timed_as_it_was_recorded(
    kind: Kind, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = watched(monkeypatch, plain_library, "silu_and_mul")
    bench = Bench(folder, "float32", 40, 16, CPU, record=Again())
    fused.clear()
    before = Again.replays
    assert bench.operator_s(Operator(kind, 4, 64 if kind in ("attention", "decode") else 0)) > 0
    assert Again.replays == before + 1
    assert bool(fused) == (kind == "elementwise"), "the activation that is served"


def test_batches_of_a_cpu_are_timed_whole_and_end_their_sequences(folder: pathlib.Path) -> None:
    bench = Bench(folder, "float32", 40, 16, CPU)
    for entries in (DECODES, MIXED):
        assert bench.batch_s(entries) > 0
    assert len(bench.runner._inputs.sequences) == 0
    for kind in KINDS:
        assert bench.operator_s(Operator(kind, 4, 64)) > 0
