"""A row's codes and scales depend on that row alone, not on batch, order or padding."""

import math

import pytest
import torch

from quads_common import dequantize, quantize
from quads_common.format import QuantizedTensor
from tests.common import oracle
from tests.common.bits import (
    assert_equals_oracle,
    assert_same_bits,
    assert_same_quantized,
    to_numpy,
)
from tests.common.samples import normal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
K = 80  # five blocks: no power of two
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def rows_of(q: QuantizedTensor, index: object) -> QuantizedTensor:
    """The chosen rows of quantized tokens."""
    return QuantizedTensor(q.packed[index], q.block_scale[index], q.global_scale[index])


def tokens(dtype: torch.dtype) -> torch.Tensor:
    """[40, K] rows of very different size, a zero row and one with an outlier among them."""
    sizes = torch.logspace(-4, 3, 40).unsqueeze(1)
    x = normal(40, K, dtype=torch.float32) * sizes
    x[7] = 0
    x[9, 33] = 3000
    return x.to(dtype)


@pytest.fixture(params=DTYPES, ids=str)
def x(request: pytest.FixtureRequest) -> torch.Tensor:
    return tokens(request.param)


def test_token_alone(x):
    """[1, K], [K] and [1, 1, K] give the row's bytes in the whole batch."""
    batch = quantize(x, per_token=True)
    for i in range(len(x)):
        expected = rows_of(batch, i)
        assert_same_quantized(rows_of(quantize(x[i : i + 1], per_token=True), 0), expected, f"{i=}")
        assert_same_quantized(quantize(x[i], per_token=True), expected, f"[K] {i=}")
        nested = quantize(x[i].view(1, 1, K), per_token=True)
        assert_same_quantized(rows_of(nested, (0, 0)), expected, f"[1, 1, K] {i=}")


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 17, 33])
def test_token_in_any_batch(x, size):
    whole = quantize(x, per_token=True)
    for start in range(0, len(x) - size, 7):
        rows = slice(start, start + size)
        assert_same_quantized(quantize(x[rows], per_token=True), rows_of(whole, rows), f"{rows}")


def test_token_in_any_order(x):
    whole = quantize(x, per_token=True)
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        assert_same_quantized(quantize(x[order], per_token=True), rows_of(whole, order), f"{seed=}")


@pytest.mark.parametrize("padded", [41, 48, 64, 256])
@pytest.mark.parametrize("fill", [0.0, 1e4, math.nan], ids=str)
def test_token_with_padding_rows(x, fill, padded):
    whole = quantize(x, per_token=True)
    batch = torch.full((padded, K), fill, dtype=x.dtype)
    batch[: len(x)] = x
    got = rows_of(quantize(batch, per_token=True), slice(0, len(x)))
    assert_same_quantized(got, whole, f"padded to {padded} with {fill}")


@pytest.mark.parametrize("neighbour", [*NOT_FINITE, "x1000", "zero"])
def test_token_beside_any_neighbour(x, neighbour):
    whole = quantize(x, per_token=True)
    changed = x.clone()
    odd = torch.arange(len(x)) % 2 == 1
    if neighbour in NOT_FINITE:
        changed[odd, 17] = NOT_FINITE[neighbour]
    else:
        changed[odd] = changed[odd] * (1000 if neighbour == "x1000" else 0)
    got = quantize(changed, per_token=True)
    assert_same_quantized(rows_of(got, ~odd), rows_of(whole, ~odd), neighbour)
    assert_equals_oracle(got, oracle.quantize_tokens(to_numpy(changed)), neighbour)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_row_that_is_not_finite_decodes_to_nan_as_a_whole(x, value):
    for column in (0, 15, 16, K - 1):
        bad = x.clone()
        bad[3, column] = NOT_FINITE[value]
        q = quantize(bad, per_token=True)
        assert (q.packed[3] == 0).all(), f"codes {q.packed[3].unique()}"
        assert (q.block_scale.view(torch.uint8)[3] == 0x7F).all()
        assert q.global_scale[3].isnan().all()
        values = dequantize(q, x.dtype)
        assert values[3].isnan().all(), f"{int((~values[3].isnan()).sum())} values are not NaN"
        others = torch.arange(len(x)) != 3
        assert values[others].isfinite().all()


def test_finite_rows_never_hold_a_nan_scale(x):
    scale_bytes = quantize(x, per_token=True).block_scale.view(torch.uint8)
    assert scale_bytes.max() <= 0x7E, f"largest scale byte {int(scale_bytes.max()):#x}"


def test_token_global_scale_is_the_reciprocal_of_2688_over_amax(x):
    """The encode scale is fl32(2688 / amax): one division, not a product with 1 / amax."""
    amax = x.float().abs().amax(dim=1).numpy()
    q = quantize(x, per_token=True)
    for i in range(len(x)):
        inverse = oracle.F32(2688) / amax[i] if amax[i] else oracle.F32(1)
        expected = oracle.F32(1) / inverse
        got = q.global_scale[i, 0].item()
        assert got == expected, f"row {i}, amax {amax[i]!r}: {got!r}, expected {expected!r}"


def test_smallest_row_whose_scale_a_product_with_the_reciprocal_misses():
    """amax 5: 2688 / 5 = 537.6 is 0x44066666; 2688 * fl32(1 / 5) is one ulp more."""
    row = torch.zeros(1, 16, dtype=torch.bfloat16)
    row[0, 0] = 5.0
    expected = oracle.F32(1) / (oracle.F32(2688) / oracle.F32(5))
    got = quantize(row, per_token=True).global_scale
    assert_same_bits(got, expected.reshape(1, 1), "global scale of amax 5")


def test_many_rows_equal_the_oracle_whatever_their_number(x):
    for count in (1, 2, 4, 7, 15, 31):
        for k in (16, 32, 48, K):
            part = x[-count:, :k]
            got = quantize(part, per_token=True)
            assert_equals_oracle(got, oracle.quantize_tokens(to_numpy(part)), f"{count} x {k}")
