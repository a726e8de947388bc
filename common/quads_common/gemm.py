"""``y = x @ dequantize(weight).T`` in the exact W4A4 (or W4A16) semantics, backend ``emulated``.

E2M1 times E4M3 is exact in any 16-bit float, so both operands are unscaled ``code * block_scale``,
products are exact, sums are float32, and the global scales touch only the float32 accumulator. That
is what FP4 tensor cores compute, up to the order of summation: the bound that tests use is
``accumulation_bound``.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from quads_common.format import BLOCK_SIZE, INPUT_DTYPES, QuantizedTensor
from quads_common.packing import unscaled_values
from quads_common.quantize import quantize

__all__ = [
    "ACT_FORMATS",
    "ActFormat",
    "accumulation_bound",
    "check_bias",
    "linear",
    "scaled_operand",
]

# "nvfp4": activations quantized per token (W4A4). "bf16": activations left in the model's dtype,
# whatever that is (W4A16).
ActFormat = Literal["nvfp4", "bf16"]
ACT_FORMATS: tuple[str, ...] = get_args(ActFormat)


def linear(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    act: ActFormat = "nvfp4",
) -> torch.Tensor:
    """y = round(acc * (g_row * s_w) + bias) to x's dtype, acc in float32.

    x: [..., K] bf16, fp16 or fp32. weight: [N, K], one global scale. bias: [N] or None.
    Returns [..., N] in x's dtype.

    Raises:
        ValueError: shapes that do not fit. TypeError: another dtype of x.
    """
    if len(weight.shape) != 2 or weight.per_token:
        raise ValueError(f"weight must be one [N, K] matrix, got {list(weight.shape)}")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x must be one of {[str(d) for d in INPUT_DTYPES]}, got {x.dtype}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has K = {x.shape[-1]}, the weight has K = {weight.shape[-1]}")
    check_bias("bias", bias, weight.shape[:1])
    operand, row_scale = scaled_operand(torch.atleast_2d(x).flatten(0, -2), act)
    acc = operand @ unscaled_values(weight.packed, weight.block_scale).T  # [M, K] @ [K, N]
    y = acc * (row_scale * weight.global_scale)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def check_bias(name: str, bias: torch.Tensor | None, shape: Sequence[int]) -> None:
    """Raise ``ValueError`` unless the bias is None or has this shape: none is broadcast."""
    if bias is not None and bias.shape != torch.Size(shape):
        raise ValueError(f"{name} must be {list(shape)}, got {list(bias.shape)}")


def scaled_operand(x: torch.Tensor, act: ActFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 operand of activations [M, K] and the factor [M, 1] left for the epilogue."""
    if act not in ACT_FORMATS:
        raise ValueError(f"act {act!r} is not one of {list(ACT_FORMATS)}")
    if act == "bf16":
        return x.float(), torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
    q = quantize(x, per_token=True)
    return unscaled_values(q.packed, q.block_scale), q.global_scale


def accumulation_bound(abs_product_sum: torch.Tensor, k: int) -> torch.Tensor:
    """Largest difference of two legal summation orders: (K/16 + 2) * 2^-22 * sum |a * b|.

    Tensor cores truncate when they align partial sums, hence 2^-22 and not 2^-24.
    """
    return abs_product_sum * ((k / BLOCK_SIZE + 2) * 2.0**-22)
