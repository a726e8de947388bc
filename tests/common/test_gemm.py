"""``linear`` against float64 on the oracle's codes, within the accumulation bound."""

import pytest
import torch

from quads_common import linear, quantize
from quads_common.format import QuantizedTensor
from quads_common.gemm import accumulation_bound, scaled_operand
from tests.common.bits import assert_same_bits
from tests.common.reference import Matrix, exact_gemm, gamma, gemm, operand_of, round_to
from tests.common.samples import normal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTS = ("nvfp4", "bf16")
SHAPES = [(1, 16, 16), (5, 7, 48), (33, 64, 256), (3, 20, 2048)]


def reference(x, weight, bias, act):
    return gemm(*operand_of(x.float().numpy(), act), Matrix.of(weight, bias))


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_within_the_accumulation_bound(shape, dtype, act, with_bias):
    m, n, k = shape
    x = normal(m, k, dtype=dtype)
    weight = quantize(0.03 * normal(n, k, seed=1))
    bias = normal(n, seed=2, dtype=dtype) if with_bias else None
    got = linear(x, weight, bias, act=act)
    assert got.dtype == dtype
    reference(x, weight, bias, act).check(got, f"linear {shape} {act}")


@pytest.mark.parametrize("rule", ["pow2", "te"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_rounds_where_the_contract_says(dtype, rule):
    """Sums that float32 holds exactly: then every bit of the output is determined."""
    x = normal(32, 64, dtype=dtype)
    weight = quantize(0.03 * normal(24, 64, seed=1), global_scale_rule=rule)
    bias = normal(24, seed=2, dtype=dtype)
    for b in (None, bias):
        y = exact_gemm(*operand_of(x.float().numpy(), "nvfp4"), Matrix.of(weight, b))
        assert_same_bits(linear(x, weight, b).float(), round_to(y, dtype), f"{rule}, bias {b}")


@pytest.mark.parametrize("wrong", ["weight-doubled", "activation-unquantized"])
def test_the_bound_notices_a_wrong_result(wrong):
    """Controls: twice one global scale, and x that skipped its quantization."""
    x, weight = normal(8, 64), quantize(0.03 * normal(16, 64, seed=1))
    expected = reference(x, weight, None, "nvfp4")
    if wrong == "weight-doubled":
        got = linear(x, QuantizedTensor(weight.packed, weight.block_scale, 2 * weight.global_scale))
    else:
        got = linear(x, weight, act="bf16")
    with pytest.raises(AssertionError, match="outside the bound"):
        expected.check(got, wrong)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("lead", [(), (0,), (1,), (2, 3), (2, 0, 3)], ids=str)
def test_linear_any_leading_dimensions(lead, act):
    x = normal(*lead, 32)
    weight = quantize(normal(5, 32, seed=1))
    got = linear(x, weight, act=act)
    assert got.shape == (*lead, 5) and got.dtype == x.dtype
    flat = linear(x.reshape(-1, 32), weight, act=act)
    assert_same_bits(got.reshape(-1, 5), flat, f"{lead}")


def test_linear_of_a_weight_without_rows():
    assert linear(normal(3, 32), quantize(torch.zeros(0, 32))).shape == (3, 0)


@pytest.mark.parametrize("act", ACTS)
def test_linear_ignores_memory_layout(act):
    weight = quantize(normal(16, 64, seed=1))
    views = QuantizedTensor(
        weight.packed.T.contiguous().T, weight.block_scale.T.contiguous().T, weight.global_scale
    )
    x = normal(64, 8).T
    assert_same_bits(linear(x, views, act=act), linear(x.contiguous(), weight, act=act), act)


def test_linear_does_not_overflow_float16():
    """|x| = 64, K = 4096, every code 6 under scale 448: the sum passes 65504 by far."""
    x = torch.full((2, 4096), 64.0, dtype=torch.float16)
    weight = quantize(torch.full((4, 4096), 0.01))
    for act in ACTS:
        got = linear(x, weight, act=act)
        assert got.isfinite().all(), f"{act}: {got}"
        reference(x, weight, None, act).check(got, act)


def test_linear_of_tiny_weights_does_not_underflow():
    weight = quantize(1e-6 * normal(8, 64))
    reference(normal(4, 64), weight, None, "nvfp4").check(linear(normal(4, 64), weight), "tiny")


@pytest.mark.parametrize("act", ACTS)
def test_linear_keeps_rows_that_are_not_finite_apart(act):
    x, weight = normal(6, 64), quantize(normal(16, 64, seed=1))
    expected = linear(x, weight, act=act)
    x[2, 5], x[4, 63] = float("nan"), float("inf")
    got = linear(x, weight, act=act)
    assert got[2].isnan().all()
    assert not got[4].isfinite().any()
    assert_same_bits(got[[0, 1, 3, 5]], expected[[0, 1, 3, 5]], "finite rows")


def test_linear_with_act_bf16_leaves_x_in_its_dtype():
    """A float32 x keeps the bits that bfloat16 would drop."""
    x = 1 + 2.0**-20 * torch.arange(16, dtype=torch.float32).reshape(1, 16)
    x[0, 15] = 0
    w = 4 * torch.eye(16)
    w[:, 15] = 6  # the amax of every block: so 4 and 6 are exact
    got = linear(x, quantize(w), act="bf16")
    assert_same_bits(got[0, :15], 4 * x[0, :15], "4 x")


def test_linear_leaves_its_inputs_alone():
    x, bias, weight = normal(4, 32), normal(8), quantize(normal(8, 32))
    before = x.clone(), bias.clone(), weight.packed.clone()
    linear(x, weight, bias)
    for tensor, copy in zip((x, bias, weight.packed), before, strict=True):
        assert_same_bits(tensor, copy, "an input")


def test_linear_refuses_another_k():
    with pytest.raises(ValueError, match=r"\b48\b.*\b32\b"):
        linear(normal(2, 48), quantize(normal(4, 32)))


def test_linear_refuses_an_unknown_act():
    for call in (
        lambda: linear(normal(2, 32), quantize(normal(4, 32)), act="fp8"),
        lambda: scaled_operand(normal(2, 32), "w4a4"),
    ):
        with pytest.raises(ValueError, match=r"(fp8|w4a4).*nvfp4.*bf16"):
            call()


@pytest.mark.parametrize("kind", ["per-token", "experts"])
def test_linear_refuses_a_weight_that_is_no_matrix_with_one_scale(kind):
    """[4, 1] scales would broadcast over the rows of x."""
    weight = quantize(normal(4, 32), per_token=True) if kind == "per-token" else None
    weight = weight or quantize(normal(4, 4, 32))
    with pytest.raises(ValueError, match="weight"):
        linear(normal(4, 32), weight)


@pytest.mark.parametrize("k", [16, 64, 4096])
def test_accumulation_bound(k):
    assert accumulation_bound(torch.tensor(3.0), k).item() == pytest.approx(3 * gamma(k), rel=1e-6)
    assert accumulation_bound(torch.tensor(1.0), 16).item() == 3 * 2.0**-22
