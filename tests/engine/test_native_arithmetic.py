"""The compiled kernels for norms, gated activations, penalties and FP8 products, in every
instruction set that they have, against the same in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from medha_worker.model.layers import TorchArithmetic
from medha_worker.model.native_arithmetic import (
    FP8_ROWS,
    FP8_THREADS,
    MANY_THREADS,
    NativeArithmetic,
    NativeFp8,
    NativePenalties,
)

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
@pytest.mark.parametrize("size", [1, 15, 16, 97, 1000])
@pytest.mark.parametrize("factor", [1e-6, 0.7, 1.0, 1.3])
def test_penalties_are_exact_to_the_last_digits(lanes: int, size: int, factor: float) -> None:
    scores, seen = drawn(size), drawn(size) > 0
    scores[::7] = -math.inf
    counts = torch.arange(size, dtype=torch.float32) % 4 * seen
    factors = torch.where(seen, factor, 1.0)
    expected = torch.where(scores < 0, scores.double() * factors, scores.double() / factors)
    expected -= 0.5 * (counts > 0) - 0.25 * counts
    NativePenalties(lanes)(scores, factors, counts, factor < 1.0, 0.5, -0.25)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-6, atol=1e-6)


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


# --- products with FP8 weights --------------------------------------------------------------------

Weight = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def drawn_weight(outputs: int, inputs: int, parts: int, block: int = 3) -> Weight:
    """FP8 numbers of all sizes, scales of parts, and the block of each output."""
    numbers = drawn(outputs, inputs, spread=100.0).clamp(-448, 448)
    numbers[::5] /= 1e4  # denormals, and zeros
    of_output = torch.arange(outputs, dtype=torch.int32) // block
    scales = drawn(int(of_output[-1]) + 1, parts).abs() / 100
    return numbers.to(torch.float8_e4m3fn), scales, of_output


def widened(numbers: torch.Tensor, scales: torch.Tensor, of_output: torch.Tensor) -> torch.Tensor:
    step = numbers.shape[1] // scales.shape[1]
    return numbers.double() * scales.double()[of_output.long()].repeat_interleave(step, 1)


@LANES
def test_every_fp8_number_is_widened_exactly_at_every_place(lanes: int) -> None:
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.float8_e4m3fn)
    finite = numbers[~numbers.float().isnan()]
    weight = finite.view(-1, 1).expand(-1, 32).contiguous()
    blocks = torch.arange(len(finite), dtype=torch.int32) % 2
    for place in range(32):
        x = torch.zeros(1, 32)
        x[0, place] = 1.0
        out = NativeFp8(lanes)(x, weight, torch.tensor([[1.0], [0.375]]), blocks)[0]
        assert torch.equal(out, finite.float() * torch.tensor([1.0, 0.375])[blocks.long()])


@LANES
@pytest.mark.parametrize("rows", range(1, FP8_ROWS + 1))
@pytest.mark.parametrize(("inputs", "parts"), [(32, 1), (96, 3), (256, 2), (352, 1)])
def test_products_with_fp8_weights_are_nearly_exact(
    lanes: int, rows: int, inputs: int, parts: int
) -> None:
    native, weight, x = NativeFp8(lanes), drawn_weight(17, inputs, parts), drawn(rows, inputs)
    assert native.serves(x, *weight)
    expected = x.double() @ widened(*weight).t()
    torch.testing.assert_close(native(x, *weight).double(), expected, rtol=1e-6, atol=1e-5)


def test_other_products_with_fp8_weights_are_left_to_torch() -> None:
    native, (numbers, scales, of_output) = NativeFp8(), drawn_weight(17, 192, 3)
    x = drawn(2, 192)
    assert native.serves(x, numbers, scales, of_output)
    assert not native.serves(drawn(FP8_ROWS + 1, 192), numbers, scales, of_output)
    assert not native.serves(drawn(0, 192), numbers, scales, of_output)
    assert not native.serves(x.bfloat16(), numbers, scales, of_output)
    assert not native.serves(drawn(192, 2).t(), numbers, scales, of_output)
    assert not native.serves(drawn(2, 160), numbers, scales, of_output)
    assert not native.serves(x, numbers, scales.expand(-1, 3).repeat(1, 3), of_output)
    assert not native.serves(x, numbers, scales, of_output.long())
    before = torch.get_num_threads()
    torch.set_num_threads(FP8_THREADS)
    try:
        assert not native.serves(x, numbers, scales, of_output)
    finally:
        torch.set_num_threads(before)
