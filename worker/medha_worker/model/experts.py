"""Mixture of experts: a router selects, for each row, the few MLPs that compute it.

    p = softmax(x · router)                          float32; `normalized`: the k largest sum to 1
    h ← h + Σ pᵢ · downᵢ(silu(gateᵢ x) · upᵢ x)       over the experts with the k largest p

In the DeepSeek families, p is multiplied by a factor, the k experts come from the best groups of
experts only, and a shared MLP computes every row. Those of DeepSeek-V3 score by sigmoid, and choose
by p plus a bias.

Every TP shard holds a slice of each expert's width and the whole router. So all shards select the
same experts, from equal bits, do equal work however rows are spread, and add their parts like those
of a dense MLP. With whole experts per shard, a batch would take as long as its fullest shard.

A row's result depends on no other row: each product is of one row with one expert, and a row's
experts are added in ascending order. The rows of an expert are computed together (`_by_expert`), or
all of a layer in one grouped product that needs no numbers on the host, so that CUDA graphs hold it
(`_grouped`). Weights that stay FP8 are dequantised for a few selected experts at a time
(`_in_tiles`), whose numbers the host needs.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch
from torch.nn import functional

from medha.checkpoints.routed_experts import RoutedExperts
from medha_worker.model.fp8_linear import Fp8Linear, Fp8Stack
from medha_worker.model.layers import Arithmetic, GatedMlp, Linear, Projection


@dataclasses.dataclass(frozen=True, slots=True)
class Experts:
    """A shard's experts of one layer, and the layer's router.

    `router` [hidden, experts]; `gate_up` and `down`: of each expert, as in a GatedMlp. `bias`
    [experts] float32: see RoutedExperts. `shared`: the MLP of all rows. `stacked`, only where
    products are grouped: the same weights as [experts, hidden, 2·intermediate] and [experts,
    intermediate, hidden]; `packed`: the same of weights that stay FP8.
    """

    router: Projection
    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]
    routing: RoutedExperts
    bias: torch.Tensor | None = None
    shared: GatedMlp | None = None
    stacked: tuple[torch.Tensor, torch.Tensor] | None = None
    packed: tuple[Fp8Stack, Fp8Stack] | None = None

    @property
    def on_device(self) -> bool:
        """True if a GPU needs no numbers on the host, so that CUDA graphs hold the layer: its
        products are grouped, and no weights stay FP8."""
        return self.packed is None

    def __call__(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        weights, selected = self.route(x)
        order = selected.flatten().argsort(stable=True)  # by expert, then by row
        compute = self._by_expert
        if self.stacked is not None:
            compute = self._grouped
        elif self.packed is not None:
            compute = self._in_tiles
        out = compute(x, weights, selected, order, arithmetic)
        if self.shared is not None:
            self.shared.onto(x, out, arithmetic)
        return out

    def onto(self, x: torch.Tensor, sum_: torch.Tensor, arithmetic: Arithmetic) -> None:
        sum_.add_(self(x, arithmetic))

    def in_blocks(self, rows: int) -> Experts:
        """Return experts whose products are not grouped, but of `rows` rows each."""
        return dataclasses.replace(
            self,
            router=self.router.in_blocks(rows),
            gate_up=tuple(linear.in_blocks(rows) for linear in self.gate_up),
            down=tuple(linear.in_blocks(rows) for linear in self.down),
            shared=None if self.shared is None else self.shared.in_blocks(rows),
            stacked=None,
            packed=None,
        )

    def grouped(self) -> Experts:
        """Return experts whose products are grouped, over one copy of the weights."""
        both = (self.gate_up, self.down)
        kept = [[own for own in side if isinstance(own, Fp8Linear)] for side in both]
        if [len(side) for side in kept] == [len(side) for side in both]:
            into, out_of = map(Fp8Stack.of, kept)
            numbers = range(len(self.down))
            return dataclasses.replace(
                self,
                gate_up=tuple(into[number] for number in numbers),
                down=tuple(out_of[number] for number in numbers),
                packed=(into, out_of),
            )
        gate_up = torch.stack([linear.by_output() for linear in self.gate_up])
        down = torch.stack([linear.by_output() for linear in self.down])
        return dataclasses.replace(
            self,
            gate_up=tuple(Linear(weight.t()) for weight in gate_up),
            down=tuple(Linear(weight.t()) for weight in down),
            stacked=(gate_up.transpose(1, 2), down.transpose(1, 2)),
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, in the type of `x`, and numbers of each row's experts, ascending;
        [rows, per_token] both.

        Of equal probabilities the lower expert's counts more: a sort is stable, a top-k is not.
        """
        routing, logits = self.routing, self.router(x.to(self.router.dtype))
        if routing.scoring == "sigmoid":
            scores = logits.float().sigmoid_()
        else:
            scores = functional.softmax(logits, dim=-1, dtype=torch.float32)
        choice = scores if self.bias is None else scores + self.bias
        if routing.groups > 1:
            choice = self._in_groups(choice)
        order = choice.sort(dim=-1, descending=True, stable=True).indices
        selected = order[:, : routing.per_token].sort(dim=-1).values
        weights = scores.gather(1, selected)
        if routing.normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        if routing.factor != 1.0:
            weights = weights * routing.factor
        return weights.to(x.dtype), selected

    def _in_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Return `choice` [rows, experts], −∞ outside the best groups.

        A group counts as its best expert, or by sigmoid as its two best together.
        """
        routing = self.routing
        grouped = choice.view(len(choice), routing.groups, -1)
        best = grouped.topk(2 if routing.scoring == "sigmoid" else 1, dim=-1).values.sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices
        others = order[:, routing.groups_chosen :]
        hidden = torch.zeros_like(best, dtype=torch.bool).scatter_(1, others, True)
        return grouped.masked_fill(hidden.unsqueeze(2), float("-inf")).view(choice.shape)

    def _by_expert(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        selected: torch.Tensor,
        order: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        """Compute the rows of one expert after those of another."""
        counts = selected.flatten().bincount(minlength=len(self.down)).tolist()
        rows = torch.split(order // self.routing.per_token, counts)
        scales = torch.split(weights.reshape(-1, 1)[order], counts)
        out = torch.zeros_like(x)
        for number, own in enumerate(rows):
            if len(own):
                inner = arithmetic.gated(self.gate_up[number], x.index_select(0, own))
                out.index_add_(0, own, self.down[number](inner).mul_(scales[number]))
        return out

    def _grouped(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        selected: torch.Tensor,
        order: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        """Compute all rows in two launches, whose sizes depend on the number of rows alone."""
        assert self.stacked is not None
        gate_up, down = self.stacked
        ordered = selected.flatten()[order]
        numbers = torch.arange(len(down), device=x.device)
        ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
        both = functional.grouped_mm(x[order // self.routing.per_token], gate_up, offs=ends)
        product = functional.grouped_mm(arithmetic.activated(both), down, offs=ends)
        return self._by_row(product, weights, selected, order)

    def _in_tiles(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        selected: torch.Tensor,
        order: torch.Tensor,
        arithmetic: Arithmetic,
    ) -> torch.Tensor:
        """Compute the rows of a few experts in a grouped product, then those of the next few."""
        assert self.packed is not None
        into, out_of = self.packed
        counts = selected.flatten().bincount(minlength=len(self.down)).tolist()
        chosen = [number for number, count in enumerate(counts) if count]
        rows = torch.split(order // self.routing.per_token, [counts[n] for n in chosen])
        size, parts = min(into.at_once, out_of.at_once), []
        for first in range(0, len(chosen), size):
            tile = chosen[first : first + size]
            ends = list(itertools.accumulate(counts[number] for number in tile))
            offs = torch.tensor(ends, dtype=torch.int32, device=x.device)
            own = x.index_select(0, torch.cat(rows[first : first + size]))
            both = functional.grouped_mm(own, into.dequantised(tile), offs=offs)
            inner = arithmetic.activated(both)
            parts.append(functional.grouped_mm(inner, out_of.dequantised(tile), offs=offs))
        return self._by_row(torch.cat(parts), weights, selected, order)

    def _by_row(
        self,
        product: torch.Tensor,
        weights: torch.Tensor,
        selected: torch.Tensor,
        order: torch.Tensor,
    ) -> torch.Tensor:
        """Add each row's results, from `product` by expert."""
        by_row = torch.empty_like(product).index_copy_(0, order, product)
        by_row = by_row.view(*selected.shape, -1)
        return by_row.mul_(weights.unsqueeze(2)).sum(1)
