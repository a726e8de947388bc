# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Blocks of 16 elements, each held by one thread: loading, quantizing, storing a tile of them.

A tile is [B, R], B blocks of R rows; blocks come first, so that neighbouring threads hold
neighbouring blocks. A block is a tuple of tensors [B, R] of int32 words, one entry for each block
of the tile: 8 words of two 16-bit elements (even column in the low half) or 16 of one float32. So
nothing that happens within a block moves between threads, and a tile whose blocks are as many as
its threads is read 16 bytes at a time and written 8 bytes of codes at a time.
"""

import triton
import triton.language as tl

from quads_common.kernels._coding import (
    CODE_BASE,
    as_float,
    block_scales,
    round_e2m1,
)

HIGH = tl.constexpr(-65536)
# What takes CODE_BASE out of each nibble of a word, modulo 2^32.
CODE_BASES = tl.constexpr((-CODE_BASE.value * 0x11111111 + 2**31) % 2**32 - 2**31)
SIGNS = tl.constexpr(0x88888888 - 2**32)
HALF_SIGNS = tl.constexpr(0x80008000 - 2**32)
# -CODE_BASE * 2^22, for codes that become exponent and mantissa of float32.
VALUE_BASE = tl.constexpr(-(CODE_BASE.value << 22) % 2**32)

ROUND_BF16 = tl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
ROUND_FP16 = tl.constexpr("cvt.rn.f16x2.f32 $0, $2, $1;")


@triton.jit
def split_4(x):
    """[B, R, 4] to a tuple of 4 tensors [B, R]."""
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1], 2, 2))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def split_16(x):
    """[B, R, 16] to a tuple of 16 tensors [B, R]."""
    x = x.reshape(x.shape[0], x.shape[1], 4, 2, 2)
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    x0, x1, x2, x3 = split_4(x0), split_4(x1), split_4(x2), split_4(x3)
    result = ()
    for i in tl.static_range(4):
        result = result + (x0[i], x1[i], x2[i], x3[i])
    return result


@triton.jit
def load_words(pointer, inside):
    """The words of each block, from pointers [B, R] to its first element, at multiples of 16 bytes."""
    count: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth // 2
    at = pointer.to(tl.pointer_type(tl.int32))[:, :, None] + tl.arange(0, 4)[None, None, :]
    words = ()
    for i in tl.static_range(0, count, 4):
        words = words + split_4(tl.load(at + i, mask=inside[:, :, None], other=0))
    return words


@triton.jit
def load_elements(pointer, inside):
    """As ``load_words``, from anywhere."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    at = pointer[:, :, None] + tl.arange(0, 16)[None, None, :]
    x = split_16(tl.load(at, mask=inside[:, :, None], other=0.0))
    return words_of(x)


@triton.jit
def words_of(x):
    """16 elements of 16 or 32 bits as the words of a block."""
    words = ()
    if x[0].dtype.primitive_bitwidth == 32:
        for i in tl.static_range(16):
            words = words + (x[i].to(tl.int32, bitcast=True),)
    else:
        for i in tl.static_range(8):
            low = x[2 * i].to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            high = x[2 * i + 1].to(tl.int16, bitcast=True).to(tl.int32) << 16
            words = words + (low | high,)
    return words


@triton.jit
def widen(word, DTYPE: tl.constexpr):
    """A word's two elements as float32."""
    if DTYPE == tl.bfloat16:
        low, high = as_float(word << 16), as_float(word & HIGH)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def narrow(low, high, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Two float32 elements rounded to DTYPE, as a word. PTX: in one instruction."""
    if PTX:
        word = tl.inline_asm_elementwise(
            ROUND_BF16 if DTYPE == tl.bfloat16 else ROUND_FP16, "=r,r,r", [low, high],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = low | high
    return word


@triton.jit
def round_block(x, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """16 float32 elements rounded to a 16-bit DTYPE, as a block."""
    words = ()
    for i in tl.static_range(8):
        words = words + (narrow(x[2 * i], x[2 * i + 1], DTYPE, PTX),)
    return words


@triton.jit
def elements(block, DTYPE: tl.constexpr):
    """A block's 16 elements as float32."""
    result = ()
    for i in tl.static_range(len(block)):
        if DTYPE == tl.float32:
            result = result + (as_float(block[i]),)
        else:
            result = result + widen(block[i], DTYPE)
    return result


@triton.jit
def block_amax(x):
    """Largest magnitude of each block of 16 float32 elements, [B, R]; NaN if it holds one."""
    amax = tl.abs(x[0])
    for i in tl.static_range(1, 16):
        amax = tl.maximum(amax, tl.abs(x[i]), propagate_nan=tl.PropagateNan.ALL)
    return amax


@triton.jit
def code_word(x, encode, FIRST: tl.constexpr):
    """Eight elements times ``encode``, as E2M1 codes in a word, the first in the lowest nibble."""
    codes = round_e2m1(x[FIRST + 7] * encode)
    signs = x[FIRST + 7].to(tl.uint32, bitcast=True) >> 28
    for i in tl.static_range(1, 8):
        codes = (codes << 4) + round_e2m1(x[FIRST + 7 - i] * encode)
        signs = (signs << 4) | (x[FIRST + 7 - i].to(tl.uint32, bitcast=True) >> 28)
    return (codes + CODE_BASES) | (signs.to(tl.int32, bitcast=True) & SIGNS)


@triton.jit
def store_block(pointer, block, inside):
    """A block to pointers [B, R] to its first element, at multiples of 4 bytes."""
    pointer = pointer.to(tl.pointer_type(tl.int32))
    for i in tl.static_range(len(block)):
        tl.store(pointer + i, block[i], mask=inside)


@triton.jit
def pair_of(block, i: tl.constexpr):
    """Elements i and i + 8, of 16 bits, in one word."""
    first, second = block[i // 2], block[4 + i // 2]
    if i % 2 == 0:
        pair = (first & 0xFFFF) | (second << 16)
    else:
        pair = (first >> 16) & 0xFFFF | (second & HIGH)
    return pair


@triton.jit
def store_codes(pointer, first, second, inside, WIDE: tl.constexpr):
    """The two words of each block to uint8 pointers [B, R]. WIDE: all divisible by 8."""
    if WIDE:
        low = first.to(tl.uint32, bitcast=True).to(tl.uint64)
        high = second.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(pointer.to(tl.pointer_type(tl.uint64)), low | (high << 32), mask=inside)
    else:
        words = tl.join(first, second)[:, :, :, None]
        code = words >> (tl.arange(0, 4) * 8)[None, None, None, :]
        code = code.reshape(code.shape[0], code.shape[1], 8).to(tl.uint8)
        at = pointer[:, :, None] + tl.arange(0, 8)[None, None, :]
        tl.store(at, code, mask=inside[:, :, None])


@triton.jit
def quantized_pair(first, second, encode, factor):
    """Two elements as float16 bits of code * block scale, in a word. factor: block scale * 2^14.

    Magnitudes first: a code's bits in exponent and mantissa are its value * 2^-126 in float32, and
    times ``factor`` the result * 2^-112, whose exponent field is that of float16.
    """
    low = as_float((round_e2m1(first * encode) << 22) + VALUE_BASE) * factor
    high = as_float((round_e2m1(second * encode) << 22) + VALUE_BASE) * factor
    low = low.to(tl.int32, bitcast=True)
    high = high.to(tl.int32, bitcast=True)
    first = first.to(tl.int32, bitcast=True)
    second = second.to(tl.int32, bitcast=True)
    signs = ((first.to(tl.uint32) >> 16).to(tl.int32) | (second & HIGH)) & HALF_SIGNS
    return (low >> 13) + (high << 3) | signs
