"""The oracle itself, against literals and against torch's own casts."""

import numpy as np
import pytest
import torch

from tests.common import oracle
from tests.common.bits import assert_same_bits
from tests.common.samples import normal

# Just above and just below a tie, in float32.
UP, DOWN = 1 + 2.0**-23, 1 - 2.0**-24


def test_e4m3_magnitudes_are_torchs():
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert_same_bits(values, oracle.E4M3.astype(np.float32), "E4M3 values")


@pytest.mark.parametrize("scale", [2.0**-9, 0.02, 1.0, 100.0], ids=str)
def test_round_to_e4m3_equals_torchs_cast(scale):
    x = (normal(20000, dtype=torch.float32).abs() * scale).clamp(max=448)
    expected = x.to(torch.float8_e4m3fn)
    assert_same_bits(oracle.round_to_e4m3(x.numpy()), expected.view(torch.uint8), f"{scale}")


def test_round_to_e4m3_takes_the_even_byte_on_ties():
    midpoints = (oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2
    even = np.array([b if b % 2 == 0 else b + 1 for b in range(126)], np.uint8)
    below, above = np.arange(126, dtype=np.uint8), np.arange(1, 127, dtype=np.uint8)
    for factor, expected in ((1, even), (DOWN, below), (UP, above)):
        got = oracle.round_to_e4m3((midpoints * factor).astype(np.float32))
        assert_same_bits(got, expected, f"midpoints * {factor}")


def test_round_to_bf16_equals_torchs_cast():
    bits = torch.randint(-(2**31), 2**31, (200_000,)).to(torch.int32)
    bits = torch.cat([bits, (bits & -65536) | 0x8000, (bits & -65536) | 0x7FFF])
    x = bits.view(torch.float32)
    x = x[x.isfinite()]
    expected = x.to(torch.bfloat16).float()
    assert_same_bits(oracle.round_to_bf16(x.numpy()), expected, "bf16 rounding")


@pytest.mark.parametrize(
    ("value", "code"),
    [
        *[(oracle.E2M1[c], c) for c in range(16)],
        *[(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5, 6)],
        *[(0.25 * UP, 1), (0.75 * DOWN, 1), (1.25 * UP, 3), (1.75 * DOWN, 3)],
        *[(2.5 * UP, 5), (3.5 * DOWN, 5), (5 * UP, 7), (5 * DOWN, 6)],
        *[(6.5, 7), (1e30, 7), (-1e30, 15), (1e-30, 0), (-1e-30, 8)],
    ],
    ids=lambda v: f"{v:.9g}",
)
def test_round_to_e2m1(value, code):
    got = oracle.round_to_e2m1(np.array([value, -value], np.float32)).tolist()
    assert got == [code, code ^ 8], f"{value!r} gave {got}"


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        (2688, 1),
        (1344, 2),
        (1345, 1),
        (1.3125, 2**11),
        (1.3125 * UP, 2**10),
        (1.0, 2**11),
        (1.999, 2**10),
        (3e38, 2.0**-117),
        (1e-30, 2.0**111),
        (9.9e-31, 1),
        (0, 1),
    ],
    ids=str,
)
def test_pow2_encode_scale(amax, expected):
    assert oracle.encode_scale(np.float32(amax), "pow2") == expected


def test_decode_inverts_a_block_by_hand():
    """0.5 and 6 in block scale 2, global scale 0.25: byte 0x71, then -1.5: nibble 0xb."""
    packed = np.array([[0x71, 0xB0, 0, 0, 0, 0, 0, 0]], np.uint8)
    scale_bytes = np.array([[0x40]], np.uint8)  # exponent 8 - 7, mantissa 0: 2.0
    values = oracle.decode(packed, scale_bytes, np.array(0.25, np.float32))
    assert values[0, :4].tolist() == [0.25, 3.0, 0.0, -0.75]


def test_quantize_weight_by_hand():
    """amax 3: pow2 scale 512 (3 * 512 = 1536 <= 2688), block scale 1536 / 6 = 256."""
    x = np.zeros((1, 16), np.float32)
    x[0, :4] = [3.0, -0.5, -0.01, -0.0]
    got = oracle.quantize_weight(x)
    assert got.global_scale == 2.0**-9
    assert got.scale_bytes.tolist() == [[0x78]]  # 256
    assert got.packed[0].tolist() == [0xA7, 0x88, 0, 0, 0, 0, 0, 0]


def test_quantize_tokens_by_hand():
    """amax 5.25 = 2688 * 2^-9: inverse 512, block scale 448, encode 512 / 448."""
    x = np.zeros((3, 16), np.float32)
    x[0, :2] = [5.25, 0.4375]
    x[1, 3] = np.inf
    got = oracle.quantize_tokens(x)
    assert got.scale_bytes.tolist() == [[0x7E], [0x7F], [0]]
    assert got.packed[:, 0].tolist() == [0x17, 0, 0]
    assert got.global_scale[[0, 2], 0].tolist() == [2.0**-9, 1.0]
    assert np.isnan(got.global_scale[1, 0])
