"""Experts of a layer, by themselves: routing, the ways to compute them, what a row depends on."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn import functional

from medha.checkpoints.decoder_config import DecoderConfig
from medha.checkpoints.fit import check_experts
from medha.checkpoints.rope_settings import Rope
from medha.checkpoints.routed_experts import RoutedExperts
from medha.config import WorkerConfig
from medha.errors import SetupError, SpecError
from medha.topology import Topology
from medha_worker.engine import check_grouped_products
from medha_worker.model.experts import Experts
from medha_worker.model.layers import Linear, Projection, TorchArithmetic

HIDDEN, WIDTH = 48, 32
PLAIN = TorchArithmetic(1e-6)


def drawn(
    count: int, per_token: int, *, normalized: bool = True, dtype: torch.dtype = torch.float32
) -> Experts:
    dice = torch.Generator("cpu").manual_seed(count)

    def linear(inputs: int, outputs: int) -> Linear:
        weight = torch.randn(outputs, inputs, generator=dice, device="cpu") * inputs**-0.5
        return Linear(weight.to(dtype).t())

    return Experts(
        linear(HIDDEN, count),
        tuple(linear(HIDDEN, 2 * WIDTH) for _ in range(count)),
        tuple(linear(WIDTH, HIDDEN) for _ in range(count)),
        RoutedExperts(
            count=count,
            per_token=per_token,
            intermediate=WIDTH,
            normalized=normalized,
            layers=(0,),
        ),
    )


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def by_definition(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """Row by row, every expert computed and all but the likeliest weighted with 0."""
    out = []
    for row in x.double():
        odds = torch.exp(row @ experts.router.by_output().double().t())
        odds = odds / odds.sum()
        kept = torch.zeros_like(odds)
        best = sorted(range(len(odds)), key=lambda n: -float(odds[n]))
        for expert in best[: experts.routing.per_token]:
            kept[expert] = odds[expert]
        if experts.routing.normalized:
            kept = kept / kept.sum()
        sums = torch.zeros(HIDDEN, dtype=torch.float64)
        for scale, gate_up, down in zip(kept, experts.gate_up, experts.down, strict=True):
            gate, up = (row @ gate_up.by_output().double().t()).chunk(2)
            sums += scale * ((functional.silu(gate) * up) @ down.by_output().double().t())
        out.append(sums)
    return torch.stack(out).float()


@pytest.mark.parametrize("form", ["by expert", "grouped", "in blocks"])
@settings(max_examples=25)
@given(
    count=st.integers(1, 9),
    share=st.floats(0.0, 1.0),
    normalized=st.booleans(),
    length=st.integers(1, 40),
)
def test_each_form_computes_the_mixture(
    form: str, count: int, share: float, normalized: bool, length: int
) -> None:
    experts = drawn(count, max(1, round(share * count)), normalized=normalized)
    if form == "grouped":
        experts = experts.grouped()
    elif form == "in blocks":
        experts = experts.in_blocks(16)
    x, sum_ = rows(length), rows(length, seed=1)
    expected = by_definition(experts, x)
    torch.testing.assert_close(experts(x, PLAIN), expected, rtol=1e-4, atol=1e-5)
    before = sum_.clone()
    experts.onto(x, sum_, PLAIN)
    torch.testing.assert_close(sum_, before + expected, rtol=1e-4, atol=1e-5)


def test_equal_odds_select_the_lower_experts() -> None:
    experts = dataclasses.replace(drawn(6, 3), router=Linear(torch.zeros(HIDDEN, 6)))
    weights, selected = experts.route(rows(5))
    assert selected.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, 3), 1 / 3))


def test_in_blocks_a_row_has_the_same_bytes_in_any_batch() -> None:
    experts, x = drawn(8, 3).in_blocks(16), rows(70)
    whole = experts(x, PLAIN)
    for batch in ([5], [69, 5], list(range(69, -1, -1)), [5] * 40):
        assert torch.equal(experts(x[batch], PLAIN), whole[batch])
    unblocked = drawn(8, 3)
    assert not all(torch.equal(unblocked(x[[n]], PLAIN)[0], whole[n]) for n in range(70))


def test_shards_of_every_expert_add_up() -> None:
    experts, x, half = drawn(7, 2), rows(30), WIDTH // 2

    def shard(rank: int) -> Experts:
        own = slice(rank * half, (rank + 1) * half)
        gate_up = [
            Linear(torch.cat([part[own] for part in linear.by_output().chunk(2)]).t())
            for linear in experts.gate_up
        ]
        down = [Linear(linear.by_output().t()[own]) for linear in experts.down]
        return dataclasses.replace(experts, gate_up=tuple(gate_up), down=tuple(down))

    parts = [shard(rank) for rank in range(2)]
    for selected in (part.route(x)[1] for part in parts):
        assert torch.equal(selected, experts.route(x)[1])
    torch.testing.assert_close(sum(part(x, PLAIN) for part in parts), experts(x, PLAIN))


def test_grouped_products_bring_no_number_to_the_host_so_that_graphs_hold_them() -> None:
    """Tensors without values stand for a GPU's: what would read one raises."""
    experts = drawn(8, 3, dtype=torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def there(tensor: torch.Tensor) -> torch.Tensor:
            return fake.from_tensor(tensor).to("cuda")

        def moved(linear: Projection) -> Linear:
            return Linear(there(linear.by_output()).t())

        on_gpu = dataclasses.replace(
            experts,
            router=moved(experts.router),
            gate_up=tuple(moved(linear) for linear in experts.gate_up),
            down=tuple(moved(linear) for linear in experts.down),
        )
        x, arithmetic = there(rows(5).bfloat16()), TorchArithmetic(1e-6, "cuda")
        assert on_gpu.grouped()(x, arithmetic).shape == (5, HIDDEN)
        with pytest.raises(DynamicOutputShapeException):
            on_gpu(x, arithmetic)


MIXTURE = DecoderConfig(
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=8,
    head_dim=64,
    intermediate=96,
    vocab=512,
    norm_eps=1e-6,
    rope=Rope(),
    experts=RoutedExperts(count=4, per_token=2, intermediate=96, normalized=True, layers=(0, 1)),
)


def gpu(dtype: str = "bfloat16", tp: int = 1, *, deterministic: bool = False) -> WorkerConfig:
    return WorkerConfig(
        replica="r",
        model="m",
        checkpoint="/model",
        topology=Topology(tp=tp),
        max_context_tokens=64,
        device="cuda",
        dtype=dtype,
        deterministic=deterministic,
        rank_bind="ipc://unused",
    )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (gpu("float16"), r"spec\.model\.dtype is float16: must be bfloat16.*; use bfloat16, or"),
        (gpu(tp=8), r"spec\.parallelism\.tp is 8: must leave a multiple of 8 of .* width of 96"),
    ],
)
def test_what_a_gpu_cannot_group_is_refused_by_name(config: WorkerConfig, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        check_experts(MIXTURE, config)


def test_the_rest_is_accepted() -> None:
    check_experts(MIXTURE, gpu(tp=4))
    check_experts(MIXTURE, gpu("float16", deterministic=True))
    check_experts(msgspec.structs.replace(MIXTURE, experts=None), gpu("float16", tp=8))


def test_a_gpu_whose_grouped_products_wait_for_the_host_is_refused() -> None:
    for major in (9, 10):
        check_grouped_products((major, 0))
    for capability in ((8, 0), (8, 9), (12, 0)):
        with pytest.raises(SetupError, match=r"capability .* needs 9\.x or 10\.x"):
            check_grouped_products(capability)
