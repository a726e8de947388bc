# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""The memory order of ``quads_common.weight_tiles``: where a block is, how its codes are packed.

Offsets are in blocks: 8 bytes of codes, one scale byte; of BF16 columns, in elements.
"""

import triton
import triton.language as tl

from quads_common.weight_tiles import COLUMNS_TOGETHER

TOGETHER = tl.constexpr(COLUMNS_TOGETHER)


@triton.jit
def place_in_tile(row, n, TILED: tl.constexpr):
    """Which tile of 32 rows a row of n is in, and its place there. TILED: "gate_up" or "rows"
    (``TileLayout.order``)."""
    if TILED == "gate_up":
        half = n // 2
        is_up = row >= half
        row = tl.where(is_up, row - half, row)
        tile = row // 16
        place = row % 16 + tl.where(is_up, 16, 0)
    else:
        tl.static_assert(TILED == "rows")
        tile = row // 32
        place = (row % 4) * 8 + (row % 32) // 4
    return tile, place


@triton.jit
def tiled_row(row, expert, n, K: tl.constexpr, TILED: tl.constexpr):
    """Offset of a row of an expert's [n, K]. TILED: as of ``place_in_tile``."""
    tile, place = place_in_tile(row, n, TILED)
    return (expert * (n // 32) + tile) * (K // 128 * 256) + place * 8


@triton.jit
def tiled_column(block):
    """Offset of block number ``block`` of a row: a tile of 32 rows has 8 of each."""
    return block // 8 * 256 + block % 8


@triton.jit
def bf16_column(row, channel, expert, n, CHANNELS: tl.constexpr, TILED: tl.constexpr):
    """Offset of column ``channel`` of a row of an expert's [n, CHANNELS] (``tile_columns``).

    TILED: as of ``place_in_tile``, or "no": canonical.
    """
    if TILED == "no":
        offset = (expert * n + row) * CHANNELS + channel
    else:
        tile, place = place_in_tile(row, n, TILED)
        first = channel // TOGETHER * TOGETHER
        width = tl.minimum(CHANNELS - first, TOGETHER)
        rows = (expert * (n // 8) + tile * 4 + place // 8) * (8 * CHANNELS)
        offset = rows + first * 8 + place % 8 * width + channel % TOGETHER
    return offset


@triton.jit
def pack_tiled(code, BLOCKS: tl.constexpr):
    """Codes [BLOCKS, 16] int32 to the two words of each block, int32 [BLOCKS, 2].

    Code 8 * h + 4 * w + j is number j of half h of word w.
    """
    code = code.reshape(BLOCKS, 2, 2, 4)
    j = tl.arange(0, 4)[None, None, None, :]
    sign = tl.where(j == 0, 15, tl.where(j == 1, 12, 16 - j))
    field = ((code >> 3) << sign) | ((code & 7) << (9 - 3 * j))
    half = tl.arange(0, 2)[None, :, None]
    return tl.sum(tl.sum(field, 3) << (16 * half), 1)
