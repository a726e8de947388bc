"""Fake quantization as opaque ``torch.library`` operators with a straight-through gradient.

Opaque because Inductor would elide the roundings to bfloat16 and contract multiply-adds. The kernel
is chosen by the device: Triton on CUDA, the torch reference elsewhere. There is no fallback.
"""

from collections.abc import Callable

import torch

from quads_common.format import GlobalScaleRule
from quads_common.qat.effective import (
    effective_weight_ref,
    effective_weight_triton,
    matrix_amax_ref,
    matrix_amax_triton,
)

__all__ = ["AmaxHook", "effective_weight", "matrix_amax"]

# Takes a float32 amax tensor, returns (or changes in place) its maximum over a group of ranks.
AmaxHook = Callable[[torch.Tensor], torch.Tensor | None]


def matrix_amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each matrix of a weight, Inf if it cannot be quantized; no gradient.

    weight: [..., N, K] or [..., K, N] bf16, fp16 or fp32. Returns float32 ``weight.shape[:-2]``.
    """
    return _amax(weight.detach())


def effective_weight(
    weight: torch.Tensor,
    amax: torch.Tensor,
    *,
    rule: GlobalScaleRule = "pow2",
    dtype: torch.dtype | None = None,
    transposed: bool = False,
) -> torch.Tensor:
    """What a rollout computes with instead of ``weight``; the gradient is that of ``weight``.

    weight: [..., N, K], or [..., K, N] if ``transposed``; amax: float32 ``weight.shape[:-2]``.
    dtype: of the result, default the weight's. Under rule ``"pow2"`` bfloat16 holds every value
        exactly, so it makes no difference. NaN and Inf poison (see ``effective``).
    """
    return _effective(weight, amax.detach(), rule, transposed, dtype or weight.dtype)


@torch.library.custom_op("quads::qat_amax", mutates_args=())
def _amax(weight: torch.Tensor) -> torch.Tensor:
    return matrix_amax_triton(weight) if weight.is_cuda else matrix_amax_ref(weight)


@_amax.register_fake
def _(weight):  # type: ignore[no-untyped-def]
    return weight.new_empty(weight.shape[:-2], dtype=torch.float32)


@torch.library.custom_op("quads::qat_effective_weight", mutates_args=())
def _effective(
    weight: torch.Tensor, amax: torch.Tensor, rule: str, transposed: bool, dtype: torch.dtype
) -> torch.Tensor:
    kernel = effective_weight_triton if weight.is_cuda else effective_weight_ref
    values = kernel(weight.mT if transposed else weight, amax, rule, dtype)  # type: ignore[arg-type]
    return values.mT.contiguous() if transposed else values


@_effective.register_fake
def _(weight, amax, rule, transposed, dtype):  # type: ignore[no-untyped-def]
    return weight.new_empty(weight.shape, dtype=dtype)


def _save_dtype(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.weight_dtype = inputs[0].dtype


def _straight_through(ctx, grad):  # type: ignore[no-untyped-def]
    """d effective / d weight = 1; the scale counts as a constant, and no other input is real."""
    return grad.to(ctx.weight_dtype), None, None, None, None


_effective.register_autograd(_straight_through, setup_context=_save_dtype)
