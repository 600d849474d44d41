"""Running work: decodes with their prepared next chunks and credit, and batches in flight.

A sequence has one decode in flight. When a token arrives, the next chunk is prepared at once (its
position is known), so that adding all decodes to a batch costs next to nothing. With lookahead the
next decode may be prepared behind a batch that still runs (see scheduler.py). Token k is due at
first token + k × TPOT: a decode that is early has credit and can wait.
"""

from __future__ import annotations

from math import inf
from typing import Final

from medha.batch import Batch, Chunk
from medha.predictor import BatchLoad
from medha.scheduling.sequence import Sequence

# However short the batches: another one costs every stage its messages.
MOST_PER_STAGE = 2
# Tokens within which a decode that is behind is on time again.
CATCH_UP = 8
# Tokens of an answer that is over before it has caught up.
SHORT_ANSWER = CATCH_UP + 2
# With decodes in flight a pipeline is full at this part of its time: another batch would go without
# the decodes that are about to complete, and they would wait for a whole round.
FULL = 0.6
ALL_KEYS: Final = 1 << 60


def _leisure(sequence: Sequence) -> int:
    return ALL_KEYS if sequence.output_tokens > 1 else sequence.max_output_tokens


class DecodeGroup:
    """Prepared decodes of sequences that live in the same KVP groups.

    They stand oldest first, but second tokens that went first where some decodes had to stay.
    `alone`: the group, if it is one. `in_flight`: how many are in flight. Keys in a lone group are
    one number, because every token changes it. `sees`: keys that a decode reads at most.
    """

    __slots__ = ("_keys", "_lone_keys", "alone", "groups", "in_flight", "prepared", "sees")

    def __init__(self, groups: tuple[int, ...], sees: int = ALL_KEYS) -> None:
        self.groups, self.alone = groups, groups[0] if len(groups) == 1 else -1
        self.sees = sees
        self.prepared: list[Sequence] = []
        self._keys = [0] * len(groups)
        self._lone_keys = self.in_flight = 0

    def __len__(self) -> int:
        return len(self.prepared)

    @property
    def keys(self) -> dict[int, int]:
        """KV tokens per group that the attention of prepared decodes reads, their own included."""
        if self.alone >= 0:
            return {self.alone: self._lone_keys}
        return dict(zip(self.groups, self._keys, strict=True))

    def keys_of(self, count: int) -> dict[int, int]:
        """Return `keys` of the decodes that `take` removes."""
        if count >= len(self.prepared):
            return self.keys
        first = DecodeGroup(self.groups, self.sees)
        for sequence in sorted(self.prepared, key=_leisure)[:count]:
            first._add_keys(sequence)
        return first.keys

    def batch_share(self, spp: int) -> int:
        """Count the decodes to take, so that they are spread evenly over the batches in flight."""
        ready = len(self.prepared)
        return min(ready, -(-(ready + self.in_flight) // spp))

    def add(self, sequence: Sequence) -> None:
        """Hold the sequence's next decode ready for a batch."""
        self.prepared.append(sequence)
        self._add_keys(sequence)
        sequence.prepare_decode(self.groups)

    def remove(self, sequence: Sequence) -> None:
        self.prepared.remove(sequence)
        self._remove_keys(sequence)

    def take(self, most: int) -> list[Sequence]:
        """Remove and return at most `most` prepared decodes, in their order.

        Second tokens go first if others must stay, those of the shortest answers before others:
        they have the least time to catch up.
        """
        if len(self.prepared) <= most:
            taken, self.prepared = self.prepared, []
            self._keys, self._lone_keys = [0] * len(self.groups), 0
        else:
            self.prepared.sort(key=_leisure)
            taken = self.prepared[:most]
            del self.prepared[:most]
            for sequence in taken:
                self._remove_keys(sequence)
        self.in_flight += len(taken)
        return taken

    def land(self, count: int) -> None:
        """Count decodes in flight as complete or void."""
        self.in_flight -= count

    def _add_keys(self, sequence: Sequence) -> None:
        if self.alone >= 0:  # all its tokens lie there
            tokens, sees = sequence.scheduled_tokens, self.sees
            self._lone_keys += tokens if tokens < sees else sees
            return
        held = sequence.tokens_by_group
        for at, group in enumerate(self.groups):
            self._keys[at] += held.get(group, 0)

    def _remove_keys(self, sequence: Sequence) -> None:
        if self.alone >= 0:
            self._lone_keys -= min(sequence.scheduled_tokens, self.sees)
            return
        held = sequence.tokens_by_group
        for at, group in enumerate(self.groups):
            self._keys[at] -= held.get(group, 0)


# Decodes of one batch that live in the same groups.
TakenDecodes = tuple[DecodeGroup, list[Sequence]]


class RunningDecodes:
    """Every unfinished sequence that has its first token. `window_tokens`: that of all layers, 0
    if there is none."""

    def __init__(self, window_tokens: int = 0) -> None:
        self._sees = window_tokens or ALL_KEYS
        self.by_groups: dict[tuple[int, ...], DecodeGroup] = {}
        self.blocked_on_pages: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self.running)

    def begin(self, sequence: Sequence) -> None:
        """Add a sequence: its first token has arrived, or will with a batch in flight."""
        self.running[sequence.number] = sequence
        sequence.start_decode()

    def decodes_of(self, groups: tuple[int, ...]) -> DecodeGroup:
        decodes = self.by_groups.get(groups)
        if decodes is None:
            decodes = self.by_groups[groups] = DecodeGroup(groups, self._sees)
        return decodes

    def withdraw(self, sequence: Sequence) -> bool:
        """Remove a prepared decode; False if there is none."""
        self.blocked_on_pages.pop(sequence.number, None)
        prepared = sequence.prepared
        if prepared:
            self.by_groups[sequence.next_groups].remove(sequence)
        sequence.withdraw_decode()
        return prepared

    def end(self, sequence: Sequence) -> None:
        """Remove a sequence that decodes no more."""
        self.withdraw(sequence)
        if self.running.pop(sequence.number, None) is not None:
            sequence.stop_decode()

    def take(self, groups: tuple[int, ...], most: int) -> TakenDecodes:
        """Take at most `most` prepared decodes of a group set, in their order."""
        decodes = self.by_groups[groups]
        return decodes, decodes.take(most)

    def block_on_pages(self, sequence: Sequence) -> None:
        """Record that the next decode finds no page."""
        self.blocked_on_pages[sequence.number] = sequence

    def unblock(self, sequence: Sequence) -> None:
        del self.blocked_on_pages[sequence.number]

    def in_groups(self, groups: tuple[int, ...]) -> bool:
        """Return whether any decode of those groups is prepared or in flight."""
        return any(
            (decodes.prepared or decodes.in_flight) and not set(groups).isdisjoint(of)
            for of, decodes in self.by_groups.items()
        )

    def least_credit(self, now: float) -> tuple[float, float]:
        """Return the shortest time that a token has to pass the stages, and the tightest TPOT.

        The time until it is due; after a token in flight, from when that is complete. A decode that
        is behind spreads the time that it lacks over `CATCH_UP` tokens, or those that are left:
        in a pipeline, every answer's second token is late, as it waits for a place in the next
        batch. Both are of the running decodes that expect another token; infinite with none.
        """
        least_s = tpot_s = inf
        for sequence in list(self.running.values()):  # faster than the dict, compiled
            until_s = sequence.credit_until_s
            if until_s < inf:
                from_s = sequence.token_at_s
                credit_s = until_s - (from_s if from_s > now else now)
                if credit_s < least_s:
                    if credit_s < sequence.tpot_s:
                        credit_s = self._spread(sequence, credit_s)
                    if credit_s < least_s:
                        least_s = credit_s
                if sequence.tpot_s < tpot_s:
                    tpot_s = sequence.tpot_s
        return least_s, tpot_s

    def _spread(self, sequence: Sequence, credit_s: float) -> float:
        """Return the time per token with which a decode is on time some tokens later."""
        after = sequence.output_tokens + sequence.in_flight
        tokens = max(min(CATCH_UP, sequence.max_output_tokens - after), 1)
        return sequence.tpot_s - (sequence.tpot_s - credit_s) / tokens


class InFlightBatch:
    """A batch sent to the ranks.

    `decodes`, `prefills`: its sequences in the order of its chunks.
    `heaviest`: the load of its fullest group; `due_out_s`: predicted time at which its stage 0 is
    free; `ends_s`: predicted end of each stage. `begins_tpot_s`: the tightest TPOT of the short
    answers that begin with it. `followed`: the next chunks of its sequences are
    prepared; another batch may then follow it early if `open`.
    """

    __slots__ = (
        "batch",
        "begins_tpot_s",
        "decodes",
        "due_out_s",
        "ends_s",
        "followed",
        "groups",
        "heaviest",
        "left_stage0",
        "open",
        "predicted_s",
        "prefills",
    )

    def __init__(
        self,
        batch: Batch,
        groups: tuple[int, ...],
        decodes: list[TakenDecodes],
        prefills: list[tuple[Sequence, Chunk]],
        heaviest: BatchLoad,
        now: float,
    ) -> None:
        self.batch, self.groups, self.heaviest = batch, groups, heaviest
        self.decodes, self.prefills = decodes, prefills
        self.predicted_s = batch.predicted_s
        self.due_out_s = now + batch.predicted_s
        self.ends_s = [self.due_out_s]
        self.left_stage0 = self.followed = self.open = False
        self.begins_tpot_s = inf
        for sequence, chunk in prefills:
            if chunk.yields and 1 < sequence.max_output_tokens <= SHORT_ANSWER:
                self.begins_tpot_s = min(self.begins_tpot_s, sequence.tpot_s)

    @property
    def holds_tokens_due(self) -> bool:
        """Return whether decodes wait for it: its own, or those of short answers to begin."""
        return bool(self.decodes) or self.begins_tpot_s < inf

    def void(self) -> list[Sequence]:
        """Take the batch's decodes out of flight; return all its sequences."""
        sequences: list[Sequence] = []
        for decodes, taken in self.decodes:
            decodes.land(len(taken))
            sequences += taken
        return sequences + [sequence for sequence, _ in self.prefills]

    def leave_stage0(self) -> None:
        self.left_stage0 = True

    def follow(self) -> None:
        """The next chunks of the batch's sequences are being prepared."""
        self.followed = True

    def open_for_next(self, is_open: bool) -> None:
        """Allow another batch behind this one, if every decode could be prepared."""
        self.open = is_open


class InFlightBatches:
    """All batches in flight: by number, and the numbers by group.

    Up to `spp` batches are in flight per KVP group, counted by their time: as many as take less
    than `spp` of the longest of them, or with decodes FULL of that. (If a short prompt's batch
    counted in full, it would fill the pipeline and leave stage 0 idle behind it.) "Stage 0 is free"
    and "the batch is complete" are different events: the first admits the next batch, the second
    brings tokens. If a group is lost, its batches are void and never complete.
    """

    def __init__(self, spp: int) -> None:
        self.spp = spp
        self.by_number: dict[int, InFlightBatch] = {}
        self.numbers_by_group: dict[int, list[int]] = {}

    def join(self, group: int) -> None:
        self.numbers_by_group[group] = []

    def leave(self, group: int) -> None:
        del self.numbers_by_group[group]

    def add(self, sent: InFlightBatch) -> None:
        if self.spp > 1:
            self._predict_stages(sent)
        else:
            self._predict_end(sent)
        self.by_number[sent.batch.number] = sent
        for group in sent.groups:
            self.numbers_by_group[group].append(sent.batch.number)

    def _predict_stages(self, sent: InFlightBatch) -> None:
        """Predict stage ends: a stage waits for the stage before and for earlier batches."""
        ahead = [
            self.by_number[numbers[-1]].ends_s
            for numbers in map(self.numbers_by_group.__getitem__, sent.groups)
            if numbers
        ]
        for stage in range(1, self.spp):
            start = max(sent.ends_s[-1], *(ends[stage] for ends in ahead), 0.0)
            sent.ends_s.append(start + sent.predicted_s)
        for _, sequences in sent.decodes:
            for sequence in sequences:
                sequence.expect_token(sent.ends_s[-1])

    def _predict_end(self, sent: InFlightBatch) -> None:
        """Predict the end: the batch starts when the one that runs there is complete."""
        for numbers in map(self.numbers_by_group.__getitem__, sent.groups):
            if numbers:
                begins_s = self.by_number[numbers[-1]].due_out_s
                sent.due_out_s = max(sent.due_out_s, begins_s + sent.predicted_s)

    def begin_next(self, sent: InFlightBatch, now: float) -> None:
        """Correct the predicted end of the batch behind `sent`: in one stage it begins only now.

        Otherwise the errors of all batches decided early would add up.
        """
        if self.spp > 1:
            return
        for group in sent.groups:
            for number in self.numbers_by_group.get(group, ()):
                behind = self.by_number[number]
                if behind is not sent:
                    behind.due_out_s = now + behind.predicted_s
                    behind.ends_s = [behind.due_out_s]

    def remove(self, number: int) -> InFlightBatch | None:
        """Remove and return a batch; None if it is unknown or void."""
        sent = self.by_number.pop(number, None)
        if sent is not None:
            for group in sent.groups:
                if group in self.numbers_by_group:
                    self.numbers_by_group[group].remove(number)
        return sent

    def has_room(self, group: int) -> bool:
        """Return whether the pipeline of `group` may take another batch."""
        return self._blocking(group) is None

    def _blocking(self, group: int) -> InFlightBatch | None:
        """Return the batch that must complete before `group` takes another, if any."""
        numbers, spp = self.numbers_by_group[group], self.spp
        if len(numbers) < spp:
            return None
        if spp == 1:
            return self.by_number[numbers[-1]]
        batches = [self.by_number[number] for number in numbers]
        lengths_s = [sent.predicted_s for sent in batches]
        out = max(0, len(batches) - MOST_PER_STAGE * spp + 1)
        full = FULL * spp if any(sent.holds_tokens_due for sent in batches) else spp
        while len(batches) - out >= spp and sum(lengths_s[out:]) >= full * max(lengths_s[out:]):
            out += 1
        return batches[out - 1] if out else None

    def beginnings(self, group: int) -> list[tuple[float, float]]:
        """Return the TPOT of short answers that begin with each batch in flight, and when."""
        return [
            (sent.begins_tpot_s, sent.ends_s[-1])
            for sent in self.on_group(group)
            if sent.begins_tpot_s < inf
        ]

    def last_end_s(self, group: int) -> float:
        """Return when all batches in flight are complete; 0 if there are none."""
        numbers = self.numbers_by_group.get(group, ())
        return self.by_number[numbers[-1]].ends_s[-1] if numbers else 0.0

    def on_group(self, group: int) -> list[InFlightBatch]:
        """Return the batches in flight on `group`, oldest first."""
        return [self.by_number[number] for number in self.numbers_by_group.get(group, ())]

    def free_in_s(self, group: int, now: float) -> float:
        """Return the predicted seconds until stage 0 of `group` is free and its pipeline has room.

        0 if it is so already, or late.
        """
        latest = 0.0
        numbers = self.numbers_by_group.get(group, ())
        for number in numbers:
            sent = self.by_number[number]
            if not sent.left_stage0:
                latest = max(latest, sent.due_out_s - now)
        full = self._blocking(group) if self.spp > 1 else None
        return latest if full is None else max(latest, full.ends_s[-1] - now)

    def lead_s(self, group: int, now: float, batch_s: float) -> float:
        """Return the seconds until batches of `batch_s` no longer wait for those in flight.

        A longer batch ahead holds them up in the later stages.
        """
        return self.clear_s(group, now, (self.spp - 1) * batch_s)

    def clear_s(self, group: int, now: float, drain_s: float) -> float:
        """Return the seconds until a batch that takes `drain_s` behind stage 0 waits for none."""
        free_s = self.free_in_s(group, now)
        if self.spp == 1 or not self.numbers_by_group.get(group):
            return free_s
        return max(free_s, self.last_end_s(group) - now - drain_s)

    def covered_s(self, group: int, now: float) -> float:
        """Return how long a batch that starts now may be and find no later stage idle."""
        numbers = self.numbers_by_group.get(group)
        if not numbers:
            return 0.0
        ends_s = self.by_number[numbers[-1]].ends_s
        return min([(ends_s[stage] - now) / stage for stage in range(1, self.spp)])

    def oldest(self, group: int) -> int | None:
        """Return the number of the oldest batch in flight on `group`."""
        numbers = self.numbers_by_group.get(group)
        return min(numbers) if numbers else None
