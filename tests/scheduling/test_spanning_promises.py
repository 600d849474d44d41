"""Promises over several groups against a plain clock per group.

Every number is a small multiple of a power of two, so that sums are exact in whatever order they
are taken, and ties are frequent.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from medha.prefill_times import FRACTIONS
from medha.scheduling.native import Spans
from medha.scheduling.sequence import Sequence
from medha.scheduling.waiting_queue import WaitingQueue
from medha.testing import request

GROUPS, BY_S = range(3), 0.5
OVERHEAD_S, INFLATION = 0.25, 1.25
PLUS = 0.125  # decodes alongside a promise that is tried, as a part of the capacity


@dataclass
class Prompt:
    """A prompt, and its seconds of work in each of its groups. `left`: it is not all scheduled."""

    number: int
    due_s: float
    work_s: dict[int, float]
    promised: bool
    left: bool = True
    waits: bool = True

    @property
    def key(self) -> tuple[float, float, str]:
        return self.due_s, 0.0, f"{self.number:03}"

    def cost_s(self, group: int, tried: bool) -> float:
        work_s = self.work_s[group] * (1.0 + (PLUS if tried else 0.0))
        return (work_s + OVERHEAD_S) * INFLATION


def drawn(seed: int, count: int) -> list[Prompt]:
    dice = random.Random(seed)
    prompts = []
    for number in range(count):
        groups = dice.sample(GROUPS, dice.choice([1, 1, 2, 3]))
        work_s = sorted((dice.randint(0, 16) / 8.0 for _ in groups), reverse=dice.random() < 0.8)
        prompts.append(
            Prompt(
                number,
                dice.randint(0, 6 * count) / 4.0,
                dict(zip(groups, work_s, strict=True)),
                dice.random() < 0.7,
                dice.random() < 0.9,
                dice.random() < 0.9,
            )
        )
    return prompts


def plain_margins(prompts: list[Prompt], tried: set[int]) -> dict[int, float]:
    """Return the margins of promises over several groups: each prompt waits for all its groups."""
    clock_s, ends_s = dict.fromkeys(GROUPS, 0.0), {}
    promised = sorted(
        (prompt for prompt in prompts if prompt.waits and prompt.promised),
        key=lambda prompt: prompt.key,
    )
    for prompt in promised:
        cost_s = {group: prompt.cost_s(group, group in tried) for group in prompt.work_s}
        if len(cost_s) == 1 or not prompt.left:
            for group, seconds in cost_s.items():
                clock_s[group] += seconds
            continue
        end_s, later = 0.0, [*cost_s.values(), 0.0][1:]
        for (group, seconds), after_s in zip(cost_s.items(), later, strict=True):
            end_s = max(end_s, clock_s[group]) + max(0.0, seconds - after_s)
        clock_s.update(dict.fromkeys(cost_s, end_s))
        ends_s[prompt.number] = end_s
    least_s, margins = dict.fromkeys(GROUPS, math.inf), {}
    for prompt in reversed(promised):
        if prompt.number in ends_s:
            own_s = prompt.due_s - BY_S - ends_s[prompt.number]
            margin_s = min([own_s, *(least_s[group] for group in prompt.work_s)])
            least_s.update(dict.fromkeys(prompt.work_s, margin_s))
            margins[prompt.number] = margin_s
    return margins


def queued(prompts: list[Prompt]) -> tuple[dict[int, WaitingQueue], Spans]:
    """Return the queue of each group, with all works tried, and the prompts over several groups."""
    queues = {group: WaitingQueue() for group in GROUPS}
    for prompt in prompts:
        sequence = Sequence(prompt.number, request(f"{prompt.number:03}", 8))
        sequence.key = prompt.key
        sequence.set_rank(prompt.promised, prompt.promised)
        sequence.scheduled_tokens = 0 if prompt.left else 8
        for group, work_s in prompt.work_s.items() if prompt.waits else ():
            queues[group].add(sequence, [work_s * (1.0 + part) for part in FRACTIONS], 0)
    for queue in queues.values():
        queue.rows.try_decodes(PLUS, [], 0.0, 1.0, 1.0)
    spanning = [
        (prompt.key, prompt.number, tuple(prompt.work_s))
        for prompt in prompts
        if len(prompt.work_s) > 1
    ]
    return queues, Spans({group: queue.rows for group, queue in queues.items()}, spanning)


@given(st.integers(0, 1 << 32), st.integers(1, 30))
def test_a_groups_margins_are_limited_by_promises_over_several_groups(
    seed: int, count: int
) -> None:
    prompts = drawn(seed, count)
    queues, spans = queued(prompts)
    for group, queue in queues.items():
        here = {
            prompt.number: queue.place(prompt.key)
            for prompt in prompts
            if prompt.waits and group in prompt.work_s
        }
        for tried in (False, True):
            margins = plain_margins(prompts, {group} if tried else set())
            least_s = min(
                (margins[number] for number in here if number in margins), default=math.inf
            )
            assert spans.least_s(group, tried, BY_S, OVERHEAD_S, INFLATION) == least_s
        queue.rows.margins(BY_S, OVERHEAD_S, INFLATION)
        own = {row: queue.rows.margin_s(row) for row in here.values()}
        promised_s = queue.rows.least_promised_s
        spans.lower(group, BY_S, OVERHEAD_S, INFLATION)
        margins = plain_margins(prompts, set())
        for number, row in here.items():
            if queue.kept[row]:
                assert queue.rows.margin_s(row) == min(own[row], margins.get(number, math.inf))
        lowered = [margin_s for number, margin_s in margins.items() if number in here]
        assert queue.rows.least_promised_s == queue.rows.least_s == min([promised_s, *lowered])


def test_a_prompt_over_two_groups_waits_for_the_busier() -> None:
    #   g0  |- 1.25 -|  waits   |= 1.25 =|      costs (work + 0.25) * 1.25; the start costs 0.5
    #   g1  |------- 2.5 -------|= 1.25 =|      the prompt is due at 5: 5 - 0.5 - 3.75 are left
    first, second = Prompt(0, 3.0, {0: 0.75}, True), Prompt(1, 3.5, {1: 1.75}, True)
    both = Prompt(2, 5.0, {0: 0.75, 1: 0.75}, True)
    _, spans = queued([first, second, both])
    for group in both.work_s:
        assert spans.least_s(group, False, BY_S, OVERHEAD_S, INFLATION) == 0.75
    assert spans.least_s(2, False, BY_S, OVERHEAD_S, INFLATION) == math.inf
