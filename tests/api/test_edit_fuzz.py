"""Chains of ten random edits, drawn from the CRD's schema: each is carried out, or refused with a
reason.

Many resources are edited at once, each at its own pace. After an edit the resource must come to
rest: in the desired state, or with a reason why it cannot be. An edit counts if it raised the
generation; one that changed nothing is drawn again. The API server must refuse edits that do not
fit the schema, and a refused edit changes nothing. Most edits that leave the resource not Ready are
undone, which must heal it (or a broken chain would stay broken); the next edits build on the
others. At the end of a chain the first spec returns and must heal everything. `make edit-fuzz` does
thousands of edits; otherwise a few short chains run.
"""

from __future__ import annotations

import collections
import os
import random
import time
from typing import Any, Literal

import pytest
from tests.api.courses import Scenes
from tests.api.edits import Edits
from tests.api.fleet import POLL_S, Fleet, until
from tests.api.stage import Scene

pytestmark = pytest.mark.timeout(7200)

WHOLE = os.environ.get("MEDHA_EDIT_FUZZ") == "whole"
AT_ONCE, CHAINS, EDITS = (26, 8, 10) if WHOLE else (6, 1, 7)
"""The number of valid edits is the product; a quarter as many invalid ones are added, and some
more. The whole form has at least 2,000 and 500."""
NODES = 60 if WHOLE else 20
TAKEN_BACK = 0.75
INVALID_EVERY = 3
PATIENCE_S = 600.0
MERGE = {"Content-Type": "application/merge-patch+json"}
ON_ITS_WAY = {"Placing", "Loading", "Joining", "NotLoadedYet", "RollingUpdate", "Creating", ""}

Document = dict[str, Any]


class Fuzz:
    """The state that all chains share: the fleet, one random generator, and the counts."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.fleet, self.dice = fleet, random.Random(seed)
        self.edits = Edits(self.dice)
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self._chains_left = AT_ONCE * CHAINS

    def next_chain(self) -> bool:
        """Begin one more chain, whichever resource has time; false once all have begun."""
        self._chains_left -= 1
        return self._chains_left >= 0

    def run(self, names: list[str]) -> None:
        """Run chains of edits on all resources until every one is over."""
        edited = {name: EditedResource(self, name) for name in names}
        while any(resource.step != "over" for resource in edited.values()):
            self.fleet.play()
            for resource in self.fleet.api.get(self.fleet.path()).json()["items"]:
                edited[resource["metadata"]["name"]].advance(resource)
            time.sleep(POLL_S)


class EditedResource:
    """The edits of one resource: the last step, and the next one once it is at rest."""

    def __init__(self, fuzz: Fuzz, name: str) -> None:
        self._fuzz, self._name = fuzz, name
        self._first = fuzz.fleet.create(name, parallelism={"spp": 1})["spec"]
        self._well = self._first
        self._edits = 0  # of the present chain
        self.step: Literal["heal", "edit", "undo", "over"] = "heal"
        self._since_s = time.monotonic()

    def advance(self, resource: Document) -> None:
        """Take the next step if the resource has come to rest."""
        if self.step == "over":
            return
        ready = rests(resource)
        if ready is None or (self.step != "edit" and not well(resource)):
            waited_s = time.monotonic() - self._since_s
            assert waited_s < PATIENCE_S, f"{self.step} does not come to rest: {resource}"
            return
        assert ready["status"] == "True" or ready["message"], resource
        self._fuzz.reasons[f"{ready['status']} {ready['reason']}"] += 1
        self._fuzz.counts[f"rests after {self.step}"] += 1
        self._next_step(resource)
        self._since_s = time.monotonic()

    def _next_step(self, resource: Document) -> None:
        if well(resource) and resource["spec"]["replicas"]:  # with no replica it was not tried
            self._well = resource["spec"]
        if not well(resource) and self._fuzz.dice.random() < TAKEN_BACK:
            self._put("undo", self._well)
        elif self._edits == EDITS:
            self._edits = 0
            self._put("heal", self._first)
        elif self._edits or self._fuzz.next_chain():
            self._edits += 1
            self._edit()
        else:
            self.step = "over"

    def _edit(self) -> None:
        """Make a valid edit that changes something, and after every third an invalid one."""
        self.step = "edit"
        while self._try(*self._fuzz.edits.valid(self._read())) != "valid":
            continue
        if self._edits % INVALID_EVERY == 0:
            field, patch = self._fuzz.edits.invalid()
            assert self._try(field, patch) == "invalid", (field, patch)

    def _try(self, field: tuple[str, ...], patch: Document) -> str:
        """Try an edit; returns the outcome: valid, invalid, or without a change."""
        api, path = self._fuzz.fleet.api, self._fuzz.fleet.path(self._name)
        while True:
            before = self._read()
            at = {"metadata": {"resourceVersion": before["metadata"]["resourceVersion"]}}
            answer = api.patch(path, json=patch | at, headers=MERGE)
            if answer.status_code != 409:  # the operator wrote meanwhile
                break
        if answer.status_code == 200:
            raised = answer.json()["metadata"]["generation"] > before["metadata"]["generation"]
            outcome = "valid" if raised else "changed nothing"
        else:
            assert answer.status_code in (400, 422), (field, patch, answer.text)
            assert unscaled(self._read()) == unscaled(before), (field, patch)
            outcome = "invalid"
        self._fuzz.counts[outcome] += 1
        return outcome

    def _read(self) -> Document:
        resource: Document = self._fuzz.fleet.api.get(self._fuzz.fleet.path(self._name)).json()
        return resource

    def _put(self, step: Literal["heal", "undo"], spec: Document) -> None:
        """Write this spec again, even if the operator writes the status meanwhile."""
        self.step = step
        api, path = self._fuzz.fleet.api, self._fuzz.fleet.path(self._name)
        while True:
            resource = self._read()
            answer = api.put(path, json={**resource, "spec": spec})
            if answer.status_code != 409:
                break
        assert answer.status_code == 200, answer.text


def unscaled(resource: Document) -> Document:
    """The spec without the field that the operator may write itself."""
    return {name: value for name, value in resource["spec"].items() if name != "replicas"}


def rests(resource: Document) -> Document | None:
    """The condition Ready of a resource at rest; None while it changes."""
    status = resource.get("status", {})
    if status.get("observedGeneration") != resource["metadata"]["generation"]:
        return None
    by_type = {condition["type"]: condition for condition in status.get("conditions", ())}
    ready, updated = by_type["Ready"], by_type.get("Updated", {})
    if ready["reason"] == "SpecRefused":
        return dict(ready)
    if ready["status"] == updated.get("status") == "True":
        return dict(ready) if by_type["Draining"]["status"] == "False" else None
    reasons = {
        condition.get("reason", "")
        for condition in (ready, updated)
        if condition["status"] != "True"
    }
    return dict(ready) if reasons.isdisjoint(ON_ITS_WAY) else None


def well(resource: Document) -> bool:
    """Return true if it serves, by its present spec and not only by a former one."""
    by_type = {
        condition["type"]: condition["status"] for condition in resource["status"]["conditions"]
    }
    return bool(by_type["Ready"] == by_type.get("Updated") == "True")


@pytest.mark.parametrize("seed", [1])
def test_every_edit_is_carried_out_or_refused_with_a_reason_and_the_first_spec_heals(
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
    scene.leaders.least = scene.fleet.group_count
    operator = scene.start()
    fuzz = Fuzz(scene.fleet, seed)
    try:
        fuzz.run([f"mr-{number}" for number in range(AT_ONCE)])
    finally:
        with capsys.disabled():
            print(f"\nedits: {dict(fuzz.counts)}; {dict(fuzz.reasons.most_common())}")  # noqa: T201
    log = operator.log.read_text()
    assert "Traceback" not in log and "unexpected" not in log
    assert operator.process.poll() is None
    until(operator.alive)
    return fuzz.counts
