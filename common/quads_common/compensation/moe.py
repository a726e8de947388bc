"""``quads_common.moe.fused_moe`` with compensation, in the exact form of two products.

The rounding points are those of ``quads_common.moe``; only the two products differ
(``operands.product``). x is quantized once per token with the layer's lists, before dispatch; the
input of w2 with the lists of its expert.
"""

from dataclasses import dataclass

import torch

from quads_common.activation import Activation
from quads_common.compensation.operands import (
    InputCompensation,
    Operands,
    compensated_operands,
    product,
)
from quads_common.compensation.staging import Staging, stage
from quads_common.format import QuantizedTensor
from quads_common.moe import check_shapes, local_expert_ids, sum_slots

__all__ = ["Gathering", "fused_moe_compensated"]


@dataclass(frozen=True)
class Gathering:
    """Where a layer keeps the sampled rows of its inputs; None: nowhere. Both maps are the same."""

    w13: Staging | None = None
    w2: Staging | None = None


def fused_moe_compensated(
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
) -> torch.Tensor:
    """Sum over the top-k of router_weight * w2[e] @ activation(w13[e] @ x); W4A4.

    w13_input: lists of one group; w2_input: of one group per local expert. BF16 columns of both are
        per expert, [E, N, C]. The other arguments and the result are those of ``fused_moe``, to
        which it is equal bit for bit without RAC and splice.

    Raises:
        ValueError: as ``fused_moe``.
    """
    activation = activation or Activation()
    gathering = gathering or Gathering()
    check_shapes(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    ids = local_expert_ids(topk_ids, expert_map)
    slot_weights = topk_weights.float()
    if apply_router_weight_on_input:
        if topk_ids.shape[1] != 1:
            raise ValueError(
                f"apply_router_weight_on_input needs top_k = 1, got {topk_ids.shape[1]}"
            )
        x = (x.float() * slot_weights).to(x.dtype)
        slot_weights = torch.ones_like(slot_weights)
    if gathering.w13 is not None:
        stage(gathering.w13, x)
    first = _Gemm(w13, w13_input.columns, w13_bias)
    second = _Gemm(w2, w2_input.columns, w2_bias)
    operands = compensated_operands(x, w13_input)
    out = torch.zeros((*ids.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    hidden = x.new_zeros((*ids.shape, w2.shape[2])) if gathering.w2 is not None else None
    for expert in range(w13.shape[0]):
        token, slot = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        inner = activation(first(operands.rows(token), expert).to(x.dtype))
        if hidden is not None:
            hidden[token, slot] = inner
        y = second(compensated_operands(inner, w2_input, expert), expert)
        out[token, slot] = y * slot_weights[token, slot].unsqueeze(1)
    if gathering.w2 is not None and hidden is not None:
        stage(gathering.w2, hidden, ids)
    return sum_slots(out).to(x.dtype)


@dataclass(frozen=True)
class _Gemm:
    """weight: [E, N, K]. columns: [E, N, C] or None. bias: [E, N] or None."""

    weight: QuantizedTensor
    columns: torch.Tensor | None
    bias: torch.Tensor | None

    def __call__(self, operands: Operands, expert: int) -> torch.Tensor:
        w = self.weight
        matrix = QuantizedTensor(w.packed[expert], w.block_scale[expert], w.global_scale[expert])
        columns = None if self.columns is None else self.columns[expert]
        y = product(operands, matrix, columns)
        return y if self.bias is None else y + self.bias[expert].float()
