"""GEMMs of NVFP4 activations and weights on FP4 tensor cores, with RAC and splice.

Codes and E4M3 block scales go to the tensor cores as they are; sums are float32 and global scales
touch only them. So results equal the torch layers up to the order of summation
(``quads_common.gemm.accumulation_bound``), and at one tile a row's result depends on no other row.

RAC's residual is multiplied in the same instructions as the activations themselves, up to the tile
of the last selected block: its price is arithmetic, not bytes of weights. Spliced columns of the
FP4 weight are decoded in registers; bfloat16 columns are read beside it. Lists are read from device
tensors: a refresh changes no captured graph.
"""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

from quads_common.compensation.operands import InputCompensation
from quads_common.format import BLOCK_SIZE, QuantizedTensor
from quads_common.kernels.blackwell import _gemm
from quads_common.kernels.blackwell.rows import PackedRows
from quads_common.kernels.gemm import check_operands
from quads_common.kernels.route import RoutingTable

__all__ = ["Fp4Config", "fp4_config", "grouped_gemm_fp4"]

BLOCK_M = (16, 32, 64, 128)


@dataclass(frozen=True)
class Fp4Config:
    """Tile of a program: block_m rows of activations, block_k of K; always 128 rows of weights.

    block_k: 128 or 256. stages: of the pipeline over K.
    """

    block_m: int
    block_k: int
    warps: int
    stages: int = 3

    def __post_init__(self) -> None:
        if self.block_m not in BLOCK_M or self.block_k not in (128, 256):
            raise ValueError(
                f"block_m must be one of {list(BLOCK_M)} and block_k 128 or 256, got "
                f"{self.block_m} and {self.block_k}"
            )


def fp4_config(rows: float, width: int, residual: bool = False) -> Fp4Config:
    """Tile by the number of rows that share a weight [.., width], with RAC's residual or without.

    The residual doubles the columns of the product. Chosen so that nothing spills; no such GPU was
    at hand to measure on.
    """
    if rows <= 16:
        return Fp4Config(16, 256 if width % 256 == 0 else 128, warps=4)
    if rows <= 32:
        if residual or width % 256:
            return Fp4Config(32, 128, warps=8 if residual else 4)
        return Fp4Config(32, 256, warps=4)
    return Fp4Config(64 if rows <= 64 or residual else 128, 128, warps=8)


def grouped_gemm_fp4(
    x: PackedRows,
    weight: QuantizedTensor,
    y: torch.Tensor,
    *,
    config: Fp4Config,
    compensation: InputCompensation | None = None,
    table: RoutingTable | None = None,
    top_k: int = 1,
    bias: torch.Tensor | None = None,
    router_weight: torch.Tensor | None = None,
) -> None:
    """y[slot] = round((product + bias[e]) * router_weight[slot]), ``operands.product`` in float32.

    weight: [E, N, K], contiguous. y: [slots, N], contiguous; written where the table has the slot.
    compensation: what x was made with; columns [E, N, C]; lists of all rows or per expert.
    top_k: slots per row of x. bias: [E, N] or [N]. router_weight: [slots]. Without a table E is 1.

    Raises:
        ValueError: operands that do not fit each other.
    """
    n, width = weight.shape[1:]
    lists = _present(compensation)
    slots = x.packed.shape[1] * top_k
    check_operands(slots, x.width, weight, y, config.block_m, table, bias, router_weight)
    _check(x, weight, lists)
    if y.numel() == 0:
        return
    if width == 0:
        y.zero_()
        return
    blocks = triton.cdiv(y.shape[0], config.block_m) if table is None else table.experts.numel()
    nothing = weight.global_scale  # stands for absent arguments, never read
    hot, channels = "none", 0
    if x.hot is not None:
        hot, channels = "dequant" if lists.columns is None else "bf16", x.hot.shape[1]
    _gemm.grouped_fp4_kernel[(triton.cdiv(n, _gemm.BLOCK_N.value), blocks)](
        x.packed,
        x.block_scale,
        x.row_scale,
        x.hot if x.hot is not None else nothing,
        weight.packed,
        weight.block_scale,
        weight.global_scale,
        lists.block_mask.view(torch.uint8) if lists.block_mask is not None else nothing,
        lists.channels if lists.channels is not None else nothing,
        lists.columns if lists.columns is not None else nothing,
        bias.contiguous() if bias is not None else nothing,
        router_weight if router_weight is not None else nothing,
        y,
        table.slots if table is not None else nothing,
        table.experts if table is not None else nothing,
        x.packed.shape[1], y.shape[0], n, lists.alpha,
        K=width, CHANNELS=channels, TOP_K=top_k, GROUPED=table is not None,
        MANY_MASKS=lists.block_mask is not None and len(lists.block_mask) > 1,
        MANY_LISTS=lists.channels is not None and len(lists.channels) > 1,
        RESIDUAL=x.has_residual, HOT=hot,
        HAS_BIAS=bias is not None, HAS_ROUTER=router_weight is not None,
        BLOCK_M=config.block_m, BLOCK_K=config.block_k, BLOCK_C=splice_tile(channels, hot),
        PADDED=triton.next_power_of_2(width // BLOCK_SIZE),
        STAGES=config.stages, num_warps=config.warps, num_stages=config.stages,
        enable_fp_fusion=False,
    )  # fmt: skip


def splice_tile(channels: int, hot: str) -> int:
    """Channels of a step of splice's product: gathered columns take many registers."""
    if hot == "bf16":
        return min(64, max(16, triton.next_power_of_2(channels)))
    return 16


def _present(lists: InputCompensation | None) -> InputCompensation:
    """Without lists of no channel."""
    if lists is None or lists.channels is None or lists.channels.shape[1]:
        return lists or InputCompensation()
    return InputCompensation(lists.block_mask, alpha=lists.alpha)


def _check(
    x: PackedRows,
    weight: QuantizedTensor,
    lists: InputCompensation,
) -> None:
    experts, n, _ = weight.shape
    if x.has_residual != (lists.block_mask is not None):
        raise ValueError("a residual and a block mask belong together")
    if (x.hot is None) != (lists.channels is None):
        raise ValueError("hot values and a list of channels belong together")
    for name, value in (("block_mask", lists.block_mask), ("channels", lists.channels)):
        if value is not None and len(value) not in (1, experts):
            raise ValueError(f"{name} has {len(value)} lists: one, or one of each of {experts}")
    if lists.columns is not None:
        expected = (experts, n, 0 if x.hot is None else x.hot.shape[1])
        if tuple(lists.columns.shape) != expected or lists.columns.dtype != torch.bfloat16:
            raise ValueError(
                f"columns must be bf16 {list(expected)}, got {lists.columns.dtype} "
                f"{list(lists.columns.shape)}"
            )
    for name, tensor in (
        ("block_mask", lists.block_mask), ("channels", lists.channels), ("columns", lists.columns),
    ):  # fmt: skip
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, has strides {list(tensor.stride())}")
