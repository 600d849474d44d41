"""Tables on the device are copies of the host's, whatever changed and however little crosses."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from medha.batch import Batch, Move
from medha.messages.fields import Sampling
from medha.messages.ranks import SequenceStart, Step
from medha_worker.device import CpuDevice
from medha_worker.sequences import NO_PAGE, DeviceSlots, Sequences


class Counting(CpuDevice):
    """Notes how many numbers cross."""

    def __init__(self) -> None:
        self.crossed: list[int] = []

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        self.crossed.append(sum(array.size for array in arrays))
        return super().upload(*arrays)


def rebuilt(device_slots: DeviceSlots, sequences: Sequences, known: list[int]) -> torch.Tensor:
    """The rows of the table that known sequences have, from nothing but the host's tables."""
    rows = torch.full((len(known), device_slots.table.shape[1]), NO_PAGE, dtype=torch.int32)
    for row, seq in enumerate(known):
        logical, ids = sequences[seq].pages.since(0)
        rows[row, torch.from_numpy(logical)] = torch.from_numpy(ids.astype(np.int32))
    return rows


def step(number: int, **more: object) -> Step:
    batch = Batch(number=number, generation=0, chunks=())
    return Step(step=number, batch=batch, tokens=b"", **more)  # type: ignore[arg-type]


@given(st.data())
def test_what_changed_makes_the_table_that_everything_would(data: st.DataObject) -> None:
    device_slots = DeviceSlots(slots=2, width=2)
    sequences, known, fresh = Sequences(0, device_slots), list[int](), iter(range(10_000))
    for number in range(data.draw(st.integers(1, 25))):
        kind = data.draw(st.sampled_from(["start", "append", "end", "give", "take", "flush"]))
        if kind == "start":
            seq = next(fresh)
            held = sorted(data.draw(st.sets(st.integers(0, 12), max_size=5)))
            cached = tuple((logical, next(fresh)) for logical in held)
            start = SequenceStart(seq, Sampling(), 4, cached)
            another = data.draw(st.booleans())
            ends = (known.pop(),) if known and another else ()
            sequences.apply(step(number, starts=(start,), ends=ends))
            known.append(seq)
        elif kind == "flush":
            device_slots.flush()
        elif known:
            seq = data.draw(st.sampled_from(known))
            pages = sequences[seq].pages
            if kind == "append":
                ids = [next(fresh) for _ in range(data.draw(st.integers(0, 3)))]
                first = pages.last_logical + data.draw(st.integers(1, 3))
                sequences.append(sequences[seq], first, ids)
            elif kind == "end":
                sequences.apply(step(number, ends=(seq,)))
                known.remove(seq)
            else:
                moved = tuple(sorted(data.draw(st.sets(st.integers(0, 14), max_size=4))))
                ids = [next(fresh) for _ in moved]
                ends_of = (0, 1) if kind == "give" else (1, 0)
                move = Move(number, seq, *ends_of, moved, tuple(ids), tuple(ids))
                sequences.apply(step(number, switches=(move,)))
    device_slots.flush()
    rows = device_slots.table[[sequences[seq].slot for seq in known]]
    assert torch.equal(rows, rebuilt(device_slots, sequences, known))
    assert len({sequences[seq].slot for seq in known}) == len(known)


def test_a_step_without_new_pages_brings_nothing() -> None:
    device = Counting()
    sequences = Sequences(0, DeviceSlots(device, slots=4, width=8))
    sequences.apply(step(1, starts=(SequenceStart(7, Sampling(), 4, ((0, 5), (1, 6))),)))
    sequences.device_slots.flush()
    before = len(device.crossed)
    sequences.device_slots.flush()
    assert len(device.crossed) == before
    sequences.append(sequences[7], 2, [9])
    sequences.device_slots.flush()
    assert device.crossed[before:] == [2], "one place and one page"


def test_tokens_stay_with_their_sequences_while_seats_grow() -> None:
    device_slots = DeviceSlots(slots=1, width=1)
    first = device_slots.take()
    device_slots.set_last(torch.tensor([first]), torch.tensor([42]))
    others = [device_slots.take() for _ in range(9)]
    device_slots.set_last(torch.tensor(others), torch.arange(9))
    assert device_slots.last[first].item() == 42
    assert device_slots.last[others].tolist() == list(range(9))
