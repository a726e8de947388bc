# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""The activation functions of ``quads_common.activation`` in float32.

The exponential is the GPU's fast one and erf is CUDA's, so float32 results differ from torch's in
their last bits. The bounds stand in ``tests/kernels/exact_activation.py``.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return tl.math.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return tl.math.div_rn(x, 1.0 + tl.exp(-x))


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
def activate_gated(gate, up, limit, alpha, beta, NAME: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """Activation of a gated layer. gate, up: float32. Comparisons, not min and max, keep NaN."""
    if HAS_LIMIT:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up)
    if NAME == "swigluoai":
        product = (up + beta) * (gate * sigmoid(alpha * gate))
    else:
        tl.static_assert(NAME == "silu")
        product = silu(gate) * up
    return product
