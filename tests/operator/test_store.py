"""A Store never goes back in time, in whatever order events arrive."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from medha_operator.kube.informers import Store
from medha_operator.resources.objects import Key, Versioned

Changes = list[tuple[str, str | None, str | None]]


def seen(name: str, version: int, value: str = "", uid: str = "") -> Versioned[str]:
    return Versioned(("ns", name), version, uid or name, value or f"{name}@{version}")


def store() -> tuple[Store[str], Changes]:
    changes: Changes = []

    def changed(key: Key, old: str | None, new: str | None) -> None:
        changes.append((key[1], old, new))

    return Store(changed), changes


def names(known: Store[str]) -> list[str]:
    return sorted(held.key[1] for held in known)


def test_older_and_repeated_versions_change_nothing() -> None:
    known, changes = store()
    for version in (5, 3, 5):
        known.learn(seen("a", version))
    assert changes == [("a", None, "a@5")]


def test_a_new_version_with_the_same_value_reports_no_change() -> None:
    known, changes = store()
    known.learn(seen("a", 5, "same"))
    known.learn(seen("a", 6, "same"))
    assert len(changes) == 1
    held = known.get(("ns", "a"))
    assert held is not None and held.version == 6


def test_a_late_answer_to_a_write_does_not_bring_back_a_deleted_object() -> None:
    known, _ = store()
    known.learn(seen("a", 5))
    known.forget(("ns", "a"), 7)
    known.passed(7)
    known.learn(seen("a", 5))  # the answer to our POST, slower than the watch
    assert names(known) == []
    known.learn(seen("a", 8))  # created again
    assert names(known) == ["a"]


def test_the_deletion_of_an_object_leaves_a_newer_one_of_its_name() -> None:
    known, _ = store()
    known.learn(seen("a", 9, uid="new"))
    known.forget(("ns", "a"), 7)
    known.forget_uid(("ns", "a"), "old")
    assert names(known) == ["a"]
    known.forget_uid(("ns", "a"), "new")
    assert names(known) == []


def test_the_next_list_brings_an_object_whose_event_was_lost() -> None:
    known, _ = store()
    known.learn(seen("other", 7))  # the event of "lost", at version 5, never arrives
    known.passed(7)
    known.replace([seen("lost", 5), seen("other", 7)], 9)
    assert names(known) == ["lost", "other"]


def test_a_late_event_does_not_bring_back_a_deleted_object_after_a_list() -> None:
    known, _ = store()
    known.learn(seen("a", 5))
    known.forget_uid(("ns", "a"), "a")
    known.replace([seen("b", 6)], 8)
    known.learn(seen("a", 5))
    assert names(known) == ["b"]


def test_a_list_removes_the_objects_it_lacks_unless_they_are_newer() -> None:
    known, changes = store()
    known.learn(seen("gone", 3))
    known.learn(seen("kept", 4))
    known.learn(seen("newer", 12))
    known.replace([seen("kept", 4), seen("missed", 6)], 10)
    assert names(known) == ["kept", "missed", "newer"]
    assert ("gone", "gone@3", None) in changes


def test_an_old_list_neither_restores_nor_removes_objects() -> None:
    known, _ = store()
    known.replace([seen("a", 4)], 10)
    known.forget(("ns", "a"), 11)
    known.passed(11)
    known.learn(seen("b", 12))
    known.passed(12)
    known.replace([seen("a", 4)], 8)
    assert names(known) == ["b"]
    assert known.at == 12


@given(st.integers(0, 10_000))
def test_after_a_list_the_store_equals_the_cluster_whatever_was_lost(
    seed: int,
) -> None:
    """Events of a random history reach the store late, twice or never; then comes one list."""
    dice = random.Random(seed)
    known, _ = store()
    living: dict[str, int] = {}
    events: list[tuple[str, int, bool]] = []
    for version in range(1, 40):
        name = dice.choice("abcd")
        gone = name in living and dice.random() < 0.4
        if gone:
            del living[name]
        else:
            living[name] = version
        events.append((name, version, gone))
        for name, at, ended in dice.sample(events, dice.randint(0, min(3, len(events)))):
            known.forget(("ns", name), at) if ended else known.learn(seen(name, at))
        known.passed(dice.randint(0, version))
        if dice.random() < 0.1:
            known.replace([seen(name, at) for name, at in living.items()], version)
    known.replace([seen(name, version) for name, version in living.items()], 40)
    assert {held.key[1]: held.version for held in known} == living
