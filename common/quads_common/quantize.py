"""The quantizer: weights and activations to NVFP4 and back, in the operation order of ``format``.

This torch implementation is the reference of every other one: kernels must equal it byte for byte.
"""

import torch

from quads_common.format import (
    AMAX_FLOOR,
    BLOCK_SIZE,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_NAN_BYTE,
    FLT_MAX,
    GLOBAL_SCALE_RULES,
    INPUT_DTYPES,
    ONE_SIXTH,
    TENSOR_MAX,
    WEIGHT_AMAX_MAX,
    GlobalScaleRule,
    QuantizedTensor,
    check_block_aligned,
)
from quads_common.packing import encode_e2m1, pack_codes, unscaled_values

__all__ = [
    "activation_global_scale_inv",
    "dequantize",
    "fake_quantize",
    "quantize",
    "quantize_blocks",
    "weight_amax",
    "weight_global_scale_inv",
]

# Exponent field and mantissa of float32; 2688 = 1.3125 * 2^11.
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23
_TENSOR_MAX_EXPONENT = 11
_TENSOR_MAX_MANTISSA = int(0.3125 * 2**_MANTISSA_BITS)


def weight_amax(weight: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each matrix after rounding to bfloat16, NaN if it holds a NaN.

    weight: [..., N, K] (or [K]) bf16, fp16 or fp32; the FULL tensor, not a shard of it.
    Returns float32 of shape ``weight.shape[:-2]``: what ``quantize(shard, amax=...)`` wants.
    """
    _check_dtype(weight)
    if weight.numel() == 0:
        return torch.zeros(weight.shape[:-2], dtype=torch.float32, device=weight.device)
    dims = tuple(range(-min(weight.ndim, 2), 0))
    # Rounding is monotonic, so rounding the maximum equals the maximum of the rounded values.
    return weight.abs().amax(dim=dims).to(torch.bfloat16).float()


def weight_global_scale_inv(amax: torch.Tensor, rule: GlobalScaleRule = "pow2") -> torch.Tensor:
    """Encode scale of a weight from the amax of its full tensor (float32, any shape).

    ``"pow2"``: the largest power of two not above 2688 / amax; ``"te"``: fl32(2688 / amax).
    """
    if rule not in GLOBAL_SCALE_RULES:
        raise ValueError(f"global_scale_rule {rule!r} is not one of {list(GLOBAL_SCALE_RULES)}")
    zero = amax < AMAX_FLOOR
    safe = torch.where(zero, 1.0, amax)
    if rule == "te":
        inverse = _tensor_max_over(safe)
    else:
        bits = safe.view(torch.int32)
        exponent = (bits >> _MANTISSA_BITS) - _EXPONENT_BIAS
        above = (bits & (2**_MANTISSA_BITS - 1)) > _TENSOR_MAX_MANTISSA
        inverse_exponent = _TENSOR_MAX_EXPONENT - exponent - above.int()
        inverse = ((inverse_exponent + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float32)
    return torch.where(zero, 1.0, inverse)


def activation_global_scale_inv(row_amax: torch.Tensor) -> torch.Tensor:
    """Encode scale of each token: fl32(2688 / row_amax), NaN where the row is not finite."""
    inverse = torch.where(row_amax < AMAX_FLOOR, 1.0, _tensor_max_over(row_amax))
    return torch.where(row_amax.isfinite(), inverse, float("nan"))


def quantize(
    x: torch.Tensor,
    *,
    per_token: bool = False,
    amax: torch.Tensor | None = None,
    global_scale_rule: GlobalScaleRule = "pow2",
    name: str = "weight",
) -> QuantizedTensor:
    """Quantize a weight (default) or activations (``per_token=True``) to NVFP4. Has no gradient.

    x: [..., K] bf16, fp16 or fp32, K a multiple of 16; never modified. Leading dimensions of a
        weight beyond [N, K] are matrices (experts) with a global scale each.
    amax: a shard's full-tensor amax (``weight_amax``), float32 ``x.shape[:-2]``; weights only.
        Below the shard's own it is wrong, and larger values saturate.
    name: what an error message calls the tensor.

    Raises:
        TypeError: ``x`` has another dtype (float64, integers).
        ValueError: K is no multiple of 16; a weight holds NaN or Inf, or a magnitude above
            252 * 2^120 (it could decode to Inf); an option does not apply.
    """
    _check_dtype(x)
    x = x.detach()
    if x.ndim == 0:
        raise ValueError(f"{name}: cannot quantize a scalar, K is the last dimension")
    check_block_aligned(x.shape[-1], f"{name} {list(x.shape)}")
    if per_token:
        if amax is not None or global_scale_rule != "pow2":
            raise ValueError("amax and global_scale_rule are for weights, not for per_token=True")
        return _quantize_tokens(x)
    local_amax = weight_amax(x)
    if amax is not None and amax.shape != local_amax.shape:
        raise ValueError(
            f"{name}: amax must have shape {list(local_amax.shape)}, got {list(amax.shape)}"
        )
    amax = local_amax if amax is None else amax.to(torch.bfloat16).float()
    in_range = (amax >= 0) & (amax <= WEIGHT_AMAX_MAX) & (local_amax <= WEIGHT_AMAX_MAX)
    if not bool(in_range.all()):
        raise ValueError(
            f"{name} holds NaN or Inf, or a magnitude above {WEIGHT_AMAX_MAX:.4g}: its amax is "
            f"{local_amax.flatten().tolist()[:8]}, that of the full tensor "
            f"{amax.flatten().tolist()[:8]}"
        )
    inverse = weight_global_scale_inv(amax, global_scale_rule)
    inverse_row = inverse.reshape(*inverse.shape, *(1,) * min(x.ndim, 2))
    packed, block_scale, global_scale = quantize_blocks(x.to(torch.bfloat16).float(), inverse_row)
    return QuantizedTensor(packed, block_scale, global_scale.reshape(inverse.shape))


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[..., K] values in ``dtype``: (code * block_scale) * global_scale in float32, rounded once.

    A weight quantized with rule ``"pow2"`` is exact in bfloat16.
    """
    return (unscaled_values(q.packed, q.block_scale) * q.row_global_scale).to(dtype)


def fake_quantize(
    x: torch.Tensor,
    *,
    per_token: bool = False,
    amax: torch.Tensor | None = None,
    global_scale_rule: GlobalScaleRule = "pow2",
    name: str = "weight",
) -> torch.Tensor:
    """``dequantize(quantize(x, ...), x.dtype)``: the effective values, same shape and dtype."""
    q = quantize(x, per_token=per_token, amax=amax, global_scale_rule=global_scale_rule, name=name)
    return dequantize(q, x.dtype)


def _tensor_max_over(amax: torch.Tensor) -> torch.Tensor:
    """fl32(2688 / amax). ``2688 / tensor`` would not do: torch computes reciprocal(amax) * 2688."""
    return torch.full_like(amax, TENSOR_MAX) / amax


def _check_dtype(x: torch.Tensor) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"cannot quantize {x.dtype}: allowed are {[str(d) for d in INPUT_DTYPES]}")


def _quantize_tokens(x: torch.Tensor) -> QuantizedTensor:
    values = x.float()
    if values.numel() == 0:
        row_amax = values.new_zeros((*x.shape[:-1], 1))
    else:
        row_amax = values.abs().amax(dim=-1, keepdim=True)
    inverse = activation_global_scale_inv(row_amax)
    packed, block_scale, global_scale = quantize_blocks(values, inverse)
    bad = inverse.isnan()
    nan_scale = torch.full_like(block_scale.view(torch.uint8), E4M3_NAN_BYTE)
    scale_bytes = torch.where(bad, nan_scale, block_scale.view(torch.uint8))
    return QuantizedTensor(
        torch.where(bad, torch.zeros_like(packed), packed),
        scale_bytes.view(torch.float8_e4m3fn),
        global_scale,
    )


def quantize_blocks(
    values: torch.Tensor, global_scale_inv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes and scales under given global scales: ``(packed, block_scale, global_scale)``.

    values: [..., K] fp32; global_scale_inv: fp32, broadcasts over [..., K] with last dimension 1.
    """
    blocks = values.unflatten(-1, (values.shape[-1] // BLOCK_SIZE, BLOCK_SIZE))
    global_scale = 1.0 / global_scale_inv
    block_amax = blocks.abs().amax(dim=-1)
    # Clamp before the cast: torch below 2.12 turns values above 464 into NaN.
    scale = (block_amax * (global_scale_inv * ONE_SIXTH)).clamp(max=E4M3_MAX)
    block_scale = scale.to(torch.float8_e4m3fn)
    decode = block_scale.float() * global_scale
    live = decode != 0
    encode = torch.where(live, 1.0 / torch.where(live, decode, 1.0), 0.0).clamp(max=FLT_MAX)
    codes = encode_e2m1(torch.copysign((blocks * encode.unsqueeze(-1)).abs(), blocks))
    codes = torch.where(live.unsqueeze(-1), codes, 0)
    return pack_codes(codes.flatten(-2)), block_scale, global_scale


assert E2M1_MAX * E4M3_MAX == TENSOR_MAX  # what both global scale rules rest on
