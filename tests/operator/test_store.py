"""What is known of the cluster never goes back in time, in whatever order the news come."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from medha_operator.informers import Store
from medha_operator.projections import Key, Seen

Told = list[tuple[str, str | None, str | None]]


def seen(name: str, version: int, value: str = "", uid: str = "") -> Seen[str]:
    return Seen(("ns", name), version, uid or name, value or f"{name}@{version}")


def store() -> tuple[Store[str], Told]:
    told: Told = []

    def changed(key: Key, old: str | None, new: str | None) -> None:
        told.append((key[1], old, new))

    return Store(changed), told


def names(known: Store[str]) -> list[str]:
    return sorted(each.key[1] for each in known)


def test_older_news_and_repetitions_change_nothing() -> None:
    known, told = store()
    for version in (5, 3, 5):
        known.learn(seen("a", version))
    assert told == [("a", None, "a@5")]


def test_a_change_that_matters_to_nobody_is_not_told() -> None:
    known, told = store()
    known.learn(seen("a", 5, "same"))
    known.learn(seen("a", 6, "same"))
    assert len(told) == 1
    held = known.get(("ns", "a"))
    assert held is not None and held.version == 6


def test_the_answer_to_a_write_does_not_bring_back_what_was_deleted_meanwhile() -> None:
    known, _ = store()
    known.learn(seen("a", 5))
    known.forget(("ns", "a"), 7)
    known.passed(7)
    known.learn(seen("a", 5))  # the answer to our POST, slower than the watch
    assert names(known) == []
    known.learn(seen("a", 8))  # made anew
    assert names(known) == ["a"]


def test_the_end_of_a_former_object_does_not_touch_its_successor() -> None:
    known, _ = store()
    known.learn(seen("a", 9, uid="new"))
    known.forget(("ns", "a"), 7)
    known.forget_uid(("ns", "a"), "old")
    assert names(known) == ["a"]
    known.forget_uid(("ns", "a"), "new")
    assert names(known) == []


def test_an_object_of_which_one_event_was_lost_is_brought_by_the_next_list() -> None:
    known, _ = store()
    known.learn(seen("other", 7))  # that of "lost", at 5, never came
    known.passed(7)
    known.replace([seen("lost", 5), seen("other", 7)], 9)
    assert names(known) == ["lost", "other"]


def test_what_was_deleted_is_not_brought_back_by_news_that_two_lists_have_overtaken() -> None:
    known, _ = store()
    known.learn(seen("a", 5))
    known.forget_uid(("ns", "a"), "a")
    known.replace([seen("b", 6)], 8)
    known.learn(seen("a", 5))
    assert names(known) == ["b"]


def test_a_list_removes_what_it_lacks_unless_that_is_newer_than_the_list() -> None:
    known, told = store()
    known.learn(seen("gone", 3))
    known.learn(seen("kept", 4))
    known.learn(seen("newer", 12))
    known.replace([seen("kept", 4), seen("missed", 6)], 10)
    assert names(known) == ["kept", "missed", "newer"]
    assert ("gone", "gone@3", None) in told


def test_a_list_from_the_past_neither_revives_nor_removes() -> None:
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
def test_after_the_last_list_the_store_equals_the_cluster_whatever_was_lost(seed: int) -> None:
    """A history of objects; events reach the store late, twice or never; then one list."""
    dice = random.Random(seed)
    known, _ = store()
    living: dict[str, int] = {}
    news: list[tuple[str, int, bool]] = []
    for version in range(1, 40):
        name = dice.choice("abcd")
        gone = name in living and dice.random() < 0.4
        if gone:
            del living[name]
        else:
            living[name] = version
        news.append((name, version, gone))
        for each, at, ended in dice.sample(news, dice.randint(0, min(3, len(news)))):
            known.forget(("ns", each), at) if ended else known.learn(seen(each, at))
        known.passed(dice.randint(0, version))
        if dice.random() < 0.1:
            known.replace([seen(each, at) for each, at in living.items()], version)
    known.replace([seen(name, version) for name, version in living.items()], 40)
    assert {each.key[1]: each.version for each in known} == living
