# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""The activation functions of ``quads_common.activation`` in float32.

The exponential is the GPU's fast one and erf is CUDA's, so float32 results differ from torch's in
their last bits. The bounds stand in ``tests/kernels/exact_activation.py``.
"""

import triton
import triton.language as tl

# The quotient of ``silu`` as div.rn.f32 computes it where it needs no special case: reciprocal, one
# Newton step, quotient, remainder, correction. Numerator and denominator are a quarter of theirs,
# so that the reciprocal is normal; an infinite denominator gives 0 of the right sign, because the
# remainder takes the largest finite one. Its sign is turned round, so that -0 stays -0.
SILU = tl.constexpr("""{
.reg .b32 e, d, f, g, r, s, n, q;
mul.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
fma.rn.f32 d, e, 0f3E800000, 0f3E800000;
rcp.approx.ftz.f32 r, d;
min.f32 f, d, 0f7F7FFFFF;
neg.f32 g, f;
fma.rn.f32 s, g, r, 0f3F800000;
fma.rn.f32 r, r, s, r;
mul.f32 n, $1, 0f3E800000;
mul.f32 q, n, r;
neg.f32 n, n;
fma.rn.f32 s, f, q, n;
neg.f32 r, r;
fma.rn.f32 $0, r, s, q;
}""")


@triton.jit
def sigmoid(x):
    return tl.math.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x, PTX: tl.constexpr = False):
    """x / (1 + exp(-x)). PTX: the same bits in fewer instructions for float32 x that came from 16
    bits, but NaN where x is +Inf."""
    if PTX:
        result = tl.inline_asm_elementwise(
            SILU, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.math.div_rn(x, 1.0 + tl.exp(-x))
    return result


@triton.jit
def activate_plain(x, NAME: tl.constexpr):
    """Activation of a layer without gate. x: float32. NaN stays NaN."""
    if NAME == "relu2_no_mul":
        positive = tl.where(x <= 0.0, 0.0, x)
        result = positive * positive
    elif NAME == "gelu_no_mul":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(NAME == "silu_no_mul")
        result = silu(x)
    return result


@triton.jit
def activate_gated(gate, up, limit, alpha, beta, NAME: tl.constexpr, HAS_LIMIT: tl.constexpr,
                   PTX: tl.constexpr = False):  # fmt: skip
    """Activation of a gated layer. gate, up: float32. Comparisons, not min and max, keep NaN.

    PTX: as of ``silu``.
    """
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    if NAME == "swigluoai":
        product = (up + beta) * (gate * sigmoid(alpha * gate))
    else:
        tl.static_assert(NAME == "silu")
        product = silu(gate, PTX) * up
    return product
