"""The picture of `make demo`, and the decision log that it is drawn from."""

from __future__ import annotations

import pytest
from demos.comparison import LOOSE, LOOSE_TOKENS, TIGHT, TIGHT_TOKENS, Outcome, Span
from demos.local import computed
from demos.timeline import WIDTH, axis, picture

from medha.batch import Batch, BatchResult, Chunk
from medha.request import Request
from medha.scheduling.decision_log import line
from medha.scheduling.interface import Admitted
from medha.sim.report import RequestRecord

END = WIDTH / 2.0  # in multiples of 2 s: a cell is a second wide


def record(name: str, arrival_s: float, first_s: float, deadline_s: float) -> RequestRecord:
    return RequestRecord(
        id=name,
        arrival_s=arrival_s,
        prompt_tokens=64,
        ttft_deadline_s=deadline_s,
        first_token_s=first_s,
        finished_s=first_s + 1.0,
    )


def outcome(computed: dict[str, list[Span]]) -> Outcome:
    return Outcome(
        alone_s=2.0,
        records=(
            record(TIGHT, 0.0, 12.0, 4.0),
            record(LOOSE, 2.0, 6.0, 8.0),
            record("short-0", 1.0, 2.5, 3.0),
            record("short-1", 2.0, 9.0, 3.0),
        ),
        computed=computed,
    )


def test_the_picture_shows_waiting_computing_and_lateness() -> None:
    spans = {TIGHT: [(0.0, 2.0), (8.0, 12.0)], LOOSE: [(3.0, 5.0), (4.0, 6.0)]}
    rows = list(picture("edf", outcome(spans), END))
    assert [row[:17] for row in rows] == ["edf        tight ", f"{'':11}loose ", f"{'':11}short "]
    bars = [row[17 : 17 + WIDTH] for row in rows]
    assert bars[0].rstrip() == "━━──░░░░▓▓▓▓"
    assert bars[1].rstrip() == "  ─━━━"
    assert bars[2].rstrip() == " ▁▂▁▁▁▁▁▁"
    assert [row[17 + WIDTH :].strip() for row in rows] == [
        "late: 6.0, due 2.0",
        "in time: 2.0, due 4.0",
        "1 of 2 in time",
    ]


def test_the_axis_ends_where_the_lines_end() -> None:
    assert len(axis(END)) == 17 + WIDTH


def submitted(seq: int, tokens: int, arrival_s: float) -> bytes:
    request = Request(
        id=f"r{seq}",
        arrival_s=arrival_s,
        prompt_tokens=tokens,
        work_s=1.0,
        ttft_deadline_s=9.0,
    )
    admitted = Admitted(seq, 0, promised=True, predicted_ttft_s=1.0)
    return line("submit", (request, arrival_s, ()), admitted)


def test_computed_times_are_those_of_batches_with_a_part_of_a_long_prompt() -> None:
    log = [b"{}\n", submitted(1, LOOSE_TOKENS, 90.0), submitted(2, TIGHT_TOKENS, 101.0)]
    log.append(submitted(3, LOOSE_TOKENS, 102.0))
    chunks = {
        7: (Chunk(1, 0, 64, (0,), 0), Chunk(2, 0, 64, (0,), 0)),
        8: (Chunk(2, 64, 1, (0,), 0, decode=True), Chunk(3, 0, 64, (0,), 0)),
    }
    for number, held in chunks.items():
        log.append(line("next_batch", (100.0 + number, (0,)), Batch(number, 1, held)))
        log.append(line("complete", (number, BatchResult(), 100.5 + number), ()))
    spans = computed(log, start_s=100.0)
    assert spans[TIGHT] == [pytest.approx((7.0, 7.5))]
    assert spans[LOOSE] == [pytest.approx((8.0, 8.5))]
