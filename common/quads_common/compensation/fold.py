"""The folded form: q, residual and hot channels in ONE float16 operand, for GPUs without FP4 MMA.

Per row, with g its global scale and k the smallest power-of-two shift that keeps hot channels in
range (0 without splice, and where no hot channel of the row is finite and not 0)::

    a = fp16(2^-k * (q + alpha * q_r))     cold channels
    a = fp16(2^-k * x_hot * fl32(1 / g))   hot channels
    y = (a @ W.T) * ((g * 2^k) * s_w)      # W = code * block_scale, exact in float16

So any RAC ratio costs no additional products. Each element is off by at most 2^-11 of itself, or
2^-25 where it is subnormal, which bounds the output (``fold_error_bound``). Without splice 99.7 to
99.8% of the elements are exact and outputs move by 4e-5 to 1.1e-4 relative, far less than rounding
them to bfloat16 does. BF16 columns cannot be folded: their weight is another one.
"""

from dataclasses import dataclass

import torch

from quads_common.compensation.operands import (
    InputCompensation,
    Operands,
    channel_mask,
    compensated_operands,
)
from quads_common.format import QuantizedTensor
from quads_common.gemm import check_bias
from quads_common.packing import unscaled_values

__all__ = ["FoldedOperand", "fold", "fold_error_bound", "linear_folded"]

# Hot values are shifted below 2^15; cold ones are below 2^13 anyway. float16 ends at 65504.
_LARGEST_EXPONENT = 15
# 2^-k stays a normal float32; a hot channel 2^141 times as large as g becomes infinite.
_LARGEST_SHIFT = 126
_ROUNDING = 2.0**-11  # float16, relative, half an ulp
_DOUBLE_ROUNDING = 2.0**-22  # hot values: the reciprocal and the product in float32 first
_SUBNORMAL_ROUNDING = 2.0**-25


@dataclass(frozen=True)
class FoldedOperand:
    """values: [M, K] float16. row_scale: [M, 1] float32, g * 2^k."""

    values: torch.Tensor
    row_scale: torch.Tensor


def fold(operands: Operands) -> FoldedOperand:
    """Fold operands of the exact form into one."""
    values, scale = operands.quantized, operands.row_scale
    if operands.residual is not None:
        values = values + operands.alpha * operands.residual
    if operands.hot is None or operands.channels is None:
        return FoldedOperand(values.to(torch.float16), scale)
    largest = operands.hot.abs().amax(dim=1, keepdim=True)
    # largest / g < 2^(exponent of largest - exponent of g + 1), from the exponents alone: the
    # quotient itself may overflow.
    shift = torch.frexp(largest).exponent - torch.frexp(scale).exponent + 1 - _LARGEST_EXPONENT
    counts = largest.isfinite() & (largest > 0)
    shift = torch.where(counts, shift.clamp(0, _LARGEST_SHIFT), 0)
    hot = (operands.hot * _power_of_two(-shift)) * (1.0 / scale)
    values = values * _power_of_two(-shift)
    width = values.shape[1]
    places = torch.where(operands.channels < 0, width, operands.channels).long()
    padded = torch.nn.functional.pad(values, (0, 1)).index_copy(1, places, hot)
    keep = ~channel_mask(operands.channels, width)
    values = torch.where(keep, values, padded[:, :width])
    return FoldedOperand(values.to(torch.float16), scale * _power_of_two(shift))


def fold_error_bound(folded: FoldedOperand, weight: QuantizedTensor) -> torch.Tensor:
    """[M, N] float32: how far the folded product may be from the exact one, sums aside."""
    size = folded.values.float().abs()
    off = size * ((_ROUNDING + _DOUBLE_ROUNDING) * (1 + 2 * _ROUNDING)) + _SUBNORMAL_ROUNDING
    values = unscaled_values(weight.packed, weight.block_scale).abs()
    return (off @ values.T) * (folded.row_scale * weight.global_scale)


def linear_folded(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    compensation: InputCompensation,
) -> torch.Tensor:
    """``linear_compensated`` with the folded operand; x: [M, K], returns [M, N] in x's dtype.

    Raises:
        ValueError: the compensation has BF16 columns.
    """
    if compensation.columns is not None:
        raise ValueError("BF16 columns (splice_weight 'bf16') cannot be folded into one operand")
    check_bias("bias", bias, weight.shape[:1])
    folded = fold(compensated_operands(x, compensation))
    acc = folded.values.float() @ unscaled_values(weight.packed, weight.block_scale).T
    y = acc * (folded.row_scale * weight.global_scale)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as float32, exactly; -126 to 127. ``torch.ldexp`` would compute a power."""
    return ((exponent + 127).int() << 23).view(torch.float32)
