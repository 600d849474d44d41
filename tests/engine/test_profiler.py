"""Calibration times batches as the runner serves them, operators alone, and nothing cold."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any, Literal

import msgspec
import pytest
from tests.engine import plain_library
from tests.engine.gpu_twin import TWINS, Again, attention_for

from medha.calibration import Entries, Operator
from medha.measurement_plan import Measured, MeasurementMessage, MeasurementPlan, Rounds
from medha_worker import engine
from medha_worker.device import CPU
from medha_worker.graphs import Graphs
from medha_worker.model.checkpoint_writer import TinyModel, write_config
from medha_worker.model.layers import FusedArithmetic
from medha_worker.piecewise_graphs import PiecewiseGraphs
from medha_worker.profiler import ModelBench, measure

SMALL = TinyModel(layers=2, hidden=64, heads=4, head_dim=16, max_tokens=2048)
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


PLAN = MeasurementPlan(
    operators=(Operator("linear", 16), Operator("decode", 4, 64)),
    batches=(DECODES,),
    unseen=(MIXED,),
)


def test_nothing_that_runs_for_the_first_time_is_told_of_a_cold_device() -> None:
    slow, reports = Slow(), list[MeasurementMessage]()
    measure(slow, PLAN, 1e-9, reports.append, cold=True)
    taken = [report for report in reports if isinstance(report, Measured)]
    assert [report.index for report in taken] == [0, 1, 2, 3] * 2, "twice, however short the time"
    assert {report.seconds for report in taken} == {0.001}
    assert reports[4] == Rounds(2)


def test_a_warm_device_is_measured_once_where_time_is_short() -> None:
    slow, reports = Slow(), list[MeasurementMessage]()
    measure(slow, PLAN, 1e-9, reports.append)
    assert [report.index for report in reports if isinstance(report, Measured)] == [0, 1, 2, 3]


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with paged kernels, graphs and pieces, on the kernels' oracle."""

    Again.recorded = Again.replays = 0
    monkeypatch.setattr("medha_worker.profiler.attention_for", attention_for)
    for name, twin in TWINS.items():
        monkeypatch.setattr(engine, name, twin)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    write_config(tmp_path, SMALL)
    return tmp_path


def watched(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Record the return values of a method's calls."""
    own: Callable[..., Any] = getattr(owner, name)
    results: list[Any] = []

    def noted(*arguments: Any) -> Any:
        results.append(own(*arguments))
        return results[-1]

    monkeypatch.setattr(owner, name, noted)
    return results


@pytest.mark.usefixtures("as_on_a_gpu")
def test_batches_are_timed_through_graphs_and_pieces_as_they_are_served(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = watched(monkeypatch, Graphs, "choose")
    cut = watched(monkeypatch, PiecewiseGraphs, "forward")
    bench = ModelBench(folder, "float32", 40, 16, CPU, overlap=True, record=Again())
    assert Again.recorded > 0 and isinstance(bench.arithmetic, FusedArithmetic)
    for entries, replayed in ((DECODES, True), (MIXED, False)):
        chosen.clear()
        cut.clear()
        assert bench.batch_s(entries) >= 0
        assert [report is not None for report in chosen] == [False, False, replayed]
        assert len(cut) == 2 + (not replayed)
    assert len(bench.runner._inputs.sequences) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("as_on_a_gpu")
def test_an_operator_is_timed_as_it_was_recorded(
    kind: Kind, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = watched(monkeypatch, plain_library, "silu_and_mul")
    bench = ModelBench(folder, "float32", 40, 16, CPU, record=Again())
    fused.clear()
    before = Again.replays
    assert bench.operator_s(Operator(kind, 4, 64 if kind in ("attention", "decode") else 0)) > 0
    assert Again.replays == before + 1
    assert bool(fused) == (kind == "elementwise"), "the activation that is served"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_batches_of_a_cpu_are_timed_whole_and_end_their_sequences(
    family: str, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path
    write_config(folder, msgspec.structs.replace(SMALL, family=family))
    bench = ModelBench(folder, "float32", 40, 16, CPU)
    for entries in (DECODES, MIXED):
        assert bench.batch_s(entries) > 0
    assert len(bench.runner._inputs.sequences) == 0
    for kind in KINDS:
        assert bench.operator_s(Operator(kind, 4, 64)) > 0
