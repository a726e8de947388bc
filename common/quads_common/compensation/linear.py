"""``quads_common.gemm.linear`` with compensation, in the exact form of two products."""

import torch

from quads_common.compensation.operands import InputCompensation, compensated_operands, product
from quads_common.compensation.staging import Staging, stage
from quads_common.format import INPUT_DTYPES, QuantizedTensor
from quads_common.gemm import check_bias

__all__ = ["linear_compensated"]


def linear_compensated(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    compensation: InputCompensation,
    staging: Staging | None = None,
) -> torch.Tensor:
    """y = round(product + bias) to x's dtype (``operands.product``); W4A4.

    x: [..., K] bf16, fp16 or fp32. weight: [N, K], one global scale. bias: [N] or None.
    compensation: lists of one group. staging: where sampled rows of x are kept; its map has as many
        entries as x has rows. Returns [..., N] in x's dtype.

    Without RAC and splice the result is that of ``linear``, bit for bit.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, as ``linear``.
    """
    if len(weight.shape) != 2 or weight.per_token:
        raise ValueError(f"weight must be one [N, K] matrix, got {list(weight.shape)}")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be one of {[str(d) for d in INPUT_DTYPES]}, got {x.dtype}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has K = {x.shape[-1]}, the weight has K = {weight.shape[-1]}")
    check_bias("bias", bias, weight.shape[:1])
    rows = torch.atleast_2d(x).flatten(0, -2)
    if staging is not None:
        stage(staging, rows)
    y = product(compensated_operands(rows, compensation), weight, compensation.columns)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
