# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""What compensation adds to the block quantizer: hot channels, and a second pass over the residual.

The order of operations is that of ``quads_common.compensation.operands``, so results are its bits.
"""

import triton
import triton.language as tl

from quads_common.kernels._blocks import VALUE_BASE, block_amax_bits
from quads_common.kernels._coding import (
    as_float,
    block_scales,
    decode_e4m3,
    quantize_blocks,
    round_e2m1,
)

SIGN = tl.constexpr(-(2**31))
# Values of tiles are kept times 2^-8, so that an element's bits, which are its value * 2^-126,
# become one by a single factor: the largest block scale, 448, times 2^118 is below 2^127.
UNIT = tl.constexpr(256.0)
UNIT_FACTOR = tl.constexpr(2.0**118)


@triton.jit
def hot_channels(bits):
    """Bits of blocks [R, B] to bool [R, B, 16]."""
    return ((bits[:, :, None] >> tl.arange(0, 16)[None, None, :]) & 1) != 0


@triton.jit
def quantize_twice(x, global_scale_inv, global_scale):
    """Quantize whole blocks and what that loses, with the same global scale.

    x: [R, B, 16] float32, finite. global_scale_inv, global_scale: broadcast over [R, B]. Returns
    the residual and code * block scale of the residual, [R, B, 16]; scale bytes of the residual.
    """
    value, _, scale = quantize_blocks(x, global_scale_inv, global_scale)
    quantized = value * decode_e4m3(scale)[:, :, None]
    residual = x - quantized * global_scale[:, :, None]
    value, _, scale_r = quantize_blocks(residual, global_scale_inv, global_scale)
    return residual, value * decode_e4m3(scale_r)[:, :, None], scale_r


@triton.jit
def split_hot(block, bits, dtype: tl.constexpr):
    """The cold and the hot channels of a tile that ``hold`` keeps, 0 in place of the others.

    bits: int32 [B, R].
    """
    cold, hot = (), ()
    if dtype == tl.float32:
        for i in tl.static_range(4):
            channel = tl.arange(0, 4) * 2 + (i // 2 * 8 + i % 2)
            mask = 0 - ((bits[:, :, None] >> channel[None, None, :]) & 1)
            word = block[i].to(tl.int32, bitcast=True)
            cold += (as_float(word & ~mask),)
            hot += (as_float(word & mask),)
    else:
        # Bits c and c + 1 of an even c, 16 places apart, become the halves of a word.
        apart = bits | (bits << 15)
        for i in tl.static_range(2):
            channel = tl.arange(0, 4) * 2 + i * 8
            mask = ((apart[:, :, None] >> channel[None, None, :]) & 0x10001) * 0xFFFF
            cold += (block[i] & ~mask,)
            hot += (block[i] & mask,)
    return cold, hot


@triton.jit
def tile_scales(amax_bits, global_scale_inv, global_scale):
    """Of blocks [B, R]: scale bytes, factors for the codes, for the values, and whether it lives.

    Values are those of ``tile_values``: UNIT of them are one.
    """
    scale, encode, live = block_scales(as_float(amax_bits), global_scale_inv, global_scale)
    return scale, encode, decode_e4m3(scale) * UNIT_FACTOR, live


@triton.jit
def signed_bits(x, encode):
    """x * encode as E2M1 values * 2^-126, of x's sign. encode: [B, R], not negative."""
    bits = (round_e2m1(tl.abs(x) * encode[:, :, None]) << 22) + VALUE_BASE
    return as_float(bits | (x.to(tl.int32, bitcast=True) & SIGN))


@triton.jit
def tile_values(x, encode, factor):
    """A tile's elements as code * block scale / UNIT. encode, factor: of ``tile_scales``."""
    values = ()
    for i in tl.static_range(4):
        values += (signed_bits(x[i], encode) * factor[:, :, None],)
    return values


@triton.jit
def tile_residual(x, values, global_scale):
    """What ``tile_values`` lost of a tile, and the bits of its blocks' largest magnitudes."""
    unit = (global_scale * UNIT)[:, :, None]
    residual = ()
    for i in tl.static_range(4):
        residual += (x[i] - values[i] * unit,)
    return residual, block_amax_bits(residual)
