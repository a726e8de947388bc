"""The routed experts of an MoE layer on FP4 tensor cores, with RAC and splice.

The launches are those of ``kernels.moe`` with other GEMMs: no host synchronization, grids that
depend on shapes only. The rounding points are those of ``quads_common.moe``; x is quantized once
per token with the layer's lists, the input of w2 with those of its expert.
"""

import torch

from quads_common.activation import Activation
from quads_common.compensation.moe import Gathering
from quads_common.compensation.operands import InputCompensation
from quads_common.format import QuantizedTensor
from quads_common.gemm import ActFormat
from quads_common.kernels.blackwell.gemm import fp4_config, grouped_gemm_fp4
from quads_common.kernels.blackwell.rows import pack_rows
from quads_common.kernels.moe import check_call, fused_moe_triton
from quads_common.kernels.route import Routes, make_table, sum_slots_triton

__all__ = ["fused_moe_blackwell"]


def fused_moe_blackwell(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    w13_input: InputCompensation | None = None,
    w2_input: InputCompensation | None = None,
    gathering: Gathering | None = None,
    activation: Activation | None = None,
    act: ActFormat = "nvfp4",
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
) -> torch.Tensor:
    """See ``quads_common.moe.fused_moe`` and ``compensation.moe.fused_moe_compensated``.

    w13_input: lists of one group; w2_input: of one group per local expert; these and ``gathering``
        are for W4A4 only.
    ``act="bf16"`` is ``fused_moe_triton``: FP4 tensor cores take no unquantized activations.
    """
    activation = activation or Activation()
    if act != "nvfp4":
        if w13_input is not None or w2_input is not None or gathering is not None:
            raise ValueError(f"compensation is for act='nvfp4', not for {act!r}")
        return fused_moe_triton(
            x, w13, w2, topk_weights, topk_ids, activation=activation, act=act,
            expert_map=expert_map, w13_bias=w13_bias, w2_bias=w2_bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
        )  # fmt: skip
    tokens, top_k = topk_ids.shape
    check_call(
        x, w13, w2, topk_weights, topk_ids, activation, act, apply_router_weight_on_input,
        w13_bias, w2_bias,
    )  # fmt: skip
    if tokens == 0:
        return torch.empty_like(x)
    router = topk_weights.contiguous()
    routes = Routes(topk_ids, expert_map, w13.shape[0])
    row_factor = router if apply_router_weight_on_input else None
    w13_input, w2_input = w13_input or InputCompensation(), w2_input or InputCompensation()
    # The tiles of both GEMMs have block_m in common, hence one routing table.
    residual = w13_input.block_mask is not None or w2_input.block_mask is not None
    mean_rows = tokens * top_k / max(1, w13.shape[0])
    first, second = (fp4_config(mean_rows, w.shape[2], residual) for w in (w13, w2))
    table = make_table(routes, first.block_m)
    gathering = gathering or Gathering()
    rows = pack_rows(x, w13_input, row_factor=row_factor, staging=gathering.w13)
    y = x.new_empty((tokens * top_k, w13.shape[1]))
    grouped_gemm_fp4(
        rows, w13, y, config=first, compensation=w13_input, table=table, top_k=top_k,
        bias=w13_bias,
    )  # fmt: skip
    rows = pack_rows(y, w2_input, activation=activation, routes=routes, staging=gathering.w2)
    slots = torch.empty((tokens * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    grouped_gemm_fp4(
        rows, w2, slots, config=second, compensation=w2_input, table=table, bias=w2_bias,
        router_weight=None if apply_router_weight_on_input else router,
    )  # fmt: skip
    return sum_slots_triton(slots, routes, x.dtype)
