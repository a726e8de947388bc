"""GEMMs of what ``compensated_rows`` makes: folded operands, exact parts, BF16 columns.

A folded operand without BF16 columns is one of the plain GEMM. Sums differ from
``operands.product`` by their order only; BF16 columns are added to the scaled accumulator.
"""

import dataclasses

import torch
import triton  # type: ignore[import-untyped]

from quads_common.compensation.operands import InputCompensation
from quads_common.format import QuantizedTensor
from quads_common.kernels import _compensated_gemm
from quads_common.kernels.compensated_rows import CompensatedRows, Parts
from quads_common.kernels.gemm import GemmConfig, check_operands, grouped_gemm, write_empty_sums
from quads_common.kernels.route import RoutingTable
from quads_common.weight_tiles import TileLayout

__all__ = ["compensated_gemm", "exact_config"]

# Rows of all parts of one tile: their accumulators stay in registers.
MAX_ROWS = 64


def exact_config(config: GemmConfig, parts: int) -> GemmConfig:
    """The tile of ``parts`` products in place of one: fewer rows, so that accumulators fit."""
    rows = MAX_ROWS // triton.next_power_of_2(parts)
    return dataclasses.replace(config, block_m=min(config.block_m, rows), swap=True)


def compensated_gemm(
    x: CompensatedRows,
    compensation: InputCompensation,
    weight: QuantizedTensor,
    y: torch.Tensor,
    *,
    config: GemmConfig,
    table: RoutingTable | None = None,
    top_k: int = 1,
    bias: torch.Tensor | None = None,
    router_weight: torch.Tensor | None = None,
    layout: TileLayout | None = None,
) -> None:
    """As ``gemm.grouped_gemm``, for compensated rows. BF16 columns are [E, N, C], in the weight's
    layout.

    Raises:
        ValueError: tensors that do not fit together.
    """
    if x.parts is None and x.hot is None:
        assert x.operand is not None, f"{x=}"
        grouped_gemm(
            x.operand, weight, y, config=config, table=table, top_k=top_k, bias=bias,
            router_weight=router_weight, layout=layout,
        )  # fmt: skip
        return
    source = x.parts if x.parts is not None else x.operand
    assert source is not None and source.row_scale is not None, f"{x=}"
    stored = source.values.shape[1] if x.parts is not None else 1
    parts = triton.next_power_of_2(stored)
    slots = source.values.shape[0] * top_k
    check_operands(slots, source.width, weight, y, config.block_m, table, bias, router_weight)
    experts, n, width = weight.shape
    if parts > 1 and parts * config.block_m > MAX_ROWS:
        raise ValueError(
            f"{parts} parts of {config.block_m} rows are more than {MAX_ROWS}: see exact_config"
        )
    columns = compensation.columns if x.hot is not None else None
    channels = 0
    if x.hot is not None:
        channels = x.hot.shape[1]
        if columns is None or tuple(columns.shape) != (experts, n, channels):
            raise ValueError(
                f"columns must be {[experts, n, channels]}, got "
                f"{None if columns is None else list(columns.shape)}"
            )
        if columns.dtype != torch.bfloat16 or not columns.is_contiguous():
            raise ValueError(f"columns must be contiguous bfloat16, got {columns.dtype}")
    if y.numel() == 0:
        return
    if width == 0:
        write_empty_sums(y, bias, table)
        return
    rac = isinstance(source, Parts) and source.rac
    tiled, word = ("no", torch.int32) if layout is None else (layout.order, torch.int64)
    blocks = triton.cdiv(y.shape[0], config.block_m) if table is None else table.experts.numel()
    nothing = weight.global_scale  # stands for absent arguments, never read
    _compensated_gemm.compensated_gemm_kernel[(triton.cdiv(n, config.block_n), blocks)](
        source.values,
        source.row_scale,
        x.hot if x.hot is not None else nothing,
        weight.packed.view(word),
        weight.block_scale.view(torch.uint8),
        weight.global_scale,
        columns if columns is not None else nothing,
        bias.contiguous() if bias is not None else nothing,
        router_weight if router_weight is not None else nothing,
        y,
        table.slots if table is not None else nothing,
        table.experts if table is not None else nothing,
        y.shape[0], n, compensation.alpha,
        K=width, PLANE=source.values.shape[-1], STORED=stored, PARTS=parts, RAC=rac,
        HOT=isinstance(source, Parts) and source.hot, CHANNELS=channels,
        BLOCK_C=min(64, max(16, triton.next_power_of_2(channels))),
        TOP_K=top_k, GROUPED=table is not None, HAS_BIAS=bias is not None,
        HAS_ROUTER=router_weight is not None, FP16=source.values.dtype == torch.float16,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        STAGES=config.stages, TILED=tiled, num_warps=config.warps, num_stages=config.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
