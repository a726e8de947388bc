"""The folded float16 operand against the exact form, within its stated bound."""

import dataclasses

import pytest
import torch

from quads_common import quantize
from quads_common.compensation import InputCompensation
from quads_common.compensation.fold import (
    _power_of_two,
    fold,
    fold_error_bound,
    linear_folded,
)
from quads_common.compensation.linear import linear_compensated
from quads_common.compensation.operands import Operands, compensated_operands, product
from quads_common.format import QuantizedTensor
from quads_common.packing import unscaled_values
from tests.common.bits import assert_same_bits
from tests.common.reference import gamma
from tests.common.samples import normal
from tests.compensation.cases import compensation, with_outliers

K, N = 2048, 128
ALL = list(range(K // 16))


def activations(kind: str) -> torch.Tensor:
    x = normal(64, K, dtype=torch.float32)
    if kind == "student-t3":
        x = torch.distributions.StudentT(3.0).sample((64, K))
    if kind == "outliers-50x":
        x = x * torch.where(torch.rand(K) < 0.01, 50.0, 1.0)
    return x.to(torch.bfloat16)


KINDS = ["normal", "student-t3", "outliers-50x"]


def exact_values(x, lists) -> torch.Tensor:
    """float64 [M, K] of the exact form, in units of the row's global scale."""
    o = compensated_operands(x, lists)
    values = o.quantized.double()
    if o.residual is not None:
        values = values + o.alpha * o.residual.double()
    if o.hot is not None:
        real = o.channels >= 0
        values[:, o.channels[real].long()] = o.hot[:, real].double() / o.row_scale.double()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_all_residual_operands_are_exact(kind):
    """Values of the design: 99.7% (as rounded) exact, outputs off by at most 1.1e-4 (RMS)."""
    x, weight = activations(kind), quantize(normal(N, K, seed=1))
    lists = compensation(K, ALL)
    folded, exact = fold(compensated_operands(x, lists)), exact_values(x, lists)
    assert folded.values.dtype == torch.float16
    assert (folded.values.double() == exact).double().mean() >= 0.9965
    w = unscaled_values(weight.packed, weight.block_scale).double()
    scale = folded.row_scale.double() * weight.global_scale.double()
    want, got = (exact @ w.T) * scale, (folded.values.double() @ w.T) * scale
    error = float((got - want).norm() / want.norm())
    assert 0 < error <= 1.15e-4, error
    rounding = float((want.to(torch.bfloat16).double() - want).norm() / want.norm())
    assert error < rounding / 12, (error, rounding)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("hot", [None, [3, 77, 2047]], ids=["rac", "splice-then-rac"])
@pytest.mark.parametrize("kind", KINDS)
def test_folded_product_within_its_bound(kind, hot, alpha):
    x, weight = activations(kind), quantize(normal(N, K, seed=1))
    lists = compensation(K, ALL[::2], hot, alpha=alpha)
    check_bound(x, weight, lists, kind)
    operands = compensated_operands(x, lists)
    size = product(dataclasses.replace(operands, **absolute(operands)), magnitude(weight))
    assert (fold_error_bound(fold(operands), weight) < 2**-10 * size).all(), "a loose bound"


def absolute(operands: Operands) -> dict[str, torch.Tensor]:
    found = {"quantized": operands.quantized, "residual": operands.residual, "hot": operands.hot}
    return {name: t.abs() for name, t in found.items() if t is not None}


def magnitude(weight: QuantizedTensor) -> QuantizedTensor:
    """The weight without its sign bits."""
    return QuantizedTensor(weight.packed & 0x77, weight.block_scale, weight.global_scale)


@pytest.mark.parametrize("factor", [1.0, 1e4, 1e6, 1e20, 1e33])
def test_hot_channels_of_any_size_stay_finite(factor):
    """x_hot / g passes float16's range from a factor of about 100 on; 2^-k brings it back."""
    x, weight = with_outliers(32, K, [3, 77], factor), quantize(normal(N, K, seed=1))
    lists = compensation(K, ALL, [3, 77], 16)
    folded = fold(compensated_operands(x, lists))
    assert folded.values.isfinite().all() and folded.values.abs().max() < 2**15
    shifted = folded.row_scale / compensated_operands(x, lists).row_scale
    assert bool((shifted > 1).all()) == bool((shifted > 1).any()) == (factor > 1)
    check_bound(x, weight, lists, f"{factor}")


def check_bound(x, weight, lists: InputCompensation, what: str) -> None:
    """|folded - exact form| <= bound + what float32 sums of both may differ by."""
    operands = compensated_operands(x, lists)
    folded = fold(operands)
    w = unscaled_values(weight.packed, weight.block_scale).double()
    scale = folded.row_scale.double() * weight.global_scale.double()
    got = (folded.values.double() @ w.T) * scale
    real = exact_values(x, lists)
    unit = operands.row_scale.double() * weight.global_scale.double()
    want = (real @ w.T) * unit
    bound = fold_error_bound(folded, weight).double()
    assert ((got - want).abs() <= bound * (1 + 1e-6)).all(), what
    size = (real.abs() @ w.abs().T) * unit
    exact = product(operands, weight).double()
    assert ((exact - want).abs() <= gamma(K) * size + 2**-22 * want.abs()).all(), what


def test_rows_of_zeros_and_small_values():
    x = torch.zeros(4, K, dtype=torch.bfloat16)
    x[1, 3] = 2.0  # only a hot channel
    x[2, 3], x[2, 100] = 1.0, 1e-35
    x[3, 100] = 5.0
    weight = quantize(normal(N, K, seed=1))
    lists = compensation(K, ALL, [3])
    folded = fold(compensated_operands(x, lists))
    assert folded.values.isfinite().all() and not folded.values[0].any()
    assert float(folded.values[1, 3] * folded.row_scale[1]) == 2.0
    check_bound(x, weight, lists, "edges")


@pytest.mark.parametrize("hot", [[], [3, 77]], ids=["no-channel", "hot-zeros"])
def test_nothing_hot_moves_nothing(hot):
    """Small rows too, whose global scale alone would ask for a shift."""
    x = (activations("normal").float() * 1e-6).to(torch.bfloat16)
    x[:, [3, 77]] = 0
    got = fold(compensated_operands(x, compensation(K, None, hot, 16)))
    want = fold(compensated_operands(x, InputCompensation()))
    assert_same_bits(got.row_scale, want.row_scale, "row scale")
    assert torch.equal(got.values, want.values)


def test_powers_of_two_are_exact():
    exponents = torch.arange(-126, 128)
    want = torch.tensor([2.0**e for e in exponents.tolist()], dtype=torch.float64)
    assert torch.equal(_power_of_two(exponents).double(), want)


@pytest.mark.parametrize("hot", [None, [3, 77]], ids=["rac", "splice-then-rac"])
def test_linear_folded_is_close_to_the_exact_form(hot):
    x, weight, bias = activations("normal"), quantize(normal(N, K, seed=1)), normal(N, seed=2)
    lists = compensation(K, ALL[::2], hot)
    got = linear_folded(x, weight, bias, compensation=lists).double()
    want = linear_compensated(x, weight, bias, compensation=lists).double()
    assert (got == want).double().mean() > 0.95
    assert float((got - want).norm() / want.norm()) < 1e-3, "single bfloat16 roundings flip"


def test_without_compensation_the_fold_is_exact():
    x, weight = activations("outliers-50x"), quantize(normal(N, K, seed=1))
    operands = compensated_operands(x, InputCompensation())
    folded = fold(operands)
    assert torch.equal(folded.values.float(), operands.quantized)
    got = linear_folded(x, weight, compensation=InputCompensation())
    assert_same_bits(got, linear_compensated(x, weight, compensation=InputCompensation()), "plain")


def test_bf16_columns_cannot_be_folded():
    lists = compensation(K, None, [3], columns=normal(N, 1))
    with pytest.raises(ValueError, match="BF16 columns"):
        linear_folded(activations("normal"), quantize(normal(N, K)), compensation=lists)
