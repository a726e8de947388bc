# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""What compensation adds to the block quantizer: hot channels, and a second pass over the residual.

The order of operations is that of ``quads_common.compensation.operands``, so results are its bits.
"""

import triton
import triton.language as tl

from quads_common.kernels._coding import decode_e4m3, quantize_blocks


@triton.jit
def hot_channels(bits):
    """Bits of blocks [R, B] to bool [R, B, 16]."""
    return ((bits[:, :, None] >> tl.arange(0, 16)[None, None, :]) & 1) != 0


@triton.jit
def quantize_twice(x, global_scale_inv, global_scale):
    """Quantize whole blocks and what that loses, with the same global scale.

    x: [R, B, 16] float32, finite. global_scale_inv, global_scale: broadcast over [R, B]. Returns
    code * block scale of x, the residual, and code * block scale of the residual, all [R, B, 16];
    codes and scale bytes of x; codes and scale bytes of the residual.
    """
    value, code, scale = quantize_blocks(x, global_scale_inv, global_scale)
    quantized = value * decode_e4m3(scale)[:, :, None]
    residual = x - quantized * global_scale[:, :, None]
    value, code_r, scale_r = quantize_blocks(residual, global_scale_inv, global_scale)
    quantized_r = value * decode_e4m3(scale_r)[:, :, None]
    return quantized, residual, quantized_r, code, scale, code_r, scale_r
