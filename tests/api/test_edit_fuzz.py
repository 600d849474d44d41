"""Chains of ten random edits, made from the kind's schema: each is followed, or it is said why not.

Many resources are edited at once, each at its own pace. After an edit its resource must come to
rest: made over to what is asked, or with a reason why it cannot be. An edit counts if it raised the
generation; one that changed nothing is drawn again. What the API server refuses changes nothing,
and what does not fit the schema it must refuse. An edit that leaves the resource not Ready is
mostly taken back, which must heal it (else a chain that went wrong would stay wrong); the others
are built upon. At the end of a chain the first spec comes back, and must heal everything. `make
edit-fuzz` does thousands; without it a few short chains are done.
"""

from __future__ import annotations

import collections
import os
import random
import time
from typing import Any, Literal

import pytest
from tests.api.edits import Edits
from tests.api.fleet import Fleet
from tests.api.stage import Scene
from tests.api.walks import Scenes

pytestmark = pytest.mark.timeout(7200)

WHOLE = os.environ.get("MEDHA_EDIT_FUZZ") == "whole"
AT_ONCE, CHAINS, EDITS = (26, 8, 10) if WHOLE else (6, 1, 7)
"""Valid edits: the product. Of invalid ones a quarter as many come beside them, and some more: in
the whole form these are at least 2,000 and 500."""
NODES = 60 if WHOLE else 20
TAKEN_BACK = 0.75
INVALID_EVERY = 3
PATIENCE_S = 240.0
MERGE = {"Content-Type": "application/merge-patch+json"}
ON_ITS_WAY = {"Placing", "Loading", "Joining", "NotLoadedYet", "RollingUpdate", "Creating", ""}

Document = dict[str, Any]


class Fuzz:
    """What all chains share: the fleet, one die, and the sums."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.dice = fleet, random.Random(seed)
        self.edits = Edits(self.dice)
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()

    def run(self, names: list[str]) -> None:
        """A chain after the other on each resource, until all have had theirs."""
        chains = {each: Chain(self, each) for each in names}
        while any(each.step != "over" for each in chains.values()):
            self.fleet.play()
            for found in self.fleet.api.get(self.fleet.path()).json()["items"]:
                chains[found["metadata"]["name"]].look(found)


class Chain:
    """One resource: what was done to it last, and what comes next once it is at rest."""

    def __init__(self, fuzz: Fuzz, name: str) -> None:
        self._fuzz, self._name = fuzz, name
        self._first = fuzz.fleet.create(name, parallelism={"spp": 1})["spec"]
        self._well = self._first
        self._edits, self._left = 0, CHAINS
        self.step: Literal["heal", "edit", "undo", "over"] = "heal"
        self._since_s = time.monotonic()

    def look(self, found: Document) -> None:
        """Go on if the resource has come to rest."""
        if self.step == "over":
            return
        ready = rests(found)
        if ready is None or (self.step != "edit" and not well(found)):
            waited_s = time.monotonic() - self._since_s
            assert waited_s < PATIENCE_S, f"{self.step} does not come to rest: {found}"
            return
        assert ready["status"] == "True" or ready["message"], found
        self._fuzz.reasons[f"{ready['status']} {ready['reason']}"] += 1
        self._fuzz.counts[f"rests after {self.step}"] += 1
        self._go_on(found)
        self._since_s = time.monotonic()

    def _go_on(self, found: Document) -> None:
        if well(found) and found["spec"]["replicas"]:  # with none, nothing was tried of it
            self._well = found["spec"]
        if not well(found) and self._fuzz.dice.random() < TAKEN_BACK:
            self._put("undo", self._well)
        elif self._edits == EDITS:
            self._edits = 0
            self._left -= 1
            self._put("heal", self._first)
        elif self._left:
            self._edits += 1
            self._edit()
        else:
            self.step = "over"

    def _edit(self) -> None:
        """A valid edit that changes something, and after every third an invalid one."""
        self.step = "edit"
        while self._tried(*self._fuzz.edits.valid(self._found())) != "valid":
            continue
        if self._edits % INVALID_EVERY == 0:
            field, patch = self._fuzz.edits.invalid()
            assert self._tried(field, patch) == "invalid", (field, patch)

    def _tried(self, field: tuple[str, ...], patch: Document) -> str:
        """What the API server made of it: a valid edit, an invalid one, or none at all."""
        api, path = self._fuzz.fleet.api, self._fuzz.fleet.path(self._name)
        while True:
            before = self._found()
            at = {"metadata": {"resourceVersion": before["metadata"]["resourceVersion"]}}
            answer = api.patch(path, json=patch | at, headers=MERGE)
            if answer.status_code != 409:  # the operator wrote meanwhile
                break
        if answer.status_code == 200:
            raised = answer.json()["metadata"]["generation"] > before["metadata"]["generation"]
            said = "valid" if raised else "changed nothing"
        else:
            assert answer.status_code in (400, 422), (field, patch, answer.text)
            assert unscaled(self._found()) == unscaled(before), (field, patch)
            said = "invalid"
        self._fuzz.counts[said] += 1
        return said

    def _found(self) -> Document:
        found: Document = self._fuzz.fleet.api.get(self._fuzz.fleet.path(self._name)).json()
        return found

    def _put(self, step: Literal["heal", "undo"], spec: Document) -> None:
        """This spec again, whoever writes the status meanwhile."""
        self.step = step
        api, path = self._fuzz.fleet.api, self._fuzz.fleet.path(self._name)
        while True:
            found = self._found()
            answer = api.put(path, json={**found, "spec": spec})
            if answer.status_code != 409:
                break
        assert answer.status_code == 200, answer.text


def unscaled(found: Document) -> Document:
    """Its spec without what the operator may write itself."""
    return {name: value for name, value in found["spec"].items() if name != "replicas"}


def rests(found: Document) -> Document | None:
    """The condition Ready of a resource at which nothing is on its way any more."""
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return None
    by_type = {each["type"]: each for each in status.get("conditions", ())}
    ready, updated = by_type["Ready"], by_type.get("Updated", {})
    if ready["reason"] == "SpecRefused":
        return dict(ready)
    if ready["status"] == updated.get("status") == "True":
        return dict(ready) if by_type["Draining"]["status"] == "False" else None
    told = {each.get("reason", "") for each in (ready, updated) if each["status"] != "True"}
    return dict(ready) if told.isdisjoint(ON_ITS_WAY) else None


def well(found: Document) -> bool:
    """It serves, and what it is asked for now: not only what it was asked for before."""
    by_type = {each["type"]: each["status"] for each in found["status"]["conditions"]}
    return bool(by_type["Ready"] == by_type.get("Updated") == "True")


@pytest.mark.parametrize("seed", [1])
def test_every_edit_is_followed_or_refused_with_a_reason_and_the_first_spec_heals(
    scenes: Scenes, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    began_s = time.monotonic()
    with scenes(NODES) as scene:
        counts = fuzzed(scene, seed, capsys)
    with capsys.disabled():
        print(f"{time.monotonic() - began_s:.0f} s")  # noqa: T201
    assert counts["valid"] >= AT_ONCE * CHAINS * EDITS
    assert counts["invalid"] >= counts["valid"] // 4


def fuzzed(scene: Scene, seed: int, capsys: pytest.CaptureFixture[str]) -> collections.Counter[str]:
    scene.leaders.least = scene.fleet.groups_beside
    operator = scene.start()
    fuzz = Fuzz(scene.fleet, seed)
    try:
        fuzz.run([f"mr-{number}" for number in range(AT_ONCE)])
    finally:
        with capsys.disabled():
            print(f"\nedits: {dict(fuzz.counts)}; {dict(fuzz.reasons.most_common())}")  # noqa: T201
    log = operator.log.read_text()
    assert "Traceback" not in log and "unexpected" not in log
    assert operator.process.poll() is None and operator.alive()
    return fuzz.counts
