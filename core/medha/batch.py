"""Chunk, Batch and Move: the work of one iteration; plan, broadcast and log line in one.

A chunk is the tokens [start, start + length) of one sequence:

    position   0 ........ start ............... start+length
               | KV held  | computed here       |
    shard      groups g0 < g1 < … hold full older pages; `tail` holds the newest pages and the chunk

Every group runs the chunk's rows. Older shards attend without a mask, the tail causally over its
shard; the partial states merge in ascending group order. Only `tail` stores the chunk's keys and
values: first in its last partial page, then in `pages`.
"""

from __future__ import annotations

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Tokens of one sequence in one iteration; a decode is a chunk of one with `decode` true.

    `pages`: ids of pages that this chunk adds to group `tail`, in logical order; the last holds the
    chunk's last token. Those before `start` others have computed since the sequence's last chunk.
    `yields`: the last row's logits are sampled.
    """

    seq: int
    start: int
    length: int
    groups: tuple[int, ...]
    tail: int
    pages: tuple[int, ...] = ()
    yields: bool = False
    decode: bool = False

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def shared(self) -> bool:
        """True if the chunk spans several KVP groups, which exchange partial attention."""
        return len(self.groups) > 1


class Move(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Full pages of a sequence that change group: a background copy, then a switch by a batch.

    `logical` page indices of the sequence, `from_pages` their ids in group `source`, `to_pages` the
    ids reserved for them in group `target`; the three have equal length.
    """

    id: int
    seq: int
    source: int
    target: int
    logical: tuple[int, ...]
    from_pages: tuple[int, ...]
    to_pages: tuple[int, ...]


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Work of an iteration: decodes first, then prefill chunks; `number` is replica-wide, from 1.

    `generation`: the KVP columns' generation that shared chunks use. `switches`: ids of copied
    moves whose ownership changes before this batch; each belongs to a sequence with a chunk here
    whose groups hold both ends, so every rank concerned applies it at the same number. `ended`:
    sequences whose pages were freed since the previous batch (finished, aborted or preempted); the
    controller sends them to every group that held them, with its next step. `predicted_s`: expected
    seconds per stage.
    """

    number: int
    generation: int
    chunks: tuple[Chunk, ...]
    switches: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    predicted_s: float = 0.0

    @property
    def groups(self) -> tuple[int, ...]:
        """KVP groups of the batch's chunks, ascending."""
        return tuple(sorted({group for chunk in self.chunks for group in chunk.groups}))

    @property
    def tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def of_group(self, group: int) -> tuple[Chunk, ...]:
        """The chunks that `group` runs, in batch order."""
        return tuple(chunk for chunk in self.chunks if group in chunk.groups)


class Sampled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Outcome of a yielding chunk. `finished`: the sequence ends with this token.

    `block_hash` names the page that the tokens before the sampled one completed, if any, so that a
    later turn of the same conversation can reuse generated text.
    """

    seq: int
    finished: bool
    block_hash: bytes | None = None


class BatchResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Outcome of a batch, one entry per yielding chunk; `elapsed_s` measured per stage if known."""

    sampled: tuple[Sampled, ...] = ()
    elapsed_s: float | None = None
