"""A batch in the making: which decodes are seated, which chunks go in, what each group will run.

Values only. A plan takes nothing; the packer makes it and carries it out, or throws it away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from medha.predictor import BatchLoad
from medha.scheduling.sequence import Sequence


@dataclass(slots=True)
class Part:
    """One prefill's chunk in a plan: where its tokens go and who computes it.

    `cut`: the batch had no room for more of it. `owed`: it runs on the share of the relegated.
    """

    sequence: Sequence
    length: int
    tail: int
    groups: tuple[int, ...]
    cut: bool = False
    owed: bool = False


@dataclass(slots=True)
class Plan:
    """What a crew would run. `cohorts`: decodes to seat, by where they live."""

    crew: tuple[int, ...]
    target_s: float
    loads: dict[int, BatchLoad]
    cohorts: list[tuple[tuple[int, ...], int]]
    decode_s: dict[int, float]
    parts: list[Part] = field(default_factory=list)
    waits: dict[int, bool] = field(default_factory=dict)
    escaped: bool = False

    @property
    def seconds(self) -> float:
        """Predicted seconds per stage: the slowest group's."""
        return max([load.seconds() for load in self.loads.values()])

    @property
    def shared(self) -> bool:
        return any(len(part.groups) > 1 for part in self.parts) or any(
            len(groups) > 1 for groups, _ in self.cohorts
        )
