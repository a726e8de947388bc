"""E2M1 coding and the order of nibbles, exhaustively."""

import numpy as np
import pytest
import torch

from quads_common.packing import (
    decode_e2m1,
    encode_e2m1,
    pack_codes,
    unpack_codes,
    unscaled_values,
)
from tests.common import oracle
from tests.common.bits import assert_same_bits
from tests.common.samples import TIES, neighbours, normal

ALL_BYTES = torch.arange(256, dtype=torch.uint8)
ALL_CODES = torch.arange(16, dtype=torch.uint8)


def test_decode_e2m1_of_all_codes():
    assert_same_bits(decode_e2m1(ALL_CODES), oracle.E2M1.astype(np.float32), "E2M1 values")
    assert decode_e2m1(torch.zeros(0, 4, dtype=torch.uint8)).shape == (0, 4)


def test_encode_e2m1_inverts_decode():
    assert_same_bits(encode_e2m1(decode_e2m1(ALL_CODES)), ALL_CODES, "codes")


@pytest.mark.parametrize("step", [0, 1, 2], ids=["below", "exact", "above"])
def test_encode_e2m1_around_ties(step):
    magnitudes = neighbours(torch.tensor(TIES), torch.float32)[step]
    x = torch.cat([magnitudes, -magnitudes])
    assert_same_bits(encode_e2m1(x), oracle.round_to_e2m1(x.numpy()), f"ties {step=}")


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 1e30], ids=str)
def test_encode_e2m1_equals_the_oracle(scale):
    x = torch.cat([scale * normal(10000, dtype=torch.float32), torch.tensor([0.0, -0.0])])
    assert_same_bits(encode_e2m1(x), oracle.round_to_e2m1(x.numpy()), f"{scale=}")


def test_encode_e2m1_saturates_and_keeps_the_sign():
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 6.1, -7.0, 3.4e38, -3.4e38, float("inf")])
    assert encode_e2m1(x).tolist() == [0, 8, 0, 8, 7, 15, 7, 15, 7]


def test_pack_codes_puts_the_even_column_in_the_low_nibble():
    codes = torch.tensor([[1, 7, 0, 15, 8, 0]], dtype=torch.uint8)
    assert pack_codes(codes).tolist() == [[0x71, 0xF0, 0x08]]


def test_pack_codes_round_trip_of_all_bytes():
    assert_same_bits(pack_codes(unpack_codes(ALL_BYTES)), ALL_BYTES, "all bytes")
    assert_same_bits(unpack_codes(ALL_BYTES), oracle.unpack(ALL_BYTES.numpy()), "all bytes")


@pytest.mark.parametrize("shape", [(2,), (3, 16), (2, 3, 4, 32), (0, 16), (4, 0)], ids=str)
def test_pack_codes_round_trip(shape):
    codes = torch.randint(0, 16, shape).to(torch.uint8)
    packed = pack_codes(codes)
    assert packed.shape == (*shape[:-1], shape[-1] // 2) and packed.dtype == torch.uint8
    assert_same_bits(unpack_codes(packed), codes, str(shape))


def test_pack_codes_of_a_tensor_that_is_not_contiguous():
    codes = torch.randint(0, 16, (32, 6)).to(torch.uint8).T
    assert_same_bits(pack_codes(codes), pack_codes(codes.contiguous()), "transposed")
    packed = torch.randint(0, 256, (8, 6)).to(torch.uint8).T
    assert_same_bits(unpack_codes(packed), unpack_codes(packed.contiguous()), "transposed")


@pytest.mark.parametrize("k", [1, 15, 33])
def test_pack_codes_refuses_an_odd_k(k):
    with pytest.raises(ValueError, match=rf"\b{k}\b"):
        pack_codes(torch.zeros(2, k, dtype=torch.uint8))


def test_unscaled_values_of_every_code_and_scale():
    """[127, 16]: all codes under each finite scale; the products fit bfloat16 and float16."""
    scale_bytes = ALL_BYTES[:127].unsqueeze(1)
    packed = pack_codes(ALL_CODES).expand(127, 8)
    values = unscaled_values(packed, scale_bytes.view(torch.float8_e4m3fn))
    expected = oracle.E4M3[:, None] * oracle.E2M1
    assert_same_bits(values, expected.astype(np.float32), "code * scale")
    for dtype in (torch.bfloat16, torch.float16):
        assert_same_bits(values.to(dtype).float(), values, f"code * scale in {dtype}")


def test_unscaled_values_uses_each_blocks_own_scale():
    packed = torch.full((1, 24), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0, 0.5]]).to(torch.float8_e4m3fn)
    got = unscaled_values(packed, scale)
    assert got.tolist() == [[1.0] * 16 + [2.0] * 16 + [0.5] * 16]
