# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""The product of spliced channels: bfloat16 activations times bfloat16 columns of the weight."""

import triton
import triton.language as tl


@triton.jit
def decode_e2m1(code):
    """E2M1 codes 0..15 (int32) to float32, exactly."""
    magnitude = code & 7
    # From 1.0, code 2, on: one mantissa bit behind the exponent, as in float32's upper bits.
    bits = tl.where(magnitude < 2, magnitude, magnitude + 252) << 22
    value = tl.where(magnitude < 2, magnitude * 0.5, bits.to(tl.float32, bitcast=True))
    return tl.where(code > 7, -value, value)


@triton.jit
def gather_columns(w_ptr, w_scale_ptr, weight_row, channel, known, K: tl.constexpr):
    """``code * block_scale`` of some channels of packed weights, exact in bfloat16: [N, C].

    weight_row: [N]. channel: [C]; known: [C], the others give 0.
    """
    channel = tl.where(known, channel, 0)
    byte = w_ptr + weight_row[:, None] * (K // 2) + (channel // 2)[None, :]
    code = tl.load(byte, mask=known[None, :], other=0).to(tl.int32)
    code = (code >> ((channel % 2) * 4)[None, :]) & 15
    scale = w_scale_ptr + weight_row[:, None] * (K // 16) + (channel // 16)[None, :]
    scale = tl.load(scale, mask=known[None, :], other=0.0).to(tl.float32)
    return (decode_e2m1(code) * scale).to(tl.bfloat16)


@triton.jit
def multiply_hot(
    hot_ptr, channels_ptr, columns_ptr, w_ptr, w_scale_ptr, row, row_mask, weight_row,
    K: tl.constexpr, CHANNELS: tl.constexpr, HAS_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """w_hot @ x_hot.T: [BLOCK_N, BLOCK_M] float32.

    hot: [rows, CHANNELS] bf16, 0 where the list has -1. channels: [CHANNELS] int32. w_hot: the
    columns [.., CHANNELS] bf16, or those of the packed weights.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(0, tl.cdiv(CHANNELS, BLOCK_C), num_stages=2):
        place = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        known = place < CHANNELS
        x = tl.load(
            hot_ptr + row[:, None] * CHANNELS + place[None, :],
            mask=row_mask[:, None] & known[None, :], other=0.0,
        )  # fmt: skip
        if HAS_COLUMNS:
            column = columns_ptr + weight_row[:, None] * CHANNELS + place[None, :]
            w = tl.load(column, mask=known[None, :], other=0.0)
        else:
            channel = tl.load(channels_ptr + place, mask=known, other=-1)
            w = gather_columns(w_ptr, w_scale_ptr, weight_row, channel, channel >= 0, K)
        acc = tl.dot(w, x.T, acc)  # [N, C] @ [C, M] -> [N, M]
    return acc
