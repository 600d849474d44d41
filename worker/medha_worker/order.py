"""Keeps a group's steps in order on one rank: no gap, no step twice.

Steps are numbered from 1 without gaps. When one is missing the rank asks once (Gap) and drops what
comes until the missing step is there; the controller answers Resend and sends the rest again.
"""

from __future__ import annotations

from medha.messages import Gap, Step


class StepOrder:
    """`take` says what to do with each step that arrives: run it, drop it, or ask for another."""

    def __init__(self) -> None:
        self.expected = 1
        self._asked = False

    def take(self, step: Step) -> Step | Gap | None:
        """The step itself when it is its turn; a Gap to report; None for what is to be dropped."""
        if step.step == self.expected:
            self.expected += 1
            self._asked = False
            return step
        if step.step < self.expected or self._asked:
            return None
        self._asked = True
        return Gap(self.expected)

    def resent(self) -> None:
        """Steps come again from the missing one on: a further gap is worth asking for."""
        self._asked = False
