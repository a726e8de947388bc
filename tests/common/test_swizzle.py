"""The 128x4 tile order against an index formula, one scale at a time."""

import numpy as np
import pytest
import torch

from quads_common.swizzle import swizzle_block_scale, unswizzle_block_scale
from tests.common.bits import assert_same_bits

SHAPES = [
    (128, 4),
    (256, 8),
    (128, 12),
    (384, 4),
    (1, 1),
    (127, 3),
    (129, 5),
    (33, 4),
    (200, 45),
    (300, 1),
]


def by_formula(scales: np.ndarray) -> np.ndarray:
    """The bytes in storage order: tiles of 128 x 4 row by row, zero padded."""
    rows, cols = scales.shape
    tile_rows, tile_cols = -(-rows // 128), -(-cols // 4)
    out = np.zeros(tile_rows * tile_cols * 512, np.uint8)
    for row in range(rows):
        for col in range(cols):
            tile = (row // 128) * tile_cols + col // 4
            r, c = row % 128, col % 4
            out[tile * 512 + (r % 32) * 16 + (r // 32) * 4 + c] = scales[row, col]
    return out


def random_scales(*shape: int) -> torch.Tensor:
    """Bytes 1..126, so that padding shows."""
    return torch.randint(1, 127, shape).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swizzle_block_scale_equals_the_formula(shape, dtype):
    scales = random_scales(*shape)
    swizzled = swizzle_block_scale(scales.view(dtype))
    assert swizzled.dtype == dtype
    assert swizzled.shape == (-(-shape[0] // 128) * 128, -(-shape[1] // 4) * 4)
    got = swizzled.contiguous().view(torch.uint8).flatten()
    assert_same_bits(got, by_formula(scales.numpy()), f"swizzled {shape}")


@pytest.mark.parametrize(
    ("row", "col", "offset"),
    [(0, 0, 0), (0, 3, 3), (1, 0, 16), (32, 0, 4), (127, 3, 511), (0, 4, 512), (128, 0, 1024)],
    ids=str,
)
def test_swizzle_block_scale_by_hand(row, col, offset):
    scales = torch.zeros(256, 8, dtype=torch.uint8)
    scales[row, col] = 9
    flat = swizzle_block_scale(scales).flatten()
    assert flat.nonzero().flatten().tolist() == [offset]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 129, 5), (2, 2, 40, 6)], ids=str)
def test_unswizzle_block_scale_inverts_it(shape, dtype):
    scales = random_scales(*shape).view(dtype)
    restored = unswizzle_block_scale(swizzle_block_scale(scales), *shape[-2:])
    assert restored.dtype == dtype
    assert_same_bits(restored, scales, f"round trip {shape}")


def test_swizzle_block_scale_of_experts_equals_expert_by_expert():
    scales = random_scales(3, 130, 6)
    stacked = swizzle_block_scale(scales)
    for e in range(3):
        assert_same_bits(stacked[e], swizzle_block_scale(scales[e]), f"expert {e}")


def test_swizzle_block_scale_pads_with_zero():
    swizzled = swizzle_block_scale(random_scales(5, 3))
    assert int((swizzled != 0).sum()) == 15


def test_swizzle_block_scale_keeps_its_input():
    scales = random_scales(130, 6)
    before = scales.clone()
    swizzled = swizzle_block_scale(scales)
    swizzled.zero_()
    assert_same_bits(scales, before, "the input")


def test_swizzle_block_scale_ignores_memory_layout():
    scales = random_scales(6, 130).T
    assert_same_bits(
        swizzle_block_scale(scales), swizzle_block_scale(scales.contiguous()), "transposed"
    )


@pytest.mark.parametrize("shape", [(0, 4), (128, 0)], ids=str)
def test_swizzle_block_scale_empty(shape):
    swizzled = swizzle_block_scale(torch.zeros(shape, dtype=torch.uint8))
    assert swizzled.numel() == 0
    assert unswizzle_block_scale(swizzled, *shape).shape == shape


@pytest.mark.parametrize(("rows", "cols"), [(129, 4), (128, 5), (1, 8)], ids=str)
def test_unswizzle_block_scale_refuses_another_size(rows, cols):
    with pytest.raises(ValueError, match=r"128, 4") as error:
        unswizzle_block_scale(torch.zeros(128, 4, dtype=torch.uint8), rows, cols)
    assert f"{rows} x {cols}" in str(error.value)
