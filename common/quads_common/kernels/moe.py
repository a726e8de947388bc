"""The routed experts of an MoE layer on tensor cores: ``quads_common.moe.fused_moe`` in Triton.

Six launches, no host synchronization, grids that depend on shapes only, so CUDA graphs can hold the
layer: quantize x; sort the slots by expert; GEMM1; activation and quantization; GEMM2 with the
router's weights; sum of the top-k. The rounding points are those of ``quads_common.moe``.
"""

from dataclasses import dataclass

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.gemm import ACT_FORMATS, ActFormat
from quads_common.kernels.gemm import GemmConfig, grouped_gemm
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import check_shapes

__all__ = ["MoeConfig", "fused_moe_triton", "moe_config"]


@dataclass(frozen=True)
class MoeConfig:
    """Tiles of the two GEMMs; they share block_m, hence one routing table."""

    gemm1: GemmConfig
    gemm2: GemmConfig

    def __post_init__(self) -> None:
        if self.gemm1.block_m != self.gemm2.block_m:
            raise ValueError(f"{self.gemm1.block_m=} and {self.gemm2.block_m=} must be equal")


def moe_config(tokens: int, top_k: int, num_experts: int) -> MoeConfig:
    """Tiles by the mean number of rows of an expert."""
    rows = tokens * top_k / max(1, num_experts)
    if rows <= 1:
        return MoeConfig(GemmConfig(16, 64, 256), GemmConfig(16, 128, 128))
    if rows <= 12:
        return MoeConfig(GemmConfig(16, 128, 256), GemmConfig(16, 128, 128))
    if rows <= 32:
        return MoeConfig(GemmConfig(32, 128, 256), GemmConfig(32, 128, 128))
    return MoeConfig(GemmConfig(64, 128, 128), GemmConfig(64, 128, 128))


def fused_moe_triton(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation | None = None,
    act: ActFormat = "nvfp4",
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    config: MoeConfig | None = None,
) -> torch.Tensor:
    """See ``quads_common.moe.fused_moe``. config: default by the number of tokens."""
    activation = activation or Activation()
    tokens, top_k = topk_ids.shape
    check_shapes(x, w13, w2, topk_weights, topk_ids, activation)
    if act not in ACT_FORMATS:
        raise ValueError(f"act {act!r} is not one of {list(ACT_FORMATS)}")
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {top_k}")
    if tokens == 0:
        return torch.empty_like(x)
    router = topk_weights.contiguous()
    routes = Routes(topk_ids.contiguous(), expert_map, w13.shape[0])
    config = config or moe_config(tokens, top_k, w13.shape[0])
    table = make_table(routes, config.gemm1.block_m)
    quantized = act == "nvfp4"
    row_factor = router if apply_router_weight_on_input else None
    operand = quantize_rows(x, quantized=quantized, row_factor=row_factor).operand
    assert operand is not None
    y = x.new_empty((tokens * top_k, w13.shape[1]))
    grouped_gemm(operand, w13, y, config=config.gemm1, table=table, top_k=top_k, bias=w13_bias)
    operand = quantize_rows(y, activation=activation, quantized=quantized, routes=routes).operand
    assert operand is not None
    slots = torch.empty((tokens * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    grouped_gemm(
        operand, w2, slots, config=config.gemm2, table=table, bias=w2_bias,
        router_weight=None if apply_router_weight_on_input else router,
    )  # fmt: skip
    return sum_slots_triton(slots, routes, x.dtype)
