"""The workload that `make demo` plays under five policies, and the checks of what came out.

A long prompt arrives with a deadline that this machine cannot meet, and soon after it a shorter
long prompt with one that it can meet. Short prompts with answers arrive all the time. Times scale
with `alone_s`, the time to the first token of the shorter long prompt alone. It is measured on each
fleet just before, because other programs change the speed of the machine from fleet to fleet.

    tight   11,776 tokens   due after 1.5 × alone_s, less than half of what it needs alone
    loose    4,096 tokens   due after 2.8 × alone_s
    short       64 tokens   due after 0.5 × alone_s, at least 2.5 s; answers of 16 to 48 tokens

FCFS makes everybody wait for the tight prompt. The threshold shares batches between both long
prompts, and batches are long. EDF computes the tight prompt when its deadline is near, and goes on
when the deadline has passed. LARS as published does so too, and each short prompt waits until its
own slack is gone. The promise set gives the tight prompt no promise and serves it last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from medha.sim.report import RequestRecord
from medha.sim.workload import Arrival

TIGHT, LOOSE = "tight", "loose"
LONGS = (TIGHT, LOOSE)
TIGHT_TOKENS, LOOSE_TOKENS, SHORT_TOKENS = 11_776, 4_096, 64
LONG_OUTPUT, SHORT_OUTPUT = 8, (16, 48)
SHORTS, SEED = 36, 7
# In multiples of `alone_s`: arrivals, deadlines, and the time in which short prompts arrive.
TIGHT_AT, LOOSE_AT, SHORTS_UNTIL = 0.1, 0.5, 4.0
TIGHT_DUE, LOOSE_DUE, SHORT_DUE = 1.5, 2.8, 0.5
LEAST_DUE_S, TPOT_S = 2.5, 1.0

TOKENS = {"mode": "Tokens", "tokens": 2048}
POLICIES: dict[str, dict[str, Any]] = {
    "fcfs": {"policy": "FCFS", "batchBudget": TOKENS},
    "threshold": {"policy": "FCFS", "batchBudget": TOKENS, "longPrefillThresholdTokens": 512},
    "edf": {"policy": "EDF"},
    "lars-paper": {"policy": "LARSPaper"},
    "lars": {"policy": "LARS"},
}
"""`spec.scheduling` of each policy."""

Span = tuple[float, float]


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a policy's run; times in seconds since the start of the arrivals.

    `alone_s`: scale of the arrivals and deadlines. `computed`: start and end of batches with a part
    of a long prompt, by its id.
    """

    alone_s: float
    records: tuple[RequestRecord, ...]
    computed: Mapping[str, Sequence[Span]] = {}

    def record(self, request_id: str) -> RequestRecord:
        return next(record for record in self.records if record.id == request_id)

    @property
    def shorts(self) -> list[RequestRecord]:
        return [record for record in self.records if record.id not in LONGS]

    @property
    def late(self) -> int:
        """Number of short prompts whose first token came after the deadline."""
        return sum(not short.in_time for short in self.shorts)

    @property
    def promised(self) -> list[RequestRecord]:
        return [record for record in self.records if record.promised]

    @property
    def broken(self) -> int:
        """Number of promises that were not kept."""
        return sum(not record.in_time for record in self.promised)

    @property
    def longs_end_s(self) -> float:
        """Time at which both long prompts have their first token."""
        return max(_first_s(self.record(name)) for name in LONGS)

    @property
    def longs_end(self) -> float:
        """The same in multiples of `alone_s`."""
        return self.longs_end_s / self.alone_s

    def ttft(self, request_id: str) -> float:
        """Time to the first token in multiples of `alone_s`."""
        return ttft_s(self.record(request_id)) / self.alone_s


def arrivals(alone_s: float) -> list[Arrival]:
    """Arrivals in order of time."""
    rng = np.random.default_rng(SEED)
    times = np.cumsum(rng.exponential(1.0, SHORTS))
    times *= SHORTS_UNTIL * alone_s / times[-1]
    outputs = rng.integers(*SHORT_OUTPUT, SHORTS, endpoint=True)
    planned = [
        _arrival(f"short-{index}", at_s, SHORT_TOKENS, output)
        for index, (at_s, output) in enumerate(zip(times.tolist(), outputs.tolist(), strict=True))
    ]
    planned.append(_arrival(TIGHT, TIGHT_AT * alone_s, TIGHT_TOKENS, LONG_OUTPUT))
    planned.append(_arrival(LOOSE, LOOSE_AT * alone_s, LOOSE_TOKENS, LONG_OUTPUT))
    return sorted(planned, key=lambda arrival: arrival.arrival_s)


def deadline_s(request_id: str, alone_s: float) -> float:
    """Time to the first token that a request asks for."""
    longs = {TIGHT: TIGHT_DUE * alone_s, LOOSE: LOOSE_DUE * alone_s}
    return longs.get(request_id, max(LEAST_DUE_S, SHORT_DUE * alone_s))


def checks(outcomes: Mapping[str, Outcome]) -> dict[str, bool]:
    """Claims about the policies, and whether they hold."""
    lars, fcfs = outcomes["lars"], outcomes["fcfs"]
    tight, loose = lars.record(TIGHT), lars.record(LOOSE)
    others = [run.ttft(LOOSE) for name, run in outcomes.items() if name != "lars"]
    return {
        "lars promises the loose prompt and 9 of 10 short ones, and not the tight one": (
            loose.promised and not tight.promised and len(lars.promised) > 0.9 * len(lars.shorts)
        ),
        "lars breaks no promise": lars.broken == 0,
        "the loose prompt is in time under lars, and sooner than under every other policy": (
            loose.in_time and lars.ttft(LOOSE) < min(others)
        ),
        "fcfs, edf and lars-paper each have four times as many late short prompts as lars": all(
            outcomes[name].late >= max(4, 4 * lars.late) for name in ("fcfs", "edf", "lars-paper")
        ),
        "both long prompts end within 3 times their time under fcfs": (
            lars.longs_end <= 3.0 * fcfs.longs_end
        ),
    }


def figures(outcome: Outcome) -> dict[str, Any]:
    """Figures of a policy for build/demo.json; times in seconds."""
    times = [ttft_s(short) for short in outcome.shorts]
    return {
        "alone_s": outcome.alone_s,
        "ttft_s": {name: ttft_s(outcome.record(name)) for name in LONGS},
        "due_s": {name: outcome.record(name).ttft_deadline_s for name in LONGS},
        "short_ttft_p50_s": float(np.percentile(times, 50)),
        "short_ttft_p99_s": float(np.percentile(times, 99)),
        "short_late": outcome.late,
        "short_gap_s": max(short.worst_gap_s for short in outcome.shorts),
        "longs_end_s": outcome.longs_end_s,
        "promised": len(outcome.promised),
        "broken": outcome.broken,
    }


def ttft_s(record: RequestRecord) -> float:
    """Time to the first token; infinite without one."""
    return _first_s(record) - record.arrival_s


def _first_s(record: RequestRecord) -> float:
    return float("inf") if record.first_token_s is None else record.first_token_s


def _arrival(request_id: str, at_s: float, prompt: int, output: int) -> Arrival:
    return Arrival(id=request_id, arrival_s=at_s, prompt_tokens=prompt, output_tokens=output)
