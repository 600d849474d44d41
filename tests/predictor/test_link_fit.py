"""Laws of exchanges between ranks: fitted to measured times, judged on others, put in a profile."""

from __future__ import annotations

import pytest

from medha.calibration import ExchangeKind, TimedExchange, fit_link, with_links
from medha.measurement_plan import exchange_sizes
from medha.model import ModelShape
from medha.predictor import Costs
from medha.profile import CPU_CORE
from medha.topology import Topology

SIZES = list(exchange_sizes(4 << 20))
SHAPE = ModelShape(
    layers=2, hidden=1024, heads=8, kv_heads=8, head_dim=128, intermediate=64, vocab=64
)


def measured(
    kind: ExchangeKind, ranks: int, latency_s: float, bytes_per_s: float
) -> list[TimedExchange]:
    """Times that follow the law."""
    exchanges = []
    for size, unseen in SIZES:
        moved = TimedExchange(kind, ranks, size, 0.0).moved_bytes
        exchanges.append(TimedExchange(kind, ranks, size, latency_s + moved / bytes_per_s, unseen))
    return exchanges


def test_sizes_for_the_fit_and_for_its_validation_alternate() -> None:
    assert SIZES[:4] == [(4096, False), (6144, True), (8192, False), (12288, True)]
    assert SIZES[-1] == (4 << 20, False)
    assert sum(unseen for _, unseen in SIZES) == 10


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["all-reduce", "point-to-point"])
@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(2e-5, 3e11), (3e-4, 1e9), (0.0, 1e8)])
def test_a_law_is_recovered(
    kind: ExchangeKind, ranks: int, latency_s: float, bytes_per_s: float
) -> None:
    link = fit_link(measured(kind, ranks, latency_s, bytes_per_s))
    assert link.latency_s == pytest.approx(latency_s, rel=1e-6, abs=1e-12)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-6)
    assert len(link.errors) == 10 and max(map(abs, link.errors)) < 1e-6


def test_pauses_of_the_machine_move_the_law_little() -> None:
    exchanges = measured("all-reduce", 2, 1e-4, 1e9)
    for index in (2, 10, 18):
        own = exchanges[index]
        exchanges[index] = TimedExchange(own.kind, 2, own.size_bytes, 20 * own.seconds)
    link = fit_link(exchanges)
    assert link.latency_s == pytest.approx(1e-4, rel=0.1)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_unseen_sizes_judge_and_do_not_fit() -> None:
    exchanges = [
        TimedExchange(
            own.kind, 2, own.size_bytes, own.seconds * (2.0 if own.unseen else 1.0), own.unseen
        )
        for own in measured("point-to-point", 2, 1e-4, 1e9)
    ]
    link = fit_link(exchanges)
    assert link.bytes_per_s == pytest.approx(1e9)
    assert link.errors == pytest.approx([-0.5] * 10)


@pytest.mark.parametrize("power", [-1, 0, 2])
def test_no_law_has_a_negative_part(power: int) -> None:
    times = [
        TimedExchange("all-reduce", 2, size, 1e-3 * size**power, unseen) for size, unseen in SIZES
    ]
    link = fit_link(times)
    assert link.latency_s >= 0.0 and link.bytes_per_s > 0.0


def test_a_profile_predicts_the_exchanges_that_were_measured() -> None:
    links = [
        fit_link(measured("all-reduce", 4, 5e-5, 2e9)),
        fit_link(measured("point-to-point", 4, 2e-5, 7e9)),
    ]
    profile = with_links(CPU_CORE, links)
    assert profile.kvp_bytes_per_s == CPU_CORE.kvp_bytes_per_s
    costs = Costs(profile, SHAPE, Topology(tp=4, spp=2))
    rows, row_bytes = 300, 1024 * 2
    of_layer = 2 * (5e-5 + rows * 1.5 * row_bytes / 2e9)
    assert costs.all_reduce_s + rows * costs.all_reduce_row == pytest.approx(of_layer)
    assert costs.p2p_s + rows * costs.p2p_row == pytest.approx(2e-5 + rows * row_bytes / 7e9)
