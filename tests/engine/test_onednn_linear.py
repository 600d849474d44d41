"""Projections by oneDNN, and by torch where it does not serve, against products in float64."""

from __future__ import annotations

import pytest
import torch

from medha_worker.model.layers import FEW_ROWS, Linear, linear
from medha_worker.model.onednn_linear import OneDnnLinear, padded_rows

OFF = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def drawn(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(outputs, inputs) * inputs**-0.5
    weight, bias = weight.to(dtype), torch.randn(outputs).to(dtype)
    if not OneDnnLinear.serves(weight):
        pytest.skip(f"oneDNN does not multiply {dtype} here")
    return weight, bias


@pytest.mark.parametrize("dtype", list(OFF), ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 352), (96, 1), (17, 33), (768, 1280)])
def test_a_product_is_exact_for_few_and_many_rows(
    inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    weight, bias = drawn(outputs, inputs, dtype)
    product = linear(weight, bias)
    assert isinstance(product, OneDnnLinear) and product.dtype == dtype
    for rows in (0, 1, 2, 7, 16, 17, 45, 300):
        x = torch.randn(rows, inputs).to(dtype)
        expected = x.double() @ weight.double().t() + bias.double()
        off = OFF[dtype]
        torch.testing.assert_close(product(x).double(), expected, atol=off, rtol=off)
        sum_ = torch.ones(rows, outputs, dtype=dtype)
        product.onto(x, sum_)
        torch.testing.assert_close(sum_.double(), 1.0 + expected, atol=off, rtol=off)


@pytest.mark.parametrize("inputs_first", [True, False], ids=["[in, out]", "[out, in]"])
def test_a_product_of_torchs_is_exact_and_contiguous_for_every_number_of_few_rows(
    inputs_first: bool,
) -> None:
    """Some numbers of rows are multiplied from the right; strided rows and tied heads, too."""
    weight, bias = torch.randn(48, 33) * 48**-0.5, torch.randn(33)
    product = Linear(weight if inputs_first else weight.t().contiguous().t(), bias)
    for rows in range(FEW_ROWS.stop + 3):
        x = torch.randn(rows, 96)[:, 48:]
        expected = x.double() @ weight.double() + bias.double()
        out, sum_ = product(x), torch.ones(rows, 33)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
        product.onto(x, sum_)
        torch.testing.assert_close(sum_.double(), 1.0 + expected, atol=1e-5, rtol=1e-5)


def test_products_have_few_numbers_of_rows_and_at_most_an_eighth_more_than_asked() -> None:
    numbers = [padded_rows(rows) for rows in range(2049)]
    assert len(set(numbers)) < 110
    assert all(rows <= padded <= 1.125 * rows for rows, padded in enumerate(numbers))
    assert all(padded_rows(rows) == rows for rows in (*range(17), *range(32, 2049, 32)))


def test_added_rows_change_no_bit_of_the_others() -> None:
    weight, bias = drawn(352, 128, torch.float32)
    product, x = linear(weight, bias), torch.randn(288, 128)
    whole = product(x)
    for rows in (2, 15, 17, 31, 33, 65, 257, 287):
        assert torch.equal(product(x[:rows]), whole[:rows])


def test_rows_that_are_not_contiguous_give_the_same_product() -> None:
    weight, _ = drawn(64, 48, torch.float32)
    product, wide = linear(weight), torch.randn(20, 96)
    assert torch.equal(product(wide[:, 48:]), product(wide[:, 48:].contiguous()))
    turned = torch.randn(48, 20).t()
    assert torch.equal(product(turned), product(turned.contiguous()))


def test_weights_come_back_as_they_were() -> None:
    weight, _ = drawn(352, 128, torch.float32)
    part = torch.cat([weight, weight], dim=1)[:, 128:]
    assert torch.equal(linear(part).by_output(), weight)
    shared = linear(weight, shared=True)
    assert shared.by_output().data_ptr() == weight.data_ptr()
    x = torch.randn(5, 128)
    torch.testing.assert_close(shared(x), linear(weight)(x))


def test_other_types_are_left_to_torch() -> None:
    assert not OneDnnLinear.serves(torch.ones(2, 2, dtype=torch.float64))
    assert not OneDnnLinear.serves(torch.ones(2, 2, device="meta"))
    product = linear(torch.ones(2, 3, dtype=torch.float64))
    assert product(torch.ones(1, 3, dtype=torch.float64)).tolist() == [[3.0, 3.0]]


def test_products_in_blocks_of_rows_are_refused() -> None:
    weight, _ = drawn(4, 4, torch.float32)
    with pytest.raises(ValueError, match="16 rows each are for weights on a GPU"):
        OneDnnLinear(weight).in_blocks(16)
