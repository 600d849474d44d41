"""Engines that are wrong on purpose: each function breaks one thing in the process it runs in."""

from __future__ import annotations

import msgspec
import torch

from medha_worker import engine, inputs, sequences
from medha_worker.attention.kernel_interface import Partial
from medha_worker.model import low_rank, packed_weights
from medha_worker.model.rope import Rotary
from medha_worker.parallel import kvp
from medha_worker.sequences import PageTable


def drops_a_token() -> None:
    """Leave out the newest token of a shard that is not the tail's."""
    right = inputs._held

    def held(chunk, state, page_tokens):  # type: ignore[no-untyped-def]
        return max(0, right(chunk, state, page_tokens) - 1)

    inputs._held = held


def counts_a_page_twice() -> None:
    """Keep the moved pages at the source of a move."""
    PageTable.remove = lambda self, logical: None  # type: ignore[method-assign]


def is_one_position_off() -> None:
    """Make positions beyond the first page one too high."""
    right = Rotary.angles

    def angles(self, positions, pieces):  # type: ignore[no-untyped-def]
        return right(self, positions + (positions >= 16), pieces)

    Rotary.angles = angles  # type: ignore[method-assign]


def takes_the_wrong_base() -> None:
    """Merge partial states as if their log-sum-exp had base 2."""
    right = kvp._state

    def state(packed: torch.Tensor) -> Partial:
        part = right(packed)
        return Partial(part.out, part.lse * 0.6931471805599453)

    kvp._state = state


def sees_what_is_out_of_sight() -> None:
    """Show all pages of shards that do not hold the chunk itself."""
    right = inputs.seen

    def seen(span, *rest):  # type: ignore[no-untyped-def]
        return right(span, *rest) if span.tail else span

    inputs.seen = seen


def sees_a_window_per_group() -> None:
    """Show each shard's newest tokens, as if its pages were contiguous up to the chunk."""
    right = inputs.seen

    def seen(span, chunk, pages, window, page_tokens, always=False):  # type: ignore[no-untyped-def]
        packed = PageTable(enumerate(span.pages.tolist()))
        shift = chunk.start - span.held
        moved = msgspec.structs.replace(chunk, start=chunk.start - shift)
        return right(span, moved, packed, window, page_tokens, always)

    inputs.seen = seen


def forgets_the_adapter_where_it_grows() -> None:
    """Introduce sequences without their adapter to all groups but the first."""
    right = sequences.Sequences._begin

    def begin(self, start):  # type: ignore[no-untyped-def]
        known = start if self.group == 0 else msgspec.structs.replace(start, adapter="")
        return right(self, known)

    sequences.Sequences._begin = begin  # type: ignore[method-assign]


def takes_the_adapter_of_the_first_shard() -> None:
    """Load the first shard's part of adapters on every shard."""
    right = low_rank.load_adapter

    def loaded(lora, config, layers, shard, *rest):  # type: ignore[no-untyped-def]
        return right(lora, config, layers, 0, *rest)

    setattr(engine, "load_adapter", loaded)  # noqa: B010


def takes_the_adapter_of_the_first_stage() -> None:
    """Load the first layers' part of adapters on every stage."""
    right = low_rank.load_adapter

    def loaded(lora, config, layers, *rest):  # type: ignore[no-untyped-def]
        return right(lora, config, range(len(layers)), *rest)

    setattr(engine, "load_adapter", loaded)  # noqa: B010


def scales_from_the_next_block() -> None:
    """Multiply each output by the scale of the block after its own."""
    right = packed_weights.Fp8Weight.parts

    def parts(self, cut):  # type: ignore[no-untyped-def]
        own = right(self, cut)
        of_output = (own.of_output + 1) % len(own.scales)
        return packed_weights.Fp8Parts(own.numbers, own.scales, of_output)

    packed_weights.Fp8Weight.parts = parts  # type: ignore[method-assign]


def cuts_scales_at_the_first_shard() -> None:
    """Take the scales of a shard's inputs from those of the first shard."""
    right = packed_weights.Fp8Weight.parts

    def parts(self, cut):  # type: ignore[no-untyped-def]
        outputs, inputs = cut
        own, width = right(self, cut), inputs.stop - inputs.start
        first = right(self, (outputs, slice(0, width))).scales
        scales = first.repeat_interleave(width // first.shape[1], dim=1)
        return packed_weights.Fp8Parts(own.numbers, scales, own.of_output)

    packed_weights.Fp8Weight.parts = parts  # type: ignore[method-assign]
