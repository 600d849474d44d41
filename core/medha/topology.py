"""KVP × SPP × TP arithmetic: coordinates, layers and peers of ranks.

A replica is `kvp_max` KVP groups × `spp` stages × `tp` ranks; ranks are numbered group-major:

    rank = (group × spp + stage) × tp + shard
"""

from __future__ import annotations

import msgspec

from medha.errors import SpecError


class Coordinate(msgspec.Struct, frozen=True, order=True):
    """Coordinate of a rank: KVP group, SPP stage, TP shard (each from 0)."""

    group: int
    stage: int
    shard: int

    def __str__(self) -> str:
        return f"g{self.group}-s{self.stage}-t{self.shard}"


class Topology(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parallel layout of one replica; `tokens_per_group` None lets the predictor choose."""

    tp: int = 1
    spp: int = 1
    kvp_min: int = 1
    kvp_max: int = 1
    tokens_per_group: int | None = None

    @property
    def ranks_per_group(self) -> int:
        return self.spp * self.tp

    @property
    def world(self) -> int:
        """Ranks of the replica with all KVP groups."""
        return self.kvp_max * self.ranks_per_group

    def rank(self, at: Coordinate) -> int:
        return (at.group * self.spp + at.stage) * self.tp + at.shard

    def coordinate(self, rank: int) -> Coordinate:
        column, shard = divmod(rank, self.tp)
        group, stage = divmod(column, self.spp)
        return Coordinate(group, stage, shard)

    def group_ranks(self, group: int) -> tuple[Coordinate, ...]:
        """Every rank of a KVP group, stage-major."""
        return tuple(
            Coordinate(group, stage, shard) for stage in range(self.spp) for shard in range(self.tp)
        )


def stage_layers(layers: int, spp: int) -> tuple[range, ...]:
    """Layers of each stage, contiguous, sizes differing by at most one, larger ones first.

    Raises SpecError when a stage would hold no layer.
    """
    if spp > layers:
        raise SpecError(
            "spec.parallelism.spp",
            spp,
            f"must be at most the model's {layers} layers",
            f"use 1 to {layers}",
        )
    size, extra = divmod(layers, spp)
    bounds = [stage * size + min(stage, extra) for stage in range(spp + 1)]
    return tuple(range(bounds[i], bounds[i + 1]) for i in range(spp))


def kv_heads_of(shard: int, tp: int, kv_heads: int) -> range:
    """KV heads that a TP shard holds; tp > kv_heads replicates each head tp / kv_heads times."""
    if tp <= kv_heads:
        heads = kv_heads // tp
        return range(shard * heads, (shard + 1) * heads)
    head = shard * kv_heads // tp
    return range(head, head + 1)


def check_tp(tp: int, heads: int, kv_heads: int, intermediate: int) -> None:
    """Raises SpecError unless `tp` divides heads and the MLP's size (an expert's, too), and divides
    or is a multiple of KV heads."""

    def fits(n: int) -> bool:
        divides = heads % n == 0 and intermediate % n == 0
        return divides and (kv_heads % n == 0 or n % kv_heads == 0)

    if not fits(tp):
        choices = [str(n) for n in range(1, heads + 1) if fits(n)]
        raise SpecError(
            "spec.parallelism.tp",
            tp,
            f"must divide the model's {heads} attention heads and intermediate size of"
            f" {intermediate}, and fit its {kv_heads} KV heads",
            f"use one of {', '.join(choices)}",
        )
