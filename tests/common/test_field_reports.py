"""Failures reported against comparable projects, with the numbers of the reports."""

import pytest
import torch

from quads_common import dequantize, fake_quantize, quantize
from quads_common.packing import pack_codes
from tests.common import oracle
from tests.common.bits import assert_equals_oracle, assert_same_bits, to_numpy
from tests.common.samples import TIE_VALUES, TIES, normal

TIE_SCALE = 0.013671875  # 7 * 2^-9
NEAR_TIE = 0.02392577938735485  # 1.7499999 times it: 1.75 after a product with the reciprocal


def tie_row(value: float) -> torch.Tensor:
    """[1, 32] float32 of amax 5.25 (global scale 2^-9), block scale 7 in block 0 with ``value``."""
    row = torch.zeros(1, 32)
    row[0, :2] = torch.tensor([6 * TIE_SCALE, value])
    row[0, 16] = 5.25
    return row


def test_elements_are_multiplied_by_the_reciprocal_of_the_scale():
    """A division would give 1.5."""
    q = quantize(tie_row(NEAR_TIE), per_token=True)
    assert (q.global_scale.item(), q.block_scale[0, 0].item()) == (2.0**-9, 7.0)
    assert dequantize(q, torch.float32)[0, 1].item() == 2.0 * TIE_SCALE


def test_fake_quantize_sees_the_bf16_value_that_is_shipped():
    """As a weight the value is bfloat16 first, which is the exact tie; any order gives 2.0."""
    assert fake_quantize(tie_row(NEAR_TIE))[0, 1].item() == 2.0 * TIE_SCALE
    below = 1.74 * TIE_SCALE
    assert fake_quantize(tie_row(below))[0, 1].item() == 1.5 * TIE_SCALE


@pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
@pytest.mark.parametrize(("tie", "value"), list(zip(TIES, TIE_VALUES, strict=True)), ids=str)
@pytest.mark.parametrize("per_token", [False, True], ids=["weight", "tokens"])
def test_ties_go_to_the_even_code(per_token, tie, value, sign):
    got = fake_quantize(tie_row(sign * tie * TIE_SCALE), per_token=per_token)[0, 1].item()
    assert got == sign * value * TIE_SCALE


def test_decoded_weights_are_a_fixpoint():
    first = fake_quantize(normal(64, 256))
    assert_same_bits(fake_quantize(first), first, "weights quantized twice")


def assert_sane(x: torch.Tensor, **options: object) -> torch.Tensor:
    """Finite values, no NaN or negative scale byte. Returns the values."""
    q = quantize(x, **options)
    largest = int(q.block_scale.view(torch.uint8).max())
    assert largest <= 0x7E, f"scale byte {largest:#x}"
    assert q.global_scale.isfinite().all() and (q.global_scale > 0).all(), f"{q.global_scale}"
    values = dequantize(q, torch.float32)
    assert values.isfinite().all()
    return values


EVERY_KIND = pytest.mark.parametrize(
    "options",
    [{}, {"global_scale_rule": "te"}, {"per_token": True}],
    ids=["pow2", "te", "tokens"],
)


@EVERY_KIND
def test_zero_block_beside_small_values(options):
    """(a) A scale of 0 patched to 1.0 would be 134400 before the cast, a NaN byte."""
    x = torch.zeros(1, 32)
    x[0, 16:] = torch.linspace(-0.02, 0.02, 16)
    values = assert_sane(x, **options)
    assert (values[0, :16] == 0).all()


@EVERY_KIND
@pytest.mark.parametrize("tiny", [1e-9, 2.17e-6, 2.2e-6, 3.48e-5, 1e-38], ids=str)
def test_tiny_block_beside_one(tiny, options):
    """(b) Block amax ratios at which the scale is 0 or subnormal."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = tiny, 1.0
    values = assert_sane(x, **options)
    scale = quantize(x, **options).block_scale.view(torch.uint8)[0, 0].item()
    if tiny < 2e-6:
        assert scale == 0 and (values[0, :16] == 0).all()
    else:
        assert 0 <= scale <= 8 and abs(values[0, 0].item()) <= 2 * tiny


@EVERY_KIND
def test_zero_tensor_expert_and_row(options):
    """(c), (d)"""
    assert (assert_sane(torch.zeros(2, 32), **options) == 0).all()
    x = normal(3, 4, 32)
    x[1] = 0
    values = assert_sane(x, **options)
    assert (values[1] == 0).all() and (values[0] != 0).any()
    scale = quantize(x, **options).global_scale[1]
    assert (scale == 1).all(), f"global scale of zeros {scale}"


@EVERY_KIND
def test_representable_values_leave_no_residual(options):
    """(e) 2688 times a power of two keeps every scale exact."""
    table = torch.from_numpy(oracle.E2M1).float()
    x = torch.stack([table * s * 2.0**-9 for s in (448, 3.5, 0.0, 2.0**-9)]).reshape(1, 64)
    residual = x - assert_sane(x, **options)
    assert (residual == 0).all(), f"largest residual {residual.abs().max()}"


@EVERY_KIND
def test_negative_zero_and_tiny_negatives_keep_their_sign(options):
    """Code 0x8 for both, as the hardware conversion does, but 0x0 in a block of scale 0."""
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([1.0, -0.0, -1e-6, 0.0])
    x[0, 16:] = -0.0
    q = quantize(x, **options)
    assert (q.packed[0, 0].item() & 0xF0, q.packed[0, 1].item()) == (0x80, 0x08)
    assert (q.packed[0, 8:] == 0).all(), f"{q.packed[0, 8:]}"
    assert not torch.signbit(dequantize(q)[0, 16:]).any()


@EVERY_KIND
def test_even_column_is_in_the_low_nibble(options):
    """0.5 and 6 make byte 0x71."""
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([0.5, 6.0]) * 448
    assert quantize(x, **options).packed[0, 0].item() == 0x71


def test_odd_k_raises():
    with pytest.raises(ValueError, match=r"\b15\b"):
        quantize(normal(2, 15))
    with pytest.raises(ValueError, match=r"\b15\b"):
        pack_codes(torch.zeros(2, 15, dtype=torch.uint8))


@pytest.mark.parametrize("amax", [3.0, 0.0301, 40.0], ids=str)
def test_global_scale_is_the_decode_multiplier(amax):
    """Never tested with amax 2688 alone, where both directions are 1."""
    x = normal(4, 32, dtype=torch.float32)
    x = x / x.abs().max() * amax
    te = quantize(x, global_scale_rule="te").global_scale.item()
    assert te == pytest.approx(amax / 2688, rel=2.0**-8)  # the amax is rounded to bfloat16
    pow2 = quantize(x).global_scale.item()
    assert te * (1 - 2.0**-20) <= pow2 < 2 * te, f"{pow2} for amax {amax}, te {te}"


def test_token_scale_is_independent_of_the_batch():
    """A row beside one 1000 times as large, and in a batch padded 5 -> 8 -> 16."""
    x = normal(5, 64)
    alone = quantize(x[2:3], per_token=True)
    for rows in (5, 8, 16):
        batch = torch.zeros(rows, 64, dtype=x.dtype)
        batch[:5] = x
        batch[3] *= 1000
        q = quantize(batch, per_token=True)
        assert_same_bits(q.packed[2:3], alone.packed, f"codes, {rows} rows")
        assert_same_bits(q.block_scale[2:3], alone.block_scale, f"scales, {rows} rows")
        assert_same_bits(q.global_scale[2:3], alone.global_scale, f"global scale, {rows} rows")
        assert_equals_oracle(q, oracle.quantize_tokens(to_numpy(batch)), f"{rows} rows")
