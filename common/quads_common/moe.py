"""The routed experts of an MoE layer in exact W4A4 (or W4A16) semantics, backend ``emulated``.

Rounding points, the same in every backend:

1. x is quantized once per token, before dispatch.
2. GEMM1: ``y = round(acc * (g_row * s_w13[e]) + bias)`` to the model's dtype.
3. The activation function in float32 on y, rounded once to the model's dtype, then quantized.
4. GEMM2: ``(acc * (g_row * s_w2[e]) + bias) * router_weight`` in float32.
5. The top-k terms are summed in float32 in slot order; one final rounding.
"""

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.gemm import ActFormat, check_bias, scaled_operand
from quads_common.packing import unscaled_values

__all__ = ["fused_moe", "local_expert_ids"]


def fused_moe(
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
) -> torch.Tensor:
    """Sum over the top-k of router_weight * w2[e] @ activation(w13[e] @ x).

    x: [T, H] bf16, fp16 or fp32. w13: [E, 2I, H] ([E, I, H] if not gated), rows [gate | up].
    w2: [E, H, I]. topk_weights: [T, k]. topk_ids: [T, k] integers; those of no expert, such as -1,
        skip the slot.
    activation: default SwiGLU. expert_map: [global experts] int32 local id or -1.
    w13_bias: [E, 2I], w2_bias: [E, H]. Returns [T, H] in x's dtype: the local experts' part.

    Raises:
        ValueError: apply_router_weight_on_input with k > 1; shapes that do not fit.
    """
    activation = activation or Activation()
    tokens, top_k = topk_ids.shape
    check_shapes(x, w13, w2, topk_weights, topk_ids, activation, w13_bias, w2_bias)
    ids = local_expert_ids(topk_ids, expert_map)
    slot_weights = topk_weights.float()
    if apply_router_weight_on_input:
        if top_k != 1:
            raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {top_k}")
        x = (x.float() * slot_weights).to(x.dtype)
        slot_weights = torch.ones_like(slot_weights)
    operand, row_scale = scaled_operand(x, act)
    out = torch.zeros((tokens, top_k, x.shape[1]), dtype=torch.float32, device=x.device)
    for expert in range(w13.shape[0]):
        token, slot = torch.where(ids == expert)
        if token.numel() == 0:
            continue
        acc = operand[token] @ unscaled_values(w13.packed[expert], w13.block_scale[expert]).T
        y = acc * (row_scale[token] * w13.global_scale[expert])
        if w13_bias is not None:
            y = y + w13_bias[expert].float()
        hidden, hidden_scale = scaled_operand(activation(y.to(x.dtype)), act)
        acc = hidden @ unscaled_values(w2.packed[expert], w2.block_scale[expert]).T
        y = acc * (hidden_scale * w2.global_scale[expert])
        if w2_bias is not None:
            y = y + w2_bias[expert].float()
        out[token, slot] = y * slot_weights[token, slot].unsqueeze(1)
    return sum_slots(out).to(x.dtype)


def local_expert_ids(topk_ids: torch.Tensor, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Global expert ids [T, k] to local ones; -1 marks skipped slots and experts of other ranks.

    expert_map: [global experts] integers, or None: ids are local. Ids beyond it name no expert.
    """
    if expert_map is None:
        return topk_ids
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < len(expert_map))
    return torch.where(known, expert_map[torch.where(known, ids, 0)].long(), -1)


def sum_slots(slots: torch.Tensor) -> torch.Tensor:
    """[T, k, H] float32 to [T, H], added slot by slot."""
    total = slots[:, 0]
    for slot in range(1, slots.shape[1]):
        total = total + slots[:, slot]
    return total


def check_shapes(
    x: torch.Tensor,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Activation,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
) -> None:
    """Raise ``ValueError`` for arguments of ``fused_moe`` that do not fit together."""
    experts, rows, hidden = w13.shape
    inner = rows // 2 if activation.gated else rows
    if x.ndim != 2 or x.shape[1] != hidden:
        raise ValueError(f"x must be [T, {hidden}], got {list(x.shape)}")
    if tuple(w2.shape) != (experts, hidden, inner):
        raise ValueError(
            f"w13 {list(w13.shape)} with {activation.name} needs w2 {[experts, hidden, inner]}, "
            f"got {list(w2.shape)}"
        )
    if topk_weights.shape != topk_ids.shape or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_weights {list(topk_weights.shape)} and topk_ids {list(topk_ids.shape)} "
            f"must both be [{x.shape[0]}, k]"
        )
    check_bias("w13_bias", w13_bias, (experts, rows))
    check_bias("w2_bias", w2_bias, (experts, hidden))
