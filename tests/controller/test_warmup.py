"""The warm-up's plan: what it measures, and when it ends."""

from __future__ import annotations

from medha_worker.controller.warmup import Warmup


def warmup() -> Warmup:
    return Warmup(
        group=0, spp=1, pages=4096, page_tokens=64, max_context_tokens=4096, vocab=256, budget_s=2.0
    )


def test_a_slow_first_batch_is_neither_measured_nor_takes_the_others_time() -> None:
    of, now = warmup(), 0.0
    while (batch := of.next(now)) is not None:
        took_s = 30.0 if batch.number == 1 else 0.1  # the first pages code in
        now += took_s
        of.done(batch.number, took_s)
    assert of.finished
    assert {sample.seconds for sample in of.samples} == {0.1}
    assert 20 <= len(of.samples) <= 21
    assert now < 30.0 + 2.0 + 0.2


def test_all_of_the_plan_runs_where_there_is_time() -> None:
    of = warmup()
    while (batch := of.next(0.0)) is not None:
        of.done(batch.number, 0.01)
    lengths = {sum(length for length, _, _ in sample.entries) for sample in of.samples}
    assert {1, 4, 16, 32, 128, 256, 512} <= lengths
