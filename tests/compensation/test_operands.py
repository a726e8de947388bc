"""``compensated_operands`` against the oracle, bit for bit, and the reach of the residual."""

import numpy as np
import pytest
import torch

from quads_common import quantize
from quads_common.compensation.operands import (
    channel_mask,
    compensated_operands,
    gather_columns,
    row_energies,
)
from quads_common.packing import unscaled_values
from tests.common.bits import assert_same_bits
from tests.common.samples import DISTRIBUTIONS, normal, random_bf16
from tests.compensation.cases import compensation, with_outliers
from tests.compensation.reference import Lists, encode


def assert_encodes(x: torch.Tensor, blocks: list[int], hot: list[int], what: str) -> None:
    got = compensated_operands(x, compensation(x.shape[1], blocks, hot, len(hot) + 3))
    want = encode(x.float().numpy(), Lists(blocks, sorted(hot)))
    assert_same_bits(got.row_scale, want.scale, f"{what} row scale")
    # Codes of a block of scale 0 have no sign, and 0 * -1 has: compare values where both are 0.
    assert np.array_equal(got.quantized.numpy(), want.q), what
    assert np.array_equal(got.residual.numpy(), want.q_r), what
    assert np.array_equal(got.hot.numpy()[:, : len(hot)], want.hot), what
    assert not got.hot[:, len(hot) :].any(), what


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_operands_equal_the_oracle(distribution):
    x = random_bf16(distribution)[:48]
    assert_encodes(x, list(range(0, 64, 3)), [5, 6, 80, 700, 1023], distribution)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_operands_of_other_dtypes(dtype):
    x = with_outliers(32, 256, [3, 77], dtype=dtype)
    assert_encodes(x, [0, 4, 15], [3, 77], str(dtype))
    hot = compensated_operands(x, compensation(256, None, [3, 77])).hot
    assert_same_bits(hot, x[:, [3, 77]].float(), "hot values are never rounded")


def test_hot_channels_leave_before_the_maxima_are_taken():
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    x[0, 3] = 1000.0
    got = compensated_operands(x, compensation(32, None, [3]))
    ones = torch.ones(1, 32, dtype=torch.bfloat16)
    ones[0, 3] = 0
    want = compensated_operands(ones, compensation(32, None, []))
    assert_same_bits(got.row_scale, want.row_scale, "row maximum")
    assert_same_bits(got.quantized, want.quantized, "block maximum")
    assert got.hot.tolist() == [[1000.0]]


def test_the_input_is_not_modified():
    x = with_outliers(8, 64, [3])
    before = x.clone()
    compensated_operands(x, compensation(64, [0], [3]))
    assert_same_bits(x, before, "x")


def test_a_row_does_not_depend_on_its_batch():
    x = with_outliers(16, 128, [9], 500.0)
    lists = compensation(128, [0, 3], [9])
    whole = compensated_operands(x, lists)
    for row in (0, 7, 15):
        alone = compensated_operands(x[row : row + 1], lists)
        for name in ("quantized", "row_scale", "residual", "hot"):
            assert_same_bits(getattr(alone, name), getattr(whole, name)[row : row + 1], name)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_touches_no_other(bad):
    x = with_outliers(4, 64, [3])
    lists = compensation(64, [0, 1], [3])
    good = compensated_operands(x, lists)
    x[2, 40] = bad
    got = compensated_operands(x, lists)
    assert got.row_scale[2].isnan().all() and got.quantized[2].isnan().all()
    others = torch.tensor([0, 1, 3])
    for name in ("quantized", "row_scale", "residual", "hot"):
        assert_same_bits(getattr(got, name)[others], getattr(good, name)[others], name)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)], ids=str)
def test_empty_inputs(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    got = compensated_operands(x, compensation(shape[1], []))
    assert got.quantized.shape == got.residual.shape == shape


# Largest value over the largest of the rest -> relative RMS error of the rest with every block's
# residual. Normal values of standard deviation 1/4: of 2048 the largest is about 1.
REACH = {3e2: (0.0087, 0.0003), 3e3: (0.0087, 0.0010), 1e4: (0.0139, 0.0006), 3e4: (0.080, 0.003)}


@pytest.mark.parametrize("peak", REACH)
def test_reach_of_the_residual(peak):
    x = (normal(256, 2048, dtype=torch.float32) / 4).to(torch.bfloat16)
    x[:, 7] = peak
    got = compensated_operands(x, compensation(2048, list(range(128))))
    rest = x.double()[:, 16:]
    value = ((got.quantized.double() + got.residual.double()) * got.row_scale.double())[:, 16:]
    error = float((rest - value).norm() / rest.norm())
    expected, tolerance = REACH[peak]
    assert abs(error - expected) <= tolerance, error
    plain = rest - (got.quantized.double() * got.row_scale.double())[:, 16:]
    assert 0.094 < float(plain.norm() / rest.norm()) < 0.103


def test_a_residual_scale_of_zero_adds_exactly_zero_and_is_counted():
    """Row maximum 2688: g = 1, the residual's scale is its amax / 6, 0 up to 2^-10 (to even)."""
    x = torch.zeros(1, 48)
    x[0, 0] = 2688.0
    # Codes 1 and 0.5 of scale 2^-9, the rest .25 of it less: residual amax 6 * 2^-10.5 < 6 * 2^-10.
    x[0, 16], x[0, 17] = 6 * 2.0**-3, 6 * 2.0**-3 / 6 * 2.5
    x[0, 32], x[0, 33] = 6 * 2.0**-9, 0.2 * 2.0**-9
    lists = compensation(48, [0, 1, 2])
    got = compensated_operands(x, lists)
    assert got.row_scale.item() == 1.0
    assert got.residual[0, 16:32].any(), "a residual in reach"
    assert not got.residual[0, 32:].any(), "a residual out of reach"
    found = row_energies(x, None, 1.0)
    assert found.underflows.tolist() == [[False, False, True]]
    assert found.served[0, 2] == found.left[0, 2] == pytest.approx((0.2 * 2.0**-9) ** 2)


def test_channel_mask():
    lists = torch.tensor([[1, 3, -1], [-1, -1, -1]], dtype=torch.int32)
    mask = channel_mask(lists, 4)
    assert mask.tolist() == [[False, True, False, True], [False] * 4]


def test_gather_columns_pads_with_zero():
    weight = normal(5, 32, dtype=torch.float32)
    columns = gather_columns(weight, torch.tensor([2, 31, -1], dtype=torch.int32))
    assert columns.dtype == torch.bfloat16
    assert_same_bits(columns[:, :2], weight[:, [2, 31]].to(torch.bfloat16), "columns")
    assert not columns[:, 2].any()


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_row_energies_against_float64(alpha):
    hot = [3, 70, 71]
    x = with_outliers(20, 128, hot)
    channels = torch.tensor([[3, 70, 71, -1]] * 20, dtype=torch.int32)
    found = row_energies(x, channels, alpha, per_channel=True)
    values = x.float().numpy()
    plain = encode(values, Lists(list(range(8))))
    cold = encode(values, Lists(list(range(8)), hot))
    left = cold.residual.astype(np.float64) - alpha * cold.q_r * cold.scale

    def sums(r: np.ndarray) -> np.ndarray:
        return np.square(r.astype(np.float64)).reshape(20, 8, 16).sum(axis=2)

    np.testing.assert_allclose(found.plain.numpy(), sums(plain.residual), rtol=1e-12)
    np.testing.assert_allclose(found.served.numpy(), sums(cold.residual), rtol=1e-12)
    np.testing.assert_allclose(found.left.numpy(), sums(left), rtol=1e-5)
    squares = np.square(plain.residual.astype(np.float64))
    np.testing.assert_allclose(found.channels.numpy(), squares, rtol=1e-12)


def test_row_energies_with_a_list_per_row():
    x = with_outliers(2, 64, [3, 40])
    channels = torch.tensor([[3, -1], [40, -1]], dtype=torch.int32)
    found = row_energies(x, channels, 1.0)
    for row, hot in enumerate(([3], [40])):
        alone = row_energies(x[row : row + 1], torch.tensor([hot]), 1.0)
        assert_same_bits(found.served[row : row + 1], alone.served, f"row {row}")


def test_plain_operands_are_those_of_the_quantizer():
    x = with_outliers(16, 64, [3])
    q = quantize(x, per_token=True)
    got = compensated_operands(x, compensation(64))
    assert_same_bits(got.quantized, unscaled_values(q.packed, q.block_scale), "operand")
    assert got.residual is None and got.hot is None
