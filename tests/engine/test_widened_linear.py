"""Products in narrow types by way of float32, against products in float64."""

from __future__ import annotations

import pytest
import torch

from medha_worker.model import widened_linear
from medha_worker.model.layers import linear
from medha_worker.model.onednn_linear import OneDnnLinear
from medha_worker.model.widened_linear import WidenedLinear, products_of_each, widens

NARROW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("dtype", list(NARROW), ids=str)
@pytest.mark.parametrize(
    ("inputs", "outputs", "tile"),
    [(128, 352, 1 << 19), (96, 1, 1), (17, 33, 17 * 5), (768, 1280, 768 * 1000)],
)
def test_a_product_is_rounded_once_for_few_and_many_rows(
    inputs: int, outputs: int, tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widened_linear, "TILE", tile)
    weight = (torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)
    product = WidenedLinear(weight)
    for rows in (0, 1, 2, 17, 300):
        x = torch.randn(rows, inputs).to(dtype)
        exact = x.double() @ weight.double().t()
        assert product(x).dtype == product.dtype == dtype
        rounding = NARROW[dtype]
        torch.testing.assert_close(product(x).double(), exact, atol=1e-5, rtol=rounding)


def test_biases_and_sums_are_added() -> None:
    weight, bias = torch.eye(3, dtype=torch.bfloat16), torch.tensor([1.0, 2.0, 4.0]).bfloat16()
    product, sum_ = WidenedLinear(weight, bias), torch.full((2, 3), 8.0).bfloat16()
    assert product(torch.ones(2, 3).bfloat16()).tolist() == [[2.0, 3.0, 5.0]] * 2
    product.onto(torch.ones(2, 3).bfloat16(), sum_)
    assert sum_.tolist() == [[10.0, 11.0, 13.0]] * 2
    assert product.by_output() is weight


def test_products_in_blocks_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="for weights on a GPU"):
        WidenedLinear(torch.ones(2, 2).bfloat16()).in_blocks(128)


def test_narrow_types_without_instructions_are_widened_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OneDnnLinear, "serves", lambda weight: weight.dtype == torch.float32)
    for dtype in NARROW:
        weight = torch.randn(64, 48).to(dtype)
        product = linear(weight.t().contiguous().t())
        assert isinstance(product, WidenedLinear) and product.weight.is_contiguous()
        shared = linear(weight, shared=True)
        assert shared.by_output().data_ptr() == weight.data_ptr()
    assert not widens(torch.ones(2, 2))
    assert not widens(torch.ones(2, 2, dtype=torch.bfloat16, device="meta"))
    monkeypatch.setattr(OneDnnLinear, "serves", lambda weight: True)
    assert not widens(torch.ones(2, 2, dtype=torch.bfloat16))


@pytest.mark.parametrize("served", [False, True], ids=["widened", "as they are"])
def test_products_of_each_head_are_rounded_once(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneDnnLinear, "serves", lambda weight: served)
    x, weights = torch.randn(7, 5, 32).bfloat16(), torch.randn(5, 32, 48).bfloat16()
    out = torch.empty(7, 5, 48, dtype=torch.bfloat16)
    products_of_each(x.transpose(0, 1), weights, out.transpose(0, 1))
    exact = torch.einsum("rhi,hio->rho", x.double(), weights.double())
    torch.testing.assert_close(out.double(), exact, atol=1e-4, rtol=2.0**-8)
