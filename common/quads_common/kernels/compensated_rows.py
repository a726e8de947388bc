"""Quantizer of compensated activations: ``compensation.operands`` and ``fold`` in one pass.

Selections are read from the device by the kernel, so a refresh between two replays of a captured
graph takes effect in the second.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

from quads_common.activation import Activation
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.staging import Staging
from quads_common.format import BLOCK_SIZE, QuantizedTensor
from quads_common.kernels import _compensated
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import (
    PLANE_ALIGNMENT,
    Operand,
    check_rows,
    is_wide,
    row_tile,
)

__all__ = ["CompensatedRows", "Parts", "check_hot_bits", "check_lists", "compensate_rows"]

# Up to so many rows a block for each thread, beyond at most so many: more work and more registers
# for each than the plain quantizer has.
FEW_ROWS = 1024
MAX_CHUNKS = 3


@dataclass(frozen=True)
class Parts:
    """The operands of the exact form, products of which are summed apart.

    values: [rows, P, 8, plane], each part as ``Operand.values``: code * block scale; with RAC that
        of the residual, 0 outside the selected blocks; with splice and the FP4 weight's columns
        the hot values, 0 elsewhere. float16, or with hot values the activations' dtype; exact.
    row_scale: [rows] float32. width: K. rac, hot: which of the parts there are.
    """

    values: torch.Tensor
    row_scale: torch.Tensor
    width: int
    rac: bool
    hot: bool


@dataclass(frozen=True)
class CompensatedRows:
    """What ``compensate_rows`` was asked for; the rest is None.

    operand: of the folded form. parts: of the exact form. hot: [rows, C] values of the hot channels
        for BF16 columns, in x's dtype, 0 where the list has -1.
    quantized, residual: codes and scales; of the residual 0 outside the selected blocks.
    """

    operand: Operand | None = None
    parts: Parts | None = None
    hot: torch.Tensor | None = None
    quantized: QuantizedTensor | None = None
    residual: QuantizedTensor | None = None
    codes: tuple[torch.Tensor, torch.Tensor] | None = None


def compensate_rows(
    x: torch.Tensor,
    compensation: InputCompensation,
    *,
    exact: bool = False,
    packed: bool = False,
    operand: bool = True,
    activation: Activation | None = None,
    row_factor: torch.Tensor | None = None,
    routes: Routes | None = None,
    staging: Staging | None = None,
    next_may_start: bool = False,
) -> CompensatedRows:
    """The operands of rows, with the lists of their experts (``routes``) or those of group 0.

    x, activation, row_factor, routes, next_may_start: as in ``rows.quantize_rows``.
    exact: the parts of two or three products instead of one folded operand. packed: codes and
        scales too. operand: False: these alone, and a list of hot values whatever their columns.
    staging: where sampled rows are kept, as the quantizer sees them.

    Raises:
        ValueError, TypeError: shapes, dtypes or strides that do not fit; BF16 columns, or hot
            values in the exact form, of activations for which these products would not be exact.
    """
    rows, width = check_rows(x, activation, row_factor, routes)
    lists = 1 if routes is None else routes.num_experts
    check_lists(compensation, lists, width)
    if staging is not None:
        top_k = 1 if routes is None else routes.topk_ids.shape[1]
        _check_staging(staging, rows, width, top_k, x.dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    rac = compensation.block_mask is not None
    channels = compensation.channels
    slots = 0 if channels is None else channels.shape[1]
    spliced = slots > 0
    listed = spliced and (compensation.columns is not None or not operand)
    hot_part = spliced and exact and not listed
    if listed and x.dtype != torch.bfloat16:
        what = "BF16 columns (splice_weight 'bf16')" if operand else "spliced channels"
        raise ValueError(f"{what} need bfloat16 inputs, got {x.dtype}")
    if hot_part and x.dtype == torch.float32:
        raise ValueError("float32 activations have no exact 16-bit operand: use the folded form")
    if packed and spliced and not exact and not listed:
        raise ValueError("folded hot channels change the row scale: ask for codes with exact=True")
    if not operand and (exact or not packed):
        raise ValueError("without an operand there are packed codes, and no exact parts")
    count = 1 + (exact and rac) + hot_part if operand else 0
    plane = triton.cdiv(width // 8, PLANE_ALIGNMENT) * PLANE_ALIGNMENT
    values = x.new_empty((rows, count, 8, plane), dtype=x.dtype if hot_part else torch.float16)
    row_scale = x.new_empty((rows,), dtype=torch.float32)
    hot = x.new_empty((rows, slots)) if listed else None
    codes, stored = None, []
    if packed:
        codes = _new_codes(x, 1 + rac, rows, width)
        scales = row_scale.unsqueeze(1)
        stored = [QuantizedTensor(codes[0][i], codes[1][i], scales) for i in range(1 + rac)]
    if rows and width:
        _launch(
            x, compensation, exact, activation, row_factor, routes, width, values, row_scale, hot,
            stored, staging, next_may_start,
        )  # fmt: skip
    else:
        row_scale.fill_(1.0)  # of rows of no elements, as of zero rows
    quantized, residual = (*stored, None, None)[:2]
    parts = Parts(values, row_scale, width, rac, hot_part) if exact else None
    folded = Operand(values.squeeze(1), row_scale, width) if operand and not exact else None
    return CompensatedRows(folded, parts, hot, quantized, residual, codes)


def check_lists(compensation: InputCompensation, lists: int, width: int) -> None:
    """Raise ``ValueError`` for lists that rows of ``width`` in so many groups cannot have."""
    mask, channels = compensation.block_mask, compensation.channels
    if mask is not None:
        allowed = [(1, width // BLOCK_SIZE), (lists, width // BLOCK_SIZE)]
        if tuple(mask.shape) not in allowed or mask.dtype != torch.bool:
            raise ValueError(
                f"block_mask must be bool {' or '.join(map(str, allowed))}, got {mask.dtype} "
                f"{list(mask.shape)}"
            )
    if channels is not None and (
        channels.ndim != 2 or channels.shape[0] not in (1, lists) or channels.dtype != torch.int32
    ):
        raise ValueError(
            f"channels must be int32 [1 or {lists}, C], got {channels.dtype} {list(channels.shape)}"
        )
    check_hot_bits(compensation, width)
    if compensation.columns is not None and channels is None:
        raise ValueError("columns need the channels that they belong to")


def check_hot_bits(compensation: InputCompensation, width: int) -> None:
    """Raise ``ValueError`` where channel lists lack their bits."""
    channels, bits = compensation.channels, compensation.hot_bits
    if channels is None or channels.shape[1] == 0:
        return
    if bits is None:
        raise ValueError("channels need their hot_bits (compensation.operands.channel_bits)")
    wanted = (channels.shape[0], width // BLOCK_SIZE)
    if tuple(bits.shape) != wanted or bits.dtype != torch.int32:
        raise ValueError(
            f"hot_bits must be int32 {list(wanted)}, got {bits.dtype} {list(bits.shape)}"
        )


def _check_staging(staging: Staging, rows: int, width: int, top_k: int, dtype: torch.dtype) -> None:
    sample_map, kept, groups = staging.sample_map, staging.rows, staging.groups
    if sample_map.numel() * top_k != rows or sample_map.dtype != torch.int32:
        raise ValueError(
            f"sample_map must be int32 [{rows // top_k}], got {sample_map.dtype} "
            f"{list(sample_map.shape)}"
        )
    if kept.shape != (groups.numel(), width) or groups.numel() % top_k:
        raise ValueError(
            f"staged rows must be [places * {top_k}, {width}] with as many groups, got "
            f"{list(kept.shape)} and {list(groups.shape)}"
        )
    for name, tensor, wanted in (
        ("sample_map", sample_map, torch.int32),
        ("staged rows", kept, dtype),
        ("staged groups", groups, torch.int32),
    ):
        if tensor.dtype != wanted or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {wanted}, got {tensor.dtype} with strides "
                f"{list(tensor.stride())}"
            )


def _new_codes(
    x: torch.Tensor, parts: int, rows: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    packed = x.new_empty((parts, rows, width // 2), dtype=torch.uint8)
    scale = x.new_empty((parts, rows, width // BLOCK_SIZE), dtype=torch.uint8)
    return packed, scale.view(torch.float8_e4m3fn)


def _launch(
    x: torch.Tensor,
    compensation: InputCompensation,
    exact: bool,
    activation: Activation | None,
    row_factor: torch.Tensor | None,
    routes: Routes | None,
    width: int,
    values: torch.Tensor,
    row_scale: torch.Tensor,
    hot: torch.Tensor | None,
    codes: list[QuantizedTensor],
    staging: Staging | None,
    next_may_start: bool,
) -> None:
    tile = row_tile(x.shape[0], width, FEW_ROWS, MAX_CHUNKS)
    limit = activation.limit if activation is not None else None
    act_alpha, beta = (activation.alpha, activation.beta) if activation else (0.0, 0.0)
    mask, channels, bits = compensation.block_mask, compensation.channels, compensation.hot_bits
    slots = 0 if channels is None else channels.shape[1]
    hot_form = "none"
    if slots:
        hot_form = "list" if hot is not None else "part" if exact else "fold"
    stored = [t for c in codes for t in (c.packed, c.block_scale.view(torch.uint8))]
    _compensated.compensate_rows_kernel[(triton.cdiv(x.shape[0], tile.rows),)](
        x,
        row_factor if row_factor is not None else x,
        mask.contiguous().view(torch.uint8) if mask is not None else x,
        channels.contiguous() if channels is not None else x,
        bits.contiguous() if bits is not None else x,
        values,
        row_scale,
        hot if hot is not None else x,
        *(stored + [x] * 4)[:4],
        *((staging.sample_map, staging.rows, staging.groups) if staging is not None else (x, x, x)),
        *(routes.lookup if routes is not None else (x, x, 0, 0)),
        x.shape[0], x.stride(0), limit or 0.0, act_alpha, beta, compensation.alpha,
        WIDTH=width, PLANE=values.shape[-1], PARTS=values.shape[1],
        ACTIVATION=activation.name if activation is not None else "none",
        HAS_LIMIT=limit is not None,
        HAS_FACTOR=row_factor is not None,
        HAS_IDS=routes is not None,
        HAS_MAP=routes is not None and routes.expert_map is not None,
        RAC=mask is not None, CHANNELS=slots,
        MANY_MASKS=mask is not None and mask.shape[0] > 1,
        MANY_LISTS=channels is not None and channels.shape[0] > 1,
        FOLD_RESIDUAL=not exact, HOT=hot_form, SLOTS=triton.next_power_of_2(max(1, slots)),
        PACKED=bool(codes),
        STAGED=0 if staging is None else 1 if routes is None else routes.topk_ids.shape[1],
        SCALED=compensation.alpha != 1.0,
        ROWS=tile.rows, BLOCKS=tile.blocks, CHUNKS=tile.chunks, num_warps=tile.warps,
        WIDE=is_wide(x) and (staging is None or is_wide(staging.rows)),
        PTX=x.is_cuda and x.dtype != torch.float32,
        NEXT_MAY_START=next_may_start, enable_fp_fusion=False,
    )  # fmt: skip
