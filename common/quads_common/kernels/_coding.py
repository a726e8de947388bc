# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""E4M3 and E2M1 coding and the block quantizer, in float32 and integers: no FP8 or FP4 types.

So the same code runs on every GPU and in Triton's interpreter, and rounds as ``format`` says.
"""

import struct

import triton
import triton.language as tl

from quads_common import format as contract

WEIGHT_AMAX_MAX_BITS = struct.unpack("<i", struct.pack("<f", contract.WEIGHT_AMAX_MAX))[0]

AMAX_FLOOR = tl.constexpr(contract.AMAX_FLOOR)
FLT_MAX = tl.constexpr(contract.FLT_MAX)
ONE_SIXTH = tl.constexpr(contract.ONE_SIXTH)
TENSOR_MAX = tl.constexpr(contract.TENSOR_MAX)
E4M3_MAX_BYTE = tl.constexpr(0x7E)
# Bits of float32: magnitude, infinity, the quiet NaN.
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)
# A weight's amax above 252 * 2^120 is refused, as NaN and Inf are.
WEIGHT_AMAX_MAX = tl.constexpr(WEIGHT_AMAX_MAX_BITS)
# 2688 = 1.3125 * 2^11
TENSOR_MAX_MANTISSA = tl.constexpr(0x280000)
# Bits of 2^23 - 2.
CODE_BASE = tl.constexpr(0x4AFFFFFC)


@triton.jit
def magnitude_bits(x):
    """float32 to the bits of |x| as int32, whose order is that of |x| with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def as_float(bits):
    """int32 bits to float32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def round_bits_to_bf16(bits):
    """Bits of a non-negative float32 to those of its nearest bfloat16, ties to even; NaN stays."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(bits > INFINITY, NAN, rounded)


@triton.jit
def encode_e4m3(x):
    """float32 >= 0 to E4M3 bytes (int32): nearest, ties to even, saturating at 448."""
    bits = x.to(tl.int32, bitcast=True)
    # Adding 2^14, whose ulp is E4M3's smallest step 2^-9, leaves its code in the low bits.
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    # Round to 3 mantissa bits, then change the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    return tl.minimum(tl.where(x < 0.015625, subnormal, normal), E4M3_MAX_BYTE)


@triton.jit
def decode_e4m3(byte):
    """E4M3 bytes 0..0x7E (int32) to float32, exactly: their bits are value * 2^-120 in float32."""
    return as_float(byte << 20) * 1.329227995784916e36


@triton.jit
def round_e2m1(x):
    """x >= 0 to ``CODE_BASE`` plus the nearest E2M1 magnitude code 0..7: ties to even, 7 above 6.

    The grid's step is 0.5 below 2, 1 below 4, then 2. 2^23 - 2 + x is below 2^23, where the ulp
    is 0.5, until x is 2, then its ulp is 1: each addition rounds to a step, ties to an even code,
    and leaves the code in the low bits of the sum. So does 2^23 + x / 2 with steps of 2. From 4
    on the second sum is the smaller one, below the first is. NaN gives 7.
    """
    fine = (x + 8388606.0).to(tl.int32, bitcast=True)
    coarse = tl.fma(x, 0.5, 8388608.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(fine, coarse), CODE_BASE + 7)


@triton.jit
def e2m1_value(code):
    """Codes 0..7 (int32) to float32, exactly: their bits are value * 2^-126 in float32."""
    return as_float(code << 22) * 8.507059173023462e37


@triton.jit
def block_scales(amax, global_scale_inv, global_scale):
    """Of blocks with the given amax (float32): scale bytes (int32), factors for the codes, and
    whether a block is live. Where it is not, its factor is 0 and its codes are 0x0."""
    scale = encode_e4m3(amax * (global_scale_inv * ONE_SIXTH))
    decode = decode_e4m3(scale) * global_scale
    live = decode != 0.0
    encode = tl.minimum(tl.math.div_rn(1.0, tl.where(live, decode, 1.0)), FLT_MAX)
    return scale, tl.where(live, encode, 0.0), live


@triton.jit
def quantize_blocks(x, global_scale_inv, global_scale):
    """Quantize whole blocks. Returns magnitudes, codes and scale bytes.

    x: [R, B, 16] float32, finite. global_scale_inv, global_scale: broadcast over [R, B].
    Returns E2M1 values [R, B, 16] float32, codes [R, B, 16] int32 and bytes [R, B] int32.
    """
    amax = as_float(tl.max(magnitude_bits(x), 2))
    scale, encode, live = block_scales(amax, global_scale_inv, global_scale)
    code = round_e2m1(tl.abs(x) * encode[:, :, None]) - CODE_BASE
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    value = as_float(e2m1_value(code).to(tl.int32, bitcast=True) | sign)
    code = tl.where(live[:, :, None], code | ((sign >> 28) & 8), 0)
    return value, code, scale


@triton.jit
def pack_codes(code, R: tl.constexpr, B: tl.constexpr):
    """codes [R, B, 16] int32 to bytes [R, B, 8] uint8, even column in the low nibble."""
    low, high = tl.split(code.reshape(R, B, 8, 2))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def weight_global_scale_inv(amax_bits, TE_RULE: tl.constexpr):
    """Encode scale of a weight from the bits of its finite amax (scalar int32)."""
    amax = as_float(amax_bits)
    is_zero = amax < AMAX_FLOOR
    if TE_RULE:
        inverse = tl.math.div_rn(TENSOR_MAX, tl.where(is_zero, 1.0, amax))
    else:
        exponent = (amax_bits >> 23) - 127
        above = ((amax_bits & 0x7FFFFF) > TENSOR_MAX_MANTISSA).to(tl.int32)
        inverse = as_float((11 - exponent - above + 127) << 23)
    return tl.where(is_zero, 1.0, inverse)


@triton.jit
def row_global_scale_inv(amax_bits):
    """Encode scale of rows from the bits of their finite amax (int32)."""
    amax = as_float(amax_bits)
    is_zero = amax < AMAX_FLOOR
    return tl.where(is_zero, 1.0, tl.math.div_rn(TENSOR_MAX, tl.where(is_zero, 1.0, amax)))
