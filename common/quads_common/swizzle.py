"""Block scales in the tile order of the tensor cores (128 rows x 4 scales) and back.

Within a tile the scale of row ``r``, column ``c`` is byte ``(r % 32) * 16 + (r // 32) * 4 + c``;
tiles are stored row of tiles by row of tiles (cuBLAS "1D block scaling factors layout").
"""

import torch

from quads_common.format import SWIZZLE_COLS, SWIZZLE_ROWS

__all__ = ["swizzle_block_scale", "unswizzle_block_scale"]

_QUARTER = SWIZZLE_ROWS // 4


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def swizzle_block_scale(block_scale: torch.Tensor) -> torch.Tensor:
    """[..., N, K/16] swizzled, zero padded to [..., ceil128(N), ceil4(K/16)].

    Keeps the dtype (float8_e4m3fn or uint8). The result's last two dimensions are storage only.
    """
    *lead, rows, cols = block_scale.shape
    padded_rows, padded_cols = _round_up(rows, SWIZZLE_ROWS), _round_up(cols, SWIZZLE_COLS)
    padded = block_scale.new_zeros((*lead, padded_rows, padded_cols), dtype=torch.uint8)
    padded[..., :rows, :cols] = block_scale.view(torch.uint8)
    tiles = padded.view(
        *lead, padded_rows // SWIZZLE_ROWS, 4, _QUARTER, padded_cols // SWIZZLE_COLS, SWIZZLE_COLS
    )
    # [row tile, quarter, row, col tile, col] -> [row tile, col tile, row, quarter, col]
    swizzled = tiles.transpose(-4, -2)
    return swizzled.reshape(padded.shape).view(block_scale.dtype)


def unswizzle_block_scale(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Undo ``swizzle_block_scale``: [..., ceil128(rows), ceil4(cols)] to [..., rows, cols]."""
    *lead, padded_rows, padded_cols = swizzled.shape
    expected = (_round_up(rows, SWIZZLE_ROWS), _round_up(cols, SWIZZLE_COLS))
    if (padded_rows, padded_cols) != expected:
        raise ValueError(
            f"a swizzled scale of {rows} x {cols} has shape {list(expected)}, "
            f"got {[padded_rows, padded_cols]}"
        )
    tiles = swizzled.view(torch.uint8).view(
        *lead, padded_rows // SWIZZLE_ROWS, padded_cols // SWIZZLE_COLS, _QUARTER, 4, SWIZZLE_COLS
    )
    linear = tiles.transpose(-4, -2).reshape(*lead, padded_rows, padded_cols)
    return linear[..., :rows, :cols].contiguous().view(swizzled.dtype)
