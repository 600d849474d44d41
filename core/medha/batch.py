"""Chunk, Batch and Move: what one iteration computes; plan, broadcast and log line in one.

A chunk is the tokens [start, start + length) of one sequence:

    position   0 ........ start ............... start+length
               | KV held  | computed here       |
    shard      groups g0 < g1 < … hold full older pages; `tail` holds the newest pages and the chunk

Every participant runs the chunk's rows; older shards attend without a mask, the tail causally over
what it holds, and the partial states are merged in ascending group order. Only `tail` stores the
chunk's keys and values, in `pages` after filling its last partial page.
"""

from __future__ import annotations

import msgspec


class Chunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Tokens of one sequence in one iteration; a decode is a chunk of one with `decode` true.

    `pages` are the page ids newly taken in group `tail` by this chunk, in logical order; the first
    holds logical page ceil(start / page_tokens). `yields`: the last row's logits are sampled.
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
        """Spans several KVP groups, so partial attention is exchanged."""
        return len(self.groups) > 1


class Move(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Full pages of a sequence that change group: copied in the background, switched by a batch.

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
    """One iteration: decodes first, then prefill chunks; one replica-wide `number`, from 1.

    `generation`: the KVP columns' generation that shared chunks use. `switches`: ids of copied
    moves whose ownership changes before this batch; each belongs to a sequence with a chunk here
    whose groups hold both ends, so every rank concerned sees it at the same number. `ended`:
    sequences whose pages came back since the batch before (finished, aborted, or taken back for
    recomputation); the controller tells every group that knew them with its next step.
    `predicted_s`: seconds per stage that the packer expects.
    """

    number: int
    generation: int
    chunks: tuple[Chunk, ...]
    switches: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()
    predicted_s: float = 0.0

    @property
    def groups(self) -> tuple[int, ...]:
        """KVP groups that take part, ascending: those of its chunks."""
        return tuple(sorted({group for chunk in self.chunks for group in chunk.groups}))

    @property
    def tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def of_group(self, group: int) -> tuple[Chunk, ...]:
        """The chunks that `group` runs, in batch order."""
        return tuple(chunk for chunk in self.chunks if group in chunk.groups)


class Sampled(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a yielding chunk brought: whether the sequence ends with this token.

    `block_hash` names the page that the tokens before the sampled one just completed, if any, so
    that generated text can be found by a later turn of the same conversation.
    """

    seq: int
    finished: bool
    block_hash: bytes | None = None


class BatchResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Outcome of a batch, one entry per yielding chunk; `elapsed_s` measured per stage if known."""

    sampled: tuple[Sampled, ...] = ()
    elapsed_s: float | None = None
