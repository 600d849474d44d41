"""Releases of the operator that serve the same namespaces: one serves, in order of age."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from medha_operator.cluster.peers import GONE_S, LOOK_S, RETURNS_S, STALE_S, Release, Seniority

OLD = Release("old", "2026-01-01T00:00:00Z", 1)
NEW = Release("new", "2026-01-02T00:00:00Z", 1)


def renewed(release: Release, now_s: float) -> Release:
    return msgspec.structs.replace(release, version=int(100 * now_s) + 2)


def seen(release: Release, others: list[Release], now_s: float = 0.0) -> Seniority:
    """The view of a release that leads and has seen these others live."""
    seniority = Seniority(release.namespace)
    seniority.start(now_s)
    seniority.look([release, *others], now_s)
    return seniority


def test_a_release_alone_serves_at_once_and_no_longer_once_it_sees_nothing() -> None:
    alone = seen(NEW, [])
    assert alone.serves("team", 0.0) and alone.serves("", 0.0)
    assert not alone.serves("team", STALE_S + 0.1)
    assert not Seniority("new").serves("team", 0.0)


def test_the_younger_release_stands_back_and_the_older_one_waits_until_it_has() -> None:
    assert not seen(NEW, [OLD]).serves("team", 0.0)
    older = seen(OLD, [NEW])
    assert not older.serves("team", 0.0)
    older.look([OLD, renewed(NEW, 1.0)], RETURNS_S)
    assert older.serves("team", RETURNS_S)


def test_releases_with_other_namespaces_do_not_meet() -> None:
    mine = msgspec.structs.replace(NEW, serves="a,b")
    theirs = msgspec.structs.replace(OLD, serves="c")
    seniority = seen(mine, [theirs])
    assert seniority.serves("a", 0.0) and not seniority.serves("c", 0.0)
    everything = seen(NEW, [theirs])
    assert everything.serves("", 0.0) and everything.serves("a", 0.0)
    assert not everything.serves("c", 0.0)


def test_a_release_that_renews_no_more_or_is_uninstalled_is_followed() -> None:
    younger = seen(NEW, [OLD])
    younger.look([NEW, OLD], GONE_S)
    assert not younger.serves("team", GONE_S)
    younger.look([NEW, OLD], GONE_S + 1.0)
    assert younger.serves("team", GONE_S + 1.0)
    other = seen(NEW, [OLD])
    other.look([NEW], 5.0)
    assert not other.serves("team", 5.0)
    other.look([NEW], RETURNS_S + 1.0)
    assert other.serves("team", RETURNS_S + 1.0)


def test_a_release_that_may_not_see_others_acts_as_if_it_were_alone() -> None:
    seniority = Seniority("new")
    seniority.blind = True
    assert seniority.serves("team", 1e9)


lives = st.lists(st.tuples(st.floats(0.0, 200.0), st.floats(5.0, 300.0)), min_size=2, max_size=4)


@given(lives, st.floats(0.0, LOOK_S))
def test_two_releases_never_serve_a_namespace_at_once(
    lives: list[tuple[float, float]], phase: float
) -> None:
    """Releases start and die at any time; each looks every LOOK_S while it lives."""
    releases = [Release(f"r{index}", f"{index}", 1) for index in range(len(lives))]
    views: dict[int, Seniority] = {}
    last: dict[int, Release] = {}
    served = 0
    for tick in range(2400):
        now_s = tick * 0.25
        for index, (start_s, for_s) in enumerate(lives):
            alive = start_s <= now_s < start_s + for_s
            if not alive:
                views.pop(index, None)
                continue
            last[index] = renewed(releases[index], now_s)
            if index not in views:
                views[index] = Seniority(releases[index].namespace)
                views[index].start(now_s)
        for index, view in views.items():
            if tick % 16 == int(4 * phase + 5 * index) % 16 or now_s < lives[index][0] + 0.25:
                view.look(last.values(), now_s)
        serving = [index for index, view in views.items() if view.serves("team", now_s)]
        assert len(serving) <= 1, f"{serving} serve at {now_s}"
        served += len(serving)
    assert served > 0 or all(for_s < RETURNS_S for _, for_s in lives)
