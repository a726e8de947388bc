# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""E2M1 weights to 16-bit operands in registers: 8 codes of an int32 word to 8 tensors.

An E2M1 code put where a 16-bit float has its lowest exponent bits and highest mantissa bit is the
value times a power of two (0.5 as a subnormal): 2^-14 in float16, 2^-126 in bfloat16. Multiplied by
block scale * 2^7 or * 2^118 it gives code * block scale * 2^-7 or * 2^-8, exactly; the accumulator
is scaled back.
"""

import triton
import triton.language as tl


def _unpack_text(low_shift: int, high_shift: int, mask: int) -> str:
    """PTX for two words a = $8 and b = $9: register $j holds nibble j of a (low half) and of b.

    low_shift (left) and high_shift (right) move a nibble's magnitude, doubled in both bytes of a
    half, to the bits of ``mask``.
    """
    lines = ["{", ".reg .b32 p, t, s;"]
    for byte in range(4):
        selector = (4 + byte) * 0x1100 + byte * 0x11
        low = f"shl.b32 t, p, {low_shift};" if low_shift > 0 else f"shr.u32 t, p, {-low_shift};"
        lines += [
            f"prmt.b32 p, $8, $9, {selector:#06x};",
            low,
            f"and.b32 t, t, {mask * 0x10001:#010x};",
            "shl.b32 s, p, 4;",
            f"lop3.b32 ${2 * byte}, s, 0x80008000, t, 0xEA;",
            f"shr.u32 t, p, {high_shift};",
            f"and.b32 t, t, {mask * 0x10001:#010x};",
            f"lop3.b32 ${2 * byte + 1}, p, 0x80008000, t, 0xEA;",
        ]
    return "\n".join([*lines, "}"])


def _unpack_block_text(fp16: bool) -> str:
    """PTX for a tiled block: codes $16 (64 bits), scale $17 (16 bits).

    $2j and $2j+1 become codes j and 8 + j times the scale (see ``weight_tiles``).
    """
    magnitude = 0x0E00 if fp16 else 0x01C0
    lines = ["{", ".reg .b32 q<2>, m, s, f;", "mov.b64 {q0, q1}, $16;", "mov.b32 f, {$17, $17};"]
    if not fp16:
        lines += [".reg .b32 z;", "mov.b32 z, 0x80008000;"]
    for j in range(8):
        word, at = f"q{j // 4}", (9, 6, 3, 0)[j % 4]
        left = (9 if fp16 else 6) - at
        sign = (0, 3, 1, 2)[j % 4]
        lines.append(f"shl.b32 m, {word}, {left};" if left >= 0 else f"shr.u32 m, {word}, {-left};")
        if left == sign:
            lines.append(f"and.b32 m, m, {(magnitude | 0x8000) * 0x10001:#010x};")
        else:
            lines += [
                f"and.b32 m, m, {magnitude * 0x10001:#010x};",
                f"shl.b32 s, {word}, {sign};",
                "lop3.b32 m, s, 0x80008000, m, 0xEA;",
            ]
        lines.append("mul.f16x2 m, m, f;" if fp16 else "fma.rn.bf16x2 m, m, f, z;")
        lines.append(f"mov.b32 {{${2 * j}, ${2 * j + 1}}}, m;")
    return "\n".join([*lines, "}"])


# The magnitude of a doubled byte's low nibble sits at bits 10..8, the high one's at 14..12.
UNPACK_FP16 = tl.constexpr(_unpack_text(1, 3, 0x0E00))
UNPACK_BF16 = tl.constexpr(_unpack_text(-2, 6, 0x01C0))
MULTIPLY_FP16 = tl.constexpr("mul.f16x2 $0, $1, $2;")
# -0.0 as addend: the product itself, on GPUs that have no mul.bf16x2 too.
MULTIPLY_BF16 = tl.constexpr(
    "{\n.reg .b32 z;\nmov.b32 z, 0x80008000;\nfma.rn.bf16x2 $0, $1, $2, z;\n}"
)


UNPACK_BLOCK_FP16 = tl.constexpr(_unpack_block_text(True))
UNPACK_BLOCK_BF16 = tl.constexpr(_unpack_block_text(False))
UNPACK_BLOCK_CONSTRAINTS = tl.constexpr("=h," * 16 + "l,h")


@triton.jit
def unpack_words(words, FP16: tl.constexpr):
    """int32 [...] to a tuple of 8 tensors [...] of float16 or bfloat16: code * 2^-14 or 2^-126."""
    if FP16:
        unpacked = tl.inline_asm_elementwise(
            UNPACK_FP16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], is_pure=True, pack=2,
            dtype=(tl.float16,) * 8,
        )  # fmt: skip
    else:
        unpacked = tl.inline_asm_elementwise(
            UNPACK_BF16, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words], is_pure=True, pack=2,
            dtype=(tl.bfloat16,) * 8,
        )  # fmt: skip
    return unpacked


@triton.jit
def unpack_blocks(codes, scale, FP16: tl.constexpr):
    """Tiled blocks int64 [...] and scales [...] of ``widen_scale`` to a tuple of 16 products [...].

    Members 2j and 2j + 1 are codes j and 8 + j of each block: code * scale * 2^-14 or 2^-126.
    """
    if FP16:
        products = tl.inline_asm_elementwise(
            UNPACK_BLOCK_FP16, UNPACK_BLOCK_CONSTRAINTS, [codes, scale], is_pure=True, pack=1,
            dtype=(tl.float16,) * 16,
        )  # fmt: skip
    else:
        products = tl.inline_asm_elementwise(
            UNPACK_BLOCK_BF16, UNPACK_BLOCK_CONSTRAINTS, [codes, scale], is_pure=True, pack=1,
            dtype=(tl.bfloat16,) * 16,
        )  # fmt: skip
    return products


@triton.jit
def multiply(a, b, FP16: tl.constexpr):
    """a * b of 16-bit floats, two at a time."""
    if FP16:
        product = tl.inline_asm_elementwise(
            MULTIPLY_FP16, "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        product = tl.inline_asm_elementwise(
            MULTIPLY_BF16, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return product


@triton.jit
def widen_scale(byte, FP16: tl.constexpr):
    """E4M3 bytes (uint8) to float16 scale * 2^7 or bfloat16 scale * 2^118, exactly."""
    if FP16:
        bits = byte.to(tl.uint16) << 7  # scale * 2^-8, subnormals included
        scale = bits.to(tl.float16, bitcast=True) * 32768.0
    else:
        bits = byte.to(tl.uint32) << 20  # scale * 2^-120 in float32
        scale = bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38  # 2^127
        scale = (scale * 2.596148429267414e33).to(tl.bfloat16)  # 2^111
    return scale
