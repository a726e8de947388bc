"""The routed experts of an MoE layer on tensor cores: ``quads_common.moe.fused_moe`` on GPUs.

No host synchronization, grids that depend on shapes only, so CUDA graphs can hold the layer. The
rounding points are those of ``quads_common.moe``. Two datapaths:

- Triton, six launches: quantize x; sort the slots by expert; GEMM1; activation and quantization;
  GEMM2 with the router's weights; sum of the top-k.
- ``hopper`` for few tokens: in place of the middle four, one or two kernels of ``cuda/moe.cu``.
  ``hopper.decode_plan`` says for how many; beyond, Triton reads the same tiled weights.

The choice depends on shapes alone. With ``VLLM_BATCH_INVARIANT=1`` both backends are Triton with
one tile for any number of tokens, so that a token's result does not depend on its company.
"""

from dataclasses import dataclass

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.gemm import ACT_FORMATS, ActFormat
from quads_common.kernels.gemm import GemmConfig, batch_invariant, grouped_gemm
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import check_shapes
from quads_common.weight_tiles import TileLayout

__all__ = ["MoeConfig", "fused_moe_hopper", "fused_moe_triton", "moe_config"]

GATE_UP, DOWN = TileLayout(gate_up=True), TileLayout(gate_up=False)


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
    if batch_invariant():
        return MoeConfig(GemmConfig(16, 128, 128), GemmConfig(16, 128, 128))
    rows = tokens * top_k / max(1, num_experts)
    if rows <= 1:
        return MoeConfig(GemmConfig(16, 64, 256), GemmConfig(16, 128, 128))
    if rows <= 12:
        return MoeConfig(GemmConfig(16, 128, 256), GemmConfig(16, 128, 128))
    if rows <= 32:
        return MoeConfig(GemmConfig(32, 128, 256), GemmConfig(32, 128, 128))
    return MoeConfig(GemmConfig(64, 128, 128), GemmConfig(64, 128, 128))


def fused_moe_hopper(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    activation: Activation | None = None,
    act: ActFormat = "nvfp4",
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """See ``quads_common.moe.fused_moe``; w13 and w2 are tiled, and ``why_not_hopper`` is None.

    Other model dtypes than bfloat16 run in Triton for any number of tokens.
    """
    from quads_common.kernels import hopper

    activation = activation or Activation()
    tokens, top_k = topk_ids.shape
    check_call(x, w13, w2, topk_weights, topk_ids, activation, act, apply_router_weight_on_input)
    experts, hidden, inner = w2.shape
    if reason := hopper.why_not_hopper(experts, hidden, inner, activation):
        raise ValueError(f"backend 'hopper' cannot run this layer: {reason}")
    processors = hopper.processors(x.device)
    plan = hopper.decode_plan(tokens, top_k, experts, hidden, inner, processors)
    if plan is None or tokens == 0 or x.dtype != torch.bfloat16 or batch_invariant():
        return fused_moe_triton(
            x, w13, w2, topk_weights, topk_ids, activation=activation, act=act, tiled=True,
            expert_map=expert_map, apply_router_weight_on_input=apply_router_weight_on_input,
        )  # fmt: skip
    router = topk_weights.float().contiguous()
    routes = Routes(topk_ids, expert_map, experts)
    row_factor = router if apply_router_weight_on_input else None
    # Measured: overlap with the neighbours pays for the shortest kernels only.
    overlap = plan.form == "few"
    operand = quantize_rows(
        x, quantized=act == "nvfp4", row_factor=row_factor, next_may_start=overlap
    ).operand
    assert operand is not None
    slot_weights = None if apply_router_weight_on_input else router
    slots = hopper.decode_experts(operand, w13, w2, routes, slot_weights, plan, activation.limit)
    return sum_slots_triton(slots, routes, x.dtype, early=overlap)


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
    tiled: bool = False,
) -> torch.Tensor:
    """See ``quads_common.moe.fused_moe``. config: default by the number of tokens.

    tiled: the weights are in the order of ``weight_tiles``.
    """
    activation = activation or Activation()
    tokens, top_k = topk_ids.shape
    check_call(
        x, w13, w2, topk_weights, topk_ids, activation, act, apply_router_weight_on_input,
        w13_bias, w2_bias,
    )  # fmt: skip
    if tokens == 0:
        return torch.empty_like(x)
    router = topk_weights.contiguous()
    routes = Routes(topk_ids, expert_map, w13.shape[0])
    config = config or moe_config(tokens, top_k, w13.shape[0])
    table = make_table(routes, config.gemm1.block_m)
    quantized = act == "nvfp4"
    row_factor = router if apply_router_weight_on_input else None
    operand = quantize_rows(x, quantized=quantized, row_factor=row_factor).operand
    assert operand is not None
    y = x.new_empty((tokens * top_k, w13.shape[1]))
    grouped_gemm(
        operand, w13, y, config=config.gemm1, table=table, top_k=top_k, bias=w13_bias,
        layout=GATE_UP if tiled else None,
    )  # fmt: skip
    operand = quantize_rows(y, activation=activation, quantized=quantized, routes=routes).operand
    assert operand is not None
    slots = torch.empty((tokens * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    grouped_gemm(
        operand, w2, slots, config=config.gemm2, table=table, bias=w2_bias,
        router_weight=None if apply_router_weight_on_input else router,
        layout=DOWN if tiled else None,
    )  # fmt: skip
    return sum_slots_triton(slots, routes, x.dtype)


def check_call(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    act: str,
    apply_router_weight_on_input: bool,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` for arguments that ``fused_moe`` refuses."""
    check_shapes(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    if act not in ACT_FORMATS:
        raise ValueError(f"act {act!r} is not one of {list(ACT_FORMATS)}")
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {topk_ids.shape[1]}")
