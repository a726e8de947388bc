"""Compensated layers on tensor cores: ``compensation.linear`` and ``compensation.moe`` in Triton.

Two forms of one definition (``operands.product``): ``folded``, residual and hot channels of the FP4
weight in the one float16 operand of the plain GEMM (``compensation.fold`` states the error), and
``exact``, one product for each. Hot channels with BF16 columns are a product of their own in both.

As in the plain layers nothing synchronizes with the host and grids depend on shapes only. The
quantizers keep the rows that are sampled (``compensation.staging``).
"""

from dataclasses import replace

import torch

from quads_common.activation import Activation
from quads_common.compensation.moe import Gathering
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.staging import Staging
from quads_common.format import QuantizedTensor
from quads_common.gemm import check_bias
from quads_common.kernels.compensated_gemm import compensated_gemm, exact_config
from quads_common.kernels.compensated_rows import check_lists, compensate_rows
from quads_common.kernels.gemm import GemmConfig, linear_config
from quads_common.kernels.moe import DOWN, GATE_UP, MoeConfig, batch_invariant, moe_config
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.moe import check_shapes

__all__ = [
    "form_config",
    "fused_moe_compensated_hopper",
    "fused_moe_compensated_triton",
    "linear_compensated_triton",
]


def linear_compensated_triton(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    compensation: InputCompensation,
    staging: Staging | None = None,
    exact: bool = False,
    config: GemmConfig | None = None,
) -> torch.Tensor:
    """See ``compensation.linear.linear_compensated``. config: default by the number of rows."""
    if len(weight.shape) != 2 or weight.per_token:
        raise ValueError(f"weight must be one [N, K] matrix, got {list(weight.shape)}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has K = {x.shape[-1]}, the weight has K = {weight.shape[-1]}")
    check_bias("bias", bias, weight.shape[:1])
    rows = torch.atleast_2d(x).flatten(0, -2)
    stacked = QuantizedTensor(
        weight.packed.unsqueeze(0), weight.block_scale.unsqueeze(0), weight.global_scale.reshape(1)
    )
    lists = compensation
    if lists.columns is not None:
        lists = replace(lists, columns=lists.columns.unsqueeze(0))
    y = x.new_empty((rows.shape[0], weight.shape[0]))
    config = form_config(config or linear_config(rows.shape[0]), lists, exact)
    quantized = compensate_rows(rows, lists, exact=exact, staging=staging)
    compensated_gemm(quantized, lists, stacked, y, config=config, bias=bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])


def fused_moe_compensated_triton(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    w13_input: InputCompensation,
    w2_input: InputCompensation,
    gathering: Gathering | None = None,
    activation: Activation | None = None,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    exact: bool = False,
    config: MoeConfig | None = None,
    tiled: bool = False,
) -> torch.Tensor:
    """See ``compensation.moe.fused_moe_compensated``. config: default by the number of tokens.

    tiled: the weights are in the order of ``weight_tiles``.
    """
    activation = activation or Activation()
    gathering = gathering or Gathering()
    tokens, top_k = topk_ids.shape
    check_shapes(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {top_k}")
    if tokens == 0:
        return torch.empty_like(x)
    router = topk_weights.contiguous()
    row_factor = router if apply_router_weight_on_input else None
    routes = Routes(topk_ids, expert_map, w13.shape[0])
    config = config or moe_config(tokens, top_k, w13.shape[0])
    first = form_config(config.gemm1, w13_input, exact)
    second = form_config(config.gemm2, w2_input, exact)
    table = make_table(routes, first.block_m)
    rows = compensate_rows(x, w13_input, exact=exact, row_factor=row_factor, staging=gathering.w13)
    y = x.new_empty((tokens * top_k, w13.shape[1]))
    compensated_gemm(
        rows, w13_input, w13, y, config=first, table=table, top_k=top_k, bias=w13_bias,
        layout=GATE_UP if tiled else None,
    )  # fmt: skip
    rows = compensate_rows(
        y, w2_input, exact=exact, routes=routes, activation=activation, staging=gathering.w2
    )
    if second.block_m != table.block_m:
        table = make_table(routes, second.block_m)
    slots = torch.empty((tokens * top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    compensated_gemm(
        rows, w2_input, w2, slots, config=second, table=table, bias=w2_bias,
        router_weight=None if apply_router_weight_on_input else router,
        layout=DOWN if tiled else None,
    )  # fmt: skip
    return sum_slots_triton(slots, routes, x.dtype)


def fused_moe_compensated_hopper(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    w13_input: InputCompensation,
    w2_input: InputCompensation,
    gathering: Gathering | None = None,
    activation: Activation | None = None,
    expert_map: torch.Tensor | None = None,
    apply_router_weight_on_input: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """See ``compensation.moe.fused_moe_compensated``; w13 and w2 are tiled, as in ``moe``, and so
    are their BF16 columns.

    Few tokens in the folded form run in the kernels of ``cuda/moe.cu``, which quantize GEMM2's
    input themselves; everything else, and counts of BF16 columns that do not fit there, in Triton,
    which reads the same weights.
    """
    from quads_common.kernels import hopper, hopper_columns

    activation = activation or Activation()
    gathering = gathering or Gathering()
    tokens, top_k = topk_ids.shape
    check_shapes(x, w13, w2, topk_weights, topk_ids, activation)
    experts, hidden, inner = w2.shape
    if reason := hopper.why_not_hopper(experts, hidden, inner, activation):
        raise ValueError(f"backend 'hopper' cannot run this layer: {reason}")
    processors = hopper.processors(x.device)
    counts = hopper_columns.column_counts(w13_input, w2_input)
    plan = None
    if not exact and hopper.why_not_hopper(experts, hidden, inner, activation, counts) is None:
        plan = hopper.decode_plan(tokens, top_k, experts, hidden, inner, processors, counts)
    if plan is None or tokens == 0 or x.dtype != torch.bfloat16 or batch_invariant():
        return fused_moe_compensated_triton(
            x, w13, w2, topk_weights, topk_ids, w13_input=w13_input, w2_input=w2_input,
            gathering=gathering, activation=activation, expert_map=expert_map, exact=exact,
            apply_router_weight_on_input=apply_router_weight_on_input, tiled=True,
        )  # fmt: skip
    if apply_router_weight_on_input and top_k != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {top_k}")
    check_lists(w2_input, experts, inner)
    router = topk_weights.float().contiguous()
    routes = Routes(topk_ids, expert_map, experts)
    row_factor = router if apply_router_weight_on_input else None
    # As in ``moe``: overlap with the neighbours pays for the shortest kernels only.
    overlap = plan.form == "few"
    rows = compensate_rows(
        x, w13_input, row_factor=row_factor, staging=gathering.w13, next_may_start=overlap
    )
    assert rows.operand is not None
    mask, bits = w2_input.block_mask, w2_input.hot_bits
    columns = hopper_columns.hot_columns(w13_input, rows.hot, w2_input)
    slots = hopper.decode_experts(
        rows.operand, w13, w2, routes, None if apply_router_weight_on_input else router, plan,
        activation.limit, staging=gathering.w2, columns=columns,
        compensation=hopper.RowCompensation(
            None if mask is None else mask.contiguous(),
            None if bits is None else bits.contiguous(),
            w2_input.alpha,
        ),
    )  # fmt: skip
    return sum_slots_triton(slots, routes, x.dtype, early=overlap)


def form_config(config: GemmConfig, lists: InputCompensation, exact: bool) -> GemmConfig:
    """The tile for a form: the plain one where it is one product."""
    parts = 1
    if exact:
        parts += lists.block_mask is not None
        parts += lists.channels is not None and lists.columns is None
    return config if parts == 1 else exact_config(config, parts)
