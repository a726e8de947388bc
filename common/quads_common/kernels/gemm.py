"""GEMMs with NVFP4 weights on tensor cores from sm_80 on, in exact W4A4 or W4A16 semantics.

Operands are unscaled ``code * block_scale`` in float16 (W4A4), or activations as they are (W4A16);
sums are float32 and global scales touch only them. So results equal ``quads_common.gemm.linear`` up
to the order of summation (``accumulation_bound``). At one configuration a row's result depends on
no other row.
"""

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton  # type: ignore[import-untyped]

from quads_common.format import BLOCK_SIZE, QuantizedTensor
from quads_common.gemm import ACT_FORMATS, ActFormat, check_bias
from quads_common.kernels import _gemm
from quads_common.kernels.route import RoutingTable, check_power_of_two
from quads_common.kernels.rows import Operand, quantize_rows
from quads_common.weight_tiles import TileLayout

__all__ = ["GemmConfig", "batch_invariant", "grouped_gemm", "linear_config", "linear_triton"]

BATCH_INVARIANT_VARIABLE = "VLLM_BATCH_INVARIANT"


@dataclass(frozen=True)
class GemmConfig:
    """Tile of a program: block_m rows of activations, block_n rows of weights, block_k of K.

    block_m, block_n: powers of two from 16 on. block_k: 128 or 256. swap: compute w @ x.T, so that
    weights are the tensor cores' left operand. warps: a power of two. stages: at least 1.

    Raises:
        ValueError: another number.
    """

    block_m: int
    block_n: int
    block_k: int
    swap: bool = True
    warps: int = 4
    stages: int = 3

    def __post_init__(self) -> None:
        if self.block_k not in (128, 256):
            raise ValueError(f"block_k must be 128 or 256, got {self.block_k}")
        for name, least in (("block_m", 16), ("block_n", 16), ("warps", 1)):
            check_power_of_two(name, getattr(self, name), least)
        if self.stages < 1:
            raise ValueError(f"stages must be at least 1, got {self.stages}")


def linear_triton(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    act: ActFormat = "nvfp4",
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """``quads_common.gemm.linear`` on tensor cores. config: default by the number of rows."""
    if len(weight.shape) != 2 or weight.per_token:
        raise ValueError(f"weight must be one [N, K] matrix, got {list(weight.shape)}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has K = {x.shape[-1]}, the weight has K = {weight.shape[-1]}")
    check_bias("bias", bias, weight.shape[:1])
    if act not in ACT_FORMATS:
        raise ValueError(f"act {act!r} is not one of {list(ACT_FORMATS)}")
    rows = torch.atleast_2d(x).flatten(0, -2)
    operand = quantize_rows(rows, quantized=act == "nvfp4").operand
    assert operand is not None
    y = x.new_empty((rows.shape[0], weight.shape[0]))
    stacked = QuantizedTensor(
        weight.packed.unsqueeze(0), weight.block_scale.unsqueeze(0), weight.global_scale.reshape(1)
    )
    grouped_gemm(operand, stacked, y, config=config or linear_config(rows.shape[0]), bias=bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def linear_config(rows: int) -> GemmConfig:
    """Tile for a linear of so many rows."""
    if batch_invariant():
        return GemmConfig(64, 128, 128)
    if rows <= 16:
        return GemmConfig(16, 64, 256)
    if rows <= 32:
        return GemmConfig(32, 64, 256)
    return GemmConfig(64, 128, 128)


@cache
def batch_invariant() -> bool:
    """Whether the engine wants results that depend on no other row: one tile for any number."""
    return os.environ.get(BATCH_INVARIANT_VARIABLE, "0") not in ("", "0")


def grouped_gemm(
    x: Operand,
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
    """y[slot] = round((acc * (row_scale * global_scale[e]) + bias[e]) * router_weight[slot]).

    weight: [E, N, K], contiguous. y: [slots, N], contiguous; written where the table has the slot.
    top_k: slots per row of x. bias: [E, N] or [N]. router_weight: [slots]. Without a table E is 1.
    layout: of tiled weights; None: canonical order.

    Raises:
        ValueError: tensors that do not fit together.
    """
    slots = x.values.shape[0] * top_k
    check_operands(slots, x.width, weight, y, config.block_m, table, bias, router_weight)
    n, width = weight.shape[1:]
    if y.numel() == 0:
        return
    if width == 0:
        write_empty_sums(y, bias, table)
        return
    tiled, word = ("no", torch.int32) if layout is None else (layout.order, torch.int64)
    blocks = triton.cdiv(y.shape[0], config.block_m) if table is None else table.experts.numel()
    nothing = weight.global_scale  # stands for absent arguments, never read
    _gemm.grouped_gemm_kernel[(triton.cdiv(n, config.block_n), blocks)](
        x.values,
        x.row_scale if x.row_scale is not None else nothing,
        weight.packed.view(word),
        weight.block_scale.view(torch.uint8),
        weight.global_scale,
        bias.contiguous() if bias is not None else nothing,
        router_weight if router_weight is not None else nothing,
        y,
        table.slots if table is not None else nothing,
        table.experts if table is not None else nothing,
        y.shape[0], n,
        K=width, PLANE=x.values.shape[-1], TOP_K=top_k, GROUPED=table is not None,
        HAS_ROW_SCALE=x.row_scale is not None, HAS_BIAS=bias is not None,
        HAS_ROUTER=router_weight is not None, FP16=x.values.dtype == torch.float16,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SWAP=config.swap,
        STAGES=config.stages, TILED=tiled, num_warps=config.warps, num_stages=config.stages,
        enable_fp_fusion=False,
    )  # fmt: skip


def write_empty_sums(
    y: torch.Tensor, bias: torch.Tensor | None, table: RoutingTable | None
) -> None:
    """What a GEMM without channels gives: 0, or a linear's bias, in y.

    Raises:
        ValueError: experts without channels that have a bias.
    """
    if bias is None:
        y.zero_()
    elif table is None:
        y.copy_(bias.reshape(-1))
    else:
        raise ValueError(f"experts of K = 0 have a bias {list(bias.shape)}: nothing to compute")


def check_operands(
    slots: int,
    k: int,
    weight: QuantizedTensor,
    y: torch.Tensor,
    block_m: int,
    table: RoutingTable | None,
    bias: torch.Tensor | None,
    router_weight: torch.Tensor | None,
) -> None:
    """Raise ``ValueError`` for arguments of ``grouped_gemm`` that do not fit together.

    slots, k: x has so many rows, each counted ``top_k`` times, of so many elements.
    """
    shape = weight.shape
    if len(shape) != 3 or weight.per_token:
        raise ValueError(f"weight must be [E, N, K] with E global scales, got {list(shape)}")
    experts, n, width = shape
    if table is None and experts != 1:
        raise ValueError(f"a routing table is needed for {experts} experts")
    if table is not None and table.block_m != block_m:
        raise ValueError(f"the table has blocks of {table.block_m}, the tile {block_m}")
    if k != width:
        raise ValueError(f"x has K = {k}, the weights have K = {width}")
    if y.shape != (slots, n):
        raise ValueError(f"y must be {[slots, n]}, got {list(y.shape)}")
    one_row = experts == 1 and bias is not None and bias.ndim == 1
    check_bias("bias", bias, (n,) if one_row else (experts, n))
    if router_weight is not None and router_weight.numel() != slots:
        raise ValueError(f"router_weight must be [{slots}], got {list(router_weight.shape)}")
    for name, tensor in (
        ("packed", weight.packed),
        ("block_scale", weight.block_scale),
        ("global_scale", weight.global_scale),
        ("router_weight", router_weight),
        ("y", y),
    ):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, has strides {list(tensor.stride())}")


assert BLOCK_SIZE == 16  # two int32 words of codes for each block scale
