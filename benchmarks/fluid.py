"""Fluid reference of the policy matrix: a server without batches that knows every length.

A prompt at depth p gets `largest_chunk / batch time` tokens a second, as a real number, next to the
decodes of the moment. The batch time b is what the TPOT allows, TPOT / spp within the settings'
limits, and `max_batch_s` without decodes. A decode takes a token per spp batches, which last b
while prompts wait; decodes leave prompts at least `DECODE_FREE` of a batch and slow down otherwise.
Prompts run one at a time per KVP group, at once preempted, in the better of two orders:

    promises    prompts that can all still be in time (Moore-Hodgson, decided again at every
                arrival and end), earliest deadline first; then the others, shortest first
    shortest    shortest remaining prefill first

`fluid-kept` is another reference: as `promises`, but what was once promised is never given up. It
shows what keeping promises costs a server that knows everything.

A first token is in time if the prefill, and the drain of its last batch through the pipeline, end
by the deadline. Pages and the number of decodes are not limited. The prefix cache holds everything.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.policy_cells import Cell, CellWorkload, at_tpot
from benchmarks.policy_runs import Outcome

from medha.config import Scheduling
from medha.predictor import BatchLoad, Predictor

FLUID, FLUID_KEPT = "fluid", "fluid-kept"
REFERENCES = {FLUID: ("promises", "shortest"), FLUID_KEPT: ("kept",)}
"""Orders of each reference; the better one of several counts."""
DECODE_FREE = 0.2
SEGMENT_TOKENS, SEGMENT_SHARE = 2048, 0.05
"""Tokens, and part of its depth, after which a prompt's rate is computed again."""
DEPTH_STEP = 32_768
"""Depths at which the slowdown by decodes is computed."""


class FluidPrompt:
    """A prompt: `cursor` tokens are computed; `due_s` is when its prefill must end."""

    __slots__ = ("cursor", "due_s", "groups", "number", "output_tokens", "tokens")

    def __init__(self, number: int, tokens: int, cached: int, output_tokens: int) -> None:
        self.number, self.tokens, self.output_tokens = number, tokens, output_tokens
        self.cursor = float(cached)
        self.due_s = 0.0
        self.groups: tuple[int, ...] = (0,)


class DecodePool:
    """Decodes of one KVP group, all at the same pace; `clock` counts the tokens of each.

    A sequence over several groups decodes in its last group's pool and is a guest, of constant
    length, in the others.
    """

    def __init__(self) -> None:
        self.clock = 0.0
        self.count = self.guests = 0
        self._depth_sum = 0.0  # Σ (depth − clock) over decodes
        self._guest_keys = 0.0
        self._ends: list[tuple[float, int, float, int]] = []  # (clock, number, depth sum, groups)
        self._shared = 0  # decodes over several groups

    @property
    def rows(self) -> int:
        return self.count + self.guests

    @property
    def keys(self) -> float:
        return self._depth_sum + self.count * self.clock + self._guest_keys

    @property
    def left(self) -> float:
        """Tokens until the next decode ends."""
        return self._ends[0][0] - self.clock if self._ends else float("inf")

    def add(self, number: int, keys: float, tokens: int, groups: int) -> None:
        offset = keys - self.clock
        self.count += 1
        self._shared += groups > 1
        self._depth_sum += offset
        heapq.heappush(self._ends, (self.clock + tokens, number, offset, groups))

    def host(self, keys: float) -> None:
        self.guests += 1
        self._guest_keys += keys

    def leave(self, keys: float) -> None:
        self.guests -= 1
        self._guest_keys -= keys

    def ended(self) -> list[int]:
        """Remove decodes that have emitted all their tokens."""
        numbers = []
        while self._ends and self._ends[0][0] <= self.clock + 1e-9:
            _, number, offset, groups = heapq.heappop(self._ends)
            self.count -= 1
            self._shared -= groups > 1
            self._depth_sum -= offset
            numbers.append(number)
        return numbers

    def load(self, predictor: Predictor, share: float, groups: int) -> BatchLoad:
        """Load of a batch that seats `share` of the decodes."""
        load = predictor.load()
        shared = round(share * (self._shared + self.guests))
        rows = round(share * self.rows)
        if rows:
            load.add_decodes(max(rows, 1), int(share * self.keys))
            load.kvp_rows += shared * (groups - 1)
        elif self.rows and share > 0.0:
            load.add_decodes(1, int(share * self.keys))
        return load


class FluidReplica:
    """A replica that serves prompts as a fluid; `finished_s` holds the first tokens' times."""

    def __init__(
        self, predictor: Predictor, tpot_s: float, settings: Scheduling, order: str
    ) -> None:
        self.predictor, self.order, topology = predictor, order, predictor.topology
        self.spp, self.size, self.most = topology.spp, predictor.tokens_per_group, topology.kvp_max
        self.beside_decodes_s = min(
            max(tpot_s / self.spp, settings.min_batch_s), settings.max_batch_s
        )
        self.alone_s = settings.max_batch_s
        # A batch without room for a prompt takes a step every `max_starved_rounds`.
        self.least_chunk = settings.chunk_step_tokens / settings.max_starved_rounds
        self.work = at_tpot(predictor, tpot_s, settings)
        self.now = 0.0
        self.pools = [DecodePool() for _ in range(self.most)]
        self.waiting: dict[int, FluidPrompt] = {}
        self.promised: frozenset[int] = frozenset()  # never given up
        self.finished_s: dict[int, float] = {}
        self._decoding: dict[int, FluidPrompt] = {}
        self._ranked: list[FluidPrompt] = []
        self._slowdowns: dict[tuple[int, int], float] = {}

    # --- requests ---------------------------------------------------------------------------------

    def offer(self, prompt: FluidPrompt, deadline_s: float) -> tuple[int, float]:
        """Return what a prompt that arrives now would cost: prompts that would then be late, and
        the seconds until its own prefill ends."""
        kept = len(self._kept(self.waiting, self._left()))
        self._assign(prompt, deadline_s)
        waiting = {**self.waiting, prompt.number: prompt}
        left_s = self._left() | {prompt.number: self._left_s(prompt)}
        kept_with = self._kept(waiting, left_s)
        ahead = itertools.takewhile(
            lambda other: other is not prompt, self._ordered(waiting, kept_with, left_s)
        )
        group = prompt.groups[0]
        ahead_s = sum(left_s[other.number] for other in ahead if group in other.groups)
        return kept + 1 - len(kept_with), ahead_s + left_s[prompt.number]

    def submit(self, prompt: FluidPrompt, deadline_s: float) -> None:
        """Take a prompt that arrives now."""
        self._assign(prompt, deadline_s)
        self.waiting[prompt.number] = prompt
        self._rank()

    def _assign(self, prompt: FluidPrompt, deadline_s: float) -> None:
        """Give a prompt its groups, those with the least work first, and the end of its prefill."""
        pending = [0.0] * self.most
        for other in self.waiting.values() if self.most > 1 else ():
            for group in other.groups:
                pending[group] += self.work.busy_s(other.tokens, int(other.cursor))
        by_load = sorted(range(self.most), key=lambda group: (pending[group], group))
        prompt.groups = tuple(by_load[: self._active(prompt.tokens)])
        whole_s = self.work.busy_s(prompt.tokens, int(prompt.cursor))
        drain_s = (self.spp - 1) * min(self.beside_decodes_s, whole_s)
        prompt.due_s = self.now + deadline_s - drain_s

    def advance(self, until_s: float) -> None:
        """Run until a time; the last step may end a rounding error earlier."""
        while self.now < until_s:
            running = self._running()
            busy = {group for prompt, groups in running for group in groups}
            budget_s = self._budget_s()
            paces = [self._pace(pool, budget_s, at in busy) for at, pool in enumerate(self.pools)]
            rates = [self._rate(prompt, groups, budget_s) for prompt, groups in running]
            step_s = until_s - self.now
            for pool, pace in zip(self.pools, paces, strict=True):
                if pool.count:
                    step_s = min(step_s, pool.left / pace)
            for (prompt, _), rate in zip(running, rates, strict=True):
                step_s = min(step_s, self._segment(prompt) / rate)
            if not running and not any(pool.count for pool in self.pools):
                step_s = until_s - self.now
            self.now = until_s if step_s == until_s - self.now else self.now + step_s
            for pool, pace in zip(self.pools, paces, strict=True):
                pool.clock += pace * step_s if pool.count else 0.0
            for (prompt, _), rate in zip(running, rates, strict=True):
                prompt.cursor += rate * step_s
            self._end_decodes()
            self._end_prefills(prompt for prompt, _ in running)

    # --- rates ------------------------------------------------------------------------------------

    def _budget_s(self) -> float:
        return self.beside_decodes_s if any(pool.count for pool in self.pools) else self.alone_s

    def _seated(self, pool: DecodePool, budget_s: float) -> float:
        """Share of the decodes in a batch: 1 / spp, or less if they leave prompts no room."""
        share, most_s = 1.0 / self.spp, (1.0 - DECODE_FREE) * budget_s
        if pool.rows and self._load(pool, share).seconds() > most_s:
            low, high = 0.0, share
            for _ in range(12):
                middle = 0.5 * (low + high)
                fits = self._load(pool, middle).seconds() <= most_s
                low, high = (middle, high) if fits else (low, middle)
            share = max(low, 0.01)
        return share

    def _load(self, pool: DecodePool, share: float) -> BatchLoad:
        return pool.load(self.predictor, share, self.most)

    def _pace(self, pool: DecodePool, budget_s: float, prefilling: bool) -> float:
        """Tokens per second of each decode."""
        if not pool.count:
            return 0.0
        if prefilling:
            return self._seated(pool, budget_s) / budget_s
        return 1.0 / (self.spp * self._load(pool, 1.0 / self.spp).seconds())

    def _rate(self, prompt: FluidPrompt, groups: tuple[int, ...], budget_s: float) -> float:
        """Prompt tokens per second at the middle of the next segment; the slowest group decides."""
        depth = prompt.cursor + 0.5 * self._segment(prompt)
        rates = []
        for group in groups:
            pool = self.pools[group]
            load = self._load(pool, self._seated(pool, budget_s))
            chunk = self._chunk(load, depth, budget_s, len(groups))
            # A chunk from here on would include deeper tokens: let its middle lie at this depth.
            chunk = self._chunk(load, max(0.0, depth - 0.5 * chunk), budget_s, len(groups))
            rates.append(max(chunk, self.least_chunk) / budget_s)
        return min(rates)

    def _chunk(self, load: BatchLoad, depth: float, budget_s: float, groups: int) -> float:
        keys = self._keys(int(depth), groups)
        return smooth_chunk(self.predictor, load, keys, budget_s, groups)

    def _active(self, tokens: int) -> int:
        return min(self.most, max(1, -(-tokens // self.size)))

    def _keys(self, tokens: int, groups: int) -> int:
        """Keys in the fullest group of a sequence."""
        return max(min(tokens, self.size), -(-tokens // groups))

    def _segment(self, prompt: FluidPrompt) -> float:
        left = prompt.tokens - prompt.cursor
        upto = SEGMENT_TOKENS + SEGMENT_SHARE * prompt.cursor
        if self.most > 1:  # stop where another group joins
            upto = min(upto, max(1.0, self.size - prompt.cursor % self.size))
        return min(left, upto)

    # --- order ------------------------------------------------------------------------------------

    def _running(self) -> list[tuple[FluidPrompt, tuple[int, ...]]]:
        """Prompts that run now and their groups: in order, each where its groups are idle."""
        idle = set(range(self.most))
        running = []
        for prompt in self._ranked:
            groups = prompt.groups[: self._active(int(prompt.cursor) + 1)]
            if idle.issuperset(groups):
                idle.difference_update(groups)
                running.append((prompt, groups))
                if not idle:
                    break
        return running

    def _rank(self) -> None:
        """Order the waiting prompts again."""
        left_s = self._left()
        promising = self.order != "shortest"
        kept = self._kept(self.waiting, left_s) if promising else frozenset[int]()
        if self.order == "kept":
            self.promised = kept
        self._ranked = self._ordered(self.waiting, kept, left_s)

    def _left(self) -> dict[int, float]:
        self._slowdowns.clear()
        return {number: self._left_s(prompt) for number, prompt in self.waiting.items()}

    def _ordered(
        self, waiting: Mapping[int, FluidPrompt], kept: frozenset[int], left_s: Mapping[int, float]
    ) -> list[FluidPrompt]:
        """Kept prompts by deadline, then the others by remaining work."""
        return sorted(
            waiting.values(),
            key=lambda prompt: (
                (0, prompt.due_s, prompt.number)
                if prompt.number in kept
                else (1, left_s[prompt.number], prompt.number)
            ),
        )

    def _kept(
        self, waiting: Mapping[int, FluidPrompt], left_s: Mapping[int, float]
    ) -> frozenset[int]:
        """Moore-Hodgson: prompts that can all be in time; the largest of each overrun goes.

        Promised ones stay."""
        totals = [0.0] * self.most
        heaps: list[list[tuple[float, int]]] = [[] for _ in range(self.most)]
        kept: set[int] = set()
        for prompt in sorted(waiting.values(), key=lambda prompt: prompt.due_s):
            kept.add(prompt.number)
            for group in prompt.groups:
                totals[group] += left_s[prompt.number]
                if prompt.number not in self.promised:
                    heapq.heappush(heaps[group], (-left_s[prompt.number], prompt.number))
            for group in prompt.groups:
                while totals[group] > prompt.due_s - self.now and heaps[group]:
                    largest = heapq.heappop(heaps[group])[1]
                    if largest in kept:
                        kept.discard(largest)
                        for other in waiting[largest].groups:
                            totals[other] -= left_s[largest]
        return frozenset(kept)

    def _left_s(self, prompt: FluidPrompt) -> float:
        """Seconds that the rest of a prompt takes next to the decodes of now."""
        cursor = int(prompt.cursor)
        whole_s = self.work.busy_s(prompt.tokens, cursor)
        depth = (prompt.tokens + cursor) // 2 // DEPTH_STEP * DEPTH_STEP
        return whole_s * max(self._slowdown(group, depth) for group in prompt.groups)

    def _slowdown(self, group: int, depth: int) -> float:
        """Factor of the time at a depth that the decodes of now cost."""
        key = group, depth
        if key not in self._slowdowns:
            pool, budget_s = self.pools[group], self.beside_decodes_s
            groups = self._active(depth)
            empty = self._chunk(self.predictor.load(), depth, budget_s, groups)
            load = self._load(pool, self._seated(pool, budget_s))
            chunk = self._chunk(load, depth, budget_s, groups)
            least = self.least_chunk
            self._slowdowns[key] = max(empty, least) / max(chunk, least)
        return self._slowdowns[key]

    # --- ends -------------------------------------------------------------------------------------

    def _end_prefills(self, prompts: Iterable[FluidPrompt]) -> None:
        ended = [prompt for prompt in prompts if prompt.tokens - prompt.cursor < 1e-6]
        for prompt in ended:
            del self.waiting[prompt.number]
            self.finished_s[prompt.number] = self.now
            if prompt.output_tokens > 1:
                groups = prompt.groups
                keys = self._keys(prompt.tokens, len(groups))
                pool = self.pools[groups[-1]]
                pool.add(prompt.number, keys, prompt.output_tokens - 1, len(groups))
                for group in groups[:-1]:
                    self.pools[group].host(keys)
                self._decoding[prompt.number] = prompt
        if ended:
            self._rank()

    def _end_decodes(self) -> None:
        for pool in self.pools:
            for number in pool.ended():
                prompt = self._decoding.pop(number)
                keys = self._keys(prompt.tokens, len(prompt.groups))
                for group in prompt.groups[:-1]:
                    self.pools[group].leave(keys)


def smooth_chunk(
    predictor: Predictor, load: BatchLoad, keys: int, budget_s: float, groups: int = 1
) -> float:
    """Largest chunk within a budget as a real number, linear between whole tokens."""
    chunk = predictor.largest_chunk(load, keys, 1 << 20, budget_s, 1, groups)
    above_s = load.seconds_with(chunk + 1, keys, groups)
    below_s = load.seconds_with(chunk, keys, groups) if chunk else load.seconds()
    if above_s <= below_s or below_s >= budget_s:
        return float(chunk)
    return chunk + min(1.0, (budget_s - below_s) / (above_s - below_s))


def first_tokens(
    replicas: Sequence[FluidReplica], load: CellWorkload
) -> tuple[set[str], dict[str, float]]:
    """Serve a workload: ids in time, and the end of each prefill.

    Each prompt goes where it makes the fewest prompts late, and of these where it ends first.
    """
    ids = [arrival.id for arrival in load.arrivals]
    prompts: dict[int, FluidPrompt] = {}
    for number, arrival in enumerate(load.arrivals):
        deadline_s = load.deadlines_s[arrival.id]
        prompt = FluidPrompt(
            number, arrival.prompt_tokens, load.cached[arrival.id], arrival.output_tokens
        )
        prompts[number] = prompt
        for replica in replicas:
            replica.advance(arrival.arrival_s)
        best = replicas[0]
        if len(replicas) > 1:
            offers = [replica.offer(prompt, deadline_s) for replica in replicas]
            best = replicas[offers.index(min(offers))]
        best.submit(prompt, deadline_s)
    last_s = max(prompt.due_s for prompt in prompts.values())
    for replica in replicas:
        replica.advance(last_s + 1e-6)
    ends = dict(itertools.chain.from_iterable(r.finished_s.items() for r in replicas))
    in_time = {ids[number] for number, end_s in ends.items() if end_s <= prompts[number].due_s}
    return in_time, {ids[number]: end_s for number, end_s in ends.items()}


def play(cell: Cell, load: CellWorkload, reference: str = FLUID) -> Outcome:
    """Serve a cell's workload in a reference's orders; returns the better by its two shares."""
    outcomes = [_play(cell, load, order) for order in REFERENCES[reference]]
    return max(outcomes, key=lambda outcome: outcome.short_share + outcome.long_share)


def _play(cell: Cell, load: CellWorkload, order: str) -> Outcome:
    began_s, settings = time.process_time(), Scheduling()
    replicas = [
        FluidReplica(cell.predictor(settings), cell.tpot_s, settings, order)
        for _ in range(cell.replicas)
    ]
    in_time, _ = first_tokens(replicas, load)
    longs = {arrival.id for arrival in load.arrivals if load.is_long(arrival)}
    return Outcome(
        short=len(load.arrivals) - len(longs),
        long=len(longs),
        short_in_time=len(in_time - longs),
        long_in_time=len(in_time & longs),
        work_s=sum(load.work_s.values()),
        work_in_time_s=sum(load.work_s[name] for name in in_time),
        load=load.load,
        spent_s=time.process_time() - began_s,
    )
