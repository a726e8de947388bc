"""An NVFP4 quantizer written from the contract's text alone, to judge ``quads_common`` by.

It shares nothing with the code under test: numpy instead of torch, every float32 step of the
contract as one numpy operation, rounding to E2M1 and E4M3 by comparing with every value of the
format in float64, the power-of-two global scale in exact integers. Slow, and meant to be obvious.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

F32 = np.float32
BLOCK = 16
# All 16 codes: bit 3 sign, bits 2..1 exponent (bias 1), bit 0 mantissa.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)
# Bytes 0x00..0x7E: 4 exponent bits (bias 7), 3 mantissa bits, subnormals, no infinity.
E4M3 = np.array(
    [(b % 8) * 2.0**-9 if b < 8 else (8 + b % 8) * 2.0 ** (b // 8 - 10) for b in range(127)],
    np.float64,
)
E4M3_NAN = 0x7F
CHUNK = 1 << 16


@dataclass(frozen=True)
class Encoded:
    """packed uint8 [..., K/2]; scale_bytes uint8 [..., K/16]; global_scale float32."""

    packed: np.ndarray
    scale_bytes: np.ndarray
    global_scale: np.ndarray


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, in integer arithmetic. Keeps float32."""
    bits = np.array(x, F32).view(np.uint32).astype(np.uint64)
    kept_bit = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = (bits + np.uint64(0x7FFF) + kept_bit) & np.uint64(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.astype(np.uint32).view(F32)).astype(F32)


def round_to_e2m1(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest of the 16 values; ties to the even code; the sign bit is the input's."""
    target = np.clip(x.astype(np.float64), -8, 8)  # beyond 6 it saturates anyway
    best = np.full(x.shape, np.inf)
    code = np.zeros(x.shape, np.uint8)
    for candidate in (*range(0, 16, 2), *range(1, 16, 2)):  # even ones first: they keep a tie
        distance = np.abs(target - E2M1[candidate])
        closer = distance < best
        best[closer] = distance[closer]
        code[closer] = candidate
    return (code & 7) | (np.signbit(x).astype(np.uint8) << 3)


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes of the nearest of the 127 finite magnitudes, ties to the even byte. x: float32 >= 0."""
    flat = x.reshape(-1).astype(np.float64)
    order = np.argsort(np.arange(127) % 2, kind="stable")  # even bytes first: argmin keeps them
    out = np.empty(flat.shape, np.uint8)
    for start in range(0, flat.size, CHUNK):
        distance = np.abs(flat[start : start + CHUNK, None] - E4M3[order])
        out[start : start + CHUNK] = order[np.argmin(distance, axis=1)]
    return out.reshape(x.shape)


def pow2_encode_scale(amax: F32) -> F32:
    """The largest power of two not above 2688 / amax, in exact arithmetic."""
    quotient = Fraction(2688) / Fraction(float(amax))
    exponent = quotient.numerator.bit_length() - quotient.denominator.bit_length()
    if Fraction(2) ** exponent > quotient:
        exponent -= 1
    assert Fraction(2) ** exponent <= quotient < Fraction(2) ** (exponent + 1)
    return F32(2.0**exponent)


def te_encode_scale(amax: F32) -> F32:
    """fl32(2688 / amax)."""
    return F32(2688) / amax


def encode_scale(amax: F32, rule: str) -> F32:
    """Encode scale of a weight; an amax below 1e-30 counts as zero, zero has scale 1."""
    if float(amax) < 1e-30:
        return F32(1)
    return {"pow2": pow2_encode_scale, "te": te_encode_scale}[rule](amax)


def quantize_weight(x: np.ndarray, rule: str = "pow2", amax: np.ndarray | None = None) -> Encoded:
    """x: finite float32 [..., N, K] or [K]; amax: of the full tensors, shape ``x.shape[:-2]``."""
    values = round_to_bf16(x)
    matrix_axes = tuple(range(-min(x.ndim, 2), 0))
    if amax is None:
        amax = np.max(np.abs(values), axis=matrix_axes, initial=0)
    amax = round_to_bf16(np.asarray(amax, F32))
    inverse = np.array([encode_scale(a, rule) for a in amax.reshape(-1)], F32).reshape(amax.shape)
    packed, scale_bytes = _quantize_blocks(values, np.expand_dims(inverse, matrix_axes))
    return Encoded(packed, scale_bytes, F32(1) / inverse)


def quantize_tokens(x: np.ndarray) -> Encoded:
    """x: float32 [..., K], each row by itself; rows with NaN or Inf decode to NaN as a whole."""
    amax = np.max(np.abs(x), axis=-1, keepdims=True, initial=0)
    good = np.isfinite(amax)
    zero = good & (amax.astype(np.float64) < 1e-30)
    usable = np.where(good & ~zero, amax, F32(2688)).astype(F32)
    inverse = np.where(zero, F32(1), F32(2688) / usable).astype(F32)
    packed, scale_bytes = _quantize_blocks(np.where(good, x, F32(0)).astype(F32), inverse)
    return Encoded(
        np.where(good, packed, 0).astype(np.uint8),
        np.where(good, scale_bytes, E4M3_NAN).astype(np.uint8),
        np.where(good, F32(1) / inverse, F32("nan")).astype(F32),
    )


def unpack(packed: np.ndarray) -> np.ndarray:
    """[..., K/2] bytes to [..., K] codes, even column in the low nibble."""
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = packed % 16
    codes[..., 1::2] = packed // 16
    return codes


def decode(packed: np.ndarray, scale_bytes: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
    """(code * block scale) * global scale in float32. global_scale broadcasts over [..., K]."""
    table = np.append(E4M3, np.nan).astype(F32)
    scales = np.repeat(table[scale_bytes], BLOCK, axis=-1)
    unscaled = E2M1.astype(F32)[unpack(packed)] * scales
    with np.errstate(invalid="ignore"):
        return unscaled * global_scale.astype(F32)


def _quantize_blocks(x: np.ndarray, inverse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x: float32 [..., K]; inverse: float32, broadcasts over it. Returns packed, scale bytes."""
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)
    inverse = np.asarray(inverse, F32)
    global_scale = F32(1) / inverse
    sixth = F32(1) / F32(6)
    factor = inverse * sixth
    block_amax = np.max(np.abs(blocks), axis=-1)
    scaled = block_amax * factor
    scale_bytes = round_to_e4m3(np.minimum(scaled, F32(448)))
    scale = E4M3.astype(F32)[scale_bytes]
    live = scale > 0
    product = np.where(live, scale * global_scale, F32(1)).astype(F32)
    reciprocal = F32(1) / product
    encode = np.minimum(reciprocal, np.finfo(F32).max)
    scaled_values = blocks * encode[..., None]
    assert scaled_values.dtype == F32 and scaled.dtype == F32 and encode.dtype == F32
    codes = np.where(live[..., None], round_to_e2m1(scaled_values), 0).astype(np.uint8)
    codes = codes.reshape(x.shape)
    return codes[..., 0::2] + 16 * codes[..., 1::2], scale_bytes
