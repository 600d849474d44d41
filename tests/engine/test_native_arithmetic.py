"""The compiled kernel for norms and gated activations, in every instruction set that it has,
against the same in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from medha_worker.model.layers import TorchArithmetic
from medha_worker.model.native_arithmetic import MANY_THREADS, NativeArithmetic

LANES = pytest.mark.parametrize("lanes", [4, 8, 16])
EPS = 1e-5


def drawn(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * spread


def exact(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.double().chunk(2, dim=-1)
    return functional.silu(gate) * up


@LANES
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0, 1000.0])
def test_gated_activations_are_nearly_exact(lanes: int, spread: float) -> None:
    both = drawn(7, 2 * 144, spread=spread)
    result = NativeArithmetic(EPS, lanes).activated(both)
    torch.testing.assert_close(result.double(), exact(both), rtol=5e-6, atol=1e-20)


@LANES
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e4])
def test_norms_are_exact_to_the_last_digits(lanes: int, spread: float) -> None:
    x, weight = drawn(5, 208, spread=spread), drawn(208)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    result = NativeArithmetic(EPS, lanes).norm(x, weight)
    torch.testing.assert_close(result.double(), expected, rtol=2e-6, atol=1e-30)


@LANES
def test_gates_without_a_finite_value_come_out_as_in_torch(lanes: int) -> None:
    both = torch.ones(1, 32)
    both[0, :5] = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38])
    result = NativeArithmetic(EPS, lanes).activated(both)
    torch.testing.assert_close(result, TorchArithmetic(EPS).activated(both), equal_nan=True)


@LANES
def test_a_rows_bits_do_not_depend_on_other_rows(lanes: int) -> None:
    native, both, x, weight = NativeArithmetic(EPS, lanes), drawn(9, 96), drawn(9, 48), drawn(48)
    assert torch.equal(native.activated(both)[3:4], native.activated(both[3:4].clone()))
    assert torch.equal(native.norm(x, weight)[3:4], native.norm(x[3:4].clone(), weight))


def test_other_types_sizes_and_layouts_are_left_to_torch() -> None:
    native, torch_alone = NativeArithmetic(EPS), TorchArithmetic(EPS)
    for both in (drawn(3, 64).bfloat16(), drawn(3, 2 * 24), drawn(64, 3).t(), drawn(2, 3, 64)):
        assert torch.equal(native.activated(both), torch_alone.activated(both))
    for x in (drawn(3, 64).bfloat16(), drawn(3, 40), drawn(64, 3).t(), drawn(2, 3, 64)):
        weight = drawn(x.shape[-1]).to(x.dtype)
        assert torch.equal(native.norm(x, weight), torch_alone.norm(x, weight))
    heads, weights = drawn(3, 4, 32), drawn(4, 32)
    assert torch.equal(native.norm(heads, weights), torch_alone.norm(heads, weights))


def test_no_rows_give_no_rows() -> None:
    native = NativeArithmetic(EPS)
    assert native.activated(drawn(0, 64)).shape == (0, 32)
    assert native.norm(drawn(0, 64), drawn(64)).shape == (0, 64)


def test_another_epsilon_takes_part() -> None:
    x, weight = drawn(2, 32, spread=1e-3), torch.ones(32)
    result = NativeArithmetic(EPS).with_eps(1.0).norm(x, weight)
    torch.testing.assert_close(result, TorchArithmetic(1.0).norm(x, weight))


def test_many_threads_are_left_to_torch() -> None:
    before, both = torch.get_num_threads(), drawn(3, 64, spread=9.0)
    torch.set_num_threads(MANY_THREADS)
    try:
        result = NativeArithmetic(EPS).activated(both)
        assert torch.equal(result, TorchArithmetic(EPS).activated(both))
    finally:
        torch.set_num_threads(before)
