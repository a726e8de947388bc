"""Device code of ``effective``: the amax of each matrix, then quantize and decode in one pass.

bfloat16 tensors are passed as int16 views and rounded as integers, so the same source gives the
same bits on a GPU and in Triton's interpreter. Launch with ``enable_fp_fusion=False``.
"""
# mypy: ignore-errors
# (arguments of @triton.jit functions have no Python types)

import triton
import triton.language as tl

from quads_common.kernels._coding import (
    INFINITY,
    NAN,
    as_float,
    decode_e4m3,
    magnitude_bits,
    quantize_blocks,
    round_bits_to_bf16,
    weight_global_scale_inv,
)

SIGN = tl.constexpr(-2147483648)
LARGEST = tl.constexpr(0x7F7C0000)  # bits of WEIGHT_AMAX_MAX
BLOCKS = tl.constexpr(8)  # of 16 elements, in a row of a tile


@triton.jit
def load_bits(pointers, mask, IS_BF16: tl.constexpr):
    """float32 bits (int32) of weights rounded to bfloat16; 0 where masked."""
    if IS_BF16:
        bits = tl.load(pointers, mask=mask, other=0).to(tl.int32) << 16
    else:
        x = tl.load(pointers, mask=mask, other=0.0)
        bits = round_bits_to_bf16(magnitude_bits(x)) | (x.to(tl.int32, bitcast=True) & SIGN)
    return bits


@triton.jit
def amax_kernel(weight, amax_bits, matrix_elements, IS_BF16: tl.constexpr, TILE: tl.constexpr):
    """amax_bits[matrix] = max of the bits of |bf16(weight)|, Inf's if above LARGEST (NaN is).

    Grid: tiles of a matrix, matrices. amax_bits: int32 [E], zeroed before.
    """
    matrix = tl.program_id(1).to(tl.int64)
    within = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    bits = load_bits(weight + matrix * matrix_elements + within, within < matrix_elements, IS_BF16)
    amax = tl.max(magnitude_bits(bits), 0)
    tl.atomic_max(amax_bits + matrix, tl.where(amax <= LARGEST, amax, INFINITY), sem="relaxed")


@triton.jit
def fake_quantize_kernel(
    weight,
    amax,
    out,
    matrix_blocks,
    TE_RULE: tl.constexpr,
    IS_BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    ROWS: tl.constexpr,
):
    """out = decode(quantize(weight, amax)), ROWS * BLOCKS blocks of a matrix for each program.

    Grid: tiles of a matrix, matrices. amax: float32 [E]. Where it is negative, NaN or above
    LARGEST, the matrix becomes NaN; so does a block with NaN or a magnitude above LARGEST.
    """
    matrix = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = row[:, None] * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    mask = (block < matrix_blocks)[:, :, None]
    offsets = ((matrix * matrix_blocks + block) * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    bits = load_bits(weight + offsets, mask, IS_BF16)

    given = tl.load(amax + matrix)
    amax_bits = round_bits_to_bf16(magnitude_bits(given))
    usable = (amax_bits <= LARGEST) & (given.to(tl.int32, bitcast=True) >= 0)
    inverse = weight_global_scale_inv(tl.where(usable, amax_bits, 0), TE_RULE)
    global_scale = tl.math.div_rn(1.0, inverse)
    sound = (tl.max(magnitude_bits(bits), 2) <= LARGEST) & usable
    x = as_float(tl.where(sound[:, :, None], bits, 0))
    value, _, scale = quantize_blocks(x, inverse, global_scale)
    value = value * decode_e4m3(scale)[:, :, None] * global_scale
    # A block with scale 0 decodes to +0, whatever the signs.
    value_bits = tl.where((scale != 0)[:, :, None], value.to(tl.int32, bitcast=True), 0)
    if OUT_BF16:
        rounded = round_bits_to_bf16(value_bits & 0x7FFFFFFF) | (value_bits & SIGN)
        rounded = tl.where(sound[:, :, None], rounded, NAN)
        tl.store(out + offsets, (rounded >> 16).to(tl.int16), mask=mask)
    else:
        tl.store(out + offsets, as_float(tl.where(sound[:, :, None], value_bits, NAN)), mask=mask)
