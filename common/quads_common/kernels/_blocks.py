# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Blocks of 16 elements, each held by one thread: loading, quantizing, storing a tile of them.

A tile is [B, R], B blocks of R rows; blocks come first, so that neighbouring threads hold
neighbouring blocks. The elements of its blocks are four float32 tensors [B, R, 4]: the even columns
of each block's first half, the odd ones, and those of the second half. Elements of 16 bits are kept
in pairs until they are needed: two int32 tensors [B, R, 4] for the halves, an even column in the
low half of each word.

The last dimension lies within a thread, so nothing that happens within a block moves between
threads, and a tile whose blocks are as many as its threads is read 16 bytes at a time and written 8
bytes of codes at a time.
"""

import triton
import triton.language as tl

from quads_common.kernels._coding import CODE_BASE, as_float, round_e2m1

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
def even_odd(first, second):
    """Elements 0..3 and 4..7, [B, R, 4] each, to the even and the odd ones."""
    shape: tl.constexpr = [first.shape[0], first.shape[1], 2, 2]
    even, odd = tl.split(first.reshape(shape))
    next_even, next_odd = tl.split(second.reshape(shape))
    even = tl.permute(tl.join(even, next_even), (0, 1, 3, 2)).reshape(first.shape)
    odd = tl.permute(tl.join(odd, next_odd), (0, 1, 3, 2)).reshape(first.shape)
    return even, odd


@triton.jit
def load_quads(pointer, inside, QUADS: tl.constexpr):
    """16 bytes a time, from pointers [B, R] at multiples of 16: QUADS int32 tensors [B, R, 4]."""
    at = pointer.to(tl.pointer_type(tl.int32))[:, :, None] + tl.arange(0, 4)[None, None, :]
    quads = ()
    for i in tl.static_range(QUADS):
        quads += (tl.load(at + 4 * i, mask=inside[:, :, None], other=0),)
    return quads


@triton.jit
def load_block(pointer, inside, WIDE: tl.constexpr):
    """A tile, from pointers [B, R] to the first elements. WIDE: at multiples of 16 bytes."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    if WIDE and dtype != tl.float32:
        block = load_quads(pointer, inside, 2)
    elif WIDE:
        quads = load_quads(pointer, inside, 4)
        first = even_odd(as_float(quads[0]), as_float(quads[1]))
        block = first + even_odd(as_float(quads[2]), as_float(quads[3]))
    else:
        at = pointer[:, :, None] + (tl.arange(0, 4) * 2)[None, None, :]
        mask = inside[:, :, None]
        x = ()
        for i in tl.static_range(4):
            x += (tl.load(at + (i // 2 * 8 + i % 2), mask=mask, other=0.0).to(tl.float32),)
        block = hold(x, dtype, False)
    return block


@triton.jit
def widen(word, dtype: tl.constexpr):
    """A word's two elements as float32."""
    if dtype == tl.bfloat16:
        low, high = as_float(word << 16), as_float(word & HIGH)
    else:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def load_interleaved(pointer, inside):
    """Elements of two tiles whose columns, of 16 bits, alternate. Pointers as of ``load_quads``."""
    quads = load_quads(pointer, inside, 4)
    dtype: tl.constexpr = pointer.dtype.element_ty
    even, odd = (), ()
    for i in tl.static_range(2):
        first, next_first = widen(quads[2 * i], dtype)
        second, next_second = widen(quads[2 * i + 1], dtype)
        even += even_odd(first, second)
        odd += even_odd(next_first, next_second)
    return even, odd


@triton.jit
def narrow(low, high, dtype: tl.constexpr, PTX: tl.constexpr):
    """Two float32 elements rounded to dtype, as a word. PTX: in one instruction."""
    if PTX:
        word = tl.inline_asm_elementwise(
            ROUND_BF16 if dtype == tl.bfloat16 else ROUND_FP16, "=r,r,r", [low, high],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16
        word = low | high
    return word


@triton.jit
def hold(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """Elements rounded to dtype, as they are kept."""
    if dtype == tl.float32:
        block = x
    else:
        block = narrow(x[0], x[1], dtype, PTX), narrow(x[2], x[3], dtype, PTX)
    return block


@triton.jit
def elements(block, dtype: tl.constexpr):
    """The inverse of ``hold``."""
    return block if dtype == tl.float32 else widen(block[0], dtype) + widen(block[1], dtype)


@triton.jit
def block_amax_bits(x):
    """Bits of each block's largest magnitude, int32 [B, R]; above infinity if it holds a NaN."""
    amax = tl.abs(x[0])
    for i in tl.static_range(1, 4):
        amax = tl.maximum(amax, tl.abs(x[i]), propagate_nan=tl.PropagateNan.ALL)
    return tl.max(amax.to(tl.int32, bitcast=True), 2)


@triton.jit
def code_word(even, odd, encode):
    """A half block times ``encode`` as E2M1 codes in a word, the first in the lowest nibble."""
    low = round_e2m1(tl.abs(even) * encode[:, :, None])
    high = round_e2m1(tl.abs(odd) * encode[:, :, None])
    codes = tl.sum((low + (high << 4)) << (tl.arange(0, 4) * 8)[None, None, :], 2)
    # The upper four bits of each element move in from the right, the last element first.
    even = split_4(even.to(tl.uint32, bitcast=True))
    odd = split_4(odd.to(tl.uint32, bitcast=True))
    signs = ((odd[3] >> 28) << 4) | (even[3] >> 28)
    for i in tl.static_range(1, 4):
        signs = (signs << 4) | (odd[3 - i] >> 28)
        signs = (signs << 4) | (even[3 - i] >> 28)
    return (codes + CODE_BASES) | (signs.to(tl.int32, bitcast=True) & SIGNS)


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
        code = code.reshape(first.shape[0], first.shape[1], 8).to(tl.uint8)
        at = pointer[:, :, None] + tl.arange(0, 8)[None, None, :]
        tl.store(at, code, mask=inside[:, :, None])


@triton.jit
def store_block(pointer, x, inside):
    """A tile's elements to pointers [B, R] to the first ones, in the pointers' dtype."""
    at = pointer[:, :, None] + (tl.arange(0, 4) * 2)[None, None, :]
    for i in tl.static_range(4):
        value = x[i].to(pointer.dtype.element_ty)
        tl.store(at + (i // 2 * 8 + i % 2), value, mask=inside[:, :, None])


@triton.jit
def store_held(pointer, block, dtype: tl.constexpr, inside, WIDE: tl.constexpr):
    """A tile as ``hold`` keeps it. WIDE: pointers at multiples of 16 bytes."""
    if WIDE and dtype != tl.float32 and dtype == pointer.dtype.element_ty:
        at = pointer.to(tl.pointer_type(tl.int32))[:, :, None] + tl.arange(0, 4)[None, None, :]
        for i in tl.static_range(2):
            tl.store(at + 4 * i, block[i], mask=inside[:, :, None])
    else:
        store_block(pointer, elements(block, dtype), inside)


@triton.jit
def quantized_pairs(first, second, encode, factor):
    """Elements [B, R, 4] as float16 bits of code * block scale, those of ``second`` in the upper
    halves of the words. factor: block scale * 2^14.

    Magnitudes first: a code's bits in exponent and mantissa are its value * 2^-126 in float32, and
    times ``factor`` the result * 2^-112, whose exponent field is that of float16.
    """
    encode, factor = encode[:, :, None], factor[:, :, None]
    low = as_float((round_e2m1(tl.abs(first) * encode) << 22) + VALUE_BASE) * factor
    high = as_float((round_e2m1(tl.abs(second) * encode) << 22) + VALUE_BASE) * factor
    low = low.to(tl.int32, bitcast=True)
    high = high.to(tl.int32, bitcast=True)
    first = first.to(tl.uint32, bitcast=True)
    second = second.to(tl.int32, bitcast=True)
    signs = ((first >> 16).to(tl.int32, bitcast=True) | (second & HIGH)) & HALF_SIGNS
    return ((low >> 13) + (high << 3)) | signs


@triton.jit
def store_values(pointer, x, inside, PLANE: tl.constexpr, PTX: tl.constexpr):
    """Elements rounded to 16 bits, the pointers' dtype, to an operand as of ``store_pairs``."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    even, odd = narrow(x[0], x[2], dtype, PTX), narrow(x[1], x[3], dtype, PTX)
    store_pairs(pointer, even, odd, inside, PLANE)


@triton.jit
def store_pairs(pointer, even, odd, inside, PLANE: tl.constexpr):
    """Words of elements i and i + 8, [B, R, 4] for even and odd i, to planes i of an operand.

    pointer: 16-bit [B, R], where element 0 goes; PLANE: even.
    """
    pointer = pointer.to(tl.pointer_type(tl.int32))
    even, odd = split_4(even), split_4(odd)
    for i in tl.static_range(4):
        tl.store(pointer + i * PLANE, even[i], mask=inside)
        tl.store(pointer + (i * PLANE + PLANE // 2), odd[i], mask=inside)
