"""Chains of ten random edits, made from the kind's schema: each is followed, or it is said why not.

Several resources are edited at once, turn by turn. After each turn every one of them must come to
rest: made over to what is asked, or with a reason why it cannot be. What the API server refuses
changes nothing. At the end of a chain the first spec comes back, and must heal everything. `make
edit-fuzz` does thousands; without it one short chain is done.
"""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.api.edits import Edits
from tests.api.fleet import Fleet, Operator

pytestmark = pytest.mark.timeout(7200)

WHOLE = os.environ.get("MEDHA_EDIT_FUZZ") == "whole"
AT_ONCE, CHAINS, EDITS = (25, 8, 10) if WHOLE else (4, 1, 10)
"""Valid edits: the product. Of invalid ones a quarter as many come beside them, and some more."""
PATIENCE_S = 240.0
MERGE = {"Content-Type": "application/merge-patch+json"}
ON_ITS_WAY = {"Placing", "Loading", "Joining", "NotLoadedYet", "RollingUpdate", "Creating", ""}


@pytest.fixture
def roomy(api: httpx.Client, namespace: str, crd: None) -> Iterator[Fleet]:
    """Room for all of them."""
    made = Fleet(api, namespace, nodes=12)
    yield made
    made.close()


class Fuzz:
    """The resources, what was done to them, and how that went."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.dice = fleet, random.Random(seed)
        self.edits = Edits(self.dice)
        self.names = [f"mr-{number}" for number in range(AT_ONCE)]
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.firsts = {each: fleet.create(each)["spec"] for each in self.names}

    def turn(self) -> None:
        """A valid edit of each resource, and now and then an invalid one."""
        for name in self.names:
            while not self._edit(name, *self.edits.valid()):
                continue
            if self.dice.random() < 0.3:
                self._edit(name, *self.edits.invalid())
        self.rest()

    def heal(self) -> None:
        """The first specs come back."""
        for name, spec in self.firsts.items():
            path = self.fleet.path(name)
            found = self.fleet.api.get(path).json()
            answer = self.fleet.api.put(path, json={**found, "spec": spec})
            assert answer.status_code == 200, answer.text
        self.rest()
        self._until(lambda: [each for each in self.names if not self.fleet.is_ready(each)])

    def rest(self) -> None:
        """Until nothing is on its way any more."""
        self._until(lambda: [each for each in self.names if not self._rests(each)])
        for name in self.names:
            ready = self.fleet.condition(name)
            self.reasons[f"{ready['status']} {ready['reason']}"] += 1
            assert ready["status"] == "True" or ready["message"], (name, ready)

    def _edit(self, name: str, field: tuple[str, ...], patch: dict[str, Any]) -> bool:
        """Whether the API server took it."""
        path = self.fleet.path(name)
        before = self.fleet.api.get(path).json()
        answer = self.fleet.api.patch(path, json=patch, headers=MERGE)
        if answer.status_code == 200:
            self.counts["valid"] += 1
            return True
        assert answer.status_code in (400, 422), (field, patch, answer.text)
        after = self.fleet.api.get(path).json()
        assert after["spec"] == before["spec"], (field, patch)
        self.counts["invalid"] += 1
        return False

    def _rests(self, name: str) -> bool:
        found = self.fleet.api.get(self.fleet.path(name)).json()
        status = found.get("status", {})
        if status.get("observedGeneration") != found["metadata"]["generation"]:
            return False
        by_type = {each["type"]: each for each in status.get("conditions", ())}
        ready, updated = by_type["Ready"], by_type.get("Updated", {})
        if ready["reason"] == "SpecRefused":
            return True
        if ready["status"] == updated.get("status") == "True":
            return bool(by_type["Draining"]["status"] == "False")
        told = {each.get("reason", "") for each in (ready, updated) if each["status"] != "True"}
        return told.isdisjoint(ON_ITS_WAY)

    def _until(self, left: Callable[[], list[str]]) -> None:
        end = time.monotonic() + PATIENCE_S
        while found := left():
            self.fleet.play()
            if time.monotonic() > end:
                spec = self.fleet.api.get(self.fleet.path(found[0])).json()
                raise AssertionError(f"{found} do not come to rest; {found[0]} is {spec}")


@pytest.mark.parametrize("seed", [1])
def test_every_edit_is_followed_or_refused_with_a_reason_and_the_first_spec_heals(
    roomy: Fleet, start_operator: Callable[..., Operator], seed: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    operator = start_operator()
    fuzz = Fuzz(roomy, seed)
    fuzz.rest()
    for _ in range(CHAINS):
        for _ in range(EDITS):
            fuzz.turn()
        fuzz.heal()
    with capsys.disabled():
        print(f"\nedits: {dict(fuzz.counts)}; at rest: {dict(fuzz.reasons.most_common())}")  # noqa: T201
    log = operator.log.read_text()
    assert "Traceback" not in log and "unexpected" not in log
    assert operator.process.poll() is None and operator.alive()
    assert fuzz.counts["valid"] >= AT_ONCE * CHAINS * EDITS
    assert fuzz.counts["invalid"] >= fuzz.counts["valid"] // 4
