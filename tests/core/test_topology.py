"""Coordinates, stages and head shares of a replica."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.errors import SpecError
from medha.topology import Coordinate, Topology, check_tp, kv_heads_of, stage_layers


@given(tp=st.integers(1, 8), spp=st.integers(1, 8), kvp=st.integers(1, 8), data=st.data())
def test_rank_and_coordinate_are_inverse(tp: int, spp: int, kvp: int, data: st.DataObject) -> None:
    topology = Topology(tp=tp, spp=spp, kvp_max=kvp)
    rank = data.draw(st.integers(0, topology.world - 1))
    assert topology.rank(topology.coordinate(rank)) == rank


def test_ranks_are_numbered_group_by_group() -> None:
    topology = Topology(tp=2, spp=3, kvp_max=2)
    assert topology.coordinate(7) == Coordinate(1, 0, 1)
    assert [topology.rank(at) for at in topology.group_ranks(1)] == [6, 7, 8, 9, 10, 11]
    assert str(topology.coordinate(7)) == "g1-s0-t1"


@given(layers=st.integers(1, 200), data=st.data())
def test_stages_cover_every_layer_once_and_evenly(layers: int, data: st.DataObject) -> None:
    stages = stage_layers(layers, data.draw(st.integers(1, layers)))
    assert [layer for stage in stages for layer in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


def test_more_stages_than_layers_is_refused_with_the_range() -> None:
    with pytest.raises(SpecError, match=r"spec\.parallelism\.spp is 7: .* 6 layers; use 1 to 6"):
        stage_layers(6, 7)


@given(
    heads=st.sampled_from([4, 8, 32]),
    kv=st.sampled_from([1, 2, 4]),
    intermediate=st.sampled_from([12, 96, 352]),
    tp=st.integers(1, 40),
)
def test_every_accepted_tp_shares_out_all_kv_heads(
    heads: int, kv: int, intermediate: int, tp: int
) -> None:
    try:
        check_tp(tp, heads, kv, intermediate)
    except SpecError:
        assert heads % tp or intermediate % tp or (kv % tp and tp % kv)
        return
    assert intermediate % tp == 0
    held = [head for shard in range(tp) for head in kv_heads_of(shard, tp, kv)]
    assert sorted(set(held)) == list(range(kv))
    assert len(held) == max(tp, kv)


def test_a_wrong_tp_is_answered_with_the_ones_that_fit() -> None:
    with pytest.raises(
        SpecError, match=r"tp is 3: .* 4 attention heads .* 2 KV heads; use one of 1, 2, 4"
    ):
        check_tp(3, 4, 2, 96)


def test_a_tp_must_divide_the_size_of_the_mlp_too() -> None:
    with pytest.raises(
        SpecError, match=r"tp is 4: .* intermediate size of 98, .*; use one of 1, 2$"
    ):
        check_tp(4, 4, 4, 98)
