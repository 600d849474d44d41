"""`medha scaling`: replay recorded scaling decisions from their signals.

The operator's `GET /scaling` returns the latest decisions of each resource; `medha simulate --out`
writes those of its fleet. The same code decides everywhere, so every decision must come out the
same. Prints each change with its reason.
"""

from __future__ import annotations

import pathlib

import msgspec
from rich.console import Console

from medha.errors import MedhaError, SpecError
from medha.fleet.autoscaling import Journal, replay


class ScaledOtherwise(MedhaError):
    """A recorded look is decided in another way now."""


def run_scaling(path: pathlib.Path, console: Console) -> None:
    """Decide again and print; raises SpecError for another kind of file, ScaledOtherwise."""
    for name, journal in sorted(_read(path).items()):
        looks = journal.looks
        for look, decision in zip(looks, replay(journal), strict=True):
            if look.decision != decision:
                raise ScaledOtherwise(
                    f"{name} at {look.signals.at_s:.0f} s: {look.decision.replicas} replicas "
                    f"({look.decision.why}) were decided, now {decision.replicas} "
                    f"({decision.why}): run the version that decided"
                )
        tell_changes(name, journal, console)
        console.print(f"{name}: {len(looks)} looks come out the same", highlight=False)


def tell_changes(name: str, journal: Journal, console: Console) -> None:
    """A line for each look that changed something, with its why."""
    for look in journal.looks:
        decision = look.decision
        if decision.replicas != look.signals.current:
            console.print(
                f"{name} at {look.signals.at_s:.0f} s: from {look.signals.current} to "
                f"{decision.replicas} replicas ({decision.why}): {decision.message}",
                highlight=False,
                soft_wrap=True,
            )


def _read(path: pathlib.Path) -> dict[str, Journal]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Journal])
    except OSError as error:
        raise SpecError(
            "FILE",
            str(path),
            f"must be readable ({error.strerror})",
            "save the operator's GET /scaling into it",
        ) from None
    except msgspec.MsgspecError as error:
        raise SpecError(
            "FILE",
            str(path),
            f"must be what GET /scaling answers ({error})",
            "save it again from the operator's ops port",
        ) from None
