"""What follows when a chunk is done or a token comes: names for pages, the next decode, failures.

A decode's next chunk is prepared as soon as its token is back, pages included, so that forming a
batch need not look at every decode. A decode that finds no page goes hungry until room is made; a
prefill that waits too long for a KVP group fails with the reason. Decides no order.
"""

from __future__ import annotations

from medha.batch import Batch, Chunk, Sampled
from medha.config import Scheduling
from medha.scheduling.decodes import Decodes
from medha.scheduling.endings import Endings
from medha.scheduling.growth import Groups
from medha.scheduling.pressure import Pressure
from medha.scheduling.sequence import Sequence


class Progress:
    """Moves sequences on."""

    def __init__(
        self, groups: Groups, decodes: Decodes, endings: Endings, settings: Scheduling,
        max_context_tokens: int,
    ) -> None:  # fmt: skip
        self.groups, self.decodes, self.endings = groups, decodes, endings
        self.settings, self.max_context_tokens = settings, max_context_tokens
        self.pressure = Pressure(groups, decodes, endings)

    def left_stage_0(self, batch: Batch) -> None:
        """The next chunks of its prompts may follow."""
        sequences = self.endings.sequences
        for chunk in reversed(batch.chunks):
            if chunk.decode:
                break
            sequence = sequences[chunk.seq]
            if not (sequence.over or sequence.taken_back):
                sequence.left = chunk.start + chunk.length
                if sequence.left < sequence.goal:
                    self.groups.mark(sequence)
                else:
                    self.groups.strike(sequence)
                    self.endings.starts.outlook.changed = True

    def chunk_done(self, sequence: Sequence, chunk: Chunk) -> None:
        """Every stage has the chunk: its full pages become findable."""
        size = self.groups.pool.page_tokens
        first, last = sequence.done // size, min(chunk.end // size, len(sequence.hashes))
        for logical in range(first, last):
            group = sequence.group_of[logical]
            self.groups.pool[group].name(sequence.page_of[logical], sequence.hashes[logical])
        sequence.done = chunk.end

    def _name_last(self, sequence: Sequence, chunk: Chunk, hash_: bytes) -> None:
        """The page that the computed tokens have just filled."""
        logical = chunk.end // self.groups.pool.page_tokens - 1
        if logical >= 0:
            self.groups.pool[sequence.group_of[logical]].name(sequence.page_of[logical], hash_)

    def token(self, sequence: Sequence, chunk: Chunk, outcome: Sampled, now: float) -> str | None:
        """A token of the sequence came; returns why it ended, if it did: `stop` or `length`."""
        if outcome.block_hash is not None and self.settings.prefix_cache:
            self._name_last(sequence, chunk, outcome.block_hash)
        reason = self.count(sequence, outcome, now)
        if reason is not None:
            return reason
        request = sequence.request
        if not sequence.decoding:
            self.decodes.begin(sequence)
        ahead = sequence.in_flight - self.decodes.waits(sequence)  # decodes that are seated already
        due_s = (sequence.first_token_s or now) + (sequence.emitted + ahead) * request.tpot_s
        self.decodes.due(sequence, due_s)
        if not sequence.in_flight:
            self._prepare(sequence)
        return None

    def foresee(self, chunk: Chunk, due_out_s: float) -> bool:
        """The sequence's token is still being drawn: prepare the decode behind it, where the rank
        that draws it reads it. Whether nothing is left to be prepared when it comes."""
        sequence = self.endings.sequences[chunk.seq]
        request, after = sequence.request, chunk.end + 1
        emitted = after - request.prompt_tokens
        if sequence.over or sequence.taken_back:
            return True
        if emitted >= request.max_output_tokens or after >= self.max_context_tokens:
            self.decodes.lasts(sequence)
            return True
        tail, room = self.groups.next_tail(sequence)
        if not room or (tail,) != sequence.groups or sequence.switching:
            return False
        if not sequence.decoding:
            self.decodes.begin(sequence)
            first_s = sequence.first_token_s
            first_s = due_out_s if first_s is None else first_s
            self.decodes.due(sequence, first_s + emitted * request.tpot_s)
        return self._prepare(sequence)

    def count(self, sequence: Sequence, outcome: Sampled, now: float) -> str | None:
        """One token more, which the client has; a sequence that was taken back while it was in
        flight computes it anew as part of its prompt. Returns why the sequence ended, if it did."""
        request = sequence.request
        sequence.emitted += 1
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        full = request.prompt_tokens + sequence.emitted >= self.max_context_tokens
        if outcome.finished or full or sequence.emitted >= request.max_output_tokens:
            self.endings.end(sequence)
            return "stop" if outcome.finished else "length"
        return None

    def _prepare(self, sequence: Sequence) -> bool:
        """Make the next decode ready; without a page for it the sequence goes hungry."""
        start = sequence.packed
        pages: tuple[int, ...] = ()
        if start % self.groups.pool.page_tokens and not sequence.switching:
            tail = sequence.group_of[-1]
            sequence.packed = start + 1
            sequence.held[tail] += 1
            sequence.fresh = 0
        else:
            tail, room = self.groups.next_tail(sequence)
            if not room:
                self.decodes.hungry[sequence.number] = sequence
                return False
            pages = self.groups.extend(sequence, 1, tail)
        groups = sequence.groups
        for move in sequence.switching:
            groups = tuple(sorted({*groups, move.source, move.target}))
        chunk = Chunk(sequence.number, start, 1, groups, tail, pages, True, True)
        self.decodes.prepare(sequence, chunk)
        sequence.in_flight += 1
        return True

    def feed(self, now: float) -> None:
        """Find pages for decodes that have none, or make room."""
        for sequence in list(self.decodes.hungry.values()):
            if sequence.number in self.decodes.hungry and not sequence.over:
                del self.decodes.hungry[sequence.number]
                if not self._prepare(sequence):
                    self.pressure.relieve(sequence, now)

    def expire(self, now: float) -> None:
        """Fail prefills that wait too long for a group that does not come."""
        for sequence in list(self.groups.shared.values()):
            stuck = (
                sequence.started and not sequence.decoding and sequence.ready
                and sequence.packed < sequence.goal and not self.groups.next_tail(sequence)[1]
            )  # fmt: skip
            if not stuck:
                sequence.paused_since_s = None
            elif sequence.paused_since_s is None:
                sequence.paused_since_s = now
            elif now - sequence.paused_since_s > self.settings.growth_timeout_s:
                self.endings.fail(
                    sequence,
                    "kv_growth_timeout",
                    f"request {sequence.id} waited {self.settings.growth_timeout_s:g} s for another"
                    f" KVP group after {sequence.packed} of {sequence.goal} prompt tokens:"
                    f" {len(self.groups.generation)} of {self.groups.pool.groups_max} groups run;"
                    " see why the replica does not grow, or shorten the prompt",
                )
