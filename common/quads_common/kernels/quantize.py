"""Quantizer of weights on the GPU, byte for byte that of ``quads_common.quantize``.

Weights are written into existing storage in place, without a host synchronization. Engines load
through ``units``, which needs fewer launches.
"""

import math

import torch
import triton  # type: ignore[import-untyped]

from quads_common.format import (
    BLOCK_SIZE,
    GLOBAL_SCALE_RULES,
    GlobalScaleRule,
    QuantizedTensor,
    check_block_aligned,
)
from quads_common.kernels import _quantize
from quads_common.kernels.rows import Tile, best_split, check_dtype, is_wide, quantize_rows
from quads_common.quantize import quantize

__all__ = ["quantize_triton", "quantize_weight_into", "weight_amax_triton"]

# Threads of a program, each of which takes so many blocks.
WEIGHT_THREADS = 128
WEIGHT_CHUNKS = 4


def weight_amax_triton(weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``quads_common.quantize.weight_amax``: float32 ``weight.shape[:-2]``.

    weight: [N, K] or [E, N, K] bf16, fp16 or fp32. out: float32 of the result's shape; receives the
    maximum of what it holds and of the weight, for units that come in several parts.
    """
    x = _matrices(weight)
    shape = weight.shape[:-2]
    if out is None:
        out = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    elif out.shape != shape or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 {list(shape)}, got {_describe(out)}")
    if x.numel():
        _, rows, width = x.shape
        check_block_aligned(width, f"weight {list(weight.shape)}")
        tile = amax_tile(width)
        grid, column_tiles = _weight_grid(x, tile)
        _quantize.weight_amax_kernel[grid](
            x, out.view(torch.int32), x.stride(0), x.stride(1), rows, width, column_tiles,
            ROWS=tile.rows, BLOCKS=tile.blocks, CHUNKS=tile.chunks, num_warps=tile.warps,
            WIDE=is_wide(x), PTX=x.is_cuda, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def quantize_weight_into(
    weight: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    *,
    amax: torch.Tensor | None = None,
    global_scale_rule: GlobalScaleRule = "pow2",
    nonfinite: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write ``quads_common.quantize.quantize(weight)`` into existing storage.

    weight: [N, K] or [E, N, K] bf16, fp16 or fp32. packed: [.., N, K/2] uint8, block_scale:
        [.., N, K/16] float8_e4m3fn, both with contiguous rows; global_scale: [..] float32.
    amax: the full tensors' ``weight_amax`` [..], default: of ``weight``.
    nonfinite: [..] int32, see below; default: a new one.

    Returns ``nonfinite``: 1 for each matrix whose amax is NaN, Inf or out of range, which is then
    not written, or which holds such values although the given amax does not say so; other entries
    keep their value. Nothing is raised: reading it is a host synchronization, which is the caller's
    to make.
    """
    if global_scale_rule not in GLOBAL_SCALE_RULES:
        raise ValueError(
            f"global_scale_rule {global_scale_rule!r} is not one of {list(GLOBAL_SCALE_RULES)}"
        )
    x = _matrices(weight)
    lead, (rows, width) = weight.shape[:-2], weight.shape[-2:]
    check_block_aligned(width, f"weight {list(weight.shape)}")
    _check_storage("packed", packed, torch.uint8, (*lead, rows, width // 2))
    _check_storage(
        "block_scale", block_scale, torch.float8_e4m3fn, (*lead, rows, width // BLOCK_SIZE)
    )
    if amax is None:
        amax = weight_amax_triton(weight)
    if nonfinite is None:
        nonfinite = torch.zeros(lead, dtype=torch.int32, device=weight.device)
    for name, tensor, dtype in (
        ("global_scale", global_scale, torch.float32),
        ("amax", amax, torch.float32),
        ("nonfinite", nonfinite, torch.int32),
    ):
        if tensor.shape != lead or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} {list(lead)}, got {_describe(tensor)}"
            )
    if x.shape[0] == 0:
        return nonfinite
    out = packed.unsqueeze(0) if packed.ndim == 2 else packed
    scale = block_scale.view(torch.uint8)
    scale = scale.unsqueeze(0) if scale.ndim == 2 else scale
    tile = weight_tile(width)
    grid, column_tiles = _weight_grid(x, tile)
    _quantize.quantize_weight_kernel[grid](
        x, amax, out, scale, global_scale, nonfinite,
        x.stride(0), x.stride(1), out.stride(0), out.stride(1), scale.stride(0), scale.stride(1),
        rows, width, column_tiles,
        TE_RULE=global_scale_rule == "te", ROWS=tile.rows, BLOCKS=tile.blocks, CHUNKS=tile.chunks,
        num_warps=tile.warps, WIDE=is_wide(x) and is_wide(out, 8), PTX=x.is_cuda,
        enable_fp_fusion=False,
    )  # fmt: skip
    return nonfinite


def quantize_triton(
    x: torch.Tensor,
    *,
    per_token: bool = False,
    amax: torch.Tensor | None = None,
    global_scale_rule: GlobalScaleRule = "pow2",
    name: str = "weight",
) -> QuantizedTensor:
    """``quads_common.quantize.quantize``: same arguments, results and errors. Has no gradient.

    Of several errors at once it may raise another, and rows of per_token=True are at most
    ``rows.MAX_WIDTH`` long (``ValueError``). For a weight it reads the device once, to raise
    ``ValueError`` on NaN and Inf; loaders use ``quantize_weight_into``.
    """
    check_dtype(x)
    if x.ndim == 0:
        raise ValueError(f"{name}: cannot quantize a scalar, K is the last dimension")
    lead, width = x.shape[:-1], x.shape[-1]
    check_block_aligned(width, f"{name} {list(x.shape)}")
    if per_token:
        if amax is not None or global_scale_rule != "pow2":
            raise ValueError("amax and global_scale_rule are for weights, not for per_token=True")
        rows = x.reshape(math.prod(lead), width)
        q = quantize_rows(rows, packed=True, operand=False).quantized
        assert q is not None
        return QuantizedTensor(
            q.packed.reshape(*lead, width // 2),
            q.block_scale.reshape(*lead, width // BLOCK_SIZE),
            q.global_scale.reshape(*lead, 1),
        )
    return _quantize_weight(x, amax, global_scale_rule, name)


def _quantize_weight(
    x: torch.Tensor, amax: torch.Tensor | None, rule: GlobalScaleRule, name: str
) -> QuantizedTensor:
    """x: [..., K], at least one dimension."""
    lead, width = x.shape[:-1], x.shape[-1]
    if amax is not None and amax.shape != lead[:-1]:
        raise ValueError(f"{name}: amax must have shape {list(lead[:-1])}, got {list(amax.shape)}")
    count, rows = math.prod(lead[:-1]), lead[-1] if lead else 1
    packed = x.new_empty((count, rows, width // 2), dtype=torch.uint8)
    block_scale = x.new_empty((count, rows, width // BLOCK_SIZE), dtype=torch.float8_e4m3fn)
    global_scale = x.new_empty((count,), dtype=torch.float32)
    nonfinite = quantize_weight_into(
        x.reshape(count, rows, width),
        packed,
        block_scale,
        global_scale,
        amax=None if amax is None else amax.to(torch.bfloat16).float().reshape(count),
        global_scale_rule=rule,
    )
    if bool(nonfinite.any()):
        quantize(x, amax=amax, global_scale_rule=rule, name=name)  # raises, with both maxima
        raise AssertionError(f"the kernel refused {name} {list(x.shape)}, the torch code did not")
    return QuantizedTensor(
        packed.reshape(*lead, width // 2),
        block_scale.reshape(*lead, width // BLOCK_SIZE),
        global_scale.reshape(lead[:-1]),
    )


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] or [E, N, K] as [E, N, K] with contiguous rows."""
    check_dtype(weight)
    if weight.ndim not in (2, 3):
        raise ValueError(f"a weight must be [N, K] or [E, N, K], got {list(weight.shape)}")
    x = weight.unsqueeze(0) if weight.ndim == 2 else weight
    return x if x.stride(-1) == 1 else x.contiguous()


def weight_tile(width: int) -> Tile:
    """The tile of the weight kernels, with ``chunks`` tiles of rows below each other."""
    blocks = best_split(width // BLOCK_SIZE, [16, 32])
    return Tile(WEIGHT_THREADS // blocks, blocks, WEIGHT_CHUNKS)


def amax_tile(width: int) -> Tile:
    """As ``weight_tile``, of the kernel that only reads."""
    return weight_tile(width)


def _weight_grid(x: torch.Tensor, tile: Tile) -> tuple[tuple[int, int], int]:
    """The grid, and how many tiles lie side by side."""
    # An empty matrix has a program too, which writes the global scale.
    column_tiles = max(1, triton.cdiv(x.shape[2], tile.blocks * BLOCK_SIZE))
    row_tiles = max(1, triton.cdiv(x.shape[1], tile.rows * tile.chunks))
    return (row_tiles * column_tiles, x.shape[0]), column_tiles


def _check_storage(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} with contiguous rows, got {_describe(tensor)}"
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
