"""``linear_compensated`` against float64 references of the formulas, and plain ``linear``."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from quads_common import dequantize, linear, quantize
from quads_common.compensation import InputCompensation, linear_compensated
from quads_common.compensation.operands import compensated_operands, gather_columns, product
from quads_common.compensation.selection import block_count
from quads_common.format import QuantizedTensor
from tests.common.bits import assert_same_bits
from tests.common.reference import Interval, Matrix, gamma
from tests.common.samples import normal, random_bf16
from tests.compensation import reference
from tests.compensation.cases import compensation, with_outliers
from tests.compensation.reference import Lists

K, N = 256, 96
BLOCKS = K // 16
HOT = sorted([5, 7, 16, 31, 32, 77, 128, 129, 130, 200, 201, 222, 240, 241, 250, 255])
RATIOS = (0.125, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture
def layer():
    """Weight [N, K], its BF16 original, a bias."""
    original = normal(N, K, seed=1) * 0.05
    return quantize(original), original, normal(N, seed=2)


def blocks_of(ratio: float) -> list[int]:
    """So many blocks of 16, scattered."""
    order = np.random.default_rng(3).permutation(BLOCKS)
    return sorted(order[: block_count(ratio, K)].tolist())


AWKWARD = {
    "normal": lambda: normal(40, K),
    "outliers": lambda: with_outliers(40, K, HOT),
    "any-bits": lambda: random_bf16("any-bits")[:40, :K].contiguous(),
    "zeros": lambda: torch.zeros(3, K, dtype=torch.bfloat16),
    "negative-zeros": lambda: -torch.zeros(3, K, dtype=torch.bfloat16),
    "nan-row": lambda: normal(3, K).index_fill(0, torch.tensor([1]), float("nan")),
    "no-rows": lambda: normal(0, K),
    "3d": lambda: normal(2, 5, K),
}


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("case", AWKWARD)
def test_without_compensation_equals_linear_bit_for_bit(layer, case, bias):
    weight, _, b = layer
    x, b = AWKWARD[case](), b if bias else None
    got = linear_compensated(x, weight, b, compensation=InputCompensation())
    assert_same_bits(got, linear(x, weight, b), case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_without_compensation_equals_linear_in_other_dtypes(layer, dtype):
    weight, _, _ = layer
    x = normal(9, K, dtype=dtype)
    got = linear_compensated(x, weight, compensation=InputCompensation())
    assert_same_bits(got, linear(x, weight), str(dtype))


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("ratio", RATIOS)
def test_rac_matches_the_formula(layer, ratio, alpha):
    weight, _, bias = layer
    x, blocks = with_outliers(40, K, HOT), blocks_of(ratio)
    got = linear_compensated(x, weight, bias, compensation=compensation(K, blocks, alpha=alpha))
    want = reference.linear(x, Matrix.of(weight, bias), Lists(blocks, alpha=alpha))
    want.check(got, f"{ratio=} {alpha=}")


@pytest.mark.parametrize("columns", ["dequant", "bf16"])
@pytest.mark.parametrize("blocks", [None, blocks_of(0.5)], ids=["splice", "splice-then-rac"])
@pytest.mark.parametrize("hot", [HOT[:1], HOT, list(range(K))], ids=["one", "sixteen", "all"])
def test_splice_matches_the_formula(layer, hot, blocks, columns):
    weight, original, bias = layer
    x = with_outliers(40, K, HOT)
    lists = compensation(K, blocks, hot, min(K, len(hot) + 15))
    kept = None
    if columns == "bf16":
        lists = dataclasses.replace(lists, columns=gather_columns(original, lists.channels[0]))
        kept = original.float().numpy()[:, sorted(hot)]
    got = linear_compensated(x, weight, bias, compensation=lists)
    want = reference.linear(x, Matrix.of(weight, bias), Lists(blocks, sorted(hot), kept))
    want.check(got, f"{len(hot)} {columns}")


def test_splice_of_all_channels_is_bf16_activations_times_decoded_weights(layer):
    weight, _, _ = layer
    x = with_outliers(40, K, HOT)
    got = linear_compensated(x, weight, compensation=compensation(K, None, list(range(K))))
    decoded = dequantize(weight, torch.float32).double().numpy()
    values = x.double().numpy()
    size = np.abs(values) @ np.abs(decoded).T
    Interval(values @ decoded.T, gamma(K) * size).check(got, "all channels")
    assert_same_bits(got, linear(x, weight, act="bf16"), "W4A16, whose scale is a power of two")


def test_lists_without_a_channel_change_no_value(layer):
    """Before enough rows were counted every entry is -1; scales of weights are powers of two."""
    weight, original, bias = layer
    x = with_outliers(40, K, HOT)
    for lists in (
        compensation(K, None, [], 16),
        compensation(K, None, [], 16, gather_columns(original, torch.full((16,), -1))),
    ):
        got = linear_compensated(x, weight, bias, compensation=lists)
        assert torch.equal(got, linear(x, weight, bias))


def test_scale_rule_te(layer):
    """A global scale that is no power of two: s_w multiplies both products."""
    weight = quantize(layer[1], global_scale_rule="te")
    assert float(weight.global_scale) != 2.0 ** round(np.log2(float(weight.global_scale)))
    x = with_outliers(40, K, HOT, dtype=torch.float32)
    got = linear_compensated(x, weight, compensation=compensation(K, [1, 4], HOT))
    reference.linear(x, Matrix.of(weight), Lists([1, 4], HOT)).check(got, "te")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(layer, dtype):
    weight, _, bias = layer
    x = with_outliers(20, K, HOT, dtype=dtype)
    got = linear_compensated(x, weight, bias, compensation=compensation(K, [0, 9], HOT))
    assert got.dtype == dtype
    reference.linear(x, Matrix.of(weight, bias), Lists([0, 9], HOT)).check(got, str(dtype))


def test_errors_fall_with_the_ratio_and_the_count(layer):
    weight, _, _ = layer
    x = with_outliers(64, K, HOT, dtype=torch.float32)
    truth = x.double() @ dequantize(weight, torch.float32).double().T

    def error(lists: InputCompensation) -> float:
        got = linear_compensated(x, weight, compensation=lists).double()
        return float((got - truth).norm() / truth.norm())

    order = np.random.default_rng(3).permutation(BLOCKS).tolist()
    rac = [error(compensation(K, order[: round(r * BLOCKS)])) for r in (0, *RATIOS)]
    assert all(a > b for a, b in itertools.pairwise(rac)), rac
    assert rac[-1] < 0.12 * rac[0], rac
    splice = [error(compensation(K, None, HOT[:n])) for n in (0, 4, 8, 16)]
    assert splice[-1] < 0.5 * splice[0], splice
    assert error(compensation(K, None, list(range(K)))) < 1e-6


def wrong_blocks(x, weight, lists):
    return linear_compensated(x, weight, compensation=compensation(K, [2, 3], HOT))


def hot_stays_in_fp4(x, weight, lists):
    without = dataclasses.replace(lists, channels=None)
    extra = linear_compensated(x, weight, compensation=lists)
    operands = compensated_operands(x, lists)
    cold_only = dataclasses.replace(operands, hot=torch.zeros_like(operands.hot))
    hot_part = extra.float() - product(cold_only, weight)
    return (linear_compensated(x, weight, compensation=without).float() + hot_part).to(x.dtype)


def doubled_weight_scale(x, weight, lists):
    doubled = QuantizedTensor(weight.packed, weight.block_scale, weight.global_scale * 2)
    return linear_compensated(x, doubled, compensation=lists)


CONTROLS = {
    "wrong-blocks": wrong_blocks,
    "hot-channels-twice": hot_stays_in_fp4,
    "doubled-scale": doubled_weight_scale,
    "no-residual": lambda x, w, lists: linear_compensated(
        x, w, compensation=dataclasses.replace(lists, block_mask=None)
    ),
    "half-alpha": lambda x, w, lists: linear_compensated(
        x, w, compensation=dataclasses.replace(lists, alpha=0.5)
    ),
    "no-splice": lambda x, w, lists: linear_compensated(
        x, w, compensation=dataclasses.replace(lists, channels=None)
    ),
    "unquantized": lambda x, w, lists: linear(x, w, act="bf16"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_bound_notices_a_wrong_result(layer, control):
    weight, _, _ = layer
    x, lists = with_outliers(40, K, HOT), compensation(K, [0, 4, 9], HOT)
    want = reference.linear(x, Matrix.of(weight), Lists([0, 4, 9], HOT))
    want.check(linear_compensated(x, weight, compensation=lists), "right")
    with pytest.raises(AssertionError, match="outside the bound"):
        want.check(CONTROLS[control](x, weight, lists), control)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, K, dtype=torch.float64), "float64"),
        (torch.zeros(2, K + 16, dtype=torch.bfloat16), str(K + 16)),
    ],
    ids=["dtype", "width"],
)
def test_bad_inputs_are_refused(layer, x, message):
    with pytest.raises((TypeError, ValueError), match=message):
        linear_compensated(x, layer[0], compensation=InputCompensation())
