"""The weights a rollout computes with, from a trainer's weights: ``decode(quantize(bf16(W)))``.

Two implementations with one signature: the reference in torch, which is ``quads_common.quantize``,
and a Triton path for GPUs (reads the weight twice, writes it once) that equals it bit for bit. No
function here reads anything back from the device. So what ``quantize`` refuses (NaN, Inf,
magnitudes above ``WEIGHT_AMAX_MAX``) cannot raise; it poisons instead: a matrix with such an amax
becomes NaN as a whole, and so does a block with such a value under a lower amax. ``check_amax`` is
the one place that raises, with one device read.
"""

from collections.abc import Sequence

import torch

from quads_common.format import BLOCK_SIZE, WEIGHT_AMAX_MAX, GlobalScaleRule
from quads_common.quantize import dequantize, quantize, weight_amax

__all__ = [
    "check_amax",
    "effective_weight_ref",
    "effective_weight_triton",
    "matrix_amax_ref",
    "matrix_amax_triton",
]

_AMAX_TILE = 16384  # elements for each program
_QUANTIZE_ROWS = 64  # rows of BLOCKS blocks for each program


def matrix_amax_ref(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each matrix after rounding to bfloat16; Inf if it cannot be quantized.

    weight: [..., N, K] bf16, fp16 or fp32. Returns float32 ``weight.shape[:-2]``. Inf, and not NaN,
    survives every implementation of a collective maximum.
    """
    amax = weight_amax(weight)
    return torch.where(amax <= WEIGHT_AMAX_MAX, amax, float("inf"))


def matrix_amax_triton(weight: torch.Tensor) -> torch.Tensor:
    """``matrix_amax_ref`` as a kernel: one read of the weight."""
    import triton  # type: ignore[import-untyped]

    from quads_common.qat._fake_quantize_kernel import amax_kernel

    source, is_bf16 = _kernel_input(weight)
    bits = torch.zeros(weight.shape[:-2], dtype=torch.int32, device=weight.device)
    if source.numel():
        elements = weight.shape[-2] * weight.shape[-1]
        grid = (triton.cdiv(elements, _AMAX_TILE), bits.numel())
        amax_kernel[grid](
            source, bits, elements, is_bf16, _AMAX_TILE, num_warps=8, enable_fp_fusion=False
        )
    return bits.view(torch.float32)


def effective_weight_ref(
    weight: torch.Tensor, amax: torch.Tensor, rule: GlobalScaleRule, dtype: torch.dtype
) -> torch.Tensor:
    """``dequantize(quantize(weight, amax=amax), dtype)``, NaN in place of what cannot be quantized.

    weight: [..., N, K] bf16, fp16 or fp32. amax: float32 ``weight.shape[:-2]``, of full tensors.
    Returns a new contiguous [..., N, K] tensor in ``dtype``.
    """
    amax = amax.to(torch.bfloat16).float()
    usable = (amax >= 0) & (amax <= WEIGHT_AMAX_MAX)
    blocks = weight.to(torch.bfloat16).unflatten(-1, (-1, BLOCK_SIZE))
    in_range = (blocks.abs() <= WEIGHT_AMAX_MAX).all(-1, keepdim=True)
    sound = usable[..., None, None, None] & in_range
    clean = torch.where(sound, blocks, 0).flatten(-2)
    q = quantize(clean, amax=torch.where(usable, amax, 0), global_scale_rule=rule)
    values = dequantize(q, dtype).unflatten(-1, (-1, BLOCK_SIZE))
    return torch.where(sound, values, float("nan")).flatten(-2).contiguous()


def effective_weight_triton(
    weight: torch.Tensor, amax: torch.Tensor, rule: GlobalScaleRule, dtype: torch.dtype
) -> torch.Tensor:
    """``effective_weight_ref`` as a kernel: one read and one write of the weight."""
    import triton

    from quads_common.qat._fake_quantize_kernel import BLOCKS, fake_quantize_kernel

    source, is_bf16 = _kernel_input(weight)
    out_bf16 = dtype == torch.bfloat16
    out = torch.empty(
        weight.shape, dtype=dtype if out_bf16 else torch.float32, device=weight.device
    )
    if out.numel():
        blocks = weight.shape[-2] * weight.shape[-1] // BLOCK_SIZE
        grid = (triton.cdiv(blocks, _QUANTIZE_ROWS * BLOCKS.value), amax.numel())
        fake_quantize_kernel[grid](
            source,
            amax.contiguous(),
            out.view(torch.int16) if out_bf16 else out,
            blocks,
            rule == "te",
            is_bf16,
            out_bf16,
            _QUANTIZE_ROWS,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out.to(dtype)


def check_amax(amax: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise if a maximum is not finite: one read per device for all of them.

    amax: float32 tensors of any shape, one for each name.

    Raises:
        ValueError: names the parameters (and the matrix in a stack) that cannot be quantized.
    """
    devices = {values.device for values in amax}  # a model may lie on several
    together = [torch.cat([v.flatten() for v in amax if v.device == d]) for d in devices]
    if all(bool(values.isfinite().all()) for values in together):
        return
    bad = [
        name if values.ndim == 0 else f"{name}[{place}]"
        for values, name in zip(amax, names, strict=True)
        for place in (~values.flatten().isfinite()).nonzero().flatten().tolist()
    ]
    shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    raise ValueError(f"{shown}: NaN or Inf, or a magnitude above {WEIGHT_AMAX_MAX:.4g}")


def _kernel_input(weight: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The weight as the kernels read it: contiguous, an int16 view (True) or float32 (False)."""
    source = weight.detach().contiguous()
    if source.dtype == torch.bfloat16:
        return source.view(torch.int16), True
    return source.float(), False
